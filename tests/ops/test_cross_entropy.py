"""cross_entropy beyond the contract: all of torch's arguments, and three options of its own."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hfnn
from hfnn import testing
from hfnn.core.holder import target_of
from hfnn.core.kernel import _interpreting
from hfnn.ops.cross_entropy import OP, reference

F = torch.nn.functional
DEVICES = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
KERNELS = [
    pytest.param(kernel.name, device, id=f"{kernel.name}-{device}")
    for kernel in OP.kernels
    for device in DEVICES
    if kernel.missing is None and (kernel.device == device or (kernel.name == "triton" and _interpreting()))
]
each_kernel = pytest.mark.parametrize("kernel, device", KERNELS)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def example(shape, dtype, device, soft=False, scale=3.0):
    classes = min(1, len(shape) - 1)
    x = (torch.randn(shape) * scale).to(dtype).to(device).requires_grad_()
    if soft:
        return x, torch.randn(shape).softmax(classes).to(dtype).to(device)
    target = torch.randint(shape[classes], shape[:1] + shape[2:] if len(shape) > 1 else ())
    if target.numel() > 2:
        target.view(-1)[1] = -100
    return x, target.to(device)


def run(fn, x, *args, dy=None, **options):
    y = fn(x, *args, **options)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(3)).bfloat16() if dy is None else dy
    return y, torch.autograd.grad(y, x, dy.to(y))[0]


def judge(kernel, x, target, weight=None, own=None, **options):
    """Compares a kernel with float64 by the accuracy rule. own: torch's op, if it has these options."""
    with hfnn.use(kernel):
        y, dx = run(hfnn.functional.cross_entropy, x, target, weight, prefer="memory", **options)
    assert y.grad_fn.name().startswith("_CrossEntropy"), "torch's own op ran"
    wide = (target.double() if target.is_floating_point() else target), None if weight is None else weight.double()
    exact = run(reference, x.detach().double().requires_grad_(), *wide, **options)
    torchs = run(own or reference, x.detach().requires_grad_(), target, weight, **options)
    torchs, dtype = tuple(t.to(g.dtype) for t, g in zip(torchs, (y, dx), strict=True)), x.dtype
    if dtype is not torch.float32:
        testing.assert_close(y, exact[0], torchs[0], testing.OUTPUTS, "loss")
        testing.assert_close(dx, exact[1], torchs[1], testing.GRADIENTS, "gradient")
    else:  # few and small numbers: torch's own error is random, and may be zero
        for got, want, torchs_own in zip((y, dx), exact, torchs, strict=True):
            mine, theirs = testing.error(got, want), testing.error(torchs_own, want)
            assert mine.l2 <= 3 * theirs.l2 + 2 * torch.finfo(dtype).eps


SHAPES = ((7,), (5, 7), (3, 769), (2, 5, 3), (2, 4, 3, 5), (33, 64))


@each_kernel
@pytest.mark.filterwarnings("ignore:nll_loss2d")  # torch's own, nondeterministic on CUDA
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("soft", [False, True], ids=["classes", "probabilities"])
def test_signature_of_torch(kernel, device, shape, soft):
    if soft and kernel == "cuda":
        kernel = "triton"  # the kernel for probabilities
    classes = shape[min(1, len(shape) - 1)]
    options = itertools.product(("none", "mean", "sum"), (0.0, 0.1), (False, True), DTYPES)
    for reduction, smoothing, weighted, dtype in options:
        x, target = example(shape, dtype, device, soft)
        weight = (torch.rand(classes) + 0.1).to(dtype).to(device) if weighted else None
        options = {"reduction": reduction, "label_smoothing": smoothing}
        if not soft and target.numel() > 2 and reduction == "sum":
            target.view(-1)[1] = options["ignore_index"] = int(target.view(-1)[0])
        judge(kernel, x, target, weight, own=F.cross_entropy, **options)


@each_kernel
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("soft", [False, True], ids=["classes", "probabilities"])
def test_own_numbers(kernel, device, dtype, soft):
    if soft and kernel == "cuda":
        kernel = "triton"
    for z_loss, softcap, logit_scale, smoothing in itertools.product((0, 1e-2), (None, 5.0), (1.0, 0.3), (0.0, 0.2)):
        x, target = example((6, 130), dtype, device, soft)
        weight = (torch.rand(130) + 0.1).to(dtype).to(device)
        for reduction in ("mean", "none"):
            options = {"reduction": reduction, "label_smoothing": smoothing, "z_loss": z_loss}
            judge(kernel, x, target, weight, softcap=softcap, logit_scale=logit_scale, **options)


@each_kernel
def test_empty_and_all_ignored(kernel, device):
    for shape, value in itertools.product(((0, 5), (4, 5)), ("mean", "sum", "none")):
        x = torch.randn(shape, device=device, requires_grad=True)
        target = torch.full(shape[:1], -100, device=device)
        with hfnn.use(kernel):
            y, dx = run(hfnn.functional.cross_entropy, x, target, reduction=value)
        want = run(F.cross_entropy, x, target, reduction=value)
        for got, expected in zip((y, dx), want, strict=True):
            torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


@each_kernel
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_infinite_logits(kernel, device, dtype):
    """Masked classes: a probability of 0, and no NaN where torch has none."""
    x, target = example((4, 300), dtype, device)
    with torch.no_grad():
        x[:, ::3] = -torch.inf
    target[:] = torch.tensor([1, 100, -100, 299], device=device)
    options = {"reduction": "sum"}
    judge(kernel, x, target, own=F.cross_entropy, **options)
    with hfnn.use(kernel):  # the target class is masked: the loss is infinite
        y = hfnn.functional.cross_entropy(x, torch.zeros_like(target), reduction="none")
        nan = hfnn.functional.cross_entropy(torch.full_like(x, -torch.inf), target, reduction="none")
    assert (y == torch.inf).all()
    assert nan[[0, 1, 3]].isnan().all() and nan[2] == 0


@each_kernel
def test_a_class_that_is_none(kernel, device):
    x, target = example((4, 30), torch.float32, device)
    target[2] = 30
    if device == "cuda":
        pytest.skip("a failed assertion on the device ends the process")
    with hfnn.use(kernel):
        if kernel == "triton":
            assert hfnn.functional.cross_entropy(x, target).isnan()
        else:
            with pytest.raises(IndexError, match="Target 30 is out of bounds"):
                hfnn.functional.cross_entropy(x, target)


@each_kernel
@settings(max_examples=30, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_shape(kernel, device, data):
    """Random shapes."""
    rows = data.draw(st.integers(1, 40))
    classes = data.draw(st.one_of(st.integers(1, 300), st.sampled_from([1023, 1024, 1025, 4099])))
    dtype = data.draw(st.sampled_from(DTYPES))
    reduction = data.draw(st.sampled_from(["none", "sum"]))
    x, target = example((rows, classes), dtype, device)
    with hfnn.use(kernel):
        y, dx = run(hfnn.functional.cross_entropy, x, target, reduction=reduction)
    exact = run(reference, x.detach().double().requires_grad_(), target, reduction=reduction)
    torchs = run(F.cross_entropy, x, target, reduction=reduction)
    for got, want, own in zip((y, dx), exact, torchs, strict=True):
        assert testing.error(got, want).l2 <= 3 * testing.error(own, want).l2 + 2 * torch.finfo(dtype).eps


def test_what_torch_raises():
    x, target = example((4, 30), torch.float32, "cpu")
    wrong = [
        (x, target[:3], {}),
        (x, target.int(), {}),
        (x, target, {"weight": torch.rand(7)}),
        (x, target, {"label_smoothing": 2.0}),
        (x, target, {"reduction": "average"}),
        (x, torch.rand(4, 7), {}),
        (torch.tensor(1.0), torch.tensor(0), {}),
    ]
    for logits, classes, options in wrong:
        with pytest.raises(Exception) as torchs:
            F.cross_entropy(logits, classes, **options)
        with hfnn.use("cpp"), pytest.raises(torchs.type):
            hfnn.functional.cross_entropy(logits, classes, **options)


def test_probabilities_that_want_a_gradient_are_torchs():
    x, target = example((4, 30), torch.float32, "cpu", soft=True)
    target.requires_grad_()
    ours = torch.autograd.grad(hfnn.functional.cross_entropy(x, target, prefer="memory"), (x, target))
    theirs = torch.autograd.grad(F.cross_entropy(x, target), (x, target))
    assert all(map(torch.equal, ours, theirs))


def both(x, target, weight=None, **options):
    """((loss, gradient), or the error) of stock and of ours."""
    found = []
    for fn, more in ((F.cross_entropy, {}), (hfnn.functional.cross_entropy, {"prefer": "memory"})):
        x = x.detach().requires_grad_()
        loss = fn(x, target, weight, **options, **more)
        found.append((loss, torch.autograd.grad(loss.sum(), x)[0]))
    return found


@pytest.mark.parametrize("low", [None, torch.bfloat16], ids=["", "autocast"])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_dtype_with_probabilities_of_another_dtype(dtype, low):
    x = torch.randn(8, 30).to(dtype)
    halves = {torch.bfloat16, torch.float16}
    for other, weight in itertools.product((*DTYPES, torch.float64), (None, torch.float32, dtype)):
        target, weight = torch.randn(8, 30).softmax(-1).to(other), None if weight is None else torch.rand(30).to(weight)
        coarse = {dtype, other, low, None if weight is None else weight.dtype} & halves
        for reduction, smoothing in itertools.product(("none", "mean", "sum"), (0.0, 0.1)):
            with torch.autocast("cpu", low or torch.bfloat16, enabled=low is not None):
                stock, ours = both(x, target, weight, reduction=reduction, label_smoothing=smoothing)
            for got, want in zip(ours, stock, strict=True):
                assert got.dtype is want.dtype and got.stride() == want.stride()
                # torch rounds a smoothed target to its dtype.
                torch.testing.assert_close(got, want, **({"rtol": 0.03, "atol": 3e-3} if coarse else {}))


@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "strided", "of size 1"])
@pytest.mark.parametrize("soft", [False, True], ids=["classes", "probabilities"])
def test_strides_of_the_gradient(layout, soft):
    shape = (2, 16, 1, 8) if layout == "of size 1" else (2, 16, 6, 8)
    x, target = example(shape, torch.float32, "cpu", soft)
    x = x.detach()
    if layout == "channels_last":
        x = x.contiguous(memory_format=torch.channels_last)
    elif layout == "strided":
        x = x.transpose(2, 3).contiguous().transpose(2, 3)
    for logits, classes in ((x, target), (x.flatten(2), target.flatten(2 if soft else 1))):
        for reduction in ("mean", "none"):
            stock, ours = both(logits, classes, reduction=reduction)
            assert ours[0].grad_fn.name().startswith("_CrossEntropy")
            for got, want in zip(ours, stock, strict=True):
                assert got.stride() == want.stride(), (layout, soft, reduction, got.dim())


def test_channels_last_logits_are_not_copied():
    x = torch.randn(2, 16, 8, 8).contiguous(memory_format=torch.channels_last).requires_grad_()
    target = torch.randint(16, (2, 8, 8))
    with hfnn.use("cpp"):
        y = hfnn.functional.cross_entropy(x, target)
    (dx,) = torch.autograd.grad(y, x)
    assert y.grad_fn.name().startswith("_CrossEntropy")
    torch.testing.assert_close(dx, torch.autograd.grad(F.cross_entropy(x, target), x)[0])
    with hfnn.use("cpp"):
        strided = hfnn.functional.cross_entropy(x.detach().contiguous().requires_grad_(), target)
    assert strided.grad_fn.name().startswith("Nll"), "rows of strided classes are torch's"


def test_module():
    module = torch.nn.CrossEntropyLoss(torch.rand(30), reduction="sum", label_smoothing=0.1)
    x, target = example((64, 30), torch.float32, "cpu")
    want = module(x, target)
    converted = hfnn.convert(module, prefer="memory")
    assert target_of(converted) is hfnn.CrossEntropyLoss and repr(converted) == repr(module)
    torch.testing.assert_close(converted(x, target), want)
    assert type(hfnn.revert(converted)) is torch.nn.CrossEntropyLoss
    own = hfnn.CrossEntropyLoss(z_loss=0.1, softcap=3.0, logit_scale=0.5, reduction="sum")
    torch.testing.assert_close(
        own(x, target), reference(x, target, z_loss=0.1, softcap=3.0, logit_scale=0.5, reduction="sum")
    )


def test_own_numbers_without_a_kernel():
    """Small inputs, and inputs that no kernel takes: the same numbers by torch's ops."""
    for shape, soft in itertools.product(((4, 30), (2, 5, 3), (9,)), (False, True)):
        x, target = example(shape, torch.float64, "cpu", soft)
        for reduction in ("mean", "sum", "none"):
            options = {"z_loss": 0.1, "softcap": 4.0, "logit_scale": 0.5, "reduction": reduction}
            with hfnn.use("torch"):
                got = run(hfnn.functional.cross_entropy, x, target, **options)
            for a, b in zip(got, run(reference, x, target, **options), strict=True):
                torch.testing.assert_close(a, b)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs 40 GiB of GPU memory")
@pytest.mark.parametrize("kernel", ["cuda", "triton"])
def test_more_than_2_31_logits(kernel):
    """The last rows beyond int32 offsets equal those rows alone."""
    x = torch.empty(((1 << 31) // 4096 + 16, 4096), dtype=torch.bfloat16, device="cuda").normal_().requires_grad_()
    target = torch.randint(4096, x.shape[:1], device="cuda")
    with hfnn.use(kernel):
        y, dx = run(hfnn.functional.cross_entropy, x, target, reduction="none", dy=torch.ones(x.shape[0]))
        tail = run(hfnn.functional.cross_entropy, x[-16:].detach().requires_grad_(), target[-16:], reduction="none",
                   dy=torch.ones(16))  # fmt: skip
    assert torch.equal(y[-16:], tail[0]) and torch.equal(dx[-16:], tail[1])
