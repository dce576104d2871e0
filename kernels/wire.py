"""All-reduce in a narrower format on the wire: encode, add up, decode, each in one pass; hfreduce/wire.py has the
contract, and the same in torch's operations.

N elements of a tensor in slices of `length`, one for each of R ranks. A row of W is an encoded slice: bfloat16 codes,
or 8-bit codes followed by the exponents of scales, one per block of B. K blocks per program.
"""

import torch
import triton
import triton.language as tl

from .launch import launch

BLOCK = 128
BLOCKS = 8  # per program
WARPS = 8
SMALLEST = tl.constexpr(2.0**-6)  # smallest normal number of float8_e4m3fn
STEP = tl.constexpr(2.0**-9)  # between the numbers below
MAGIC = tl.constexpr(2.0**14)  # float32 has the same step size from here on
MAGIC_BITS = tl.constexpr((127 + 14) << 23)
NAN = tl.constexpr(0x7F)


@triton.jit
def _bits(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def _power(exponent_K):
    return (exponent_K << 23).to(tl.float32, bitcast=True)[:, None]


@triton.jit
def _encode(value_KB):
    """Codes, and the exponents of scales. Does not use the hardware's cast, which GPUs before compute capability 8.9
    lack."""
    finite = tl.abs(value_KB) < float("inf")
    size = tl.where(finite, tl.abs(value_KB), 0.0)
    # 448 is 1.75 * 2**8: a mantissa above 1.75 carries over into the exponent.
    exponent_K = tl.maximum(((_bits(tl.max(size, 1)) + 0x1FFFFF) >> 23) - 8, 1)
    size *= _power(254 - exponent_K)
    # Rounded to even by an addition in float32 below the smallest normal number, and by bits above it: one of the two
    # summands is the code, the other is the code of the smallest normal number, 8.
    below = _bits(tl.minimum(size, SMALLEST) + MAGIC) - MAGIC_BITS
    above = _bits(tl.maximum(size, SMALLEST))
    above = ((above + 0x7FFFF + ((above >> 20) & 1)) >> 20) - (120 << 3)
    code = (below + above - 8) | ((_bits(value_KB) >> 24) & 0x80)
    return tl.where(finite, code, NAN), exponent_K


@triton.jit
def _decode(code_KB, exponent_K):
    size = code_KB & 0x7F
    above = ((size << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    value = tl.where(size < 8, size.to(tl.float32) * STEP, above)
    value = tl.where(size == NAN, float("nan"), value)
    return tl.where(code_KB >= 0x80, -value, value) * _power(exponent_K)


@triton.jit
def _put(value_KB, row_W, start, length, SCALED: tl.constexpr, B: tl.constexpr, K: tl.constexpr):
    """Writes blocks from `start` of a slice on. Returns their values after encoding and decoding."""
    k, i_KB = tl.arange(0, K), tl.arange(0, K)[:, None] * B + tl.arange(0, B)[None, :]
    inside_K = k < tl.minimum((length - start) // B, K).to(tl.int32)
    if SCALED:
        code, exponent_K = _encode(value_KB)
        tl.store(row_W + start + i_KB, code.to(tl.uint8), mask=inside_K[:, None])
        tl.store(row_W + length + start // B + k, exponent_K.to(tl.uint8), mask=inside_K)
        return _decode(code, exponent_K)
    else:
        code = value_KB.to(tl.bfloat16)
        tl.store(row_W + start + i_KB, code, mask=inside_K[:, None])
        return code.to(tl.float32)


@triton.jit
def _get(rows_RW, r, width, start, length, SCALED: tl.constexpr, B: tl.constexpr, K: tl.constexpr):
    """Decoded blocks from `start` of a slice on."""
    row_W = rows_RW + tl.cast(r, tl.int64) * width
    k, i_KB = tl.arange(0, K), tl.arange(0, K)[:, None] * B + tl.arange(0, B)[None, :]
    inside_K = k < tl.minimum((length - start) // B, K).to(tl.int32)
    code = tl.load(row_W + start + i_KB, mask=inside_K[:, None], other=0)
    if SCALED:
        exponent_K = tl.load(row_W + length + start // B + k, mask=inside_K, other=1)
        return _decode(code.to(tl.int32), exponent_K.to(tl.int32))
    else:
        return code.to(tl.float32)


@triton.jit
def _elements(r, start, length, n, B: tl.constexpr, K: tl.constexpr):
    """For blocks from `start` of slice r on: their begin, the offsets of their elements, and which of these exist."""
    at = tl.cast(r, tl.int64) * length + start
    i_KB = tl.arange(0, K)[:, None] * B + tl.arange(0, B)[None, :]
    left = tl.minimum(tl.minimum(n - at, length - start), K * B).to(tl.int32)
    return at, i_KB, i_KB < left


@triton.jit
def _read(x_N, error_N, at, i_KB, inside_KB):
    value = tl.load(x_N + at + i_KB, mask=inside_KB, other=0).to(tl.float32)
    if error_N is not None:
        value += tl.load(error_N + at + i_KB, mask=inside_KB, other=0)
    return value


@triton.jit
def _keep(error_N, at, i_KB, inside_KB, left):
    tl.store(error_N + at + i_KB, tl.where(tl.abs(left) < float("inf"), left, 0.0), mask=inside_KB)


@triton.jit(do_not_specialize=["n", "me"])
def encode_kernel(
    x_N, error_N, rows_RW, n, length, width, me, SCALED: tl.constexpr, B: tl.constexpr, K: tl.constexpr
):  # fmt: skip
    r, start = tl.program_id(1), tl.program_id(0).to(tl.int64) * K * B
    if r == me:
        return
    at, i_KB, inside_KB = _elements(r, start, length, n, B, K)
    value = _read(x_N, error_N, at, i_KB, inside_KB)
    sent = _put(value, rows_RW + tl.cast(r, tl.int64) * width, start, length, SCALED, B, K)
    if error_N is not None:
        _keep(error_N, at, i_KB, inside_KB, value - sent)


@triton.jit(do_not_specialize=["n", "me"])
def reduce_kernel(
    x_N, error_N, rows_RW, row_W, n, length, width, me, ranks, factor, mean,
    SCALED: tl.constexpr, B: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0).to(tl.int64) * K * B
    at, i_KB, inside_KB = _elements(me, start, length, n, B, K)
    total = tl.zeros((K, B), tl.float32)
    for r in range(0, me):
        total += _get(rows_RW, r, width, start, length, SCALED, B, K)
    total += _read(x_N, error_N, at, i_KB, inside_KB)
    for r in range(me + 1, ranks):
        total += _get(rows_RW, r, width, start, length, SCALED, B, K)
    total = tl.where(inside_KB, total, 0.0)
    sent = _put(total * factor, row_W, start, length, SCALED, B, K)
    if error_N is not None:
        _keep(error_N, at, i_KB, inside_KB, total - sent * mean)


@triton.jit(do_not_specialize=["n"])
def decode_kernel(x_N, rows_RW, n, length, width, SCALED: tl.constexpr, B: tl.constexpr, K: tl.constexpr):
    r, start = tl.program_id(1), tl.program_id(0).to(tl.int64) * K * B
    at, i_KB, inside_KB = _elements(r, start, length, n, B, K)
    value = _get(rows_RW, r, width, start, length, SCALED, B, K)
    tl.store(x_N + at + i_KB, value.to(x_N.dtype.element_ty), mask=inside_KB)


def _form(rows, length):
    """The number of programs per slice, and the constants."""
    return -(-length // (BLOCK * BLOCKS)), (rows.dtype == torch.uint8, BLOCK, BLOCKS)


def encode(x, error, rows, me, length):
    programs, constants = _form(rows, length)
    with torch.cuda.device_of(x):
        launch(
            encode_kernel, (programs, len(rows)), x, error, rows, x.numel(), length, rows.shape[1], me, *constants,
            num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip


def reduce(x, error, rows, row, me, length, mean):
    programs, constants = _form(rows, length)
    with torch.cuda.device_of(x):
        launch(
            reduce_kernel, (programs,), x, error, rows, row, x.numel(), length, rows.shape[1], me, len(rows),
            1 / mean, float(mean), *constants, num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip


def decode(rows, x, length):
    programs, constants = _form(rows, length)
    with torch.cuda.device_of(x):
        launch(
            decode_kernel, (programs, len(rows)), x, rows, x.numel(), length, rows.shape[1], *constants,
            num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip
