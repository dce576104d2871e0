"""All kinds of lists of tensors: none and thousands, empty, unaligned, strided, permuted, views, gradients with another
layout."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hfnn

INTERPRETED = pytest.param("triton", marks=pytest.mark.interpreted)

LAYOUTS = ("plain", "unaligned", "transposed", "channels_last", "gaps", "empty", "scalar")


def tensor(layout, n, dtype):
    """A tensor of about n elements."""
    if layout == "plain":
        return torch.randn(n).to(dtype)
    if layout == "unaligned":
        return torch.randn(n + 1).to(dtype)[1:]
    if layout == "transposed":
        return torch.randn(3, n).to(dtype).t()
    if layout == "channels_last":
        return torch.randn(2, 3, 2, n).to(dtype).contiguous(memory_format=torch.channels_last)
    if layout == "gaps":
        return torch.randn(n, 4).to(dtype)[:, ::2]
    return torch.randn(()).to(dtype) if layout == "scalar" else torch.empty(0, n, dtype=dtype)


def gradient(p, layout):
    g = torch.randn(p.shape).to(p.dtype)
    if layout == "same":
        return torch.empty_like(p).copy_(g)
    if layout == "expanded":
        return g.flatten()[:1].sum().expand(p.shape).to(p.dtype)
    if layout == "reversed" and p.dim():
        return g.permute(*range(p.dim())[::-1]).contiguous().permute(*range(p.dim())[::-1])
    return g.contiguous()


def step_both(tensors, grads, cls="AdamW", kernel=None, **options):
    a, b = ([torch.empty_like(x).copy_(x) if copies else x for x in tensors] for copies in (False, True))
    a, b = ([x.requires_grad_() for x in y] for y in (a, b))
    mine, theirs = getattr(hfnn.optim, cls)(a, lr=0.1, **options), getattr(torch.optim, cls)(b, lr=0.1, foreach=False)
    for _ in range(2):
        for x, y, layout in zip(a, b, grads, strict=True):
            x.grad = None if layout is None else gradient(x, layout)
            y.grad = None if layout is None else x.grad.clone()
        if kernel:
            with hfnn.use(kernel):
                mine.step()
        else:
            mine.step()
        theirs.step()
    for x, y in zip(a, b, strict=True):
        # In bfloat16 torch rounds between its ops, and a step is about as large as lr.
        rtol, atol = (1e-5, 1e-6) if x.dtype is torch.float32 else (0.02, 0.005)
        torch.testing.assert_close(x, y, rtol=rtol, atol=atol)
    return mine, a


CASE = st.tuples(
    st.sampled_from(LAYOUTS), st.integers(1, 300), st.sampled_from([torch.float32, torch.bfloat16]),
    st.sampled_from(["same", "plain", "expanded", "reversed", None]),
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(st.lists(CASE, min_size=1, max_size=12), st.sampled_from(["AdamW", "SGD"]))
def test_any_list(cases, cls):
    tensors = [tensor(layout, n, dtype) for layout, n, dtype, _ in cases]
    mine, a = step_both(tensors, [grad for *_, grad in cases], cls)
    given = [x for x in a if x.grad is not None]
    if any(_gaps(x) for x in given):
        assert mine._ran == ("torch",) and "memory without gaps" in mine.report()
    elif given:
        assert mine._ran == ("cpp",)


def _gaps(x):
    return not x.is_contiguous() and torch.empty_like(x).stride() != x.stride()


@pytest.mark.interpreted
@settings(max_examples=10, deadline=None)
@given(st.lists(CASE.filter(lambda case: case[0] != "gaps"), min_size=1, max_size=4))
def test_any_list_triton(cases):
    tensors = [tensor(layout, n, dtype) for layout, n, dtype, _ in cases]
    mine, a = step_both(tensors, [grad for *_, grad in cases], kernel="triton")
    assert all(x.grad is None for x in a) or mine._ran == ("triton",)


@settings(max_examples=20, deadline=None)
@given(st.lists(CASE, min_size=1, max_size=5))
def test_gaps_in_special_formats(cases):
    """Options that torch's class lacks run by the definition, with or without gaps."""
    a = [tensor(layout, n, dtype).requires_grad_() for layout, n, dtype, _ in cases]
    b = [x.detach().clone(memory_format=torch.contiguous_format).requires_grad_() for x in a]
    with hfnn.use("torch"):
        for params in (a, b):
            torch.manual_seed(1)
            for p in params:
                p.grad = torch.randn(p.shape).to(p.dtype)
            hfnn.optim.AdamW(params, lr=0.1, ema_decay=0.9).step()
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("n", [0, 1, 5000])
def test_how_many(n):
    shapes = [torch.randn(i % 7 + 1) for i in range(n)] or [torch.randn(3)]
    mine, _ = step_both(shapes, ["same" if n else None] * len(shapes))
    assert mine._ran == (("cpp",) if n else ())


@pytest.mark.parametrize("kernel", ["cpp", INTERPRETED])
def test_views_of_one_storage(kernel):
    """Adjacent parameters, and gradients, in one storage; gaps between them are not written."""
    base, grads = torch.randn(1000), torch.randn(1000)
    before, params, places = base.clone(), [], [(0, 300), (301, 700), (701, 999)]
    for start, end in places:
        params.append(base[start:end].requires_grad_())
        params[-1].grad = grads[start:end]
    optimizer = hfnn.optim.SGD(params, lr=1.0)
    with hfnn.use(kernel):
        optimizer.step()
    wanted = before - grads
    wanted[[300, 700, 999]] = before[[300, 700, 999]]
    assert optimizer._ran == (kernel,)
    torch.testing.assert_close(base, wanted)


def test_one_memory_twice():
    """Two parameters in the same memory are stepped one after the other, as in torch."""
    base = torch.ones(4)
    a, b = base.view(4).requires_grad_(), base.view(4).requires_grad_()
    a.grad = b.grad = torch.ones(4)
    optimizer = hfnn.optim.SGD([a, b], lr=0.1)
    optimizer.step()
    torch.testing.assert_close(base, torch.full((4,), 0.8))
    assert "same memory" in optimizer.report()


def test_gradients_come_and_go():
    """The rows follow the gradients that exist, and no gradient is kept alive."""
    import gc
    import weakref

    params = [torch.randn(50).requires_grad_() for _ in range(5)]
    twins = [p.detach().clone().requires_grad_() for p in params]
    mine, theirs = hfnn.optim.AdamW(params, lr=0.1), torch.optim.AdamW(twins, lr=0.1)
    for i in range(12):
        for j, (x, y) in enumerate(zip(params, twins, strict=True)):
            x.grad = torch.randn(50) if (i + j) % 3 else None
            y.grad = None if x.grad is None else x.grad.clone()
        mine.step(), theirs.step()
        alive = [weakref.ref(p.grad) for p in params if p.grad is not None]
        mine.zero_grad()
        gc.collect()
        assert alive and not any(ref() is not None for ref in alive)
    for x, y in zip(params, twins, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)


def test_another_gradient_at_the_same_place():
    """At the same address, with another dtype or other strides."""
    memory = torch.randn(64)
    p = torch.zeros(4, 4, requires_grad=True)
    optimizer = hfnn.optim.SGD([p], lr=1.0)
    for grad in (memory[:16].view(4, 4), memory[:16].view(4, 4).t(), memory[:16].view(4, 4)):
        before = p.detach().clone()
        p.grad = grad
        optimizer.step()
        assert torch.equal(p, before - grad)


def test_dense_after_sparse():
    """torch's momentum of a sparse gradient is sparse and cannot be added to a dense one: torch's error."""
    errors = []
    for package in (torch.optim, hfnn.optim):
        p = torch.ones(3, 2, requires_grad=True)
        optimizer = package.SGD([p], lr=0.1, momentum=0.9)
        p.grad = torch.ones(3, 2).to_sparse()
        optimizer.step()
        p.grad = torch.ones(3, 2)
        with pytest.raises(RuntimeError) as raised:
            optimizer.step()
        errors.append(str(raised.value))
    assert errors[0] == errors[1]
