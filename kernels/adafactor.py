"""Adafactor; csrc/adafactor.h has the contract, and optim.py explains how formats are distinguished.

A program has one tile or block, and processes it in spans of ROWS x SIDE elements: rows and columns of a large matrix,
or consecutive elements of a vector or of small matrices, whose statistics are looked up.
"""

import triton
import triton.language as tl

from .adafactor_factors import factors, sums  # noqa: F401  with these, what a room asks of a kernel
from .adafactor_tile import (
    EPS1,
    EPS2,
    FIRST_TILE,
    ROWS,
    SHAPE,
    SIDE,
    SMALL,
    THRESHOLD,
    TILE,
    WARPS,
    WORK,
    codes_of,
    corner,
    count_of,
    factor_of,
    geometry,
    get,
    get_parameter,
    power,
    put,
    put_parameter,
    rounded,
    run,
    square,
)
from .lamb import addresses, aligned
from .launch import launch
from .optim import (  # noqa: F401
    CODES,
    COLUMNS,
    FOUND_INF,
    GRAD,
    GROUP,
    HYPER,
    LR,
    NUMEL,
    STATE,
    STEP,
    WEIGHT_DECAY,
    _coefficient,
    partials,
    prepare,
)

ADDED = tl.constexpr(512)  # sums that a program adds at a time


@triton.jit
def _at_least(x, least):
    return tl.where(x < least, least, x)  # NaN stays


@triton.jit
def _mean(means, m, R):
    """The mean of a matrix's `row`."""
    bands = tl.cdiv(R, SIDE)
    total = tl.zeros([ADDED], tl.float32)
    for first in range(0, bands, ADDED):
        i = first + tl.arange(0, ADDED)
        total += tl.load(means + m * bands + i, i < bands, 0.0).to(tl.float32)
    return tl.sum(total, 0) / R.to(tl.float32)


@triton.jit
def _estimate(
    columns, first, at, inside, means, R, C, eps1, S: tl.constexpr, LOOK_UP: tl.constexpr, VECTOR: tl.constexpr
):  # fmt: skip
    """V of consecutive elements: the variance, or looked up (if there are small matrices)."""
    if not LOOK_UP:  # noqa: SIM114  which the compiler knows
        v = get(columns[STATE], first, at, inside, S, VECTOR)
    elif R == 0:
        v = get(columns[STATE], first, at, inside, S, VECTOR)
    else:
        # For such small matrices, indices relative to the first one's start need few bits.
        rows, cols = R.to(tl.int32), C.to(tl.int32)
        m0 = first // (R * C)
        at += (first - m0 * (R * C)).to(tl.int32)
        r = at // cols
        m = r // rows
        mean = tl.load(means + m0 + m, inside, 1.0).to(tl.float32) / rows.to(tl.float32)
        part = get(columns[STATE], m0 * R, r, inside, S, 0) / _at_least(mean, eps1)
        v = part * get(columns[STATE + 1], m0 * C, m * cols + at - r * cols, inside, S, 0)
    return v


@triton.jit
def _span(
    columns, start, at, inside, v, numbers, ema_rate, seed, counter, CODE: tl.constexpr, MASTER: tl.constexpr,
    HAS_EMA: tl.constexpr, STOCHASTIC: tl.constexpr, UPDATE: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """The sums of p^2 and u^2 over a span, or (UPDATE) its step; factor: of the gradients, or of the decay of p."""
    factor, least, left = numbers
    P: tl.constexpr = CODE & 15
    p = get_parameter(columns, start, at, inside, P, MASTER, VECTOR)
    g = get(columns[GRAD], start, at, inside, CODE >> 4 & 15, VECTOR) * factor
    u = tl.where(inside, g * tl.rsqrt(_at_least(v, least)), 0.0)
    if UPDATE:
        p = p * left - u
        put_parameter(p, columns, start, at, inside, ema_rate, seed, counter, P, MASTER, HAS_EMA, STOCHASTIC, VECTOR)
        return 0.0, 0.0
    else:
        return tl.sum(tl.reshape(p * p, [ROWS * SIDE]), 0), tl.sum(tl.reshape(u * u, [ROWS * SIDE]), 0)


@triton.jit
def _large_tile(
    columns, m, r0, c0, means, R, C, eps1, numbers, ema_rate, seed, counter, CODE: tl.constexpr, MASTER: tl.constexpr,
    HAS_EMA: tl.constexpr, STOCHASTIC: tl.constexpr, UPDATE: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    S: tl.constexpr = CODE >> 8 & 15
    middle = _at_least(_mean(means, m, R), eps1)
    c = c0 + tl.arange(0, SIDE)[None, :]
    cols = get(columns[STATE + 1], m * C, c, c < C, S, 0)
    total_p, total_u = tl.zeros([], tl.float64), tl.zeros([], tl.float64)
    for first in range(r0, tl.minimum(r0 + SIDE, R), ROWS):
        start, at, inside = square(m, first, c0, R, C)
        r = first + tl.arange(0, ROWS)[:, None]
        v = get(columns[STATE], m * R, r, r < R, S, 0) / middle * cols
        sum_p, sum_u = _span(
            columns, start, at, inside, v, numbers, ema_rate, seed, counter + (first - r0) * (SIDE // 8),
            CODE, MASTER, HAS_EMA, STOCHASTIC, UPDATE, VECTOR,
        )  # fmt: skip
        total_p += sum_p
        total_u += sum_u
    return total_p, total_u


@triton.jit
def _flat_tile(
    columns, begin, end, means, R, C, eps1, b, numbers, ema_rate, seed, counter, CODE: tl.constexpr,
    MASTER: tl.constexpr, HAS_EMA: tl.constexpr, STOCHASTIC: tl.constexpr, UPDATE: tl.constexpr, LOOK_UP: tl.constexpr,
    VECTOR: tl.constexpr,
):  # fmt: skip
    S: tl.constexpr = CODE >> 8 & 15
    total_p, total_u = tl.zeros([], tl.float64), tl.zeros([], tl.float64)
    for first in range(begin, end, ROWS * SIDE):
        at, inside = run(end - first)
        v = _estimate(columns, first, at, inside, means, R, C, eps1, S, LOOK_UP, VECTOR)
        if not UPDATE:  # noqa: SIM102  of which the compiler knows only the first
            if R == 0:
                g = get(columns[GRAD], first, at, inside, CODE >> 4 & 15, VECTOR) * numbers[0]
                v = rounded((1 - b) * v + b * (g * g), S)
                put(v, columns[STATE], first, at, inside, S, VECTOR)
        sum_p, sum_u = _span(
            columns, first, at, inside, v, numbers, ema_rate, seed, counter + (first - begin) // 8,
            CODE, MASTER, HAS_EMA, STOCHASTIC, UPDATE, VECTOR,
        )  # fmt: skip
        total_p += sum_p
        total_u += sum_u
    return total_p, total_u


@triton.jit
def _tile(
    rows_N, shapes_N, row_T, hyper_G, control_C, squares_P, work_S, scales_N, count, ema_rate, seed, offset,
    CODE: tl.constexpr, MASTER: tl.constexpr, HAS_EMA: tl.constexpr, STOCHASTIC: tl.constexpr, UPDATE: tl.constexpr,
    LOOK_UP: tl.constexpr,
):  # fmt: skip
    """The contribution of the program's tile to the norms of its row, or (UPDATE) the step of the tile."""
    tile = tl.program_id(0)
    n = tl.load(row_T + tile).to(tl.int64)
    row, shape = rows_N + n * COLUMNS, shapes_N + n * SHAPE
    R, C, _ = geometry(row, shape)
    columns, hyper = addresses(row), hyper_G + tl.load(row + GROUP) * HYPER
    eps1 = tl.load(hyper + EPS1)
    if UPDATE:
        factor, b = tl.load(scales_N + n).to(tl.float32), 0.0
    else:
        factor, b = factor_of(hyper, _coefficient(control_C, squares_P, count)), power(row, hyper).to(tl.float32)
    left = 1 - tl.load(hyper + LR) * tl.load(hyper + WEIGHT_DECAY)
    numbers = factor, (eps1 * eps1).to(tl.float32), left.to(tl.float32)
    eps1, means = eps1.to(tl.float32), work_S + tl.load(shape + WORK)
    local = tile - tl.load(shape + FIRST_TILE)
    counter = offset + tile.to(tl.int64) * (TILE // 8)
    code = tl.load(row + CODES)
    total_p, total_u = tl.zeros([], tl.float64), tl.zeros([], tl.float64)
    for k in tl.static_range(len(CODE)):
        if code == CODE[k][0]:
            if R * C > SMALL:
                m, r0, c0 = corner(local, R, C)
                if aligned(columns) & (C % 8 == 0):
                    total_p, total_u = _large_tile(
                        columns, m, r0, c0, means, R, C // 8 * 8, eps1, numbers, ema_rate, seed, counter,
                        CODE[k][0], MASTER, HAS_EMA, STOCHASTIC, UPDATE, CODE[k][1],
                    )  # fmt: skip
                else:
                    total_p, total_u = _large_tile(
                        columns, m, r0, c0, means, R, C, eps1, numbers, ema_rate, seed, counter,
                        CODE[k][0], MASTER, HAS_EMA, STOCHASTIC, UPDATE, 0,
                    )  # fmt: skip
            else:
                begin, numel = local * TILE, tl.load(row + NUMEL)
                end = tl.minimum(begin + TILE, numel)
                if aligned(columns) & (end % 8 == 0):
                    total_p, total_u = _flat_tile(
                        columns, begin, end // 8 * 8, means, R, C, eps1, b, numbers, ema_rate, seed, counter,
                        CODE[k][0], MASTER, HAS_EMA, STOCHASTIC, UPDATE, LOOK_UP, CODE[k][1],
                    )  # fmt: skip
                else:
                    total_p, total_u = _flat_tile(
                        columns, begin, end, means, R, C, eps1, b, numbers, ema_rate, seed, counter,
                        CODE[k][0], MASTER, HAS_EMA, STOCHASTIC, UPDATE, LOOK_UP, 0,
                    )  # fmt: skip
    return total_p, total_u


@triton.jit(do_not_specialize=["count"])
def norms_kernel(
    rows_N, shapes_N, row_T, hyper_G, control_C, squares_P, work_S, partials_T2, count,
    CODE: tl.constexpr, MASTER: tl.constexpr, LOOK_UP: tl.constexpr,
):  # fmt: skip
    if tl.load(control_C + FOUND_INF) == 0:
        total_p, total_u = _tile(
            rows_N, shapes_N, row_T, hyper_G, control_C, squares_P, work_S, None, count, 0.0, 0, 0,
            CODE, MASTER, False, False, False, LOOK_UP,
        )  # fmt: skip
        tl.store(partials_T2 + 2 * tl.program_id(0), total_p)
        tl.store(partials_T2 + 2 * tl.program_id(0) + 1, total_u)


@triton.jit(do_not_specialize=["count"])
def scale_kernel(rows_N, shapes_N, hyper_G, control_C, squares_P, partials_T2, scales_N, count):
    coefficient = _coefficient(control_C, squares_P, count)
    n = tl.program_id(0).to(tl.int64)
    row, shape = rows_N + n * COLUMNS, shapes_N + n * SHAPE
    numel = tl.load(row + NUMEL)
    if (numel > 0) & (tl.load(control_C + FOUND_INF) == 0):
        R, C, M = geometry(row, shape)
        hyper = hyper_G + tl.load(row + GROUP) * HYPER
        tiles = tl.where(R * C > SMALL, M * tl.cdiv(R, SIDE) * tl.cdiv(C, SIDE), tl.cdiv(numel, TILE))
        pairs = partials_T2 + 2 * tl.load(shape + FIRST_TILE)
        total_p, total_u = tl.zeros([ADDED], tl.float64), tl.zeros([ADDED], tl.float64)
        for first in range(0, tiles, ADDED):
            i = first + tl.arange(0, ADDED)
            total_p += tl.load(pairs + 2 * i, i < tiles, 0.0)
            total_u += tl.load(pairs + 2 * i + 1, i < tiles, 0.0)
        t = tl.load(tl.load(row + STEP).to(tl.pointer_type(tl.float32))).to(tl.float64)
        p_rms, u_rms = tl.sqrt(tl.sum(total_p, 0) / numel), tl.sqrt(tl.sum(total_u, 0) / numel)
        rate = tl.minimum(tl.load(hyper + LR), 1 / tl.sqrt(t)) * _at_least(p_rms, tl.load(hyper + EPS2))
        rate /= _at_least(u_rms / tl.load(hyper + THRESHOLD), 1.0)
        tl.store(scales_N + n, rate * factor_of(hyper, coefficient))


@triton.jit(do_not_specialize=["seed", "offset"])
def update_kernel(
    rows_N, shapes_N, row_T, hyper_G, control_C, work_S, scales_N, ema_rate, seed: tl.int64, offset: tl.int64,
    CODE: tl.constexpr, MASTER: tl.constexpr, HAS_EMA: tl.constexpr, STOCHASTIC: tl.constexpr,
    LOOK_UP: tl.constexpr,
):  # fmt: skip
    if tl.load(control_C + FOUND_INF) == 0:
        _tile(
            rows_N, shapes_N, row_T, hyper_G, control_C, None, work_S, scales_N, 0, ema_rate,
            seed.to(tl.int64), offset.to(tl.int64), CODE, MASTER, HAS_EMA, STOCHASTIC, True, LOOK_UP,
        )  # fmt: skip


# ---- launches


def norms(rows, shapes, tile_row, hyper, control, squares, work, pairs, queue, features, small):
    if tile_row.numel():
        # Without a limit, the assembler uses fewer registers and spills one.
        launch(
            norms_kernel, (tile_row.numel(),),
            rows, shapes, tile_row, hyper, control, squares, work, pairs, count_of(squares),
            codes_of(features), features.remainder, small, num_warps=2 * WARPS, maxnreg=128,
        )  # fmt: skip


def scale(rows, shapes, hyper, control, squares, pairs, scales, queue):
    if rows.shape[0]:
        launch(
            scale_kernel, (rows.shape[0],),
            rows, shapes, hyper, control, squares, pairs, scales, count_of(squares), num_warps=WARPS,
        )  # fmt: skip


def update(
    rows, shapes, tile_row, hyper, control, work, scales, ema_decay, seed, offset, queue, features, small
):  # fmt: skip
    if tile_row.numel():
        launch(
            update_kernel, (tile_row.numel(),),
            rows, shapes, tile_row, hyper, control, work, scales, 1.0 - ema_decay,
            max(seed, 0), offset, codes_of(features), features.remainder, features.ema, seed >= 0, small,
            num_warps=2 * WARPS,
        )  # fmt: skip
