"""What a proof does not read of its module: subclasses of parts, parts added later, names of the forward's file."""

import copy
import dataclasses
import gc
import pickle
import weakref
from types import ModuleType

import pytest
import torch
from torch import nn

import hfnn
from hfnn.core.holder import like_of
from hfnn.patterns.subclass import is_converted

from .test_proof_limits import INNER, WIDTH, Gated, Norm, check_same


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


SCALE, SEEN, FLAGS, TUPLE, COUNT = 1.0, [], {"on": False}, (1.0, [2.0]), 0
SETTINGS = ModuleType("settings")
SETTINGS.scale = 1.0


class Globals:
    scale = 1.0


def half(x):
    return x * SCALE * 0.5


def of_scale(x):
    return x * SCALE


def of_helper(x):
    return half(x) * 2


def of_class(x):
    return x * Globals.scale


def of_module(x):
    return x * SETTINGS.scale


def of_later(x):
    return x * LATER if "LATER" in globals() else x  # noqa: F821


def of_list(x):
    SEEN.append(1)
    return x


def of_flag(x):
    return x * 2 if FLAGS["on"] else x


def of_tuple(x):
    return x * TUPLE[0]


def counts(x):
    global COUNT
    COUNT += 1
    return x


def counts_of_class(x):
    Globals.count = 1
    return x


def enclosed():
    scale = 1.0

    def of_enclosed(x):
        return x * scale

    def assign(value):
        nonlocal scale
        scale = value

    return of_enclosed, assign


of_enclosed, assign = enclosed()
# function of a forward -> (whether its module is proved, what changes later)
OUTSIDE = {
    of_scale: (True, lambda patch: patch.setitem(globals(), "SCALE", 2.0)),
    of_helper: (True, lambda patch: patch.setitem(globals(), "half", lambda x: x * 0)),
    half: (False, lambda patch: None),
    of_class: (True, lambda patch: patch.setattr(Globals, "scale", 2.0)),
    of_module: (True, lambda patch: patch.setattr(SETTINGS, "scale", 2.0)),
    of_later: (True, lambda patch: patch.setitem(globals(), "LATER", 2.0)),
    of_enclosed: (True, lambda patch: assign(2.0)),
    of_list: (False, lambda patch: None),
    of_flag: (False, lambda patch: patch.setitem(FLAGS, "on", True)),
    of_tuple: (False, lambda patch: None),
    counts: (False, lambda patch: None),
    counts_of_class: (False, lambda patch: None),
}


class Hooked(nn.Module):
    """Calls a function of the file; in a class of its own for each."""

    def __init_subclass__(cls, function, base):
        own = base.forward

        def forward(self, x):
            return function(own(self, x))

        cls.forward = forward


def hooked(function, base):
    return type(base)("Norm", (Hooked, base), {}, function=function, base=base)


@pytest.mark.parametrize("base", [Norm, Gated], ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("function", OUTSIDE, ids=lambda f: f.__name__)
def test_names_outside_of_the_module(function, base, monkeypatch):
    torch.manual_seed(0)
    proved, change = OUTSIDE[function]
    stock = hooked(function, base)()
    ours = hfnn.convert(copy.deepcopy(stock), prefer="memory")
    assert (like_of(ours) is not None and "inside" not in str(like_of(ours))) == (
        proved or (function is half and base is Gated)
    )  # the rest of a graph may scale
    x = torch.randn(6, WIDTH)
    with monkeypatch.context() as patch:
        for _ in range(2):
            SEEN.clear()
            check_same(stock, ours, x)
            assert len(SEEN) in (0, 2)
            change(patch)
        check_same(stock, hfnn.convert(copy.deepcopy(stock), prefer="memory"), x)
        check_same(stock, hfnn.convert(ours, prefer="memory"), x)
    assign(1.0)


class Scheduled:
    def __init__(self):
        self.scale = 1.0

    def __call__(self):
        return self.scale


class ByDefault:
    scale = 1.0


@dataclasses.dataclass(slots=True)
class Slots:
    scale: float = 1.0


HELD = {
    "callable": (Scheduled, lambda held: held(), lambda held: setattr(held, "scale", 2.0)),
    "a default of its class": (ByDefault, lambda held: held.scale, lambda held: setattr(held, "scale", 2.0)),
    "slots": (Slots, lambda held: held.scale, lambda held: setattr(held, "scale", 2.0)),
    "array": (lambda: bytearray(b"1"), lambda held: float(held), lambda held: held.__setitem__(0, ord("2"))),
    "list": (lambda: [Scheduled()], lambda held: held[0].scale, lambda held: setattr(held[0], "scale", 2.0)),
    "dict": (lambda: {"a": Scheduled()}, lambda held: held["a"]() * 1, lambda held: setattr(held["a"], "scale", 2.0)),
    "method": (lambda: Scheduled().__call__, lambda held: held(), lambda held: setattr(held.__self__, "scale", 2.0)),
}


class HoldingNorm(Norm):
    def __init__(self, kind):
        super().__init__()
        self.kind, self.held = kind, HELD[kind][0]()

    def forward(self, x):
        return super().forward(x) * self.read(self.held)

    def read(self, held):
        if self.kind in ("callable", "method"):
            return held()
        if self.kind == "array":
            return float(held)
        return (held[0] if self.kind == "list" else held["a"] if self.kind == "dict" else held).scale


@pytest.mark.parametrize("kind", HELD)
def test_values_that_change_in_place(kind):
    torch.manual_seed(0)
    stock = HoldingNorm(kind)
    ours = hfnn.convert(copy.deepcopy(stock), prefer="memory")
    assert is_converted(ours) == (kind in ("callable", "a default of its class"))
    x = torch.randn(6, WIDTH)
    check_same(stock, ours, x)
    for module in (stock, ours):
        HELD[kind][2](module.held)
    check_same(stock, ours, x)


class ScaledNorm(Norm):
    def forward(self, x):
        return super().forward(x) * SCALE


def test_a_module_that_reads_globals_is_copied_pickled_and_collected():
    ours = hfnn.convert(ScaledNorm(), prefer="memory")
    for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert type(other) is type(ours)
    cls = hooked(of_enclosed, Norm)
    module, gone = hfnn.convert(cls(), prefer="memory"), weakref.ref(cls)
    assert is_converted(module)
    del cls, module
    gc.collect()
    assert gone() is None
