"""linear_distillation: its value and gradients, with and without targets, and what it does not keep."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hfnn
from hfnn import memory, testing
from hfnn.core.kernel import NoKernel
from hfnn.ops import head
from hfnn.ops import linear_distillation as room
from hfnn.ops.linear_distillation import linear_distillation

from .kernels import DTYPES, KERNELS, kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAMES = ("input", "linear_weight", "linear_bias")
betas = pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
reductions = pytest.mark.parametrize("reduction", ["none", "mean", "sum"])


def sample(tokens=(13,), vocabulary=101, width=16, teacher_width=24, dtype=torch.float32, bias=True, target=True):
    """Arguments by name. The student's require grad, and every fourth token is ignored."""

    def linear(width, grad):
        hidden, weight, bias_V = (torch.randn(s) for s in ((*tokens, width), (vocabulary, width), (vocabulary,)))
        return [t.to(dtype).to(DEVICE).requires_grad_(grad) for t in (hidden, weight * width**-0.5, bias_V)]

    (x, w, b), (tx, tw, tb) = linear(width, True), linear(teacher_width, False)
    found = {"input": x, "linear_weight": w, "teacher_input": tx, "teacher_weight": tw}
    if bias:
        found |= {"linear_bias": b, "teacher_bias": tb}
    if target:
        labels = torch.arange(x.shape[:-1].numel(), device=DEVICE)
        found["target"] = labels.where(labels % 4 != 0, -100).view(tokens)
    return found


def run(fn, sample, dy=None, **options):
    """[loss, gradients of the tensors that require grad]"""
    y = fn(**sample, **options)
    return [y, *torch.autograd.grad(y, [sample[n] for n in NAMES if n in sample and sample[n].requires_grad], dy)]


def forced(kernel):
    def fn(**arguments):
        with hfnn.use(kernel):
            y = linear_distillation(**arguments)
        assert y.grad_fn.name() == "_LinearDistillationBackward", "torch's own ops ran"
        return y

    return fn


def to(dtype, sample):
    return {
        name: t.detach().to(dtype).requires_grad_(t.requires_grad) if t.is_floating_point() else t
        for name, t in sample.items()
    }


def check(sample, dy=None, kernel=KERNELS[0], allowed=1.0, **options):
    """The accuracy rule for the loss and every gradient. The definition does not take max_bytes."""
    plain = {name: value for name, value in options.items() if name != "max_bytes"}
    mine = run(forced(kernel), sample, dy, **options)
    own = run(room.composed, sample, dy, **plain)
    wide = run(room.reference, to(torch.float64, sample), None if dy is None else dy.double(), **plain)
    for i, (got, of, reference) in enumerate(zip(mine, own, wide, strict=True)):
        if i == 0 and got.dim() == 0:  # a single number may be right by chance
            assert got.dtype is of.dtype
            error = testing.error(got, reference).l2
            assert error <= 2 * testing.error(of, reference).l2 + 2 * torch.finfo(got.dtype).eps
            continue
        testing.assert_close(got, reference, of, allowed * (testing.GRADIENTS if i else testing.OUTPUTS), f"result {i}")
    return mine


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@betas
@reductions
@kernels
def test_matches_float64(dtype, beta, reduction, kernel):
    given = sample((3, 7), dtype=dtype)
    dy = torch.rand(3, 7, device=DEVICE).to(dtype) if reduction == "none" else None
    check(given, dy, kernel, beta=beta, reduction=reduction, temperature=2.0)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("target", [False, True])
@pytest.mark.parametrize("options", [{}, {"temperature": 0.5}, {"ignore_index": 3}, {"beta": 1e-3}, {"beta": 0.999}])
def test_options(bias, target, options):
    check(sample(bias=bias, target=target), **options)


def test_definition():
    """By torch's kl_div. A student that equals its teacher has no loss and no gradient."""
    given = sample(target=False)
    z, t = (
        torch.nn.functional.linear(*(given[f"{who}{n}"] for n in names)) / 2
        for who, names in (("", NAMES), ("teacher_", ("input", "weight", "bias")))
    )
    log_p, log_q = z.log_softmax(-1), t.log_softmax(-1)
    kl = lambda a, b: torch.nn.functional.kl_div(b, a, log_target=True, reduction="batchmean")  # noqa: E731
    m = (0.3 * log_q.exp() + 0.7 * log_p.exp()).log()
    for beta, want in ((0, kl(log_q, log_p)), (1, kl(log_p, log_q)), (0.3, 0.3 * kl(log_q, m) + 0.7 * kl(log_p, m))):
        got = linear_distillation(**given, beta=beta, temperature=2.0, prefer="memory")
        torch.testing.assert_close(got, want)
        itself = {n: given[n] for n in NAMES} | {
            f"teacher_{n.removeprefix('linear_')}": given[n].detach() for n in NAMES
        }
        for result in run(linear_distillation, itself, beta=beta, prefer="memory"):
            assert result.abs().max() < 1e-6


@betas
@reductions
@pytest.mark.parametrize("max_bytes", [None, 8 * 101 * 4])
def test_gradcheck(beta, reduction, max_bytes):
    # On the CPU, where kernels take float64.
    given = sample((5,), vocabulary=11, width=3, teacher_width=4, dtype=torch.float64)
    given = {name: t.detach().cpu().requires_grad_(t.requires_grad) for name, t in given.items()}
    leaves = [given[n] for n in NAMES]

    def fn(*leaves):
        changed = given | dict(zip(NAMES, leaves, strict=True))
        return linear_distillation(
            **changed, beta=beta, reduction=reduction, temperature=1.5, max_bytes=max_bytes, prefer="memory"
        )

    with hfnn.use(next(k.name for k in room.OP.kernels if torch.float64 in k.dtypes)):
        assert torch.autograd.gradcheck(fn, leaves)
        assert torch.autograd.gradgradcheck(fn, leaves)


@reductions
@kernels
def test_retained_graph(reduction, kernel):
    """The first backward gives its gradients away and the second recomputes them; inputs are not written to."""
    given = sample()
    copies = {n: t.detach().clone() for n, t in given.items()}
    leaves = [given[n] for n in NAMES]
    y = forced(kernel)(**given, reduction=reduction)
    dy = torch.full_like(y, 3)
    first, second = (torch.autograd.grad(y, leaves, dy, retain_graph=True) for _ in range(2))
    for grad in second:
        grad.zero_()  # the caller may write to it
    third = torch.autograd.grad(y, leaves, dy)
    assert all(map(torch.equal, first, third)) and (dy == 3).all() and y._version == dy._version == 0
    assert all(torch.equal(given[n], copies[n]) and given[n]._version == 0 for n in given)


@reductions
def test_each_gradient_on_its_own(reduction):
    given = sample()
    with_dy = {"dy": torch.rand(13, device=DEVICE)} if reduction == "none" else {}
    together = run(linear_distillation, given, **with_dy, reduction=reduction, prefer="memory")
    for i, wanted in enumerate(NAMES):
        alone = {n: t.detach().requires_grad_(n == wanted) for n, t in given.items() if t.is_floating_point()}
        got = run(linear_distillation, given | alone, **with_dy, reduction=reduction, prefer="memory")
        assert torch.equal(got[0], together[0]) and torch.equal(got[1], together[1 + i])


def test_the_teacher_gets_no_gradient():
    for prefer in ("memory", "speed"):
        given = sample()
        teacher = [t.requires_grad_() for n, t in given.items() if n.startswith("teacher")]
        linear_distillation(**given, prefer=prefer).backward()
        assert all(t.grad is None for t in teacher) and all(given[n].grad is not None for n in NAMES)


@reductions
@pytest.mark.parametrize("rows", [1, 2, 5, 64, 10**6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_chunks(rows, reduction, dtype):
    """For any chunk size. In bfloat16 the weight's gradient is rounded no more often."""
    given = sample((67,), dtype=dtype)
    dy = torch.rand(67, device=DEVICE).to(dtype) if reduction == "none" else None
    max_bytes = 2 * rows * 101 * dtype.itemsize
    check(given, dy, reduction=reduction, beta=0.3, max_bytes=max_bytes)


def test_logits_at_a_time():
    """At most the allowed bytes of logits, both kinds together, besides the gradients of hidden and weight."""
    given = sample((1024,), vocabulary=1000, bias=False)
    leaves = given["input"], given["linear_weight"]
    logits, allowed = 1024 * 1000 * 4, 500_000

    def step():
        return torch.autograd.grad(linear_distillation(**given, max_bytes=allowed, prefer="memory"), leaves)

    step()
    peak = memory.peak_bytes(step, DEVICE)
    gradients = sum(t.nbytes for t in leaves)
    assert allowed / 2 < peak - gradients <= allowed + 50_000 < logits, "one more small tensor a token"
    assert step_of(given, None) <= max(1024 // head.CHUNKS, head.FEWEST_TOKENS[DEVICE == "cuda"])


def step_of(given, max_bytes):
    student = head.operands(given["input"], given["linear_weight"], None, given["input"].dtype)
    return head.plan_for(student, (True, True, False), student.hidden.dtype, max_bytes).step


def test_memory_kept():
    """Hidden states and weights; torch's ops keep several tensors of tokens x vocabulary."""
    given = sample((128,), vocabulary=1000, bias=False)
    kept = memory.saved_bytes(lambda: linear_distillation(**given, prefer="memory"))
    operands = sum(t.nbytes for t in given.values())
    assert kept.total == operands - given["teacher_weight"].nbytes, "the teacher's weight is its owner's"
    gradients = given["input"].nbytes + given["linear_weight"].nbytes  # held besides what autograd keeps
    theirs = memory.saved_bytes(lambda: room.composed(**given)).total
    assert kept.total + gradients + 3 * 128 * 1000 < theirs


def test_without_gradients():
    """Without grad mode or a leaf that requires grad, no gradient is computed."""
    given, made = sample(), []
    gradients, detached = head.Gradients, {n: t.detach() for n, t in sample().items()}
    try:
        head.Gradients = lambda *args: made.append(args) or gradients(*args)
        with torch.no_grad():
            assert not linear_distillation(**given, prefer="memory").requires_grad
        with torch.inference_mode():
            linear_distillation(**given, prefer="memory")
        assert not linear_distillation(**detached, prefer="memory").requires_grad
        assert not made
        linear_distillation(**given, prefer="memory")
        assert len(made) == 1
    finally:
        head.Gradients = gradients


@reductions
def test_nothing_counts(reduction):
    """The mean over no tokens is NaN, and its gradient 0, as in torch's cross_entropy."""
    given = sample()
    given["target"] = torch.full_like(given["target"], -100)
    empty = sample((0,))
    for case in (given, empty):
        dy = None if reduction != "none" else torch.ones(case["target"].shape, device=DEVICE)
        y, *grads = run(linear_distillation, case, dy, reduction=reduction, prefer="memory")
        if reduction == "none":
            assert y.shape == case["target"].shape and not y.any()
        else:
            assert y.isnan() if reduction == "mean" else y == 0
        assert not any(g.any() for g in grads) and [g.shape for g in grads] == [case[n].shape for n in NAMES]


def test_float16_mean_of_many():
    """Without loss scaling, the gradients of a mean underflow in float16."""
    given = sample((4096,), vocabulary=64, dtype=torch.float16, bias=False)
    dy = torch.tensor(16384.0, dtype=torch.float16, device=DEVICE)
    check(given, dy)


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_autocast(low, dtype, reduction):
    """torch's dtypes: products in the narrow one, the loss in float32, gradients in each tensor's own."""
    given = sample((64,), dtype=dtype)
    dy = torch.rand(64, device=DEVICE) if reduction == "none" else None
    results = []
    for fn, options in ((linear_distillation, {"prefer": "memory"}), (room.composed, {})):
        with torch.autocast(DEVICE, dtype=low):
            y = fn(**given, reduction=reduction, **options)
        results.append([y, *torch.autograd.grad(y, [given[n] for n in NAMES], dy)])
    for got, want in zip(*results, strict=True):
        assert got.dtype is want.dtype
        assert testing.error(got, want.double()).l2 <= 4 * torch.finfo(low).eps


@pytest.mark.parametrize("student", DTYPES, ids=str)
@pytest.mark.parametrize("teacher", DTYPES, ids=str)
def test_teacher_of_another_dtype(student, teacher):
    """The kernel takes a narrower teacher. A wider one would be rounded, so torch's ops run."""
    given = sample(dtype=student)
    given |= {n: t.to(teacher) for n, t in given.items() if n.startswith("teacher")}
    y, *_ = mine = run(linear_distillation, given, prefer="memory")
    ran = y.grad_fn.name() == "_LinearDistillationBackward"
    assert ran == (torch.promote_types(student, teacher) is student)
    for got, want in zip(mine, run(room.composed, given), strict=True):
        assert got.dtype is want.dtype
        assert testing.error(got, want.double()).l2 <= 4 * torch.finfo(student).eps


@reductions
def test_teacher_of_inference_mode(reduction):
    """Its tensors cannot be saved for backward."""
    given = sample()
    with torch.inference_mode():
        given |= {n: t.clone() for n, t in given.items() if n.startswith("teacher")}
    y = linear_distillation(**given, reduction=reduction, prefer="memory").sum()
    first = torch.autograd.grad(y, given["linear_weight"], retain_graph=True)
    assert torch.equal(*first, *torch.autograd.grad(y, given["linear_weight"]))
    with torch.inference_mode():
        assert linear_distillation(**given, reduction=reduction, prefer="memory").is_inference()


def test_changes_before_backward_are_errors():
    """In-place changes are detected as in torch; those of the teacher only where backward reads it again."""
    given = sample()
    y = linear_distillation(**given, prefer="memory")
    given["teacher_weight"].zero_()
    y.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="the teacher's weights have been modified by an inplace operation"):
        y.backward()
    for name in ("linear_weight", "teacher_input", "target"):
        given = sample()
        y = linear_distillation(**given, prefer="memory")
        with torch.no_grad():
            given[name].zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward()


def test_impossible_words():
    """Classes whose logits are -inf in both maps do not contribute."""
    given = sample()
    for name in ("linear_bias", "teacher_bias"):
        given[name] = given[name].detach().clone().index_fill_(0, torch.tensor([3, 99], device=DEVICE), -torch.inf)
    without = [i for i in range(101) if i not in (3, 99)]
    shorter = {n: t[without] if t.shape[0] == 101 else t for n, t in given.items()}
    for beta in (0, 0.3, 1):
        got, want = (linear_distillation(**case, beta=beta, prefer="memory") for case in (given, shorter))
        torch.testing.assert_close(got, want)
        (dx,), (dx_shorter,) = (torch.autograd.grad(y, given["input"]) for y in (got, want))
        torch.testing.assert_close(dx, dx_shorter)


@pytest.mark.parametrize("kernel", KERNELS)
@settings(max_examples=15, deadline=None, derandomize=True)
@given(data=st.data())
def test_random_shapes(kernel, data):
    size, either = st.integers(1, 40), st.booleans()
    tokens = tuple(data.draw(st.lists(st.integers(0, 9), max_size=2)))
    vocabulary = data.draw(st.one_of(size, st.sampled_from([127, 128, 129, 1025])))
    dtype = data.draw(st.sampled_from(DTYPES))
    case = sample(tokens, vocabulary, *(data.draw(s) for s in (size, size, st.just(dtype), either, either)))
    beta, reduction = data.draw(st.sampled_from([0, 0.5, 1])), data.draw(st.sampled_from(["mean", "sum"]))
    options = {"beta": beta, "reduction": reduction}
    results = [run(fn, case, **options) for fn in (forced(kernel), room.composed)]
    wide = run(room.reference, to(torch.float64, case), **options)
    for got, of, reference in zip(*results, wide, strict=True):
        assert got.dtype is of.dtype and got.shape == of.shape
        if reference.isfinite().all():
            # Few elements make torch's own error random, and a small divergence is a difference of large numbers: one
            # and a half ulps of these are added.
            mine, theirs = ((t.double() - reference).norm() for t in (got, of))
            assert mine <= 3 * theirs + 1.5 * torch.finfo(dtype).eps * reference.norm().clamp_min(1)


def test_wrong_arguments():
    given = sample(target=False)

    def refused(message, **changes):
        with pytest.raises(ValueError, match=message):
            linear_distillation(**{**given, **changes})

    refused("do not go together", linear_weight=given["linear_weight"][:, :3])
    refused("one class a token", target=torch.zeros(4, dtype=torch.int64, device=DEVICE))
    refused("the teacher has the student's tokens", teacher_input=given["teacher_input"][:3])
    refused("vocabulary 101", teacher_weight=given["teacher_weight"][:7])
    refused("beta=1.5", beta=1.5)
    refused("temperature=0", temperature=0)
    refused("reduction='median'", reduction="median")
    with hfnn.use("cuda"), pytest.raises(NoKernel, match="linear_distillation: `cuda` was asked for"):
        linear_distillation(**given)


def test_small_problems_are_torchs():
    assert linear_distillation(**sample()).grad_fn.name() != "_LinearDistillationBackward"
    with hfnn.use("torch"):
        assert linear_distillation(**sample(), prefer="memory").grad_fn.name() != "_LinearDistillationBackward"
