"""masked_softmax and causal_softmax: all kinds of masks, masked values, dtypes, and what is kept."""

import pytest
import torch

import hfnn
from hfnn import memory, testing

from .kernels import DTYPES, INF, NAN, dtypes, kernels

F = hfnn.functional
# The last is wider than every kernel's tile.
SHAPES = ((2, 3, 5, 7), (1, 2, 4, 769), (3, 64), (2, 1, 2, 3, 33), (7,), (2, 16500))


def draw(*shape, dtype=torch.float32, device="cpu", scale=3.0):
    return (torch.randn(shape) * scale).to(dtype).to(device)


def definition(x, keep=None, add=None, scale=1.0):
    """exp(z - lse) where `keep` is set, in float64 and without torch's softmax."""
    z = x * scale if add is None else x * scale + add
    keep = torch.ones_like(z, dtype=torch.bool) if keep is None else keep.expand(z.shape) & (z != -INF)
    top = z.masked_fill(~keep, -INF).amax(-1, keepdim=True).nan_to_num(neginf=0.0)
    e = torch.where(keep, (torch.where(keep, z, 0) - top).exp(), 0)
    return e / e.sum(-1, keepdim=True).clamp_min(1e-300)


def run(fn, leaves, dy):
    y = fn(*leaves)
    return y, *torch.autograd.grad(y, leaves, dy.to(y))


def check(ours, exact, torchs, inputs, kernel):
    """The accuracy rule for the result and the gradients of all inputs. Returns ours.

    For few elements torch's own error is random: one and a half ulps of the kept tensor's dtype are added.
    """
    dy = torch.randn(inputs[0].shape).bfloat16().to(inputs[0].device)

    def again(dtype=None):
        return [t.detach().to(dtype or t.dtype).clone().requires_grad_() for t in inputs]

    with hfnn.use(kernel):
        got = run(ours, again(), dy)
    assert got[0].grad_fn.name() == "_MaskedSoftmaxBackward"
    wide, own = run(exact, again(torch.float64), dy), run(torchs, again(), dy)
    for i, (g, w, o) in enumerate(zip(got, wide, own, strict=True)):
        assert g.dtype is o.dtype and g.shape == o.shape
        eps, mine, theirs = torch.finfo(got[0].dtype).eps, testing.error(g, w), testing.error(o, w)
        if i == 2 and g.shape[-1:] != inputs[0].shape[-1:]:  # adding a constant to a row changes nothing: 0 is exact
            assert g.abs().max() <= eps * inputs[0].numel()
        else:
            # A GPU's exp2 is off by up to 2 ulps. In the few elements of a small mask rows cancel; torch's own reach 6
            # ulps.
            luck = (8 if g.is_cuda and i == 2 and g.numel() <= 128 else 3 if g.is_cuda else 1.5) * eps
            assert mine.l2 <= 3 * theirs.l2 + luck and mine.largest <= 3 * theirs.largest + luck, f"result {i}"
    return got


def masks_of(shape):
    """Shapes that broadcast: the matrix itself, one for all heads, padding of keys or of queries, a single element."""
    whole = [shape, shape[-2:], (*(1 for _ in shape[:-1]), shape[-1]), shape[-1:]]
    if len(shape) > 1:
        whole += [(shape[0], *(1 for _ in shape[1:-1]), shape[-1]), (*shape[:-1], 1)]
    return dict.fromkeys((*whole, (1,) * len(shape), ()))


@kernels
@dtypes
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_boolean_masks(shape, dtype, kernel, device):
    for mask_shape in masks_of(shape):
        x, keep = draw(*shape, dtype=dtype, device=device), torch.rand(mask_shape).to(device) > 0.3
        y, dx = check(
            lambda x, keep=keep: F.masked_softmax(x, keep, 0.5),
            lambda x, keep=keep: definition(x, keep, scale=0.5),
            lambda x, keep=keep: torch.softmax((x * 0.5).masked_fill(~keep, -1e4), -1).masked_fill(~keep, 0),
            (x,),
            kernel,
        )
        assert not y.masked_select(~keep).any() and not dx.masked_select(~keep).any()


@kernels
@dtypes
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_additive_masks_and_their_gradients(shape, wide, dtype, kernel, device):
    for mask_shape in masks_of(shape):
        x = draw(*shape, dtype=dtype, device=device)
        add = draw(*mask_shape, dtype=torch.float32 if wide else dtype, device=device)
        alone = check(
            lambda x, add=add: F.masked_softmax(x, add, 0.5),
            lambda x, add=add: definition(x, add=add.double(), scale=0.5),
            lambda x, add=add: torch.softmax(x * 0.5 + add.to(x), -1),
            (x,),
            kernel,
        )
        both = check(
            lambda x, add: F.masked_softmax(x, add, 0.5),
            lambda x, add: definition(x, add=add, scale=0.5),
            lambda x, add: torch.softmax(x * 0.5 + add.to(x), -1),
            (x, add),
            kernel,
        )
        assert torch.equal(alone[0], both[0]) and both[2].dtype is add.dtype and both[2].shape == add.shape


@kernels
@dtypes
@pytest.mark.parametrize("offset", [None, 0, 2, -3, 10**6, -(10**6)])
@pytest.mark.parametrize("shape", [(2, 3, 5, 7), (3, 6, 4), (4, 769), (3, 16500), (2, 2, 2, 3, 33)], ids=str)
def test_causal(shape, offset, dtype, kernel, device):
    x, padding = draw(*shape, dtype=dtype, device=device), torch.rand(shape[-1]).to(device) > 0.3
    queries, keys = (torch.arange(n, device=device) for n in shape[-2:])
    shift = shape[-1] - shape[-2] if offset is None else offset
    keep = keys <= queries[:, None] + shift
    for mask, keep in ((None, keep), (padding, keep & padding)):  # noqa: B020
        y, dx = check(
            lambda x, mask=mask: F.causal_softmax(x, 0.5, mask=mask, offset=offset),
            lambda x, keep=keep: definition(x, keep, scale=0.5),
            lambda x, keep=keep: torch.softmax((x * 0.5).masked_fill(~keep, -1e4), -1).masked_fill(~keep, 0),
            (x,),
            kernel,
        )
        assert not y.masked_select(~keep).any() and not dx.masked_select(~keep).any()
        torch.testing.assert_close(y, F.causal_softmax(x, 0.5, mask=mask, offset=offset), msg="the formula differs")


@kernels
def test_what_does_not_count_is_not_looked_at(kernel, device):
    """Masked x and dy may be infinite or NaN: bitwise the same as a row without them."""
    for cols in (40, 16500):
        x, dy = draw(4, cols, device=device), draw(4, cols, device=device)
        keep = torch.rand(4, cols, device=device) > 0.5
        keep[1] = False
        bad = torch.tensor([NAN, INF, -INF, 3e38], device=device).repeat(cols // 4)
        with hfnn.use(kernel):
            for how in ({"mask": keep}, {"mask": keep, "offset": 3}):
                fn = F.causal_softmax if "offset" in how else F.masked_softmax
                clean = run(lambda t, fn=fn, how=how: fn(t, **how), [x.clone().requires_grad_()], dy)
                hidden = ~keep | (torch.ones_like(keep).triu(4) if "offset" in how else False)
                x_bad, dy_bad = torch.where(hidden, bad, x), torch.where(hidden, bad, dy)
                dirty = run(lambda t, fn=fn, how=how: fn(t, **how), [x_bad.requires_grad_()], dy_bad)
                assert all(map(torch.equal, clean, dirty))
                assert not any(t.masked_select(hidden).any() for t in dirty)


@kernels
@dtypes
def test_special_rows(dtype, kernel, device):
    for cols in (9, 16500):
        x = draw(5, cols, dtype=dtype, device=device, scale=1.0)
        x[0, 3], x[1, 3], x[2, 3], x[3] = NAN, INF, -INF, -INF
        with hfnn.use(kernel):
            y, dx = run(F.masked_softmax, [x.clone().requires_grad_()], torch.ones_like(x))
            torchs = torch.softmax(x.float(), -1).to(dtype)
            torchs[3] = 0  # fully masked
            torch.testing.assert_close(y, torchs, equal_nan=True, rtol=4 * torch.finfo(dtype).eps, atol=1e-7)
            assert not y[3].any() and not dx[3].any() and dx[:2].isnan().all() and dx[2:].isfinite().all()
            # transformers' masks hold the lowest number instead of -inf: a fully masked row is uniform, or x's own
            # softmax.
            low = torch.full((5, cols), torch.finfo(dtype).min, dtype=dtype, device=device)
            low[0, :4] = 0
            y = F.masked_softmax(x.nan_to_num(0, 0, 0), low)
            assert not y[0, 4:].any() and torch.allclose(y.float().sum(-1), torch.ones(5, device=device), atol=2e-2)


@kernels
def test_results_do_not_depend_on_neighbours(kernel, device):
    """Neighbouring rows, heads and batches, and columns behind the diagonal, do not change a row's bits."""
    for cols in (100, 2500):
        x, add = draw(2, 3, 4, cols, device=device), draw(2, 1, 4, cols, device=device)
        with hfnn.use(kernel):
            together = F.masked_softmax(x, add)
            for n, h in ((0, 2), (1, 1)):
                assert torch.equal(F.masked_softmax(x[n, h], add[n, 0]), together[n, h])


@kernels
@dtypes
@pytest.mark.parametrize("out", DTYPES, ids=str)
def test_dtype_of_the_result(out, dtype, kernel, device):
    x, keep = draw(3, 4, 33, dtype=dtype, device=device), torch.rand(4, 33).to(device) > 0.3
    if torch.float32 not in (dtype, out) and dtype is not out:  # no kernel takes this pair
        y = F.masked_softmax(x, keep, dtype=out, prefer="memory")
        assert y.dtype is out
        return
    y, dx = check(
        lambda x: F.masked_softmax(x, keep, 0.5, dtype=out),
        lambda x: definition(x, keep, scale=0.5),
        lambda x: torch.softmax((x * 0.5).float().masked_fill(~keep, -1e4), -1).to(out),
        (x,),
        kernel,
    )
    assert y.dtype is out and dx.dtype is dtype


@kernels
@dtypes
def test_autocast_is_torchs(dtype, kernel, device):
    x, keep = draw(4, 33, dtype=dtype, device=device), torch.rand(33).to(device) > 0.3
    with torch.autocast(device, torch.bfloat16):
        want = torch.softmax(x, -1).dtype
        with hfnn.use(kernel):
            assert F.masked_softmax(x, keep).dtype is F.causal_softmax(x).dtype is want
            assert F.masked_softmax(x, keep, dtype=torch.bfloat16).dtype is torch.bfloat16 or dtype is torch.float16
        with hfnn.use("torch"):
            assert F.masked_softmax(x, keep).dtype is want


@kernels
@pytest.mark.parametrize("causal", [False, True])
def test_double_backward(causal, kernel, device):
    if kernel == "triton":  # float32 only: against the formula
        x, add = draw(4, 9, device=device).requires_grad_(), draw(9, device=device).requires_grad_()

        def second(name):
            with hfnn.use(name):
                y = F.causal_softmax(x, 0.5, mask=add) if causal else F.masked_softmax(x, add, 0.5)
                first = torch.autograd.grad(y.square().sum(), (x, add), create_graph=True)
                return torch.autograd.grad(sum(g.square().sum() for g in first), (x, add))

        torch.testing.assert_close(second(kernel), second("torch"))
        return
    x, add = (draw(*shape).double().requires_grad_() for shape in ((2, 4, 5), (4, 5)))
    keep = torch.rand(4, 5) > 0.4
    with hfnn.use(kernel):
        for mask in (None, keep, add):
            inputs = (x,) if mask is not add else (x, add)

            def fn(x, add=None, mask=mask):
                mask = mask if add is None else add
                return F.causal_softmax(x, 0.5, mask=mask) if causal else F.masked_softmax(x, mask, 0.5)

            assert torch.autograd.gradcheck(fn, inputs) and torch.autograd.gradgradcheck(fn, inputs)


@kernels
def test_gradients_one_by_one(kernel, device):
    x, add, dy = draw(2, 4, 9, device=device), draw(4, 9, device=device), draw(2, 4, 9, device=device)
    with hfnn.use(kernel):
        _, dx, dadd = run(F.masked_softmax, [x.clone().requires_grad_(), add.clone().requires_grad_()], dy)
        (alone,) = torch.autograd.grad(F.masked_softmax(x, add.requires_grad_()), add, dy)
        assert torch.equal(alone, dadd)
        (alone,) = torch.autograd.grad(F.masked_softmax(x.requires_grad_(), add.detach()), x, dy)
        torch.testing.assert_close(alone, dx)
        with torch.no_grad():
            assert not F.masked_softmax(x, add).requires_grad


@kernels
@dtypes
def test_only_the_result_is_kept(dtype, kernel, device):
    x = draw(2, 3, 8, 64, dtype=dtype, device=device).requires_grad_()
    keep, add = torch.rand(2, 1, 8, 64).to(device) > 0.3, draw(8, 64, device=device)
    with hfnn.use(kernel):
        for fn in (
            lambda: F.masked_softmax(x, keep, 0.5),
            lambda: F.masked_softmax(x, add),
            lambda: F.causal_softmax(x, mask=keep),
        ):
            assert memory.saved_bytes(fn).total == x.numel() * x.element_size()


@kernels
def test_masks_of_any_layout_are_not_expanded(kernel, device, monkeypatch):
    x = draw(2, 3, 5, 33, device=device)
    base = torch.rand(2, 5, 33).to(device)
    handed = []
    masks = (
        (base > 0.3)[:, None],
        (base > 0.3)[:, None].expand(2, 3, 5, 33),
        (base > 0.3)[:, None, :, ::3].repeat_interleave(3, -1),
        base.transpose(1, 2).contiguous().transpose(1, 2)[:, None],
        base[:, None, :, :1],
        torch.rand(2, 5, 66).to(device)[:, None, :, ::2],
    )
    found = next(k for k in hfnn.ops.masked_softmax.OP.kernels if k.name == kernel)
    forward = found.forward
    spy = lambda x, mask, *rest: (handed.append(mask), forward(x, mask, *rest))  # noqa: E731
    for mask in masks:
        want = F.masked_softmax(x, mask.contiguous(), prefer="memory")
        with hfnn.use(kernel), monkeypatch.context() as patched:
            patched.setitem(found.__dict__, "forward", spy)
            y = F.masked_softmax(x, mask)
        torch.testing.assert_close(y, want)
        given = handed[-1].untyped_storage().nbytes()
        assert handed[-1].shape == x.shape and given <= mask.untyped_storage().nbytes()


def test_other_dimensions_and_numbers(device):
    x, keep = draw(4, 5, 6, device=device).requires_grad_(), torch.rand(4, 5, 6).to(device) > 0.3
    y = F.masked_softmax(x, keep, 0.5, 1, prefer="memory")
    torch.testing.assert_close(y, F.masked_softmax(x.transpose(1, 2), keep.transpose(1, 2), 0.5).transpose(1, 2))
    scale = torch.tensor(0.5, device=device, requires_grad=True)
    (got,) = torch.autograd.grad(F.masked_softmax(x, keep, scale).square().sum(), scale)
    assert got.isfinite() and got != 0
    torch.testing.assert_close(F.masked_softmax(x, keep, scale), F.masked_softmax(x, keep, 0.5))
    assert F.masked_softmax(torch.zeros((), device=device)).item() == 1.0
    torch.testing.assert_close(F.masked_softmax(x), torch.softmax(x, -1))


def test_the_formula_gives_no_nans(device):
    """What runs without a kernel: an empty row is 0, and so is its gradient."""
    x = draw(2, 3, device=device).requires_grad_()
    for mask in (torch.tensor([[False], [True]]), torch.tensor([[-INF], [0.0]])):
        with hfnn.use("torch"):
            y = F.masked_softmax(x, mask.to(device))
        (dx,) = torch.autograd.grad(y.square().sum(), x)
        assert not y[0].any() and not dx[0].any() and y[1].sum().item() == pytest.approx(1) and dx.isfinite().all()


def test_eager_attention_of_transformers(device):
    """softmax(scores * scale + mask, dtype=float32).to(dtype), bitwise equal where torch runs."""
    for dtype in DTYPES:
        scores = draw(2, 3, 8, 8, dtype=dtype, device=device)
        mask = torch.full((8, 8), torch.finfo(dtype).min, dtype=dtype, device=device).triu(1)[None, None]
        want = torch.softmax(scores * 0.25 + mask, -1, dtype=torch.float32).to(dtype)
        with hfnn.use("torch"):
            assert torch.equal(F.masked_softmax(scores, mask, 0.25, dtype=dtype), want)
        for y in (F.masked_softmax(scores, mask, 0.25, dtype=dtype), F.causal_softmax(scores, 0.25, dtype=dtype)):
            torch.testing.assert_close(y, want, rtol=0.03 if dtype is not torch.float32 else 1e-5, atol=1e-7)


@kernels
def test_empty(kernel, device):
    with hfnn.use(kernel):
        for shape in ((0, 4), (2, 0, 3, 4), (2, 3, 0)):
            x = torch.empty(shape, device=device, requires_grad=True)
            y, dx = run(lambda x: F.masked_softmax(x, torch.ones(x.shape, dtype=torch.bool, device=device)), [x], x)
            assert y.shape == dx.shape == shape
            assert F.causal_softmax(x).shape == shape


def test_refusals(device):
    x = draw(2, 3, 4, device=device)
    for mask in (torch.ones(3, dtype=torch.bool), torch.ones(5, 2, 3, 4), torch.ones(2, 2, 3, 4)):
        with pytest.raises(ValueError, match=r"does not broadcast to input of shape \(2, 3, 4\)"):
            F.masked_softmax(x, mask.to(device))
    for mask in (torch.ones(4, dtype=torch.int64, device=device), 0.0, [True]):
        with pytest.raises(ValueError, match=r"bool .* or floating"):
            F.causal_softmax(x, mask=mask)
    with pytest.raises(ValueError, match=r"\(\.\.\., queries, keys\)"):
        F.causal_softmax(x[0, 0])
    with pytest.raises(ValueError, match=r"offset=0\.5: give an int"):
        F.causal_softmax(x, offset=0.5)


@pytest.mark.filterwarnings("ignore")
def test_under_compile(device):
    x, keep = draw(3, 5, 33, device=device).requires_grad_(), torch.rand(5, 33).to(device) > 0.3
    compiled = torch.compile(lambda x: F.causal_softmax(x, 0.5, mask=keep), fullgraph=True, backend="aot_eager")
    got = run(compiled, [x], torch.ones_like(x) * x.detach())
    want = run(lambda x: F.causal_softmax(x, 0.5, mask=keep), [x], torch.ones_like(x) * x.detach())
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the C++ kernel's own checks")
def test_kernel_checks():
    op = hfnn.ops.masked_softmax.OP.kernels[-1]
    x = torch.zeros(1, 1, 2, 3)
    for wrong, what in (
        ((x[0], None, x), "x must have the shape"),
        ((x, None, x[..., :2]), "y must have the shape"),
        ((x, torch.zeros(1, 1, 2, 2), x), "mask must have the shape"),
        ((x, x.long(), x), "mask must be bool, float32 or"),
        ((x, torch.zeros(1, 1, 2, 6)[..., ::2], x), "mask must have a last stride"),
        ((x, None, x.half().double()), "y must be float32"),
    ):
        with pytest.raises(ValueError, match=what):
            op.forward(*wrong, 1.0, False, 0, 1)
    with pytest.raises(ValueError, match="shift"):
        op.forward(x, None, x, 1.0, True, 4, 1)
    with pytest.raises(ValueError, match="dx must"):
        op.backward(x, x, x[..., :1], 1.0, False, 0, 1)
