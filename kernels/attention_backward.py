"""The backward of attention: csrc/attention.h, attention_tile.py; attention.py launches."""

import triton
import triton.language as tl

from .attention_tile import LOG2E, TILE, keeps, rows, scores, seeing_queries, seen_keys, sequence, store_rows, visible


@triton.jit
def _slopes(
    qk, dp, lse, delta, i, j, bits, bits_t, bits_s, mixed, bias, bias_t, bias_s, slope, scale, softcap, T, S, first, last,
    left, right, shift, keep, share,
    MASKED: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, CHEAP: tl.constexpr,
    DROPOUT: tl.constexpr,
):  # fmt: skip
    """(p, ds, du / ds) of a tile; lse in units of log 2. p is that of forward, before dropout."""
    s, slope_of_cap = scores(qk, i, j, bias, bias_t, bias_s, slope, scale, softcap, shift, T, S, SOFTCAP, CHEAP)
    p = tl.exp2(s - lse)
    if MASKED:
        seen = visible(i, j, bits, bits_t, bits_s, mixed, T, first, last, left, right, shift, LEFT, RIGHT)
        p = tl.where(seen, p, 0.0)
    if DROPOUT:
        dp = tl.where(keep, dp * share, 0.0)
    return p, p * (dp - delta), slope_of_cap


@triton.jit
def _of_queries(lse, delta, i, T):
    """lse, in units of log 2, and delta of queries. Where there is no key, or no query, p is to be 0."""
    lse_M = tl.load(lse + i, mask=i < T, other=float("inf"))
    return tl.where(lse_M == float("-inf"), float("inf"), lse_M * LOG2E), tl.load(delta + i, mask=i < T, other=0.0)


@triton.jit
def _add_keys(
    dk, dv, k_ND, v_NE, q, dout, lse, delta, m, n, M: tl.constexpr, N: tl.constexpr, j, row, q_t, d_t,
    bits, bits_t, bits_s, mixed, bias, bias_t, bias_s, slope, scale, softcap, T, S, first, last, left, right, shift,
    threshold, seed, counter, groups, share,
    MASKED: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, CHEAP: tl.constexpr,
    DROPOUT: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """(dk / scale, dv) with what queries m to m + M add."""
    q_MD = rows(q, m, T, q_t, D, M, BLOCK_D, MASKED)
    qk_NM = tl.dot(k_ND, tl.trans(q_MD), input_precision=PRECISION)
    i = m + tl.arange(0, M)
    lse_M, delta_M = _of_queries(lse, delta, i, T)
    dout_ME = rows(dout, m, T, d_t, E, M, BLOCK_E, MASKED)
    dp_NM = tl.dot(v_NE, tl.trans(dout_ME), input_precision=PRECISION)
    keep = None
    if DROPOUT:
        keep = tl.trans(keeps(seed, counter, row + i, n, threshold, M, N, groups))
    p, ds, cap = _slopes(
        qk_NM, dp_NM, lse_M[None, :], delta_M[None, :], i[None, :], j, bits, bits_t, bits_s, mixed, bias, bias_t, bias_s,
        slope, scale, softcap, T, S, first, last, left, right, shift, keep, share, MASKED, LEFT, RIGHT, SOFTCAP, CHEAP,
        DROPOUT,
    )  # fmt: skip
    if DROPOUT:
        p = tl.where(keep, p * share, 0.0)
    dv = tl.dot(p.to(dout_ME.dtype), dout_ME, dv, input_precision=PRECISION)
    dk = tl.dot((ds * cap).to(q_MD.dtype), q_MD, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=["T", "S", "n", "left", "right", "shift", "threshold", "seed", "offset"])
def keys_kernel(
    q, k, v, lse, dout, delta, dk, dv, bits, tiles, bias, slopes, bounds, starts_q, starts_k, pair_2,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, d_b, d_h, d_t, dk_b, dk_h, dk_t, dv_b, dv_h, dv_t,
    bits_b, bits_h, bits_t, bits_s, tiles_b, tiles_h, tiles_t, tiles_s, bias_b, bias_h, bias_t, bias_s,
    slopes_b, slopes_h, H, T, S, n, scale, softcap, left, right, shift, threshold, seed: tl.int64, offset: tl.int64,
    GROUP: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr,
    CHEAP: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dk and dv of a block of keys."""
    G = H // GROUP
    b, g = tl.program_id(1) // G, tl.program_id(1) % G
    at, total, all_keys = tl.program_id(0) * N, T, S
    first_row = b.to(tl.int64) * 0
    if starts_q is not None:
        s, at = sequence(tl.program_id(0), starts_k, n, N)
        start = tl.load(starts_q + s)
        T = tl.load(starts_q + s + 1) - start
        start_k = tl.load(starts_k + s)
        S = tl.load(starts_k + s + 1) - start_k
        first_row = start.to(tl.int64)
        q += first_row * q_t
        dout += first_row * d_t
        k += start_k.to(tl.int64) * k_t
        v += start_k.to(tl.int64) * v_t
        if dk is not None:
            dk += start_k.to(tl.int64) * dk_t
        if dv is not None:
            dv += start_k.to(tl.int64) * dv_t
        if at >= S:
            return
    k += b.to(tl.int64) * k_b + g.to(tl.int64) * k_h
    v += b.to(tl.int64) * v_b + g.to(tl.int64) * v_h
    first, last = 0, S
    if bounds is not None:
        first = tl.maximum(tl.load(bounds + 2 * b), 0)
        last = tl.minimum(tl.load(bounds + 2 * b + 1), S)
    if pair_2 is not None:
        seed = tl.load(pair_2)
        offset = tl.load(pair_2 + 1)
    groups = ((all_keys + 7) // 8).to(tl.int64)
    share = 65536.0 / (65536 - threshold).to(tl.float32)
    j = at + tl.arange(0, N)[:, None]
    low, full, full_end, high = seeing_queries(at, T, shift, left, right, first, last, LEFT, RIGHT, M, N)
    k_ND = rows(k, at, S, k_t, D, N, BLOCK_D, True)
    v_NE = rows(v, at, S, v_t, E, N, BLOCK_E, True)
    dk_ND = tl.zeros([N, BLOCK_D], tl.float32)
    dv_NE = tl.zeros([N, BLOCK_E], tl.float32)
    for member in range(GROUP):
        h = g * GROUP + member
        q_h_ = q + b.to(tl.int64) * q_b + h.to(tl.int64) * q_h
        dout_h = dout + b.to(tl.int64) * d_b + h.to(tl.int64) * d_h
        row = (b * H + h).to(tl.int64) * total + first_row
        slope, bias_, bits_, tiles_ = None, None, None, None
        if slopes is not None:
            slope = tl.load(slopes + b * slopes_b + h * slopes_h)
        if bias is not None:
            bias_ = bias + b.to(tl.int64) * bias_b + h.to(tl.int64) * bias_h
        if bits is not None:
            bits_ = bits + b.to(tl.int64) * bits_b + h.to(tl.int64) * bits_h
            tiles_ = tiles + b.to(tl.int64) * tiles_b + h.to(tl.int64) * tiles_h + (at // TILE) * tiles_s
            for m in tl.range(low, high, M):
                kind = tl.load(tiles_ + (m // TILE) * tiles_t)
                if kind != 0:
                    dk_ND, dv_NE = _add_keys(
                        dk_ND, dv_NE, k_ND, v_NE, q_h_, dout_h, lse + row, delta + row, m, at, M, N, j, row, q_t, d_t,
                        bits_, bits_t, bits_s, kind == 1, bias_, bias_t, bias_s, slope, scale, softcap, T, S, first,
                        last, left, right, shift, threshold, seed, offset, groups, share, True, LEFT, RIGHT, SOFTCAP,
                        CHEAP, DROPOUT, D, E, BLOCK_D, BLOCK_E, PRECISION,
                    )  # fmt: skip
        else:
            for part in tl.static_range(3):
                begin = low if part == 0 else (full if part == 1 else full_end)
                end = tl.minimum(full, high) if part == 0 else (full_end if part == 1 else high)
                if part > 0 or RIGHT:
                    for m in tl.range(begin, end, M, num_stages=STAGES):
                        dk_ND, dv_NE = _add_keys(
                            dk_ND, dv_NE, k_ND, v_NE, q_h_, dout_h, lse + row, delta + row, m, at, M, N, j, row, q_t,
                            d_t, None, 0, 0, False, bias_, bias_t, bias_s, slope, scale, softcap, T, S, first, last,
                            left, right, shift, threshold, seed, offset, groups, share, part != 1, LEFT, RIGHT, SOFTCAP,
                            CHEAP, DROPOUT, D, E, BLOCK_D, BLOCK_E, PRECISION,
                        )  # fmt: skip
    if dk is not None:
        store_rows(dk + b.to(tl.int64) * dk_b + g.to(tl.int64) * dk_h, dk_ND * scale, at, S, dk_t, D, N, BLOCK_D)
    if dv is not None:
        store_rows(dv + b.to(tl.int64) * dv_b + g.to(tl.int64) * dv_h, dv_NE, at, S, dv_t, E, N, BLOCK_E)


@triton.jit
def _add_queries(
    dq, q_MD, dout_ME, k, v, lse_M, delta_M, n, N: tl.constexpr, i, row, k_t, v_t,
    bits, bits_t, bits_s, mixed, bias, bias_t, bias_s, slope, scale, softcap, T, S, first, last, left, right, shift,
    threshold, seed, counter, groups, share,
    MASKED: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, CHEAP: tl.constexpr,
    DROPOUT: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dq / scale with what keys n to n + N add."""
    k_ND = rows(k, n, S, k_t, D, N, BLOCK_D, MASKED)
    qk = tl.dot(q_MD, tl.trans(k_ND), input_precision=PRECISION)
    v_NE = rows(v, n, S, v_t, E, N, BLOCK_E, MASKED)
    dp = tl.dot(dout_ME, tl.trans(v_NE), input_precision=PRECISION)
    keep = None
    if DROPOUT:
        keep = keeps(seed, counter, row, n, threshold, q_MD.shape[0], N, groups)
    _, ds, cap = _slopes(
        qk, dp, lse_M[:, None], delta_M[:, None], i, n + tl.arange(0, N)[None, :], bits, bits_t, bits_s, mixed,
        bias, bias_t, bias_s, slope, scale, softcap, T, S, first, last, left, right, shift, keep, share, MASKED, LEFT,
        RIGHT, SOFTCAP, CHEAP, DROPOUT,
    )  # fmt: skip
    return tl.dot((ds * cap).to(k_ND.dtype), k_ND, dq, input_precision=PRECISION)


@triton.jit(do_not_specialize=["T", "S", "n", "left", "right", "shift", "threshold", "seed", "offset"])
def queries_kernel(
    q, k, v, lse, dout, delta, dq, bits, tiles, bias, slopes, bounds, starts_q, starts_k, pair_2,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, d_b, d_h, d_t, dq_b, dq_h, dq_t,
    bits_b, bits_h, bits_t, bits_s, tiles_b, tiles_h, tiles_t, tiles_s, bias_b, bias_h, bias_t, bias_s,
    slopes_b, slopes_h, H, T, S, n, scale, softcap, left, right, shift, threshold, seed: tl.int64, offset: tl.int64,
    GROUP: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr,
    CHEAP: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dq of a block of queries."""
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    b, h = tl.program_id(1) // H, tl.program_id(1) % H
    m, total, all_keys = block * M, T, S
    first_row = b.to(tl.int64) * 0
    if starts_q is not None:
        s, m = sequence(block, starts_q, n, M)
        start = tl.load(starts_q + s)
        T = tl.load(starts_q + s + 1) - start
        start_k = tl.load(starts_k + s)
        S = tl.load(starts_k + s + 1) - start_k
        first_row = start.to(tl.int64)
        q += first_row * q_t
        dout += first_row * d_t
        dq += first_row * dq_t
        k += start_k.to(tl.int64) * k_t
        v += start_k.to(tl.int64) * v_t
        if m >= T:
            return
    q += b.to(tl.int64) * q_b + h.to(tl.int64) * q_h
    k += b.to(tl.int64) * k_b + (h // GROUP).to(tl.int64) * k_h
    v += b.to(tl.int64) * v_b + (h // GROUP).to(tl.int64) * v_h
    dout += b.to(tl.int64) * d_b + h.to(tl.int64) * d_h
    row = (b * H + h).to(tl.int64) * total + first_row
    first, last = 0, S
    if bounds is not None:
        first = tl.maximum(tl.load(bounds + 2 * b), 0)
        last = tl.minimum(tl.load(bounds + 2 * b + 1), S)
    slope = None
    if slopes is not None:
        slope = tl.load(slopes + b * slopes_b + h * slopes_h)
    if bias is not None:
        bias += b.to(tl.int64) * bias_b + h.to(tl.int64) * bias_h
    if bits is not None:
        bits += b.to(tl.int64) * bits_b + h.to(tl.int64) * bits_h
        tiles += b.to(tl.int64) * tiles_b + h.to(tl.int64) * tiles_h + (m // TILE).to(tl.int64) * tiles_t
    if pair_2 is not None:
        seed = tl.load(pair_2)
        offset = tl.load(pair_2 + 1)
    groups = ((all_keys + 7) // 8).to(tl.int64)
    share = 65536.0 / (65536 - threshold).to(tl.float32)
    i = m + tl.arange(0, M)
    low, full, full_end, high = seen_keys(m, T, shift, left, right, first, last, LEFT, RIGHT, M, N)
    q_MD = rows(q, m, T, q_t, D, M, BLOCK_D, True)
    dout_ME = rows(dout, m, T, d_t, E, M, BLOCK_E, True)
    lse_M, delta_M = _of_queries(lse + row, delta + row, i, T)
    dq_MD = tl.zeros([M, BLOCK_D], tl.float32)
    if bits is not None:
        for at in tl.range(low, high, N):
            kind = tl.load(tiles + (at // TILE) * tiles_s)
            if kind != 0:
                dq_MD = _add_queries(
                    dq_MD, q_MD, dout_ME, k, v, lse_M, delta_M, at, N, i[:, None], row + i, k_t, v_t, bits, bits_t,
                    bits_s, kind == 1, bias, bias_t, bias_s, slope, scale, softcap, T, S, first, last, left, right,
                    shift, threshold, seed, offset, groups, share, True, LEFT, RIGHT, SOFTCAP, CHEAP, DROPOUT, D, E,
                    BLOCK_D, BLOCK_E, PRECISION,
                )  # fmt: skip
    else:
        for part in tl.static_range(3):
            begin = low if part == 0 else (full if part == 1 else full_end)
            end = tl.minimum(full, high) if part == 0 else (full_end if part == 1 else high)
            if part > 0 or LEFT or bounds is not None:
                for at in tl.range(begin, end, N, num_stages=STAGES):
                    dq_MD = _add_queries(
                        dq_MD, q_MD, dout_ME, k, v, lse_M, delta_M, at, N, i[:, None], row + i, k_t, v_t, None, 0,
                        0, False, bias, bias_t, bias_s, slope, scale, softcap, T, S, first, last, left, right,
                        shift, threshold, seed, offset, groups, share, part != 1, LEFT, RIGHT, SOFTCAP, CHEAP, DROPOUT,
                        D, E, BLOCK_D, BLOCK_E, PRECISION,
                    )  # fmt: skip
    store_rows(dq + b.to(tl.int64) * dq_b + h.to(tl.int64) * dq_h, dq_MD * scale, m, T, dq_t, D, M, BLOCK_D)


@triton.jit(do_not_specialize=["T", "S", "left", "right", "shift", "threshold", "seed", "offset"])
def bias_kernel(
    q, k, v, lse, dout, delta, dbias, bits, tiles, bias, slopes, bounds, pair_2,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, d_b, d_h, d_t,
    bits_b, bits_h, bits_t, bits_s, tiles_b, tiles_h, tiles_t, tiles_s, bias_b, bias_h, bias_t, bias_s,
    slopes_b, slopes_h, B, H, T, S, scale, softcap, left, right, shift, threshold, seed: tl.int64, offset: tl.int64,
    OF_BATCH: tl.constexpr, OF_HEAD: tl.constexpr,
    GROUP: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr,
    CHEAP: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of dbias, over the batches (unless OF_BATCH) and heads (unless OF_HEAD) that share it."""
    m, n = tl.program_id(1) * M, tl.program_id(0) * N
    z = tl.program_id(2)
    own_h = z % H if OF_HEAD else 0
    own_b = (z // H if OF_HEAD else z) if OF_BATCH else 0
    groups = ((S + 7) // 8).to(tl.int64)
    share = 65536.0 / (65536 - threshold).to(tl.float32)
    if pair_2 is not None:
        seed = tl.load(pair_2)
        offset = tl.load(pair_2 + 1)
    i = m + tl.arange(0, M)
    j = n + tl.arange(0, N)
    total = tl.zeros([M, N], tl.float32)
    for other in range((1 if OF_BATCH else B) * (1 if OF_HEAD else H)):
        b = own_b if OF_BATCH else (other if OF_HEAD else other // H)
        h = own_h if OF_HEAD else other % H
        b, h = tl.cast(b, tl.int64), tl.cast(h, tl.int64)
        first, last = 0, S
        if bounds is not None:
            first = tl.maximum(tl.load(bounds + 2 * b), 0)
            last = tl.minimum(tl.load(bounds + 2 * b + 1), S)
        slope, bits_, kind = None, None, 2
        if slopes is not None:
            slope = tl.load(slopes + b * slopes_b + h * slopes_h)
        if bits is not None:
            bits_ = bits + b * bits_b + h * bits_h
            kind = tl.load(tiles + b * tiles_b + h * tiles_h + (m // TILE) * tiles_t + (n // TILE) * tiles_s)
        row = (b * H + h) * T
        q_MD = rows(q + b * q_b + h * q_h, m, T, q_t, D, M, BLOCK_D, True)
        k_ND = rows(k + b * k_b + (h // GROUP) * k_h, n, S, k_t, D, N, BLOCK_D, True)
        v_NE = rows(v + b * v_b + (h // GROUP) * v_h, n, S, v_t, E, N, BLOCK_E, True)
        dout_ME = rows(dout + b * d_b + h * d_h, m, T, d_t, E, M, BLOCK_E, True)
        lse_M, delta_M = _of_queries(lse + row, delta + row, i, T)
        qk = tl.dot(q_MD, tl.trans(k_ND), input_precision=PRECISION)
        dp = tl.dot(dout_ME, tl.trans(v_NE), input_precision=PRECISION)
        keep = None
        if DROPOUT:
            keep = keeps(seed, offset, row + i, n, threshold, M, N, groups)
        _, ds, _ = _slopes(
            qk, dp, lse_M[:, None], delta_M[:, None], i[:, None], j[None, :], bits_, bits_t, bits_s, kind == 1,
            bias + b * bias_b + h * bias_h, bias_t, bias_s, slope, scale, softcap, T, S, first, last, left, right,
            shift, keep, share, True, LEFT, RIGHT, SOFTCAP, CHEAP, DROPOUT,
        )  # fmt: skip
        total += tl.where(kind == 0, 0.0, ds)
    at = dbias + (tl.cast(z, tl.int64) * T + i[:, None]) * S + j[None, :]
    tl.store(at, total.to(dbias.dtype.element_ty), mask=(i < T)[:, None] & (j < S)[None, :])
