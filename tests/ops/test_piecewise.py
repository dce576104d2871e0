"""Piecewise linear ops beyond the contract: kinks, NaN and infinity as in torch, and the packed bits."""

import functools
import math

import pytest
import torch
from torch import nn

import hfnn
from hfnn.core.holder import target_of

from .kernels import kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
INF, NAN = math.inf, math.nan

# Each with bounds that 16 bits represent, and that they do not.
MAPS = {
    "relu": ({},),
    "leaky_relu": ({}, {"negative_slope": 0.1}, {"negative_slope": -0.5}, {"negative_slope": 0.0}),
    "relu6": ({},),
    "hardtanh": ({}, {"min_val": -0.1, "max_val": 0.1}, {"min_val": 0, "max_val": 6}, {"min_val": 1, "max_val": 1}),
    "clamp": (
        {"min": -0.1, "max": 0.1},
        {"min": 0},
        {"max": 0.3},
        {"min": -INF, "max": 1},
        {"min": 1, "max": -1},
        {"min": 0.5, "max": None},
    ),
    "threshold": ({"threshold": 0.5, "value": -0.1}, {"threshold": 0, "value": 0}),
    "hardshrink": ({}, {"lambd": 0.1}, {"lambd": 0}, {"lambd": -1}),
    "softshrink": ({}, {"lambd": 0.1}, {"lambd": 0}),
    "hardsigmoid": ({},),
}
EACH = [pytest.param(name, options, id=f"{name}-{options}") for name in MAPS for options in MAPS[name]]
# torch's own function, where torch.nn.functional has none.
TORCHS = {"clamp": torch.clamp}
each = pytest.mark.parametrize("name, options", EACH)


def ours(name):
    return getattr(hfnn.functional, name)


def torchs(name):
    return TORCHS.get(name) or getattr(nn.functional, name)


def skip_unless_taken(kernel, dtype):
    if kernel == "triton" and dtype is torch.float64:
        pytest.skip("Triton's kernels take no float64")


def neighbours(values, dtype):
    """The values rounded to the dtype, and their neighbours."""
    x = torch.tensor(values, dtype=torch.float64).to(dtype)
    raw = x.view(INTEGERS[x.element_size()])
    beside = torch.cat([(raw + 1).view(dtype), (raw - 1).view(dtype)])
    return torch.cat([x, beside[beside.isfinite()]])


def kinks(options, dtype):
    """Every number at which a map has a kink, with both signs, and its neighbours."""
    bounds = [float(v) for v in options.values() if v is not None and math.isfinite(v)]
    some = [0.0, -0.0, 0.5, 1.0, 3.0, 6.0, 1e-3, 100.0, *bounds]
    return torch.cat([neighbours([*some, *(-v for v in some)], dtype), torch.tensor([INF, -INF, NAN], dtype=dtype)]).to(
        DEVICE
    )


def representable(x, kernel):
    """Triton's interpreter flushes bfloat16's subnormals to 0; GPUs do not."""
    if kernel == "triton" and DEVICE == "cpu" and x.dtype is torch.bfloat16:
        return x[(x == 0) | ~(x.abs() < torch.finfo(x.dtype).tiny)]
    return x


def one_by_one(fn, x, dy):
    """(y, dx) of each element on its own.

    For some maps, torch's vectorised CPU code gives another slope at NaN than its scalar and CUDA code.
    """
    found = []
    for one, d in zip(x.split(1), dy.split(1), strict=True):
        one = one.clone().requires_grad_()
        y = fn(one)
        found.append((y.detach(), *torch.autograd.grad(y, one, d)))
    return tuple(torch.cat(parts) for parts in zip(*found, strict=True))


def documented(name, options, x, y):
    """torch's y of x, or what csrc/piecewise.h defines where torch's CUDA kernels differ from its CPU's.

    They round softshrink's bound to 16 bits, and multiply by a sixth in hardsigmoid, where all others divide by 6.
    """
    if x.is_cuda and name == "softshrink" and x.dtype.itemsize == 2:
        return torchs(name)(x.float(), **options).to(x.dtype)
    if x.is_cuda and name == "hardsigmoid" and x.dtype is torch.float32:
        exact = (x + 3).clamp(0, 6) / x.new_tensor(6)  # for a Python number CUDA would multiply by the reciprocal
        torch.testing.assert_close(exact, y, rtol=torch.finfo(x.dtype).eps, atol=0, equal_nan=True)
        return exact
    return y


def assert_same(a, b, x):
    same = (a == b) | (a.isnan() & b.isnan())
    assert a.dtype is b.dtype and same.all(), f"at {x[~same]}: {a[~same]}, torch {b[~same]}"


@each
@kernels
@dtypes
def test_kinks_nan_and_infinity(name, options, kernel, dtype):
    """y and dx are torch's, in whole vectors and in tails, for finite and non-finite gradients."""
    skip_unless_taken(kernel, dtype)
    x = representable(kinks(options, dtype), kernel)
    for cotangent in (0.3, -1.0, INF, NAN):
        dy = torch.full_like(x, cotangent)
        y_torch, dx_torch = one_by_one(functools.partial(torchs(name), **options), x, dy)
        y_torch = documented(name, options, x, y_torch)
        for times in (1, 40):
            leaf = x.repeat(times).requires_grad_()
            with hfnn.use(kernel):
                y = ours(name)(leaf, **options)
            (dx,) = torch.autograd.grad(y, leaf, dy.repeat(times))
            assert_same(y.detach(), y_torch.repeat(times), leaf.detach())
            if name == "hardsigmoid" and dtype is torch.float64:  # there torch multiplies by a sixth in float32
                torch.testing.assert_close(dx, dx_torch.repeat(times), rtol=1e-7, atol=0, equal_nan=True)
            else:
                assert_same(dx, dx_torch.repeat(times), leaf.detach())


@each
@kernels
def test_every_16_bit_number(name, options, kernel):
    """bfloat16: bitwise equal but for the sign of 0; NaNs stay NaNs."""
    x = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).to(DEVICE)
    x, found = representable(x, kernel), []
    for fn in (ours(name), torchs(name)):
        leaf = x.clone().requires_grad_()
        with hfnn.use(kernel):
            y = fn(leaf, **options)
        found.append((y.detach(), *torch.autograd.grad(y.sum(), leaf)))
    (y, dx), (y_torch, dx_torch) = found
    assert_same(y, documented(name, options, x, y_torch), x)
    number = ~x.isnan()
    assert_same(dx[number], dx_torch[number], x[number])


@pytest.mark.parametrize("name", MAPS)
@kernels
@pytest.mark.parametrize("shape", [(1,), (7,), (8,), (3, 769), (0, 4), (1 << 13,)])
def test_keeps_a_bit_an_element(name, kernel, shape):
    options = MAPS[name][0]
    x = torch.randn(shape, device=DEVICE, requires_grad=True)
    with hfnn.use(kernel):
        saved = hfnn.memory.saved_bytes(lambda: ours(name)(x, **options))
    assert saved.total == -(-x.numel() // 8)


@pytest.mark.parametrize("name", MAPS)
@kernels
def test_nothing_is_kept_or_recorded_without_grad(name, kernel):
    x, options = torch.randn(100, device=DEVICE), MAPS[name][0]
    with hfnn.use(kernel):
        want = ours(name)(x.clone().requires_grad_(), **options)
        assert torch.equal(ours(name)(x, **options), want) and want.requires_grad
        assert not ours(name)(x, **options).requires_grad
        with torch.no_grad():
            assert not ours(name)(x.requires_grad_(), **options).requires_grad


@kernels
@pytest.mark.parametrize(
    "shape, layout", [((2, 5, 3, 7), torch.channels_last), ((2, 3, 4, 2, 3), torch.channels_last_3d)]
)
def test_channels_last_stays(kernel, shape, layout):
    """y and dx have x's layout, whatever dy's; so does the second derivative."""
    x = torch.randn(shape, device=DEVICE).contiguous(memory_format=layout).requires_grad_()
    dy = torch.randn(shape, device=DEVICE, requires_grad=True)
    with hfnn.use(kernel):
        y = hfnn.functional.relu(x)
    assert y.is_contiguous(memory_format=layout) and torch.equal(y, x.clamp_min(0))
    for cotangent in (dy, dy.detach().contiguous(memory_format=layout)):
        (dx,) = torch.autograd.grad(y, x, cotangent, retain_graph=True)
        assert dx.is_contiguous(memory_format=layout) and torch.equal(dx, torch.where(x > 0, dy, 0))
    (dx,) = torch.autograd.grad(y, x, dy, create_graph=True)
    weight = torch.randn(shape, device=DEVICE)
    (ddy,) = torch.autograd.grad(dx, dy, weight)
    assert torch.equal(ddy, torch.where(x > 0, weight, 0))


@kernels
def test_the_third_derivative_is_there(kernel):
    """Backward is linear in dy, and differentiable any number of times."""
    x = torch.randn(50, device=DEVICE, requires_grad=True)
    found = []
    for fn in (hfnn.functional.leaky_relu, nn.functional.leaky_relu):
        with hfnn.use(kernel):
            total = fn(x, 0.3).pow(3).sum()
        for _ in range(3):
            (g,) = torch.autograd.grad(total, x, create_graph=True)
            total = g.sum()
        found.append(g)
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("name", [n for n in MAPS if n not in ("clamp", "hardshrink", "softshrink")])
def test_in_place_is_torchs(name):
    options = MAPS[name][0]
    x = torch.randn(64, 64, device=DEVICE)
    want = torchs(name)(x, **options)
    inner = x.clone().requires_grad_() * 1
    y = ours(name)(inner, **options, inplace=True, prefer="memory")
    assert y is inner and torch.equal(y, want)
    assert not y.grad_fn.name().startswith("_")


def test_relu_keeps_its_output_where_that_is_asked_for():
    x = torch.randn(64, 64, device=DEVICE, requires_grad=True)
    y = hfnn.functional.relu(x, keep="output", prefer="memory")
    assert y.grad_fn.name() == "ReluBackward0" and torch.equal(y, x.relu())
    with pytest.raises(ValueError, match="keep='input': choose one of 'bits', 'output'"):
        hfnn.functional.relu(x, keep="input")
    net = hfnn.convert(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)), prefer="memory").to(DEVICE)
    kept = {keep: _kept(net, keep, x.detach()) for keep in ("bits", "output")}
    assert kept["bits"] - kept["output"] == x.numel() // 8, "the next layer keeps the output: bits come on top"


def _kept(net, keep, x):
    net[1].keep = keep
    return hfnn.memory.saved_bytes(lambda: net(x)).total


MODULES = (
    nn.ReLU(),
    nn.LeakyReLU(0.2),
    nn.ReLU6(),
    nn.Hardtanh(-2.0, 0.5),
    nn.Threshold(0.3, -1.0),
    nn.Hardshrink(0.3),
    nn.Softshrink(0.3),
    nn.Hardsigmoid(),
)


@pytest.mark.parametrize("module", MODULES, ids=lambda m: type(m).__name__)
def test_modules(module):
    """`convert` gives the class of the same name, also for ReLU6, which is a Hardtanh. It keeps bits."""
    cls = type(module)
    x = torch.randn(64, 64, device=DEVICE, requires_grad=True)
    want = module(x)
    (dx_want,) = torch.autograd.grad(want.square().sum(), x)
    hfnn.convert(module, prefer="memory")
    try:
        assert target_of(module) is getattr(hfnn, cls.__name__) and isinstance(module, cls)
        y = module(x)
        ulps = 1 if x.is_cuda and cls is nn.Hardsigmoid else 0  # see `documented`
        (dx,) = torch.autograd.grad(y.square().sum(), x)
        for got, expected, rtol in ((y, want, ulps), (dx, dx_want, 2 * ulps)):
            torch.testing.assert_close(got, expected, rtol=rtol * torch.finfo(x.dtype).eps, atol=0)
        assert hfnn.memory.saved_bytes(lambda: module(x)).by_op == {"Piecewise": x.numel() // 8}
    finally:
        assert type(hfnn.revert(module)) is cls
    for in_place in (m for m in (nn.ReLU, nn.ReLU6, nn.Hardtanh, nn.LeakyReLU, nn.Hardsigmoid) if m is cls):
        converted, z = hfnn.convert(in_place(inplace=True), prefer="memory"), x.detach().clone()
        assert converted(z) is z


def test_clamp_leaves_what_it_does_not_know_to_torch():
    x = torch.randn(64, device=DEVICE, requires_grad=True)
    bound = torch.zeros(64, device=DEVICE)
    for options in ({"min": bound}, {"max": bound, "min": -bound}, {"min": NAN}):
        y = hfnn.functional.clamp(x, **options, prefer="memory")
        assert y.grad_fn.name().startswith("Clamp")
        torch.testing.assert_close(y, torch.clamp(x, **options), equal_nan=True)
    with pytest.raises(RuntimeError, match="must not be None"):
        hfnn.functional.clamp(x, prefer="memory")
    if DEVICE == "cpu":
        with pytest.raises(RuntimeError, match="overflow"):
            hfnn.functional.clamp(x.half(), max=1e6, prefer="memory")
    else:  # torch's CUDA code compares in float32
        y = hfnn.functional.clamp(x.half(), max=1e6, prefer="memory")
        assert y.grad_fn.name().startswith("Clamp") and torch.equal(y, x.half())
    y = hfnn.functional.clamp(x.half(), max=INF, min=-1, prefer="memory")
    assert y.grad_fn.next_functions and torch.equal(y, torch.clamp(x.half(), min=-1))


@pytest.mark.parametrize(
    "name, options", [("hardtanh", {"min_val": 1.0, "max_val": -1.0}), ("softshrink", {"lambd": -1})]
)
def test_errors_are_torchs(name, options):
    x, raised = torch.randn(64, device=DEVICE), []
    for fn in (functools.partial(ours(name), prefer="memory"), torchs(name)):
        with pytest.raises((ValueError, RuntimeError)) as error:
            fn(x, **options)
        raised.append(error)
    assert raised[0].type is raised[1].type and str(raised[0].value) == str(raised[1].value)
