"""What softmax and the losses over logits share: exponentials, sums of them in one pass, and how rows are dealt out.

Letters: R rows, C columns. A row that fits is one line of a tile of whole rows, read once. A wider one is a program's
own, read in blocks of G groups of L lanes: every lane keeps its own maximum and its own sum of exponentials, and makes
way for a new maximum once in G columns, so that a column costs one exponential and no exchange between threads.
"""

import functools
import math
from typing import NamedTuple

import triton
import triton.language as tl

from .launch import launch

MAX_COLS = 1 << 20  # no kernel here has a limit; wider rows than this are not tested

# What the online maximum begins with. It is finite, so that no infinity is subtracted from itself in a row that begins
# with -inf, and no logit is less but -inf.
LOWEST = tl.constexpr(-3.4028234663852886e38)


# numpy's exponential is exact, and the interpreter's fma, which the one below needs, rounds twice.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def columns(column, C, EVEN: tl.constexpr, L: tl.constexpr, G: tl.constexpr):
    """Columns from `column` on, (G, L), and which of them exist: a constant, and so free, when all do."""
    col = column + tl.arange(0, G)[:, None] * L + tl.arange(0, L)[None, :]
    return col, tl.full([1, 1], True, tl.int1) if EVEN else col < C


@triton.jit
def tile_at(tile, column, R, C, T: tl.constexpr, BLOCK_C: tl.constexpr):
    """Of a tile of T rows, its columns from `column` on: the rows (T, 1) and which of them exist, the columns
    (1, BLOCK_C) and which of them exist, the element where the tile begins, and the elements from there on."""
    row = tile * T + tl.arange(0, T)[:, None]
    col, in_row = columns(column, C, False, BLOCK_C, 1)
    return row, row < R, col, in_row, tile.to(tl.int64) * T * C, tl.arange(0, T)[:, None] * C + col


@triton.jit
def block_of_tile(program, R, C, T: tl.constexpr, BLOCK_C: tl.constexpr):
    """`tile_at` where a program has one block of columns: those of a tile before the next tile, as memory goes."""
    blocks = tl.cdiv(C, BLOCK_C)
    return tile_at(program // blocks, program % blocks * BLOCK_C, R, C, T, BLOCK_C)


@triton.jit
def exp(z, CHEAP: tl.constexpr):
    """exp(z) of float32. Where a cheap one will do, for 16 bits, its relative error grows by |z| half ulps."""
    if INTERPRETED:
        return tl.exp(z)
    elif CHEAP:
        return tl.exp2(z * 1.4426950408889634)
    else:
        # exp2 of the hardware is off by two ulps. 2^n exp(r) with |r| <= log(2) / 2 is not, and reaches 88; what would
        # be subnormal is 0. Adding 1.5 * 2^23 leaves the nearest integer in the low bits.
        shifted = tl.fma(z, 1.44269504, 12582912.0)
        n = shifted - 12582912.0
        r = tl.fma(n, 2.12194440e-4, tl.fma(n, -0.693359375, z))  # log(2) in two parts
        tail = tl.fma(tl.fma(0.00139504857, r, 0.00836888794), r, 0.041666206)
        tail = tl.fma(tl.fma(tail, r, 0.166665182), r, 0.5)
        power = ((shifted.to(tl.int32, bitcast=True) + 127) << 23).to(tl.float32, bitcast=True)
        return tl.where(z < -87.0, 0.0, (tl.fma(tail, r * r, r) + 1.0) * power)


@triton.jit
def split(lse):
    """A float64 lse as float32 parts: exp(z - lse) = exp(z - near) * rest."""
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
    # Near 0, where that cancels, an odd polynomial: a minimax fit, off by 3e-9 of itself.
    v = u * u
    poly = tl.fma(v, -0.00589515034, 0.0207959646)
    poly = tl.fma(v, poly, -0.053783828)
    poly = tl.fma(v, poly, 0.133319241)
    poly = tl.fma(v, poly, -0.33333298)
    small = tl.fma(u * v, poly, u)
    return tl.where(a < 0.6, small, tl.where(u < 0, -large, large)), 4.0 * e * r * r


@triton.jit
def logits(x, scale, softcap, SCALED: tl.constexpr, CAPPED: tl.constexpr, CHEAP: tl.constexpr):
    """z of csrc/cross_entropy.h and dz/dx. `scale` is logit_scale, over softcap where there is one."""
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
    """Maximum and sum of exponentials of the row. All -inf, it has the sum 0, whose logarithm is -inf."""
    m = tl.max(m_L, 0)
    return m, tl.sum(s_L * exp(m_L - m, CHEAP), 0)


class Plan(NamedTuple):
    """How rows of one C are dealt out."""

    wide: bool  # a row goes by blocks of columns
    rows: int  # of a tile
    block: int  # columns of a tile: groups * lanes in a wide row
    groups: int
    lanes: int
    blocks: int  # of columns in a row
    warps: int
    unit: int
    units: int


# C arrives as UNIT * units, UNIT a constant, so that the compiler knows by what rows are aligned and loads whole
# vectors, and does not compile anew for every C.
@functools.cache
def plan_for(cols, size, table, rows=True):
    """The plan for rows of elements of `size` bytes; `rows` = False: one row a program whatever its length.

    A table has lines of (columns up to, elements of a tile, warps); rows wider than the last line, or than a tile, go
    by blocks of a tile.
    """
    padded = max(16, triton.next_power_of_2(cols))
    _, tile, warps = next((line for line in table if padded <= line[0]), table[-1])
    block = min(padded, tile)
    unit = math.gcd(cols, 16)
    # A thread's lanes are one vector of 16 bytes, or what of it the alignment of rows leaves.
    lanes = min(block, 32 * warps * min(unit, 16 // size))
    return Plan(
        padded > block, max(1, tile // block) if rows else 1, block, block // lanes, lanes, -(-cols // block), warps,
        unit, cols // unit,
    )  # fmt: skip


def launch_rows(tile_kernel, wide_kernel, plan, R, arguments, constants, tile_registers=None, wide_registers=None):
    """Launches whichever kernel a plan for R rows asks for; registers: of a thread, at most."""
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
