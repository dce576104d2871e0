"""abs, maximum, minimum, l1_loss, where, masked_fill, gather: special values, what is kept, and what goes to torch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode

import hfnn
from hfnn import memory
from hfnn.core.holder import target_of

from .kernels import DTYPES, INF, NAN, dtypes, kernels

F = hfnn.functional
SPECIAL = (NAN, INF, -INF, 0.0, -0.0, 1.0, -1.0, 2.0**-24, -3.5)


def pairs(dtype, device, times=1):
    """All pairs of special values, `times` over."""
    a = torch.tensor(SPECIAL, dtype=dtype, device=device)
    return a.repeat_interleave(len(a)).repeat(times), a.repeat(len(a)).repeat(times)


def gradients(fn, inputs, dy):
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    y = fn(*leaves)
    return y, *torch.autograd.grad(y, leaves, dy)


def same(got, want):
    """Bitwise equal, except that all NaNs are equal."""
    assert got.dtype is want.dtype and got.shape == want.shape
    assert torch.equal(got.isnan(), want.isnan())
    got, want = got.nan_to_num(nan=7.0, posinf=INF, neginf=-INF), want.nan_to_num(nan=7.0, posinf=INF, neginf=-INF)
    assert torch.equal(got, want) and torch.equal(got.signbit(), want.signbit())


# ---- abs, maximum, minimum


@pytest.mark.parametrize("name", ["abs", "maximum", "minimum"])
@kernels
@dtypes
@pytest.mark.parametrize("times", [1, 26])  # in a tail, and in whole vectors before it
def test_special_values_are_torchs(name, kernel, dtype, times, device):
    a, b = pairs(dtype, device, times)
    inputs = (a,) if name == "abs" else (a, b)
    for number in (-3.0, INF, NAN):
        dy = torch.full_like(a, number)
        with hfnn.use(kernel):
            y, *grads = gradients(getattr(F, name), inputs, dy)
        assert y.grad_fn.name() == "_CompareBackward"
        want, *want_grads = gradients(getattr(torch, name), inputs, dy)
        same(y.abs(), want.abs())  # torch's vectors and tails disagree on which of 0.0 and -0.0 is larger
        for got, grad in zip(grads, want_grads, strict=True):
            same(got, grad)


@pytest.mark.parametrize("name", ["abs", "maximum", "minimum"])
@kernels
@pytest.mark.parametrize("shape", [(1,), (5,), (3, 769), (0, 4), (2049,)])
def test_two_bits_are_kept(name, kernel, shape, device):
    # Nothing else keeps the inputs, so all that is kept is the op's.
    inputs = [torch.randn(shape, device=device, requires_grad=True) for _ in range(1 if name == "abs" else 2)]
    with hfnn.use(kernel):
        kept = memory.saved_bytes(lambda: getattr(F, name)(*inputs))
    assert kept.total == -(-inputs[0].numel() // 4)


@kernels
def test_without_gradient_nothing_is_kept(kernel, device):
    a, b = (torch.randn(3, 769, device=device) for _ in range(2))
    with hfnn.use(kernel):
        assert torch.equal(F.maximum(a, b), torch.maximum(a, b)) and not F.maximum(a, b).requires_grad
        leaf = a.clone().requires_grad_()
        with torch.no_grad():
            assert torch.equal(F.abs(leaf), a.abs())
        (grad,) = torch.autograd.grad(F.minimum(a, leaf).sum(), leaf)
    assert torch.equal(grad, torch.full_like(a, 0.5))  # equal numbers get half each


@pytest.mark.parametrize("name", ["maximum", "minimum"])
def test_broadcasts_and_mixtures_are_torchs(name, device):
    a = torch.randn(3, 769, device=device, requires_grad=True)
    ours, torchs = getattr(F, name), getattr(torch, name)
    for b in (torch.randn(769), torch.randn(3, 1), torch.randn(()), torch.randn(3, 769).bfloat16()):
        b = b.to(device)
        y = ours(a, b, prefer="memory")
        assert torch.equal(y, torchs(a, b)) and y.dtype is torch.float32
        assert y.grad_fn.name() != "_CompareBackward"
    with pytest.raises(RuntimeError):
        ours(a, torch.randn(4, device=device), prefer="memory")
    with pytest.raises(TypeError):
        ours(a, 1.0, prefer="memory")


# ---- l1_loss


@kernels
@dtypes
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("name, options", [("l1_loss", {}), ("smooth_l1_loss", {"beta": 0.0})])
def test_l1_signs_are_torchs(name, options, reduction, kernel, dtype, device):
    """sign(x - target); the difference may be NaN although neither number is."""
    options = {**options, "reduction": reduction}
    inputs = pairs(dtype, device, 26)
    with hfnn.use(kernel):
        y, *grads = gradients(lambda x, target: getattr(F, name)(x, target, **options), inputs, None)
    assert y.grad_fn.name() == "_L1LossBackward"
    want, *want_grads = gradients(lambda x, t: getattr(torch.nn.functional, name)(x, t, **options), inputs, None)
    assert y.isnan() and want.isnan()
    for got, grad in zip(grads, want_grads, strict=True):
        assert torch.equal(got.sign(), grad.sign())
        torch.testing.assert_close(got, grad, rtol=2 * torch.finfo(dtype).eps, atol=0)


@kernels
@pytest.mark.parametrize("target_grad", [False, True])
def test_l1_loss_keeps_a_sign(kernel, target_grad, device):
    x = torch.randn(3, 769, device=device, requires_grad=True)
    target = torch.randn(3, 769, device=device, requires_grad=target_grad)
    with hfnn.use(kernel):
        kept = memory.saved_bytes(lambda: F.l1_loss(x, target))
        smooth = memory.saved_bytes(lambda: F.smooth_l1_loss(x, target, beta=0.0))
    assert kept.total == smooth.total == -(-3 * 769 // 4)


@kernels
@pytest.mark.parametrize("layout", ["transposed", "sliced"])
def test_l1_loss_of_other_layouts(kernel, layout, device):
    make = {"transposed": lambda t: t.t().contiguous().t(), "sliced": lambda t: torch.stack([t, t], -1)[..., 0]}[layout]
    x, target = torch.randn(8, 769, device=device), torch.randn(8, 769, device=device)
    want = gradients(torch.nn.functional.l1_loss, (x, target), None)
    x_, target_ = make(x).requires_grad_(), target.clone().requires_grad_()
    with hfnn.use(kernel):
        y = F.l1_loss(x_, target_)
        grads = torch.autograd.grad(y, (x_, target_), create_graph=True)
        plain = torch.autograd.grad(F.l1_loss(x_, target_), (x_, target_))
    torch.testing.assert_close(y, want[0])
    for got, alone, grad in zip(grads, plain, want[1:], strict=True):
        torch.testing.assert_close(got.detach(), grad)
        torch.testing.assert_close(alone, grad)


def test_l1_loss_second_derivative_by_the_loss(device):
    """Linear in dloss: the derivative by dloss is the sum of the signs."""
    x, target = (torch.randn(3, 769, dtype=torch.float64, device=device) for _ in range(2))
    found = []
    for fn in (lambda *a: F.l1_loss(*a, prefer="memory"), torch.nn.functional.l1_loss):
        leaf, dy = x.clone().requires_grad_(), torch.ones((), dtype=x.dtype, device=device, requires_grad=True)
        (dx,) = torch.autograd.grad(fn(leaf, target), leaf, dy, create_graph=True)
        found.append(torch.autograd.grad(dx.square().sum(), dy)[0])
    torch.testing.assert_close(*found)


def test_l1_loss_leaves_to_torch(device):
    x, target = torch.randn(3, 5, device=device, requires_grad=True), torch.randn(3, 5, device=device)
    torchs = torch.nn.functional.l1_loss
    assert torch.equal(F.l1_loss(x, target, reduction="none", prefer="memory"), torchs(x, target, reduction="none"))
    weight = torch.rand(3, 5, device=device)
    assert torch.equal(F.l1_loss(x, target, weight=weight, prefer="memory"), torchs(x, target, weight=weight))
    with pytest.raises(ValueError, match="nonsense"):
        F.l1_loss(x, target, reduction="nonsense", prefer="memory")
    with pytest.warns(UserWarning, match="different to the input size"):
        F.l1_loss(x, target[:1], prefer="memory")
    m = hfnn.convert(torch.nn.L1Loss(reduction="sum"), prefer="memory")
    assert target_of(m) is hfnn.L1Loss and m(x, target).grad_fn.name() == "_L1LossBackward"


# ---- where, masked_fill


# hfnn's call, with a mask and a number or two tensors, and torch's.
CHOICES = {
    "where": (F.where, torch.where),
    "where, a number": (lambda m, a, b, **how: F.where(m, a, -INF, **how), lambda m, a, b: torch.where(m, a, -INF)),
    "where, a number first": (lambda m, a, b, **how: F.where(m, 0, a, **how), lambda m, a, b: torch.where(m, 0, a)),
    "masked_fill": (lambda m, a, b, **how: F.masked_fill(a, m, -INF, **how), lambda m, a, b: a.masked_fill(m, -INF)),
}
choices = pytest.mark.parametrize("name", CHOICES)


@choices
@kernels
@dtypes
@pytest.mark.parametrize("mask_shape", [(5, 3, 67), (3, 67), (67,), (5, 1, 67), (1, 1, 1), (5, 3, 1), "expanded", ()])
def test_choices_are_torchs_to_the_bit(name, kernel, dtype, mask_shape, device):
    a, b = (torch.randn(5, 3, 67).to(dtype).to(device) for _ in range(2))
    a[0, 0, :3] = torch.tensor([NAN, INF, -INF])
    dy = torch.randn(5, 3, 67).to(dtype).to(device)
    dy[0, 0, :6] = torch.tensor([NAN, INF, -INF] * 2)
    mask = torch.rand((5, 1, 67) if mask_shape == "expanded" else mask_shape, device=device) > 0.5
    mask = mask.expand(5, 3, 67) if mask_shape == "expanded" else mask
    found = []
    for fn in CHOICES[name]:
        leaves = [a.clone().requires_grad_(), b.clone().requires_grad_()]
        with hfnn.use(kernel) if fn is CHOICES[name][0] else hfnn.use("torch"):
            y = fn(mask, *leaves)
        if fn is CHOICES[name][0]:
            assert y.grad_fn.name() in ("_WhereBackward", "_MaskedFillBackward"), "torch's own op ran"
        found.append((y, *torch.autograd.grad(y, leaves, dy, allow_unused=True)))
    for got, want in zip(*found, strict=True):
        assert (got is None) == (want is None)
        if got is not None:
            same(got, want)


@choices
@kernels
@pytest.mark.parametrize("shape, packed", [((3, 769), 289), ((769,), 97), ((3, 1), 1), ("expanded", 97)])
def test_an_eighth_of_the_mask_is_kept(name, kernel, shape, packed, device):
    a, b = (torch.randn(3, 769, device=device, requires_grad=True) for _ in range(2))
    mask = torch.rand(769, device=device) > 0.5 if shape == "expanded" else torch.rand(shape, device=device) > 0.5
    mask = mask.expand(3, 769) if shape == "expanded" else mask
    with hfnn.use(kernel):
        kept = memory.saved_bytes(lambda: CHOICES[name][0](mask, a, b))
    assert kept.total == packed


@kernels
@pytest.mark.parametrize("turn", [torch.Tensor.logical_not_, lambda mask: mask.data.logical_not_()])
def test_a_mask_that_is_filled_anew_is_packed_anew(turn, kernel, device):
    """Also by writes that change no version, as by numpy. Earlier results keep the earlier mask."""
    a = torch.randn(3, 769, device=device, requires_grad=True)
    mask = torch.rand(3, 769, device=device) > 0.5
    with hfnn.use(kernel):
        before = F.where(mask, a, 0.0), F.masked_fill(a, ~mask, 0.0)
        filled = F.masked_fill(a, mask, 0.0)
        turn(mask)
        after = F.where(mask, a, 0.0), F.masked_fill(a, mask.logical_not(), 0.0)
        again = F.masked_fill(a, mask, 0.0)
    for y in before:
        assert torch.equal(torch.autograd.grad(y.sum(), a)[0], 1 - mask.float())
    for y in (*after, filled):
        assert torch.equal(torch.autograd.grad(y.sum(), a)[0], mask.float())
    assert torch.equal(torch.autograd.grad(again.sum(), a)[0], 1 - mask.float())


@choices
def test_choices_are_differentiated_twice(name, device):
    a, b = (torch.randn(3, 5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    mask = torch.rand(3, 5) > 0.5
    fn = lambda a, b: CHOICES[name][0](mask, a, b, prefer="memory").nan_to_num(neginf=0.0) * a  # noqa: E731
    y = CHOICES[name][0](mask, a, b, prefer="memory")
    assert y.grad_fn.name() in ("_WhereBackward", "_MaskedFillBackward")
    assert torch.autograd.gradcheck(fn, (a, b)) and torch.autograd.gradgradcheck(fn, (a, b))


@kernels
def test_each_gradient_of_where_on_its_own(kernel, device):
    a, b = (torch.randn(3, 769, device=device) for _ in range(2))
    mask = torch.rand(3, 769, device=device) > 0.5
    with hfnn.use(kernel):
        for wanted in (0, 1):
            leaves = [t.clone().requires_grad_(i == wanted) for i, t in enumerate((a, b))]
            y = F.where(mask, *leaves)
            first, second = (torch.autograd.grad(y.sum(), leaves[wanted], retain_graph=True)[0] for _ in range(2))
            assert torch.equal(first, second)
            assert torch.equal(first, (mask if wanted == 0 else ~mask).float())
    assert not any(t._version for t in (a, b, mask))


def test_what_where_leaves_to_torch(device):
    a, wide = torch.randn(3, 4, device=device, requires_grad=True), torch.randn(2, 3, 4, device=device)
    mask, one = a.detach() > 0, torch.ones((), device=device, requires_grad=True)
    calls = [
        (mask, a, torch.randn(4, device=device)),  # b is broadcast
        (mask, a, a.detach().double()),  # another dtype
        (mask, a, one),  # a scalar that requires grad
        (wide > 0, a, 0.0),  # the mask broadcasts the result
        (mask, a, wide),
    ]
    for condition, x, other in calls:
        y = F.where(condition, x, other, prefer="memory")
        assert torch.equal(y, torch.where(condition, x, other)) and y.grad_fn.name() == "WhereBackward0"
    assert all(map(torch.equal, F.where(mask), torch.where(mask)))
    counts = torch.arange(12, device=device).view(3, 4)
    assert torch.equal(F.where(mask, counts, 0, prefer="memory"), torch.where(mask, counts, 0))
    assert torch.equal(F.masked_fill(counts, mask, 5, prefer="memory"), counts.masked_fill(mask, 5))
    y = F.masked_fill(a, mask, one, prefer="memory")
    assert y.grad_fn.name() == "MaskedFillBackward1"
    value = F.masked_fill(a, mask, one.detach(), prefer="memory")
    assert value.grad_fn.name() == "_MaskedFillBackward" and torch.equal(value, y)
    with pytest.raises(RuntimeError):
        F.masked_fill(a, torch.ones(5, dtype=torch.bool, device=device), 0.0, prefer="memory")


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_where_of_random_shapes(data):
    shape = data.draw(st.lists(st.integers(0, 40), min_size=1, max_size=3))
    mask_shape = [data.draw(st.sampled_from((n, 1))) for n in shape][data.draw(st.integers(0, len(shape) - 1)) :]
    mask, a, b = torch.rand(mask_shape) > 0.5, torch.randn(shape), torch.randn(shape)
    ours = gradients(lambda a, b: F.where(mask, a, b, prefer="memory"), (a, b), torch.ones(shape))
    assert ours[0].grad_fn.name() == "_WhereBackward"
    for got, want in zip(ours, gradients(lambda a, b: torch.where(mask, a, b), (a, b), torch.ones(shape)), strict=True):
        same(got, want)


# ---- gather


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("dtype", (*DTYPES, torch.float64), ids=str)
def test_gather(dim, dtype, device):
    x = torch.randn(7, 9, 11).to(dtype).to(device)
    index = torch.randint(7, (4, 9, 11), device=device) if dim == 0 else torch.randint(9, (7, 9, 2), device=device)
    dy = torch.randn(index.shape).to(dtype).to(device)
    ours = gradients(lambda x: F.gather(x, dim, index, prefer="memory"), (x,), dy)
    assert ours[0].grad_fn.name() == "_GatherBackward"
    for got, want in zip(ours, gradients(lambda x: torch.gather(x, dim, index), (x,), dy), strict=True):
        same(got, want)


def test_gather_keeps_the_index(device):
    x = torch.randn(7, 1000, device=device, requires_grad=True)
    index = torch.randint(1000, (7, 3), device=device)
    assert memory.saved_bytes(lambda: F.gather(x * 2, 1, index, prefer="memory")).total == 7 * 3 * 8
    assert memory.saved_bytes(lambda: torch.gather(x * 2, 1, index)).total == 7 * 1000 * 4 + 7 * 3 * 8
    sparse = F.gather(x, 1, index, sparse_grad=True, prefer="memory")
    assert sparse.grad_fn.name() == "GatherBackward0"
    assert F.gather(x, 1, index).grad_fn.name() == "GatherBackward0"  # too small to be worth it
    with pytest.raises(IndexError, match="out of range"):
        F.gather(x, 2, index, prefer="memory")


def test_gather_is_differentiated_twice():
    x, index = torch.randn(4, 5, dtype=torch.float64, requires_grad=True), torch.randint(5, (4, 3))
    fn = lambda x: F.gather(x, 1, index, prefer="memory").square()  # noqa: E731
    assert torch.autograd.gradcheck(fn, (x,)) and torch.autograd.gradgradcheck(fn, (x,))


# ---- all of them


def test_fake_tensors():
    with FakeTensorMode():
        a, b = (torch.empty(3, 769, requires_grad=True) for _ in range(2))
        mask, index = torch.empty(3, 769, dtype=torch.bool), torch.zeros(3, 2, dtype=torch.int64)
        results = {
            "_CompareBackward": F.maximum(a, b, prefer="memory"),
            "_WhereBackward": F.where(mask, a, b, prefer="memory"),
            "_MaskedFillBackward": F.masked_fill(a, mask, 0.0, prefer="memory"),
            "_GatherBackward": F.gather(a, 1, index, prefer="memory"),
            "_L1LossBackward": F.l1_loss(a, b, prefer="memory"),
        }
        for name, y in results.items():
            assert y.grad_fn.name() == name
            (grad,) = torch.autograd.grad(y.sum(), a)
            assert grad.shape == a.shape


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs 40 GiB of GPU memory")
@pytest.mark.parametrize("name", ["maximum", "masked_fill"])
def test_more_than_2_31_elements(name):
    """The last rows of tensors beyond int32 offsets equal those rows alone."""
    x = torch.empty((1 << 19) + 16, 4096, dtype=torch.bfloat16, device="cuda").normal_()
    other = x.flip(0) if name == "maximum" else x > 0.5
    call = lambda x, other: getattr(F, name)(x, other, *(() if name == "maximum" else (0.0,)), prefer="memory")  # noqa: E731
    leaf, tail = x.requires_grad_(), x[-16:].detach().requires_grad_()
    y, y_tail = call(leaf, other), call(tail, other[-16:])
    (dx,), (dx_tail,) = (torch.autograd.grad(r, t, torch.ones_like(r)) for r, t in ((y, leaf), (y_tail, tail)))
    assert torch.equal(y[-16:], y_tail) and torch.equal(dx[-16:], dx_tail)
