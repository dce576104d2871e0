"""Group norms: modules against torch's, with activation, layouts, dtypes, errors; what is kept and rebuilt."""

import copy
import functools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import hfnn
from hfnn import memory, testing
from hfnn.core import native
from hfnn.core import node as recipe
from hfnn.core.holder import target_of
from hfnn.ops import group_norm
from hfnn.ops.batch_norm import ACTIVATIONS

from .kernels import DTYPES, KERNELS, dtypes, kernels

F = hfnn.functional
SHAPES = {2: (6, 96), 3: (3, 6, 67), 4: (3, 6, 6, 7), 5: (2, 6, 3, 4, 5)}
LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
LAYOUTS = {
    "contiguous": lambda x: x,
    "channels_last": lambda x: x.to(memory_format=LAST[x.dim()]) if x.dim() in LAST else x,
    "channels first of more": lambda x: torch.cat([x, x], 1)[:, : x.shape[1]],
    "channels last of more": lambda x: LAYOUTS["channels_last"](torch.cat([x, x], 1))[:, : x.shape[1]],
    "every other": lambda x: torch.stack([x, x], -1)[..., 0],
    "transposed": lambda x: x.transpose(1, -1).contiguous().transpose(1, -1),
    "expanded": lambda x: x[:1].expand(x.shape),
}


def ran(y) -> bool:
    return y.grad_fn.name() == "_GroupNormBackward"


def results(fn, leaves, how, dy):
    """y and the gradients of the leaves (None: absent)."""
    y = fn(leaves[0], how[0], *leaves[1:], *how[1:])
    return [y.detach(), *torch.autograd.grad(y, [t for t in leaves if t is not None], dy.to(y.dtype))]


def copies(tensors, dtype=None):
    return [t if t is None else t.detach().to(dtype or t.dtype, copy=True).requires_grad_() for t in tensors]


def held(mine, exact, own, terms):
    """The accuracy rule. Parameters' gradients are sums of `terms` terms, which Triton adds in float32."""
    for i, (a, b, c) in enumerate(zip(mine, exact, own, strict=True)):
        testing.assert_close(a, b, c, 2 * testing.GRADIENTS, f"result {i}", terms)


@kernels
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("dims", SHAPES)
@pytest.mark.parametrize("groups", [1, 3, 6])
@pytest.mark.parametrize("affine", [True, False])
def test_modules(affine, groups, dims, layout, kernel, device):
    torch.manual_seed(dims)
    theirs = nn.GroupNorm(groups, SHAPES[dims][1], affine=affine, eps=0.1 if groups == 1 else 1e-5, device=device)
    for p in theirs.parameters():
        nn.init.normal_(p)
    mine, wide = hfnn.convert(copy.deepcopy(theirs), prefer="memory"), copy.deepcopy(theirs).double()
    assert target_of(mine) is hfnn.GroupNorm
    x, dy = (LAYOUTS[layout](torch.randn(SHAPES[dims], device=device) * 2 + 1) for _ in range(2))

    def run(module, x, dy):
        x = x.detach().requires_grad_()
        y = module(x)
        return [y, *torch.autograd.grad(y, [x, *module.parameters()], dy)]

    with hfnn.use(kernel):
        found = run(mine, x, dy)
    own, exact = run(theirs, x, dy), run(wide, x.double(), dy.double())
    assert ran(found[0]) is not ((kernel, device) == ("triton", "cpu") and layout == "channels_last" and dims in LAST)
    held(found, exact, own, x.numel())
    assert [t.stride() for t in found] == [t.stride() for t in own]
    assert type(hfnn.revert(mine)) is nn.GroupNorm


@kernels
@pytest.mark.parametrize("gradient", ["contiguous", "channels_last"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dims", SHAPES)
def test_any_layout(dims, layout, gradient, kernel, device):
    """Values and strides of results and gradients are torch's."""
    x = LAYOUTS[layout](torch.randn(SHAPES[dims], device=device)).detach().requires_grad_()
    weight, bias = torch.randn(2, x.shape[1], device=device)
    dy = LAYOUTS[gradient](torch.randn(SHAPES[dims], device=device))
    want = nn.functional.group_norm(x, 2, weight, bias)
    (dwant,) = torch.autograd.grad(want, x, dy)
    with hfnn.use(kernel):
        y = F.group_norm(x, 2, weight, bias)
        (dx,) = torch.autograd.grad(y, x, dy)
    assert ran(y) or kernel == "triton"
    assert (y.stride(), dx.stride()) == (want.stride(), dwant.stride())
    torch.testing.assert_close(y, want, rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(dx, dwant, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [(1, 6, 1, 1), (1, 6, 1, 5), (4, 1, 3, 3), (1, 1, 4, 4), (3, 4, 1, 1), (2, 4, 1, 6)])
def test_strides_where_dimensions_have_one_element(shape):
    """torch's rules for the order of memory are ambiguous there."""
    for layout in (*LAYOUTS, "odd"):
        x = torch.randn(1000).as_strided(shape, (7, 7, 7, 7))
        x = (x if layout == "odd" else LAYOUTS[layout](torch.randn(shape))).detach().requires_grad_()
        dy = torch.randn(shape)
        found = []
        for fn in (functools.partial(F.group_norm, prefer="memory"), nn.functional.group_norm):
            y = fn(x, 1)
            found.append([y.stride(), torch.autograd.grad(y, x, dy)[0].stride()])
        assert found[0] == found[1], layout


@pytest.mark.parametrize("kernel", KERNELS)
@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_random_calls(kernel, data):
    """Random shapes, groups, dtypes, layouts and activations."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    groups, width = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 9 if kernel == "cpp" else 3))
    sizes = [data.draw(st.integers(1, 9 if kernel == "cpp" else 4)) for _ in range(data.draw(st.integers(0, 3)))]
    # With fewer elements per group, or per parameter's gradient, a norm of errors is random.
    width = width if width * torch.Size(sizes).numel() >= 4 else 4
    groups *= math.ceil(8 / (groups * width))
    shape = (data.draw(st.integers(4, 8)), groups * width, *sizes)
    dtype, act = data.draw(st.sampled_from(DTYPES)), data.draw(st.sampled_from(ACTIVATIONS))
    make = lambda: LAYOUTS[data.draw(st.sampled_from(["contiguous", "channels_last"]))](  # noqa: E731
        torch.randn(shape, device=device).to(dtype)
    )
    of_parameters = data.draw(st.sampled_from([torch.float32, dtype])) if device == "cpu" else dtype
    there = data.draw(st.sampled_from([(True, True), (True, False), (False, False)]))
    parameters = [torch.randn(shape[1], device=device).to(of_parameters) if t else None for t in there]
    given_, dy = [make(), *parameters], make()
    how = groups, data.draw(st.sampled_from([1e-5, 0.1])), act, data.draw(st.sampled_from([0.01, -0.3]))
    with hfnn.use(kernel):
        mine = results(F.group_norm_act, copies(given_), how, dy)
    own = results(group_norm._in_torch, copies(given_), how, dy)
    exact = results(group_norm._in_torch, copies(given_, torch.float64), how, dy)
    assert [t.stride() for t in mine] == [t.stride() for t in own]
    if act in (None, "silu") or _clear_of_kinks(exact[0]):
        held(mine, exact, own, dy.numel())


def _clear_of_kinks(y) -> bool:
    """Whether no element is so near to a kink that rounding decides its side."""
    inside = y[(y != 0) & (y != 6)]
    return inside.numel() == 0 or (float(inside.abs().min()) > 1e-2 and float((inside - 6).abs().min()) > 1e-2)


@pytest.mark.parametrize(
    "shape, groups", [((2, 32, 64, 64), 8), ((1, 8, 300, 70), 2), ((40, 70), 7), ((3, 2100, 3), 3)]
)
@pytest.mark.parametrize("last", [False, True])
@dtypes
def test_large_calls_on_the_cpu(dtype, last, shape, groups):
    """Planes, rows and groups longer and shorter than a block; sizes that pieces and parts do not divide."""
    x, dy = torch.randn(2, *shape).to(dtype)
    if last and len(shape) == 4:
        x = x.to(memory_format=torch.channels_last)
    given_ = [x, torch.randn(shape[1]), torch.randn(shape[1])]
    with hfnn.use("cpp"):
        mine = results(F.group_norm_act, copies(given_), (groups, 1e-5, "silu"), dy)
    own = results(group_norm._in_torch, copies(given_), (groups, 1e-5, "silu"), dy)
    exact = results(group_norm._in_torch, copies(given_, torch.float64), (groups, 1e-5, "silu"), dy)
    held(mine, exact, own, x.numel())


@pytest.mark.parametrize("shape", [(2, 32, 64, 64), (1, 8, 300, 70), (1000, 64)])
@pytest.mark.parametrize("last", [False, True])
def test_threads_do_not_change_bits(last, shape):
    x, dy = torch.randn(2, *shape)
    if last and len(shape) == 4:
        x = x.to(memory_format=torch.channels_last)
    given_, found, before = [x, *torch.randn(2, shape[1])], [], torch.get_num_threads()
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        try:
            with hfnn.use("cpp"):
                found.append(results(F.group_norm_act, copies(given_), (4, 1e-5, "silu"), dy))
        finally:
            torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


@kernels
def test_statistics_of_what_is_far_from_zero(kernel, device):
    """Variances are computed after subtracting the mean, not as a difference of large squares; channels may differ."""
    x = torch.randn(4, 6, 40, 10, device=device) * 0.1 + 1000
    means = torch.tensor([0.0, 1e3, -1e3, 5, 0, 1], device=device)
    apart = torch.randn(4, 6, 40, 10, device=device) + means[:, None, None]
    lasts = [t.to(memory_format=torch.channels_last) for t in (x, apart)]
    for given_x in (x, apart, *([] if (kernel, device) == ("triton", "cpu") else lasts)):
        with hfnn.use(kernel):
            y = F.group_norm(given_x, 2)
        exact = nn.functional.group_norm(given_x.double(), 2)
        torch.testing.assert_close(y.double(), exact, rtol=1e-3, atol=1e-3)


@kernels
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_is_not_finite_stays_in_its_group(value, kernel, device):
    for last in (False, True):
        x = torch.randn(2, 4, 5, 6, device=device)
        x[1, 2, 3, 4] = value
        x = x.to(memory_format=torch.channels_last) if last else x
        with hfnn.use(kernel):
            y = F.group_norm_act(x, 2, act="silu")
        want = group_norm._in_torch(x, 2, act="silu")
        torch.testing.assert_close(y, want, equal_nan=True, rtol=1e-5, atol=2e-5)
        assert y[1, 2:].isnan().all() and not y[0].isnan().any() and not y[1, :2].isnan().any()


WRONG = {
    "groups that do not divide": (lambda: torch.randn(2, 6, 4), 4, None),
    "no groups": (lambda: torch.randn(2, 6, 4), 0, None),
    "negative groups": (lambda: torch.randn(2, 6, 4), -2, None),
    "groups that are no number": (lambda: torch.randn(2, 6, 4), "2", None),
    "groups of a float": (lambda: torch.randn(2, 6, 4), 2.0, None),
    "a vector": (lambda: torch.randn(6), 2, None),
    "one value a group": (lambda: torch.randn(1, 6), 6, None),
    "one value a group, in an image": (lambda: torch.randn(1, 6, 1, 1), 6, None),
    "a short weight": (lambda: torch.randn(2, 6, 4), 2, lambda: torch.randn(5)),
    "a weight of two dimensions": (lambda: torch.randn(2, 6, 4), 2, lambda: torch.randn(6, 1)),
    "a wider weight": (lambda: torch.randn(2, 6, 4), 2, lambda: torch.randn(6).double()),
    "a narrower weight": (lambda: torch.randn(2, 6, 4), 2, lambda: torch.randn(6).half()),
    "a weight of another half": (lambda: torch.randn(2, 6, 4).bfloat16(), 2, lambda: torch.randn(6).half()),
    "integers": (lambda: torch.ones(2, 6, 4).long(), 2, None),
    "complex numbers": (lambda: torch.randn(2, 6, 4).cfloat(), 2, None),
}


@pytest.mark.parametrize("case", WRONG)
def test_errors_are_torchs(case):
    x, groups, weight = WRONG[case]
    raised = []
    for fn in (functools.partial(F.group_norm, prefer="memory"), nn.functional.group_norm):
        with pytest.raises(Exception) as error:
            fn(x(), groups, None if weight is None else weight())
        raised.append((error.type, str(error.value)))
    assert raised[0] == raised[1]


def test_errors_of_our_own():
    with pytest.raises(ValueError, match="act='gelu': choose one of"):
        F.group_norm_act(torch.randn(2, 6, 4), 2, act="gelu")


@pytest.mark.parametrize("shape", [(0, 6, 4), (2, 0, 4), (2, 6, 0)])
def test_empty_inputs(shape):
    found = []
    for fn in (functools.partial(F.group_norm, prefer="memory"), nn.functional.group_norm):
        x, weight = torch.randn(shape, requires_grad=True), torch.ones(shape[1], requires_grad=True)
        y = fn(x, 3, weight)
        found.append((y, *torch.autograd.grad(y.sum(), (x, weight))))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, equal_nan=True)


@dtypes
@pytest.mark.parametrize("of_parameters", DTYPES, ids=str)
@pytest.mark.parametrize("low", [None, torch.bfloat16, torch.float16], ids=str)
def test_dtypes_and_autocast_on_the_cpu(low, of_parameters, dtype):
    """The result's dtype, or torch's error."""
    x, weight, bias = torch.randn(2, 6, 5).to(dtype), *torch.randn(2, 6).to(of_parameters)
    found = []
    for fn in (functools.partial(F.group_norm, prefer="memory"), nn.functional.group_norm):
        with torch.autocast("cpu", dtype=low or torch.bfloat16, enabled=low is not None):
            try:
                found.append(fn(x, 3, weight, bias).dtype)
            except RuntimeError as error:
                found.append(str(error))
    assert found[0] == found[1]


@kernels
@pytest.mark.parametrize("last", [False, True])
def test_what_is_kept(last, kernel, device):
    """x alone, where torch also keeps the norm's result. Modules also keep what a convolution reads."""
    if last and kernel == "triton":
        return
    x = torch.randn(4, 16, 8, 8, device=device)
    x = (x.to(memory_format=torch.channels_last) if last else x).requires_grad_()
    statistics = 2 * 4 * 4 * 4
    for act in ACTIVATIONS:
        with hfnn.use(kernel):
            assert memory.saved_bytes(functools.partial(F.group_norm_act, x, 4, act=act)).total == x.nbytes + statistics
    stock = nn.Sequential(nn.GroupNorm(4, 16), nn.SiLU(), nn.Conv2d(16, 16, 3, padding=1)).to(device)
    model = hfnn.convert(copy.deepcopy(stock), prefer="memory")
    parameters = sum(p.nbytes for p in model.parameters()) - 2 * 16 * 4  # neither bias is kept
    with hfnn.use(kernel):
        recipe.counter.reset()
        kept = memory.saved_bytes(lambda: model(x * 1)).total
        assert recipe.counter.taken == 2
    assert kept <= x.nbytes + statistics + parameters + 16 * 4  # except what rebuilds the norm's result
    assert memory.saved_bytes(lambda: stock(x * 1)).total >= 3 * x.nbytes


@kernels
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("act", ACTIVATIONS)
def test_rebuilt_to_the_bit(act, last, kernel, device, request):
    """A consumer that rebuilds an activated norm gets exactly forward's result."""
    kept = []
    native.extension.watch(lambda y: kept.append(y.clone()))
    request.addfinalizer(lambda: native.extension.watch(None))
    x, w = torch.randn(4, 6, 5, 8, device=device).requires_grad_(), torch.randn(3, 8, device=device).requires_grad_()
    weight, bias = (nn.Parameter(p) for p in torch.randn(2, 6, device=device))
    with hfnn.use(kernel):
        x = (x * 1).contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)
        y = F.group_norm_act(x, 3, weight, bias, act=act)
        made, stepped = y.detach().clone(), ran(y)
        F.linear(y, w).square().mean().backward()
    assert not stepped or (len(kept) == 1 and torch.equal(kept.pop(), made))
    assert stepped is not ((kernel, device) == ("triton", "cpu") and last)


def test_a_bias_may_be_written_to_before_backward(device):
    """As in torch: backward does not read it. A rebuild of y, which does, raises an error."""
    theirs = nn.GroupNorm(2, 8).to(device)
    mine = hfnn.convert(copy.deepcopy(theirs), prefer="memory")
    start, dy = torch.randn(2, 2, 8, 5, 5, device=device)

    def gradients(module):
        x = start.clone().requires_grad_()
        y = module(x)
        with torch.no_grad():
            module.bias.add_(1)
        return torch.autograd.grad(y, (x, *module.parameters()), dy)

    for a, b in zip(gradients(mine), gradients(theirs), strict=True):
        torch.testing.assert_close(a, b)
    model = hfnn.convert(nn.Sequential(nn.GroupNorm(2, 8), nn.GELU()).to(device), prefer="memory")
    y = model(start.clone().requires_grad_())
    with torch.no_grad():
        model[0].bias.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("frozen", ["x", "weight", "both"])
def test_second_derivatives_of_what_is_frozen(frozen, last):
    """gradcheck, also with constant channels-last x, on which torch's own backward crashes."""
    x = torch.randn(2, 4, 2, 3, dtype=torch.float64)
    x = x.to(memory_format=torch.channels_last) if last else x
    weight, bias = torch.randn(2, 4, dtype=torch.float64)
    x.requires_grad_(frozen == "weight")
    weight.requires_grad_(frozen == "x")
    bias.requires_grad_()
    wanted = [t for t in (x, weight, bias) if t.requires_grad]

    def fn(*tensors):
        rest = iter(tensors)
        return F.group_norm_act(*(next(rest) if t.requires_grad else t for t in (x,)), 2,
                                *(next(rest) if t.requires_grad else t for t in (weight, bias)), act="silu",
                                prefer="memory")  # fmt: skip

    assert torch.autograd.gradcheck(fn, wanted)
    assert torch.autograd.gradgradcheck(fn, wanted)


@pytest.mark.skipif(torch.cuda.is_available(), reason="which of the CPU's kernels is faster")
@pytest.mark.parametrize(
    "shape, act, prefer, ours",
    [
        ((2, 64, 64, 64), "silu", "auto", True),
        ((2, 64, 64, 64), "silu", "speed", True),
        ((1, 64, 64, 64), "silu", "auto", False),
        ((1, 64, 64, 64), "silu", "memory", True),
        ((2, 64, 64, 64), None, "auto", False),  # alone no faster; runs from megabytes on, to save memory
        ((8, 64, 64, 64), None, "auto", True),
        ((8, 64, 64, 64), None, "speed", False),
        ((64, 256, 8, 8), "silu", "auto", False),  # small planes
        ((64, 256, 8, 8), "silu", "memory", True),
    ],
)
def test_where_torchs_ops_are_faster(shape, act, prefer, ours):
    x = torch.empty(shape).normal_().requires_grad_()
    fn = functools.partial(F.group_norm_act, act=act) if act else F.group_norm
    assert ran(fn(x, 8, prefer=prefer)) is ours
    if not act:
        with torch.no_grad():
            assert torch.equal(fn(x, 8, prefer=prefer), nn.functional.group_norm(x, 8))
