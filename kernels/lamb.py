"""LAMB; csrc/lamb.h has the contract, and optim.py reads and writes tiles of rows."""

import triton
import triton.language as tl

from .launch import launch
from .optim import (
    BETA1,
    BETA2,
    CODES,
    COLUMNS,
    DECOUPLED,
    EMA,
    EPS,
    FIRST_TILE,
    FOUND_INF,
    GRAD,
    GROUP,
    HYPER,
    LR,
    MAXIMIZE,
    NUMEL,
    OPTIONS,
    STEP,
    TILE,
    WARPS,
    WEIGHT_DECAY,
    _coefficient,
    _load_parameter,
    _load_state,
    _powers,
    _store_parameter,
    _store_state,
    _vector,
    partials,  # noqa: F401  with prepare, a part of what a room asks of a kernel
    prepare,  # noqa: F401
)
from .optim_formats import BLOCK, FLOAT32, index, load, store

BIAS_CORRECTION, SUM, ALWAYS = tl.constexpr(16), tl.constexpr(32), tl.constexpr(64)
SPAN = tl.constexpr(1024)  # elements in registers at a time
ADDED = tl.constexpr(1024)  # partial sums that a program adds at a time


@triton.jit
def addresses(row):
    """The first ten columns of a row."""
    return (
        tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3), tl.load(row + 4), tl.load(row + 5),
        tl.load(row + 6), tl.load(row + 7), tl.load(row + 8), tl.load(row + 9),
    )  # fmt: skip


@triton.jit
def aligned(at):
    """Whether all of them are multiples of 16 bytes."""
    return (at[0] | at[1] | at[2] | at[3] | at[4] | at[5] | at[6] | at[7] | at[8] | at[9]) & 15 == 0


@triton.jit
def store_kept(
    p, at, start, left, ema_rate, seed, counter, P: tl.constexpr, MASTER: tl.constexpr, HAS_EMA: tl.constexpr,
    STOCHASTIC: tl.constexpr, BLOCKS: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Writes a span of a parameter, and its average."""
    kept = _store_parameter(p, at, start, left, seed, counter, P, MASTER, STOCHASTIC, BLOCKS, VECTOR)
    if HAS_EMA:  # noqa: SIM102  of which the compiler knows only the first
        if at[EMA] != 0:
            average = load(at[EMA], start, left, FLOAT32, BLOCKS, VECTOR)
            store(average + ema_rate * (kept - average), at[EMA], start, left, FLOAT32, BLOCKS, VECTOR)


@triton.jit
def _numbers(row, hyper):
    """1 / (1 - beta1^t), 1 / sqrt(1 - beta2^t), and the decay that is added to g, and to u, for each p; all float32."""
    options, weight_decay = tl.load(hyper + OPTIONS).to(tl.int32), tl.load(hyper + WEIGHT_DECAY)
    step = tl.load(tl.load(row + STEP).to(tl.pointer_type(tl.float32))).to(tl.int32)
    b1_power, b2_power = _powers(tl.load(hyper + BETA1), tl.load(hyper + BETA2), step)
    corrected, decoupled = (options & BIAS_CORRECTION) != 0, (options & DECOUPLED) != 0
    root1, root2 = tl.where(corrected, 1 / (1 - b1_power), 1.0), tl.where(corrected, 1 / tl.sqrt(1 - b2_power), 1.0)
    pull, shrink = tl.where(decoupled, 0.0, weight_decay), tl.where(decoupled, weight_decay, 0.0)
    return root1.to(tl.float32), root2.to(tl.float32), pull.to(tl.float32), shrink.to(tl.float32)


@triton.jit
def _direction(p, m, v, root1, root2, shrink, eps):
    return m * root1 / (tl.sqrt(v) * root2 + eps) + shrink * p


@triton.jit
def _moments_span(
    at, start, left, numbers, coefficient, b1, share, b2, c2, eps, CODE: tl.constexpr, MASTER: tl.constexpr,
    BLOCKS: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """The sums of p^2 and u^2 over a span."""
    root1, root2, pull, shrink = numbers
    S: tl.constexpr = CODE >> 8 & 15
    p = _load_parameter(at, start, left, CODE & 15, MASTER, BLOCKS, VECTOR)
    g = load(at[GRAD], start, left, CODE >> 4 & 15, BLOCKS, VECTOR) * coefficient + pull * p
    m = b1 * _load_state(at, 0, start, left, S, True, BLOCKS, VECTOR) + share * g
    v = b2 * _load_state(at, 1, start, left, S, False, BLOCKS, VECTOR) + c2 * g * g
    m = _store_state(m, at, 0, start, left, S, True, BLOCKS, VECTOR)
    v = _store_state(v, at, 1, start, left, S, False, BLOCKS, VECTOR)
    u = _direction(p, m, v, root1, root2, shrink, eps)
    if not VECTOR:
        u = tl.where(index(BLOCKS) < left, u, 0.0)
    return tl.sum(tl.reshape(p * p, [BLOCKS * BLOCK]), 0), tl.sum(tl.reshape(u * u, [BLOCKS * BLOCK]), 0)


@triton.jit(do_not_specialize=["count"])
def moments_kernel(
    rows_N, owner_T, hyper_G, control_C, squares_P, partials_T2, count, CODE: tl.constexpr, MASTER: tl.constexpr,
    SPAN: tl.constexpr,
):  # fmt: skip
    coefficient = _coefficient(control_C, squares_P, count)
    tile = tl.program_id(0)
    if tl.load(control_C + FOUND_INF) == 0:
        row = rows_N + tl.load(owner_T + tile).to(tl.int64) * COLUMNS
        at = addresses(row)
        hyper = hyper_G + tl.load(row + GROUP) * HYPER
        options = tl.load(hyper + OPTIONS).to(tl.int32)
        factor = tl.where((options & MAXIMIZE) != 0, -coefficient, coefficient).to(tl.float32)
        beta1, beta2, eps = tl.load(hyper + BETA1), tl.load(hyper + BETA2), tl.load(hyper + EPS).to(tl.float32)
        share = tl.where((options & SUM) != 0, 1.0, 1 - beta1).to(tl.float32)
        b1, b2, c2 = beta1.to(tl.float32), beta2.to(tl.float32), (1 - beta2).to(tl.float32)
        numbers = _numbers(row, hyper)
        code = tl.load(row + CODES)
        begin = (tile - tl.load(row + FIRST_TILE)) * TILE
        end = tl.minimum(tl.load(row + NUMEL), begin + TILE)
        total_p, total_u = tl.zeros([], tl.float64), tl.zeros([], tl.float64)
        for k in tl.static_range(len(CODE)):
            if code == CODE[k][0]:
                for start in range(begin, end, SPAN):
                    left = end - start
                    if (left >= SPAN) & aligned(at):
                        sum_p, sum_u = _moments_span(
                            at, start, left, numbers, factor, b1, share, b2, c2, eps,
                            CODE[k][0], MASTER, SPAN // BLOCK, CODE[k][1],
                        )  # fmt: skip
                    else:
                        sum_p, sum_u = _moments_span(
                            at, start, left, numbers, factor, b1, share, b2, c2, eps,
                            CODE[k][0], MASTER, SPAN // BLOCK, 0,
                        )  # fmt: skip
                    total_p += sum_p.to(tl.float64)
                    total_u += sum_u.to(tl.float64)
        tl.store(partials_T2 + 2 * tile, total_p)
        tl.store(partials_T2 + 2 * tile + 1, total_u)


@triton.jit
def add_pairs(partials_T2, first, tiles):
    """Both sums of the partials of this many tiles, float64."""
    total_p, total_u = tl.zeros([ADDED], tl.float64), tl.zeros([ADDED], tl.float64)
    for start in range(0, tiles, ADDED):
        i = start + tl.arange(0, ADDED)
        total_p += tl.load(partials_T2 + 2 * (first + i), i < tiles, 0.0)
        total_u += tl.load(partials_T2 + 2 * (first + i) + 1, i < tiles, 0.0)
    return tl.sum(total_p, 0), tl.sum(total_u, 0)


@triton.jit
def norms_kernel(rows_N, partials_T2, norms_N2):
    n = tl.program_id(0)
    row = rows_N + n.to(tl.int64) * COLUMNS
    total_p, total_u = add_pairs(partials_T2, tl.load(row + FIRST_TILE), tl.cdiv(tl.load(row + NUMEL), TILE))
    tl.store(norms_N2 + 2 * n, total_p)
    tl.store(norms_N2 + 2 * n + 1, total_u)


@triton.jit
def _update_span(
    at, start, left, numbers, eps, rate, ema_rate, seed, counter, CODE: tl.constexpr, MASTER: tl.constexpr,
    HAS_EMA: tl.constexpr, STOCHASTIC: tl.constexpr, BLOCKS: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    root1, root2, _, shrink = numbers
    S: tl.constexpr = CODE >> 8 & 15
    p = _load_parameter(at, start, left, CODE & 15, MASTER, BLOCKS, VECTOR)
    m = _load_state(at, 0, start, left, S, True, BLOCKS, VECTOR)
    v = _load_state(at, 1, start, left, S, False, BLOCKS, VECTOR)
    p -= rate * _direction(p, m, v, root1, root2, shrink, eps)
    store_kept(p, at, start, left, ema_rate, seed, counter, CODE & 15, MASTER, HAS_EMA, STOCHASTIC, BLOCKS, VECTOR)


@triton.jit(do_not_specialize=["seed", "offset"])
def update_kernel(
    rows_N, owner_T, hyper_G, control_C, norms_N2, ema_rate, seed: tl.int64, offset: tl.int64,
    CODE: tl.constexpr, MASTER: tl.constexpr, HAS_EMA: tl.constexpr, STOCHASTIC: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    if tl.load(control_C + FOUND_INF) == 0:
        n = tl.load(owner_T + tile).to(tl.int64)
        row = rows_N + n * COLUMNS
        at = addresses(row)
        hyper = hyper_G + tl.load(row + GROUP) * HYPER
        p_square, u_square = tl.load(norms_N2 + 2 * n), tl.load(norms_N2 + 2 * n + 1)
        always = (tl.load(hyper + OPTIONS).to(tl.int32) & ALWAYS) != 0
        adapts = ((tl.load(hyper + WEIGHT_DECAY) != 0) | always) & (p_square != 0) & (u_square != 0)
        rate = tl.load(hyper + LR) * tl.where(adapts, tl.sqrt(p_square / u_square), 1.0)
        rate, eps = rate.to(tl.float32), tl.load(hyper + EPS).to(tl.float32)
        numbers = _numbers(row, hyper)
        code = tl.load(row + CODES)
        begin = (tile - tl.load(row + FIRST_TILE)) * TILE
        end = tl.minimum(tl.load(row + NUMEL), begin + TILE)
        counter = offset.to(tl.int64) + tile.to(tl.int64) * (TILE // 8)
        for k in tl.static_range(len(CODE)):
            if code == CODE[k][0]:
                for start in range(begin, end, SPAN):
                    left, now = end - start, counter + (start - begin) // 8
                    if (left >= SPAN) & aligned(at):
                        _update_span(
                            at, start, left, numbers, eps, rate, ema_rate, seed.to(tl.int64), now,
                            CODE[k][0], MASTER, HAS_EMA, STOCHASTIC, SPAN // BLOCK, CODE[k][1],
                        )  # fmt: skip
                    else:
                        _update_span(
                            at, start, left, numbers, eps, rate, ema_rate, seed.to(tl.int64), now,
                            CODE[k][0], MASTER, HAS_EMA, STOCHASTIC, SPAN // BLOCK, 0,
                        )  # fmt: skip


def _codes(features):
    return tuple((code, _vector(code, features.ema)) for code in features.codes)


def moments(rows, owner, hyper, control, squares, pairs, queue, features):
    if owner.numel():
        count = 0 if squares is None else squares.numel()
        launch(
            moments_kernel, (owner.numel(),),
            rows, owner, hyper, control, squares, pairs, count, _codes(features), features.remainder, SPAN,
            num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip


def norms(rows, pairs, norms, queue):
    if rows.shape[0]:
        launch(norms_kernel, (rows.shape[0],), rows, pairs, norms, num_warps=WARPS)


def update(rows, owner, hyper, control, norms, ema_decay, seed, offset, queue, features):
    if owner.numel():
        launch(
            update_kernel, (owner.numel(),),
            rows, owner, hyper, control, norms, 1.0 - ema_decay, max(seed, 0), offset,
            _codes(features), features.remainder, features.ema, seed >= 0, SPAN,
            num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip
