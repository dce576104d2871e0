"""convert and revert leave nothing behind: no classes, no side effects of proofs, no changed attributes."""

import gc
import weakref

import pytest
import torch
from torch import nn

import hfnn


def _parametrised():
    class Half(nn.Module):
        def forward(self, weight):
            return weight * 0.5

    module = nn.Conv2d(4, 4, 3)
    nn.utils.parametrize.register_parametrization(module, "weight", Half())
    return module


def _made_here():
    big = nn.Parameter(torch.zeros(8))

    class LocalRMSNorm(nn.Module):
        held = big

        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(64))

        def forward(self, x):
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight

    class Own(nn.Module):
        held = big

        def forward(self, x):
            return nn.functional.dropout(x, 0.5, self.training)

    return nn.Sequential(LocalRMSNorm(), Own())


@pytest.mark.parametrize("make", [_parametrised, _made_here])
def test_classes_go_with_their_modules(make):
    """A class made at run time is freed with its modules, and with it what it references."""
    module = make()
    parts = [x for part in module.modules() for x in (part, getattr(part, "held", part), type(part))]
    refs = [weakref.ref(x) for x in parts if not isinstance(x, type) or x.__module__ == __name__]
    del parts
    hfnn.convert(nn.Sequential(module))
    assert hfnn.report(module).rows
    module(torch.randn(2, 4, 8, 64))
    del module
    gc.collect()
    assert refs and not [ref() for ref in refs if ref() is not None]


class Gated(nn.Module):
    """A network that convert recognises. It has attributes named like those that convert sets on other modules."""

    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(32, 32, bias=False) for _ in range(3))
        self.act, self.keep, self.recompute = nn.SiLU(), 0.9, "always"

    def forward(self, x):
        return self.down(self.act(self.gate(x)) * self.up(x)) * (self.keep / 0.9)


class Recomputing(nn.Linear):
    recompute = False

    def __init__(self):
        super().__init__(8, 8)
        self.recompute = True


class Keeping(nn.ReLU):
    keep = "bits"


@pytest.mark.parametrize("make", [Gated, Recomputing, Keeping, lambda: nn.Sequential(Gated(), Keeping(), nn.ReLU())])
def test_attributes_of_the_user(make):
    """They are unchanged on converted modules and after revert."""
    module = make()
    before = [(type(part), dict(vars(part))) for part in module.modules()]
    for recompute in (None, "gemm", None):
        hfnn.convert(module, prefer="memory", recompute=recompute)
        for part, (_, attributes) in zip(module.modules(), before, strict=True):
            assert attributes.items() <= vars(part).items()
    hfnn.revert(module)
    assert [(type(part), vars(part)) for part in module.modules()] == before


def test_refused_for_an_attribute():
    (row,) = hfnn.report(Recomputing()).rows
    assert "an attribute named recompute" in row.why
    (row,) = hfnn.report(Keeping()).rows
    assert "an attribute named keep" in row.why


@pytest.mark.parametrize("make", [lambda: nn.LayerNorm(8), lambda: nn.Linear(8, 8), nn.GELU, nn.ReLU, nn.GLU])
def test_revert_under_a_wrapped_forward(make):
    """A wrapper that a user put around forward later stays in place after revert and still works."""
    model, x = nn.Sequential(make()), torch.randn(2, 4, 8)
    wanted = model(x) * 0.5
    hfnn.convert(model, prefer="memory")
    before = model[0].forward
    model[0].forward = lambda *args: before(*args) * 0.5
    hfnn.revert(model)
    assert type(model[0]).__module__.startswith("torch.")
    torch.testing.assert_close(model(x), wanted)


def test_revert_under_a_wrapped_forward_of_a_look_alike():
    model = hfnn.convert(nn.Sequential(Gated()))
    before = model[0].forward
    model[0].forward = lambda x: before(x)
    x = torch.randn(3, model[0].up.in_features)
    hfnn.revert(model)
    assert not hfnn.report(model).swapped and model(x).equal(type(model[0]).forward(model[0], x))
    del model[0].forward
    assert "forward" not in vars(model[0]) and model(x).equal(type(model[0]).forward(model[0], x))
