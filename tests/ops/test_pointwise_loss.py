"""mse_loss, huber_loss, smooth_l1_loss, binary_cross_entropy_with_logits: shared behaviour beyond torch's."""

import copy
import pickle
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode

import hfnn
from hfnn import memory, testing
from hfnn.ops import OPS

from .kernels import DTYPES, KERNELS, kernels

names = "mse_loss", "huber_loss", "smooth_l1_loss", "binary_cross_entropy_with_logits"
mse_loss, huber_loss, smooth_l1_loss, bce = map(OPS.get, names)
FORMS = [
    pytest.param(op, options, id="-".join([op.name, *(f"{k}={v}" for k, v in options.items())]))
    for op, options in (
        (mse_loss, {}),
        (huber_loss, {}),
        (huber_loss, {"delta": 0.7}),
        (huber_loss, {"delta": 5.0}),
        (smooth_l1_loss, {}),
        (smooth_l1_loss, {"beta": 0.7}),
        (smooth_l1_loss, {"beta": 0.0}),
        (bce, {}),
    )
]
forms = pytest.mark.parametrize("op, options", FORMS)
ops = pytest.mark.parametrize("op", [mse_loss, huber_loss, smooth_l1_loss, bce], ids=lambda op: op.name)
reductions = pytest.mark.parametrize("reduction", ["mean", "sum"])


def function(op):
    return getattr(hfnn.functional, op.name)


def pair(op, shape, dtype=torch.float32, device="cpu", target_grad=None):
    """Leaves x and target. The target requires grad if the kernel computes its gradient."""
    x, target = torch.randn(shape) * 2, torch.randn(shape)
    target = target.sigmoid() if op is bce else target
    target_grad = op is not bce if target_grad is None else target_grad
    return x.to(dtype).to(device).requires_grad_(), target.to(dtype).to(device).requires_grad_(target_grad)


def run(fn, x, target, dy=None, **options):
    """(loss, gradients)"""
    y = fn(x, target, **options)
    return y, *torch.autograd.grad(y, [t for t in (x, target) if t.requires_grad], dy)


def forced(op, kernel):
    """The op's function by one kernel, checking that it ran."""

    def fn(*args, **kwargs):
        with hfnn.use(kernel):
            y = function(op)(*args, **kwargs)
        own = "_L1LossBackward" if kwargs.get("beta") == 0 else "_PointwiseLossBackward"
        assert y.grad_fn.name() == own, "torch's own op ran"
        return y

    return fn


def to(dtype, *tensors):
    return [t.detach().to(dtype).requires_grad_(t.requires_grad) for t in tensors]


def concatenated(results):
    """The losses of several runs as one vector, because a single number may be right by chance; and their gradients."""
    columns = list(zip(*results, strict=True))
    return [torch.stack(columns[0]).detach(), *(torch.cat([g.flatten() for g in grads]) for grads in columns[1:])]


@forms
@reductions
@kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_matches_float64(op, options, reduction, kernel, dtype, device):
    options = {**options, "reduction": reduction}
    samples = [pair(op, shape, dtype, device) for shape in [(1,), (2, 3, 5), (2, 4100), *[(3, 769)] * 8]]
    mine = concatenated(run(forced(op, kernel), *sample, **options) for sample in samples)
    own = concatenated(run(op.torch, *sample, **options) for sample in samples)
    wide = concatenated(run(op.reference, *to(torch.float64, *sample), **options) for sample in samples)
    errors = [testing.error(losses, wide[0]).l2 for losses in (mine[0], own[0])]
    assert errors[0] <= max(testing.OUTPUTS * errors[1], torch.finfo(dtype).eps) and mine[0].dtype is dtype
    for got, of, reference in zip(mine[1:], own[1:], wide[1:], strict=True):
        testing.assert_close(got, reference, of, testing.GRADIENTS)


@forms
@reductions
def test_gradcheck(op, options, reduction):
    x, target = pair(op, (3, 5), torch.float64)

    def fn(*leaves):
        return function(op)(*leaves, *(() if len(leaves) > 1 else (target,)), reduction=reduction, **options)

    leaves = [t for t in (x, target) if t.requires_grad]
    with hfnn.use(next(k.name for k in op.kernels if torch.float64 in k.dtypes)):
        assert torch.autograd.gradcheck(fn, leaves)
        assert torch.autograd.gradgradcheck(fn, leaves)


@forms
@kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_second_derivative(op, options, kernel, dtype, device):
    """Computed from the kept first derivative, in a narrow dtype, with bounds that no narrow number equals."""

    def second(fn, x, target):
        y = fn(x, target, reduction="sum", **options)
        (dx,) = torch.autograd.grad(y * y, x, create_graph=True)
        return [dx.detach(), *torch.autograd.grad(dx.float().square().sum(), x)]

    x, target = pair(op, (3, 769), dtype, device, target_grad=False)
    x, target = x.detach().mul(0.01).requires_grad_(), target * 0.5  # a sum of squares stays finite in float16
    results = [second(fn, x, target) for fn in (forced(op, kernel), op.torch)]
    wide = second(op.reference, *to(torch.float64, x, target))
    for got, of, reference in zip(*results, wide, strict=True):
        testing.assert_close(got, reference, of, 2 * testing.GRADIENTS)


def test_third_derivative_of_bce():
    x, target = pair(bce, (3, 5), torch.float64)
    found = []
    for fn in (function(bce), bce.torch):
        y = fn(x, target, reduction="sum", **({} if fn is bce.torch else {"prefer": "memory"}))
        for _ in range(3):
            (y,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        found.append(y)
    torch.testing.assert_close(*found)


@ops
@kernels
def test_nothing_is_written_to(op, kernel, device):
    leaves = pair(op, (3, 769), device=device)
    copies = [t.detach().clone() for t in leaves]
    y = forced(op, kernel)(*leaves)
    dy = torch.full_like(y, 3)
    wanted = [t for t in leaves if t.requires_grad]
    first, second = (torch.autograd.grad(y, wanted, dy, retain_graph=True) for _ in range(2))
    assert all(map(torch.equal, first, second)) and y._version == dy._version == 0 and dy == 3
    first[0].zero_()  # the caller may write to it
    assert torch.equal(torch.autograd.grad(y, wanted, dy)[0], second[0])
    assert all(map(torch.equal, leaves, copies)) and not any(t._version for t in leaves)


@ops
def test_a_loss_may_be_changed_in_place(op, device):
    """As in `loss /= steps`, common in training loops."""
    x, target = pair(op, (3, 769), device=device, target_grad=False)
    y = function(op)(x, target, prefer="memory")
    (want,) = torch.autograd.grad(y, x, retain_graph=True)
    y /= 4
    y.backward()
    torch.testing.assert_close(x.grad, want / 4)


@ops
@kernels
def test_each_gradient_on_its_own(op, kernel, device):
    x, target = pair(op, (3, 769), device=device)
    together = run(forced(op, kernel), x, target)
    for i, leaf in enumerate(t for t in (x, target) if t.requires_grad):
        alone = [t.detach().requires_grad_(t is leaf) for t in (x, target)]
        y, grad = run(forced(op, kernel), *alone)
        assert torch.equal(y, together[0]) and torch.equal(grad, together[1 + i])
    with hfnn.use(kernel):
        assert torch.equal(function(op)(x.detach(), target.detach()), together[0])
        with torch.no_grad():
            assert torch.equal(function(op)(x, target), together[0])


@ops
@reductions
@kernels
@pytest.mark.parametrize("shape", [(0,), (0, 8), (3, 0)])
def test_empty(op, reduction, kernel, shape, device):
    """The mean of nothing is NaN, its sum is 0."""
    leaves = pair(op, shape, device=device)
    mine = run(forced(op, kernel), *leaves, reduction=reduction)
    for got, want in zip(mine, run(op.torch, *leaves, reduction=reduction), strict=True):
        assert got.shape == want.shape
        torch.testing.assert_close(got, want, equal_nan=True)


@ops
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_autocast(op, low, dtype, device):
    """torch's dtypes; a narrow input is not copied to float32."""
    x, target = pair(op, (33, 64), dtype, device, target_grad=False)
    with torch.autocast(device, dtype=low):
        mine, theirs = run(function(op), x, target, prefer="memory"), run(op.torch, x, target)
        kept = memory.saved_bytes(lambda: function(op)(x, target, prefer="memory")).total
    assert kept == (1 + (op is bce)) * x.nbytes
    assert [t.dtype for t in mine] == [t.dtype for t in theirs] == [torch.float32, dtype]
    for got, want in zip(mine, theirs, strict=True):
        torch.testing.assert_close(got, want)


@ops
def test_float16_mean_of_many(op, device):
    """1 / N times a gradient that float16 cannot represent, as loss scaling gives: computed in float32."""
    x, target = pair(op, (1 << 17,), torch.float16, device, target_grad=False)
    dy = torch.tensor(16384.0, dtype=torch.float16, device=device)
    mine, own = (run(fn, x, target, dy)[1] for fn in (forced(op, KERNELS[0]), op.torch))
    _, wide = run(op.reference, *to(torch.float64, x, target), dy.double())
    testing.assert_close(mine, wide, own, testing.GRADIENTS)


@ops
def test_memory_kept(op, device):
    """One tensor, the unscaled gradient; torch keeps both inputs. Binary cross-entropy also keeps its target."""
    for dtype in DTYPES:
        leaves = pair(op, (64, 64), dtype, device)
        kept = memory.saved_bytes(lambda leaves=leaves: function(op)(*leaves, prefer="memory")).total
        theirs = memory.saved_bytes(lambda leaves=leaves: op.torch(*leaves)).total
        assert kept == (1 + (op is bce)) * leaves[0].nbytes <= theirs


LAYOUTS = {
    "transposed": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "channels_last": lambda t: t.contiguous(memory_format=torch.channels_last),
    "strided": lambda t: torch.stack([t, t], -1)[..., 0],
    "unaligned": lambda t: torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape),
    "expanded": lambda t: t[:1].expand(t.shape),
    "plain": lambda t: t,
}


@ops
@kernels
@pytest.mark.parametrize("of_target", LAYOUTS)
@pytest.mark.parametrize("of_x", LAYOUTS)
def test_any_layout(op, kernel, of_x, of_target, device):
    x, target = pair(op, (2, 3, 5, 7), device=device)
    x, target = LAYOUTS[of_x](x.detach()), LAYOUTS[of_target](target.detach())
    leaves = [x.requires_grad_(), target.requires_grad_(op is not bce)]
    mine, theirs = run(forced(op, kernel), *leaves), run(op.torch, *leaves)
    for got, want in zip(mine, theirs, strict=True):
        torch.testing.assert_close(got, want)
    assert [t.stride() for t in mine] == [t.stride() for t in theirs]


def outcome(fn, *args, **kwargs):
    """A call's result with its warnings, or its error."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            result = fn(*args, **kwargs)
        except Exception as error:
            return type(error), str(error)
    return result, sorted({str(w.message) for w in caught})


def others(op):
    """Calls that are left to torch's own op: (arguments, options)."""
    x, target = (t.detach() for t in pair(op, (4, 6)))
    yield (x, target), {"reduction": "none"}
    yield (x, target.double()), {}
    yield (x.bfloat16(), target), {}
    yield (x, target[:1]), {}
    yield (x, target), {"reduction": "median"}
    yield (x.long(), target.long()), {}
    yield (x, 0.0), {}
    if op is not smooth_l1_loss:
        yield (x, target), {"weight": torch.rand(4, 6)}
        yield (x, target), {"weight": torch.rand(4, 6), "reduction": "sum"}
        yield (x, target), {"weight": torch.rand(1)}
    if op is not huber_loss:
        yield (x, target), {"size_average": False}
        yield (x, target), {"reduce": False}
        yield (x, target, None, True, "sum") if op is bce else (x, target, True, None, "sum"), {}
    if op is bce:
        yield (x, target), {"pos_weight": torch.rand(6)}
        yield (x, target.requires_grad_()), {}
    for name, value in ((huber_loss, ("delta", 0.0)), (huber_loss, ("delta", -1.0)), (smooth_l1_loss, ("beta", -1.0))):
        if op is name:
            yield (x, target), dict([value])


@ops
def test_the_rest_is_torchs(op):
    """Bitwise equal, with the same warnings and errors."""
    for args, options in others(op):
        want = outcome(op.torch, *args, **options)
        got = outcome(function(op), *args, **options, prefer="memory")
        assert type(got[0]) is type(want[0]) and got[1] == want[1], (options, got, want)
        if isinstance(want[0], torch.Tensor):
            assert got[0].dtype is want[0].dtype and torch.equal(got[0], want[0])


@ops
def test_zero_dimensions_and_many(op, device):
    for shape in ((), (1,) * 9 + (3,)):
        leaves = pair(op, shape, device=device)
        mine, theirs = run(forced(op, KERNELS[0]), *leaves), run(op.torch, *leaves)
        for got, want in zip(mine, theirs, strict=True):
            torch.testing.assert_close(got, want)


@forms
@kernels
def test_ends(op, options, kernel, device):
    """Infinities, NaN, zeros, both sides of a bound: finite where torch is, and equal there."""
    inf = float("inf")
    values = torch.tensor([inf, -inf, float("nan"), 0.0, -0.0, 1.0, -1.0, 0.7, 100.0, -100.0, 1e30], device=device)
    for value in values:
        x, target = torch.full((5,), value.item(), device=device, requires_grad=True), torch.zeros(5, device=device)
        mine, theirs = (run(fn, x, target, **options) for fn in (forced(op, kernel), op.torch))
        if op is bce and value.isinf():  # inf - inf: infinite or NaN, depending on the order of terms
            assert not mine[0].isfinite() and not theirs[0].isfinite()
            mine, theirs = mine[1:], theirs[1:]
        if options.get("beta") == 0 and value.isnan():  # torch's slope of |NaN| is 0
            mine, theirs = mine[:1], theirs[:1]
        for got, want in zip(mine, theirs, strict=True):
            torch.testing.assert_close(got, want, equal_nan=True)


@ops
@kernels
@settings(max_examples=20, deadline=None, derandomize=True)
@given(data=st.data())
def test_random_shapes(op, kernel, data):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = data.draw(st.lists(st.integers(0, 17), max_size=3))
    if data.draw(st.booleans()):
        shape.append(data.draw(st.sampled_from([127, 128, 129, 511, 1024, 1025])))
    dtype = data.draw(st.sampled_from(DTYPES))
    leaves, reduction = pair(op, shape, dtype, device), data.draw(st.sampled_from(["mean", "sum"]))
    mine = run(forced(op, kernel), *leaves, reduction=reduction)
    own = run(op.torch, *leaves, reduction=reduction)
    wide = run(op.reference, *to(torch.float64, *leaves), reduction=reduction)
    for got, of, reference in zip(mine, own, wide, strict=True):
        assert got.dtype is of.dtype and got.shape == of.shape
        # Few elements make torch's own error random: one and a half ulps are added.
        errors = [testing.error(t, reference).l2 for t in (got, of)]
        assert errors[0] <= 3 * errors[1] + 1.5 * torch.finfo(dtype).eps or not reference.isfinite().all()


@ops
@kernels
def test_runs_are_bitwise_equal(op, kernel, device):
    leaves = pair(op, (5, 4099), torch.bfloat16, device)
    first, second = (run(forced(op, kernel), *leaves) for _ in range(2))
    assert all(map(torch.equal, first, second))


MODULES = [
    (mse_loss, lambda cls: cls()),
    (mse_loss, lambda cls: cls(reduction="none")),
    (huber_loss, lambda cls: cls(delta=0.5, reduction="sum")),
    (smooth_l1_loss, lambda cls: cls(beta=0.5)),
    (bce, lambda cls: cls()),
    (bce, lambda cls: cls(pos_weight=torch.full((64,), 2.0), reduction="sum")),
]


@pytest.mark.parametrize("op, make", MODULES, ids=range(len(MODULES)))
def test_modules(op, make):
    """torch's arguments, repr, state and results."""
    ((base, cls),) = op.modules.items()
    theirs, mine = make(base), make(cls)
    assert issubclass(cls, base) and repr(mine) == repr(theirs)
    assert mine.state_dict().keys() == theirs.state_dict().keys()
    leaves = pair(op, (33, 64))
    mine.prefer = "memory"
    for module in (mine, copy.deepcopy(mine), pickle.loads(pickle.dumps(mine))):
        for got, want in zip(
            *(run(lambda *a, m=m: m(*a).sum(), *leaves) for m in (module, theirs)),
            strict=True,
        ):
            torch.testing.assert_close(got, want)


@ops
def test_transforms_and_fakes(op):
    """functorch gets torch's own op. A FakeTensor gets shapes, and no kernel runs."""
    x, target = (t.detach() for t in pair(op, (33, 64)))
    loss = lambda x: function(op)(x, target, prefer="memory")  # noqa: E731
    torch.testing.assert_close(torch.func.grad(loss)(x), torch.func.grad(lambda x: op.torch(x, target))(x))
    with FakeTensorMode() as mode:
        x, target = mode.from_tensor(x).requires_grad_(), mode.from_tensor(target)
        y = function(op)(x, target, prefer="memory")
        y.backward()
        assert y.shape == () and x.grad.shape == x.shape
