"""A factor and a shift behind a norm, and vectors of length one: torch's bits, and nothing of x's size kept."""

import pytest
import torch
from torch.nn import functional as F

import hfnn
from hfnn.core import node
from hfnn.ops.affine import affine, reference
from hfnn.ops.normalize import normalize
from hfnn.testing import GRADIENTS, assert_close

SMALL = {
    "row": lambda: torch.randn(16), "samples": lambda: torch.randn(3, 1, 16), "number": lambda: -0.75,
    "one": lambda: torch.randn(()), "none": lambda: None,
}  # fmt: skip


def leaf(x, dtype, requires_grad=True):
    return x.to(dtype).requires_grad_(requires_grad) if isinstance(x, torch.Tensor) else x


def grads(y, leaves):
    leaves = [x for x in leaves if isinstance(x, torch.Tensor) and x.requires_grad]
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(0)).to(y)
    return torch.autograd.grad(y, leaves, dy)


@pytest.mark.parametrize("scale", SMALL)
@pytest.mark.parametrize("shift", ["row", "samples", "none"])
@pytest.mark.parametrize("dtypes", [("float32",) * 3, ("bfloat16",) * 3, ("float16", "float32", "float16")], ids=str)
@pytest.mark.parametrize("frozen", [False, True])
def test_every_bit_is_torchs(scale, shift, dtypes, frozen):
    x, s, t = (getattr(torch, dtype) for dtype in dtypes)
    given = leaf(torch.randn(3, 5, 16), x), leaf(SMALL[scale](), s, not frozen), leaf(SMALL[shift](), t)
    ours, stock = affine(*given, prefer="memory"), reference(*given)
    assert ours.dtype is stock.dtype and ours.stride() == stock.stride() and torch.equal(ours, stock)
    for got, want in zip(grads(ours, given), grads(stock, given), strict=True):
        assert got.dtype is want.dtype and got.stride() == want.stride() and torch.equal(got, want)


@pytest.mark.parametrize("scale", SMALL)
@pytest.mark.parametrize("shift", ["row", "none"])
@pytest.mark.parametrize("frozen", [False, True])
def test_second_derivatives(scale, shift, frozen):
    double = torch.float64
    given = leaf(torch.randn(3, 5, 16), double), leaf(SMALL[scale](), double, not frozen), leaf(SMALL[shift](), double)
    leaves = [x for x in given if isinstance(x, torch.Tensor) and x.requires_grad]
    dy = torch.randn(3, 5, 16, dtype=double, requires_grad=True)
    found = []
    for y in (affine(*given, prefer="memory"), reference(*given)):
        first = torch.autograd.grad(y, leaves, dy, create_graph=True)
        square = sum(g.square().sum() for g in first)
        found.append([*first, *torch.autograd.grad(square, [*leaves, dy], allow_unused=True)])
    for got, want in zip(*found, strict=True):
        assert (got is None) == (want is None) and (got is None or torch.allclose(got, want))


def test_large_factors_and_other_shapes_are_torchs():
    x = torch.randn(3, 5, 16, requires_grad=True)
    for scale in (torch.randn(3, 5, 16), torch.randn(2, 3, 5, 16), torch.randn(2, 1, 1, 1)):
        assert "Affine" not in affine(x, scale, prefer="memory").grad_fn.name()
    assert "Affine" not in affine(x, 2.0).grad_fn.name()  # a small x, in auto
    assert "Affine" in affine(x, torch.randn(16), prefer="memory").grad_fn.name()
    with pytest.raises(RuntimeError, match="must match the size of tensor b"):
        affine(x, torch.randn(7), prefer="memory")


def kept(fn):
    return hfnn.memory.saved_bytes(fn).total


def test_what_is_kept():
    """Behind a norm its input and the small tensors; of a tensor that cannot be built again, what torch keeps."""
    x, g = torch.randn(64, 16, requires_grad=True), torch.randn(16, requires_grad=True)
    weight = torch.randn(8, 16, requires_grad=True)
    wide = lambda n: n * 64 * 16 * 4  # noqa: E731

    def behind_a_norm():
        y = affine(hfnn.functional.layer_norm(x, (16,), prefer="memory"), g, prefer="memory")
        return hfnn.functional.linear(affine(y, 4.0, prefer="memory"), weight, prefer="memory")

    assert kept(behind_a_norm) < wide(1.5)
    assert kept(lambda: affine(x.sin(), g, prefer="memory")) <= kept(lambda: x.sin() * g)
    assert kept(lambda: affine(x.sin(), g.detach(), prefer="memory")) <= kept(lambda: x.sin() * g.detach())
    assert kept(lambda: affine(x.sin(), 2.0, prefer="memory")) <= kept(lambda: x.sin() * 2.0)


def test_a_shift_may_be_written_to_where_nothing_is_built():
    x, t = torch.randn(64, 16, requires_grad=True), torch.randn(16, requires_grad=True)
    y = affine(x, 2.0, t, prefer="memory")
    with torch.no_grad():
        t.add_(1)
    torch.autograd.grad(y.sum(), [x, t])  # as in torch


def test_second_derivatives_and_batches():
    x, s, t = (torch.randn(n, dtype=torch.float64, requires_grad=True) for n in ((6, 4), (4,), (4,)))
    call = lambda x, s, t: affine(x, s, t, prefer="memory")  # noqa: E731
    assert torch.autograd.gradcheck(call, (x, s, t), check_batched_grad=True)
    assert torch.autograd.gradgradcheck(call, (x, s, t))
    call = lambda x: normalize(x, dim=-1, eps=1e-3, prefer="memory")  # noqa: E731
    assert torch.autograd.gradcheck(call, (x,), check_batched_grad=True)
    assert torch.autograd.gradgradcheck(call, (x,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("dim", [-1, 1, 0])
@pytest.mark.parametrize("eps", [1e-12, 0.05])
def test_vectors_of_length_one(dtype, dim, eps):
    """Also where the limit holds, and at zero."""
    x = torch.randn(8, 6, 8)
    x[0], x[1], x[2] = 0, x[1] * 1e-3, x[2] * 1e-15
    x = (x.movedim(0, -1) if dim == 0 else x).contiguous().to(dtype).requires_grad_()
    wide = x.detach().double().requires_grad_()
    ours, stock, exact = (
        normalize(x, dim=dim, eps=eps, prefer="memory"),
        *(F.normalize(z, 2.0, dim, eps) for z in (x, wide)),
    )
    assert "Normalize" in ours.grad_fn.name() and torch.equal(ours, stock) and ours.stride() == stock.stride()
    (got,), (want,), (right,) = grads(ours, [x]), grads(stock, [x]), grads(exact, [wide])
    assert got.dtype is want.dtype and got.stride() == want.stride()
    assert_close(got, right, want, GRADIENTS)
    limited = wide.norm(dim=dim, keepdim=True).expand_as(wide) < eps
    torch.testing.assert_close(got[limited], want[limited])


def test_a_vector_of_just_the_limit_has_torchs_slope():
    x = torch.tensor([[3.0, 4.0]], requires_grad=True)
    for eps in (5.0, 5.0001, 4.9999):
        got, want = (grads(y, [x])[0] for y in (normalize(x, eps=eps, prefer="memory"), F.normalize(x, eps=eps)))
        torch.testing.assert_close(got, want)


def test_it_is_built_again():
    x, weight = torch.randn(64, 16, requires_grad=True), torch.randn(8, 16, requires_grad=True)
    node.counter.reset()
    y = normalize(x, dim=-1, prefer="memory")
    z = hfnn.functional.linear(affine(y, torch.randn(16, requires_grad=True), prefer="memory"), weight, prefer="memory")
    z.sum().backward()
    assert node.counter.rebuilt >= 2
