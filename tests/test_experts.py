"""Mixtures of experts: recognised, run in every way that transformers offers, and otherwise left alone."""

import pytest
import torch

import hfnn
from hfnn.patterns import experts
from hfnn.patterns.probe import Refusal
from hfnn.patterns.subclass import is_converted, title

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize("how", ["eager", "grouped_mm", "batched_mm"])
def test_mixtures_of_experts(how):
    config = transformers.MixtralConfig(
        hidden_size=64, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, vocab_size=50,
        intermediate_size=144, num_local_experts=4,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.MixtralModel._from_config(config, experts_implementation=how)
    model.config.use_cache = False
    ids = torch.randint(0, 50, (2, 32))
    weights = torch.randn(2, 32, 64)
    step = lambda: model(input_ids=ids).last_hidden_state * weights  # noqa: E731

    def grads():
        return torch.autograd.grad(step().sum(), list(model.parameters()))

    own, kept = grads(), hfnn.memory.saved_bytes(step).total
    hfnn.convert(model, only="*experts", prefer="memory")
    assert "hfnn swiglu of experts" in [title(m) for m in model.modules() if is_converted(m)]
    for a, b in zip(grads(), own, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * b.abs().max().item())
    # 64 tokens to 2 experts each. torch keeps f(gate) besides the packed product and its result. Where hfnn runs the
    # products, that result and the experts' rows are saved, too.
    less = 144 if how == "batched_mm" else 2 * 144 + 64
    assert kept - hfnn.memory.saved_bytes(step).total >= 4 * 64 * 2 * less
    assert all(map(torch.equal, own, (hfnn.revert(model), grads())[1]))


@pytest.mark.parametrize(
    "change, reason",
    [(lambda x: x * 0.5, "its product is off by"), (lambda x: x.clamp(max=1e3), "its forward calls clamp")],
)
def test_experts_with_a_gate_of_their_own_are_left_alone(change, reason):
    config = transformers.MixtralConfig(hidden_size=64, num_hidden_layers=1, num_local_experts=4, intermediate_size=96)
    module = transformers.models.mixtral.modeling_mixtral.MixtralExperts(config)

    class Changed(type(module)):
        def _apply_gate(self, gate_up_out):
            return super()._apply_gate(change(gate_up_out))

    assert isinstance(experts.recognise(module), experts.Experts)
    module.__class__ = Changed
    why = experts.recognise(module)
    assert isinstance(why, Refusal) and reason in str(why)
