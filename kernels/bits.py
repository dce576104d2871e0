"""Packed bits; csrc/bits.h has the format. `joined` and `parted` are for kernels that make codes themselves."""

import triton
import triton.language as tl

from .launch import launch

BLOCK = 4096  # codes per program
WARPS = 4


@triton.jit
def joined(codes, W: tl.constexpr, BLOCK: tl.constexpr):
    """The bytes (BLOCK W / 8,) of BLOCK int32 codes below 2^W, for a W that divides 8: a reduction in each thread."""
    PER: tl.constexpr = 8 // W
    shifts = W * tl.arange(0, PER)
    return tl.sum(tl.reshape(codes, [BLOCK // PER, PER]) << shifts[None, :], 1).to(tl.uint8)


@triton.jit
def parted(packed, W: tl.constexpr, BLOCK: tl.constexpr):
    """The BLOCK int32 codes of (BLOCK W / 8,) bytes, for a W that divides 8."""
    PER: tl.constexpr = 8 // W
    shifts = W * tl.arange(0, PER)
    return tl.reshape((packed.to(tl.int32)[:, None] >> shifts[None, :]) & ((1 << W) - 1), [BLOCK])


@triton.jit
def _block(codes_N, packed_B, n, PER: tl.constexpr, BLOCK: tl.constexpr):
    """The first code and byte of a program, both as indices, and the number of remaining codes."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    return codes_N + start, packed_B + start // PER, tl.arange(0, BLOCK), tl.arange(0, BLOCK // PER), n - start


# Only the last program is masked, so the others load whole vectors for any n.
@triton.jit(do_not_specialize=["n"])
def pack_kernel(codes_N, packed_B, n, W: tl.constexpr, BLOCK: tl.constexpr):
    PER: tl.constexpr = 8 // W
    codes_N, packed_B, i, b, left = _block(codes_N, packed_B, n, PER, BLOCK)
    if left >= BLOCK:
        codes = tl.load(codes_N + i).to(tl.int32) & ((1 << W) - 1)
        tl.store(packed_B + b, joined(codes, W, BLOCK))
    else:
        codes = tl.load(codes_N + i, mask=i < left, other=0).to(tl.int32) & ((1 << W) - 1)
        tl.store(packed_B + b, joined(codes, W, BLOCK), mask=b * PER < left)


@triton.jit(do_not_specialize=["n"])
def unpack_kernel(packed_B, codes_N, n, W: tl.constexpr, BLOCK: tl.constexpr):
    PER: tl.constexpr = 8 // W
    codes_N, packed_B, i, b, left = _block(codes_N, packed_B, n, PER, BLOCK)
    if left >= BLOCK:
        tl.store(codes_N + i, parted(tl.load(packed_B + b), W, BLOCK).to(tl.uint8))
    else:
        packed = tl.load(packed_B + b, mask=b * PER < left, other=0)
        tl.store(codes_N + i, parted(packed, W, BLOCK).to(tl.uint8), mask=i < left)


# Five bits do not divide a byte: eight codes form a number of 40 bits, five bytes.
@triton.jit(do_not_specialize=["n"])
def pack5_kernel(codes_N, packed_B, n, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    group, k = tl.arange(0, BLOCK // 8)[:, None], tl.arange(0, 8)[None, :]
    left = n - start
    codes = tl.load(codes_N + start + group * 8 + k, mask=group * 8 + k < left, other=0) & 31
    word = tl.sum(codes.to(tl.int64) << (5 * k), 1)
    packed = (word[:, None] >> (8 * k)).to(tl.uint8)
    tl.store(packed_B + start // 8 * 5 + group * 5 + k, packed, mask=(k < 5) & (group * 40 + k * 8 < left * 5))


@triton.jit(do_not_specialize=["n"])
def unpack5_kernel(packed_B, codes_N, n, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    group, k = tl.arange(0, BLOCK // 8)[:, None], tl.arange(0, 8)[None, :]
    left = n - start
    there = (k < 5) & (group * 40 + k * 8 < left * 5)
    packed = tl.load(packed_B + start // 8 * 5 + group * 5 + k, mask=there, other=0)
    word = tl.sum(packed.to(tl.int64) << (8 * k), 1)
    codes = ((word[:, None] >> (5 * k)) & 31).to(tl.uint8)
    tl.store(codes_N + start + group * 8 + k, codes, mask=group * 8 + k < left)


def _run(kernel, source, target, n, *width):
    if n:
        launch(kernel, (-(-n // BLOCK),), source, target, n, *width, BLOCK, num_warps=WARPS)


def pack(codes, packed, width, queue):
    n = codes.numel()
    if width == 8:
        packed.copy_(codes.view(-1))
    elif width == 5:
        _run(pack5_kernel, codes, packed, n)
    else:
        _run(pack_kernel, codes, packed, n, width)


def unpack(packed, codes, width, queue):
    n = codes.numel()
    if width == 8:
        codes.view(-1).copy_(packed)
    elif width == 5:
        _run(unpack5_kernel, packed, codes, n)
    else:
        _run(unpack_kernel, packed, codes, n, width)
