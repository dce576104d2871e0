"""The C++ CPU kernels of the losses and of softmax, called as `hfnn._C.cpu.<op>`, against torch's formulas in float64.

R rows, C columns (classes). Rows are longer and shorter than the kernels' blocks of 1024 elements.
"""

import pytest
import torch
import torch.nn.functional as F

from hfnn.testing import GRADIENTS, OUTPUTS, assert_close

_C = pytest.importorskip("hfnn._C", reason="the C++ kernels are not built")
cpu = _C.cpu

INF = float("inf")
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
SHAPES = [(300, 5), (150, 64), (60, 1025), (20, 2777)]
# One class leaves only rounding errors; only float64's have a useful bound.
CASES = [(dtype, R, C) for dtype in DTYPES for R, C in SHAPES] + [(torch.float64, 3, 1)]


def wide(dtype):
    return torch.float64 if dtype == torch.float64 else torch.float32


def nan(*shape, dtype=torch.float32):
    return torch.full(shape, float("nan"), dtype=dtype)


def same_bits(a, b):
    """Equal as integers; any NaN equals any other."""
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return bool(((a.view(integer) == b.view(integer)) | (a.isnan() & b.isnan())).all())


def seeded(*shape, dtype=torch.float64, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def agree(formula, inputs, results, dtypes=None):
    """Compares `results` with formula(*inputs): to 1e-12 for float64 inputs, else by the accuracy rule. torch's result
    is the formula in the arithmetic's dtype, rounded to the result's. The last result is a gradient."""
    exact = formula(*(t.double() if torch.is_tensor(t) and t.is_floating_point() else t for t in inputs))
    own = formula(*(t.to(wide(t.dtype)) if torch.is_tensor(t) and t.is_floating_point() else t for t in inputs))
    for k, (result, e, o) in enumerate(zip(results, exact, own, strict=True)):
        if result is None:
            continue
        if inputs[0].dtype != torch.float64 and result.dtype == torch.float64:
            result = result.float()
        if result.dtype == torch.float64:
            torch.testing.assert_close(result, e, rtol=1e-12, atol=1e-12, equal_nan=True)
        else:
            assert_close(result, e, o.to(result.dtype), GRADIENTS if k == len(results) - 1 else OUTPUTS, f"result {k}")


def run_twice(call):
    """The list of results that call(threads) returns. They are bitwise equal on one thread and on two."""
    one, two = call(1), call(2)
    assert all(a is None or same_bits(a, b) for a, b in zip(one, two, strict=True))
    return one


def squash(x, scale, softcap):
    return softcap * (scale * x / softcap).tanh() if softcap else scale * x


# Cross-entropy.


def cross_entropy_formula(x_RC, target, weight_C, factor_R, ignore_index, smoothing, z_loss, scale, softcap):
    """loss, share, lse, slope and dx, by the formulas of csrc/cross_entropy.h and autograd."""
    (R, C), x_RC = x_RC.shape, x_RC.detach().requires_grad_()
    w_C = torch.ones(C, dtype=x_RC.dtype) if weight_C is None else weight_C.to(x_RC.dtype)
    if target.is_floating_point():
        b_RC, kept_R = w_C * ((1 - smoothing) * target + smoothing / C), torch.ones(R, dtype=torch.bool)
        share_R = torch.ones(R, dtype=x_RC.dtype)
    else:
        kept_R = target != ignore_index
        hot_RC = F.one_hot(target.where(kept_R, 0), C).to(x_RC.dtype)
        b_RC, share_R = w_C * ((1 - smoothing) * hot_RC + smoothing / C), (w_C * hot_RC).sum(1).where(kept_R, 0)
    z_RC = squash(x_RC, scale, softcap)
    log_p_RC = z_RC.log_softmax(1)
    lse_R = z_RC.logsumexp(1)
    used_RC = (b_RC * log_p_RC).where(b_RC != 0, 0)
    loss_R = (z_loss * lse_R**2 - used_RC.sum(1)).where(kept_R, 0)
    (loss_R * factor_R).sum().backward()
    dx_RC = x_RC.grad.where(kept_R[:, None], 0)
    return loss_R, share_R, lse_R.where(kept_R, 0), b_RC.sum(1).where(kept_R, 0), dx_RC


def cross_entropy(x_RC, target, weight_C, factor_R, ignore_index, smoothing, z_loss, scale, softcap, threads):
    """loss, share, lse, slope and dx of forward and backward, then those of fused, which works in place."""
    R, dtype = x_RC.shape[0], wide(x_RC.dtype)
    options = (ignore_index, smoothing, z_loss, scale, softcap, threads)
    dtypes = (dtype, dtype, torch.float64, dtype)
    separate, fused = ([nan(R, dtype=t) for t in dtypes] for _ in range(2))
    dx_RC, place_RC, again_RC = nan(*x_RC.shape, dtype=x_RC.dtype), x_RC.clone(), x_RC.clone()
    op = cpu.cross_entropy
    op.forward(x_RC, target, weight_C, *separate, *options)
    op.backward(x_RC, target, weight_C, *separate[2:], factor_R, dx_RC, *options)
    op.backward(again_RC, target, weight_C, *separate[2:], factor_R, again_RC, *options)
    assert same_bits(dx_RC, again_RC)
    op.fused(place_RC, target, weight_C, *fused, factor_R, place_RC, *options)
    return [*separate, dx_RC, *fused, place_RC]


OPTIONS = [  # ignore_index, smoothing, z_loss, scale, softcap
    (-100, 0.0, 0.0, 1.0, 0.0),
    (2, 0.0, 1e-2, 1.0, 0.0),
    (-1, 0.0, 0.0, 0.25, 3.0),
    (-100, 0.1, 0.0, 1.0, 0.0),
    (-100, 0.3, 1e-2, -2.0, 2.0),
]


@pytest.mark.parametrize("dtype,R,C", CASES)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kind", ["class", "probabilities", "wide probabilities"])
def test_cross_entropy(dtype, R, C, options, weighted, kind):
    x_RC, ignore_index = seeded(R, C, dtype=dtype), options[0]
    if kind == "class":
        target = torch.randint(C, (R,), generator=torch.Generator().manual_seed(1))
        target[R // 2] = ignore_index
        target = target.where(target < C, 0)
    else:
        target = (3 * seeded(R, C, seed=1)).softmax(1).to(dtype if kind == "probabilities" else wide(dtype))
    weight_C = seeded(C, seed=2).abs().to(wide(dtype)) if weighted else None
    factor_R = seeded(R if C != 5 else 1, seed=3).to(wide(dtype))
    given = (x_RC, target, weight_C, factor_R, *options)
    results = run_twice(lambda threads: cross_entropy(*given, threads))
    agree(cross_entropy_formula, given, results[:5])
    agree(cross_entropy_formula, given, results[5:])


def plain_cross_entropy(x_RC, target, **changes):
    """`fused` without options, on whole tensors: loss and dx."""
    R, C = x_RC.shape
    given = {"weight": None, "loss": nan(R), "factor": torch.ones(1), "dx": nan(R, C), "smoothing": 0.0, **changes}
    names = ("weight", "loss", "share", "lse", "slope", "factor", "dx")
    cpu.cross_entropy.fused(x_RC, target, *map(given.get, names), -100, given["smoothing"], 0.0, 1.0, 0.0, 1)
    return given["loss"], given["dx"]


def test_cross_entropy_of_infinite_logits_is_torchs():
    x_RC = seeded(6, 2100, dtype=torch.float32)
    x_RC[0, :1500], x_RC[1, 7:], x_RC[2], x_RC[3, 5], x_RC[4, 3], x_RC[5, 9] = -INF, -INF, -INF, INF, -INF, float("nan")
    target_R = torch.tensor([2000, 3, 3, 3, 3, 3])
    for smoothing in (0.0, 0.1):
        loss_R, dx_RC = plain_cross_entropy(x_RC, target_R, smoothing=smoothing)
        leaf_RC = x_RC.clone().requires_grad_()
        own_R = F.cross_entropy(leaf_RC, target_R, reduction="none", label_smoothing=smoothing)
        own_R.sum().backward()
        torch.testing.assert_close(loss_R, own_R.detach(), equal_nan=True)
        torch.testing.assert_close(dx_RC, leaf_RC.grad, equal_nan=True)


@pytest.mark.parametrize("wrong", [7, -1])
def test_a_class_out_of_bounds_is_an_index_error_before_anything_is_computed(wrong):
    x_RC, loss_R = torch.randn(300, 7), nan(300)
    target_R = torch.zeros(300, dtype=torch.int64)
    target_R[299] = wrong
    with pytest.raises(IndexError, match=f"Target {wrong} is out of bounds."):
        plain_cross_entropy(x_RC, target_R, loss=loss_R)
    assert loss_R.isnan().all()


@pytest.mark.parametrize(
    "change,message",
    [
        ({"weight": torch.ones(6)}, r"weight must have the shape \(7,\), got \(6,\)"),
        ({"loss": None}, "loss must be a tensor, got None"),
        ({"loss": torch.zeros(4, dtype=torch.float64)}, "loss must be float32, got float64"),
        ({"share": torch.zeros(5)}, r"share must have the shape \(4,\), got \(5,\)"),
        ({"factor": torch.ones(2)}, r"factor must have the shape \(4,\), got \(2,\)"),
        ({"factor": None}, "factor must be a tensor, got None"),
        ({"dx": torch.zeros(4, 7, dtype=torch.float16)}, "dx must be float32, got float16"),
        ({"dx": torch.zeros(7, 4).t()}, "dx must be contiguous"),
        ({"smoothing": 1.5}, "smoothing"),
        ({"target": torch.zeros(4, 6)}, r"target must have the shape \(4, 7\), got \(4, 6\)"),
        ({"target": torch.zeros(4, 7, dtype=torch.bfloat16)}, "target must be float32 when x is float32, got bfloat16"),
        ({"target": torch.zeros(5, dtype=torch.int64)}, r"target must have the shape \(4,\), got \(5,\)"),
        ({"lse": torch.zeros(4)}, "lse must be float64, got float32"),
        ({"x_RC": torch.zeros(4, 7).long()}, "x must be float32, bfloat16, float16 or float64, got int64"),
    ],
)
def test_cross_entropy_says_what_it_was_given_and_what_it_takes(change, message):
    given = {"x_RC": torch.zeros(4, 7), "target": torch.zeros(4, dtype=torch.int64)}
    with pytest.raises(ValueError, match=message):
        plain_cross_entropy(**{**given, **change})


def test_backward_of_cross_entropy_needs_a_slope_where_it_cannot_know_it():
    x_RC, lse_R, one = torch.zeros(4, 7), torch.zeros(4, dtype=torch.float64), torch.ones(1)
    target_R, w_C = torch.zeros(4, dtype=torch.int64), torch.rand(7)
    for target, weight, smoothing in ((x_RC, None, 0.0), (target_R, w_C, 0.1)):
        with pytest.raises(ValueError, match="slope must be a tensor"):
            cpu.cross_entropy.backward(
                x_RC, target, weight, lse_R, None, one, x_RC.clone(), -100, smoothing, 0.0, 1.0, 0.0, 1
            )
    for weight, smoothing in ((None, 0.1), (w_C, 0.0)):
        given = (x_RC, target_R, weight, lse_R)
        slope_R = torch.ones(4) if weight is None else weight[target_R]
        results = [nan(4, 7), nan(4, 7)]
        for dx_RC, slope in zip(results, (None, slope_R), strict=True):
            cpu.cross_entropy.backward(*given, slope, one, dx_RC, -100, smoothing, 0.0, 1.0, 0.0, 1)
        assert same_bits(*results)


# Softmax.


def softmax_formula(x_RC, dy_RC, log):
    x_RC = x_RC.detach().requires_grad_()
    y_RC = x_RC.log_softmax(1) if log else x_RC.softmax(1)
    y_RC.backward(dy_RC)
    return y_RC, x_RC.grad


@pytest.mark.parametrize("dtype,R,C", CASES)
@pytest.mark.parametrize("widened", [False, True])
@pytest.mark.parametrize("log", [False, True])
def test_softmax(dtype, R, C, widened, log):
    x_RC, y_dtype = seeded(R, C, dtype=dtype), wide(dtype) if widened else dtype
    dy_RC = seeded(R, C, dtype=y_dtype, seed=1)

    def call(threads):
        y_RC, dx_RC = nan(R, C, dtype=y_dtype), nan(R, C, dtype=dtype)
        cpu.softmax.forward(x_RC, y_RC, log, threads)
        cpu.softmax.backward(dy_RC, y_RC, dx_RC, log, threads)
        return [y_RC, dx_RC]

    agree(softmax_formula, (x_RC, dy_RC, log), [*run_twice(call)[:1], None])
    # Backward starts from the stored y.
    y_RC, dx_RC = call(1)
    own_RC = [
        dy - y.exp() * dy.sum(1, keepdim=True) if log else (dy - (dy * y).sum(1, keepdim=True)) * y
        for dy, y in ((dy_RC.to(t), y_RC.to(t)) for t in (torch.float64, wide(dtype)))
    ]
    agree(lambda exact: (own_RC[0] if exact.dtype == torch.float64 else own_RC[1],), (y_RC,), [dx_RC])


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_softmax_of_infinite_logits_is_torchs(dtype, log):
    x_RC = seeded(5, 2100, dtype=dtype)
    x_RC[0, :1500], x_RC[1, 7:], x_RC[2], x_RC[3, 5], x_RC[4, 9] = -INF, -INF, -INF, INF, float("nan")
    y_RC, dx_RC = nan(5, 2100, dtype=dtype), nan(5, 2100, dtype=dtype)
    cpu.softmax.forward(x_RC, y_RC, log, 1)
    cpu.softmax.backward(torch.ones_like(y_RC), y_RC, dx_RC, log, 1)
    own_RC, own_dx_RC = softmax_formula(x_RC, torch.ones_like(y_RC), log)
    torch.testing.assert_close(y_RC, own_RC.detach(), equal_nan=True)
    torch.testing.assert_close(dx_RC, own_dx_RC, equal_nan=True, rtol=2e-6, atol=1e-6 if dtype.itemsize > 2 else 1)


def test_a_long_row_keeps_its_digits():
    x_RC, y_RC = seeded(2, 262144, dtype=torch.float32), nan(2, 262144)
    cpu.softmax.forward(x_RC, y_RC, True, 1)
    assert_close(y_RC, x_RC.double().log_softmax(1), x_RC.log_softmax(1))


# Log-probabilities.


def log_probs_formula(x_RC, target_R, a_R, b_R, t_R, scale, softcap):
    x_RC, here_R = x_RC.detach().requires_grad_(), (target_R >= 0) & (target_R < x_RC.shape[1])
    z_RC = squash(x_RC, scale, softcap)
    index_R1 = target_R.where(here_R, 0)[:, None]
    picked_R, lse_R = z_RC.gather(1, index_R1)[:, 0].where(here_R, 0), z_RC.logsumexp(1)
    p_RC = (z_RC - lse_R[:, None]).exp()
    mean_R = (p_RC * z_RC).sum(1)
    per_z_RC = p_RC * (a_R[:, None] + (0 if b_R is None else b_R[:, None] * z_RC))
    hot_RC = torch.zeros_like(x_RC).scatter(1, index_R1, t_R.where(here_R, 0)[:, None])
    z_RC.backward((per_z_RC + hot_RC).detach())
    return picked_R, lse_R, mean_R, x_RC.grad


@pytest.mark.parametrize("dtype,R,C", CASES)
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("scale,softcap", [(1.0, 0.0), (0.5, 2.0)])
def test_log_probs(dtype, R, C, entropy, scale, softcap):
    x_RC = seeded(R, C, dtype=dtype)
    target_R = torch.randint(-2, C + 2, (R,), generator=torch.Generator().manual_seed(1))
    a_R, b_R, t_R = (seeded(R, dtype=wide(dtype), seed=s) for s in (2, 3, 4))
    b_R = b_R if entropy else None

    def call(threads):
        picked_R, lse_R, mean_R = (nan(R, dtype=t) for t in (wide(dtype), torch.float64, wide(dtype)))
        mean_R, dx_RC = mean_R if entropy else None, x_RC.clone()
        cpu.log_probs.forward(x_RC, target_R, picked_R, lse_R, mean_R, scale, softcap, threads)
        cpu.log_probs.backward(dx_RC, target_R, lse_R, a_R, b_R, t_R, dx_RC, scale, softcap, threads)
        return [picked_R, lse_R, mean_R, dx_RC]

    agree(log_probs_formula, (x_RC, target_R, a_R, b_R, t_R, scale, softcap), run_twice(call))


def test_log_probs_of_masked_logits():
    x_RC, target_R = seeded(3, 2100, dtype=torch.float32), torch.tensor([2000, 2, 2])
    x_RC[0, :1500], x_RC[1, 7:], x_RC[2, 2] = -INF, -INF, -INF
    picked_R, lse_R, mean_R, dx_RC = nan(3), nan(3, dtype=torch.float64), nan(3), nan(3, 2100)
    ones_R = torch.ones(3)
    cpu.log_probs.forward(x_RC, target_R, picked_R, lse_R, mean_R, 1.0, 0.0, 1)
    cpu.log_probs.backward(x_RC, target_R, lse_R, ones_R, ones_R, ones_R, dx_RC, 1.0, 0.0, 1)
    p_RC = x_RC.double().softmax(1)
    torch.testing.assert_close(lse_R, x_RC.double().logsumexp(1), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(mean_R.double(), (p_RC * x_RC.double()).where(p_RC > 0, 0).sum(1), atol=1e-6, rtol=1e-6)
    assert picked_R[2] == -INF and dx_RC.isfinite().all()


# Distillation.


def distillation_formula(x_RC, teacher_RC, factor_R, beta, scale):
    x_RC = x_RC.detach().requires_grad_()
    log_p_RC, log_q_RC = (scale * x_RC).log_softmax(1), (scale * teacher_RC).log_softmax(1)
    p_RC, q_RC = log_p_RC.exp(), log_q_RC.exp()
    log_m_RC = log_q_RC if beta == 1 else log_p_RC if beta == 0 else (beta * q_RC + (1 - beta) * p_RC).log()
    to_q_R, to_p_R = (q_RC * (log_q_RC - log_m_RC)).sum(1), (p_RC * (log_p_RC - log_m_RC)).sum(1)
    loss_R = to_p_R if beta == 1 else to_q_R if beta == 0 else beta * to_q_R + (1 - beta) * to_p_R
    (loss_R * factor_R).sum().backward()
    return loss_R, x_RC.grad


@pytest.mark.parametrize("dtype,R,C", CASES)
@pytest.mark.parametrize("beta,scale", [(0.0, 1.0), (1.0, 0.5), (0.5, 1.0), (0.1, 2.0)])
def test_distillation(dtype, R, C, beta, scale):
    x_RC, teacher_RC = 2 * seeded(R, C, dtype=dtype), 2 * seeded(R, C, dtype=dtype, seed=1)
    factor_R = seeded(R if C != 5 else 1, dtype=wide(dtype), seed=2)

    def call(threads):
        loss_R, alone_R = (nan(R, dtype=wide(dtype)) for _ in range(2))
        dx_RC, place_RC = nan(R, C, dtype=dtype), x_RC.clone()
        cpu.distillation.fused(x_RC, teacher_RC, alone_R, None, None, beta, scale, threads)
        cpu.distillation.fused(x_RC, teacher_RC, None, factor_R, dx_RC, beta, scale, threads)
        cpu.distillation.fused(place_RC, teacher_RC, loss_R, factor_R, place_RC, beta, scale, threads)
        assert same_bits(loss_R, alone_R) and same_bits(dx_RC, place_RC)
        return [loss_R, dx_RC]

    agree(distillation_formula, (x_RC, teacher_RC, factor_R, beta, scale), run_twice(call))


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_distillation_of_masked_logits_is_that_of_the_others(beta):
    x_RC, teacher_RC = seeded(4, 2100, dtype=torch.float32), seeded(4, 2100, dtype=torch.float32, seed=1)
    x_RC[:, 100:], teacher_RC[:, 100:] = -INF, -INF
    results = []
    for x, teacher in ((x_RC, teacher_RC), (x_RC[:, :100].contiguous(), teacher_RC[:, :100].contiguous())):
        loss_R, dx = nan(4), nan(*x.shape)
        cpu.distillation.fused(x, teacher, loss_R, torch.ones(4), dx, beta, 1.0, 1)
        results.append((loss_R, dx))
    torch.testing.assert_close(results[0][0], results[1][0])
    torch.testing.assert_close(results[0][1][:, :100], results[1][1])
    assert (results[0][1][:, 100:] == 0).all()


def test_distillation_says_what_it_takes():
    x_RC, loss_R = torch.ones(4, 7), torch.ones(4)
    for change, message in (
        ({"teacher": torch.ones(4, 6)}, r"teacher must have the shape \(4, 7\), got \(4, 6\)"),
        ({"loss": torch.ones(3)}, r"loss must have the shape \(4,\), got \(3,\)"),
        ({"factor": None}, "factor must be a tensor, got None"),
        ({"beta": 1.5}, "beta"),
    ):
        given = {"teacher": x_RC, "loss": loss_R, "factor": loss_R, "dx": x_RC, "beta": 0.5, **change}
        with pytest.raises(ValueError, match=message):
            cpu.distillation.fused(x_RC, *given.values(), 1.0, 1)


def test_nothing_is_done_with_no_rows():
    x_RC, none_R, target_R = torch.ones(0, 7), torch.ones(0), torch.ones(0, dtype=torch.int64)
    lse_R = none_R.double()
    plain_cross_entropy(x_RC, target_R)
    cpu.softmax.forward(x_RC, x_RC, False, 1)
    cpu.softmax.backward(x_RC, x_RC, x_RC, True, 1)
    cpu.log_probs.forward(x_RC, target_R, none_R, lse_R, None, 1.0, 0.0, 1)
    cpu.distillation.fused(x_RC, x_RC, none_R, none_R, x_RC, 0.5, 1.0, 1)
