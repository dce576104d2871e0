"""Divergence of a student's softmax p from a teacher's q; csrc/distillation.h has the contract.

With d = log q - log p, in which no large numbers cancel, and a = log p - log m,

    beta = 0:  a = -d,  KL(q | p) = sum_c q d          beta = 1:  a = -d,  KL(p | q) = sum_c p a
    between:   a = -log(1 - beta + beta exp(d)),  KL(p | m) = sum_c p a,  KL(q | m) = sum_c q (d + a)

Letters: R rows, C columns; a program has one row and processes it in blocks of G groups of L lanes. Both rows are read
for their lse, again for the sums, and again for the gradient unless beta is 0, from the caches if they are still there.
"""

import triton
import triton.language as tl

from .launch import launch
from .logits import LOWEST, add_block, add_lanes, columns, exp, plan_for

# (columns up to, elements of a tile, warps). Rows wider than the last line are processed in blocks of its tile.
FUSED = ((1024, 1024, 2), (8192, 8192, 16))
REGISTERS = 128  # maximum per thread: by default the compiler uses fewer and spills

FORWARD_KL, REVERSE_KL, BETWEEN = (tl.constexpr(kind) for kind in range(3))


@triton.jit
def _load(x_C, teacher_C, col, in_row, scale):
    z = tl.load(x_C + col, mask=in_row, other=0.0, eviction_policy="evict_last").to(tl.float32) * scale
    u = tl.load(teacher_C + col, mask=in_row, other=0.0, eviction_policy="evict_last").to(tl.float32) * scale
    return tl.where(in_row, z, float("-inf")), tl.where(in_row, u, float("-inf"))


@triton.jit
def _log(v):
    """log(v) of normal v > 0 without branches: e log(2) + 2 atanh(w), where v = 2^e (1 + w) / (1 - w)."""
    bits = v.to(tl.int32, bitcast=True)
    e = (bits - 0x3F3504F3) >> 23  # the mantissa lies between the roots of 1 / 2 and of 2
    m = (bits - (e << 23)).to(tl.float32, bitcast=True)
    w = (m - 1.0) / (m + 1.0)
    v2 = w * w
    poly = tl.fma(v2, tl.fma(v2, tl.fma(v2, 0.22222222, 0.28571429), 0.4), 0.66666667)
    near = tl.fma(e.to(tl.float32), 0.69314718, tl.fma(w * v2, poly, 2.0 * w))
    return tl.where(v == v, near, v)


@triton.jit
def _compare(z, u, m, log_s, teacher_m, teacher_log_s, beta, rest, KIND: tl.constexpr, CHEAP: tl.constexpr):
    """p, q, d and a; d and a are finite if they are multiplied by 0."""
    log_p = (z - m) - log_s
    log_q = (u - teacher_m) - teacher_log_s
    p, q = exp(log_p, CHEAP), exp(log_q, CHEAP)
    d = log_q - log_p
    if KIND == BETWEEN:
        # Beyond the bounds one of p and q is negligible against the other, and its terms do not change.
        d = tl.where((p == 0) & (q == 0), 0.0, tl.where(d < -80.0, -80.0, tl.where(d > 80.0, 80.0, d)))
        a = -_log(tl.fma(exp(d, False), beta, rest))
    elif KIND == FORWARD_KL:
        d = tl.where(q == 0, 0.0, d)
        a = -d
    else:
        d = tl.where(p == 0, 0.0, d)
        a = -d
    return p, q, d, a


@triton.jit(do_not_specialize=["units"])
def fused_kernel(
    x_RC, teacher_RC, loss_R, factor_R, dx_RC, beta: tl.float32, rest: tl.float32, scale: tl.float32, units,
    KIND: tl.constexpr, CHEAP: tl.constexpr, FACTORS: tl.constexpr,
    UNIT: tl.constexpr, G: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    C = units * UNIT
    row = tl.program_id(0)
    x_RC += row.to(tl.int64) * C
    teacher_RC += row.to(tl.int64) * C
    m_L, teacher_m_L = tl.full([L], LOWEST, tl.float32), tl.full([L], LOWEST, tl.float32)
    s_L, teacher_s_L = tl.zeros([L], tl.float32), tl.zeros([L], tl.float32)
    for column in tl.range(0, C, G * L):
        col, in_row = columns(column, C, False, L, G)
        z, u = _load(x_RC, teacher_RC, col, in_row, scale)
        m_L, s_L = add_block(m_L, s_L, z, CHEAP)
        teacher_m_L, teacher_s_L = add_block(teacher_m_L, teacher_s_L, u, CHEAP)
    m, s = add_lanes(m_L, s_L, CHEAP)
    teacher_m, teacher_s = add_lanes(teacher_m_L, teacher_s_L, CHEAP)
    log_s, teacher_log_s = tl.log(s), tl.log(teacher_s)

    factor = 0.0
    if dx_RC is not None:
        dx_RC += row.to(tl.int64) * C
        factor = tl.load(factor_R + row * FACTORS) * scale * (rest if KIND == BETWEEN else 1.0)
    kl_p_L, kl_q_L = tl.zeros([L], tl.float32), tl.zeros([L], tl.float32)
    for column in tl.range(0, C, G * L):
        col, in_row = columns(column, C, False, L, G)
        z, u = _load(x_RC, teacher_RC, col, in_row, scale)
        p, q, d, a = _compare(z, u, m, log_s, teacher_m, teacher_log_s, beta, rest, KIND, CHEAP)
        if KIND == FORWARD_KL:
            kl_q_L += tl.sum(q * d, 0)
            if dx_RC is not None:
                tl.store(dx_RC + col, ((p - q) * factor).to(dx_RC.dtype.element_ty), mask=in_row)
        else:
            kl_p_L += tl.sum(p * a, 0)
            if KIND == BETWEEN:
                kl_q_L += tl.sum(q * (d + a), 0)
    kl_p, kl_q = tl.sum(kl_p_L, 0), tl.sum(kl_q_L, 0)
    if loss_R is not None:
        tl.store(loss_R + row, beta * kl_q + rest * kl_p if KIND == BETWEEN else kl_p + kl_q)

    if dx_RC is not None and KIND != FORWARD_KL:
        for column in tl.range(0, C, G * L):
            col, in_row = columns(column, C, False, L, G)
            z, u = _load(x_RC, teacher_RC, col, in_row, scale)
            p, q, d, a = _compare(z, u, m, log_s, teacher_m, teacher_log_s, beta, rest, KIND, CHEAP)
            tl.store(dx_RC + col, (p * (a - kl_p) * factor).to(dx_RC.dtype.element_ty), mask=in_row)


def fused(x, teacher, loss, factor, dx, beta, scale, queue):
    R, C = x.shape
    if R == 0 or C == 0:
        return
    kind = {0: 0, 1: 1}.get(beta, 2)
    plan = plan_for(C, x.element_size(), FUSED, rows=False)
    factors = factor is not None and factor.numel() > 1
    launch(
        fused_kernel, (R,),
        x, teacher, loss, factor, dx, beta, 1 - beta, scale, plan.units, kind, x.element_size() == 2, factors,
        plan.unit, plan.groups, plan.lanes, num_warps=plan.warps, maxnreg=REGISTERS, enable_fp_fusion=False,
    )  # fmt: skip
