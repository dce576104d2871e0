"""Smooth functions beyond the contract: saved tensors, extreme values, kinks, options, and look-alikes."""

import gc
import math
import weakref

import pytest
import torch
from torch import nn

import hfnn
from hfnn import memory, ops, testing
from hfnn.core.holder import target_of
from hfnn.patterns import lookalike
from hfnn.patterns.probe import Refusal

from .kernels import kernels

HALF_ULP = {torch.bfloat16: 2**-9, torch.float16: 2**-12}  # of numbers below 1, relative to 1
FLOATS = torch.float32, torch.bfloat16, torch.float16
INF, NAN = math.inf, math.nan

SAME = ("sigmoid", "tanh", "exp", "sqrt")  # torch keeps y, too
KEEP_INPUT = (
    "softplus",
    "logsigmoid",
    "elu",
    "selu",
    "celu",
    "softsign",
    "mish",
    "hardswish",
    "quick_gelu",
    "relu_squared",
)
ALL = (*SAME, *KEEP_INPUT)
MODULES = {
    "sigmoid": nn.Sigmoid, "tanh": nn.Tanh, "softplus": nn.Softplus, "logsigmoid": nn.LogSigmoid, "elu": nn.ELU,
    "selu": nn.SELU, "celu": nn.CELU, "softsign": nn.Softsign, "mish": nn.Mish, "hardswish": nn.Hardswish,
}  # fmt: skip
every = pytest.mark.parametrize("name", ALL)


def op(name):
    return ops.OPS[name]


def ours(name):
    return getattr(hfnn.functional, name)


def gradient(fn, x, dy=None):
    """(y, dx)"""
    x = x.detach().clone().requires_grad_()
    y = fn(x)
    return y.detach(), *torch.autograd.grad(y, x, torch.ones_like(y) if dy is None else dy)


def positive(name, x):
    return x.abs() if name == "sqrt" else x


# What is kept


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", SAME)
def test_the_output_is_kept_and_nothing_else(name, dtype, device):
    x = positive(name, torch.randn(33, 1000, device=device)).to(dtype).requires_grad_()
    assert memory.saved_bytes(lambda: ours(name)(x, prefer="memory")).total == x.nbytes


@pytest.mark.parametrize("name", KEEP_INPUT)
def test_a_consumer_keeps_nothing_more(name, device):
    x = torch.randn(33, 1000, device=device, requires_grad=True)
    weight = nn.Parameter(torch.randn(8, 1000, device=device))
    kept = memory.saved_bytes(lambda: hfnn.functional.linear(ours(name)(x, prefer="memory"), weight))
    assert kept.total == x.nbytes


HOOKS = {
    "none": torch.enable_grad,
    "identity": lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t),
    "offloaded": torch.autograd.graph.save_on_cpu,
}


@pytest.mark.parametrize("hooks", HOOKS)
@every
def test_a_result_may_be_written_to_as_torchs(name, hooks, device):
    x = positive(name, torch.randn(8, 8, device=device)).requires_grad_()

    def step(fn):
        with HOOKS[hooks]():
            y = fn(x)
        try:
            return torch.autograd.grad(y.add_(1).sum(), x)[0]
        except RuntimeError as error:
            return str(error).split(":")[0]

    got, want = step(lambda x: ours(name)(x, prefer="memory")), step(op(name).torch)
    assert type(got) is type(want) and (name in SAME or type(want) is not str)
    if type(want) is str or hooks == "none":
        assert got == want if type(want) is str else testing.error(got, want).l2 < 1e-6
    elif name not in SAME:  # with hooks torch keeps the overwritten tensor itself
        assert testing.error(got, want).l2 < 1e-6


@pytest.mark.parametrize("hooks", HOOKS)
@pytest.mark.parametrize("name", KEEP_INPUT)
def test_a_result_nobody_uses_is_freed(name, hooks, device):
    with HOOKS[hooks]():
        y = ours(name)(torch.randn(8, 8, device=device, requires_grad=True), prefer="memory")
    memory = weakref.ref(y.untyped_storage())
    del y
    gc.collect()
    assert memory() is None


@pytest.mark.parametrize("name", KEEP_INPUT)
def test_hooks_run_once_though_a_second_derivative_is_taken(name, device):
    layer = nn.Linear(8, 8, device=device)

    def step(fn):
        x, seen = torch.ones(4, 8, device=device, requires_grad=True), []
        y = fn(layer(x))
        y.register_hook(lambda dy: seen.append(dy.shape) or dy * 0.5)
        (dx,) = torch.autograd.grad(layer(y).square().sum(), x, create_graph=True)
        return seen, torch.autograd.grad(dx.square().sum(), [x, *layer.parameters()])

    (seen, ours_), (wanted, torchs) = step(lambda x: ours(name)(x, prefer="memory")), step(op(name).torch)
    assert seen == wanted
    for got, want in zip(ours_, torchs, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_what_torch_does_as_well_is_left_to_torch():
    """Where torch keeps no more than hfnn and is faster, torch runs even with prefer="memory"."""
    x = torch.randn(8, requires_grad=True)
    assert hfnn.functional.tanh(x, prefer="memory").grad_fn.name() == "TanhBackward0"
    assert hfnn.functional.tanh(x.bfloat16(), prefer="memory").grad_fn.name() == "_TanhBackward"
    assert hfnn.functional.exp(x.double(), prefer="memory").grad_fn.name() == "ExpBackward0"
    with hfnn.use("cpp"):
        assert hfnn.functional.tanh(x).grad_fn.name() == "_TanhBackward"


# Values


@kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@every
def test_every_16_bit_number(name, dtype, kernel, device):
    """y is nearest to the exact value, tails included; dx is as exact as y allows."""
    x = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype).to(device)
    with hfnn.use(kernel):
        y, dx = gradient(ours(name), x)
    wide, slope = gradient(op(name).torch, x.double())
    # Further left exp(-x) overflows, as in torch; subnormal numbers have fewer digits.
    normal = wide.isfinite() & (x > -50) & (wide.abs() <= torch.finfo(dtype).max)
    normal &= (wide.abs() >= torch.finfo(dtype).tiny) & (x.abs() >= torch.finfo(dtype).tiny)
    error = (y.double() - wide).abs()
    assert (error <= 2.05 * HALF_ULP[dtype] * wide.abs())[normal].all()
    if name == "exp" or name == "sqrt":
        assert (((dx.double() - slope).abs() <= 6 * HALF_ULP[dtype] * slope.abs()) | (slope > 1e4))[normal].all()
    else:
        known = slope.isfinite() & dx.isfinite() & (x.abs() >= torch.finfo(dtype).tiny)
        assert ((dx.double() - slope).abs() <= 4 * HALF_ULP[dtype] * slope.abs().clamp(min=1))[known].all()
        assert known.sum() > 0.95 * x.isfinite().sum()


# Intended differences: torch gives NaN or infinity where the exact value is finite.
EXCEPT = {
    "softsign": lambda x: x.abs() > 1e3,  # torch divides by the square of 1 + |x|, which overflows
    "hardswish": lambda x: x > 1e37,  # torch multiplies by 6 before it divides by 6
    "quick_gelu": lambda x: x.abs() > 1e3,  # torch rounds between its ops
}
# The slope at NaN is NaN, as in torch's vector code on the CPU; its CUDA kernels give one branch's slope.
BRANCHES = ("hardswish",)


@kernels
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@every
def test_ends_and_kinks_are_torchs(name, dtype, kernel, device):
    ends = [INF, -INF, NAN, 0.0, -0.0, 3.0, -3.0, 60.0, -60.0, 100.0, -100.0, 6e4, -6e4, 3e38, -3e38]
    ends = torch.tensor(ends, device=device).to(dtype)
    if name in EXCEPT:
        ends = ends[~(EXCEPT[name](ends.float()) & ends.isfinite())]
    for x in (ends, ends.repeat(512)):  # in a tail, and in whole vectors
        with hfnn.use(kernel):
            mine = gradient(ours(name), x)
        # For a NaN in a vector's tail torch's elu, like ours, and torch's hardswish give the slope 1.
        y, dx = (whole[: len(x)] for whole in gradient(op(name).torch, x if name.endswith("elu") else x.repeat(64)))
        if x.is_cuda and name in BRANCHES:
            dx = torch.where(x.isnan(), NAN, dx)
        for got, want in zip(mine, (y, dx), strict=True):
            assert torch.equal(got.isnan(), want.isnan()) and torch.equal(got.isinf(), want.isinf())
            atol = 3e-3 if dtype is torch.bfloat16 else 4e-4 if dtype is torch.float16 else 1e-7
            torch.testing.assert_close(got, want, rtol=3 * torch.finfo(dtype).eps, atol=atol, equal_nan=True)


@kernels
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name, kinks", [("elu", 0.0), ("selu", 0.0), ("celu", 0.0), ("hardswish", 3.0)])
def test_slopes_at_kinks(name, kinks, dtype, kernel, device):
    x = torch.tensor([kinks, -kinks] * 20, dtype=dtype, device=device)
    with hfnn.use(kernel):
        assert torch.equal(gradient(ours(name), x)[1], gradient(op(name).torch, x)[1])


@kernels
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("cotangent", [INF, NAN])
def test_hardswish_passes_nothing_below_its_kink(cotangent, dtype, kernel, device):
    """Not even an infinity, as in torch."""
    x = torch.tensor([-INF, -4.0, -3.0, -2.0, 0.0, 2.0, 3.0, 4.0] * 20, dtype=dtype, device=device, requires_grad=True)
    with hfnn.use(kernel):
        y = hfnn.functional.hardswish(x)
    got, want = (torch.autograd.grad(z.sum(), x, z.new_tensor(cotangent))[0] for z in (y, op("hardswish").torch(x)))
    torch.testing.assert_close(got, want, equal_nan=True, rtol=0, atol=0)
    assert not got[x <= -3].any()


@kernels
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_saturated_unit_has_no_gradient(dtype, kernel, device):
    """selu's limit is no 16-bit number: the rounding of y must not give a slope."""
    x = torch.full((40,), -200.0, dtype=dtype, device=device, requires_grad=True)
    with hfnn.use(kernel):
        for create_graph in (False, True):
            y = hfnn.functional.selu(x)
            (dx,) = torch.autograd.grad(y.sum(), x, create_graph=create_graph)
            assert not dx.any()


# Options and layouts


def name_of(y):
    return y.grad_fn.name()


def test_odd_options_are_as_torchs(device):
    x = torch.randn(40, 50, device=device, requires_grad=True)
    for name, options, taken in (
        ("elu", (-0.5,), True),
        ("elu", (0.0,), True),
        ("softplus", (1, 2), True),
        ("softplus", (-1.0,), False),
        ("celu", (-0.5,), False),
    ):
        y, want = ours(name)(x, *options, prefer="memory"), getattr(nn.functional, name)(x, *options)
        assert name_of(y).startswith("_") == taken
        torch.testing.assert_close(y, want)
        for got, torchs in zip(*(torch.autograd.grad(t.sum(), x) for t in (y, want)), strict=True):
            torch.testing.assert_close(got, torchs)
    with pytest.raises(RuntimeError):
        hfnn.functional.celu(x, 0.0, prefer="memory")


@pytest.mark.parametrize("name", ["elu", "selu", "celu", "mish", "hardswish"])
def test_in_place_is_torchs(name, device):
    x = torch.randn(64, 64, device=device)
    want, inner = op(name).torch(x), x.clone().requires_grad_() * 1
    y = ours(name)(inner, inplace=True, prefer="memory")
    assert y is inner and torch.equal(y, want) and not name_of(y).startswith("_")


@pytest.mark.parametrize("name", [name for name in ALL if name != "logsigmoid"])
def test_channels_last_stays_so(name, device):
    x = positive(name, torch.randn(2, 5, 3, 4, device=device)).to(memory_format=torch.channels_last).bfloat16()
    y, dx = gradient(lambda x: ours(name)(x, prefer="memory"), x, torch.ones_like(x))
    plain, dx_plain = gradient(lambda x: ours(name)(x, prefer="memory"), x.contiguous())
    assert y.is_contiguous(memory_format=torch.channels_last) and torch.equal(y, plain)
    assert dx.is_contiguous(memory_format=torch.channels_last) and torch.equal(dx, dx_plain)


@pytest.mark.parametrize("name", MODULES)
def test_modules(name):
    original = MODULES[name]
    m = hfnn.convert(original(), prefer="memory")
    assert target_of(m) is getattr(hfnn, original.__name__) and type(hfnn.revert(m)) is original
    x = torch.randn(3, 40).bfloat16()
    for got, want in zip(gradient(hfnn.convert(original(), prefer="memory"), x), gradient(original(), x), strict=True):
        torch.testing.assert_close(got, want, rtol=2e-2, atol=6e-3)


def test_options_of_modules():
    x = torch.randn(30, 40)
    for m in (nn.ELU(0.7), nn.CELU(0.4), nn.Softplus(2.0, 30.0)):
        want = m(x)
        torch.testing.assert_close(hfnn.convert(m, prefer="memory")(x), want)


# Modules that compute these functions in their own code


class Quick_GELU(nn.Module):
    """Distinguished from GELU by the whole name, whatever its spelling."""

    def forward(self, x):
        return x * torch.sigmoid(1.702 * x)


class OwnMish(nn.Module):
    def forward(self, x):
        return x * torch.tanh(nn.functional.softplus(x))


class HardSwish(nn.Module):
    def forward(self, x):
        return nn.functional.hardswish(x)


class HardMish(nn.Module):
    def forward(self, x):
        return 0.5 * x * (x + 2).clamp(0, 2)


def test_look_alikes():
    expected = {Quick_GELU: "hfnn quick_gelu", OwnMish: "hfnn mish", HardSwish: "hfnn hardswish"}
    for cls, title in expected.items():
        assert str(lookalike.recognise(cls())) == title
        m, x = cls(), torch.randn(3, 64, requires_grad=True)
        want = m(x)
        y = hfnn.convert(m, prefer="memory")(x)
        assert (
            y.grad_fn.name().lower() == f"_{title.removeprefix('hfnn ').replace('_', '')}backward"
            and hfnn.recipe.take(y) is not None
        )
        torch.testing.assert_close(y, want)
    why = lookalike.recognise(HardMish())
    assert isinstance(why, Refusal) and "calls clamp" in str(why)
    assert lookalike.recognise(hfnn.QuickGELU()) is None, "is one already"


def test_look_alikes_of_transformers():
    activations = pytest.importorskip("transformers.activations")
    for cls, title in {
        "QuickGELUActivation": "hfnn quick_gelu",
        "MishActivation": "hfnn mish",
        "ReLUSquaredActivation": "hfnn relu_squared",
    }.items():
        assert str(lookalike.recognise(getattr(activations, cls)())) == title


def test_quick_gelu_module():
    x = torch.randn(3, 64)
    assert torch.equal(hfnn.QuickGELU()(x), x * torch.sigmoid(1.702 * x))
