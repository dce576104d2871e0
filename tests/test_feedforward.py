"""Feed-forward networks are recognised whatever their parts are called; unprovable ones are left alone."""

import copy
import pickle

import pytest
import torch
from torch import nn

import hfnn
from hfnn.convert import examine, sites
from hfnn.patterns import rewrite
from hfnn.patterns.subclass import is_converted, title

transformers = pytest.importorskip("transformers")
WIDTH, INNER = 64, 160


class Llama(nn.Module):
    """gate, down, up in this order, as in LLaMA's code."""

    def __init__(self, act=None, bias=False):
        super().__init__()
        self.w1, self.w2 = nn.Linear(WIDTH, INNER, bias), nn.Linear(INNER, WIDTH, bias)
        self.w3 = nn.Linear(WIDTH, INNER, bias)
        self.act = nn.SiLU() if act is None else act

    def forward(self, x):
        return self.w2(self.act(self.w1(x)) * self.w3(x))


class Swapped(Llama):
    def forward(self, x):
        return self.w2(self.w1(x) * self.act(self.w3(x)))


class Functional(Llama):
    """Its forward computes the activation itself."""

    def __init__(self):
        super().__init__()
        del self.act

    def forward(self, x):
        return self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.both, self.down, self.act = nn.Linear(WIDTH, 2 * INNER), nn.Linear(INNER, WIDTH + 8), nn.GELU("tanh")
        self.drop, self.norm, self.out = nn.Dropout(0.1), nn.LayerNorm(INNER), nn.Dropout(0.1)

    def forward(self, x):
        hidden, gate = self.both(x).chunk(2, -1)
        return self.out(self.down(self.norm(self.drop(hidden * self.act(gate)))))


class Diffusers(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(WIDTH, 2 * INNER)

    def gelu(self, gate):
        return nn.functional.gelu(gate)

    def forward(self, hidden_states, *args, **kwargs):
        hidden_states, gate = self.proj(hidden_states).chunk(2, dim=-1)
        return hidden_states * self.gelu(gate)


class Timm(nn.Module):
    def __init__(self, act=nn.ReLU):
        super().__init__()
        self.fc1, self.act, self.drop1 = nn.Linear(WIDTH, INNER), act(), nn.Dropout(0.1)
        self.fc2, self.drop2 = nn.Linear(INNER, WIDTH), nn.Dropout(0.1)

    def forward(self, x):
        return self.drop2(self.fc2(self.drop1(self.act(self.fc1(x)))))


class Plain(Timm):
    def __init__(self, act=nn.ReLU):
        super().__init__(act)
        del self.drop1, self.drop2

    def forward(self, x):
        return self.fc2(self.act(self.fc1(x)))


GATED = [Llama, Swapped, Functional, Packed, Diffusers]


def run(model, *args):
    """(output, gradients), with dropout drawn from one seed."""
    torch.manual_seed(5)
    model.zero_grad()
    x = args[0].detach().clone().requires_grad_()
    y = model(x, *args[1:])
    y.square().mean().backward()
    return [y.detach(), x.grad, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def close(ours, theirs):
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * b.abs().max().item())


def gated_runs(model, x):
    """How often hfnn's product ran in one forward."""
    y, names = model(x), []  # in some torch versions a Function's node loses its name with its result
    pending = [y.grad_fn]
    while pending:
        node = pending.pop()
        if node is not None:
            names.append(node.name())
            pending.extend(next_node for next_node, _ in node.next_functions)
    return sum(name.startswith("_Gated") for name in names)


@pytest.mark.parametrize("make", GATED)
def test_gated_networks_are_read_and_computed(make):
    model, x = make().eval(), torch.randn(3, 5, WIDTH)
    own = run(model, x)
    kept = hfnn.memory.saved_bytes(lambda: model(x)).total
    assert gated_runs(model, x) == 0
    hfnn.convert(model, prefer="memory")
    assert is_converted(model) and "glu" in title(model) and gated_runs(model, x) == 1
    close(run(model, x), own)
    assert hfnn.memory.saved_bytes(lambda: model(x)).total < kept
    again = pickle.loads(pickle.dumps(model))
    assert all(map(torch.equal, run(again, x), run(copy.deepcopy(model), x)))
    hfnn.revert(model)
    assert type(model) is make and all(map(torch.equal, run(model, x), own))
    assert not any({"prefer", "recompute", "keep"} & vars(m).keys() for m in model.modules())


def test_readings():
    (_, maps, f), *more = rewrite.read(Packed()).found
    assert (maps, f, more) == ("both", "gelu_tanh", []) and "'gelu_tanh', False" in rewrite.read(Packed()).sources[0]
    assert rewrite.read(Swapped()).found[0][1] == "w3, w1"
    assert (rewrite.read(Functional()).held, rewrite.read(Timm(nn.GELU)).maps) == ((), ("fc1",))
    assert rewrite.recognise(Timm(nn.GELU)) is None  # needs no forward of its own
    for act, f in ((nn.GELU(), "gelu"), (nn.ReLU(), "relu"), (nn.Sigmoid(), "sigmoid")):
        assert rewrite.read(Llama(act)).found[0][2] == f


def lying(change):
    class Lying(Llama):
        forward = change

    return Lying()


def counting(self, x):
    self.calls = getattr(self, "calls", 0) + 1
    return Llama.forward(self, x)


@pytest.mark.parametrize(
    "forward",
    [
        lambda self, x: self.w2(self.act(self.w1(x)) + self.w3(x)),
        lambda self, x: self.w2(self.act(self.w1(x)).detach() * self.w3(x)),
        lambda self, x: self.w2(self.act(self.w1(x)) * self.w3(x)) * (1 if torch.is_grad_enabled() else 2),
        lambda self, x: self.w2(self.act(self.w1(x)) * self.w3(x)[:, :1]),
        lambda self, x: self.w2((self.act(self.w1(x)) * self.w3(x).double()).to(x.dtype)),
        lambda self, x: self.w2(self.act(self.w1(x).double()).to(x) * self.w3(x)).double(),
        counting,
    ],
)
def test_liars_are_left_alone_with_a_reason(forward):
    model, x = lying(forward), torch.randn(4, WIDTH)
    verdict = examine(sites(model)[0])
    assert verdict.room is None and "the parts of a feed-forward network, but" in verdict.why
    own = run(model, x)
    hfnn.convert(model, prefer="memory")
    assert not is_converted(model)
    close(run(model, x)[:1], own[:1])


AROUND = (
    lambda self, x: Llama.forward(self, x) * 1.01,
    lambda self, x: x + Llama.forward(self, x),
    lambda self, x: Llama.forward(self, x) * (2 if self.training else 1),
    lambda self, x: self.w2(self.act(self.w1(self.act(x))) * self.w3(x)),
)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("forward", AROUND)
def test_what_stands_around_a_product_stays(forward, training):
    model, x = lying(forward).train(training), torch.randn(4, WIDTH)
    own = run(model, x)
    hfnn.convert(model, prefer="memory")
    assert is_converted(model) and gated_runs(model, x) == 1
    close(run(model, x), own)


def test_activations_that_are_none_of_ours():
    model = Llama(nn.Tanh())
    assert rewrite.recognise(model) is None
    hfnn.convert(model)
    assert type(model) is Llama


def test_the_proof_moves_nothing():
    class Unproved(Llama):
        """A class that no other test has proved."""

    model, calls = Unproved(), []
    for part in (model.w1, model.act):
        part.register_forward_hook(lambda *_: calls.append(1))
    state, weights = torch.get_rng_state(), copy.deepcopy(model.state_dict())
    with torch.no_grad(), torch.autocast("cpu"):
        assert rewrite.recognise(model) is not None
    assert not calls and torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(weights[name], p) for name, p in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_hooks_see_what_they_saw():
    """Hooks on the maps fire either way; one on the activation restores the class's own forward."""
    model, x, seen = hfnn.convert(Llama(), prefer="memory"), torch.randn(4, WIDTH), []
    for name, part in model.named_children():
        handle = part.register_forward_hook(lambda *_, name=name: seen.append(name))
    model(x)
    assert seen == ["w1", "act", "w3", "w2"] and gated_runs(model, x) == 0
    handle.remove()
    assert gated_runs(model, x) == 1
    model.act = nn.Tanh()
    assert torch.equal(model(x), Llama.forward(model, x))


class Lora(nn.Module):
    """A linear map with a low-rank addition, named like PEFT's."""

    def __init__(self, base):
        super().__init__()
        self.base_layer, self.in_features, self.out_features = base, base.in_features, base.out_features
        self.a, self.b = nn.Linear(WIDTH, 4, False), nn.Linear(4, base.out_features, False)

    def forward(self, x):
        return self.base_layer(x) + self.b(self.a(x))


def test_parts_of_other_classes_are_called():
    model, x = Llama(), torch.randn(4, WIDTH)
    model.w1, model.w3 = Lora(model.w1), Lora(model.w3)
    own = run(model, x)
    hfnn.convert(model, prefer="memory")
    assert gated_runs(model, x) == 1
    close(run(model, x), own)


def test_relu_before_a_product_keeps_what_that_keeps():
    model, x = Plain(), torch.randn(64, WIDTH)
    own = run(model, x)
    kept = hfnn.memory.saved_bytes(lambda: model(x)).total
    hfnn.convert(model, prefer="memory")
    assert model.act.keep == "output" and type(model) is Plain
    assert hfnn.memory.saved_bytes(lambda: model(x)).total == kept
    close(run(model, x), own)
    assert "keep" not in vars(hfnn.revert(model).act)


def test_relu_and_dropout_are_one():
    model, x = Timm(), torch.randn(64, WIDTH)
    model.drop2.p = 0.0
    hfnn.convert(model, prefer="memory")
    assert title(model) == "hfnn relu_dropout of fc1"
    # The input, and what the second map keeps.
    assert hfnn.memory.saved_bytes(lambda: model(x)).total == 4 * 64 * (WIDTH + INNER)
    y = run(model.eval(), x)
    close(y, run(hfnn.revert(model), x))


def test_its_own_code_runs_under_functorch():
    """It may have more ops than its definition; a result that is a view is written to in another way."""

    class Scaled(Timm):
        def forward(self, x):
            return super().forward(x) * 1.0

    model, names = Scaled(), []

    def loss(x):
        y = model(x)
        names.append(y.grad_fn.name())
        return y.sum()

    model.drop1.p = model.drop2.p = 0.0
    for _ in range(2):
        torch.func.grad(loss)(torch.randn(2, 3, WIDTH))
        hfnn.convert(model, prefer="memory")
    assert title(model).startswith("hfnn relu_dropout") and names == ["MulBackward0"] * 2


@pytest.mark.parametrize("make", [Llama, Packed, lambda: Plain(nn.GELU)])
def test_recompute_changes_bytes_and_no_bit(make):
    model, x = make().eval(), torch.randn(8, WIDTH, requires_grad=True)
    kept, results = {}, {}
    for recompute in (None, "gemm", None):
        hfnn.convert(model, prefer="memory", recompute=recompute)
        kept[recompute] = hfnn.memory.saved_bytes(lambda: model(x)).total
        results[recompute] = run(model, x)
        assert any(getattr(m, "recompute", False) for m in model.modules()) == (recompute == "gemm")
    first = 2 if make in (Llama, Packed) else 1
    assert kept[None] - kept["gemm"] == 4 * 8 * INNER * first
    assert all(map(torch.equal, results[None], results["gemm"]))
    hfnn.revert(hfnn.convert(model, recompute="gemm"))
    assert not any(getattr(m, "recompute", False) for m in model.modules())


def test_recompute_is_validated():
    with pytest.raises(ValueError, match="recompute='all': choose one of None, 'gemm'"):
        hfnn.convert(Llama(), recompute="all")


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu", "sigmoid", "quick_gelu"])
def test_gated_mlp(activation):
    model, x = hfnn.GatedMLP(WIDTH, INNER, 40, activation), torch.randn(3, WIDTH)
    model.prefer = "memory"
    gate, up = (x @ part.weight.t() for part in (model.gate_proj, model.up_proj))
    want = hfnn.ops.gated.GATES[activation].reference(gate) * up @ model.down_proj.weight.t()
    torch.testing.assert_close(model(x), want)
    assert gated_runs(model, x) == 1 and list(model.state_dict()) == [
        f"{n}_proj.weight" for n in ("gate", "up", "down")
    ]


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu"])
@pytest.mark.parametrize("p", [0.0, 0.25])
def test_mlp(activation, p):
    model, x = hfnn.MLP(WIDTH, INNER, activation=activation, dropout=p), torch.randn(50, WIDTH)
    hfnn.convert(model, prefer="memory")
    assert model.prefer == "memory"
    seen = []
    model.fc2.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach()))
    f = {"silu": nn.SiLU(), "gelu": nn.GELU(), "gelu_tanh": nn.GELU("tanh"), "relu": nn.ReLU()}[activation]
    model(x), model.eval()(x)
    h = f(model.fc1(x)).detach()
    torch.testing.assert_close(seen[1], h)
    kept = seen[0] != 0
    torch.testing.assert_close(seen[0], h * kept / (1 - p))
    assert abs(1 - kept[h != 0].float().mean() - p) < 0.03
    assert type(hfnn.revert(model).fc1) is nn.Linear and "prefer" not in vars(model)


def test_own_networks_recompute():
    x = torch.randn(16, WIDTH, requires_grad=True)
    for model, first in ((hfnn.MLP(WIDTH, INNER), 1), (hfnn.GatedMLP(WIDTH, INNER), 2)):
        kept = []
        for recompute in (None, "gemm"):
            hfnn.convert(model, prefer="memory", recompute=recompute)
            kept.append(hfnn.memory.saved_bytes(lambda model=model: model(x)).total)
        assert kept[0] - kept[1] == 4 * 16 * INNER * first


def test_own_networks_say_what_is_wrong():
    with pytest.raises(ValueError, match="activation='selu': choose one of 'gelu'"):
        hfnn.MLP(8, 16, activation="selu")
    with pytest.raises(ValueError, match="dropout=2: a probability"):
        hfnn.GatedMLP(8, 16, dropout=2)
    assert repr(hfnn.MLP(8, 16)).startswith("MLP(\n  activation='gelu', dropout=0")


def models():
    same = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 50}
    same["intermediate_size"] = 144
    t = transformers
    yield "llama", t.LlamaModel, t.LlamaConfig(**same, num_key_value_heads=2), "hfnn swiglu of gate_proj, up_proj"
    yield "qwen2", t.Qwen2Model, t.Qwen2Config(**same, num_key_value_heads=2), "hfnn swiglu of gate_proj, up_proj"
    gemma = t.GemmaConfig(**same, num_key_value_heads=2, head_dim=16)
    yield "gemma", t.GemmaModel, gemma, "hfnn geglu of gate_proj, up_proj"
    yield "phi3", t.Phi3Model, t.Phi3Config(**same, pad_token_id=0, eos_token_id=1), "hfnn swiglu of gate_up_proj"
    t5 = {"d_model": 64, "d_kv": 16, "d_ff": 144, "num_layers": 2, "num_heads": 4, "vocab_size": 50}
    yield "t5 1.1", t.T5EncoderModel, t.T5Config(**t5, feed_forward_proj="gated-gelu"), "hfnn geglu of wi_0, wi_1"
    yield "t5", t.T5EncoderModel, t.T5Config(**t5), "hfnn relu_dropout of wi"


@pytest.mark.parametrize("cls, config, becomes", [pytest.param(*m[1:], id=m[0]) for m in models()])
def test_models(cls, config, becomes):
    torch.manual_seed(0)
    model, ids = cls(config).eval(), torch.randint(0, 50, (2, 16))
    model.config.use_cache = False
    weights = torch.randn(2, 16, 64)

    def step():
        model.zero_grad()
        y = model(input_ids=ids).last_hidden_state
        (y * weights).sum().backward()
        return [y.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

    own = step()
    hfnn.convert(model, prefer="memory", recompute="gemm")
    assert [title(m) for m in model.modules() if is_converted(m)].count(becomes) == 2
    close(step(), own)
    assert all(map(torch.equal, own, (hfnn.revert(model), step())[1]))
