"""A norm of a sum with dropout in one pass; csrc/add_norm.h has the contract, and rows.py defines tiles of rows.

    sum = residual + dropped x,    y = norm(sum)

Letters as in rows.py. Rows too wide for a tile need two kernels: the sum, then the norm.
"""

import triton
import triton.language as tl

from . import dropout, rows
from .dropout import _four, pair_of
from .launch import launch
from .rows import _norm_tile, _tile

# As rows.FORWARD, with more threads, because the random words of a tile need registers in addition to its elements.
TABLE = ((2048, 2048, 4), (4096, 4096, 8), (8192, 8192, 16))


@triton.jit
def _tile_words(seed, offset, row, col, C, UNIT: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    """The random words of a tile, (BLOCK_R, BLOCK_C)."""
    if UNIT % 4 == 0:
        # Four consecutive elements share a counter.
        group = tl.arange(0, BLOCK_C // 4)[None, :]
        w0, w1, w2, w3 = _four(seed, offset + row.to(tl.int64) * (C // 4) + group)
        return tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [BLOCK_R, BLOCK_C])
    else:
        i = row.to(tl.int64) * C + col
        w0, w1, w2, w3 = _four(seed, offset + i // 4)
        return tl.where(i % 2 == 0, tl.where(i % 4 == 0, w0, w2), tl.where(i % 4 == 1, w1, w3))


@triton.jit(do_not_specialize=["R", "units", "threshold", "seed", "first"])
def add_norm_kernel(
    x_RC, residual_RC, sum_RC, w_C, b_C, y_RC, mean_R, rstd_R, eps: tl.float32, offset: tl.float32, R, units,
    threshold: tl.uint32, scale, seed: tl.int64, first: tl.int64, pair_2,
    DROP: tl.constexpr, CENTER: tl.constexpr, UNIT: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    C = units * UNIT
    row, exists, col, in_row, start, inside = _tile(tl.program_id(0), 0, R, C, EVEN, BLOCK_R, BLOCK_C)
    x = tl.load(x_RC + start + inside, mask=exists & in_row, other=0.0).to(tl.float32)
    residual = tl.load(residual_RC + start + inside, mask=exists & in_row, other=0.0).to(tl.float32)
    if DROP:
        seed, first = pair_of(pair_2, seed, first)
        words = _tile_words(seed.to(tl.int64), first.to(tl.int64), row, col, C, UNIT, BLOCK_R, BLOCK_C)
        x = tl.where(words >= threshold.to(tl.uint32), x, 0.0) * scale
    # The norm uses the sum as it is stored, because backward rebuilds y from that.
    stored = (residual + x).to(sum_RC.dtype.element_ty)
    tl.store(sum_RC + start + inside, stored, mask=exists & in_row)
    s = stored.to(tl.float32)
    _norm_tile(s, w_C, b_C, y_RC, mean_R, rstd_R, eps, offset, C, start, inside, row, exists, col, in_row, CENTER)


def add(x, residual, sum, weight, bias, y, mean, rstd, eps, offset, center, threshold, scale, seed, first, pair):
    R, C = x.shape
    if R == 0:
        return
    plan = rows.plan_for(C, TABLE)
    if plan.wide or threshold == 1 << 32:  # one more than the largest word
        dropout.add(x, residual, sum, threshold, scale, seed, first, pair, 0)
        rows.forward(sum, weight, bias, y, mean, rstd, eps, offset, center)
        return
    launch(
        add_norm_kernel, (-(-R // plan.rows),),
        x, residual, sum, weight, bias, y, mean, rstd, eps, offset, R, plan.units,
        threshold, scale, seed, first, pair,
        threshold > 0, center, plan.unit, plan.even, plan.rows, plan.block_c,
        num_warps=plan.warps, maxnreg=128, enable_fp_fusion=False,
    )  # fmt: skip
