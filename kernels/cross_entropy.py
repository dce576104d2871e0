"""Cross-entropy of rows of logits; csrc/cross_entropy.h has the contract, logits.py the arithmetic.

Triton has no free assertions. So a class outside 0..C-1 that is not ignore_index makes the loss, the share and the
gradient of its row NaN.

Letters: R rows, C columns, T rows of a tile; a wide row is processed in blocks of G groups of L lanes. With a class t,

    loss = (1 - smoothing) w_t (lse - z_t) + smoothing / C * sum_c w_c (lse - z_c) + z_loss lse^2

where lse = m + log(s) is not rounded before z_t or, in sums, the logit of an anchor column is subtracted from m.
"""

import triton
import triton.language as tl

from .launch import launch
from .logits import (
    LOWEST,
    add_block,
    add_lanes,
    block_of_tile,
    columns,
    exp,
    launch_rows,
    logits,
    plan_for,
    split,
    tile_at,
)

# (columns up to, elements of a tile, warps). Rows wider than the last line are processed in blocks of its tile. Fused,
# blocks of a wide row are read again for the gradient: with one program of 32 warps per multiprocessor, its row stays
# in the L2 cache.
FORWARD = ((1024, 2048, 4), (4096, 4096, 4), (8192, 8192, 8))
FUSED = ((1024, 2048, 4), (4096, 4096, 4), (8192, 8192, 8), (16384, 16384, 32))
SUMS = ((1024, 2048, 4), (8192, 8192, 16))  # either, with b to sum or a soft cap, which need more registers
BACKWARD = ((4096, 4096, 4),)
REGISTERS = 128  # maximum per thread for those: by default the compiler uses fewer and spills


@triton.jit
def _class(target_R, weight_C, row, exists, ignore_index, C):
    """For rows (any shape): the class, as int32; whether the row counts; the class's weight, NaN out of bounds."""
    given = tl.load(target_R + row, mask=exists, other=0)
    counts = exists & (given != ignore_index)
    valid = (given >= 0) & (given < C)
    t = tl.where(valid, given, 0).to(tl.int32)
    w = 1.0
    if weight_C is not None:
        w = tl.load(weight_C + t, mask=counts & valid, other=0.0).to(tl.float32)
    return t, counts, tl.where(counts, tl.where(valid, w, float("nan")), 0.0)


@triton.jit
def _target(target, weight_C, start, row, exists, ignore_index, C, PROBS: tl.constexpr):
    """For rows that begin at `start`: their targets, and the result of _class, treating probabilities as class 0."""
    if PROBS:
        return target + start, 0, exists, tl.where(exists, 1.0, 0.0)
    else:
        t, counts, w = _class(target, weight_C, row, exists, ignore_index, C)
        return target, t, counts, w


@triton.jit
def _coefficients(target, weight_C, col, read, spread, keep, PROBS: tl.constexpr):
    """The part of b that is spread over the row, (a block): all of it for probabilities, (1, 1) ones for unweighted
    classes."""
    b = 1.0
    if weight_C is not None:
        b = tl.load(weight_C + col, mask=read, other=0.0, eviction_policy="evict_last").to(tl.float32)
    if PROBS:
        q = tl.load(target, mask=read, other=0.0).to(tl.float32)
        b *= tl.fma(q, keep, spread)
    return tl.where(read, b, 0.0)


@triton.jit
def _store_row(
    row, exists, counts, w, z_t, anchor, m, s, bsum, bz, loss_R, share_R, lse_R, slope_R, keep, spread, z_loss,
    PROBS: tl.constexpr, SMOOTH: tl.constexpr,
):  # fmt: skip
    """The values that forward stores for rows (any shape); their lse, and slope0."""
    log_s = tl.log(s)
    lse = m.to(tl.float64) + tl.log(s.to(tl.float64))
    slope = w
    if PROBS:
        loss = bsum * ((m - anchor) + log_s) - bz
        slope = bsum
    else:
        loss = keep * w * ((m - z_t) + log_s)
        if SMOOTH:
            loss += spread * (bsum * ((m - anchor) + log_s) - bz)
            slope = tl.fma(keep, w, spread * bsum)
    loss += tl.where(z_loss != 0.0, z_loss * (m + log_s) * (m + log_s), 0.0)
    tl.store(loss_R + row, tl.where(counts, loss, 0.0), mask=exists)
    if share_R is not None:
        tl.store(share_R + row, w, mask=exists)
    if lse_R is not None:
        tl.store(lse_R + row, tl.where(counts, lse, 0.0), mask=exists)
    if slope_R is not None:
        tl.store(slope_R + row, tl.where(counts, slope, 0.0), mask=exists)
    return lse, slope


@triton.jit
def _gradient(
    x, b, col, t, w, lse, slope, factor, scale, softcap, keep, spread, z_loss,
    PROBS: tl.constexpr, SMOOTH: tl.constexpr, SCALED: tl.constexpr, CAPPED: tl.constexpr, CHEAP: tl.constexpr,
):  # fmt: skip
    z, dz = logits(x, scale, softcap, SCALED, CAPPED, CHEAP)
    if not PROBS:
        own = tl.where(col == t, keep * w, 0.0)
        b = tl.fma(b, spread, own) if SMOOTH else own
    near, rest = split(lse)
    slope = tl.where(z_loss != 0.0, tl.fma(2.0 * z_loss, near, slope), slope) * rest
    return tl.fma(slope, exp(z - near, CHEAP), -b) * (factor * dz)


@triton.jit(do_not_specialize=["R", "units", "ignore_index"])
def tile_kernel(
    x_RC, target, weight_C, loss_R, share_R, lse_R, slope_R, factor_R, dx_RC, ignore_index: tl.int64,
    keep: tl.float32, spread: tl.float32, z_loss: tl.float32, scale: tl.float32, softcap: tl.float32, R, units,
    PROBS: tl.constexpr, SMOOTH: tl.constexpr, SCALED: tl.constexpr, CAPPED: tl.constexpr, CHEAP: tl.constexpr,
    FACTORS: tl.constexpr, UNIT: tl.constexpr, T: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Forward, and the gradient if dx_RC is given, of a tile of whole rows, which stay in registers."""
    C = units * UNIT
    row, exists, col, in_row, start, inside = tile_at(tl.program_id(0), 0, R, C, T, BLOCK_C)
    x_RC += start
    target, t, counts, w = _target(target, weight_C, start, row, exists, ignore_index, C, PROBS)
    x = tl.load(x_RC + inside, mask=counts & in_row, other=0.0).to(tl.float32)
    z, _ = logits(x, scale, softcap, SCALED, CAPPED, CHEAP)
    z = tl.where(in_row, z, float("-inf"))
    m = tl.max(z, 1)[:, None]
    s = tl.sum(exp(z - m, CHEAP), 1)[:, None]
    z_t = tl.sum(tl.where(col == t, z, 0.0), 1)[:, None]
    anchor = tl.where(tl.abs(z_t) < float("inf"), z_t, 0.0)
    b, bsum, bz = 0.0, 0.0, 0.0
    if PROBS or SMOOTH:
        b = _coefficients(target + inside if PROBS else target, weight_C, col, counts & in_row, spread, keep, PROBS)
        bsum = tl.sum(b, 1)[:, None]
        bz = tl.sum(tl.where(in_row, b * (z - anchor), 0.0), 1)[:, None]
    lse, slope = _store_row(
        row, exists, counts, w, z_t, anchor, m, s, bsum, bz, loss_R, share_R, lse_R, slope_R, keep, spread, z_loss,
        PROBS, SMOOTH,
    )  # fmt: skip
    if dx_RC is not None:
        factor = tl.load(factor_R + row * FACTORS, mask=exists, other=0.0)
        dx = _gradient(
            x, b, col, t, w, lse, slope, factor, scale, softcap, keep, spread, z_loss,
            PROBS, SMOOTH, SCALED, CAPPED, CHEAP,
        )  # fmt: skip
        dx = tl.where(counts, dx, 0.0).to(dx_RC.dtype.element_ty)
        tl.store(dx_RC + start + inside, dx, mask=exists & in_row)


@triton.jit
def _add(
    m_L, s_L, bsum_L, bz_L, x_C, target, weight_C, column, C, anchor, scale, softcap, keep, spread,
    PROBS: tl.constexpr, SMOOTH: tl.constexpr, SCALED: tl.constexpr, CAPPED: tl.constexpr, CHEAP: tl.constexpr,
    EVEN: tl.constexpr, G: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    """The sums of a wide row with the block of columns from `column` on added."""
    col, in_row = columns(column, C, EVEN, L, G)
    x = tl.load(x_C + col, mask=in_row, other=0.0, eviction_policy="evict_last").to(tl.float32)
    z, _ = logits(x, scale, softcap, SCALED, CAPPED, CHEAP)
    z = z if EVEN else tl.where(in_row, z, float("-inf"))
    m_L, s_L = add_block(m_L, s_L, z, CHEAP)
    if PROBS or SMOOTH:
        b = _coefficients(target + col if PROBS else target, weight_C, col, in_row, spread, keep, PROBS)
        bsum_L += tl.sum(b + tl.zeros([G, L], tl.float32), 0)
        bz = b * (z - anchor)
        bz_L += tl.sum(bz if EVEN else tl.where(in_row, bz, 0.0), 0)
    return m_L, s_L, bsum_L, bz_L


@triton.jit
def _store_gradient(
    x_C, target, weight_C, dx_C, column, C, t, w, lse, slope, factor, scale, softcap, keep, spread, z_loss,
    PROBS: tl.constexpr, SMOOTH: tl.constexpr, SCALED: tl.constexpr, CAPPED: tl.constexpr, CHEAP: tl.constexpr,
    EVEN: tl.constexpr, G: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    """dx of a block of columns of one row."""
    col, in_row = columns(column, C, EVEN, L, G)
    x = tl.load(x_C + col, mask=in_row, other=0.0, eviction_policy="evict_first").to(tl.float32)
    b = 0.0
    if PROBS or SMOOTH:
        b = _coefficients(target + col if PROBS else target, weight_C, col, in_row, spread, keep, PROBS)
    dx = _gradient(
        x, b, col, t, w, lse, slope, factor, scale, softcap, keep, spread, z_loss,
        PROBS, SMOOTH, SCALED, CAPPED, CHEAP,
    )  # fmt: skip
    tl.store(dx_C + col, dx.to(dx_C.dtype.element_ty), mask=in_row)


@triton.jit(do_not_specialize=["units", "ignore_index"])
def wide_kernel(
    x_RC, target, weight_C, loss_R, share_R, lse_R, slope_R, factor_R, dx_RC, ignore_index: tl.int64,
    keep: tl.float32, spread: tl.float32, z_loss: tl.float32, scale: tl.float32, softcap: tl.float32, units,
    PROBS: tl.constexpr, SMOOTH: tl.constexpr, SCALED: tl.constexpr, CAPPED: tl.constexpr, CHEAP: tl.constexpr,
    FACTORS: tl.constexpr, UNIT: tl.constexpr, G: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    """Forward of one row, read once; if dx_RC is given also the gradient, for which it is read from the caches."""
    C = units * UNIT
    row = tl.program_id(0)
    start = row.to(tl.int64) * C
    x_RC += start
    target, t, counts, w = _target(target, weight_C, start, row, True, ignore_index, C, PROBS)
    # An ignored row has no columns to read.
    end = tl.where(counts, C, 0)
    even = end // (G * L) * (G * L)
    z_t, _ = logits(tl.load(x_RC + t).to(tl.float32), scale, softcap, SCALED, CAPPED, CHEAP)
    anchor = tl.where(tl.abs(z_t) < float("inf"), z_t, 0.0)

    m_L = tl.full([L], LOWEST, tl.float32)
    s_L, bsum_L, bz_L = tl.zeros([L], tl.float32), tl.zeros([L], tl.float32), tl.zeros([L], tl.float32)
    for column in tl.range(0, even, G * L):
        m_L, s_L, bsum_L, bz_L = _add(
            m_L, s_L, bsum_L, bz_L, x_RC, target, weight_C, column, C, anchor, scale, softcap, keep, spread,
            PROBS, SMOOTH, SCALED, CAPPED, CHEAP, True, G, L,
        )  # fmt: skip
    if even < end:
        m_L, s_L, bsum_L, bz_L = _add(
            m_L, s_L, bsum_L, bz_L, x_RC, target, weight_C, even, C, anchor, scale, softcap, keep, spread,
            PROBS, SMOOTH, SCALED, CAPPED, CHEAP, False, G, L,
        )  # fmt: skip
    m, s = add_lanes(m_L, s_L, CHEAP)
    lse, slope = _store_row(
        row, True, counts, w, z_t, anchor, m, s, tl.sum(bsum_L, 0), tl.sum(bz_L, 0), loss_R, share_R, lse_R, slope_R,
        keep, spread, z_loss, PROBS, SMOOTH,
    )  # fmt: skip

    if dx_RC is not None:
        dx_RC += start
        factor = tl.load(factor_R + row * FACTORS)
        for column in tl.range(0, even, G * L):
            _store_gradient(
                x_RC, target, weight_C, dx_RC, column, C, t, w, lse, slope, factor, scale, softcap, keep, spread,
                z_loss, PROBS, SMOOTH, SCALED, CAPPED, CHEAP, True, G, L,
            )  # fmt: skip
        if even < end:
            _store_gradient(
                x_RC, target, weight_C, dx_RC, even, C, t, w, lse, slope, factor, scale, softcap, keep, spread,
                z_loss, PROBS, SMOOTH, SCALED, CAPPED, CHEAP, False, G, L,
            )  # fmt: skip
        for column in tl.range(end, C, G * L):
            col, in_row = columns(column, C, False, L, G)
            tl.store(dx_RC + col, tl.zeros([G, L], dx_RC.dtype.element_ty), mask=in_row)


@triton.jit(do_not_specialize=["R", "units", "ignore_index"])
def backward_kernel(
    x_RC, target, weight_C, lse_R, slope_R, factor_R, dx_RC, ignore_index: tl.int64,
    keep: tl.float32, spread: tl.float32, z_loss: tl.float32, scale: tl.float32, softcap: tl.float32, R, units,
    PROBS: tl.constexpr, SMOOTH: tl.constexpr, SCALED: tl.constexpr, CAPPED: tl.constexpr, CHEAP: tl.constexpr,
    FACTORS: tl.constexpr, UNIT: tl.constexpr, T: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    C = units * UNIT
    row, exists, col, in_row, start, inside = block_of_tile(tl.program_id(0), R, C, T, BLOCK_C)
    target, t, counts, w = _target(target, weight_C, start, row, exists, ignore_index, C, PROBS)
    x = tl.load(x_RC + start + inside, mask=counts & in_row, other=0.0).to(tl.float32)
    b = 0.0
    if PROBS or SMOOTH:
        b = _coefficients(target + inside if PROBS else target, weight_C, col, counts & in_row, spread, keep, PROBS)
    lse = tl.load(lse_R + row, mask=exists, other=0.0)  # float64
    slope = tl.load(slope_R + row, mask=exists, other=0.0) if slope_R is not None else w
    factor = tl.load(factor_R + row * FACTORS, mask=exists, other=0.0)
    dx = _gradient(
        x, b, col, t, w, lse, slope, factor, scale, softcap, keep, spread, z_loss,
        PROBS, SMOOTH, SCALED, CAPPED, CHEAP,
    )  # fmt: skip
    dx = tl.where(counts, dx, 0.0).to(dx_RC.dtype.element_ty)
    tl.store(dx_RC + start + inside, dx, mask=exists & in_row)


def _options(x, target, smoothing, z_loss, logit_scale, softcap):
    """The options for every kernel: numbers, and compile-time constants."""
    scale = logit_scale / softcap if softcap else logit_scale
    numbers = 1.0 - smoothing, smoothing / x.shape[1], z_loss, scale, softcap
    return numbers, (
        target.is_floating_point(), smoothing != 0, not softcap and scale != 1, softcap != 0, x.element_size() == 2,
    )  # fmt: skip


def forward(
    x, target, weight, loss, share, lse, slope, ignore_index, smoothing, z_loss, logit_scale, softcap, queue
):  # fmt: skip
    fused(
        x, target, weight, loss, share, lse, slope, None, None, ignore_index, smoothing, z_loss, logit_scale, softcap,
        queue,
    )  # fmt: skip


def fused(
    x, target, weight, loss, share, lse, slope, factor, dx, ignore_index, smoothing, z_loss, logit_scale, softcap,
    queue,
):  # fmt: skip
    R, C = x.shape
    if R == 0 or C == 0:
        return
    numbers, flags = _options(x, target, smoothing, z_loss, logit_scale, softcap)
    probs, smooth, _, capped, _ = flags
    more = probs or smooth or capped
    plan = plan_for(C, x.element_size(), SUMS if more else FORWARD if dx is None else FUSED)
    factors = factor is not None and factor.numel() > 1
    tensors = x, target, weight, loss, share, lse, slope, factor, dx
    launch_rows(
        tile_kernel, wide_kernel, plan, R, (*tensors, ignore_index, *numbers), (*flags, factors),
        wide_registers=REGISTERS if more else None,
    )  # fmt: skip


def backward(
    x, target, weight, lse, slope, factor, dx, ignore_index, smoothing, z_loss, logit_scale, softcap, queue
):  # fmt: skip
    R, C = x.shape
    if R == 0 or C == 0:
        return
    numbers, flags = _options(x, target, smoothing, z_loss, logit_scale, softcap)
    plan = plan_for(C, x.element_size(), BACKWARD)
    launch(
        backward_kernel, (-(-R // plan.rows) * plan.blocks,),
        x, target, weight, lse, slope, factor, dx, ignore_index, *numbers, R, plan.units, *flags, factor.numel() > 1,
        plan.unit, plan.rows, plan.block, num_warps=plan.warps, enable_fp_fusion=False,
        maxnreg=REGISTERS if x.element_size() == 4 else None,
    )  # fmt: skip
