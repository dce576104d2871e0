"""Attention; csrc/attention.h is the contract, attention_tile.py has the common parts of the kernels.

Forward: one program per block of queries of one head, over the keys that it sees, with an online softmax. Backward:
programs for blocks of keys compute dk and dv, over the queries (of all heads that share the keys) that see them;
programs for blocks of queries compute dq; programs for tiles of dbias sum over everything that shares a tile. Each
computes the scores again: seven products instead of five. No sum is shared between programs, so results are bitwise
equal from run to run.

Blocks in which every pair counts are processed without a mask.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from .attention_backward import bias_kernel, keys_kernel, queries_kernel
from .attention_tile import (
    LN2,
    LOG2E,
    TILE,
    keeps,
    lengths,
    place,
    power,
    rows,
    scores,
    seen_keys,
    sequence,
    span,
    store_rows,
    stretch,
    visible,
)
from .dropout import pair_of
from .launch import launch

# Blocks by the padded width of keys or values, whichever is more: (up to, queries, keys, warps, stages). Those of 64
# and 128 are the fastest of seven to nine tried on an H200 (docs/notes/attention.md).
FORWARD = ((64, 128, 64, 4, 3), (128, 64, 64, 4, 3), (256, 64, 32, 4, 2))
BACKWARD_KEYS = ((64, 32, 128, 4, 2), (128, 32, 64, 4, 2), (256, 32, 64, 8, 2))
BACKWARD_QUERIES = ((64, 64, 64, 4, 3), (128, 128, 64, 8, 3), (256, 64, 32, 8, 2))
# The same for float32, where every product is three tf32 products: small, because all operands pass through registers.
FORWARD_32 = ((64, 64, 32, 4, 1), (128, 16, 32, 4, 1), (256, 16, 16, 4, 1))
BACKWARD_KEYS_32 = ((64, 32, 16, 4, 1), (256, 16, 16, 4, 1))
BACKWARD_QUERIES_32 = ((64, 64, 16, 4, 1), (256, 16, 16, 4, 1))


@triton.jit
def _online(
    acc, norm, top, q, k, v, b, g, k0, n, N: tl.constexpr, i, row, k_b, k_h, k_t, v_b, v_h, v_t, S, bits, bits_t,
    bits_s, mixed, bias, bias_t, bias_s,
    slope, scale, softcap, T, first, last, left, right, shift, threshold, seed, counter, groups,
    MASKED: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, CHEAP: tl.constexpr,
    DROPOUT: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """The online softmax, (acc, norm, top), with the keys n to n + N added."""
    k_ND = rows(k, b, g, k0 + n, k0 + S, k_b, k_h, k_t, D, N, BLOCK_D, MASKED, TMA)
    qk = tl.dot(q, tl.trans(k_ND), input_precision=PRECISION)
    j = n + tl.arange(0, N)[None, :]
    PLAIN: tl.constexpr = not SOFTCAP and bias is None and slope is None and not MASKED
    if PLAIN:
        # The fused multiply-add that subtracts also scales, so only the largest product is scaled separately.
        scaled = scale * LOG2E
        new = tl.maximum(top, tl.max(qk, 1) * scaled)
        p = tl.exp2(qk * scaled - new[:, None])
        alpha = tl.exp2(top - new)
    else:
        s, _ = scores(qk, i, j, bias, bias_t, bias_s, slope, scale, softcap, shift, T, S, SOFTCAP, CHEAP)
        if MASKED:
            seen = visible(i, j, bits, bits_t, bits_s, mixed, T, first, last, left, right, shift, LEFT, RIGHT)
            s = tl.where(seen, s, float("-inf"))
        new = tl.maximum(top, tl.max(s, 1))
        at = tl.where(new == float("-inf"), 0.0, new)  # no key yet
        p = power(s - at[:, None], bias)
        alpha = power(top - at, bias)
    norm = norm * alpha + tl.sum(p, 1)
    if DROPOUT:
        p = tl.where(keeps(seed, counter, row, n, threshold, q.shape[0], N, groups), p, 0.0)
    v_NE = rows(v, b, g, k0 + n, k0 + S, v_b, v_h, v_t, E, N, BLOCK_E, MASKED, TMA)
    acc = tl.dot(p.to(v_NE.dtype), v_NE, acc * alpha[:, None], input_precision=PRECISION)
    return acc, norm, new


@triton.jit
def _weigh_alike(
    acc, blind, v, b, g, k0, n, N: tl.constexpr, row, v_b, v_h, v_t, S, threshold, seed, counter, groups,
    DROPOUT: tl.constexpr, E: tl.constexpr, BLOCK_E: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """acc with the values of keys n to n + N added for the queries that see no key."""
    weights = blind[:, None] & (tl.arange(0, N) >= 0)[None, :]
    if DROPOUT:
        weights = weights & keeps(seed, counter, row, n, threshold, blind.shape[0], N, groups)
    v_NE = rows(v, b, g, k0 + n, k0 + S, v_b, v_h, v_t, E, N, BLOCK_E, True, TMA)
    return tl.dot(weights.to(v_NE.dtype), v_NE, acc, input_precision=PRECISION)


@triton.jit(do_not_specialize=["blocks", "T", "S", "n", "left", "right", "shift", "threshold", "seed", "offset"])
def forward_kernel(
    q, k, v, o, lse, sums, bits, tiles, bias, slopes, sinks, bounds, starts_q, starts_k, pair_2,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, o_b, o_h, o_t, bits_b, bits_h, bits_t, bits_s,
    tiles_b, tiles_h, tiles_t, tiles_s, bias_b, bias_h, bias_t, bias_s, slopes_b, slopes_h,
    blocks, H, T, S, n, scale, softcap, left, right, shift, threshold, seed: tl.int64, offset: tl.int64,
    GROUP: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr,
    CHEAP: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr, UNIT: tl.constexpr, UNIFORM: tl.constexpr,
    TMA: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    S *= UNIT
    # Causal blocks of late queries take longest, so they run first.
    block, b, h = place(tl.program_id(0), blocks, H)
    block = blocks - 1 - block
    g = h // GROUP
    m, q0, k0, all_queries, all_keys = block * M, 0, 0, T, S
    if starts_q is not None:
        s, m = sequence(block, starts_q, n, M)
        q0, k0, T, S = lengths(starts_q, starts_k, s)
        if m >= T:
            return
    first_row = (b * H + h).to(tl.int64) * all_queries + q0
    first, last = span(bounds, b, S)
    slope = None
    if slopes is not None:
        slope = tl.load(slopes + b * slopes_b + h * slopes_h)
    if bias is not None:
        bias += b.to(tl.int64) * bias_b + h.to(tl.int64) * bias_h
    if bits is not None:
        bits += b.to(tl.int64) * bits_b + h.to(tl.int64) * bits_h
        tiles += b.to(tl.int64) * tiles_b + h.to(tl.int64) * tiles_h + (m // TILE).to(tl.int64) * tiles_t
    seed, offset = pair_of(pair_2, seed, offset)
    groups = ((all_keys + 7) // 8).to(tl.int64)
    i = m + tl.arange(0, M)
    row = first_row + i
    low, full, full_end, high = seen_keys(m, T, shift, left, right, first, last, LEFT, RIGHT, M, N)
    q_MD = rows(q, b, h, q0 + m, q0 + T, q_b, q_h, q_t, D, M, BLOCK_D, True, TMA)
    acc = tl.zeros([M, BLOCK_E], tl.float32)
    norm = tl.zeros([M], tl.float32)
    top = tl.full([M], float("-inf"), tl.float32)
    if bits is not None:
        for at in tl.range(low, high, N):
            kind = tl.load(tiles + (at // TILE) * tiles_s)
            if (kind == 2) & (at >= full) & (at < full_end):
                acc, norm, top = _online(
                    acc, norm, top, q_MD, k, v, b, g, k0, at, N, i[:, None], row, k_b, k_h, k_t, v_b, v_h, v_t, S,
                    None, 0, 0, False,
                    bias, bias_t, bias_s, slope, scale, softcap, T, first, last, left, right, shift, threshold, seed,
                    offset, groups, False, LEFT, RIGHT, SOFTCAP, CHEAP, DROPOUT, D, E, BLOCK_D, BLOCK_E, PRECISION, TMA,
                )  # fmt: skip
            elif kind != 0:
                acc, norm, top = _online(
                    acc, norm, top, q_MD, k, v, b, g, k0, at, N, i[:, None], row, k_b, k_h, k_t, v_b, v_h, v_t, S,
                    bits, bits_t, bits_s, kind == 1,
                    bias, bias_t, bias_s, slope, scale, softcap, T, first, last, left, right, shift, threshold, seed,
                    offset, groups, True, LEFT, RIGHT, SOFTCAP, CHEAP, DROPOUT, D, E, BLOCK_D, BLOCK_E, PRECISION, TMA,
                )  # fmt: skip
    else:
        for part in tl.static_range(3):
            begin, end = stretch(part, low, full, full_end, high)
            if part > 0 or LEFT or bounds is not None:
                for at in tl.range(begin, end, N, num_stages=STAGES):
                    acc, norm, top = _online(
                        acc, norm, top, q_MD, k, v, b, g, k0, at, N, i[:, None], row, k_b, k_h, k_t, v_b, v_h, v_t, S,
                        None, 0, 0, False,
                        bias, bias_t, bias_s, slope, scale, softcap, T, first, last, left, right, shift, threshold,
                        seed, offset, groups, part != 1, LEFT, RIGHT, SOFTCAP, CHEAP, DROPOUT, D, E, BLOCK_D, BLOCK_E,
                        PRECISION, TMA,
                    )  # fmt: skip
    if sinks is not None:
        sink = tl.load(sinks + h).to(tl.float32)
        if bias is None:
            sink *= LOG2E
        new = tl.maximum(top, sink)
        alpha = power(top - new, bias)
        norm = norm * alpha + power(sink - new, bias)
        acc = acc * alpha[:, None]
        top = new
    none = norm == 0.0
    if UNIFORM:
        blind = none & (i < T)
        if tl.max(blind.to(tl.int32)) > 0:
            for at in tl.range(0, S, N):
                acc = _weigh_alike(
                    acc, blind, v, b, g, k0, at, N, row, v_b, v_h, v_t, S, threshold, seed, offset, groups,
                    DROPOUT, E, BLOCK_E, PRECISION, TMA,
                )  # fmt: skip
            norm = tl.where(blind, tl.cast(S, tl.float32), norm)
    share = 1.0 / tl.where(norm == 0.0, 1.0, norm)
    if DROPOUT:
        share *= 65536.0 / (65536 - threshold).to(tl.float32)
    store_rows(o, acc * share[:, None], b, h, q0 + m, q0 + T, o_b, o_h, o_t, E, M, BLOCK_E)
    if bias is None:
        tl.store(lse + row, tl.where(none, float("-inf"), top * LN2 + tl.log(norm)), mask=i < T)
    else:
        tl.store(lse + row, tl.where(none, float("-inf"), top), mask=i < T)
        tl.store(sums + row, tl.where(none, 1.0, norm), mask=i < T)


@triton.jit(do_not_specialize=["blocks", "T"])
def delta_kernel(o, dout, delta, o_b, o_h, o_t, d_b, d_h, d_t, blocks, H, T,
                 E: tl.constexpr, BLOCK_E: tl.constexpr, M: tl.constexpr):  # fmt: skip
    block, b, h = place(tl.program_id(0), blocks, H)
    m = block * M
    product = rows(o, b, h, m, T, o_b, o_h, o_t, E, M, BLOCK_E, True, False).to(tl.float32)
    product *= rows(dout, b, h, m, T, d_b, d_h, d_t, E, M, BLOCK_E, True, False).to(tl.float32)
    i = m + tl.arange(0, M)
    tl.store(delta + (b * H + h).to(tl.int64) * T + i, tl.sum(product, 1), mask=i < T)


# Launching


def _tile(halves, floats, width: int, dtype) -> tuple[int, int, int, int]:
    """(queries, keys, warps, stages) of a tile."""
    return next(line[1:] for line in (floats if dtype == torch.float32 else halves) if width <= line[0])


@functools.cache
def _padded(width: int) -> int:
    return max(16, triton.next_power_of_2(width))


def _strides(x, count: int) -> tuple[int | None, ...]:
    """None for absent arguments, because the cost of a launch grows with the number of arguments that are not None."""
    return (None,) * count if x is None else x.stride()[:count]


@functools.cache
def _approximates(dtype) -> bool:
    """Whether a low-precision instruction is enough for tanh."""
    return dtype != torch.float32 and not triton.knobs.runtime.interpret


def _precision(dtype) -> str:
    return "ieee" if dtype != torch.float32 else "tf32" if torch.backends.cuda.matmul.allow_tf32 else "tf32x3"


@functools.cache
def _has_tma(index: int) -> bool:
    return not triton.knobs.runtime.interpret and torch.cuda.get_device_capability(index)[0] >= 9


class _Place(NamedTuple):
    """The tensor properties that a descriptor needs, without the tensor, which would keep the memory alive."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.address


@functools.lru_cache(1024)
def _descriptor(place: _Place, shape, strides, rows: int) -> TensorDescriptor | None:
    """A descriptor for blocks of this many rows, or None if no descriptor can describe the tensor.

    It can describe rows and heads that begin at multiples of 16 bytes, without repetition. Making one is slower than
    looking up the one of the last step, which mostly has the same addresses.
    """
    unit = 16 // place.dtype.itemsize
    sizes = list(zip(shape[:3], strides[:3], strict=True))
    placed = all(size == 1 or (step > 0 and step % unit == 0) for size, step in sizes)
    if not placed or 0 in shape or place.address % 16:
        return None
    # The stride of a dimension of size 1 is arbitrary, but a descriptor needs a multiple of 16 bytes.
    steps = [16 if size == 1 else step for size, step in sizes]
    return TensorDescriptor(place, list(shape), [*steps, 1], [1, 1, rows, _padded(shape[-1])])


def _operands(starts, *pairs) -> tuple[list, list, bool]:
    """Descriptors for (tensor, rows of a block), or the tensors; their strides; and whether they are descriptors.

    After a sequence come the rows of the next one, which a descriptor would read: a NaN among them stays NaN in
    products with 0.
    """
    if starts is None and _has_tma(pairs[0][0].get_device()):
        found = [_descriptor(_Place(x.data_ptr(), x.dtype), x.shape, x.stride(), rows) for x, rows in pairs]
        if None not in found:
            return found, [None] * 3 * len(pairs), True
    return [x for x, _ in pairs], [step for x, _ in pairs for step in x.stride()[:3]], False


def _blocks(T: int, starts, size: int) -> int:
    """The maximum number of blocks of rows."""
    return -(-T // size) if starts is None else T // size + starts.numel() - 1


def _flags(q, k, v, bias, left, right, uniform, softcap, threshold) -> dict:
    """The constants of a call."""
    return {
        "GROUP": q.shape[1] // k.shape[1], "D": q.shape[3], "E": v.shape[3], "BLOCK_D": _padded(q.shape[3]),
        "BLOCK_E": _padded(v.shape[3]), "LEFT": left >= 0, "RIGHT": right >= 0, "SOFTCAP": softcap > 0,
        "CHEAP": _approximates(q.dtype), "DROPOUT": threshold > 0, "PRECISION": _precision(q.dtype),
        # S is passed in units, so the compiler knows that it is a multiple of 16 bytes of a bias, and uses wide loads.
        "UNIT": 16 if bias is not None and k.shape[2] % 16 == 0 else 1, "UNIFORM": uniform,
    }  # fmt: skip


def forward(
    q, k, v, o, lse, sums, bits, tiles, bias, slopes, sinks, bounds, starts_q, starts_k, scale, softcap, left, right,
    shift, uniform, threshold, seed, offset, pair, queue,
):  # fmt: skip
    """csrc/attention.h."""
    (B, H, T, D), (S, E) = q.shape, v.shape[2:]
    if lse.numel() == 0:
        return
    M, N, warps, stages = _tile(FORWARD, FORWARD_32, _padded(max(D, E)), q.dtype)
    operands, read, tma = _operands(starts_q, (q, M), (k, N), (v, N))
    blocks, flags = _blocks(T, starts_q, M), _flags(q, k, v, bias, left, right, uniform, softcap, threshold)
    launch(
        forward_kernel, (blocks * B * H,),
        *operands, o, lse, sums, bits, tiles, bias, slopes, sinks, bounds, starts_q, starts_k, pair,
        *read, *o.stride()[:3], *_strides(bits, 4), *_strides(tiles, 4), *_strides(bias, 4), *_strides(slopes, 2),
        blocks, H, T, S // flags["UNIT"], None if starts_q is None else starts_q.numel() - 1, scale, softcap, left,
        right, shift, threshold, seed, offset, **flags, M=M, N=N, TMA=tma, STAGES=stages, num_warps=warps,
        num_stages=stages,
    )  # fmt: skip


def delta(o, dout, delta, queue):
    """csrc/attention.h."""
    B, H, T, E = o.shape
    if delta.numel() == 0:
        return
    M = max(1, 4096 // _padded(E))
    blocks = -(-T // M)
    launch(
        delta_kernel, (blocks * B * H,),
        o, dout, delta, *o.stride()[:3], *dout.stride()[:3], blocks, H, T, E=E, BLOCK_E=_padded(E), M=M, num_warps=4,
    )  # fmt: skip


def backward(
    q, k, v, lse, sums, dout, delta, dq, dk, dv, dbias, bits, tiles, bias, slopes, bounds, starts_q, starts_k, scale,
    softcap, left, right, shift, uniform, threshold, seed, offset, pair, queue,
):  # fmt: skip
    """csrc/attention.h."""
    (B, H, T, D), (_, G, S, E) = q.shape, v.shape
    flags = _flags(q, k, v, bias, left, right, uniform, softcap, threshold)
    masks = *_strides(bits, 4), *_strides(tiles, 4), *_strides(bias, 4), *_strides(slopes, 2)
    numbers = scale, softcap, left, right, shift, threshold, seed, offset
    units = S // flags["UNIT"]
    sequences = None if starts_q is None else starts_q.numel() - 1
    if (dk is not None or dv is not None) and B * G * S:
        M, N, warps, stages = _tile(BACKWARD_KEYS, BACKWARD_KEYS_32, _padded(max(D, E)), q.dtype)
        (q_, k_, v_, dout_), read, tma = _operands(starts_q, (q, M), (k, N), (v, N), (dout, M))
        blocks = _blocks(S, starts_k, N)
        launch(
            keys_kernel, (blocks * B * G,),
            q_, k_, v_, lse, sums, dout_, delta, dk, dv, bits, tiles, bias, slopes, bounds, starts_q, starts_k, pair,
            *read, *_strides(dk, 3), *_strides(dv, 3), *masks, blocks, H, T, units, sequences, *numbers, **flags,
            M=M, N=N, TMA=tma, STAGES=stages, num_warps=warps, num_stages=stages,
        )  # fmt: skip
    M, N, warps, stages = _tile(BACKWARD_QUERIES, BACKWARD_QUERIES_32, _padded(max(D, E)), q.dtype)
    if dq is not None and lse.numel():
        (q_, k_, v_, dout_), read, tma = _operands(starts_q, (q, M), (k, N), (v, N), (dout, M))
        blocks = _blocks(T, starts_q, M)
        launch(
            queries_kernel, (blocks * B * H,),
            q_, k_, v_, lse, sums, dout_, delta, dq, bits, tiles, bias, slopes, bounds, starts_q, starts_k, pair,
            *read, *_strides(dq, 3), *masks, blocks, H, T, units, sequences, *numbers, **flags,
            M=M, N=N, TMA=tma, STAGES=stages, num_warps=warps, num_stages=stages,
        )  # fmt: skip
    if dbias is not None and dbias.numel():
        shared = dbias.shape[0] * dbias.shape[1]
        across, down = -(-S // N), -(-T // M)
        launch(
            bias_kernel, (across * down * shared,),
            q, k, v, lse, sums, dout, delta, dbias, bits, tiles, bias, slopes, bounds, pair,
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *dout.stride()[:3], *masks, across, down, B, H, T, units,
            *numbers,
            OF_BATCH=dbias.shape[0] == B, OF_HEAD=dbias.shape[1] == H, **flags, M=M, N=N, num_warps=warps, num_stages=1,
        )  # fmt: skip
