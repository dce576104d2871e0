"""Common parts of layer_norm and rms_norm: kernels over the rows of a matrix, and the distribution of its rows.

Letters: R rows, C columns, P rows of partial sums. With CENTER it is layer norm, with a mean; without it, RMS norm,
whose weight is offset + w. Absent tensors are None, and the kernel is compiled without them.

Forward and rebuild: one program per tile of BLOCK_R whole rows, with C padded to the power of two BLOCK_C. The tile
stays in registers between its reductions, so each element is read once, or is read again from the caches where that is
faster. Many small programs in row order keep every multiprocessor loading, reducing and storing at the same time.

Backward adds up parameter gradients: as many programs as fit at once, each over tiles that are one grid apart. The next
tile is loaded to shared memory (`num_stages`) while this one is reduced. The distribution is static, so one shape
always adds in the same order.
"""

import functools
import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .launch import launch

MAX_COLS = 1 << 20  # the kernels have no limit; wider rows than this are not tested


# C is passed as UNIT * units, with UNIT constant. So the compiler knows the alignment of rows and loads whole vectors,
# and does not recompile for every C.
@triton.jit
def _columns(column, C, EVEN: tl.constexpr, BLOCK_C: tl.constexpr):
    """Columns from `column` on, (1, BLOCK_C), and which of them exist: a constant, and so free, if all do."""
    col = column + tl.arange(0, BLOCK_C)[None, :]
    return col, tl.full([1, BLOCK_C], True, tl.int1) if EVEN else col < C


@triton.jit
def _rows(tile, R, BLOCK_R: tl.constexpr):
    """Rows of a tile, (BLOCK_R, 1), and which of them exist."""
    row = tile * BLOCK_R + tl.arange(0, BLOCK_R)[:, None]
    return row, tl.full([1, 1], True, tl.int1) if BLOCK_R == 1 else row < R


@triton.jit
def _tile(tile, column, R, C, EVEN: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    """_rows and _columns of a tile, its first element, and the offsets (BLOCK_R, BLOCK_C) from it."""
    row, exists = _rows(tile, R, BLOCK_R)
    col, in_row = _columns(column, C, EVEN, BLOCK_C)
    return row, exists, col, in_row, tile.to(tl.int64) * BLOCK_R * C, tl.arange(0, BLOCK_R)[:, None] * C + col


@triton.jit
def _load_scale(w_C, offset, col, exists, CENTER: tl.constexpr):
    if w_C is not None:
        w = tl.load(w_C + col, mask=exists, other=0.0, eviction_policy="evict_last").to(tl.float32)
        return w if CENTER else w + offset
    else:
        return 1.0


@triton.jit
def _load_bias(b_C, col, exists):
    if b_C is not None:
        return tl.load(b_C + col, mask=exists, other=0.0, eviction_policy="evict_last").to(tl.float32)
    else:
        return 0.0


@triton.jit
def _mean(sum, C):
    # Rounded as stored: a multiplication by 1 / C could be fused with the following subtraction.
    return tl.div_rn(sum, C.to(tl.float32))


@triton.jit
def _add_pairs(a, b, c, d):
    return a + c, b + d


@triton.jit
def _sum_both(a, b):
    """Row sums of both, (BLOCK_R, 1), with one exchange between the warps."""
    a, b = tl.reduce((a, b), 1, _add_pairs)
    return a[:, None], b[:, None]


@triton.jit
def _normalise(x, mean, rstd, scale, bias, CENTER: tl.constexpr, SCALE: tl.constexpr, BIAS: tl.constexpr):
    """y in float32: the single expression used by forward and rebuild, compiled without further fusing."""
    if not CENTER:
        xhat = x * rstd
        return xhat * scale if SCALE else xhat
    if SCALE and BIAS:
        return tl.fma((x - mean) * rstd, scale, bias)
    if BIAS:
        return tl.fma(x - mean, rstd, bias)
    xhat = (x - mean) * rstd
    return xhat * scale if SCALE else xhat


@triton.jit
def _norm_tile(
    x, w_C, b_C, y_RC, mean_R, rstd_R, eps, offset, C, start, inside, row, exists, col, in_row, CENTER: tl.constexpr
):
    """Stores y, mean and rstd of a tile of whole rows."""
    mean = 0.0
    d = x
    if CENTER:
        mean = _mean(tl.sum(x, 1)[:, None], C)
        d = tl.where(in_row, x - mean, 0.0)
    rstd = tl.div_rn(1.0, tl.sqrt_rn(_mean(tl.sum(d * d, 1)[:, None], C) + eps))
    scale = _load_scale(w_C, offset, col, in_row, CENTER)
    bias = _load_bias(b_C, col, in_row)
    y = _normalise(x, mean, rstd, scale, bias, CENTER, w_C is not None, b_C is not None)
    tl.store(y_RC + start + inside, y.to(y_RC.dtype.element_ty), mask=exists & in_row)
    if mean_R is not None:
        tl.store(mean_R + row, mean, mask=exists)
    if rstd_R is not None:
        tl.store(rstd_R + row, rstd, mask=exists)


@triton.jit(do_not_specialize=["R", "units"])
def forward_kernel(
    x_RC, w_C, b_C, y_RC, mean_R, rstd_R, eps: tl.float32, offset: tl.float32, R, units,
    CENTER: tl.constexpr, UNIT: tl.constexpr, EVEN: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    C = units * UNIT
    row, exists, col, in_row, start, inside = _tile(tl.program_id(0), 0, R, C, EVEN, BLOCK_R, BLOCK_C)
    x = tl.load(x_RC + start + inside, mask=exists & in_row, other=0.0).to(tl.float32)
    _norm_tile(x, w_C, b_C, y_RC, mean_R, rstd_R, eps, offset, C, start, inside, row, exists, col, in_row, CENTER)


@triton.jit(do_not_specialize=["units"])
def forward_wide_kernel(
    x_RC, w_C, b_C, y_RC, mean_R, rstd_R, eps: tl.float32, offset: tl.float32, units,
    CENTER: tl.constexpr, UNIT: tl.constexpr, EVEN: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Forward of one row, read from memory and then from the caches."""
    C = units * UNIT
    row = tl.program_id(0)
    x_RC += row.to(tl.int64) * C
    y_RC += row.to(tl.int64) * C
    mean = 0.0
    if CENTER:
        total = tl.zeros([1, BLOCK_C], tl.float32)
        for column in tl.range(0, C, BLOCK_C):
            col, in_row = _columns(column, C, EVEN, BLOCK_C)
            total += tl.load(x_RC + col, mask=in_row, other=0.0, eviction_policy="evict_last").to(tl.float32)
        mean = _mean(tl.sum(total), C)
    total = tl.zeros([1, BLOCK_C], tl.float32)
    for column in tl.range(0, C, BLOCK_C):
        col, in_row = _columns(column, C, EVEN, BLOCK_C)
        x = tl.load(x_RC + col, mask=in_row, other=0.0, eviction_policy="evict_last").to(tl.float32)
        d = tl.where(in_row, x - mean, 0.0) if CENTER else x
        total += d * d
    rstd = tl.div_rn(1.0, tl.sqrt_rn(_mean(tl.sum(total), C) + eps))
    if mean_R is not None:
        tl.store(mean_R + row, mean)
    if rstd_R is not None:
        tl.store(rstd_R + row, rstd)
    for column in tl.range(0, C, BLOCK_C):
        col, in_row = _columns(column, C, EVEN, BLOCK_C)
        x = tl.load(x_RC + col, mask=in_row, other=0.0, eviction_policy="evict_first").to(tl.float32)
        scale = _load_scale(w_C, offset, col, in_row, CENTER)
        bias = _load_bias(b_C, col, in_row)
        y = _normalise(x, mean, rstd, scale, bias, CENTER, w_C is not None, b_C is not None)
        tl.store(y_RC + col, y.to(y_RC.dtype.element_ty), mask=in_row)


@triton.jit(do_not_specialize=["R", "units"])
def rebuild_kernel(
    x_RC, w_C, b_C, mean_R, rstd_R, y_RC, offset: tl.float32, R, units,
    CENTER: tl.constexpr, UNIT: tl.constexpr, EVEN: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    C = units * UNIT
    # Column blocks of a tile before the next tile: programs in memory order.
    blocks = tl.cdiv(C, BLOCK_C)
    tile, column = tl.program_id(0) // blocks, tl.program_id(0) % blocks * BLOCK_C
    row, exists, col, in_row, start, inside = _tile(tile, column, R, C, EVEN, BLOCK_R, BLOCK_C)
    x = tl.load(x_RC + start + inside, mask=exists & in_row, other=0.0, eviction_policy="evict_first").to(tl.float32)
    mean = tl.load(mean_R + row, mask=exists, other=0.0) if CENTER else 0.0
    rstd = tl.load(rstd_R + row, mask=exists, other=0.0)
    scale = _load_scale(w_C, offset, col, in_row, CENTER)
    bias = _load_bias(b_C, col, in_row)
    y = _normalise(x, mean, rstd, scale, bias, CENTER, w_C is not None, b_C is not None)
    tl.store(y_RC + start + inside, y.to(y_RC.dtype.element_ty), mask=exists & in_row)


# With dx_RC, column blocks are whole rows; without, axis 1 of the grid is the column blocks.
@triton.jit(do_not_specialize=["R", "units"])
def backward_kernel(
    dy_RC, x_RC, w_C, mean_R, rstd_R, dx_RC, sums_2PC, offset: tl.float32, R, units,
    CENTER: tl.constexpr, DW: tl.constexpr, DB: tl.constexpr, UNIT: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dx, and in row p of sums_2PC the contribution of the rows of program p to dweight and dbias."""
    C = units * UNIT
    p = tl.program_id(0)
    P = tl.num_programs(0)
    col, in_row = _columns(tl.program_id(1) * BLOCK_C, C, EVEN, BLOCK_C)
    inside = tl.arange(0, BLOCK_R)[:, None] * C + col
    if dx_RC is not None:
        scale = _load_scale(w_C, offset, col, in_row, CENTER)
    dw = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
    db = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
    for tile in tl.range(p, tl.cdiv(R, BLOCK_R), P, num_stages=STAGES):
        start = tl.cast(tile, tl.int64) * BLOCK_R * C
        row, exists = _rows(tile, R, BLOCK_R)
        x = tl.load(x_RC + start + inside, mask=exists & in_row, other=0.0).to(tl.float32)
        dy = tl.load(dy_RC + start + inside, mask=exists & in_row, other=0.0).to(tl.float32)
        mean = tl.load(mean_R + row, mask=exists, other=0.0) if CENTER else 0.0
        rstd = tl.load(rstd_R + row, mask=exists, other=0.0)
        xhat = (x - mean) * rstd
        if DW:
            dw = tl.fma(dy, xhat, dw)
        if DB:
            db += dy
        if dx_RC is not None:
            g = dy * scale
            if CENTER:
                g_xhat, g_alone = _sum_both(g * xhat, g)
                dx = g - xhat * _mean(g_xhat, C) - _mean(g_alone, C)
            else:
                dx = g - xhat * _mean(tl.sum(g * xhat, 1)[:, None], C)
            tl.store(dx_RC + start + inside, (dx * rstd).to(dx_RC.dtype.element_ty), mask=exists & in_row)
    if DW:
        tl.store(sums_2PC + p.to(tl.int64) * C + col, tl.sum(dw, 0)[None, :], mask=in_row)
    if DB:
        tl.store(sums_2PC + (p + P).to(tl.int64) * C + col, tl.sum(db, 0)[None, :], mask=in_row)


@triton.jit(do_not_specialize=["units"])
def backward_wide_kernel(
    dy_RC, x_RC, w_C, mean_R, rstd_R, dx_RC, offset: tl.float32, units,
    CENTER: tl.constexpr, UNIT: tl.constexpr, EVEN: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """dx of one wide row; its parameter gradients are left to backward_kernel."""
    C = units * UNIT
    row = tl.program_id(0)
    dy_RC += row.to(tl.int64) * C
    x_RC += row.to(tl.int64) * C
    dx_RC += row.to(tl.int64) * C
    mean = tl.load(mean_R + row) if CENTER else 0.0
    rstd = tl.load(rstd_R + row)
    g_xhat = tl.zeros([1, BLOCK_C], tl.float32)
    g_alone = tl.zeros([1, BLOCK_C], tl.float32)
    for column in tl.range(0, C, BLOCK_C, loop_unroll_factor=2):
        col, in_row = _columns(column, C, EVEN, BLOCK_C)
        x = tl.load(x_RC + col, mask=in_row, other=0.0).to(tl.float32)
        g = tl.load(dy_RC + col, mask=in_row, other=0.0).to(tl.float32)
        g *= _load_scale(w_C, offset, col, in_row, CENTER)
        g_xhat = tl.fma(g, (x - mean) * rstd, g_xhat)
        if CENTER:
            g_alone += g
    if CENTER:
        slope, shift = _sum_both(g_xhat, g_alone)
        shift = _mean(shift, C)
    else:
        slope = tl.sum(g_xhat, 1)[:, None]
        shift = 0.0
    slope = _mean(slope, C)
    for column in tl.range(0, C, BLOCK_C):
        col, in_row = _columns(column, C, EVEN, BLOCK_C)
        x = tl.load(x_RC + col, mask=in_row, other=0.0).to(tl.float32)
        g = tl.load(dy_RC + col, mask=in_row, other=0.0).to(tl.float32)
        g *= _load_scale(w_C, offset, col, in_row, CENTER)
        dx = (g - (x - mean) * rstd * slope - shift) * rstd
        tl.store(dx_RC + col, dx.to(dx_RC.dtype.element_ty), mask=in_row)


@triton.jit(do_not_specialize=["P", "planes", "C"])
def sum_kernel(sums_2PC, dw_C, db_C, P, planes, C, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr):
    """Sums partial rows to dweight (plane 0) or dbias (plane 1), in order, and casts to the parameter's dtype."""
    plane = tl.program_id(1)
    if dw_C is None:
        plane += 1
    col = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    sums_2PC += plane * planes * C.to(tl.int64)
    total = tl.zeros([BLOCK_P, BLOCK_C], tl.float32)
    for first in tl.range(0, P, BLOCK_P):
        p = first + tl.arange(0, BLOCK_P)[:, None]
        total += tl.load(sums_2PC + p * C.to(tl.int64) + col, mask=(p < P) & (col < C), other=0.0)
    sum = tl.sum(total, 0)
    if dw_C is not None:
        tl.store(dw_C + col, sum.to(dw_C.dtype.element_ty), mask=(col < C) & (plane == 0))
    if db_C is not None:
        tl.store(db_C + col, sum.to(db_C.dtype.element_ty), mask=(col < C) & (plane == 1))


class Plan(NamedTuple):
    """The tiles for one C."""

    wide: bool  # block_c columns of a row at a time
    rows: int
    block_c: int
    warps: int
    stages: int  # tiles in flight, including the one being reduced
    programs: int  # per multiprocessor
    blocks: int  # of columns
    even: bool  # cols == blocks * block_c
    unit: int
    units: int


# (columns up to, elements of a tile, warps[, stages, programs per multiprocessor]) for 16 bits, as measured on an H200;
# forward uses more warps for wider dtypes. Rows wider than their tile, or than a table's last line, are processed in
# blocks. A backward program keeps its sums for dweight and dbias in registers: as many run as fit at once.
FORWARD = {  # by CENTER
    True: ((2048, 2048, 2), (4096, 4096, 4), (8192, 8192, 4), (16384, 4096, 16), (8192, 8192, 32)),
    False: ((1024, 2048, 2), (2048, 1024, 4), (4096, 2048, 8), (16384, 4096, 16), (8192, 8192, 32)),
}
BACKWARD = {
    CENTER: ((2048, 2048, 4, 3, 4), (4096, 4096, 8, 3, 2), (8192, 8192, 32, 4 if CENTER else 3, 1), (4096, 4096, 32))
    for CENTER in (True, False)
}
REBUILD = ((2048, 2048, 4),)  # no row is needed whole
COLUMNS = ((1024, 2048, 4, 2, 8),)  # only parameter gradients
SUM_P, SUM_C = (8, 4096) if triton.knobs.runtime.interpret else (256, 16)  # a tile of partial sums


@functools.cache
def plan_for(cols, table):
    padded = max(16, triton.next_power_of_2(cols))
    limit, tile, warps, *rest = next((line for line in table if padded <= line[0]), table[-1])
    block_c = min(padded, limit, tile)
    unit, blocks = math.gcd(cols, 16), triton.cdiv(cols, block_c)
    rows, even = max(1, tile // block_c), cols % block_c == 0
    return Plan(padded > block_c, rows, block_c, warps, *(rest or (1, 0)), blocks, even, unit, cols // unit)


@functools.cache
def device():
    """Number of multiprocessors, and bytes of shared memory of each."""
    if triton.knobs.runtime.interpret:
        return 1, 1 << 17
    found = torch.cuda.get_device_properties(torch.cuda.current_device())
    return found.multi_processor_count, found.shared_memory_per_multiprocessor


def _programs(plan, rows):
    """The number of programs that share the rows, at most the number of tiles."""
    return min(-(-rows // plan.rows), max(1, device()[0] * plan.programs // plan.blocks))


def _registers(plan):
    """Maximum registers per thread, so that all programs of a multiprocessor fit into its 65536."""
    return min(255, 65536 // (32 * plan.warps * plan.programs)) // 8 * 8


def _stages(plan, dy, x):
    """Stages as planned for 16 bits and 228 KiB of shared memory, or as many as fit."""
    tile = plan.rows * plan.block_c * (dy.element_size() + x.element_size())
    return max(2, min(plan.stages, device()[1] // (plan.programs * tile)))


def partials(rows, cols):
    plan = plan_for(cols, BACKWARD[True])  # or False: only the tiles in flight differ, not the distribution of rows
    return _programs(plan_for(cols, COLUMNS) if plan.wide else plan, rows)


def forward(x, weight, bias, y, mean, rstd, eps, offset, center):
    R, C = x.shape
    if R == 0:
        return
    plan = plan_for(C, FORWARD[center])
    if plan.wide:
        launch(
            forward_wide_kernel, (R,), x, weight, bias, y, mean, rstd, eps, offset, plan.units, center, plan.unit,
            plan.even, plan.block_c, num_warps=plan.warps, enable_fp_fusion=False,
        )  # fmt: skip
    else:
        launch(
            forward_kernel, (-(-R // plan.rows),), x, weight, bias, y, mean, rstd, eps, offset, R, plan.units, center,
            plan.unit, plan.even, plan.rows, plan.block_c, num_warps=plan.warps * x.element_size() // 2,
            enable_fp_fusion=False,
        )  # fmt: skip


def rebuild(x, weight, bias, mean, rstd, y, offset, center):
    R, C = x.shape
    plan = plan_for(C, REBUILD)
    if R:
        launch(
            rebuild_kernel, (-(-R // plan.rows) * plan.blocks,), x, weight, bias, mean, rstd, y, offset, R, plan.units,
            center, plan.unit, plan.even, plan.rows, plan.block_c, num_warps=plan.warps, enable_fp_fusion=False,
        )  # fmt: skip


def backward(dy, x, weight, mean, rstd, dx, dweight, dbias, sums, offset, center):
    (R, C), dw, db = x.shape, dweight is not None, dbias is not None
    plan = plan_for(C, BACKWARD[center])
    if dx is not None and plan.wide and R:
        launch(
            backward_wide_kernel, (R,), dy, x, weight, mean, rstd, dx, offset, plan.units, center, plan.unit, plan.even,
            plan.block_c, num_warps=plan.warps,
        )  # fmt: skip
        dx = None
    if dx is None:
        plan = plan_for(C, COLUMNS)
    if R and (dw or db or dx is not None):
        P = sums.shape[1] if dw or db else _programs(plan, R)
        launch(
            backward_kernel, (P, plan.blocks), dy, x, weight, mean, rstd, dx, sums, offset, R, plan.units, center, dw,
            db, plan.unit, plan.even, plan.rows, plan.block_c, _stages(plan, dy, x), num_warps=plan.warps,
            maxnreg=None if dx is None else _registers(plan),
        )  # fmt: skip
    if dw or db:
        P, grid = sums.shape[1], (-(-C // SUM_C), dw + db)
        launch(sum_kernel, grid, sums, dweight, dbias, P if R else 0, P, C, SUM_P, SUM_C, num_warps=8)
