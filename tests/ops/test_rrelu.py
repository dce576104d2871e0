"""prelu, rrelu and relu_dropout beyond the contract: what they keep of slopes, of draws, and of their result."""

import functools
import math

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hfnn
from hfnn.core.holder import target_of
from hfnn.ops import rrelu as rrelu_room

from .kernels import kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
INF, NAN = math.inf, math.nan


def skip_unless_taken(kernel, dtype):
    if kernel == "triton" and dtype is torch.float64:
        pytest.skip("Triton's kernels take no float64")


def assert_same(a, b, x):
    same = (a == b) | (a.isnan() & b.isnan())
    assert a.dtype is b.dtype and same.all(), f"at {x[~same]}: {a[~same]}, torch {b[~same]}"


# prelu


@kernels
@dtypes
@pytest.mark.parametrize("shape, slopes", [((5,), 1), ((), 1), ((4, 6), 6), ((2, 3, 5, 7), 3), ((3, 1, 4), 1)])
def test_prelu_with_a_weight_that_wants_no_gradient(shape, slopes, dtype, kernel):
    skip_unless_taken(kernel, dtype)
    weight = torch.randn(slopes, device=DEVICE).to(dtype)
    x = torch.randn(shape, device=DEVICE).to(dtype)
    if x.dim():
        x.view(-1)[:4] = torch.tensor([0.0, -0.0, NAN, -INF])
    dy, found = torch.randn(shape, device=DEVICE).to(dtype), []
    for fn in (hfnn.functional.prelu, nn.functional.prelu):
        leaf = x.clone().requires_grad_()
        with hfnn.use(kernel):
            y = fn(leaf, weight)
        found.append((y, *torch.autograd.grad(y, leaf, dy)))
    assert found[0][0].grad_fn.name().startswith("_PReLU")
    for mine, torchs_ in zip(*found, strict=True):
        torch.testing.assert_close(mine, torchs_, rtol=0, atol=0, equal_nan=True)


def test_prelu_keeps_a_bit_only_where_the_weight_is_frozen():
    x = torch.randn(8, 64, device=DEVICE, requires_grad=True)
    module = hfnn.convert(nn.PReLU(64).to(DEVICE), prefer="memory")
    assert target_of(module) is hfnn.PReLU
    y = module(x)
    y.sum().backward()
    assert y.grad_fn.name() == "PreluKernelBackward0"
    assert torch.equal(module.weight.grad, torch.where(x > 0, 0, x).sum(0).detach())
    module.requires_grad_(False)
    saved = hfnn.memory.saved_bytes(lambda: module(x))
    assert saved.by_op == {"PReLU": x.numel() // 8 + module.weight.nbytes}
    with pytest.raises(RuntimeError):
        hfnn.functional.prelu(x, torch.ones(3, device=DEVICE), prefer="memory")


# rrelu


def drawn(x, **options):
    return hfnn.functional.rrelu(x, training=True, prefer="memory", **options)


@dtypes
def test_rrelu(dtype):
    if DEVICE == "cpu" and dtype is torch.float16:
        with pytest.raises(NotImplementedError, match="Half"):  # as in torch
            hfnn.functional.rrelu(torch.ones(4, dtype=dtype), training=True, prefer="memory")
        return
    """Slopes within their bounds and evenly so; the gradient has the same slopes, twice over."""
    x = torch.randn(1 << 14, device=DEVICE).to(dtype)
    x[:4] = torch.tensor([0.0, -0.0, INF, NAN])
    x.requires_grad_()
    y = drawn(x, lower=0.25, upper=0.5)
    (slopes,) = torch.autograd.grad(y, x, torch.ones_like(y), retain_graph=True)
    assert y.grad_fn.name().startswith("_RReLU") and y.dtype is dtype
    assert_same(y.detach(), (x * slopes).detach(), x)
    assert torch.equal(slopes == 1, ~(x <= 0))
    kept = slopes[x <= 0].double()
    assert (
        kept.min() >= 0.25 and kept.max() <= 0.5 and abs(kept.mean() - 0.375) < 0.01 and abs(kept.std() - 0.072) < 0.01
    )
    (again,) = torch.autograd.grad(y, x, torch.ones_like(y), retain_graph=True)
    assert torch.equal(again, slopes)
    dy = torch.ones_like(y, requires_grad=True)
    (dx,) = torch.autograd.grad(y, x, dy, create_graph=True)
    assert torch.equal(torch.autograd.grad(dx.sum(), dy)[0], slopes)


def test_rrelu_is_right_to_gradcheck():
    x = rrelu_room.sample((3, 5), torch.float64, DEVICE)[0][0].requires_grad_()

    def fn(x):
        torch.manual_seed(7)
        return drawn(x)

    assert torch.autograd.gradcheck(fn, x) and torch.autograd.gradgradcheck(fn, x)


def test_rrelu_matches_the_definition():
    (x, *options), _ = rrelu_room.sample((3, 769), torch.float32, DEVICE)
    x.requires_grad_()
    y = hfnn.functional.rrelu(x, *options, prefer="memory")
    pin = rrelu_room.OP.pin((x,), y)
    want = rrelu_room.reference(x, *options, **pin)
    torch.testing.assert_close(y, want)
    torch.testing.assert_close(*(torch.autograd.grad(out.square().sum(), x)[0] for out in (y, want)))


def test_rrelu_keeps_a_bit_and_a_seed():
    x = torch.randn(3, 769, device=DEVICE, requires_grad=True)
    assert hfnn.memory.saved_bytes(lambda: drawn(x)).total == -(-x.numel() // 8)


@pytest.mark.parametrize("layout", [lambda x: x.t(), lambda x: x[:, ::2], lambda x: x[:1].expand(64, 64)])
def test_rrelu_of_any_layout(layout):
    x = layout(torch.randn(64, 64, device=DEVICE))
    kept, found = x.clone(), []
    for one in (x, x.contiguous()):
        torch.manual_seed(3)
        leaf = one.detach().requires_grad_()
        y = drawn(leaf)
        dy = torch.randn(y.shape, generator=torch.Generator(DEVICE).manual_seed(4), device=DEVICE)
        found.append((y, *torch.autograd.grad(y, leaf, layout(dy) if layout(dy).shape == dy.shape else dy)))
    assert all(map(torch.equal, *found)) and torch.equal(x, kept)


def test_rrelu_draws_follow_torchs_generator():
    x = torch.full((4096,), -1.0, device=DEVICE, requires_grad=True)
    torch.manual_seed(5)
    first, second = drawn(x), drawn(x)
    assert not torch.equal(first, second)
    torch.manual_seed(5)
    assert torch.equal(drawn(x), first) and torch.equal(drawn(x), second)


@pytest.mark.parametrize("reentrant", [False, True])
def test_rrelu_in_a_checkpoint_draws_the_same(reentrant):
    x = torch.full((4096,), -1.0, device=DEVICE, requires_grad=True)
    y = checkpoint(lambda x: drawn(x) * x, x, use_reentrant=reentrant)
    y.sum().backward()
    torch.testing.assert_close(x.grad, 2 * y / x)


def test_rrelu_in_evaluation_and_where_torchs_runs():
    x = torch.randn(8, 64, device=DEVICE, requires_grad=True)
    module = hfnn.convert(nn.RReLU(0.1, 0.3), prefer="memory")
    assert target_of(module) is hfnn.RReLU and module(x).grad_fn.name().startswith("_RReLU")
    y = module.eval()(x)
    torch.testing.assert_close(y, nn.functional.leaky_relu(x, 0.2))
    assert hfnn.memory.saved_bytes(lambda: module(x)).total == x.numel() // 8
    assert not hfnn.functional.rrelu(x, training=True, prefer="speed").grad_fn.name().startswith("_")
    assert not hfnn.functional.rrelu(x, training=True).grad_fn.name().startswith("_"), "too small to be worth it"
    with hfnn.use("torch"):
        assert not drawn(x).grad_fn.name().startswith("_")
    with torch.no_grad():
        assert drawn(x).shape == x.shape
    z = x.detach().clone()
    assert drawn(z, inplace=True) is z
    for training in (False, True):
        with pytest.raises(RuntimeError, match=r"[Ll]ower bound"):
            hfnn.functional.rrelu(x, 0.5, 0.1, training, prefer="memory")


# relu_dropout


@kernels
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_relu_dropout_is_dropout_of_relu(dtype, kernel):
    """Bitwise, with the draw of hfnn's dropout, NaN and infinities included."""
    x = torch.randn(5003, device=DEVICE).mul(2).to(dtype)
    x[:9] = torch.tensor([0.0, -0.0, INF, -INF, NAN, NAN, NAN, INF, INF])
    found = []
    for fn in (hfnn.functional.relu_dropout, lambda x, p: hfnn.functional.dropout(torch.relu(x), p)):
        leaf = x.clone().requires_grad_()
        torch.manual_seed(11)
        with hfnn.use(kernel):
            y = fn(leaf, 0.3)
            (dx,) = torch.autograd.grad(y, leaf, torch.full_like(y, 0.7))
        found.append((y.detach(), dx))
    assert_same(found[0][0], found[1][0], x)
    assert_same(found[0][1], found[1][1], x)
    dropped = (found[0][0] == 0) & (x > 0)
    assert abs(dropped.sum() / (x > 0).sum() - 0.3) < 0.05


def test_relu_dropout_keeps_its_result_alone():
    """The next layer keeps the same memory, so relu_dropout adds nothing to it."""
    x = torch.randn(64, 64, device=DEVICE, requires_grad=True)
    weight = nn.Parameter(torch.randn(8, 64, device=DEVICE))
    fused = hfnn.memory.saved_bytes(
        lambda: nn.functional.linear(hfnn.functional.relu_dropout(x, prefer="memory"), weight)
    )
    assert fused.total == x.nbytes


def test_relu_dropout_at_its_limits():
    x = torch.randn(64, device=DEVICE, requires_grad=True)
    run = functools.partial(hfnn.functional.relu_dropout, x, prefer="memory")
    assert torch.equal(run(0.0), x.relu()) and torch.equal(run(0.5, False), x.relu()) and not run(1.0).any()
    for p in (-0.1, 1.1):
        with pytest.raises(ValueError, match="dropout probability"):
            run(p)


def test_the_second_derivative_of_relu_dropout_is_zero():
    """As for torch's two ops, not None."""
    x = torch.randn(5, 64, requires_grad=True)
    for fn in (hfnn.functional.relu_dropout, lambda x, **_: nn.functional.dropout(torch.relu(x))):
        (dx,) = torch.autograd.grad(fn(x, prefer="memory").sum(), x, create_graph=True)
        (ddx,) = torch.autograd.grad(dx.square().sum(), x)
        assert dx.requires_grad and not ddx.any()


def test_strides_of_rrelu_are_torchs():
    x = torch.randn(4, 8, 3).permute(2, 1, 0).requires_grad_()
    for dy in (torch.randn(3, 8, 4), torch.randn(4, 8, 3).permute(2, 1, 0)):
        ours = hfnn.functional.rrelu(x, training=True, prefer="memory")
        stock = nn.functional.rrelu(x, training=True)
        assert ours.stride() == stock.stride()
        assert torch.autograd.grad(ours, x, dy)[0].stride() == torch.autograd.grad(stock, x, dy)[0].stride()


def test_batched_gradients_of_no_rows(device):
    model = nn.Sequential(nn.Linear(8, 8), nn.RReLU()).to(device)
    hfnn.convert(model, prefer="memory")
    y = model(torch.randn(0, 8, device=device)).as_strided((0, 8), (8, 1))
    dys = torch.zeros(2, 0, 8, device=device)
    (found,) = torch.autograd.grad(y, [model[0].weight], dys, is_grads_batched=True)
    assert found.shape == (2, 8, 8) and not found.any()
