"""RMS norm of each head and rotary position embedding in one launch; csrc/qk_norm_rope.h has the contract.

Letters as in rope.py. A tile has BLOCK_S whole rows of one head, which stay in registers between the sum of squares and
the rotation. Backward adds up the gradients of the weights in registers, over a program's tokens and heads, and leaves
one row of partial sums per program. The tokens of a program depend only on the shape.
"""

import triton
import triton.language as tl

from . import rows
from .launch import launch
from .rope import WARPS, _pair, _store_pair, _tokens_and_angles, _turn, batch_stride, cut, dealt_out, strides

BACKWARD_PROGRAMS = 3  # programs per multiprocessor, all running at once
BACKWARD_REGISTERS = 168  # maximum per thread for this
BACKWARD_ELEMENTS = 512  # pairs of a tile: sums, weights and angles need registers, too


@triton.jit
def _rest(base, inside, exists, N: tl.constexpr, D: tl.constexpr, BLOCK_REST: tl.constexpr):
    """The columns that are not rotated, in float32; 0 if there are none."""
    if 2 * N < D:
        col = tl.arange(0, BLOCK_REST)[None, :]
        return tl.load(base + 2 * N + inside + col, mask=exists & (col < D - 2 * N), other=0.0).to(tl.float32)
    else:
        return 0.0


@triton.jit
def _store_rest(base, inside, exists, x, N: tl.constexpr, D: tl.constexpr, BLOCK_REST: tl.constexpr):
    if 2 * N < D:
        col = tl.arange(0, BLOCK_REST)[None, :]
        tl.store(base + 2 * N + inside + col, x.to(base.dtype.element_ty), mask=exists & (col < D - 2 * N))


@triton.jit
def _weights(w_D, offset, N: tl.constexpr, D: tl.constexpr, PAIRS: tl.constexpr, BLOCK_N: tl.constexpr,
             BLOCK_REST: tl.constexpr):  # fmt: skip
    a, b = _pair(w_D, 0, True, N, PAIRS, 1, BLOCK_N)
    return a + offset, b + offset, _rest(w_D, 0, True, N, D, BLOCK_REST) + offset


@triton.jit
def _mean(a, b, rest, N: tl.constexpr, D: tl.constexpr):
    """rstd of the D numbers of each row, (BLOCK_S, 1)."""
    total = tl.sum(a + b, 1)
    if 2 * N < D:
        total += tl.sum(rest, 1)
    return tl.div_rn(total, D * 1.0)[:, None]


@triton.jit
def _forward_heads(
    x, w_D, y, rstd, first, last, heads, x_start, y_start, rstd_start, x_head, y_head, eps, offset, exists,
    cos_a, cos_b, sin_a, sin_b, GIVEN: tl.constexpr, N: tl.constexpr, D: tl.constexpr, PAIRS: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    w_a, w_b, w_rest = _weights(w_D, offset, N, D, PAIRS, BLOCK_N, BLOCK_REST)
    for head in tl.range(first, last):
        at = x + tl.cast(head, tl.int64) * x_head
        to = y + tl.cast(head, tl.int64) * y_head
        a, b = _pair(at, x_start, exists, N, PAIRS, BLOCK_S, BLOCK_N)
        rest = _rest(at, x_start, exists, N, D, BLOCK_REST)
        if GIVEN:
            r = tl.load(rstd + rstd_start * heads + head, mask=exists, other=0.0)
        else:
            r = tl.div_rn(1.0, tl.sqrt_rn(_mean(a * a, b * b, rest * rest, N, D) + eps))
            if rstd is not None:
                tl.store(rstd + rstd_start * heads + head, r, mask=exists)
        a, b = _turn(a * r * w_a, b * r * w_b, cos_a, cos_b, sin_a, sin_b)
        _store_pair(to, y_start, exists, a, b, N, PAIRS, BLOCK_N)
        _store_rest(to, y_start, exists, rest * r * w_rest, N, D, BLOCK_REST)


@triton.jit(do_not_specialize=["S", "H", "G", "P", "heads"])
def forward_kernel(
    q, k, wq_D, wk_D, cos, sin, positions_S, yq, yk, rstd_q, rstd_k,
    q_batch, q_head, q_token, k_batch, k_head, k_token,
    yq_batch, yq_head, yq_token, yk_batch, yk_head, yk_token, batch_table, batch_positions, S, H, G, P, heads,
    eps: tl.float32, offset: tl.float32, GIVEN: tl.constexpr,
    N: tl.constexpr, D: tl.constexpr, NARROW: tl.constexpr, PAIRS: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    """y of x; GIVEN: with the rstd from forward."""
    batch, token, exists, cos_a, cos_b, sin_a, sin_b = _tokens_and_angles(
        tl.program_id(0), S, positions_S, batch_positions, P, cos, sin, batch_table,
        N, NARROW, PAIRS, False, BLOCK_S, BLOCK_N,
    )  # fmt: skip
    first = tl.program_id(1) * heads
    last = first + heads
    _forward_heads(
        q + batch * q_batch, wq_D, yq + batch * yq_batch, rstd_q, first, min(last, H), H,
        token * q_token, token * yq_token, batch * S + token, q_head, yq_head, eps, offset, exists,
        cos_a, cos_b, sin_a, sin_b, GIVEN, N, D, PAIRS, BLOCK_S, BLOCK_N, BLOCK_REST,
    )  # fmt: skip
    if k is not None:
        _forward_heads(
            k + batch * k_batch, wk_D, yk + batch * yk_batch, rstd_k, max(first - H, 0), min(last - H, G),
            G, token * k_token, token * yk_token, batch * S + token, k_head, yk_head, eps, offset, exists,
            cos_a, cos_b, sin_a, sin_b, GIVEN, N, D, PAIRS, BLOCK_S, BLOCK_N, BLOCK_REST,
        )  # fmt: skip


@triton.jit
def _backward_heads(
    dy, x, w_D, rstd, dx, heads, dy_start, x_start, dx_start, rstd_start, dy_head, x_head, dx_head, offset, exists,
    cos_a, cos_b, sin_a, sin_b, dw_a, dw_b, dw_rest, DW: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
    PAIRS: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    """dx, and dw with the contribution of these rows added."""
    for head in tl.range(0, heads):
        wide = tl.cast(head, tl.int64)
        dy_a, dy_b = _pair(dy + wide * dy_head, dy_start, exists, N, PAIRS, BLOCK_S, BLOCK_N)
        g_a, g_b = _turn(dy_a, dy_b, cos_a, cos_b, sin_a, sin_b)
        g_rest = _rest(dy + wide * dy_head, dy_start, exists, N, D, BLOCK_REST)
        r = tl.load(rstd + rstd_start * heads + head, mask=exists, other=0.0)
        a, b = _pair(x + wide * x_head, x_start, exists, N, PAIRS, BLOCK_S, BLOCK_N)
        a *= r
        b *= r
        rest = _rest(x + wide * x_head, x_start, exists, N, D, BLOCK_REST) * r
        if DW:  # missing rows have NaN angles
            dw_a += tl.where(exists, g_a * a, 0.0)
            dw_b += tl.where(exists, g_b * b, 0.0)
            if 2 * N < D:
                dw_rest += g_rest * rest
        w_a, w_b, w_rest = _weights(w_D, offset, N, D, PAIRS, BLOCK_N, BLOCK_REST)
        g_a *= w_a
        g_b *= w_b
        g_rest *= w_rest
        mean = _mean(g_a * a, g_b * b, g_rest * rest, N, D)
        to = dx + wide * dx_head
        _store_pair(to, dx_start, exists, r * (g_a - a * mean), r * (g_b - b * mean), N, PAIRS, BLOCK_N)
        _store_rest(to, dx_start, exists, r * (g_rest - rest * mean), N, D, BLOCK_REST)
    return dw_a, dw_b, dw_rest


@triton.jit
def _store_sums(sums_D, dw_a, dw_b, dw_rest, N: tl.constexpr, D: tl.constexpr, PAIRS: tl.constexpr,
                BLOCK_N: tl.constexpr, BLOCK_REST: tl.constexpr):  # fmt: skip
    _store_pair(sums_D, 0, True, tl.sum(dw_a, 0)[None, :], tl.sum(dw_b, 0)[None, :], N, PAIRS, BLOCK_N)
    if 2 * N < D:
        _store_rest(sums_D, 0, True, tl.sum(dw_rest, 0)[None, :], N, D, BLOCK_REST)


@triton.jit(do_not_specialize=["S", "H", "G", "P", "blocks"])
def backward_kernel(
    dyq, dyk, q, k, wq_D, wk_D, rstd_q, rstd_k, cos, sin, positions_S, dq, dk, sums_2PD,
    dyq_batch, dyq_head, dyq_token, dyk_batch, dyk_head, dyk_token,
    q_batch, q_head, q_token, k_batch, k_head, k_token,
    dq_batch, dq_head, dq_token, dk_batch, dk_head, dk_token, batch_table, batch_positions, S, H, G, P, blocks,
    offset: tl.float32, N: tl.constexpr, D: tl.constexpr, NARROW: tl.constexpr, PAIRS: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    DW: tl.constexpr = sums_2PD is not None
    q_a = tl.zeros([BLOCK_S, BLOCK_N], tl.float32)
    q_b = tl.zeros([BLOCK_S, BLOCK_N], tl.float32)
    q_rest = tl.zeros([BLOCK_S, BLOCK_REST], tl.float32)
    k_a = tl.zeros([BLOCK_S, BLOCK_N], tl.float32)
    k_b = tl.zeros([BLOCK_S, BLOCK_N], tl.float32)
    k_rest = tl.zeros([BLOCK_S, BLOCK_REST], tl.float32)
    for block in tl.range(tl.program_id(0), blocks, tl.num_programs(0)):
        batch, token, exists, cos_a, cos_b, sin_a, sin_b = _tokens_and_angles(
            block, S, positions_S, batch_positions, P, cos, sin, batch_table,
            N, NARROW, PAIRS, True, BLOCK_S, BLOCK_N,
        )  # fmt: skip
        q_a, q_b, q_rest = _backward_heads(
            dyq + batch * dyq_batch, q + batch * q_batch, wq_D, rstd_q, dq + batch * dq_batch, H,
            token * dyq_token, token * q_token, token * dq_token, batch * S + token, dyq_head, q_head, dq_head,
            offset, exists, cos_a, cos_b, sin_a, sin_b, q_a, q_b, q_rest,
            DW, N, D, PAIRS, BLOCK_S, BLOCK_N, BLOCK_REST,
        )  # fmt: skip
        if k is not None:
            k_a, k_b, k_rest = _backward_heads(
                dyk + batch * dyk_batch, k + batch * k_batch, wk_D, rstd_k, dk + batch * dk_batch, G,
                token * dyk_token, token * k_token, token * dk_token, batch * S + token, dyk_head, k_head, dk_head,
                offset, exists, cos_a, cos_b, sin_a, sin_b, k_a, k_b, k_rest,
                DW, N, D, PAIRS, BLOCK_S, BLOCK_N, BLOCK_REST,
            )  # fmt: skip
    if DW:
        p = tl.program_id(0)
        _store_sums(sums_2PD + p * D, q_a, q_b, q_rest, N, D, PAIRS, BLOCK_N, BLOCK_REST)
        if k is not None:
            plane = sums_2PD + (tl.num_programs(0) + p) * D
            _store_sums(plane, k_a, k_b, k_rest, N, D, PAIRS, BLOCK_N, BLOCK_REST)


def partials(batch, sequence, dims):
    return max(1, min(batch * -(-sequence // 4), rows.device()[0] * BACKWARD_PROGRAMS))


def forward(q, k, wq, wk, cos, sin, positions, yq, yk, rstd_q, rstd_k, eps, offset, rotary, interleaved, queue):
    _forward(q, k, wq, wk, cos, sin, positions, yq, yk, rstd_q, rstd_k, eps, offset, rotary, interleaved, False)


def rebuild(q, wq, rstd_q, cos, sin, positions, yq, offset, rotary, interleaved, queue):
    _forward(q, None, wq, None, cos, sin, positions, yq, None, rstd_q, None, 0.0, offset, rotary, interleaved, True)


def _forward(q, k, wq, wk, cos, sin, positions, yq, yk, rstd_q, rstd_k, eps, offset, rotary, interleaved, given):
    (B, H, S, D), G = q.shape, 0 if k is None else k.shape[1]
    blocks = cut(D, rotary)
    programs = B * -(-S // blocks.tokens)
    if programs == 0 or H + G == 0:
        return
    heads = dealt_out(programs, H + G)
    launch(
        forward_kernel, (programs, -(-(H + G) // heads)),
        q, k, wq, wk, cos, sin, positions, yq, yk, rstd_q, rstd_k,
        *strides(q), *strides(k), *strides(yq), *strides(yk),
        batch_stride(cos), batch_stride(positions), S, H, G, cos.shape[1], heads, eps, offset, given,
        rotary // 2, D, cos.shape[2] != rotary, interleaved, *blocks,
        num_warps=WARPS, maxnreg=128, enable_fp_fusion=False,
    )  # fmt: skip


def backward(
    dyq, dyk, q, k, wq, wk, rstd_q, rstd_k, cos, sin, positions, dq, dk, dwq, dwk, partials, offset, rotary,
    interleaved, queue,
):  # fmt: skip
    (B, H, S, D), G = q.shape, 0 if k is None else k.shape[1]
    cuts = cut(D, rotary, BACKWARD_ELEMENTS)
    blocks = B * -(-S // cuts.tokens)
    programs = min(blocks, rows.device()[0] * BACKWARD_PROGRAMS) if dwq is None else partials.shape[1]
    if blocks:
        launch(
            backward_kernel, (programs,),
            dyq, dyk, q, k, wq, wk, rstd_q, rstd_k, cos, sin, positions, dq, dk, None if dwq is None else partials,
            *strides(dyq), *strides(dyk), *strides(q), *strides(k), *strides(dq), *strides(dk),
            batch_stride(cos), batch_stride(positions), S, H, G, cos.shape[1], blocks, offset,
            rotary // 2, D, cos.shape[2] != rotary, interleaved, *cuts, num_warps=WARPS,
            maxnreg=BACKWARD_REGISTERS,
        )  # fmt: skip
    if dwq is not None:
        P = partials.shape[1]
        grid = -(-D // rows.SUM_C), 1 if dwk is None else 2
        share = P if blocks else 0
        launch(rows.sum_kernel, grid, partials, dwq, dwk, share, P, D, rows.SUM_P, rows.SUM_C, num_warps=8)
