"""`hfnn.plan` of the random models of convert's fuzzer against real steps: the same bytes."""

import random
import warnings

import convert
import convert_models as models
import pytest
import torch

import hfnn
from hfnn.memory.peak import Live
from hfnn.plan import MODES

# Layers whose bytes depend on values (is there padding, is a mask causal?), of which torch's op keeps less of a fake
# (oneDNN's LSTM, 16 bits on the CPU), that hold gradients of earlier steps, or replace what the model had before; group
# norms, whose kernels take partial sums that a fake does not know (384 bytes, say).
LEFT_OUT = (
    *(("padded",), ("attention", "hand"), ("recurrent",), ("autocast",), ("probe", "retain_grad")),
    *(("buffered", "replaced"), ("group_norm",), ("formula", 1), ("formula", 2), ("formula", 3)),
)


def has_other_strides(layer) -> bool:
    """Whether it is a convolution of transposed inputs, whose results a FakeTensor gives other strides than the CPU."""
    return layer[0] == "moved" and "('conv'" in str(layer)


def drawn(seed):
    """(a function that makes the model, its input), or None"""
    program = convert.draw(random.Random(seed))
    layers = [layer for layer, _ in models.walk(program["model"])]
    if any(layer[:1] in LEFT_OUT or layer[:2] in LEFT_OUT or has_other_strides(layer) for layer in layers):
        return None
    x = torch.randn(models.shape(program)).requires_grad_(program["input_grad"])

    def make():
        torch.manual_seed(0)
        return models.sequential(program["D"], program["model"])

    return make, x


def loss(model, x):
    return model(x).float().square().mean()


def real(make, x, mode):
    """(peak above the model's own bytes, bytes kept for backward) of the second step."""
    model = make()
    MODES[mode](model)
    with Live() as live:
        for _ in range(2):
            model.zero_grad(set_to_none=True)
            x.grad = None
            live.peak = before = live.now
            value = loss(model, x)
            kept = live.now - before - value.untyped_storage().nbytes()
            value.backward()
            del value
    return live.peak, kept


def compared(seed) -> str | None:
    """How a plan differs from a real step, "" if in nothing, None if one of them cannot be."""
    if (found := drawn(seed)) is None:
        return None
    make, x = found
    for mode in ("stock", 'prefer="memory"'):
        try:
            wanted = real(make, x, mode)
            row = hfnn.plan(make(), x, loss=loss, modes=(mode,), device="cpu", optimizer=None).rows[0]
        except (RuntimeError, ValueError):
            return None
        found = None if row.why else (row.peak - row.weights - row.inputs, row.kept_for_backward)
        if found != wanted:
            return f"seed {seed}, {mode}: planned {found or row.why}, real {wanted}"
    return ""


@pytest.mark.parametrize("first", range(0, 60, 30))
def test_random_models(first):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = [compared(seed) for seed in range(first, first + 30)]
    wrong = [each for each in found if each]
    assert not wrong, "\n".join(wrong)
    assert found.count("") >= 8
