"""Triton's kernels of softmax and the losses against formulas in float64, in the interpreter where there is no GPU.

Every kernel runs with its own tiles, and with tiles so small that rows of these sizes take several blocks.
"""

import importlib
import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
ROUNDING = {F32: 2**-24, F16: 2**-11, BF16: 2**-8}
SHAPES = [(1, 1), (3, 769), (2, 1030), (5, 32)]
SMALL = ((256, 256, 1),)  # wider rows run in blocks of 256 columns
INF, NAN = torch.inf, torch.nan


@pytest.fixture(params=["whole", "blocks"])
def kernels(request, monkeypatch):
    """A kernel's module by name, with its own tiles or with small ones."""

    def load(name):
        op = importlib.import_module(f"hfnn.kernels.{name}")
        if request.param == "blocks":
            for table in ("FORWARD", "BACKWARD", "FUSED", "SUMS"):
                if hasattr(op, table):
                    monkeypatch.setattr(op, table, SMALL)
            if name == "pointwise_loss":
                for option, value in (("BLOCK", 256), ("BLOCKS", 2), ("PROGRAMS", 4)):
                    monkeypatch.setattr(op, option, value)
        return op

    return load


def draw(*shape, dtype=F32, scale=1.0):
    return (torch.randn(*shape, device=DEVICE) * scale).to(dtype)


def blank(*shape, dtype=F32):
    return torch.full(shape, NAN, dtype=dtype, device=DEVICE)


def assert_near(got, exact, dtype=F32, times=8, beside=0.0):
    """`got`, computed in float32 and stored in `dtype`, is NaN or infinite where `exact` is, and near it elsewhere.

    In float32 the bound covers the roundings of lse and of the summands; in 16 bits, one and a half roundings. `beside`
    is the size of terms that cancel in `exact`.
    """
    got, exact = got.detach().double(), exact.detach()
    finite = exact.isfinite()
    assert torch.equal(got.where(~finite, 0).nan_to_num(), exact.where(~finite, 0).nan_to_num())
    bound = (times if dtype is F32 else 1.5) * ROUNDING[dtype]
    assert (got - exact)[finite].norm() <= bound * max(exact[finite].norm().item(), beside)


# ---- softmax


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("dtypes", [(F32, F32), (BF16, BF16), (F16, F16), (BF16, F32)], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_softmax(kernels, shape, dtypes, log):
    op, x = kernels("softmax"), draw(*shape, dtype=dtypes[0], scale=3)
    if shape[1] > 1:
        x[0, 0] = x[-1, shape[1] // 2 :] = -INF
    y, dx, dy = blank(*shape, dtype=dtypes[1]), torch.full_like(x, NAN), draw(*shape, dtype=dtypes[1])
    op.forward(x, y, log, 0)
    op.backward(dy, y, dx, log, 0)
    x64 = x.double().requires_grad_()
    y64 = (torch.log_softmax if log else torch.softmax)(x64, 1)
    y64.backward(dy.double())
    assert_near(y, y64, dtypes[1])
    # Backward gets y as stored.
    y64, dy64 = y.double(), dy.double()
    p, total = (y64.exp(), dy64.sum(1, True)) if log else (y64, (dy64 * y64).sum(1, True))
    assert_near(dx, dy64 - p * total if log else y64 * (dy64 - total), dtypes[0])


@pytest.mark.filterwarnings("ignore:All-NaN slice")
@pytest.mark.parametrize("log", [False, True])
def test_softmax_of_extreme_rows(kernels, log):
    x = torch.full((5, 200), -INF, device=DEVICE)
    x[1, 100] = -1e30
    x[2, 7], x[3], x[4, 7] = INF, torch.finfo(F32).min, NAN
    y = torch.empty_like(x)
    kernels("softmax").forward(x, y, log, 0)
    assert_near(y, (torch.log_softmax if log else torch.softmax)(x.double(), 1))


# ---- cross-entropy


def capped(x, logit_scale, softcap):
    return softcap * torch.tanh(x * logit_scale / softcap) if softcap else x * logit_scale


def cross_entropy(x, target, weight, ignore_index, smoothing, z_loss, logit_scale, softcap):
    """loss, share, lse and slope by the formulas of csrc/cross_entropy.h; all are 0 for ignored rows."""
    R, C = x.shape
    z = capped(x, logit_scale, softcap)
    w = torch.ones_like(x[0]) if weight is None else weight.double()
    if target.is_floating_point():
        counts, share = torch.ones_like(x[:, 0], dtype=torch.bool), torch.ones_like(x[:, 0])
        b = w * ((1 - smoothing) * target.double() + smoothing / C)
    else:
        counts = target != ignore_index
        t = target.where(counts, 0)
        share = w[t] * counts
        b = (smoothing / C * w).repeat(R, 1)
        b = b.index_put((torch.arange(R, device=DEVICE), t), (1 - smoothing) * w[t], accumulate=True)
    lse, slope = torch.logsumexp(z, 1), b.sum(1)
    loss = slope * lse - torch.where(b != 0, b * z, 0).sum(1) + z_loss * lse**2
    return loss.where(counts, 0), share, lse.where(counts, 0), slope.where(counts, 0)


def check_cross_entropy(op, x, target, weight=None, smoothing=0.0, z_loss=0.0, logit_scale=1.0, softcap=0.0, one=False):
    R, options = len(x), (-100, smoothing, z_loss, logit_scale, softcap, 0)
    factor = torch.rand(1 if one else R, device=DEVICE)
    x64 = x.double().requires_grad_()
    exact = cross_entropy(x64, target, weight, *options[:-1])
    exact[0].backward(factor.double().expand(R))

    out = [blank(R), blank(R), blank(R, dtype=F64), blank(R)]
    op.forward(x, target, weight, *out, *options)
    for got, wanted in zip(out, exact, strict=True):
        assert_near(got, wanted)
    loss, _, lse, slope = out
    if not target.is_floating_point() and (weight is None or not smoothing):
        slope = None
    dx, in_place, fused_loss = torch.full_like(x, NAN), x.clone(), blank(R)
    op.backward(x, target, weight, lse, slope, factor, dx, *options)
    op.fused(in_place, target, weight, fused_loss, None, None, None, factor, in_place, *options)
    assert_near(fused_loss, loss.double())
    z = capped(x.double(), logit_scale, softcap)
    times = max(8.0, z.abs().max().item() * 1.5)  # logits are rounded before their exponentials
    beside = (factor[:, None] * exact[3].detach()[:, None] * z.softmax(1)).norm().item()
    for got in (dx, in_place):
        assert_near(got, x64.grad, x.dtype, times, beside)
        assert not got[exact[3] == 0].any()
    op.forward(x, target, weight, fused_loss, None, None, None, *options)
    assert torch.equal(fused_loss, loss)


OPTIONS = [
    *({}, {"one": True}, {"smoothing": 0.1}, {"z_loss": 0.01}, {"logit_scale": -0.7}, {"softcap": 5.0}),
    {"smoothing": 0.2, "z_loss": 0.1, "logit_scale": 2.0, "softcap": 30.0},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kind", ["class", "probability"])
@pytest.mark.parametrize("shape", [(3, 769), (5, 32)], ids=str)
def test_cross_entropy(kernels, shape, kind, weighted, options):
    R, C = shape
    target = torch.randint(C, (R,), device=DEVICE)
    target[1] = -100
    if kind == "probability":
        target = draw(R, C).softmax(1)
    weight = torch.rand(C, device=DEVICE) if weighted else None
    check_cross_entropy(kernels("cross_entropy"), draw(R, C, scale=3), target, weight, **options)


@pytest.mark.parametrize("kind", ["class", "probability"])
def test_cross_entropy_of_one_column(kernels, kind):
    target = torch.tensor([0, 0, -100], device=DEVICE) if kind == "class" else torch.ones(3, 1, device=DEVICE)
    check_cross_entropy(kernels("cross_entropy"), draw(3, 1), target, **OPTIONS[-1])


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("options", [OPTIONS[0], OPTIONS[-1]], ids=str)
@pytest.mark.parametrize("kind", [torch.int64, F32, None])
def test_cross_entropy_of_16_bits(kernels, dtype, kind, options):
    R, C = 2, 1030
    target = torch.randint(C, (R,), device=DEVICE) if kind is torch.int64 else draw(R, C).softmax(1).to(kind or dtype)
    x, weight = draw(R, C, dtype=dtype, scale=3), torch.rand(C, device=DEVICE).to(dtype)
    check_cross_entropy(kernels("cross_entropy"), x, target, weight, **options)


def test_cross_entropy_of_a_vocabulary():
    """A row of several blocks of the largest tile; the last one's size is not divisible by any vector."""
    op = importlib.import_module("hfnn.kernels.cross_entropy")
    target = torch.tensor([40000, -100], device=DEVICE)
    check_cross_entropy(op, draw(2, 50257, dtype=BF16, scale=3), target)


def test_cross_entropy_of_infinite_logits(kernels):
    op, C = kernels("cross_entropy"), 300
    x, target = draw(6, C), torch.tensor([5, 5, 5, 5, 5, -100], device=DEVICE)
    x[0, :5] = x[0, 6:] = -INF  # only the target class is left: the loss is 0
    x[1, 100:] = x[2, 5] = x[3] = -INF  # masked columns, a masked class, an empty row
    x[4], x[5] = torch.finfo(F32).min, NAN  # a row masked by a finite number; an ignored row, which is not read
    x64 = x.double().requires_grad_()
    exact = torch.nn.functional.cross_entropy(x64, target, reduction="none")
    exact.sum().backward()
    loss, lse, factor, options = blank(6), blank(6, dtype=F64), torch.ones(1, device=DEVICE), (-100, 0.0, 0.0, 1.0)
    dx, in_place = torch.full_like(x, NAN), x.clone()
    op.forward(x, target, None, loss, None, lse, None, *options, 0.0, 0)
    op.backward(x, target, None, lse, None, factor, dx, *options, 0.0, 0)
    op.fused(in_place, target, None, loss, None, None, None, factor, in_place, *options, 0.0, 0)
    assert_near(loss[:5], exact[:5])
    assert loss[5] == 0 and not dx[5].any()
    # The lse of row 4 cannot be represented to its last digits, so p is lost.
    for got in (dx, in_place):
        assert_near(got[:4], x64.grad[:4])
    check_cross_entropy(op, x[:2], target[:2], z_loss=0.1)
    # A soft cap makes -inf finite.
    check_cross_entropy(op, x[:4].nan_to_num(neginf=-1e30), target[:4], softcap=3.0)
    op.forward(x[:4], target[:4], None, loss[:4], None, lse[:4], None, *options, 3.0, 0)
    assert_near(lse[:4], torch.logsumexp(capped(x[:4].double(), 1.0, 3.0), 1))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weighted", [False, True])
def test_cross_entropy_of_a_class_out_of_bounds_is_nan(kernels, weighted, smoothing):
    op, x = kernels("cross_entropy"), draw(4, 200)
    target = torch.tensor([200, 3, -1, 1 << 40], device=DEVICE)
    weight = torch.rand(200, device=DEVICE) if weighted else None
    loss, lse, slope, dx, in_place = blank(4), blank(4, dtype=F64), blank(4), torch.empty_like(x), x.clone()
    factor = torch.ones(1, device=DEVICE)
    op.forward(x, target, weight, loss, None, lse, slope, -100, smoothing, 0.0, 1.0, 0.0, 0)
    op.backward(x, target, weight, lse, slope, factor, dx, -100, smoothing, 0.0, 1.0, 0.0, 0)
    op.fused(in_place, target, weight, blank(4), None, None, None, factor, in_place, -100, smoothing, 0.0, 1.0, 0.0, 0)
    for got in (loss[:, None], dx, in_place):
        assert torch.equal(got.isnan().all(1), target != 3) and not got[1].isnan().any()


# ---- log-probabilities


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("options", [(1.0, 0.0), (-0.7, 0.0), (1.0, 5.0)], ids=str)
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (3, 769), (5, 32)], ids=str)
def test_log_probs(kernels, shape, entropy, options, dtype):
    op, (R, C) = kernels("log_probs"), shape
    x, target = draw(R, C, dtype=dtype, scale=3), torch.randint(C, (R,), device=DEVICE)
    if R > 2:
        target[0], target[1] = -1, C
        x[0, 1:5] = 0 if options[1] else -INF * options[0]
    picked, lse, mean = blank(R), blank(R, dtype=F64), blank(R) if entropy else None
    a, b, t = draw(R), draw(R) if entropy else None, draw(R)
    op.forward(x, target, picked, lse, mean, *options, 0)

    x64 = x.double().requires_grad_()
    z = capped(x64, *options)
    exact = torch.logsumexp(z, 1)
    p, finite = (z - exact[:, None]).exp(), torch.where(z.isfinite(), z, 0)
    inside = (target >= 0) & (target < C)
    chosen = z.gather(1, target.where(inside, 0)[:, None])[:, 0].where(inside, 0)
    assert_near(picked, chosen)
    assert_near(lse, exact)
    if entropy:
        assert_near(mean, (p * finite).sum(1), times=16)
    with torch.no_grad():
        slope = p * (a.double()[:, None] + (b.double()[:, None] * finite if entropy else 0))
        slope += torch.nn.functional.one_hot(target.where(inside, C), C + 1)[:, :C] * t.double()[:, None]
    # Where a column is -inf, its slope is 0; torch's formula would give NaN.
    (wanted,) = torch.autograd.grad((slope * torch.where(z.isfinite(), z, 0)).sum(), x64)
    dx, in_place = torch.full_like(x, NAN), x.clone()
    op.backward(x, target, lse, a, b, t, dx, *options, 0)
    op.backward(in_place, target, lse, a, b, t, in_place, *options, 0)
    assert_near(dx, wanted, dtype, 16)
    assert torch.equal(dx, in_place)


def divergence(x, teacher, beta, scale):
    log_p, log_q = torch.log_softmax(x * scale, 1), torch.log_softmax(teacher * scale, 1)

    def kl(log_a, log_b):
        return torch.where(log_a > -INF, log_a.exp() * (log_a - log_b.clamp_min(-1e300)), 0).sum(1)

    if beta in (0, 1):
        return kl(log_p, log_q) if beta else kl(log_q, log_p)
    log_m = ((log_q.exp() * beta) + (log_p.exp() * (1 - beta))).log()
    return beta * kl(log_q, log_m) + (1 - beta) * kl(log_p, log_m)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("beta", [0.0, 1.0, 0.5, 0.1])
@pytest.mark.parametrize("shape", [(1, 1), (3, 769), (5, 32)], ids=str)
def test_distillation(kernels, shape, beta, dtype):
    op, (R, C), scale = kernels("distillation"), shape, 0.5
    x, teacher = draw(R, C, dtype=dtype, scale=3), draw(R, C, dtype=dtype, scale=3)
    loss, alone, dx, in_place = blank(R), blank(R), torch.full_like(x, NAN), x.clone()
    factor = torch.rand(R, device=DEVICE)
    op.fused(x, teacher, loss, factor, dx, beta, scale, 0)
    op.fused(x, teacher, alone, None, None, beta, scale, 0)
    op.fused(in_place, teacher, None, factor, in_place, beta, scale, 0)
    x64 = x.double().requires_grad_()
    exact = divergence(x64, teacher.double(), beta, scale)
    exact.backward(factor.double())
    assert_near(loss, exact)
    assert_near(dx, x64.grad, dtype, 16)
    assert torch.equal(loss, alone) and torch.equal(dx, in_place)
    op.fused(x, teacher, None, torch.full((1,), 2.0, device=DEVICE), dx, beta, scale, 0)
    assert_near(dx, x64.grad * 2 / factor.double()[:, None], dtype, 16)


@pytest.mark.parametrize("beta", [0.0, 1.0, 0.5])
def test_distillation_of_masked_columns(kernels, beta):
    """-inf in both logits is left out. For the divergences in between, -inf in only one of them gives no infinity."""
    op, C = kernels("distillation"), 300
    x, teacher = draw(2, C), draw(2, C)
    x[:, 20:40] = teacher[:, 20:40] = -INF
    if beta == 0.5:
        x[1, 50:60] = teacher[1, 55:70] = -INF
    loss, dx, factor = blank(2), torch.full_like(x, NAN), torch.ones(1, device=DEVICE)
    op.fused(x, teacher, loss, factor, dx, beta, 1.0, 0)
    kept = x.double().clamp_min(-200).requires_grad_()
    exact = divergence(kept, teacher.double().clamp_min(-200), beta, 1.0)
    exact.sum().backward()
    assert_near(loss, exact)
    assert_near(dx, kept.grad, times=16)


# ---- pointwise losses and scale


def pointwise(x, target, kind, parameter):
    f, reduction = torch.nn.functional, {"reduction": "none"}
    if kind == 0:
        return f.mse_loss(x, target, **reduction)
    if kind == 1:
        return f.huber_loss(x, target, delta=parameter, **reduction)
    more = {"beta": parameter} if kind == 2 else {}
    return (f.smooth_l1_loss if kind == 2 else f.binary_cross_entropy_with_logits)(x, target, **more, **reduction)


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("kind, parameter", [(0, 0.0), (1, 0.7), (1, 2.0), (2, 0.7), (2, 0.0), (3, 0.0)])
@pytest.mark.parametrize("numel", [1, 512, 20000])
def test_pointwise_loss(kernels, numel, kind, parameter, dtype):
    op = kernels("pointwise_loss")
    x, target = draw(numel, dtype=dtype, scale=2), draw(numel, dtype=dtype)
    target = target.sigmoid() if kind == 3 else target
    target[0] = x[0]  # no difference at all
    sums, alone, dx = blank(op.partials(numel)), blank(op.partials(numel)), torch.full_like(x, NAN)
    op.forward(x, target, sums, dx, kind, parameter, 0)
    op.forward(x, target, alone, None, kind, parameter, 0)
    x64 = x.double().requires_grad_()
    exact = pointwise(x64, target.double(), kind, parameter)
    exact.sum().backward()
    length = op._blocks(numel) * op.BLOCK
    assert_near(sums, torch.stack([part.sum() for part in exact.split(length)]))
    assert_near(dx, x64.grad, dtype)
    assert torch.equal(sums, alone)


def test_binary_cross_entropy_of_sure_logits(kernels):
    """Losses far below 1 keep their relative precision."""
    for x in (torch.full((1,), logit, device=DEVICE) for logit in (30.0, -20.0, 12.0)):
        sums, target = blank(1), (x > 0).float()
        kernels("pointwise_loss").forward(x, target, sums, None, 3, 0.0, 0)
        assert_near(sums, pointwise(x.double(), target.double(), 3, 0.0), times=64)


def test_partial_sums_are_few():
    op = importlib.import_module("hfnn.kernels.pointwise_loss")
    assert [op.partials(n) for n in (0, 1, 8192, 8193, 1 << 29, (1 << 29) + 1)] == [0, 1, 1, 2, 1 << 16, (1 << 15) + 1]
    assert op.partials((1 << 40) + 12345) <= 1 << 16


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("numel", [1, 4096, 5000])
@pytest.mark.parametrize("factor", [1.0, -0.3])
def test_scale(kernels, numel, factor, dtype):
    op, x = kernels("scale"), draw(numel, dtype=dtype)
    y, number = torch.full_like(x, NAN), torch.tensor(factor, device=DEVICE)
    op.forward(x, number, y, 0)
    exact = (x.float() * number).to(dtype)
    op.forward(x, number.view(1), x, 0)
    assert torch.equal(y, exact) and torch.equal(x, exact)


def test_nothing_is_launched_for_nothing(kernels):
    none, rows = torch.empty(0, 5, device=DEVICE), torch.empty(3, 0, device=DEVICE)
    for x in (none, rows):
        R, target = len(x), torch.zeros(len(x), dtype=torch.int64, device=DEVICE)
        out = [torch.empty(R, device=DEVICE) for _ in range(4)]
        kernels("softmax").forward(x, x, False, 0)
        kernels("softmax").backward(x, x, x, True, 0)
        op = kernels("cross_entropy")
        op.forward(x, target, None, *out, -100, 0.1, 0.0, 1.0, 0.0, 0)
        op.backward(x, target, None, out[0], None, out[1], x, -100, 0.1, 0.0, 1.0, 0.0, 0)
        kernels("log_probs").forward(x, target, *out[:3], 1.0, 0.0, 0)
        kernels("log_probs").backward(x, target, *out, x, 1.0, 0.0, 0)
        kernels("distillation").fused(x, x, out[0], out[1], x, 0.5, 1.0, 0)
    kernels("scale").forward(none, torch.ones((), device=DEVICE), none, 0)
    kernels("pointwise_loss").forward(none, none, torch.empty(0, device=DEVICE), none, 0, 0.0, 0)
