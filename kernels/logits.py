"""Common parts of softmax and the losses over logits: exponentials, their sums in one pass, and the distribution of
rows.

Letters: R rows, C columns. A row that fits is one line of a tile of whole rows, read once. A wider row has its own
program and is read in blocks of G groups of L lanes. Every lane keeps its own maximum and its own sum of exponentials,
and updates the maximum once per G columns. So a column costs one exponential and no exchange between threads.
"""

import functools
import math
from typing import NamedTuple

import triton
import triton.language as tl

from .launch import launch

MAX_COLS = 1 << 20  # the kernels have no limit; wider rows than this are not tested

# The initial value of the online maximum. It is finite, so no infinity is subtracted from itself in a row that begins
# with -inf. Only -inf is smaller.
LOWEST = tl.constexpr(-3.4028234663852886e38)


# For the interpreter: numpy's exponential is exact, and the interpreter's fma, which the one below needs, rounds twice.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def columns(column, C, EVEN: tl.constexpr, L: tl.constexpr, G: tl.constexpr):
    """Columns from `column` on, (G, L), and which of them exist: a constant, and so free, if all do."""
    col = column + tl.arange(0, G)[:, None] * L + tl.arange(0, L)[None, :]
    return col, tl.full([1, 1], True, tl.int1) if EVEN else col < C


@triton.jit
def tile_at(tile, column, R, C, T: tl.constexpr, BLOCK_C: tl.constexpr):
    """For a tile of T rows, columns from `column` on: the rows (T, 1) and which of them exist, the columns (1, BLOCK_C)
    and which of them exist, the first element of the tile, and the offsets from it."""
    row = tile * T + tl.arange(0, T)[:, None]
    col, in_row = columns(column, C, False, BLOCK_C, 1)
    return row, row < R, col, in_row, tile.to(tl.int64) * T * C, tl.arange(0, T)[:, None] * C + col


@triton.jit
def block_of_tile(program, R, C, T: tl.constexpr, BLOCK_C: tl.constexpr):
    """`tile_at` for programs with one block of columns: blocks of a tile come before the next tile, in memory order."""
    blocks = tl.cdiv(C, BLOCK_C)
    return tile_at(program // blocks, program % blocks * BLOCK_C, R, C, T, BLOCK_C)


@triton.jit
def exp(z, CHEAP: tl.constexpr):
    """exp(z) of float32. The cheap version, for 16 bits, has a relative error that grows by |z| half ulps."""
    if INTERPRETED:
        return tl.exp(z)
    elif CHEAP:
        return tl.exp2(z * 1.4426950408889634)
    else:
        # The hardware's exp2 is off by two ulps. 2^n exp(r) with |r| <= log(2) / 2 is exact and reaches 88; subnormal
        # results become 0. Adding 1.5 * 2^23 leaves the nearest integer in the low bits.
        shifted = tl.fma(z, 1.44269504, 12582912.0)
        n = shifted - 12582912.0
        r = tl.fma(n, 2.12194440e-4, tl.fma(n, -0.693359375, z))  # log(2) in two parts
        tail = tl.fma(tl.fma(0.00139504857, r, 0.00836888794), r, 0.041666206)
        tail = tl.fma(tl.fma(tail, r, 0.166665182), r, 0.5)
        power = ((shifted.to(tl.int32, bitcast=True) + 127) << 23).to(tl.float32, bitcast=True)
        return tl.where(z < -87.0, 0.0, (tl.fma(tail, r * r, r) + 1.0) * power)


@triton.jit
def split(lse):
    """A float64 lse in float32 parts: exp(z - lse) = exp(z - near) * rest."""
    near = lse.to(tl.float32)
    return near, 1.0 - (lse - near.to(tl.float64)).to(tl.float32)


@triton.jit
def _tanh(u, CHEAP: tl.constexpr):
    """tanh(u), and its derivative without the cancellation of 1 - tanh(u)^2."""
    a = tl.abs(u)
    e = tl.exp2(a * -2.8853900817779268)
    if CHEAP:
        # A division scales its arguments first; a reciprocal root and a square are two instructions.
        r = tl.rsqrt(1.0 + e)
        r = r * r
    else:
        r = 1.0 / (1.0 + e)
    large = tl.fma(-2.0 * e, r, 1.0)
    # Near 0, where that cancels, an odd polynomial: a minimax fit with a relative error of 3e-9.
    v = u * u
    poly = tl.fma(v, -0.00589515034, 0.0207959646)
    poly = tl.fma(v, poly, -0.053783828)
    poly = tl.fma(v, poly, 0.133319241)
    poly = tl.fma(v, poly, -0.33333298)
    small = tl.fma(u * v, poly, u)
    return tl.where(a < 0.6, small, tl.where(u < 0, -large, large)), 4.0 * e * r * r


@triton.jit
def logits(x, scale, softcap, SCALED: tl.constexpr, CAPPED: tl.constexpr, CHEAP: tl.constexpr):
    """z of csrc/cross_entropy.h and dz/dx. `scale` is logit_scale, divided by softcap if there is one."""
    if CAPPED:
        t, slope = _tanh(x * scale, CHEAP)
        return t * softcap, slope * (scale * softcap)
    elif SCALED:
        return x * scale, scale
    else:
        return x, 1.0


@triton.jit
def add_block(m_L, s_L, z_GL, CHEAP: tl.constexpr):
    """Maximum and sum of exponentials of each lane, with a block of columns added."""
    new_L = tl.maximum(m_L, tl.max(z_GL, 0))
    s_L = s_L * exp(m_L - new_L, CHEAP) + tl.sum(exp(z_GL - new_L[None, :], CHEAP), 0)
    return new_L, s_L


@triton.jit
def add_lanes(m_L, s_L, CHEAP: tl.constexpr):
    """Maximum and sum of exponentials of the row. If all are -inf, the sum is 0, whose logarithm is -inf."""
    m = tl.max(m_L, 0)
    return m, tl.sum(s_L * exp(m_L - m, CHEAP), 0)


class Plan(NamedTuple):
    """How rows with this C are distributed."""

    wide: bool  # a row is processed in blocks of columns
    rows: int  # of a tile
    block: int  # columns of a tile: groups * lanes in a wide row
    groups: int
    lanes: int
    blocks: int  # of columns in a row
    warps: int
    unit: int
    units: int


# C is passed as UNIT * units, with UNIT constant. So the compiler knows the alignment of rows and loads whole vectors,
# and does not recompile for every C.
@functools.cache
def plan_for(cols, size, table, rows=True):
    """The plan for rows with elements of `size` bytes; `rows` = False: one row per program for any length.

    A table has lines of (columns up to, elements of a tile, warps); rows wider than the last line, or than a tile, are
    processed in blocks of a tile.
    """
    padded = max(16, triton.next_power_of_2(cols))
    _, tile, warps = next((line for line in table if padded <= line[0]), table[-1])
    block = min(padded, tile)
    unit = math.gcd(cols, 16)
    # A thread's lanes are one vector of 16 bytes, or less for lower alignment of rows.
    lanes = min(block, 32 * warps * min(unit, 16 // size))
    return Plan(
        padded > block, max(1, tile // block) if rows else 1, block, block // lanes, lanes, -(-cols // block), warps,
        unit, cols // unit,
    )  # fmt: skip


def launch_rows(tile_kernel, wide_kernel, plan, R, arguments, constants, tile_registers=None, wide_registers=None):
    """Launches the kernel chosen by a plan for R rows; registers: maximum per thread."""
    if plan.wide:
        launch(
            wide_kernel, (R,),
            *arguments, plan.units, *constants, plan.unit, plan.groups, plan.lanes,
            num_warps=plan.warps, maxnreg=wide_registers, enable_fp_fusion=False,
        )  # fmt: skip
    else:
        launch(
            tile_kernel, (-(-R // plan.rows),),
            *arguments, R, plan.units, *constants, plan.unit, plan.rows, plan.block,
            num_warps=plan.warps, maxnreg=tile_registers, enable_fp_fusion=False,
        )  # fmt: skip
