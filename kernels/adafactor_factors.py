"""The statistics of Adafactor: sums over rows and columns of tiles, and from them the states; see csrc/adafactor.h."""

import triton
import triton.language as tl

from .adafactor_tile import (
    FIRST_BLOCK,
    FIRST_TILE,
    ROWS,
    SHAPE,
    SIDE,
    SMALL,
    WARPS,
    WORK,
    codes_of,
    corner,
    count_of,
    factor_of,
    geometry,
    get,
    power,
    put,
    rounded,
    square,
)
from .lamb import addresses, aligned
from .launch import launch
from .optim import CODES, COLUMNS, FOUND_INF, GRAD, GROUP, HYPER, STATE, _coefficient

LANES = tl.constexpr(8)  # lanes that share the partial sums of a statistic


@triton.jit
def _sums_tile(columns, factor, row_sums, col_sums, m, r0, c0, R, C, G: tl.constexpr, VECTOR: tl.constexpr):
    total = tl.zeros([ROWS, SIDE], tl.float32)
    for first in range(r0, tl.minimum(r0 + SIDE, R), ROWS):
        start, at, inside = square(m, first, c0, R, C)
        g = get(columns[GRAD], start, at, inside, G, VECTOR) * factor
        r = first + tl.arange(0, ROWS)
        tl.store(row_sums + r, tl.sum(g * g, 1), r < R)
        total += g * g
    c = c0 + tl.arange(0, SIDE)
    tl.store(col_sums + c, tl.sum(total, 0), c < C)


@triton.jit(do_not_specialize=["count"])
def sums_kernel(
    rows_N, shapes_N, row_T, hyper_G, control_C, squares_P, work_S, count, CODE: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    n = tl.load(row_T + tile).to(tl.int64)
    row, shape = rows_N + n * COLUMNS, shapes_N + n * SHAPE
    R, C, M = geometry(row, shape)
    if (R * C > SMALL) & (tl.load(control_C + FOUND_INF) == 0):
        columns = addresses(row)
        factor = factor_of(hyper_G + tl.load(row + GROUP) * HYPER, _coefficient(control_C, squares_P, count))
        m, r0, c0 = corner(tile - tl.load(shape + FIRST_TILE), R, C)
        bands = tl.cdiv(R, SIDE)
        row_sums = work_S + tl.load(shape + WORK) + M * bands
        col_sums = row_sums + tl.cdiv(C, SIDE) * M * R + (m * bands + r0 // SIDE) * C
        row_sums += (c0 // SIDE * M + m) * R
        code = tl.load(row + CODES)
        for k in tl.static_range(len(CODE)):
            if code == CODE[k][0]:
                G: tl.constexpr = CODE[k][0] >> 4 & 15
                if aligned(columns) & (C % 8 == 0):
                    _sums_tile(columns, factor, row_sums, col_sums, m, r0, c0, R, C // 8 * 8, G, CODE[k][1])
                else:
                    _sums_tile(columns, factor, row_sums, col_sums, m, r0, c0, R, C, G, 0)


@triton.jit
def _average(address, at, inside, sums, b, S: tl.constexpr):
    """Moves statistics by b towards others; returns the stored values, float32."""
    kept = rounded((1 - b) * get(address, 0, at, inside, S, 0) + b * sums, S)
    put(kept, address, 0, at, inside, S, 0)
    return tl.where(inside, kept, 0.0)


@triton.jit
def _add_up(sums, stride, count, inside):
    """The sum of sums[k stride] over k < count, for SIDE pointers."""
    total = tl.zeros([LANES, SIDE], tl.float32)
    for first in range(0, count, LANES):
        k = first + tl.arange(0, LANES)[:, None]
        total += tl.load(sums[None, :] + k * stride, (k < count) & inside[None, :], 0.0).to(tl.float32)
    return tl.sum(total, 0)


@triton.jit
def _large_block(columns, block, means, M, R, C, b, S: tl.constexpr):
    bands, lane = tl.cdiv(R, SIDE), tl.arange(0, SIDE)
    across = tl.cdiv(C, SIDE)
    row_sums = means + M * bands
    if block < M * bands:
        m, r = block // bands, block % bands * SIDE + lane
        sums = _add_up(row_sums + m * R + r, M * R, across, r < R)
        kept = _average(columns[STATE], m * R + r, r < R, sums / C.to(tl.float32), b, S)
        tl.store(means + block, tl.sum(kept, 0))
    else:
        i = (block - M * bands) * SIDE + lane
        col_sums = row_sums + across * M * R
        sums = _add_up(col_sums + i // C * bands * C + i % C, C, bands, i < M * C)
        _average(columns[STATE + 1], i, i < M * C, sums / R.to(tl.float32), b, S)


@triton.jit
def _small_block(columns, block, means, M, R, C, factor, b, G: tl.constexpr, S: tl.constexpr):
    """Each lane has one matrix."""
    m = block * SIDE + tl.arange(0, SIDE)
    inside = m < M
    total = tl.zeros([SIDE], tl.float32)
    for r in range(0, R):
        sums = tl.zeros([SIDE], tl.float32)
        for c in range(0, C):
            g = get(columns[GRAD], 0, (m * R + r) * C + c, inside, G, 0) * factor
            sums += g * g
        total += _average(columns[STATE], m * R + r, inside, sums / C.to(tl.float32), b, S)
    tl.store(means + m, total, inside)
    for c in range(0, C):
        sums = tl.zeros([SIDE], tl.float32)
        for r in range(0, R):
            g = get(columns[GRAD], 0, (m * R + r) * C + c, inside, G, 0) * factor
            sums += g * g
        _average(columns[STATE + 1], m * C + c, inside, sums / R.to(tl.float32), b, S)


@triton.jit(do_not_specialize=["count"])
def factors_kernel(
    rows_N, shapes_N, row_K, hyper_G, control_C, squares_P, work_S, count, CODE: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    if tl.load(control_C + FOUND_INF) == 0:
        n = tl.load(row_K + block).to(tl.int64)
        row, shape = rows_N + n * COLUMNS, shapes_N + n * SHAPE
        R, C, M = geometry(row, shape)
        columns, hyper = addresses(row), hyper_G + tl.load(row + GROUP) * HYPER
        b, means = power(row, hyper).to(tl.float32), work_S + tl.load(shape + WORK)
        factor = factor_of(hyper, _coefficient(control_C, squares_P, count))
        local = block - tl.load(shape + FIRST_BLOCK)
        code = tl.load(row + CODES)
        for k in tl.static_range(len(CODE)):
            if code == CODE[k][0]:
                S: tl.constexpr = CODE[k][0] >> 8 & 15
                if R * C > SMALL:
                    _large_block(columns, local, means, M, R, C, b, S)
                else:
                    _small_block(columns, local, means, M, R, C, factor, b, CODE[k][0] >> 4 & 15, S)


def sums(rows, shapes, tile_row, hyper, control, squares, work, queue, features):
    if tile_row.numel():
        launch(
            sums_kernel, (tile_row.numel(),),
            rows, shapes, tile_row, hyper, control, squares, work, count_of(squares), codes_of(features),
            num_warps=WARPS,
        )  # fmt: skip


def factors(rows, shapes, block_row, hyper, control, squares, work, queue, features):
    if block_row.numel():
        launch(
            factors_kernel, (block_row.numel(),),
            rows, shapes, block_row, hyper, control, squares, work, count_of(squares), codes_of(features),
            num_warps=WARPS,
        )  # fmt: skip
