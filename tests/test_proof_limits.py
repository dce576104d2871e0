"""What random inputs do not show of a forward: limits of large values, errors for NaN, branches for one dtype.

Modules with such code run it, converted or not.
"""

import abc
import copy
import random

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hfnn
from hfnn.patterns import lookalike
from hfnn.patterns.subclass import is_converted

WIDTH, INNER = 16, 32


class Gated(nn.Module):
    """down(between(silu(gate(x)) * up(x)))"""

    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x):
        return self.down(self.between(F.silu(self.gate(x)) * self.up(x)))

    def between(self, h):
        return h


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.rand(WIDTH) + 0.5), 1e-6

    def forward(self, x):
        x = self.before(x)
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def before(self, x):
        return x


class SiLU(nn.Module):
    def forward(self, x):
        return x * torch.sigmoid(x)


class BlockEnd(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense, self.drop, self.norm = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.0), nn.LayerNorm(WIDTH)

    def forward(self, x, residual):
        return self.norm(self.before(self.drop(self.dense(x)) + residual))

    def before(self, x):
        return x


class OwnLinear(nn.Linear):
    def __init__(self):
        super().__init__(WIDTH, WIDTH)

    def forward(self, x):
        y = x @ self.weight.t()
        return self.before((y + self.bias).to(y.dtype))

    def before(self, x):
        return x


HOOK = {Gated: "between", Norm: "before", BlockEnd: "before", OwnLinear: "before"}


def calls(module, x):
    return module(x, x.flip(0)) if isinstance(module, BlockEnd) else module(x)


def outcome(module, x, grad=True):
    """(output, gradients, the input afterwards), or the error."""
    x = x.clone().requires_grad_(grad)
    try:
        y = calls(module, x)
    except Exception as error:
        return repr(error)
    wanted = [x, *module.parameters()]
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(0)).to(y.dtype)
    return y, *(torch.autograd.grad(y, wanted, dy, allow_unused=True, materialize_grads=True) if grad else [x])


def check_same(stock, ours, x, **how):
    wanted, given = outcome(stock, x, **how), outcome(ours, x, **how)
    if isinstance(wanted, str) or isinstance(given, str):
        assert given == wanted
    else:
        rtol, scale = 1e-2 if x.element_size() == 2 else 1e-4, max(t.abs().max().item() for t in wanted)
        torch.testing.assert_close(given, wanted, rtol=rtol, atol=rtol * scale)


def clamps(x):
    return x.clamp(-1e3, 1e3)


def clamps_in_place(x):
    return x.clamp_(max=1e3)


def minima(x):
    return torch.minimum(x, torch.full_like(x, 1e3))


def hard(x):
    return F.hardtanh(x, -1e3, 1e3)


def where(x):
    return torch.where(x < 1e3, x, 1e3)


def indexed(x):
    x = x.clone()
    x[x > 1e3] = 1e3
    return x


def multiplied(x):
    return x * (x.abs() < 1e3)


def softly(x):
    return torch.tanh(x * 1e-6) * 1e6


@torch.jit.script
def scripted(x):
    return torch.clamp(x, -1e3, 1e3)


LIMITS = clamps, clamps_in_place, minima, hard, where, indexed, multiplied, softly, scripted


def with_hook(cls, function):
    return type(cls.__name__, (cls,), {HOOK[cls]: lambda self, x: function(x)})()


@pytest.mark.parametrize("function", LIMITS, ids=lambda f: getattr(f, "__name__", "scripted"))
@pytest.mark.parametrize("cls", HOOK, ids=lambda cls: cls.__name__)
def test_a_limit_for_large_values_is_kept(cls, function):
    torch.manual_seed(0)
    stock = with_hook(cls, function)
    ours = hfnn.convert(copy.deepcopy(stock), prefer="memory")
    for scale in (1.0, 1e3, 1e5):
        check_same(stock, ours, torch.randn(6, WIDTH) * scale)


def replaces_nan(x):
    return x.nan_to_num()


def raises_for_nan(x):
    if torch.isnan(x).any():
        raise FloatingPointError("NaN")
    return x


def raises_for_infinite(x):
    if not torch.isfinite(x).all():
        raise FloatingPointError("infinite")
    return x


def raises_for_large_sums(x):
    if x.detach().abs().sum().item() > 1e11:
        raise FloatingPointError("large")
    return x


def lists(x):
    if any(value != value for value in x.detach().flatten().tolist()):
        raise FloatingPointError("NaN in a list")
    return x


def converts_to_numpy(x):
    if (x.detach().double().numpy() != x.detach().double().numpy()).any():
        raise FloatingPointError("NaN in an array")
    return x


TESTS = replaces_nan, raises_for_nan, raises_for_infinite, raises_for_large_sums, lists, converts_to_numpy


@pytest.mark.parametrize("function", TESTS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("cls", HOOK, ids=lambda cls: cls.__name__)
def test_what_depends_on_nan_is_kept(cls, function):
    torch.manual_seed(0)
    stock = with_hook(cls, function)
    ours = hfnn.convert(copy.deepcopy(stock), prefer="memory")
    x = torch.randn(6, WIDTH)
    for value in (0.0, float("nan"), float("inf"), 1e12):
        x[1, 2] = value
        wanted, given = outcome(stock, x), outcome(ours, x)
        assert isinstance(given, str) == isinstance(wanted, str)
        if isinstance(given, str):
            assert given == wanted
        else:
            torch.testing.assert_close(given, wanted, rtol=1e-4, atol=1e-5, equal_nan=True)


def only_in_half(x):
    return x * 0.5 if x.dtype is torch.float16 else x


def clamps_in_half(x):
    return x.clamp(-10, 10) if x.dtype is torch.float16 else x


@pytest.mark.parametrize("function", [only_in_half, clamps_in_half], ids=lambda f: f.__name__)
@pytest.mark.parametrize("cls", HOOK, ids=lambda cls: cls.__name__)
def test_a_branch_for_float16_is_kept(cls, function):
    torch.manual_seed(0)
    stock = with_hook(cls, function)
    ours = hfnn.convert(copy.deepcopy(stock), prefer="memory")
    for dtype, scale in ((torch.float32, 1.0), (torch.float16, 1.0), (torch.float16, 30.0), (torch.bfloat16, 30.0)):
        check_same(stock.to(dtype), ours.to(dtype), (torch.randn(6, WIDTH) * scale).to(dtype))


class SiLUInPlace(nn.Module):
    def forward(self, x):
        return x * torch.sigmoid(x) if x.requires_grad else x.mul_(torch.sigmoid(x))


def test_a_forward_that_writes_to_its_input_without_grad():
    stock, ours = SiLUInPlace(), hfnn.convert(SiLUInPlace(), prefer="memory")
    check_same(stock, ours, torch.randn(6, WIDTH))
    check_same(stock, ours, torch.randn(6, WIDTH), grad=False)
    assert "writes to its input" in str(lookalike.recognise(stock))


@pytest.mark.parametrize("build", [Gated, Norm, BlockEnd, OwnLinear, SiLU], ids=lambda cls: cls.__name__)
def test_the_same_modules_without_it_are_converted(build):
    assert is_converted(hfnn.convert(build(), prefer="memory"))


def test_limits_of_experts_and_of_a_network_of_transformers():
    pytest.importorskip("transformers")
    deepseek = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
    config = deepseek.DeepseekV4Config(
        hidden_size=WIDTH, intermediate_size=INNER, moe_intermediate_size=INNER, num_local_experts=4
    )
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    x = torch.randn(32, WIDTH) * 1e3
    index, weight = torch.rand(32, 4).argsort(1)[:, :2], torch.rand(32, 2)
    for module, inputs in (
        (deepseek.DeepseekV4MLP(config), (x,)),
        (deepseek.DeepseekV4Experts(config), (x, index, weight)),
    ):
        for p in module.parameters():
            nn.init.normal_(p, std=0.1)
        ours = hfnn.convert(copy.deepcopy(module), prefer="memory")
        torch.testing.assert_close(ours(*inputs), module(*inputs), rtol=1e-4, atol=1e-2)


class DropsAtRandom(Gated):
    def forward(self, x):
        if self.training and self.draw() < 0.5:
            return x * 0
        return super().forward(x)


@pytest.mark.parametrize("draw", [random.random, numpy.random.random, lambda: torch.rand(()).item()])
def test_convert_draws_nothing_and_a_forward_that_draws_is_left_alone(draw):
    stock = type("Drops", (DropsAtRandom,), {"draw": lambda self: draw()})()
    ours = copy.deepcopy(stock)

    def drawn():
        return random.random(), numpy.random.random(), torch.rand(()).item()

    def seed():
        random.seed(0), numpy.random.seed(0), torch.manual_seed(0)

    seed()
    wanted = drawn()
    seed()
    hfnn.convert(ours, prefer="memory")
    assert drawn() == wanted
    x, dropped = torch.randn(6, WIDTH), []
    for module in (stock, ours):
        seed()
        dropped.append([bool((module(x) == 0).all()) for _ in range(20)])
    assert dropped[0] == dropped[1] and any(dropped[0])


CLASSES = {}


class Once(type):
    """Refuses a second class of a name."""

    def __new__(cls, name, bases, members):
        made = super().__new__(cls, name, bases, members)
        if CLASSES.setdefault(name, made) is not made:
            raise ValueError(f"{name} is there already")
        return made


class Last(abc.ABCMeta):
    """Registers the last class of a name."""

    def __init__(cls, name, bases, members):
        super().__init__(name, bases, members)
        CLASSES[name] = cls


class Refusing(nn.LayerNorm):
    def __init_subclass__(cls):
        raise RuntimeError("final")


class OnceNorm(nn.LayerNorm, metaclass=Once):
    pass


class LastNorm(nn.LayerNorm, metaclass=Last):
    pass


class OnceRMSNorm(Norm, metaclass=Once):
    pass


class LastGated(Gated, metaclass=Last):
    pass


@pytest.mark.parametrize("cls", [OnceNorm, LastNorm, OnceRMSNorm, LastGated, Refusing], ids=lambda cls: cls.__name__)
def test_a_metaclass_of_the_author_does_not_see_our_classes(cls):
    known = dict(CLASSES)
    stock = cls(WIDTH) if issubclass(cls, nn.LayerNorm) else cls()
    ours = hfnn.convert(nn.Sequential(copy.deepcopy(stock), nn.Linear(WIDTH, WIDTH)), prefer="memory")
    assert is_converted(ours[0]) and is_converted(ours[1]) and known == CLASSES
    assert type(ours[0]) is cls
    check_same(stock, ours[0], torch.randn(6, WIDTH))
