"""Rotary position embedding of queries and keys in one launch; csrc/rope.h has the contract.

Letters: B batches, H heads of queries, G of keys, S tokens, D columns of a head, of which R are rotated, in N = R / 2
pairs. A program has BLOCK_S tokens of one batch: it loads their angles once, and rotates a group of heads of both
tensors, one after another. Everything is elementwise, so no bit depends on how the work is divided.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from .launch import launch

ELEMENTS, WARPS = 1024, 4  # pairs of a tile: 8 per thread, two 16-byte loads at 16 bits
PROGRAMS = 2048  # enough to fill all multiprocessors of the largest GPUs


@triton.jit
def _tokens(block, S, positions_S, batch_positions, P, BLOCK_S: tl.constexpr):
    """A block's batch, its tokens and which of them exist, their rows of the tables and which of these exist."""
    blocks = tl.cdiv(S, BLOCK_S)
    batch = (block // blocks).to(tl.int64)
    token = (block % blocks * BLOCK_S + tl.arange(0, BLOCK_S)).to(tl.int64)[:, None]
    exists = token < S
    if positions_S is None:
        row = token
    else:
        row = tl.load(positions_S + batch * batch_positions + token, mask=exists, other=-1)
    return batch, token, exists, row, (row >= 0) & (row < P)


@triton.jit
def _pair(base, inside, exists, N: tl.constexpr, PAIRS: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_N: tl.constexpr):
    """Both columns of each pair of some rows, (BLOCK_S, BLOCK_N), as stored; `inside` is the start of the rows."""
    if PAIRS:
        col = tl.arange(0, 2 * BLOCK_N)[None, :]
        x = tl.load(base + inside + col, mask=exists & (col < 2 * N), other=0.0)
        a, b = tl.split(tl.reshape(x, [BLOCK_S, BLOCK_N, 2]))
    else:
        col = tl.arange(0, BLOCK_N)[None, :]
        a = tl.load(base + inside + col, mask=exists & (col < N), other=0.0)
        b = tl.load(base + N + inside + col, mask=exists & (col < N), other=0.0)
    return a.to(tl.float32), b.to(tl.float32)


@triton.jit
def _store_pair(base, inside, exists, a, b, N: tl.constexpr, PAIRS: tl.constexpr, BLOCK_N: tl.constexpr):
    a = a.to(base.dtype.element_ty)
    b = b.to(base.dtype.element_ty)
    if PAIRS:
        col = tl.arange(0, 2 * BLOCK_N)[None, :]
        tl.store(base + inside + col, tl.interleave(a, b), mask=exists & (col < 2 * N))
    else:
        col = tl.arange(0, BLOCK_N)[None, :]
        tl.store(base + inside + col, a, mask=exists & (col < N))
        tl.store(base + N + inside + col, b, mask=exists & (col < N))


@triton.jit
def _table(table, row, exists, N: tl.constexpr, NARROW: tl.constexpr, PAIRS: tl.constexpr, BLOCK_S: tl.constexpr,
           BLOCK_N: tl.constexpr):  # fmt: skip
    """Columns a and b of the rows of a table; NaN for a row outside of it."""
    if NARROW:
        col = tl.arange(0, BLOCK_N)[None, :]
        a = tl.load(table + row * N + col, mask=exists & (col < N), other=0.0).to(tl.float32)
        b = a
    else:
        a, b = _pair(table, row * (2 * N), exists, N, PAIRS, BLOCK_S, BLOCK_N)
    return tl.where(exists, a, float("nan")), tl.where(exists, b, float("nan"))


@triton.jit
def _angles(cos, sin, row, known, N: tl.constexpr, NARROW: tl.constexpr, PAIRS: tl.constexpr, TRANSPOSED: tl.constexpr,
            BLOCK_S: tl.constexpr, BLOCK_N: tl.constexpr):  # fmt: skip
    """cos_a, cos_b, sin_a, sin_b such that y_a = x_a cos_a - x_b sin_a and y_b = x_b cos_b + x_a sin_b."""
    cos_a, cos_b = _table(cos, row, known, N, NARROW, PAIRS, BLOCK_S, BLOCK_N)
    sin_a, sin_b = _table(sin, row, known, N, NARROW, PAIRS, BLOCK_S, BLOCK_N)
    if TRANSPOSED:
        return cos_a, cos_b, -sin_b, -sin_a
    else:
        return cos_a, cos_b, sin_a, sin_b


@triton.jit
def _tokens_and_angles(
    block, S, positions_S, batch_positions, P, cos, sin, batch_table, N: tl.constexpr, NARROW: tl.constexpr,
    PAIRS: tl.constexpr, TRANSPOSED: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A block's batch, its tokens, which of them exist, and their angles, as from `_angles`."""
    batch, token, exists, row, known = _tokens(block, S, positions_S, batch_positions, P, BLOCK_S)
    table = batch * batch_table
    cos_a, cos_b, sin_a, sin_b = _angles(
        cos + table, sin + table, row, known, N, NARROW, PAIRS, TRANSPOSED, BLOCK_S, BLOCK_N
    )
    return batch, token, exists, cos_a, cos_b, sin_a, sin_b


@triton.jit
def _turn(a, b, cos_a, cos_b, sin_a, sin_b):
    """Compiled without fusing: bitwise equal to torch's formula in float32."""
    return a * cos_a - b * sin_a, b * cos_b + a * sin_b


@triton.jit
def _turn_heads(
    x, y, first, last, x_start, y_start, x_head, y_head, exists, cos_a, cos_b, sin_a, sin_b,
    N: tl.constexpr, D: tl.constexpr, PAIRS: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):  # fmt: skip
    for head in tl.range(first, last):
        at = x + tl.cast(head, tl.int64) * x_head
        to = y + tl.cast(head, tl.int64) * y_head
        a, b = _pair(at, x_start, exists, N, PAIRS, BLOCK_S, BLOCK_N)
        a, b = _turn(a, b, cos_a, cos_b, sin_a, sin_b)
        _store_pair(to, y_start, exists, a, b, N, PAIRS, BLOCK_N)
        if 2 * N < D:
            col = tl.arange(0, BLOCK_REST)[None, :]
            inside = exists & (col < D - 2 * N)
            rest = tl.load(at + 2 * N + x_start + col, mask=inside)
            tl.store(to + 2 * N + y_start + col, rest.to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["S", "H", "G", "P", "heads"])
def forward_kernel(
    q, k, cos, sin, positions_S, yq, yk,
    q_batch, q_head, q_token, k_batch, k_head, k_token,
    yq_batch, yq_head, yq_token, yk_batch, yk_head, yk_token, batch_table, batch_positions, S, H, G, P, heads,
    N: tl.constexpr, D: tl.constexpr, NARROW: tl.constexpr, PAIRS: tl.constexpr, TRANSPOSED: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    batch, token, exists, cos_a, cos_b, sin_a, sin_b = _tokens_and_angles(
        tl.program_id(0), S, positions_S, batch_positions, P, cos, sin, batch_table,
        N, NARROW, PAIRS, TRANSPOSED, BLOCK_S, BLOCK_N,
    )  # fmt: skip
    first = tl.program_id(1) * heads
    last = first + heads
    _turn_heads(
        q + batch * q_batch, yq + batch * yq_batch, first, min(last, H),
        token * q_token, token * yq_token, q_head, yq_head, exists, cos_a, cos_b, sin_a, sin_b,
        N, D, PAIRS, BLOCK_S, BLOCK_N, BLOCK_REST,
    )  # fmt: skip
    if k is not None:
        _turn_heads(
            k + batch * k_batch, yk + batch * yk_batch, max(first - H, 0), min(last - H, G),
            token * k_token, token * yk_token, k_head, yk_head, exists, cos_a, cos_b, sin_a, sin_b,
            N, D, PAIRS, BLOCK_S, BLOCK_N, BLOCK_REST,
        )  # fmt: skip


class Blocks(NamedTuple):
    """How the tokens and the columns of a call are divided."""

    tokens: int
    pairs: int
    rest: int


def cut(D, rotary, elements=ELEMENTS) -> Blocks:
    pairs = triton.next_power_of_2(rotary // 2)
    rest = triton.next_power_of_2(max(D - rotary, 1))
    return Blocks(max(1, min(32, elements // max(pairs, rest // 2))), pairs, rest)


def strides(t):
    return (0, 0, 0) if t is None else t.stride()[:3]


def batch_stride(t):
    """The batch stride of a table or of positions, (B or 1, ...)."""
    return 0 if t is None or t.shape[0] == 1 else t.stride(0)


def dealt_out(programs, heads):
    """The number of heads per program: as many as leave enough programs. With fewer than four, angles would be most of
    the loads."""
    groups = min(-(-heads // 4), -(-PROGRAMS // programs))
    return -(-heads // groups)


def forward(q, k, cos, sin, positions, yq, yk, rotary, interleaved, transposed, queue):
    (B, H, S, D), G = q.shape, 0 if k is None else k.shape[1]
    blocks = cut(D, rotary)
    programs = B * -(-S // blocks.tokens)
    if programs == 0 or H + G == 0:
        return
    heads = dealt_out(programs, H + G)
    launch(
        forward_kernel, (programs, -(-(H + G) // heads)),
        q, k, cos, sin, positions, yq, yk, *strides(q), *strides(k), *strides(yq), *strides(yk),
        batch_stride(cos), batch_stride(positions), S, H, G, cos.shape[1], heads,
        rotary // 2, D, cos.shape[2] != rotary, interleaved, transposed, *blocks,
        num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip
