"""The backward of attention: csrc/attention.h, attention_tile.py; attention.py launches."""

import triton
import triton.language as tl

from .attention_tile import (
    LOG2E,
    TILE,
    keeps,
    lengths,
    place,
    power,
    rows,
    scores,
    seeing_queries,
    seen_keys,
    sequence,
    span,
    store_rows,
    stretch,
    visible,
)
from .dropout import pair_of


@triton.jit
def _probabilities(
    qk, lse, sums, i, j, bits, bits_t, bits_s, mixed, bias, bias_t, bias_s, slope, scale, softcap, T, S, first, last,
    left, right, shift,
    MASKED: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, CHEAP: tl.constexpr,
    UNIFORM: tl.constexpr,
):  # fmt: skip
    """(p, du / ds) of a tile; lse of `_lse`. p is the value of forward, before dropout."""
    s, slope_of_cap = scores(qk, i, j, bias, bias_t, bias_s, slope, scale, softcap, shift, T, S, SOFTCAP, CHEAP)
    p = power(s - lse, bias)
    if sums is not None:
        p /= tl.load(sums + i, mask=i < T, other=1.0)
    if MASKED:
        seen = visible(i, j, bits, bits_t, bits_s, mixed, T, first, last, left, right, shift, LEFT, RIGHT)
        p = tl.where(seen, p, 0.0)
        if UNIFORM:
            p = tl.where(lse == float("inf"), 1.0 / tl.cast(S, tl.float32), p)
    return p, slope_of_cap


@triton.jit
def _lse(lse, sums, i, T):
    """lse of queries, in the unit of scores. Without a key or a query, p must be 0."""
    lse_M = tl.load(lse + i, mask=i < T, other=float("inf"))
    lse_M = tl.where(lse_M == float("-inf"), float("inf"), lse_M)
    return lse_M * LOG2E if sums is None else lse_M


@triton.jit
def _any_blind(lse, i, T, UNIFORM: tl.constexpr):
    """Whether one of the queries sees no key, and so weighs all of them alike."""
    if UNIFORM:
        return tl.min(tl.load(lse + i, mask=i < T, other=0.0)) == float("-inf")
    else:
        return False


@triton.jit
def _add_keys(
    dk, dv, k_ND, v_NE, q, dout, lse, sums, delta, b, h, q0, m, n, M: tl.constexpr, N: tl.constexpr, j, row,
    q_b, q_h, q_t, d_b, d_h, d_t,
    bits, bits_t, bits_s, mixed, bias, bias_t, bias_s, slope, scale, softcap, T, S, first, last, left, right, shift,
    threshold, seed, counter, groups, share,
    MASKED: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, CHEAP: tl.constexpr,
    DROPOUT: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    PRECISION: tl.constexpr, UNIFORM: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """(dk / scale, dv) with the contribution of queries m to m + M added."""
    q_MD = rows(q, b, h, q0 + m, q0 + T, q_b, q_h, q_t, D, M, BLOCK_D, MASKED, TMA)
    qk_NM = tl.dot(k_ND, tl.trans(q_MD), input_precision=PRECISION)
    i = m + tl.arange(0, M)
    dout_ME = rows(dout, b, h, q0 + m, q0 + T, d_b, d_h, d_t, E, M, BLOCK_E, MASKED, TMA)
    keep = None
    if DROPOUT:
        keep = tl.trans(keeps(seed, counter, row + i, n, threshold, M, N, groups))
    p, cap = _probabilities(
        qk_NM, _lse(lse, sums, i, T)[None, :], sums, i[None, :], j, bits, bits_t, bits_s, mixed, bias, bias_t, bias_s,
        slope, scale, softcap, T, S, first, last, left, right, shift, MASKED, LEFT, RIGHT, SOFTCAP, CHEAP, UNIFORM,
    )  # fmt: skip
    kept = tl.where(keep, p * share, 0.0) if DROPOUT else p
    dv = tl.dot(kept.to(dout_ME.dtype), dout_ME, dv, input_precision=PRECISION)
    dp_NM = tl.dot(v_NE, tl.trans(dout_ME), input_precision=PRECISION)
    if DROPOUT:
        dp_NM = tl.where(keep, dp_NM * share, 0.0)
    delta_M = tl.load(delta + i, mask=i < T, other=0.0)
    ds = p * (dp_NM - delta_M[None, :])
    dk = tl.dot((ds * cap).to(q_MD.dtype), q_MD, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=["blocks", "T", "S", "n", "left", "right", "shift", "threshold", "seed", "offset"])
def keys_kernel(
    q, k, v, lse, sums, dout, delta, dk, dv, bits, tiles, bias, slopes, bounds, starts_q, starts_k, pair_2,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, d_b, d_h, d_t, dk_b, dk_h, dk_t, dv_b, dv_h, dv_t,
    bits_b, bits_h, bits_t, bits_s, tiles_b, tiles_h, tiles_t, tiles_s, bias_b, bias_h, bias_t, bias_s,
    slopes_b, slopes_h, blocks, H, T, S, n, scale, softcap, left, right, shift, threshold,
    seed: tl.int64, offset: tl.int64,
    GROUP: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr,
    CHEAP: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr, UNIT: tl.constexpr, UNIFORM: tl.constexpr,
    TMA: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dk and dv of a block of keys."""
    S *= UNIT
    G = H // GROUP
    block, b, g = place(tl.program_id(0), blocks, G)
    at, q0, k0, all_queries, all_keys = block * N, 0, 0, T, S
    if starts_q is not None:
        s, at = sequence(block, starts_k, n, N)
        q0, k0, T, S = lengths(starts_q, starts_k, s)
        if at >= S:
            return
    first, last = span(bounds, b, S)
    seed, offset = pair_of(pair_2, seed, offset)
    groups = ((all_keys + 7) // 8).to(tl.int64)
    share = 65536.0 / (65536 - threshold).to(tl.float32)
    j = at + tl.arange(0, N)[:, None]
    low, full, full_end, high = seeing_queries(at, T, shift, left, right, first, last, LEFT, RIGHT, M, N)
    k_ND = rows(k, b, g, k0 + at, k0 + S, k_b, k_h, k_t, D, N, BLOCK_D, True, TMA)
    v_NE = rows(v, b, g, k0 + at, k0 + S, v_b, v_h, v_t, E, N, BLOCK_E, True, TMA)
    dk_ND = tl.zeros([N, BLOCK_D], tl.float32)
    dv_NE = tl.zeros([N, BLOCK_E], tl.float32)
    for member in range(GROUP):
        h = g * GROUP + member
        row = (b * H + h).to(tl.int64) * all_queries + q0
        slope, bias_, bits_, tiles_, sums_ = None, None, None, None, None
        if slopes is not None:
            slope = tl.load(slopes + b * slopes_b + h * slopes_h)
        if bias is not None:
            bias_ = bias + b.to(tl.int64) * bias_b + h.to(tl.int64) * bias_h
            sums_ = sums + row
        if bits is not None:
            bits_ = bits + b.to(tl.int64) * bits_b + h.to(tl.int64) * bits_h
            tiles_ = tiles + b.to(tl.int64) * tiles_b + h.to(tl.int64) * tiles_h + (at // TILE) * tiles_s
            for m in tl.range(0 if UNIFORM else low, T if UNIFORM else high, M):
                kind = tl.load(tiles_ + (m // TILE) * tiles_t)
                whole = (kind == 2) & (m >= full) & (m < full_end)
                blind = _any_blind(lse + row, m + tl.arange(0, M), T, UNIFORM)
                if UNIFORM:
                    whole = whole & ~blind
                    kind = tl.where((m >= low) & (m < high), kind, 0)
                    kind = tl.where(blind & (kind == 0), 1, kind)
                if DROPOUT:  # two loop bodies would spill registers, and random numbers cost more than a mask
                    whole = False
                if whole:
                    dk_ND, dv_NE = _add_keys(
                        dk_ND, dv_NE, k_ND, v_NE, q, dout, lse + row, sums_, delta + row, b, h, q0, m, at, M, N, j,
                        row, q_b, q_h, q_t, d_b, d_h, d_t, None, 0, 0, False, bias_, bias_t, bias_s, slope,
                        scale, softcap, T, S, first, last, left, right, shift, threshold, seed, offset, groups, share,
                        False, LEFT, RIGHT, SOFTCAP,
                        CHEAP, DROPOUT, D, E, BLOCK_D, BLOCK_E, PRECISION, UNIFORM, TMA,
                    )  # fmt: skip
                elif kind != 0:
                    dk_ND, dv_NE = _add_keys(
                        dk_ND, dv_NE, k_ND, v_NE, q, dout, lse + row, sums_, delta + row, b, h, q0, m, at, M, N, j,
                        row, q_b, q_h, q_t, d_b, d_h, d_t, bits_, bits_t, bits_s, kind == 1, bias_, bias_t, bias_s,
                        slope, scale, softcap, T, S, first, last, left, right, shift, threshold, seed, offset, groups,
                        share, True, LEFT, RIGHT, SOFTCAP,
                        CHEAP, DROPOUT, D, E, BLOCK_D, BLOCK_E, PRECISION, UNIFORM, TMA,
                    )  # fmt: skip
        else:
            for part in tl.static_range(3):
                begin, end = stretch(part, 0 if UNIFORM else low, full, full_end, T if UNIFORM else high)
                if part > 0 or RIGHT or UNIFORM:
                    for m in tl.range(begin, end, M, num_stages=STAGES):
                        counts = True
                        if UNIFORM and part != 1:
                            blind = _any_blind(lse + row, m + tl.arange(0, M), T, UNIFORM)
                            counts = ((m >= low) & (m < high)) | blind
                        if counts:
                            dk_ND, dv_NE = _add_keys(
                                dk_ND, dv_NE, k_ND, v_NE, q, dout, lse + row, sums_, delta + row, b, h, q0, m, at, M, N,
                                j, row, q_b, q_h, q_t, d_b, d_h, d_t, None, 0, 0, False, bias_, bias_t, bias_s, slope,
                                scale, softcap, T, S, first, last, left, right, shift, threshold, seed, offset, groups,
                                share, part != 1, LEFT, RIGHT, SOFTCAP,
                                CHEAP, DROPOUT, D, E, BLOCK_D, BLOCK_E, PRECISION, UNIFORM, TMA,
                            )  # fmt: skip
    if dk is not None:
        store_rows(dk, dk_ND * scale, b, g, k0 + at, k0 + S, dk_b, dk_h, dk_t, D, N, BLOCK_D)
    if dv is not None:
        store_rows(dv, dv_NE, b, g, k0 + at, k0 + S, dv_b, dv_h, dv_t, E, N, BLOCK_E)


@triton.jit
def _add_queries(
    dq, q_MD, dout_ME, k, v, lse_M, sums, delta_M, b, g, k0, n, N: tl.constexpr, i, row, k_b, k_h, k_t, v_b, v_h, v_t,
    bits, bits_t, bits_s, mixed, bias, bias_t, bias_s, slope, scale, softcap, T, S, first, last, left, right, shift,
    threshold, seed, counter, groups, share,
    MASKED: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, CHEAP: tl.constexpr,
    DROPOUT: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    PRECISION: tl.constexpr, UNIFORM: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """dq / scale with the contribution of keys n to n + N added."""
    k_ND = rows(k, b, g, k0 + n, k0 + S, k_b, k_h, k_t, D, N, BLOCK_D, MASKED, TMA)
    qk = tl.dot(q_MD, tl.trans(k_ND), input_precision=PRECISION)
    v_NE = rows(v, b, g, k0 + n, k0 + S, v_b, v_h, v_t, E, N, BLOCK_E, MASKED, TMA)
    dp = tl.dot(dout_ME, tl.trans(v_NE), input_precision=PRECISION)
    if DROPOUT:
        dp = tl.where(keeps(seed, counter, row, n, threshold, q_MD.shape[0], N, groups), dp * share, 0.0)
    p, cap = _probabilities(
        qk, lse_M[:, None], sums, i, n + tl.arange(0, N)[None, :], bits, bits_t, bits_s, mixed, bias, bias_t, bias_s,
        slope, scale, softcap, T, S, first, last, left, right, shift, MASKED, LEFT, RIGHT, SOFTCAP, CHEAP, UNIFORM,
    )  # fmt: skip
    ds = p * (dp - delta_M[:, None])
    return tl.dot((ds * cap).to(k_ND.dtype), k_ND, dq, input_precision=PRECISION)


@triton.jit(do_not_specialize=["blocks", "T", "S", "n", "left", "right", "shift", "threshold", "seed", "offset"])
def queries_kernel(
    q, k, v, lse, sums, dout, delta, dq, bits, tiles, bias, slopes, bounds, starts_q, starts_k, pair_2,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, d_b, d_h, d_t, dq_b, dq_h, dq_t,
    bits_b, bits_h, bits_t, bits_s, tiles_b, tiles_h, tiles_t, tiles_s, bias_b, bias_h, bias_t, bias_s,
    slopes_b, slopes_h, blocks, H, T, S, n, scale, softcap, left, right, shift, threshold,
    seed: tl.int64, offset: tl.int64,
    GROUP: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr,
    CHEAP: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr, UNIT: tl.constexpr, UNIFORM: tl.constexpr,
    TMA: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dq of a block of queries."""
    S *= UNIT
    block, b, h = place(tl.program_id(0), blocks, H)
    block = blocks - 1 - block
    g = h // GROUP
    m, q0, k0, all_queries, all_keys = block * M, 0, 0, T, S
    if starts_q is not None:
        s, m = sequence(block, starts_q, n, M)
        q0, k0, T, S = lengths(starts_q, starts_k, s)
        if m >= T:
            return
    row = (b * H + h).to(tl.int64) * all_queries + q0
    first, last = span(bounds, b, S)
    slope = None
    if slopes is not None:
        slope = tl.load(slopes + b * slopes_b + h * slopes_h)
    if bias is not None:
        bias += b.to(tl.int64) * bias_b + h.to(tl.int64) * bias_h
        sums += row
    if bits is not None:
        bits += b.to(tl.int64) * bits_b + h.to(tl.int64) * bits_h
        tiles += b.to(tl.int64) * tiles_b + h.to(tl.int64) * tiles_h + (m // TILE).to(tl.int64) * tiles_t
    seed, offset = pair_of(pair_2, seed, offset)
    groups = ((all_keys + 7) // 8).to(tl.int64)
    share = 65536.0 / (65536 - threshold).to(tl.float32)
    i = m + tl.arange(0, M)
    low, full, full_end, high = seen_keys(m, T, shift, left, right, first, last, LEFT, RIGHT, M, N)
    blind = _any_blind(lse + row, i, T, UNIFORM)
    if UNIFORM:
        low, full, full_end = tl.where(blind, 0, low), tl.where(blind, 0, full), tl.where(blind, 0, full_end)
        high = tl.where(blind, S, high)
    q_MD = rows(q, b, h, q0 + m, q0 + T, q_b, q_h, q_t, D, M, BLOCK_D, True, TMA)
    dout_ME = rows(dout, b, h, q0 + m, q0 + T, d_b, d_h, d_t, E, M, BLOCK_E, True, TMA)
    lse_M, delta_M = _lse(lse + row, sums, i, T), tl.load(delta + row + i, mask=i < T, other=0.0)
    dq_MD = tl.zeros([M, BLOCK_D], tl.float32)
    if bits is not None:
        for at in tl.range(low, high, N):
            kind = tl.load(tiles + (at // TILE) * tiles_s)
            if UNIFORM:
                kind = tl.where(blind & (kind == 0), 1, kind)
            whole = (kind == 2) & (at >= full) & (at < full_end)
            if DROPOUT:  # as above
                whole = False
            if whole:
                dq_MD = _add_queries(
                    dq_MD, q_MD, dout_ME, k, v, lse_M, sums, delta_M, b, g, k0, at, N, i[:, None], row + i,
                    k_b, k_h, k_t, v_b, v_h, v_t, None, 0,
                    0, False, bias, bias_t, bias_s, slope, scale, softcap, T, S, first, last, left, right,
                    shift, threshold, seed, offset, groups, share, False, LEFT, RIGHT, SOFTCAP, CHEAP, DROPOUT, D, E,
                    BLOCK_D, BLOCK_E, PRECISION, UNIFORM, TMA,
                )  # fmt: skip
            elif kind != 0:
                dq_MD = _add_queries(
                    dq_MD, q_MD, dout_ME, k, v, lse_M, sums, delta_M, b, g, k0, at, N, i[:, None], row + i,
                    k_b, k_h, k_t, v_b, v_h, v_t, bits, bits_t,
                    bits_s, kind == 1, bias, bias_t, bias_s, slope, scale, softcap, T, S, first, last, left, right,
                    shift, threshold, seed, offset, groups, share, True, LEFT, RIGHT, SOFTCAP, CHEAP, DROPOUT, D, E,
                    BLOCK_D, BLOCK_E, PRECISION, UNIFORM, TMA,
                )  # fmt: skip
    else:
        for part in tl.static_range(3):
            begin, end = stretch(part, low, full, full_end, high)
            if part > 0 or LEFT or bounds is not None or UNIFORM:
                for at in tl.range(begin, end, N, num_stages=STAGES):
                    dq_MD = _add_queries(
                        dq_MD, q_MD, dout_ME, k, v, lse_M, sums, delta_M, b, g, k0, at, N, i[:, None], row + i,
                    k_b, k_h, k_t, v_b, v_h, v_t, None, 0,
                        0, False, bias, bias_t, bias_s, slope, scale, softcap, T, S, first, last, left, right,
                        shift, threshold, seed, offset, groups, share, part != 1, LEFT, RIGHT, SOFTCAP, CHEAP, DROPOUT,
                        D, E, BLOCK_D, BLOCK_E, PRECISION, UNIFORM, TMA,
                    )  # fmt: skip
    store_rows(dq, dq_MD * scale, b, h, q0 + m, q0 + T, dq_b, dq_h, dq_t, D, M, BLOCK_D)


@triton.jit(do_not_specialize=["across", "down", "T", "S", "left", "right", "shift", "threshold", "seed", "offset"])
def bias_kernel(
    q, k, v, lse, sums, dout, delta, dbias, bits, tiles, bias, slopes, bounds, pair_2,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, d_b, d_h, d_t,
    bits_b, bits_h, bits_t, bits_s, tiles_b, tiles_h, tiles_t, tiles_s, bias_b, bias_h, bias_t, bias_s,
    slopes_b, slopes_h, across, down, B, H, T, S, scale, softcap, left, right, shift, threshold,
    seed: tl.int64, offset: tl.int64,
    OF_BATCH: tl.constexpr, OF_HEAD: tl.constexpr,
    GROUP: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr,
    CHEAP: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr, UNIT: tl.constexpr, UNIFORM: tl.constexpr,
):  # fmt: skip
    """A tile of dbias, summed over the batches (unless OF_BATCH) and heads (unless OF_HEAD) that share it."""
    S *= UNIT
    column, z, row_of_tiles = place(tl.program_id(0), across, down)
    m, n = row_of_tiles * M, column * N
    own_h = z % H if OF_HEAD else 0
    own_b = (z // H if OF_HEAD else z) if OF_BATCH else 0
    groups = ((S + 7) // 8).to(tl.int64)
    share = 65536.0 / (65536 - threshold).to(tl.float32)
    seed, offset = pair_of(pair_2, seed, offset)
    i = m + tl.arange(0, M)
    j = n + tl.arange(0, N)
    total = tl.zeros([M, N], tl.float32)
    for other in range((1 if OF_BATCH else B) * (1 if OF_HEAD else H)):
        b = own_b if OF_BATCH else (other if OF_HEAD else other // H)
        h = own_h if OF_HEAD else other % H
        b, h = tl.cast(b, tl.int64), tl.cast(h, tl.int64)
        first, last = span(bounds, b, S)
        slope, bits_, kind = None, None, 2
        if slopes is not None:
            slope = tl.load(slopes + b * slopes_b + h * slopes_h)
        if bits is not None:
            bits_ = bits + b * bits_b + h * bits_h
            kind = tl.load(tiles + b * tiles_b + h * tiles_h + (m // TILE) * tiles_t + (n // TILE) * tiles_s)
        row = (b * H + h) * T
        q_MD = rows(q, b, h, m, T, q_b, q_h, q_t, D, M, BLOCK_D, True, False)
        k_ND = rows(k, b, h // GROUP, n, S, k_b, k_h, k_t, D, N, BLOCK_D, True, False)
        v_NE = rows(v, b, h // GROUP, n, S, v_b, v_h, v_t, E, N, BLOCK_E, True, False)
        dout_ME = rows(dout, b, h, m, T, d_b, d_h, d_t, E, M, BLOCK_E, True, False)
        lse_M, delta_M = _lse(lse + row, sums, i, T), tl.load(delta + row + i, mask=i < T, other=0.0)
        qk = tl.dot(q_MD, tl.trans(k_ND), input_precision=PRECISION)
        dp = tl.dot(dout_ME, tl.trans(v_NE), input_precision=PRECISION)
        if DROPOUT:
            dp = tl.where(keeps(seed, offset, row + i, n, threshold, M, N, groups), dp * share, 0.0)
        p, _ = _probabilities(
            qk, lse_M[:, None], sums + row, i[:, None], j[None, :], bits_, bits_t, bits_s, kind == 1,
            bias + b * bias_b + h * bias_h, bias_t, bias_s, slope, scale, softcap, T, S, first, last, left, right,
            shift, True, LEFT, RIGHT, SOFTCAP, CHEAP, False,
        )  # fmt: skip
        total += tl.where(kind == 0, 0.0, p * (dp - delta_M[:, None]))
    at = dbias + (tl.cast(z, tl.int64) * T + i[:, None]) * S + j[None, :]
    tl.store(at, total.to(dbias.dtype.element_ty), mask=(i < T)[:, None] & (j < S)[None, :])
