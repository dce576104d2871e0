"""What a proof does not read of its module: subclasses of parts, parts added later, names of the forward's file."""

import copy

import pytest
import torch
from torch import nn

import hfnn
from hfnn.patterns.subclass import is_converted

from .test_proof_limits import INNER, WIDTH, Norm, check_same


class SwishBeta(nn.SiLU):
    def forward(self, x):
        return x * (2 * x).sigmoid()


class Tripled(nn.SiLU):
    def __call__(self, x):
        return 3 * super().__call__(x)


class Identity(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx, dy):
        return dy


class Surrogate(nn.ReLU):
    """Another gradient than relu's."""

    def forward(self, x):
        return Identity.apply(x)


class Named(nn.SiLU):
    """Inherits all."""


class Parts(nn.Module):
    """A gated network with parts that may be missing."""

    def __init__(self, act):
        super().__init__()
        self.act, self.drop = act, nn.Dropout(0.0)
        self.gate, self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x):
        y = self.down(self.between(self.act(self.gate(x)) * self.up(x)))
        return self.after(y, x)

    def between(self, h):
        return h if self.drop is None else self.drop(h)

    def after(self, y, x):
        adapter = getattr(self, "adapter", None)
        return y if adapter is None else y + adapter(x)


class Two(nn.Module):
    """fc2(drop(relu(fc1(x))))"""

    def __init__(self, act):
        super().__init__()
        self.fc1, self.act, self.drop, self.fc2 = nn.Linear(WIDTH, INNER), act, nn.Dropout(0.0), nn.Linear(INNER, WIDTH)

    def forward(self, x):
        h = self.act(self.fc1(x))
        return self.fc2(h if self.drop is None else self.drop(h))


@pytest.mark.parametrize("act", [SwishBeta, Tripled, Surrogate, Named])
def test_a_subclass_of_torchs_activation(act):
    """After another module of the class was proved with torch's."""
    torch.manual_seed(0)
    cls, torchs = (Two, nn.ReLU) if act is Surrogate else (Parts, nn.SiLU)
    stock = nn.Sequential(cls(torchs()), cls(act()))
    ours = hfnn.convert(copy.deepcopy(stock), prefer="memory")
    assert is_converted(ours[0]) and is_converted(ours[1]) == (act is Named)
    check_same(stock, ours, torch.randn(6, WIDTH))


ADAPTER = nn.Linear(WIDTH, WIDTH)
PART_CHANGES = {
    "another activation": lambda m: setattr(m, "act", SwishBeta()),
    "a call of its own": lambda m: setattr(m, "act", Tripled()),
    "an adapter": lambda m: m.add_module("adapter", ADAPTER),
    "a registered adapter": lambda m: m.register_module("adapter", ADAPTER),
    "an adapter, set": lambda m: setattr(m, "adapter", ADAPTER),
    "no dropout": lambda m: setattr(m, "drop", None),
    "no activation": lambda m: setattr(m, "act", None),
    "activation deleted": lambda m: delattr(m, "act"),
    "a method for the activation": lambda m: setattr(m.act, "forward", torch.tanh),
}


@pytest.mark.parametrize("change", PART_CHANGES)
@pytest.mark.parametrize("cls, act", [(Parts, nn.SiLU), (Parts, Named), (Two, nn.ReLU)])
def test_parts_that_change_later(cls, act, change):
    torch.manual_seed(0)
    stock = cls(act())
    ours = hfnn.convert(copy.deepcopy(stock), prefer="memory")
    assert is_converted(ours)
    x = torch.randn(6, WIDTH)
    check_same(stock, ours, x)
    for module in (stock, ours):
        PART_CHANGES[change](module)
    check_same(stock, ours, x)


class BiasedNorm(Norm):
    """Reads a parameter that may be missing, and an attribute that may come later."""

    def __init__(self):
        super().__init__()
        self.register_parameter("bias", None)

    def forward(self, x):
        y = super().forward(x)
        y = y if self.bias is None else y + self.bias
        return y * self.scale if hasattr(self, "scale") else y


@pytest.mark.parametrize("register", ["register_buffer", "register_parameter", "__setattr__"])
@pytest.mark.parametrize("name", ["bias", "scale"])
def test_parameters_and_buffers_that_come_later(name, register):
    torch.manual_seed(0)
    stock = BiasedNorm()
    ours = hfnn.convert(copy.deepcopy(stock), prefer="memory")
    assert is_converted(ours)
    if (name, register) == ("bias", "register_buffer"):
        for module in (stock, ours):
            del module.bias
    for module in (stock, ours):
        getattr(module, register)(name, nn.Parameter(torch.full((WIDTH,), 2.0)))
    check_same(stock, ours, torch.randn(6, WIDTH))
