"""Common functions of the Adafactor kernels: numbers in any format, at 32-bit offsets from a 64-bit start."""

import triton
import triton.language as tl

from .optim import EMA, MAXIMIZE, NUMEL, OPTIONS, PARAM, REMAINDER, STEP, _halves, _vector
from .optim_formats import BFLOAT16, BLOCK, FLOAT32, round_stochastically

SIDE, SMALL = tl.constexpr(128), tl.constexpr(64)
TILE = tl.constexpr(128 * 128)
ROWS = tl.constexpr(8)  # of a span
WARPS = 4

DECAY, EPS1, EPS2, THRESHOLD = (tl.constexpr(i) for i in (1, 2, 3, 6))
FIRST_TILE, FIRST_BLOCK, WORK, SHAPE = (tl.constexpr(i) for i in (2, 3, 4, 5))


@triton.jit
def _pointer(address, start, at, KIND: tl.constexpr, VECTOR: tl.constexpr):
    """A hint for the compiler: each group of VECTOR numbers is aligned to its size."""
    SIZE: tl.constexpr = KIND.primitive_bitwidth // 8
    pointer = (address + start * SIZE).to(tl.pointer_type(KIND)) + at
    if VECTOR:
        pointer = tl.max_contiguous(tl.multiple_of(pointer, [SIZE, VECTOR * SIZE]), [1, VECTOR])
    return pointer


@triton.jit
def get(address, start, at, inside, FORMAT: tl.constexpr, VECTOR: tl.constexpr):
    """The float32 numbers at start + at, zeros outside."""
    KIND: tl.constexpr = tl.float32 if FORMAT == FLOAT32 else tl.bfloat16 if FORMAT == BFLOAT16 else tl.float16
    return tl.load(_pointer(address, start, at, KIND, VECTOR), inside, 0.0).to(tl.float32)


@triton.jit
def put(x, address, start, at, inside, FORMAT: tl.constexpr, VECTOR: tl.constexpr):
    KIND: tl.constexpr = tl.float32 if FORMAT == FLOAT32 else tl.bfloat16 if FORMAT == BFLOAT16 else tl.float16
    tl.store(_pointer(address, start, at, KIND, VECTOR), x.to(KIND), inside)


@triton.jit
def rounded(x, FORMAT: tl.constexpr):
    """x rounded to a format, as float32."""
    KIND: tl.constexpr = tl.float32 if FORMAT == FLOAT32 else tl.bfloat16 if FORMAT == BFLOAT16 else tl.float16
    return x.to(KIND).to(tl.float32)


@triton.jit
def get_parameter(columns, start, at, inside, P: tl.constexpr, MASTER: tl.constexpr, VECTOR: tl.constexpr):
    p = get(columns[PARAM], start, at, inside, P, VECTOR)
    if MASTER and P == BFLOAT16:  # noqa: SIM102  of which the compiler knows only the first
        if columns[REMAINDER] != 0:
            low = tl.load(_pointer(columns[REMAINDER], start, at, tl.int16, VECTOR), inside, 0).to(tl.int32)
            p = (p.to(tl.int32, bitcast=True) + low).to(tl.float32, bitcast=True)
    return p


@triton.jit
def put_parameter(
    p, columns, start, at, inside, ema_rate, seed, counter, P: tl.constexpr, MASTER: tl.constexpr,
    HAS_EMA: tl.constexpr, STOCHASTIC: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Writes a span of a parameter and its average; counter: of the first random bits."""
    kept = p
    if STOCHASTIC and P != FLOAT32:
        halves = tl.reshape(_halves(seed, counter, ROWS * SIDE // BLOCK), [ROWS, SIDE])
        kept = round_stochastically(p, halves, P)
    kept = rounded(kept, P)
    if MASTER and P == BFLOAT16:
        if columns[REMAINDER] != 0:
            bits = p.to(tl.uint32, bitcast=True)
            high = tl.where(p == p, (bits + 0x8000) >> 16, 0x7FC0) << 16
            low = tl.where(p == p, bits, 0).to(tl.int16)
            tl.store(_pointer(columns[REMAINDER], start, at, tl.int16, VECTOR), low, inside)
            put(high.to(tl.float32, bitcast=True), columns[PARAM], start, at, inside, P, VECTOR)
            kept = p
        else:
            put(kept, columns[PARAM], start, at, inside, P, VECTOR)
    else:
        put(kept, columns[PARAM], start, at, inside, P, VECTOR)
    if HAS_EMA:  # noqa: SIM102
        if columns[EMA] != 0:
            average = get(columns[EMA], start, at, inside, FLOAT32, VECTOR)
            put(average + ema_rate * (kept - average), columns[EMA], start, at, inside, FLOAT32, VECTOR)


@triton.jit
def corner(tile, R, C):
    """Matrix, first row and first column of a tile of large matrices, tiles counted from the parameter's first."""
    across, bands = tl.cdiv(C, SIDE).to(tl.int32), tl.cdiv(R, SIDE).to(tl.int32)
    band, column = tile.to(tl.int32) // across, tile.to(tl.int32) % across
    return (band // bands).to(tl.int64), band % bands * SIDE, column * SIDE


@triton.jit
def square(m, first, c0, R, C):
    """A span of a large matrix: its start, the offsets of its elements, and which of them exist."""
    r, c = tl.arange(0, ROWS)[:, None], tl.arange(0, SIDE)[None, :]
    return (m * R + first) * C + c0, r * C.to(tl.int32) + c, (r < R - first) & (c < C - c0)


@triton.jit
def run(left):
    """Offsets of consecutive elements, and which of them exist."""
    at = tl.arange(0, ROWS)[:, None] * SIDE + tl.arange(0, SIDE)[None, :]
    return at, at < left


@triton.jit
def geometry(row, shape):
    """R, C, M."""
    R, C = tl.load(shape), tl.load(shape + 1)
    return R, C, tl.load(row + NUMEL) // tl.maximum(R * C, 1)


@triton.jit
def power(row, hyper):
    """t^decay, float64."""
    t = tl.load(tl.load(row + STEP).to(tl.pointer_type(tl.float32))).to(tl.float64)
    return tl.exp2(tl.load(hyper + DECAY) * tl.log2(t))


@triton.jit
def factor_of(hyper, coefficient):
    """The factor for gradients, float32."""
    options = tl.load(hyper + OPTIONS).to(tl.int32)
    return tl.where((options & MAXIMIZE) != 0, -coefficient, coefficient).to(tl.float32)


def codes_of(features):
    return tuple((code, _vector(code, features.ema)) for code in features.codes)


def count_of(squares):
    return 0 if squares is None else squares.numel()
