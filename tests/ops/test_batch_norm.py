"""Batch norm modules against torch's, batch after batch; with sum and activation; layouts; what is kept."""

import copy
import functools

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
from hfnn.ops import batch_norm
from hfnn.ops.batch_norm import ACTIVATIONS

from .kernels import DTYPES, KERNELS, dtypes, kernels

F = hfnn.functional
MODULES = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
SHAPES = {2: (6, 769), 3: (3, 5, 67), 4: (3, 5, 6, 7), 5: (2, 3, 3, 4, 5)}
LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
LAYOUTS = {
    "contiguous": lambda x: x,
    "channels_last": lambda x: x.to(memory_format=LAST[x.dim()]) if x.dim() in LAST else x,
    "channels first of more": lambda x: torch.cat([x, x], 1)[:, : x.shape[1]],
    "channels last of more": lambda x: LAYOUTS["channels_last"](torch.cat([x, x], 1))[:, : x.shape[1]],
    "every other": lambda x: torch.stack([x, x], -1)[..., 0],
    "transposed": lambda x: x.transpose(1, -1).contiguous().transpose(1, -1),
    "expanded": lambda x: x[:, :1].expand(x.shape),
}
CASES = {
    "training": {},
    "momentum 0.3": {"momentum": 0.3},
    "cumulative": {"momentum": None},
    "not tracked": {"track_running_stats": False},
    "not affine": {"affine": False},
    "eps 0.1": {"eps": 0.1},
}


def stepped(module, batches, dys):
    """Outputs and gradients of inputs and parameters for each batch, then all buffers."""
    found = []
    for x, dy in zip(batches, dys, strict=True):
        x = x.detach().requires_grad_()
        y = module(x)
        found += [y, *torch.autograd.grad(y, [x, *(p for p in module.parameters() if p.requires_grad)], dy)]
    return [*found, *(b.clone() for b in module.buffers())]


def held(mine, exact, own, name, terms, exactly=True):
    """The accuracy rule. For sums by channel, if not `exactly`, the accumulated roundings of that many terms of 1.

    torch's CPU sums are float64; ours with channels last, and Triton's, are float32. So is our product of rstd and
    weight, which is rounded twice; with few channels that may be the only error.
    """
    if not exact.is_floating_point():
        assert torch.equal(mine, exact)
    elif mine.dim() == 1 and not exactly:
        rounding = 8 * torch.finfo(torch.float32).eps * terms**0.5
        torch.testing.assert_close(mine.double(), exact, rtol=4 * torch.finfo(mine.dtype).eps, atol=rounding)
    else:
        testing.assert_close(mine, exact, own, testing.GRADIENTS * (1 if exactly else 2), name, terms)


def random_parts(module):
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn(p.shape) * 0.5 + 1)
        for name, b in module.named_buffers():
            if "mean" in name:
                b.copy_(torch.randn(b.shape))
            elif "var" in name:
                b.copy_(torch.rand(b.shape) + 0.5)
    return module


@kernels
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("dims", SHAPES)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("mode", ["train", "eval", "frozen"])
def test_modules_batch_after_batch(mode, case, dims, layout, kernel, device):
    """Three batches: values, gradients, then the running statistics and the count."""
    if (layout == "channels_last" and dims not in LAST) or (
        kernel == "triton" and case not in ("training", "cumulative")
    ):
        return
    shape = (3, 16, 2, 2) if dims == 4 and kernel == "triton" else SHAPES[dims]
    theirs = random_parts(MODULES[dims](shape[1], device=device, **CASES[case])).train(mode != "eval")
    if mode == "frozen":  # in eval inside a model that trains
        theirs.eval()
        theirs.requires_grad_(False)
    mine, wide = hfnn.convert(copy.deepcopy(theirs), prefer="memory"), copy.deepcopy(theirs).double()
    assert target_of(mine) is getattr(hfnn, type(theirs).__name__)
    batches = [LAYOUTS[layout](torch.randn(shape, device=device) * (i + 1) + i) for i in range(3)]
    dys = [LAYOUTS[layout](torch.randn(shape, device=device)) for _ in range(3)]
    own = stepped(theirs, batches, dys)
    exact = stepped(wide, [x.double() for x in batches], [dy.double() for dy in dys])
    with hfnn.use(kernel):
        found = stepped(mine, batches, dys)
    strided = device == "cuda" and layout == "channels_last" and mode != "train"  # torch's gradient is contiguous there
    assert (found[0].grad_fn.name() == "_BatchNormBackward") is not strided
    assert len(found) == len(exact)
    for i, (a, b, c) in enumerate(zip(found, exact, own, strict=True)):
        held(a, b, c, f"result {i}", batches[0].numel(), kernel == "cpp")
        assert a.stride() == c.stride()


@kernels
@pytest.mark.parametrize("gradient", ["contiguous", "channels_last"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dims", SHAPES)
def test_any_layout(dims, layout, gradient, kernel, device):
    """Values and strides of results and gradients are torch's; dense tensors are not copied."""
    x = LAYOUTS[layout](torch.randn(SHAPES[dims], device=device)).detach().requires_grad_()
    weight, bias = torch.randn(2, x.shape[1], device=device)
    dy = LAYOUTS[gradient](torch.randn(SHAPES[dims], device=device))
    want = nn.functional.batch_norm(x, None, None, weight, bias, True)
    (dwant,) = torch.autograd.grad(want, x, dy)
    with hfnn.use(kernel):
        y = F.batch_norm(x, None, None, weight, bias, True)
        (dx,) = torch.autograd.grad(y, x, dy)
    assert y.grad_fn.name() == "_BatchNormBackward"
    assert (y.stride(), dx.stride()) == (want.stride(), dwant.stride())
    torch.testing.assert_close(y, want, rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(dx, dwant, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kernel", KERNELS)
@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_random_calls(kernel, data):
    """Random shapes, dtypes, layouts and options, with sum and activation."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    most = 40 if kernel == "cpp" else 10
    dims = data.draw(st.integers(0, 3 if kernel == "cpp" else 2))
    # With fewer elements a norm of errors is random.
    shape = (data.draw(st.integers(8, 16)), data.draw(st.integers(8, most)), *(
        data.draw(st.integers(1, 8)) for _ in range(dims)))  # fmt: skip
    dtype = data.draw(st.sampled_from(DTYPES))
    act = data.draw(st.sampled_from(ACTIVATIONS))
    residual = data.draw(st.booleans()) and act not in ("silu", "hardswish")
    layout = data.draw(st.sampled_from(["contiguous", "channels_last"]))
    make = lambda: LAYOUTS[layout](torch.randn(shape, device=device).to(dtype))  # noqa: E731
    of_parameters = data.draw(st.sampled_from([torch.float32, dtype]))
    parameter = lambda: torch.randn(shape[1], device=device).to(of_parameters)  # noqa: E731
    x, weight, bias, dy = make(), parameter(), parameter(), make()
    weight, bias = (None, None) if data.draw(st.booleans()) else (weight, bias)
    training = data.draw(st.booleans())
    running = parameter(), parameter().abs() + 0.5
    if weight is None:
        running = tuple(r.to(dtype) for r in running)
    how = training, data.draw(st.sampled_from([0.0, 0.1, 1.0])), data.draw(st.sampled_from([1e-5, 0.1]))
    slope = data.draw(st.sampled_from([0.01, -0.3]))
    given_residual = make() if residual else None

    def run(fn, to):
        leaves = [t if t is None else t.detach().to(to(t)).clone(memory_format=torch.preserve_format).requires_grad_()
                  for t in (x, weight, bias, given_residual)]  # fmt: skip
        moved = [r.to(to(r), copy=True) for r in running]
        y = fn(leaves[0], *moved, *leaves[1:3], *how, leaves[3], act, slope)
        grads = torch.autograd.grad(y, [t for t in leaves if t is not None], dy.to(y.dtype))
        return [y.detach(), *grads, *moved]

    with hfnn.use(kernel):
        mine = run(F.batch_norm_act, lambda t: t.dtype)
    own, exact = run(batch_norm._in_torch, lambda t: t.dtype), run(batch_norm._in_torch, lambda t: torch.float64)
    if act not in (None, "silu") and not _clear_of_kinks(exact[0]):
        return
    for i, (a, b, c) in enumerate(zip(mine, exact, own, strict=True)):
        held(a, b, c, f"result {i}", x.numel(), exactly=False)
    assert mine[0].stride() == own[0].stride()


def _clear_of_kinks(y) -> bool:
    """Whether no element is so near to a kink that rounding decides its side."""
    inside = y[(y != 0) & (y != 6)]
    return inside.numel() == 0 or (float(inside.abs().min()) > 1e-2 and float((inside - 6).abs().min()) > 1e-2)


@kernels
@dtypes
@pytest.mark.parametrize("act", ["relu", "leaky_relu", "relu6"])
@pytest.mark.parametrize("channels, last", [(5, True), (8, True), (5, False)])
def test_the_sides_of_kinks_are_those_of_the_sum(channels, last, act, dtype, kernel, device):
    """With a residual, backward uses the side that forward decided for each element, however it was rounded."""
    x, r, dy = (torch.randn(3, channels, 7, 9, device=device).to(dtype) for _ in range(3))
    if last:
        x, r, dy = (t.to(memory_format=torch.channels_last) for t in (x, r, dy))
    r = r.requires_grad_()
    with hfnn.use(kernel):
        y = F.batch_norm_act(x, None, None, None, None, True, residual=r, act=act, negative_slope=0.25)
        (dr,) = torch.autograd.grad(y, r, dy)
    outside = 0.25 if act == "leaky_relu" else 0.0
    inside = (y > 0) & (y < 6) if act == "relu6" else y > 0
    decided = y != (6 if act == "relu6" else 0) if dtype is torch.float32 else y.abs() > 1e-3
    torch.testing.assert_close(dr[decided], torch.where(inside, dy, dy * outside)[decided], rtol=0, atol=0)


@kernels
def test_a_single_batch_moves_the_statistics_once(kernel, device):
    """Rebuilding, repeated and second derivatives, and backward itself leave the running statistics unchanged."""
    torch.manual_seed(0)
    norm = hfnn.BatchNorm2d(6, device=device)
    norm.prefer = "memory"
    conv = nn.Conv2d(6, 6, 1, device=device)
    linear = hfnn.Linear(4, 6, device=device)
    linear.prefer = "memory"
    with hfnn.use(kernel):
        recipe.counter.reset()
        loss = linear(norm(conv(torch.randn(3, 6, 5, 4, device=device)))).square().mean()
        seen = norm.running_mean.clone(), norm.running_var.clone(), norm.num_batches_tracked.clone()
        assert seen[2] == 1 and seen[0].any()
        wanted = [*conv.parameters(), *norm.parameters(), *linear.parameters()]
        first = torch.autograd.grad(loss, wanted, retain_graph=True)
        assert recipe.counter.rebuilt
        again = torch.autograd.grad(loss, wanted, create_graph=True)
        torch.autograd.grad(sum(g.square().sum() for g in again), wanted, allow_unused=True)
    assert all(map(torch.equal, seen, (norm.running_mean, norm.running_var, norm.num_batches_tracked)))
    for a, b in zip(first, again, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@kernels
@pytest.mark.parametrize("last", [False, True])
def test_what_is_kept(last, kernel, device):
    """x and a bit per element, where torch keeps x and the sum's result."""
    x, r = (torch.randn(4, 16, 8, 8, device=device) for _ in range(2))
    if last:
        x, r = (t.to(memory_format=torch.channels_last) for t in (x, r))
    x, r = x.requires_grad_(), r.requires_grad_()
    for act, residual, bytes_ in (("relu", None, 0), ("relu", r, x.numel() // 8), ("silu", None, 0), (None, r, 0)):
        with hfnn.use(kernel):
            behind = {"residual": residual, "act": act}
            kept = memory.saved_bytes(functools.partial(F.batch_norm_act, x, None, None, training=True, **behind))
        assert kept.total == x.nbytes + 2 * 16 * 4 + bytes_


@kernels
@pytest.mark.parametrize("last", [False, True])
def test_rebuilt_to_the_bit(last, kernel, device, request):
    """A consumer that rebuilds an activated norm gets exactly forward's result."""
    x = torch.randn(4, 6, 5, 8, device=device).requires_grad_()
    w = torch.randn(3, 8, device=device).requires_grad_()
    kept = []
    if native.extension is not None:
        native.extension.watch(lambda y: kept.append(y.clone()))
        request.addfinalizer(lambda: native.extension.watch(None))
    for act in ACTIVATIONS:
        with hfnn.use(kernel):
            given_x = (x * 1).contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)
            y = F.batch_norm_act(given_x, None, None, act=act, training=True)
            made = y.detach().clone()
            F.linear(y, w).square().mean().backward()
        assert len(kept) == 1 and torch.equal(kept.pop(), made)


def test_what_goes_to_torch_raises_what_torch_raises(device):
    x = torch.randn(1, 4, device=device)
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        F.batch_norm(x, None, None, training=True, prefer="memory")
    with pytest.raises(ValueError, match="expected 4D input"):
        hfnn.convert(nn.BatchNorm2d(4, device=device), prefer="memory")(torch.randn(3, 4, 5, device=device))
    with pytest.raises(RuntimeError, match="running_mean"):
        F.batch_norm(torch.randn(3, 4, device=device), torch.zeros(5, device=device), torch.ones(5, device=device),
                     prefer="memory")  # fmt: skip
    with pytest.raises(ValueError, match="act='gelu': choose one of"):
        F.batch_norm_act(x, None, None, act="gelu")
    empty = torch.randn(0, 4, 3, device=device)
    assert F.batch_norm(empty, None, None, training=True, prefer="memory").shape == empty.shape


@kernels
def test_statistics_of_what_is_far_from_zero(kernel, device):
    """Variances are computed after subtracting the mean, not as a difference of large squares."""
    x = (torch.randn(64, 3, 40, device=device) * 0.1 + 1000).float()
    for given_x in (x, x.transpose(1, 2).reshape(-1, 3)):
        dims = (0, 2) if given_x.dim() == 3 else (0,)
        var = torch.zeros(3, device=device)
        with hfnn.use(kernel):
            F.batch_norm(given_x, torch.zeros(3, device=device), var, training=True, momentum=1.0)
        torch.testing.assert_close(var.double(), given_x.double().var(dims), rtol=1e-3, atol=0)


@pytest.mark.parametrize("shape", [(64, 8, 24, 24), (3, 4, 200, 300), (16, 300, 7, 7), (200000, 2)])
@pytest.mark.parametrize("last", [False, True])
def test_threads_do_not_change_bits(last, shape):
    """Results, sums and running statistics are bitwise equal."""
    x, r, dy = (torch.randn(shape) for _ in range(3))
    if last and len(shape) == 4:
        x, r, dy = (t.to(memory_format=torch.channels_last) for t in (x, r, dy))
    weight, bias = torch.randn(2, shape[1])
    found = []
    before = torch.get_num_threads()
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        try:
            leaves = [t.detach().requires_grad_() for t in (x, weight, bias, r)]
            running = torch.zeros(shape[1]), torch.ones(shape[1])
            with hfnn.use("cpp"):
                y = F.batch_norm_act(leaves[0], *running, *leaves[1:3], True, 0.1, 1e-5, leaves[3], "relu")
                found.append([y.detach(), *torch.autograd.grad(y, leaves, dy), *running])
        finally:
            torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("shape", [(5, 3, 300), (2, 3, 5000), (70, 30, 9), (3000, 20, 1), (300, 1100, 1)])
@dtypes
def test_large_calls_on_the_cpu(shape, dtype):
    """Planes and rows longer and shorter than a block; sizes that blocks and chunks do not divide."""
    torch.manual_seed(0)
    x = torch.randn(shape).to(dtype) if shape[-1] > 1 else torch.randn(shape[:2]).to(dtype)
    weight, bias, r, dy = torch.randn(shape[1]), torch.randn(shape[1]), torch.randn_like(x), torch.randn_like(x)

    def run(fn, wide):
        leaves = [t.detach().to(torch.float64 if wide else t.dtype).requires_grad_() for t in (x, weight, bias, r)]
        y = fn(leaves[0], None, None, *leaves[1:3], True, residual=leaves[3])
        return [y, *torch.autograd.grad(y, leaves, dy.to(y.dtype))]

    with hfnn.use("cpp"):
        mine = run(F.batch_norm_act, False)
    exact, own = run(batch_norm._in_torch, True), run(batch_norm._in_torch, False)
    for i, (a, b, c) in enumerate(zip(mine, exact, own, strict=True)):
        testing.assert_close(a, b, c, testing.GRADIENTS, f"result {i}", x.numel())


@pytest.mark.skipif(torch.cuda.is_available(), reason="which of the CPU's kernels is faster")
def test_torchs_ops_where_channels_are_last_and_tensors_fit_into_caches():
    """With a sum. Without one ours is faster there, too."""
    for size, with_sum, prefer, ours_runs in (
        (48, True, "auto", False), (48, True, "speed", False), (48, True, "memory", True),
        (48, False, "auto", True), (64, True, "auto", True),
    ):  # fmt: skip
        x, residual = (torch.randn(4, 64, size, size).to(memory_format=torch.channels_last) for _ in range(2))
        weight = torch.ones(64, requires_grad=True)
        y = hfnn.functional.batch_norm_act(
            x, None, None, weight, None, True, residual=residual if with_sum else None, act="relu", prefer=prefer
        )
        assert (y.grad_fn.name() == "_BatchNormBackward") is ours_runs


def test_a_bias_may_be_written_to_before_backward(device):
    """As in torch: backward does not read it. A rebuild of y, which does, raises an error."""
    theirs = nn.BatchNorm2d(8).to(device)
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
    model = hfnn.convert(nn.Sequential(nn.BatchNorm2d(8), nn.GELU()).to(device), prefer="memory")
    y = model(start.clone().requires_grad_())
    with torch.no_grad():
        model[0].bias.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_graph_of_the_gradient_of_one_image():
    """A dimension of size 1 keeps its stride: of another one torch's gradient makes wrong numbers."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.LayerNorm(16), nn.BatchNorm2d(16)

        def forward(self, x):
            return self.second(self.first(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2))

    stock = Model().double()
    ours = hfnn.convert(copy.deepcopy(stock), prefer="memory")
    found, dy = [], torch.randn(1, 16, 4, 4, dtype=torch.float64)
    x = torch.randn(1, 16, 4, 4, dtype=torch.float64, requires_grad=True)
    for model in (stock, ours):
        wanted = [x, *model.second.parameters()]
        first = torch.autograd.grad(model(x), wanted, dy, create_graph=True)
        found.append([*first, *torch.autograd.grad(sum(g.square().sum() for g in first), wanted, allow_unused=True)])
    torch.testing.assert_close(found[1], found[0])
