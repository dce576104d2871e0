"""The semantic contract (docs/design.md, section 4), for every op x kernel x dtype x case of the index.

No op is named here: a new room is tested once it is in `hfnn.ops.CONTRACT`.
"""

import contextlib
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hfnn
from hfnn import testing
from hfnn.core.kernel import NoKernel, _interpreting

DEVICES = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
INTERPRETED_ELEMENTS = 8192  # the interpreter runs one program at a time, in numpy


def runs_on(kernel, device):
    return kernel.missing is None and (kernel.device == device or (kernel.name == "triton" and _interpreting()))


def elements(op, case, dtype=torch.float32):
    (x, *_), _ = op.sample(case, dtype, "meta")
    return x.numel()


def combinations():
    for op in hfnn.ops.CONTRACT:
        for kernel in op.kernels:
            for device in DEVICES:
                if not runs_on(kernel, device):
                    continue
                for dtype in kernel.dtypes:
                    for case in op.cases:
                        if not (
                            device == "cpu" and kernel.name == "triton" and elements(op, case) > INTERPRETED_ELEMENTS
                        ):
                            name = f"{op.name}-{kernel.name}-{device}-{str(dtype)[6:]}-{'x'.join(map(str, case))}"
                            yield pytest.param(op, kernel, device, dtype, case, id=name)


ALL = list(combinations())
# Tests that do not depend on the shape use the cases whose rows no vector width divides.
RAGGED = [p for p in ALL if 769 in p.values[4]]
# Comparing float64 with a float64 reference proves nothing; gradcheck covers float64.
NARROW = [p for p in ALL if p.values[3] is not torch.float64]
each = pytest.mark.parametrize("op, kernel, device, dtype, case", NARROW)
ragged = pytest.mark.parametrize("op, kernel, device, dtype, case", RAGGED)
narrow = pytest.mark.parametrize("op, kernel, device, dtype, case", [p for p in RAGGED if p in NARROW])


def function(op):
    return getattr(hfnn.functional, op.name)


def is_float(x):
    return isinstance(x, torch.Tensor) and x.is_floating_point()


def leaves(args):
    """Fresh leaves that require grad, in place of the floating-point tensors."""
    return tuple(a.detach().clone().requires_grad_() if is_float(a) else a for a in args)


def tensors(args):
    return [a for a in args if is_float(a)]


def to(args, dtype):
    return tuple(a.detach().to(dtype).requires_grad_() if is_float(a) else a for a in args)


def cotangent(y):
    """bfloat16 values, which every dtype represents. A rounded cotangent would be an error of the whole gradient."""
    return torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).bfloat16().to(y)


def run(fn, args, kwargs, dy=None, seed=7):
    """(y, gradients of the floating-point arguments) for a cotangent drawn once."""
    torch.manual_seed(seed)
    y = fn(*args, **kwargs)
    return y, torch.autograd.grad(y, tensors(args), cotangent(y) if dy is None else dy.to(y))


def pinned(op, args, y):
    """What the reference needs from a random op's result."""
    return {} if op.pin is None else op.pin(args, y)


@contextlib.contextmanager
def nondeterminism():
    """Inside, torch's own backward may use atomic adds, as some pools do on a GPU; rooms may not."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* does not have a deterministic implementation", UserWarning)
        yield


def references(op, args, kwargs, y):
    """(float64 result and gradients, torch's own in the dtype of args)."""
    pin = pinned(op, args, y)
    own = op.torch if op.pin is None else op.reference
    with nondeterminism():
        wide = run(op.reference, to(args, torch.float64), {**kwargs, **pin})
        return wide, run(own, leaves(args), {**kwargs, **pin})


def summed(op, x):
    """Terms of the longest sum in a result, if summed in the result's dtype."""
    if not op.sums or x.dtype is not torch.float32 or x.numel() == 0:
        return 1
    return max(x.shape[-1], x.numel() // x.shape[-1])


def check(op, kernel, args, kwargs):
    """Output and gradients by the accuracy rule."""
    args = leaves(args)
    with hfnn.use(kernel.name):
        y, grads = run(function(op), args, kwargs)
    assert y.grad_fn.name().startswith("_"), "torch's own op ran"  # rooms' autograd.Functions are private
    (wide, wide_grads), (own, own_grads) = references(op, args, kwargs, y)
    terms = summed(op, args[0])
    testing.assert_close(y, wide, own, testing.OUTPUTS, "output", terms)
    for i, (grad, wide_grad, own_grad) in enumerate(zip(grads, wide_grads, own_grads, strict=True)):
        testing.assert_close(grad, wide_grad, own_grad, testing.GRADIENTS, f"gradient {i}", terms)


@each
def test_matches_float64(op, kernel, device, dtype, case):
    check(op, kernel, *op.sample(case, dtype, device))


@pytest.mark.parametrize(
    "op, kernel, device, dtype, case", [p for p in narrow.args[1] if p.values[0].name.endswith("_norm")]
)
def test_accuracy_far_from_zero(op, kernel, device, dtype, case):
    """Statistics of values that differ little from their mean are as exact as torch's."""
    (x, *args), kwargs = op.sample(case, dtype, device)
    check(op, kernel, (x + 100, *args), kwargs)


@each
def test_runs_are_bitwise_equal(op, kernel, device, dtype, case):
    args, kwargs = op.sample(case, dtype, device)
    with hfnn.use(kernel.name):
        first, second = (run(function(op), leaves(args), kwargs) for _ in range(2))
    for a, b in zip((first[0], *first[1]), (second[0], *second[1]), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)  # the mean of nothing is NaN


@ragged
def test_nothing_is_written_to(op, kernel, device, dtype, case):
    args, kwargs = op.sample(case, dtype, device)
    args = leaves(args)
    copies = [a.detach().clone() for a in tensors(args)]
    with hfnn.use(kernel.name):
        y = function(op)(*args, **kwargs)
        kept, version, dy = y.detach().clone(), y._version, torch.randn_like(y)
        dy_kept = dy.clone()
        first = torch.autograd.grad(y, tensors(args), dy, retain_graph=True)
        second = torch.autograd.grad(y, tensors(args), dy)
    assert all(map(torch.equal, first, second)), "the second backward of a retained graph differs"
    assert torch.equal(y, kept) and y._version == version
    assert torch.equal(dy, dy_kept) and dy._version == 0
    assert all(map(torch.equal, tensors(args), copies)) and all(a._version == 0 for a in tensors(args))


@ragged
def test_each_gradient_on_its_own(op, kernel, device, dtype, case):
    args, kwargs = op.sample(case, dtype, device)
    with hfnn.use(kernel.name):
        _, together = run(function(op), leaves(args), kwargs)
        for wanted in range(len(tensors(args))):
            alone = [a.detach().clone() if is_float(a) else a for a in args]
            target = tensors(alone)[wanted].requires_grad_()
            torch.manual_seed(7)
            y = function(op)(*alone, **kwargs)
            dy = cotangent(y)
            (grad,) = torch.autograd.grad(y, target, dy)
            assert torch.equal(grad, together[wanted])


def strided(x):
    return torch.stack([x, x], -1)[..., 0]


def transposed(x):
    return x.transpose(0, -1).contiguous().transpose(0, -1)


def offset_by_one(x):
    """Contiguous, but 16-byte loads would fault or read the neighbour."""
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


@ragged
@pytest.mark.parametrize("layout", [strided, transposed, offset_by_one])
def test_any_layout(op, kernel, device, dtype, case, layout):
    args, kwargs = op.sample(case, dtype, device)
    with hfnn.use(kernel.name):
        plain = run(function(op), leaves(args), kwargs)
        x = layout(args[0].detach()).requires_grad_()
        assert torch.equal(x, args[0])
        y, grads = run(function(op), (x, *leaves(args[1:])), kwargs)
        dy = cotangent(y)
        laid = run(function(op), leaves(args), kwargs, layout(dy))
    if op.pin is None:
        wanted = plain[0], *plain[1]
    else:  # draws follow the memory layout, as in torch
        own, own_grads = run(op.reference, to(args, torch.float64), {**kwargs, **pinned(op, args, y)})
        wanted = own, *own_grads
    # An unaligned or strided x may take another path through a kernel: equal within rounding, not bitwise.
    near = {torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype, 2e-2)
    for got, want in zip((y, *grads, laid[0], *laid[1]), (*wanted, plain[0], *plain[1]), strict=True):
        assert testing.error(got, want.double()).l2 <= near


@ragged
def test_expanded_inputs(op, kernel, device, dtype, case):
    args, kwargs = op.sample(case, dtype, device)
    x = args[0][:1].detach().expand(args[0].shape)
    with hfnn.use(kernel.name):
        y, grads = run(function(op), (x.requires_grad_(), *leaves(args[1:])), kwargs)
        want, want_grads = run(function(op), leaves((x.contiguous(), *args[1:])), kwargs)
    assert torch.equal(y, want) and all(map(torch.equal, grads, want_grads))
    with hfnn.use(kernel.name):  # an expanded gradient, such as that of a sum
        torch.manual_seed(7)
        leaf = args[0].detach().requires_grad_()
        (grad,) = torch.autograd.grad(function(op)(leaf, *args[1:], **kwargs).sum(), leaf)
        _, want_grads = run(function(op), leaves(args), kwargs, torch.ones_like(y))
    assert torch.equal(grad, want_grads[0])


@narrow
def test_double_backward(op, kernel, device, dtype, case):
    args, kwargs = op.sample(case, dtype, device)

    def second(fn, args, kwargs):
        torch.manual_seed(7)
        y = fn(*args, **kwargs)
        weight = cotangent(y)
        first = torch.autograd.grad((y * y * weight).sum(), tensors(args), create_graph=True)
        return y, torch.autograd.grad(sum(g.square().sum() for g in first), tensors(args))

    with hfnn.use(kernel.name):
        y, got = second(function(op), leaves(args), kwargs)
    pin = pinned(op, args, y)
    with nondeterminism():
        _, wide = second(op.reference, to(args, torch.float64), {**kwargs, **pin})
        try:
            _, own = second(op.torch if op.pin is None else op.reference, leaves(args), {**kwargs, **pin})
        except RuntimeError as error:  # hfnn may support more than torch
            if "is not implemented" not in str(error):
                raise
            _, own = second(op.reference, leaves(args), {**kwargs, **pin})
    for i, (g, w, o) in enumerate(zip(got, wide, own, strict=True)):
        testing.assert_close(g, w, o, 2 * testing.GRADIENTS, f"second gradient {i}")


@pytest.mark.parametrize("op, kernel, device, dtype, case", [p for p in RAGGED if p.values[3] is torch.float64])
def test_gradcheck(op, kernel, device, dtype, case):
    args, kwargs = op.sample(op.small, dtype, device)
    args = leaves(args)

    def fn(*inputs):
        rest = iter(inputs)
        torch.manual_seed(7)
        return function(op)(*(next(rest) if is_float(a) else a for a in args), **kwargs)

    with hfnn.use(kernel.name):
        assert torch.autograd.gradcheck(fn, tensors(args))
        assert torch.autograd.gradgradcheck(fn, tensors(args))


def small(op, kernel, device, dtype):
    """Leaves, and the op's result."""
    args, kwargs = op.sample(op.small, dtype, device)
    args = leaves(args)
    with hfnn.use(kernel.name):
        return args, function(op)(*args, **kwargs)


@pytest.mark.parametrize("op, kernel, device, dtype, case", [p for p in RAGGED if p.values[3] is torch.float32])
def test_batched_gradients(op, kernel, device, dtype, case):
    """Batched gradients by `is_grads_batched` and vmap equal those of separate backwards."""
    args, y = small(op, kernel, device, dtype)
    dys = torch.randn(3, *y.shape, generator=torch.Generator().manual_seed(1)).to(y)

    def gradients(dy, **batched):
        return torch.autograd.grad(y, tensors(args), dy, retain_graph=True, **batched)

    found = gradients(dys, is_grads_batched=True), torch.func.vmap(gradients)(dys)
    for i, each in enumerate(zip(*map(gradients, dys), strict=True)):
        assert torch.equal(found[0][i], torch.stack(each)) and torch.equal(found[1][i], torch.stack(each))


@pytest.mark.parametrize("op, kernel, device, dtype, case", [p for p in RAGGED if p.values[3] is torch.float32])
def test_without_a_gradient_there_are_none(op, kernel, device, dtype, case):
    """Not zeros: optimizers leave a parameter without a gradient alone."""

    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            return y.clone()

        @staticmethod
        def backward(ctx, dz):
            return None

    args, y = small(op, kernel, device, dtype)
    found = torch.autograd.grad(Nothing.apply(y).sum(), tensors(args), allow_unused=True)
    assert all(dx is None for dx in found)


@pytest.mark.parametrize("op, kernel, device, dtype, case", [p for p in RAGGED if p.values[3] is torch.float32])
def test_gradients_of_what_is_not_in_memory_as_it_is(op, kernel, device, dtype, case):
    """Zeros without memory, from second derivatives, and lazily negated tensors."""
    args, y = small(op, kernel, device, dtype)
    z = torch.randn(y.shape, dtype=torch.complex64, device=y.device)
    for dy in (torch._efficientzerotensor(y.shape, device=y.device), z.conj().imag):
        found = torch.autograd.grad(y, tensors(args), dy, retain_graph=True)
        wanted = torch.autograd.grad(y, tensors(args), torch.zeros_like(y) + dy, retain_graph=True)
        assert all(map(torch.equal, found, wanted))


@ragged
def test_saves_no_more_than_torch(op, kernel, device, dtype, case):
    args, kwargs = op.sample(case, dtype, device)
    x = args[0].detach().requires_grad_()
    with hfnn.use(kernel.name):
        ours = hfnn.memory.saved_bytes(lambda: function(op)(x, *args[1:], **kwargs))
    theirs = hfnn.memory.saved_bytes(lambda: op.torch(x, *args[1:], **kwargs))
    statistics = 8 * x.numel() // x.shape[-1] + 8  # ours are float32, torch's have x's dtype
    assert ours.total <= theirs.total + statistics, f"{ours}\ntorch:\n{theirs}"


@pytest.mark.parametrize("op", [op for op in hfnn.ops.CONTRACT if op.kernels], ids=lambda op: op.name)
@settings(max_examples=20, deadline=None, derandomize=True)
@given(data=st.data())
def test_random_shapes(op, data):
    """Random shapes, with the device's first kernel: the rule holds for outputs and gradients."""
    device = DEVICES[-1]
    kernel = next(k for k in op.kernels if k.device == device and k.missing is None)
    wide = data.draw(st.booleans())
    cols = st.sampled_from([127, 128, 129, 500, 1023, 1024, 1025, 2047, 4096, 5120]) if wide else st.integers(5, 70)
    most = 8 if wide and device == "cpu" else 70  # 70 x 70 rows of 5120 take seconds on a CPU and find no more
    shape = [*data.draw(st.lists(st.integers(1, most), max_size=2)), data.draw(cols)]
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    case = (*shape, *(extra for extra in op.cases[1] if not isinstance(extra, int)))
    args, kwargs = op.sample(case, dtype, device)
    args = leaves(args)
    with hfnn.use(kernel.name):
        y, grads = run(function(op), args, kwargs)
    (wide, wide_grads), (own, own_grads) = references(op, args, kwargs, y)
    # Few elements make torch's own error random: one and a half ulps are added.
    for got, want, torchs in zip((y, *grads), (wide, *wide_grads), (own, *own_grads), strict=True):
        mine, theirs = testing.error(got, want), testing.error(torchs, want)
        assert mine.l2 <= 3 * theirs.l2 + 1.5 * torch.finfo(dtype).eps


# Refusals


@pytest.mark.parametrize("op", [op for op in hfnn.ops.CONTRACT if op.kernels], ids=lambda op: op.name)
def test_forced_kernels_never_fall_back(op):
    args, kwargs = op.sample(op.cases[1], torch.float32, "cpu")
    integers = args[0].long()
    for name in ("cpp", "cuda", "triton"):
        with hfnn.use(name), pytest.raises(NoKernel, match=f"{op.name}: `{name}` was asked for"):
            function(op)(integers, *args[1:], **kwargs)


@pytest.mark.parametrize("op", [op for op in hfnn.ops.CONTRACT if op.kernels], ids=lambda op: op.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_autocast_parity(op, dtype, device):
    args, kwargs = op.sample(op.cases[1], dtype, device)
    for low in (torch.bfloat16, torch.float16):
        with torch.autocast(device, dtype=low):
            want = op.torch(*args, **kwargs).dtype
            assert function(op)(*args, **kwargs, prefer="memory").dtype is want
