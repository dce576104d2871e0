"""Losses of a linear map beyond the contract: plans, memory, accuracy, and which products run when."""

import itertools
from pathlib import Path

import pytest
import ranks
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import hfnn
from hfnn import testing
from hfnn.ops import head

F = hfnn.functional
DEVICES = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
on_each = pytest.mark.parametrize("device", DEVICES)
# CUDA kernels do not take float64.
on_each_dtype = pytest.mark.parametrize(
    "device, dtype",
    [(d, t) for d in DEVICES for t in (torch.float64, torch.float32, torch.bfloat16) if d == "cpu" or t.itemsize < 8],
)
TOKENS, WIDTH, VOCABULARY = 700, 16, 50


def problem(dtype, device="cpu", tokens=TOKENS, width=WIDTH, vocabulary=VOCABULARY, bias=True):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(7, tokens // 7, width, generator=generator)
    weight = torch.randn(vocabulary, width, generator=generator) * width**-0.5
    target = torch.randint(vocabulary, hidden.shape[:-1], generator=generator)
    target[0, : tokens // 35] = -100
    inputs = [t.to(dtype).to(device).requires_grad_() for t in (hidden, weight)]
    inputs.append(torch.randn(vocabulary, generator=generator).to(dtype).to(device).requires_grad_() if bias else None)
    return inputs, target.to(device)


def step(fn, inputs, target, twice=False, **options):
    """The result and the gradients. `twice`: also those of a second backward, which recomputes the logits."""
    hidden, weight, bias = inputs
    y = fn(hidden, weight, target, bias, **options)
    dy = torch.linspace(1, 2, y.numel(), dtype=torch.float64).view(y.shape).to(y)
    wanted = [t for t in inputs if t is not None and t.requires_grad]
    grads = [torch.autograd.grad(y, wanted, dy, retain_graph=True) for _ in range(1 + twice)]
    return y, *itertools.chain(*grads)


def plain(*args, **options):
    with hfnn.use("torch"):
        return F.linear_cross_entropy(*args, **{k: v for k, v in options.items() if k not in ("max_bytes", "compact")})


GRID = [
    ("mean", {}, {}),
    ("mean", {"label_smoothing": 0.1}, {"max_bytes": 70 * VOCABULARY * 4}),
    ("mean", {"softcap": 5.0, "logit_scale": 0.7}, {"max_bytes": 70 * VOCABULARY * 4}),
    ("mean", {"z_loss": 0.01, "ignore_index": 3}, {"max_bytes": 200 * VOCABULARY * 4}),
    ("sum", {"z_loss": 0.01}, {"compact": True}),
    ("sum", {"logit_scale": 0.3}, {"compact": True, "max_bytes": 1}),
    ("none", {"label_smoothing": 0.1, "softcap": 3.0}, {}),
    ("none", {"z_loss": 0.01}, {"compact": True, "max_bytes": 70 * VOCABULARY * 4}),
]


def test_tokens_that_do_not_count_are_not_read():
    """Their hidden states may be NaN, as after attention rows without keys."""
    inputs, target = problem(torch.float32, bias=False)
    target[2:] = -100
    results = []
    for value in (0.0, float("nan")):
        with torch.no_grad():
            inputs[0][2:] = value
        results.append(step(F.linear_cross_entropy, inputs, target, compact=True, prefer="memory"))
    assert all(a.isfinite().all() and torch.equal(a, b) for a, b in zip(*results, strict=True))


@on_each_dtype
@pytest.mark.parametrize("weighted", ["", "classes", "tokens", "both"])
@pytest.mark.parametrize("reduction, options, how", GRID)
def test_options_and_plans(device, dtype, weighted, reduction, options, how):
    """Every option in every plan equals torch's ops on real logits, in a first and in a second backward."""
    inputs, target = problem(dtype, device, bias=reduction != "mean")
    if how.get("compact"):
        target[2:5] = -100  # 380 of 700 count, and 384 are computed
    target = target.where(target != -100, options.get("ignore_index", -100))
    options = {"reduction": reduction, "dtype": torch.promote_types(dtype, torch.float32), **options}
    if weighted in ("classes", "both"):
        options["weight"] = torch.rand(VOCABULARY, device=device).to(dtype) + 0.1
    if weighted in ("tokens", "both"):
        options["token_weight"] = torch.rand(target.shape, device=device)
    y, *grads = step(F.linear_cross_entropy, inputs, target, twice=True, prefer="memory", **options, **how)
    assert y.grad_fn.name().startswith("_LinearCrossEntropy"), "torch's own op ran"
    want = step(plain, inputs, target, **options)
    near = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 3e-2}[dtype]
    for got, expected in zip((y, *grads), (*want, *want[1:]), strict=True):
        assert got.dtype is expected.dtype and testing.error(got, expected.double()).l2 < near


@on_each
def test_second_derivative(device):
    inputs, target = problem(torch.float32, device, tokens=35)
    options = {"softcap": 5.0, "z_loss": 0.1, "token_weight": torch.rand(target.shape, device=device)}

    def second(fn, **how):
        y = fn(inputs[0], inputs[1], target, inputs[2], **options, **how)
        first = torch.autograd.grad(y * y, inputs, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), inputs)

    for got, want in zip(second(F.linear_cross_entropy, prefer="memory"), second(plain), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)


class Products(TorchDispatchMode):
    """Counts matrix products."""

    hfnn_runs, count = True, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("wanted, reduction, products", [
    ((), "mean", (1, 0)), ((0,), "mean", (2, 0)), ((1,), "mean", (2, 0)), ((0, 1, 2), "mean", (3, 0)),
    ((2,), "sum", (1, 0)), ((0, 1), "none", (1, 3)),
])  # fmt: skip
def test_no_product_in_vain(wanted, reduction, products):
    """Counts (in forward, in backward): the logits, and one product per matrix gradient."""
    inputs, target = problem(torch.float32)
    for i, t in enumerate(inputs):
        t.requires_grad_(i in wanted)
    forward, backward = Products(), Products()
    with forward:
        y = F.linear_cross_entropy(
            *inputs[:2], target, inputs[2], prefer="memory", max_bytes=1 << 30, reduction=reduction
        )
    if wanted:
        with backward:
            y.sum().backward()
    assert (forward.count, backward.count) == products
    with torch.no_grad(), Products() as nothing:
        F.linear_cross_entropy(*inputs[:2], target, inputs[2], prefer="memory", max_bytes=1 << 30)
    assert nothing.count == 1


@on_each
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(device, low):
    inputs, target = problem(torch.float32, device)
    with torch.autocast(device, dtype=low):
        got = step(F.linear_cross_entropy, inputs, target, prefer="memory")
        want = step(plain, inputs, target)
    for a, b in zip(got, want, strict=True):
        assert a.dtype is b.dtype and testing.error(a, b.double()).l2 < 2e-2


@on_each
def test_float16_with_a_scaled_loss(device):
    """1 / tokens would underflow in float16, and a scaled loss overflow: both are multiplied in late."""
    inputs, target = problem(torch.float16, device, bias=False)
    exact = [t if t is None else t.detach().double().cpu().requires_grad_() for t in inputs]
    y = F.linear_cross_entropy(*inputs[:2], target, prefer="memory")
    grads = torch.autograd.grad(y * 1024, inputs[:2])
    wide = plain(*exact[:2], target.cpu())
    for got, want in zip(grads, torch.autograd.grad(wide * 1024, exact[:2]), strict=True):
        assert testing.error(got, want).l2 < 2e-3


def gradient_of_weight(fn, inputs, target, **options):
    return torch.autograd.grad(fn(inputs[0], inputs[1], target, **options), inputs[1])[0]


@on_each
@pytest.mark.parametrize("max_bytes", [None, 200 * 4096 * 2])
def test_gradient_of_a_16_bit_weight(device, max_bytes):
    """At most twice the error of one product of all tokens, in every plan."""
    sizes = {"cpu": (2800, 64, 4096), "cuda": (8400, 2048, 4096)}[device]
    inputs, target = problem(torch.bfloat16, device, *sizes, bias=False)
    wide = [None if t is None else t.detach().double().requires_grad_() for t in inputs]
    exact = gradient_of_weight(plain, wide, target)
    got = gradient_of_weight(F.linear_cross_entropy, inputs, target, prefer="memory", max_bytes=max_bytes)
    own = gradient_of_weight(plain, inputs, target)
    assert testing.error(got, exact).l2 <= 2 * testing.error(own, exact).l2


@on_each
@pytest.mark.parametrize("odd", [0, 1])
def test_peak_memory(device, odd):
    """Above inputs and gradients, less than 0.15 of the logits, also for a 16-bit weight.

    For a vocabulary size that is slow in cuBLAS, a padded copy of the weight is added.
    """
    dtype, sizes = {"cpu": (torch.float32, (2044, 256, 8192)), "cuda": (torch.bfloat16, (8190, 4096, 128256))}[device]
    sizes = *sizes[:2], sizes[2] - odd
    inputs, target = problem(dtype, device, *sizes, bias=False)
    grads = sum(t.nbytes for t in inputs[:2])
    logits = target.numel() * sizes[2] * dtype.itemsize

    def run(fn):
        return lambda: torch.autograd.grad(fn(inputs[0], inputs[1], target), inputs[:2])

    run(F.linear_cross_entropy)()
    found = hfnn.memory.peak_bytes(run(F.linear_cross_entropy), device) - grads
    assert found < 0.15 * logits + odd * inputs[1].nbytes
    assert hfnn.memory.peak_bytes(run(plain), device) - grads > logits, "the measure sees nothing"


def test_gradients_are_given_away():
    """A parameter's .grad is the memory that forward filled: no copy, and no other owner."""
    inputs, target = problem(torch.float32)
    y = F.linear_cross_entropy(inputs[0], inputs[1], target, inputs[2], prefer="memory")
    made = [g.data_ptr() for g in y.grad_fn.grads[:2]]
    y.backward(retain_graph=True)
    assert [t.grad.data_ptr() for t in inputs[:2]] == made
    kept = [t.grad.clone() for t in inputs]
    y.backward()
    for t, before in zip(inputs, kept, strict=True):
        torch.testing.assert_close(t.grad, 2 * before)


def test_changed_inputs_are_noticed():
    inputs, target = problem(torch.float32)
    y = F.linear_cross_entropy(inputs[0], inputs[1], target, prefer="memory")
    with torch.no_grad():
        inputs[1].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


@pytest.mark.parametrize("first, widths", [(128, 256), (256, 256), (384, 200)])
def test_logits_inside_the_gradient(first, widths):
    """Logits use the end of the weight gradient's memory, whatever part of it they fill."""
    (hidden, weight, bias), _ = problem(torch.float32, tokens=700, width=widths, vocabulary=1000)
    given = head.operands(hidden, weight, bias, torch.bfloat16)
    sums = head.Gradients(given, (True, True, True), torch.float32)
    sums.inside(first, lambda logits_VT: logits_VT.sin_())
    rest = slice(first, 700)
    dlogits = (given.hidden @ given.weight.t() + given.bias).sin_()
    sums.add(rest, dlogits[rest])
    for got, want in zip(sums.all(), (dlogits @ given.weight, dlogits.t() @ given.hidden, dlogits.sum(0)), strict=True):
        assert testing.error(got, want.double()).l2 < 1e-2


def test_wrong_arguments():
    (hidden, weight, _bias), target = problem(torch.float32)
    wrong = [
        ((hidden, weight.t(), target), {}, "do not go together"),
        ((hidden, weight, target[:3]), {}, "one class a token"),
        ((hidden, weight, target), {"token_weight": torch.rand(3)}, "token_weight must have"),
        ((hidden, weight, target), {"reduction": "average"}, "choose one of"),
        ((hidden, weight, target), {"group": object(), "label_smoothing": 0.1}, "no label_smoothing and no gradient"),
    ]
    for args, options, message in wrong:
        with pytest.raises(ValueError, match=message):
            F.linear_cross_entropy(*args, **options)
    with pytest.raises(IndexError, match="Target 50 is out of bounds"):
        F.linear_cross_entropy(hidden, weight, target.clone().fill_(50), prefer="memory")
    many = target.clone().fill_(-1)
    for fn in (F.linear_cross_entropy, F.linear_log_probs):  # also in plans whose kernels support absent classes
        with pytest.raises(IndexError, match="Target -1 is out of bounds"):
            fn(hidden.bfloat16(), weight.bfloat16(), many, prefer="memory", max_bytes=70 * VOCABULARY * 2)
    with pytest.raises(RuntimeError):  # torch's own
        F.linear_cross_entropy(hidden, weight.double(), target, prefer="memory")


def test_small_problems_are_torchs():
    inputs, target = problem(torch.float32)
    assert not F.linear_cross_entropy(*inputs[:2], target).grad_fn.name().startswith("_Linear")


# Log-probabilities


def log_probs(fn, inputs, target, **options):
    found = fn(inputs[0], inputs[1], target, inputs[2], **options)
    dy = [torch.linspace(1, 2, t.numel(), dtype=t.dtype, device=t.device).view(t.shape) for t in found]
    return *found, *torch.autograd.grad(found, [t for t in inputs if t is not None], dy, retain_graph=True)


def plain_log_probs(*args, **options):
    with hfnn.use("torch"):
        return F.linear_log_probs(*args, **options)


@on_each_dtype
@pytest.mark.parametrize("max_bytes", [None, 70 * VOCABULARY * 2])
def test_log_probs(device, dtype, max_bytes):
    near = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 3e-2}[dtype]
    for options, bias in (({}, True), ({"softcap": 4.0, "logit_scale": 0.5}, False)):
        inputs, target = problem(dtype, device, bias=bias)
        got = log_probs(F.linear_log_probs, inputs, target, prefer="memory", max_bytes=max_bytes, **options)
        want = log_probs(plain_log_probs, inputs, target, **options)
        assert got[0].grad_fn.name().startswith("_LinearLogProbs")
        assert (got[0][target == -100] == 0).all() and (got[1][target == -100] == 0).all()
        for a, b in zip(got, want, strict=True):
            assert a.dtype is b.dtype and testing.error(a, b.double()).l2 < near


def test_log_probs_second_derivative():
    inputs, target = problem(torch.float64, tokens=14)

    def fn(hidden, weight, bias):
        return F.linear_log_probs(hidden, weight, target, bias, prefer="memory")

    assert torch.autograd.gradcheck(fn, inputs)
    assert torch.autograd.gradgradcheck(fn, inputs)


def test_shared_vocabulary_and_sharded_weights(tmp_path):
    ranks.run(Path(__file__).parents[1] / "workers" / "vocabulary.py", "main", 2, tmp_path, timeout=120)
