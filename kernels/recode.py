"""Codes of 16-bit numbers, looked up and packed in five bits each; csrc/recode.h has the contract.

Eight codes form a 40-bit number, five bytes. The tables stay in the caches. Numbers are identified by their bit
patterns.
"""

import torch
import triton
import triton.language as tl

from .launch import launch

BLOCK = 2048  # elements per program
WARPS = 4


@triton.jit(do_not_specialize=["n"])
def encode_kernel(x_N, rank_P, packed_B, n, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    group, k = tl.arange(0, BLOCK // 8)[:, None], tl.arange(0, 8)[None, :]
    left = n - start
    inside = group * 8 + k < left
    x = tl.load(x_N + start + group * 8 + k, mask=inside, other=0).to(tl.int32) & 0xFFFF
    rank = tl.load(rank_P + x, mask=inside, other=0).to(tl.int64)
    word = tl.sum(rank << (5 * k), 1)
    packed = (word[:, None] >> (8 * k)).to(tl.uint8)
    tl.store(packed_B + start // 8 * 5 + group * 5 + k, packed, mask=(k < 5) & (group * 40 + k * 8 < left * 5))


@triton.jit(do_not_specialize=["n"])
def decode_kernel(y_N, packed_B, start_P, table_P, x_N, n, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    i = tl.arange(0, BLOCK)
    left = n - start
    inside = i < left
    y = tl.load(y_N + start + i, mask=inside, other=0).to(tl.int32) & 0xFFFF
    # A code is in one byte or in two; 5 start / 8 is an integer, because a block is a multiple of eight.
    low = packed_B + start // 8 * 5 + (5 * i >> 3)
    shift = 5 * i & 7
    pair = tl.load(low, mask=inside, other=0).to(tl.int32)
    pair |= tl.load(low + 1, mask=inside & (shift > 3), other=0).to(tl.int32) << 8
    place = tl.load(start_P + y, mask=inside, other=0) + (pair >> shift & 31)
    # A pattern that no x gives has no entry in the table; adding a code to it must not leave the table.
    x = tl.load(table_P + (place & 0xFFFF), mask=inside, other=0)
    tl.store(x_N + start + i, x, mask=inside)


def encode(x, rank, packed, queue):
    n = x.numel()
    if n:
        launch(encode_kernel, (-(-n // BLOCK),), x.view(torch.int16), rank, packed, n, BLOCK, num_warps=WARPS)


def decode(y, packed, start, table, x, queue):
    n = y.numel()
    if n:
        launch(
            decode_kernel, (-(-n // BLOCK),),
            y.view(torch.int16), packed, start, table, x.view(torch.int16), n, BLOCK, num_warps=WARPS,
        )  # fmt: skip
