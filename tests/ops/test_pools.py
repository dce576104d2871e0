"""Pools: bitwise torch's results, what is kept, and what goes to torch."""

import copy
import pickle

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torch._subclasses import FakeTensorMode

import hfnn
from hfnn import memory, testing

from .kernels import DTYPES, INF, KERNELS, NAN, dtypes, kernels

# torch's own backward of some pools uses atomic adds on the GPU, and warns if determinism is requested.
pytestmark = pytest.mark.filterwarnings("ignore:.* does not have a deterministic implementation")

F = hfnn.functional
dimensions = pytest.mark.parametrize("dims", [1, 2, 3])
LAST = {2: torch.channels_last, 3: torch.channels_last_3d}


def ours(name, dims):
    return getattr(F, f"{name}{dims}d")


def torchs(name, dims):
    return getattr(nn.functional, f"{name}{dims}d")


def run(fn, x, *how, dy=None, **options):
    """(y, dx). dy has small integers, whose sums are exact in any order."""
    x = x.detach().requires_grad_()
    y = fn(x, *how, **options)
    if dy is None:
        dy = torch.randint(-4, 5, y.shape, generator=torch.Generator().manual_seed(1)).to(y)
    return y, torch.autograd.grad(y, x, dy)[0]


def same(got, want, exact=True):
    """Bitwise equal; within rounding where the order of torch's backward varies."""
    for a, b in zip(got, want, strict=True):
        assert a.dtype is b.dtype and a.shape == b.shape
        rounding = 0 if exact else 4 * torch.finfo(a.dtype).eps
        torch.testing.assert_close(a, b, rtol=rounding, atol=rounding, equal_nan=True)


def exact(name):
    """Whether torch's op is deterministic: adaptive averages use atomic adds on the GPU."""
    return not torch.cuda.is_available() or "avg" not in name.lower() or "adaptive" not in name.lower()


@st.composite
def shapes(draw, least=1, longest=9):
    """(dims, sizes of batch and channels, sizes). longest: the largest size in one dimension."""
    dims = draw(st.integers(1, 3))
    lead = draw(st.lists(st.integers(1, 3), min_size=1, max_size=2))
    return dims, lead, draw(st.lists(st.integers(least, longest if dims == 1 else 9), min_size=dims, max_size=dims))


def values(shape, dtype, device):
    """Few distinct values, so that there are ties, and NaNs. No -inf, which has its own test."""
    x = torch.randint(-3, 4, shape).float()
    x[torch.rand(shape) < 0.05] = NAN
    x[torch.rand(shape) < 0.05] = INF
    return x.to(dtype).to(device)


# ---- max pools


@st.composite
def calls(draw):
    """(dims, shape, format, kernel_size, stride, padding, dilation, ceil_mode); each window overlaps the input."""
    dims, lead, sizes = draw(shapes(longest=40))
    window, stride, dilation, padding = [], [], [], []
    for size in sizes:
        window.append(draw(st.integers(1, 4)))
        stride.append(draw(st.integers(1, 4)))
        dilation.append(draw(st.integers(1, 3)))
        padding.append(draw(st.integers(0, window[-1] // 2)))
        reach = (window[-1] - 1) * dilation[-1] + 1
        assume(size + 2 * padding[-1] >= reach)
        places = [k * dilation[-1] - padding[-1] for k in range(window[-1])]
        assume(any(0 <= place < size for place in places))
    last = len(lead) == 2 and dims > 1 and draw(st.booleans())
    return dims, (*lead, *sizes), last, window, stride, padding, dilation, draw(st.booleans())


@pytest.mark.parametrize("kernel", KERNELS)
@settings(max_examples=150, deadline=None, derandomize=True)
@given(call=calls(), dtype=st.sampled_from(DTYPES), data=st.data())
def test_random_max_pools_are_torchs(kernel, call, dtype, data):
    dims, shape, last, *how = call
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    x = values(shape, dtype, device)
    x = x.contiguous(memory_format=LAST[dims]) if last else x
    with hfnn.use(kernel):
        mine = run(ours("max_pool", dims), x, *how)
    assert mine[0].grad_fn.name() == "_MaxPoolBackward"
    same(mine, run(torchs("max_pool", dims), x, *how))
    if last:
        assert mine[0].is_contiguous(memory_format=LAST[dims]) and mine[1].is_contiguous(memory_format=LAST[dims])


@kernels
@dimensions
@dtypes
@pytest.mark.parametrize("last", [False, True])
def test_large_max_pools_are_torchs(dims, last, dtype, kernel, device):
    """Rows longer than a vector; planes longer and shorter than a program; channels that no vector divides."""
    shape = {1: (2, 3, 601), 2: (1, 19, 33, 31) if kernel == "cpp" else (1, 3, 33, 31), 3: (1, 3, 7, 11, 10)}[dims]
    if last and dims == 1:
        return
    x = values(shape, dtype, device)
    x = x.contiguous(memory_format=LAST[dims]) if last else x
    for how in ((2,), (3, 2, 1), (3, 1, 1, 2), (4, 3, 2, 1, True))[: 4 if dims < 3 else 2]:
        with hfnn.use(kernel):
            mine = run(ours("max_pool", dims), x, *how)
        same(mine, run(torchs("max_pool", dims), x, *how))


@kernels
def test_ties_and_nans(kernel, device):
    """The first of equal numbers gets the gradient; of several NaNs, the last."""
    x = torch.tensor([[1.0, 1, 0, 0, NAN, 5, NAN, NAN, -INF, -INF, 0.0, -0.0]], device=device)
    with hfnn.use(kernel):
        y, dx = run(F.max_pool1d, x, 4, dy=torch.ones(1, 3, device=device))
    assert dx.tolist() == [[1.0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 1, 0]] and y[0, 1].isnan() and y[0, 0] == 1 and y[0, 2] == 0
    same((y, dx), run(nn.functional.max_pool1d, x, 4, dy=torch.ones(1, 3, device=device)))


@kernels
@dimensions
def test_windows_of_minus_infinity(dims, kernel, device):
    """The first position inside x, as in torch's contiguous kernel. Its channels_last CPU kernel may pick another."""
    x = torch.full((2, *(6,) * dims), -INF, device=device)
    with hfnn.use(kernel):
        mine = run(ours("max_pool", dims), x, 3, 2, 1)
    same(mine, run(torchs("max_pool", dims), x, 3, 2, 1))


@kernels
@dimensions
@pytest.mark.parametrize("window, bits", [(2, {1: 2, 2: 2, 3: 4}), (3, {1: 2, 2: 4, 3: 8}), (6, {1: 4, 2: 8, 3: 8})])
def test_codes_are_kept(dims, window, bits, kernel, device):
    x = torch.randn(3, *(13,) * dims, device=device, requires_grad=True)
    with hfnn.use(kernel):
        kept = memory.saved_bytes(lambda: ours("max_pool", dims)(x, window))
        y = ours("max_pool", dims)(x, window)
    assert y.grad_fn.name() == "_MaxPoolBackward"
    assert kept.total == -(-y.numel() * bits[dims] // 8)


@kernels
def test_windows_of_256_positions(kernel, device):
    """Index 255 must not mean "none"."""
    x = torch.arange(2.0 * 256, device=device).view(2, 16, 16)
    with hfnn.use(kernel):
        mine = run(F.max_pool2d, x, 16)
        assert mine[0].grad_fn.name() == "_MaxPoolBackward" and mine[1][:, -1, -1].count_nonzero()
    same(mine, run(nn.functional.max_pool2d, x, 16))
    same(run(F.max_pool2d, x, (16, 15), prefer="memory"), run(nn.functional.max_pool2d, x, (16, 15)))
    y = F.max_pool1d(torch.randn(2, 300, requires_grad=True), 257, prefer="memory")
    assert y.grad_fn.name() != "_MaxPoolBackward"


@kernels
def test_sums_of_overlapping_windows(kernel, device):
    """Overlapping gradients are summed in float32 and rounded once."""
    x = torch.zeros(1, 41, 41, device=device)
    x[:, ::2, ::2] = torch.rand(1, 21, 21, device=device) + 1
    for dtype in DTYPES:
        dy = torch.randn(1, 41, 41, device=device).to(dtype)
        with hfnn.use(kernel):
            mine = run(F.max_pool2d, x.to(dtype), 3, 1, 1, dy=dy)
        wide = run(nn.functional.max_pool2d, x.to(dtype).double(), 3, 1, 1, dy=dy.double())
        own = run(nn.functional.max_pool2d, x.to(dtype), 3, 1, 1, dy=dy)
        testing.assert_close(mine[1], wide[1], own[1], testing.GRADIENTS)


def test_second_derivative_in_channels_last(device):
    x = torch.randn(2, 5, 9, 7, dtype=torch.float64).contiguous(memory_format=torch.channels_last).requires_grad_()
    found = []
    for fn, options in ((F.max_pool2d, {"prefer": "memory"}), (nn.functional.max_pool2d, {})):
        y = fn(x, 3, 2, 1, 1, True, **options)
        (dx,) = torch.autograd.grad(y.pow(3).sum(), x, create_graph=True)
        (ddx,) = torch.autograd.grad(dx.square().sum(), x, create_graph=True)
        found.append((dx, ddx, *torch.autograd.grad(ddx.square().sum(), x)))
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want)


@dimensions
def test_what_max_pool_leaves_to_torch(dims, device):
    x = torch.randn(2, 3, *(8,) * dims, device=device, requires_grad=True)
    fn, plain = ours("max_pool", dims), torchs("max_pool", dims)
    same(fn(x, 2, return_indices=True, prefer="memory"), plain(x, 2, return_indices=True))
    for how in ((0,), (2, 0), (2, 1, 2), (2, 1, 0, 0), (9,), ((2,) * (dims + 1),), (2.5,)):
        errors = []
        for call in (lambda *how: fn(*how, prefer="memory"), plain):
            with pytest.raises((RuntimeError, TypeError)) as raised:
                call(x, *how)
            errors.append((raised.type, str(raised.value).split("\n")[0]))
        assert errors[0] == errors[1], how
    for shape in ((8,), (2, 0, *(8,) * dims)):
        with pytest.raises((RuntimeError, IndexError)):
            fn(torch.randn(shape, device=device), 2, prefer="memory")
    assert fn(x, 2).grad_fn.name() != "_MaxPoolBackward"  # too small to be worth it
    integers = torch.arange(64, device=device).view(1, 8, 8)
    if dims == 2 and device == "cpu":
        assert torch.equal(fn(integers, 2, prefer="memory"), plain(integers, 2))


@dimensions
@pytest.mark.parametrize("given", ["tuple", "list", "default stride"])
def test_forms_of_the_arguments(dims, given, device):
    x = torch.randn(2, 3, *(9,) * dims, device=device)
    window = {"tuple": (3,) * dims, "list": [3], "default stride": 3}[given]
    stride = {"tuple": (2,), "list": [2] * dims, "default stride": None}[given]
    y, dx = run(ours("max_pool", dims), x, window, stride, padding=1, ceil_mode=True, prefer="memory")
    assert y.grad_fn.name() == "_MaxPoolBackward"
    same((y, dx), run(torchs("max_pool", dims), x, window, stride, padding=1, ceil_mode=True))


# ---- adaptive max pools


@pytest.mark.parametrize("kernel", KERNELS)
@settings(max_examples=100, deadline=None, derandomize=True)
@given(data=st.data(), dtype=st.sampled_from(DTYPES))
def test_random_adaptive_max_pools_are_torchs(kernel, data, dtype):
    dims, lead, sizes = data.draw(shapes(longest=60))
    output = tuple(data.draw(st.integers(1, 7)) for _ in range(dims))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = values((*lead, *sizes), dtype, device)
    with hfnn.use(kernel):
        mine = run(ours("adaptive_max_pool", dims), x, output, prefer="memory")
    same(mine, run(torchs("adaptive_max_pool", dims), x, output))


@pytest.mark.parametrize("dims", (1, 2, 3))
def test_adaptive_max_pools_have_sizes(dims):
    x = torch.randn(2, 3, *(8,) * dims)
    for call in (
        lambda *how: ours("adaptive_max_pool", dims)(*how, prefer="memory"),
        torchs("adaptive_max_pool", dims),
    ):
        with pytest.raises(TypeError):
            call(x, None)


@dimensions
def test_adaptive_max_pools_keep_codes(dims, device):
    x = torch.randn(2, 3, *(15,) * dims, device=device, requires_grad=True)
    for output, positions in ((5, 3), (4, 5)):  # 15 in fours are windows of 4 and 5
        width = {True: 2, False: 4 if positions**dims <= 16 else 8}[positions**dims <= 4]
        fn = lambda output=output: ours("adaptive_max_pool", dims)(x, output, prefer="memory")  # noqa: E731
        kept = memory.saved_bytes(fn).total
        assert kept == -(-6 * output**dims * width // 8), (output, kept)
    same(
        ours("adaptive_max_pool", dims)(x, 4, return_indices=True, prefer="memory"),
        torchs("adaptive_max_pool", dims)(x, 4, return_indices=True),
    )


@dimensions
def test_adaptive_max_pools_twice(dims):
    x = torch.randperm(2 * 7**dims).double().view(1, 2, *(7,) * dims).requires_grad_()
    for output in (1, 3):
        fn = lambda x, output=output: ours("adaptive_max_pool", dims)(x, output, prefer="memory").square()  # noqa: E731
        assert torch.autograd.gradcheck(fn, (x,), fast_mode=True)
        assert torch.autograd.gradgradcheck(fn, (x,), fast_mode=True)


# ---- modules


MODULES = [
    *((getattr(nn, f"{kind}Pool{d}d"), (3,), d) for kind in ("Max", "Avg") for d in (1, 2, 3)),
    *((getattr(nn, f"Adaptive{kind}Pool{d}d"), (4,), d) for kind in ("Max", "Avg") for d in (1, 2, 3)),
]


@pytest.mark.parametrize("module, args, dims", MODULES)
def test_modules(module, args, dims, device):
    x = torch.randn(2, 3, *(9,) * dims, device=device)
    want = run(module(*args), x)
    converted = hfnn.convert(module(*args), prefer="memory")
    assert hfnn.is_converted(converted) and type(converted) is module
    for m in (converted, copy.deepcopy(converted), pickle.loads(pickle.dumps(converted))):
        mine = run(m, x)
        assert mine[0].grad_fn.name().startswith("_") or dims == 1  # in one dimension some end in torch's squeeze
        same(mine, want, exact(module.__name__))
    assert type(hfnn.revert(converted)) is module
    assert getattr(hfnn, module.__name__)(*args).extra_repr() == module(*args).extra_repr()


def test_options_of_modules(device):
    x = torch.randn(2, 3, 9, 9, device=device)
    for make in (
        lambda nn: nn.MaxPool2d(3, 2, 1, 2, ceil_mode=True),
        lambda nn: nn.AvgPool2d(3, 2, 1, ceil_mode=True, count_include_pad=False, divisor_override=5),
        lambda nn: nn.AdaptiveAvgPool2d((None, 4)),
        lambda nn: nn.AdaptiveMaxPool2d((None, 4)),
    ):
        m = make(hfnn)
        m.prefer = "memory"
        same(run(m, x), run(make(nn), x))
    both = hfnn.MaxPool2d(2, return_indices=True)(x)
    same(both, nn.MaxPool2d(2, return_indices=True)(x))


def test_fake_tensors():
    with FakeTensorMode():
        x = torch.empty(2, 3, 8, 8, requires_grad=True)
        for name, y in (
            ("_MaxPoolBackward", F.max_pool2d(x, 2, prefer="memory")),
            ("_AvgPoolBackward", F.avg_pool2d(x, 2, prefer="memory")),
            ("_AvgPoolBackward", F.adaptive_avg_pool2d(x, 3, prefer="memory")),
            ("_AdaptiveMaxPoolBackward", F.adaptive_max_pool2d(x, 3, prefer="memory")),
        ):
            assert y.grad_fn.name() == name
            assert torch.autograd.grad(y.sum(), x)[0].shape == x.shape


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs 20 GiB of GPU memory")
def test_more_than_2_31_elements():
    x = torch.empty(1 << 17, 1 << 14 | 2, dtype=torch.bfloat16, device="cuda").normal_().requires_grad_()
    y = F.max_pool1d(x, 2)
    assert y.grad_fn.name() == "_MaxPoolBackward"
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    tail = x[-16:].detach().requires_grad_()
    y_tail = F.max_pool1d(tail, 2, prefer="memory")
    assert torch.equal(y[-16:], y_tail)
    assert torch.equal(dx[-16:], torch.autograd.grad(y_tail, tail, torch.ones_like(y_tail))[0])


@pytest.mark.skipif(torch.cuda.is_available(), reason="which of the CPU's kernels is faster")
def test_torchs_pool_where_channels_are_last_and_little_is_saved():
    """There torch's is faster on the CPU. Ours runs from megabytes on, and if memory is preferred."""
    small, large = (torch.randn(2, 64, n, n, requires_grad=True) for n in (64, 128))
    for x, prefer, ours_runs in (
        (small, "auto", False), (small, "speed", False), (small, "memory", True),
        (large, "auto", True), (large, "speed", False), (large, "memory", True),
    ):  # fmt: skip
        last = x.detach().contiguous(memory_format=torch.channels_last).requires_grad_()
        y = hfnn.functional.max_pool2d(last, 2, prefer=prefer)
        assert (y.grad_fn.name() == "_MaxPoolBackward") is ours_runs
        assert hfnn.functional.max_pool2d(x, 2, prefer=prefer).grad_fn.name() == "_MaxPoolBackward"
        assert torch.equal(y, torch.max_pool2d(last, 2))
