"""Log-probabilities of rows of logits; csrc/log_probs.h has the contract, logits.py the arithmetic.

    mean = m + sum_c e_c (z_c - m) / s,   e_c = exp(z_c - m),   s = sum_c e_c

where a new maximum n changes the sum of a lane, v, to exp(m - n) (v + s (m - n)).

Letters: R rows, C columns, T rows of a tile; forward processes one row in blocks of G groups of L lanes.

The functions of columns take transposed logits, x_CR: token r has column r. A program has L columns and processes G
lines of D rows at a time; S programs share the height. A thread stays in the columns of one vector, so it has its own
maxima and sums until the end.
"""

import functools
import math
from typing import NamedTuple

import triton
import triton.language as tl

from . import rows
from .launch import launch
from .logits import LOWEST, add_block, add_lanes, block_of_tile, columns, exp, logits, plan_for, split

# (columns up to, elements of a tile, warps). Rows wider than the last line are processed in blocks of its tile.
FORWARD = ((1024, 1024, 2), (8192, 8192, 8))
BACKWARD = ((4096, 4096, 4),)
# (R up to, maximum lanes of R, 16-byte vectors that a thread loads at a time, warps, stages, n). n: in forward the
# programs per multiprocessor, in backward the steps of a program. The last line is also used for more tokens. With one
# stage, forward loads one tile ahead in registers; with none, no tile; with more, both use shared memory.
COLUMNS_FORWARD = ((512, 256, 4, 8, 1, 3), (1 << 30, 512, 4, 4, 1, 8))
COLUMNS_BACKWARD = ((1 << 30, 256, 4, 4, 3, 8),)
SPLITS = (128, 32)  # a tile of partial sums: splits, tokens


@triton.jit
def _bounded(d):
    """d <= 0 with -inf replaced, for products with exp(d), which is 0 there. NaN stays."""
    return tl.where(d < -128.0, -128.0, d)


@triton.jit
def _add(
    m_L, s_L, v_L, x_C, column, C, scale, softcap,
    MEAN: tl.constexpr, SCALED: tl.constexpr, CAPPED: tl.constexpr, CHEAP: tl.constexpr,
    EVEN: tl.constexpr, G: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    """Maximum, sum of e and sum of e (z - m) of each lane, with the block of columns from `column` on added."""
    col, in_row = columns(column, C, EVEN, L, G)
    x = tl.load(x_C + col, mask=in_row, other=0.0, eviction_policy="evict_first").to(tl.float32)
    z, _ = logits(x, scale, softcap, SCALED, CAPPED, CHEAP)
    z = z if EVEN else tl.where(in_row, z, float("-inf"))
    new_L = tl.maximum(m_L, tl.max(z, 0))
    d = z - new_L[None, :]
    e = exp(d, CHEAP)
    shift_L = _bounded(m_L - new_L)
    factor_L = exp(shift_L, CHEAP)
    if MEAN:
        v_L = factor_L * tl.fma(s_L, shift_L, v_L) + tl.sum(e * _bounded(d), 0)
    return new_L, s_L * factor_L + tl.sum(e, 0), v_L


@triton.jit(do_not_specialize=["units"])
def forward_kernel(
    x_RC, target_R, picked_R, lse_R, mean_R, scale: tl.float32, softcap: tl.float32, units,
    SCALED: tl.constexpr, CAPPED: tl.constexpr, CHEAP: tl.constexpr,
    UNIT: tl.constexpr, G: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    """One row, read once."""
    C = units * UNIT
    row = tl.program_id(0)
    x_RC += row.to(tl.int64) * C
    t = tl.load(target_R + row)
    valid = (t >= 0) & (t < C)
    picked, _ = logits(
        tl.load(x_RC + t, mask=valid, other=0.0).to(tl.float32), scale, softcap, SCALED, CAPPED, CHEAP
    )  # fmt: skip
    tl.store(picked_R + row, tl.where(valid, picked, 0.0))

    MEAN: tl.constexpr = mean_R is not None
    even = C // (G * L) * (G * L)
    m_L = tl.full([L], LOWEST, tl.float32)
    s_L, v_L = tl.zeros([L], tl.float32), tl.zeros([L], tl.float32)
    for column in tl.range(0, even, G * L):
        m_L, s_L, v_L = _add(
            m_L, s_L, v_L, x_RC, column, C, scale, softcap, MEAN, SCALED, CAPPED, CHEAP, True, G, L
        )  # fmt: skip
    if even < C:
        m_L, s_L, v_L = _add(
            m_L, s_L, v_L, x_RC, even, C, scale, softcap, MEAN, SCALED, CAPPED, CHEAP, False, G, L
        )  # fmt: skip
    m = tl.max(m_L, 0)
    shift_L = _bounded(m_L - m)
    factor_L = exp(shift_L, CHEAP)
    s = tl.sum(s_L * factor_L, 0)
    tl.store(lse_R + row, m.to(tl.float64) + tl.log(s.to(tl.float64)))
    if MEAN:
        tl.store(mean_R + row, m + tl.div_rn(tl.sum(factor_L * tl.fma(s_L, shift_L, v_L), 0), s))


@triton.jit(do_not_specialize=["R", "units"])
def backward_kernel(
    x_RC, target_R, lse_R, a_R, b_R, t_R, dx_RC, scale: tl.float32, softcap: tl.float32, R, units,
    SCALED: tl.constexpr, CAPPED: tl.constexpr, CHEAP: tl.constexpr,
    UNIT: tl.constexpr, T: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    C = units * UNIT
    row, exists, col, in_row, start, inside = block_of_tile(tl.program_id(0), R, C, T, BLOCK_C)
    x = tl.load(x_RC + start + inside, mask=exists & in_row, other=0.0).to(tl.float32)
    given = tl.load(target_R + row, mask=exists, other=-1)
    target = tl.where((given >= 0) & (given < C), given, -1).to(tl.int32)
    near, rest = split(tl.load(lse_R + row, mask=exists, other=0.0))
    slope = tl.load(a_R + row, mask=exists, other=0.0)
    own = tl.load(t_R + row, mask=exists, other=0.0)
    z, dz = logits(x, scale, softcap, SCALED, CAPPED, CHEAP)
    p = exp(z - near, CHEAP) * rest
    if b_R is not None:
        b = tl.load(b_R + row, mask=exists, other=0.0)
        # A logit of -inf is excluded, because -inf * 0 would be NaN.
        slope = tl.fma(b, tl.where(p == 0.0, 0.0, z), slope)
    dx = tl.fma(p, slope, tl.where(col == target, own, 0.0)) * dz
    tl.store(dx_RC + start + inside, dx.to(dx_RC.dtype.element_ty), mask=exists & in_row)


@triton.jit
def _lanes(block, R, D: tl.constexpr, L: tl.constexpr):
    """For the lanes of a program, D rows of L columns in one line: the row, the column, and whether it exists."""
    lane = tl.arange(0, D * L)[None, :]
    r = block * L + lane % L
    return lane // L, r, r < R


@triton.jit(do_not_specialize=["C", "S", "units"])
def forward_columns_kernel(
    x_CR, partials_2SR, scale: tl.float32, softcap: tl.float32, C, S, units,
    SCALED: tl.constexpr, CAPPED: tl.constexpr, CHEAP: tl.constexpr,
    UNIT: tl.constexpr, G: tl.constexpr, D: tl.constexpr, L: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Maximum and sum of exponentials of L columns over every S-th tile of G * D rows."""
    R = units * UNIT
    blocks = tl.cdiv(R, L)
    part = tl.program_id(0) // blocks
    block = tl.program_id(0) % blocks
    row, r, exists = _lanes(block, R, D, L)
    row += tl.arange(0, G)[:, None] * D
    inside = row * R + r
    tiles = C // (G * D)
    m_L = tl.full([D * L], LOWEST, tl.float32)
    s_L = tl.zeros([D * L], tl.float32)
    if STAGES == 1:
        # One tile ahead in registers: its loads run while the previous one is added.
        start = tl.cast(part, tl.int64) * (G * D) * R
        ahead = tl.load(
            x_CR + start + inside, mask=exists & (part < tiles), other=0.0, eviction_policy="evict_first"
        )  # fmt: skip
        for tile in tl.range(part + S, tiles + S, S):
            x = ahead.to(tl.float32)
            start = tl.cast(tile, tl.int64) * (G * D) * R
            ahead = tl.load(
                x_CR + start + inside, mask=exists & (tile < tiles), other=0.0, eviction_policy="evict_first"
            )  # fmt: skip
            z, _ = logits(x, scale, softcap, SCALED, CAPPED, CHEAP)
            m_L, s_L = add_block(m_L, s_L, z, CHEAP)
    else:
        for tile in tl.range(part, tiles, S, num_stages=STAGES):
            start = tl.cast(tile, tl.int64) * (G * D) * R
            x = tl.load(x_CR + start + inside, mask=exists, other=0.0, eviction_policy="evict_first").to(tl.float32)
            z, _ = logits(x, scale, softcap, SCALED, CAPPED, CHEAP)
            m_L, s_L = add_block(m_L, s_L, z, CHEAP)
    if (tiles * (G * D) < C) & (tiles % S == part):
        start = tl.cast(tiles, tl.int64) * (G * D) * R
        below = tiles * (G * D) + row < C
        x = tl.load(x_CR + start + inside, mask=exists & below, other=0.0).to(tl.float32)
        z, _ = logits(x, scale, softcap, SCALED, CAPPED, CHEAP)
        m_L, s_L = add_block(m_L, s_L, tl.where(below, z, float("-inf")), CHEAP)
    m_L, s_L = add_lanes(tl.reshape(m_L, [D, L]), tl.reshape(s_L, [D, L]), CHEAP)
    r = block * L + tl.arange(0, L)
    partials_2SR += part.to(tl.int64) * R
    tl.store(partials_2SR + r, m_L, mask=r < R)
    tl.store(partials_2SR + S.to(tl.int64) * R + r, s_L, mask=r < R)


@triton.jit(do_not_specialize=["C", "S", "R"])
def add_splits_kernel(
    x_CR, target_R, partials_2SR, picked_R, lse_R, scale: tl.float32, softcap: tl.float32, C, S, R,
    SCALED: tl.constexpr, CAPPED: tl.constexpr, CHEAP: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    exists = r < R
    t = tl.load(target_R + r, mask=exists, other=-1)
    valid = (t >= 0) & (t < C)
    x = tl.load(x_CR + tl.where(valid, t, 0) * R + r, mask=valid, other=0.0).to(tl.float32)
    picked, _ = logits(x, scale, softcap, SCALED, CAPPED, CHEAP)
    tl.store(picked_R + r, tl.where(valid, picked, 0.0), mask=exists)
    m = tl.full([BLOCK_R], LOWEST, tl.float32)
    s = tl.zeros([BLOCK_R], tl.float32)
    for first in tl.range(0, S, BLOCK_S):
        part = first + tl.arange(0, BLOCK_S)[:, None]
        at = part.to(tl.int64) * R + r[None, :]
        m_part = tl.load(partials_2SR + at, mask=(part < S) & exists[None, :], other=LOWEST)
        s_part = tl.load(partials_2SR + S.to(tl.int64) * R + at, mask=(part < S) & exists[None, :], other=0.0)
        new = tl.maximum(m, tl.max(m_part, 0))
        s = s * exp(m - new, False) + tl.sum(s_part * exp(m_part - new[None, :], False), 0)
        m = new
    tl.store(lse_R + r, m.to(tl.float64) + tl.log(s.to(tl.float64)), mask=exists)


@triton.jit(do_not_specialize=["C", "units"])
def backward_columns_kernel(
    x_CR, target_R, lse_R, a_R, t_R, dx_CR, scale: tl.float32, softcap: tl.float32, C, units,
    SCALED: tl.constexpr, CAPPED: tl.constexpr, CHEAP: tl.constexpr,
    UNIT: tl.constexpr, G: tl.constexpr, D: tl.constexpr, L: tl.constexpr, STAGES: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """L columns of STEPS tiles of G * D rows, with programs in memory order."""
    R = units * UNIT
    blocks = tl.cdiv(R, L)
    row, r, exists = _lanes(tl.program_id(0) % blocks, R, D, L)
    given = tl.load(target_R + r, mask=exists, other=-1)
    target = tl.where((given >= 0) & (given < C), given, -1).to(tl.int32)
    near, rest = split(tl.load(lse_R + r, mask=exists, other=0.0))
    slope = tl.load(a_R + r, mask=exists, other=0.0) * rest
    own = tl.load(t_R + r, mask=exists, other=0.0)
    row += tl.arange(0, G)[:, None] * D
    inside = row * R + r
    first = tl.program_id(0) // blocks * (G * D * STEPS)
    for c in tl.range(first, tl.minimum(first + G * D * STEPS, C), G * D, num_stages=STAGES):
        start = tl.cast(c, tl.int64) * R
        mask = exists & (c + row < C)
        x = tl.load(x_CR + start + inside, mask=mask, other=0.0).to(tl.float32)
        z, dz = logits(x, scale, softcap, SCALED, CAPPED, CHEAP)
        dx = tl.fma(exp(z - near, CHEAP), slope, tl.where(c + row == target, own, 0.0)) * dz
        tl.store(dx_CR + start + inside, dx.to(dx_CR.dtype.element_ty), mask=mask)


def _options(x, logit_scale, softcap):
    scale = logit_scale / softcap if softcap else logit_scale
    return (scale, softcap), (not softcap and scale != 1, softcap != 0, x.element_size() == 2)


def forward(x, target, picked, lse, mean, logit_scale, softcap, queue):
    R, C = x.shape
    if R == 0 or C == 0:
        return
    numbers, flags = _options(x, logit_scale, softcap)
    plan = plan_for(C, x.element_size(), FORWARD, rows=False)
    launch(
        forward_kernel, (R,),
        x, target, picked, lse, mean, *numbers, plan.units, *flags, plan.unit, plan.groups, plan.lanes,
        num_warps=plan.warps, enable_fp_fusion=False,
    )  # fmt: skip


def backward(x, target, lse, a, b, t, dx, logit_scale, softcap, queue):
    R, C = x.shape
    if R == 0 or C == 0:
        return
    numbers, flags = _options(x, logit_scale, softcap)
    plan = plan_for(C, x.element_size(), BACKWARD)
    launch(
        backward_kernel, (-(-R // plan.rows) * plan.blocks,),
        x, target, lse, a, b, t, dx, *numbers, R, plan.units, *flags, plan.unit, plan.rows, plan.block,
        num_warps=plan.warps, enable_fp_fusion=False,
    )  # fmt: skip


class ColumnPlan(NamedTuple):
    """How R columns of tokens are distributed, and the height of a tile, G * D rows."""

    stages: int
    n: int  # programs per multiprocessor, or steps of a program
    warps: int
    blocks: int  # of columns
    height: int
    constants: tuple  # UNIT, G, D, L
    units: int


@functools.cache
def columns_plan(R, size, table):
    """The plan for R columns of elements of `size` bytes."""
    _, most, vectors, warps, stages, n = next((line for line in table if line[0] >= R), table[-1])
    unit = math.gcd(R, 16)
    # As in plan_for: a thread's vector has 16 bytes, or less for lower alignment of rows; then there are more vectors.
    vector = min(unit, 16 // size)
    lanes = min(triton.next_power_of_2(R), most, 32 * warps * vector)
    depth = 32 * warps * vector // lanes
    groups = vectors * min(4, 16 // size // vector)
    return ColumnPlan(
        stages, n, warps, -(-R // lanes), groups * depth, (unit, groups, depth, lanes), R // unit
    )  # fmt: skip


def column_splits(C, R):
    """The number of programs that share the height of the columns of x_CR: partials for forward_columns are (2, S,
    R)."""
    if R == 0 or C == 0:
        return 0
    plan = columns_plan(R, 2, COLUMNS_FORWARD)
    return max(1, min(rows.device()[0] * plan.n // plan.blocks, -(-C // plan.height)))


def forward_columns(x, target, partials, picked, lse, logit_scale, softcap, queue):
    C, R = x.shape
    if R == 0 or C == 0:
        return
    numbers, flags = _options(x, logit_scale, softcap)
    plan, S = columns_plan(R, x.element_size(), COLUMNS_FORWARD), partials.shape[1]
    launch(
        forward_columns_kernel, (S * plan.blocks,),
        x, partials, *numbers, C, S, plan.units, *flags, *plan.constants, plan.stages,
        num_warps=plan.warps, enable_fp_fusion=False,
    )  # fmt: skip
    launch(
        add_splits_kernel, (-(-R // SPLITS[1]),),
        x, target, partials, picked, lse, *numbers, C, S, R, *flags, *SPLITS, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


def backward_columns(x, target, lse, a, t, dx, logit_scale, softcap, queue):
    C, R = x.shape
    if R == 0 or C == 0:
        return
    numbers, flags = _options(x, logit_scale, softcap)
    plan = columns_plan(R, x.element_size(), COLUMNS_BACKWARD)
    launch(
        backward_columns_kernel, (-(-C // (plan.height * plan.n)) * plan.blocks,),
        x, target, lse, a, t, dx, *numbers, C, plan.units, *flags, *plan.constants, plan.stages, plan.n,
        num_warps=plan.warps, enable_fp_fusion=False,
    )  # fmt: skip
