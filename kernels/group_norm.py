"""Group normalisation followed by an activation; csrc/group_norm.h has the contract, without `last`.

A group's elements are contiguous, so its statistics are those of a channel of kernels/batch_norm.py with a single
plane. Elsewhere a row is a channel of a sample, and a tile has rows and columns, their elements.
"""

import triton
import triton.language as tl

from .batch_norm import (
    MERGE_C,
    MERGE_Q,
    PROGRAMS,
    WARPS,
    _blocks,
    _load_channel,
    _power,
    _times_slope,
    _value,
    finish_kernel,
    moments_kernel,
    settle_kernel,
)
from .launch import launch

COLUMNS = 4096  # of a tile, for sums
CHANNELS = 64  # channels of a group processed at a time


@triton.jit
def _tile(rows, S, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr):
    """For this program's tile: rows, which exist; pointers to the elements, and which exist."""
    blocks = tl.cdiv(S, BLOCK_N)
    row = tl.program_id(0) // blocks * BLOCK_R + tl.arange(0, BLOCK_R)[:, None]
    i = tl.program_id(0) % blocks * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    there = row < rows
    return row, there, row.to(tl.int64) * S + i, there & (i < S)


@triton.jit
def _numbers(w_C, b_C, mean_G, rstd_G, row, exists, C, D):
    """mean, rstd, scale and bias of rows."""
    mean = tl.load(mean_G + row // D, mask=exists, other=0.0, eviction_policy="evict_last")
    rstd = tl.load(rstd_G + row // D, mask=exists, other=0.0, eviction_policy="evict_last")
    scale = rstd * _load_channel(w_C, row % C, exists, 1.0)
    return mean, rstd, scale, _load_channel(b_C, row % C, exists, -0.0)


@triton.jit
def forward_kernel(
    x, w_C, b_C, y, mean_G, rstd_G, slope: tl.float32, rows, S, C, D, KIND: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr
):  # fmt: skip
    row, there, at, exists = _tile(rows, S, BLOCK_R, BLOCK_N)
    mean, _, scale, bias = _numbers(w_C, b_C, mean_G, rstd_G, row, there, C, D)
    z = tl.fma(tl.load(x + at, mask=exists, other=0.0).to(tl.float32) - mean, scale, bias)
    tl.store(y + at, _value(z, slope, KIND).to(y.dtype.element_ty), mask=exists)


@triton.jit
def sums_kernel(
    dy, x, w_C, b_C, mean_G, rstd_G, sums, slope: tl.float32, rows, S, C, D, KIND: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr
):  # fmt: skip
    """The sums of g * xhat and of g over each row."""
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)[:, None]
    there = row < rows
    mean, rstd, scale, bias = _numbers(w_C, b_C, mean_G, rstd_G, row, there, C, D)
    with_x = tl.zeros([BLOCK_R, BLOCK_N], tl.float32)
    alone = tl.zeros([BLOCK_R, BLOCK_N], tl.float32)
    for column in tl.range(0, S, BLOCK_N):
        i = column + tl.arange(0, BLOCK_N)[None, :]
        exists = there & (i < S)
        value = tl.load(x + row.to(tl.int64) * S + i, mask=exists, other=0.0).to(tl.float32)
        g = tl.load(dy + row.to(tl.int64) * S + i, mask=exists, other=0.0).to(tl.float32)
        g = _times_slope(g, tl.fma(value - mean, scale, bias), slope, KIND)
        with_x += tl.where(exists, g * (value - mean), 0.0)
        alone += tl.where(exists, g, 0.0)
    tl.store(sums + row, tl.sum(with_x, 1)[:, None] * rstd, mask=there)
    tl.store(sums + rows + row, tl.sum(alone, 1)[:, None], mask=there)


# In float64, which is free for so few numbers.
@triton.jit
def centre_kernel(sums, w_C, rstd_G, rows, C, D, n: tl.float32, BLOCK_D: tl.constexpr):
    """The term that dx of a group subtracts from scale * g: shift + (x - mean) * slope, computed from the sums."""
    group, groups = tl.program_id(0), tl.num_programs(0)
    with_x = tl.zeros([BLOCK_D], tl.float64)
    alone = tl.zeros([BLOCK_D], tl.float64)
    for first in tl.range(0, D, BLOCK_D):
        k = first + tl.arange(0, BLOCK_D)
        row = group * D + k
        weight = _load_channel(w_C, row % C, k < D, 1.0)
        with_x += tl.load(sums + row, mask=k < D, other=0.0).to(tl.float64) * weight
        alone += tl.load(sums + rows + row, mask=k < D, other=0.0).to(tl.float64) * weight
    rstd = tl.load(rstd_G + group).to(tl.float64)
    tl.store(sums + 2 * rows + group, (tl.sum(alone, 0) * rstd / n).to(tl.float32))
    tl.store(sums + 2 * rows + groups + group, (tl.sum(with_x, 0) * rstd * rstd / n).to(tl.float32))


@triton.jit
def backward_kernel(
    dy, x, w_C, b_C, mean_G, rstd_G, dx, centres, slope: tl.float32, groups, rows, S, C, D, KIND: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    row, there, at, exists = _tile(rows, S, BLOCK_R, BLOCK_N)
    mean, _, scale, bias = _numbers(w_C, b_C, mean_G, rstd_G, row, there, C, D)
    shift = tl.load(centres + row // D, mask=there, other=0.0, eviction_policy="evict_last")
    tilt = tl.load(centres + groups + row // D, mask=there, other=0.0, eviction_policy="evict_last")
    value = tl.load(x + at, mask=exists, other=0.0).to(tl.float32)
    g = tl.load(dy + at, mask=exists, other=0.0).to(tl.float32)
    g = _times_slope(g, tl.fma(value - mean, scale, bias), slope, KIND)
    tl.store(dx + at, (scale * g - tl.fma(value - mean, tilt, shift)).to(dx.dtype.element_ty), mask=exists)


def _split(groups: int, size: int) -> tuple[int, int]:
    """(programs that share the statistics of a group of this many elements, columns of their tiles)."""
    columns = min(COLUMNS, max(8, _power(size)))
    return max(1, min(-(-size // columns), -(-PROGRAMS // groups))), columns


def _rows(x, most: int) -> tuple[int, int, int, int]:
    """(rows, their elements, rows and columns of a tile)."""
    N, C, S = x.shape
    block_r, block_n = _blocks(S, most)
    return N * C, S, min(block_r, max(1, _power(N * C))), block_n


def partials(N, C, S, G, last):
    return max(3 * _split(N * G, C // G * S)[0] * N * G, 2 * N * C + 2 * N * G)


def forward(x, weight, bias, y, mean, rstd, partials, eps, kind, slope, last, queue):
    groups, size = mean.numel(), x.numel() // mean.numel()
    Q, columns = _split(groups, size)
    launch(moments_kernel, (Q, groups), x, partials, 1, groups, size, Q, False, 1, columns, num_warps=WARPS)
    launch(
        settle_kernel, (-(-groups // MERGE_C),),
        partials, mean, rstd, None, None, 0.0, eps, Q, groups, MERGE_Q, MERGE_C, num_warps=4
    )  # fmt: skip
    rebuild(x, weight, bias, y, mean, rstd, kind, slope, last, queue)


def rebuild(x, weight, bias, y, mean, rstd, kind, slope, last, queue):
    rows, S, block_r, block_n = _rows(x, 512)
    C, D = x.shape[1], rows // mean.numel()
    launch(
        forward_kernel, (-(-rows // block_r) * -(-S // block_n),),
        x, weight, bias, y, mean, rstd, slope, rows, S, C, D, kind, block_r, block_n, num_warps=WARPS,
        enable_fp_fusion=False
    )  # fmt: skip


def backward(dy, x, weight, bias, mean, rstd, dx, dweight, dbias, partials, kind, slope, last, queue):
    N, C, S = x.shape
    rows, S, block_r, block_n = _rows(x, COLUMNS)
    groups, D = mean.numel(), rows // mean.numel()
    launch(
        sums_kernel, (-(-rows // block_r),),
        dy, x, weight, bias, mean, rstd, partials, slope, rows, S, C, D, kind, block_r, block_n, num_warps=WARPS
    )  # fmt: skip
    if dx is not None:
        launch(
            centre_kernel, (groups,),
            partials, weight, rstd, rows, C, D, float(D * S), min(CHANNELS, _power(D)), num_warps=1
        )  # fmt: skip
        rows, S, block_r, block_n = _rows(x, 512)
        launch(
            backward_kernel, (-(-rows // block_r) * -(-S // block_n),),
            dy, x, weight, bias, mean, rstd, dx, partials[2 * rows :], slope, groups, rows, S, C, D, kind, block_r,
            block_n, num_warps=WARPS
        )  # fmt: skip
    if dweight is not None or dbias is not None:
        launch(finish_kernel, (-(-C // MERGE_C),), partials, dweight, dbias, N, C, MERGE_Q, MERGE_C, num_warps=4)
