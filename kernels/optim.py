"""A step of an optimizer over a table of parameters; csrc/optim.h has the contract, optim_formats.py the formats.

Only explicit multiply-adds are fused, so an element's result does not depend on its position in a tile, its shard or
the format's loop body. A program has a tile of a row, and processes it in spans. The host knows which formats occur, in
`Features`, so a kernel is compiled for just these: each combination has a body without branches, and a row selects its
own.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from .dropout import _four
from .launch import launch
from .optim_formats import (
    BFLOAT16,
    BLOCK,
    FLOAT16,
    FLOAT32,
    INT4,
    INT8,
    load,
    load_codes,
    load_master,
    round_stochastically,
    store,
    store_codes,
    store_master,
)

TILE = tl.constexpr(4096)  # elements per program, also assumed by the code that makes tables
SPAN = 2048  # elements in registers at a time
PIECE = tl.constexpr(512)  # the same for masked elements, which need more registers
WARPS = 4
# For coded states arithmetic counts too: more and smaller concurrent programs hide latency.
CODED_SPAN, CODED_WARPS, CODED_REGISTERS = 1024, 2, 96
PARTIALS = tl.constexpr(1024)  # maximum, because each program of update adds them up
STEPS = tl.constexpr(128)  # step counters updated per program at a time

PARAM, GRAD, STATE, SCALE, REMAINDER, EMA = (tl.constexpr(i) for i in (0, 1, 2, 5, 8, 9))
STEP, NUMEL, FIRST_TILE, CODES, GROUP, FLAGS, COLUMNS = (tl.constexpr(i) for i in range(10, 17))
LR, BETA1, BETA2, EPS, WEIGHT_DECAY, OPTIONS, HYPER = (tl.constexpr(i) for i in (0, 1, 2, 3, 4, 5, 8))
FIRST = tl.constexpr(1)
MAXIMIZE, DECOUPLED, AMSGRAD, NESTEROV = (tl.constexpr(i) for i in (1, 2, 4, 8))
FOUND_INF, GRAD_SCALE, MAX_NORM, NORM = (tl.constexpr(i) for i in range(4))
ADAM, SGD, LION = (tl.constexpr(i) for i in range(3))


class Features(NamedTuple):
    """The features that occur in a table, for kernels specialised on them."""

    codes: tuple[int, ...]  # the distinct values of the column CODES, ascending
    amsgrad: bool
    remainder: bool
    ema: bool


@triton.jit
def _squares(address, left, FORMAT: tl.constexpr, inverse, VECTOR: tl.constexpr):
    g = load(address, 0, left, FORMAT, TILE // BLOCK, VECTOR) * inverse
    return tl.sum(tl.reshape(g * g, [TILE]), 0)


@triton.jit(do_not_specialize=["n", "tiles"])
def prepare_kernel(rows_N, owner_T, control_C, squares_P, n, tiles):
    program, programs = tl.program_id(0), tl.num_programs(0)
    if tl.load(control_C + FOUND_INF) == 0:
        for start in range(program * STEPS, n, programs * STEPS):
            row = start + tl.arange(0, STEPS)
            address = tl.load(rows_N + row * COLUMNS + STEP, row < n, 0)
            step = address.to(tl.pointer_type(tl.float32))
            tl.store(step, tl.load(step, address != 0, 0) + 1, address != 0)
    if squares_P is not None:
        inverse = 1.0 / tl.load(control_C + GRAD_SCALE)
        total = tl.zeros([], tl.float64)
        first = (program.to(tl.int64) * tiles // programs).to(tl.int32)
        last = ((program + 1).to(tl.int64) * tiles // programs).to(tl.int32)
        for tile in range(first, last):
            row = rows_N + tl.load(owner_T + tile) * COLUMNS
            start = (tile - tl.load(row + FIRST_TILE)) * TILE
            left = tl.load(row + NUMEL) - start
            format = tl.load(row + CODES) >> 4 & 15
            address = tl.load(row + GRAD) + start * tl.where(format == FLOAT32, 4, 2)
            whole = (left >= TILE) & (address & 15 == 0)
            if format == FLOAT32:
                if whole:
                    sum = _squares(address, left, FLOAT32, inverse, 4)
                else:
                    sum = _squares(address, left, FLOAT32, inverse, 0)
            elif format == BFLOAT16:
                if whole:
                    sum = _squares(address, left, BFLOAT16, inverse, 8)
                else:
                    sum = _squares(address, left, BFLOAT16, inverse, 0)
            else:
                if whole:
                    sum = _squares(address, left, FLOAT16, inverse, 8)
                else:
                    sum = _squares(address, left, FLOAT16, inverse, 0)
            total += sum.to(tl.float64)
        tl.store(squares_P + program, total)


# ---- the step


@triton.jit
def _powers(a, b, exponent):
    """a^exponent and b^exponent, float64, for an integer exponent."""
    a_power, b_power = tl.full([], 1.0, tl.float64), tl.full([], 1.0, tl.float64)
    while exponent > 0:
        if exponent & 1:
            a_power *= a
            b_power *= b
        a *= a
        b *= b
        exponent >>= 1
    return a_power, b_power


@triton.jit
def _numbers(row, hyper, RULE: tl.constexpr):
    """The values that are the same for all elements of a row, as a tuple of float32.

    rate: lr, or lr / (1 - beta1^t); root: 1 / sqrt(1 - beta2^t); keep and pull: the fractions of p that remain of p,
    and that are added to g; then beta1, 1 - beta1, beta2, 1 - beta2 and eps.
    """
    lr, b1, b2 = tl.load(hyper + LR), tl.load(hyper + BETA1), tl.load(hyper + BETA2)
    weight_decay, eps = tl.load(hyper + WEIGHT_DECAY), tl.load(hyper + EPS)
    decoupled = (tl.load(hyper + OPTIONS).to(tl.int32) & DECOUPLED) != 0
    if RULE == LION:
        decoupled = True
    keep, pull = tl.where(decoupled, 1 - lr * weight_decay, 1.0), tl.where(decoupled, 0.0, weight_decay)
    rate, root = lr, tl.full([], 1.0, tl.float64)
    if RULE == ADAM:
        step = tl.load(tl.load(row + STEP).to(tl.pointer_type(tl.float32))).to(tl.int32)
        b1_power, b2_power = _powers(b1, b2, step)
        rate = lr / (1 - b1_power)
        root = 1 / tl.sqrt(1 - b2_power)
    return (
        rate.to(tl.float32), root.to(tl.float32), keep.to(tl.float32), pull.to(tl.float32), b1.to(tl.float32),
        (1 - b1).to(tl.float32), b2.to(tl.float32), (1 - b2).to(tl.float32), eps.to(tl.float32),
    )  # fmt: skip


@triton.jit
def _load_state(
    at, k: tl.constexpr, start, left, FORMAT: tl.constexpr, SIGNED: tl.constexpr, BLOCKS: tl.constexpr,
    VECTOR: tl.constexpr,
):  # fmt: skip
    if FORMAT == INT8:
        return load_codes(at[STATE + k], at[SCALE + k], start, left, 8, SIGNED, BLOCKS, VECTOR)
    elif FORMAT == INT4:
        return load_codes(at[STATE + k], at[SCALE + k], start, left, 4, SIGNED, BLOCKS, VECTOR)
    else:
        return load(at[STATE + k], start, left, FORMAT, BLOCKS, VECTOR)


@triton.jit
def _store_state(
    x, at, k: tl.constexpr, start, left, FORMAT: tl.constexpr, SIGNED: tl.constexpr, BLOCKS: tl.constexpr,
    VECTOR: tl.constexpr,
):  # fmt: skip
    """The value that later steps will read."""
    if FORMAT == INT8:
        return store_codes(x, at[STATE + k], at[SCALE + k], start, left, 8, SIGNED, BLOCKS, VECTOR)
    elif FORMAT == INT4:
        return store_codes(x, at[STATE + k], at[SCALE + k], start, left, 4, SIGNED, BLOCKS, VECTOR)
    store(x, at[STATE + k], start, left, FORMAT, BLOCKS, VECTOR)
    if FORMAT == BFLOAT16:
        return x.to(tl.bfloat16).to(tl.float32)
    elif FORMAT == FLOAT16:
        return x.to(tl.float16).to(tl.float32)
    else:
        return x


@triton.jit
def _halves(seed, counter, BLOCKS: tl.constexpr):
    """16 random bits for each element, uint32."""
    w0, w1, w2, w3 = _four(seed, counter + tl.arange(0, BLOCKS * BLOCK // 8))
    # Each join appends an axis of 2, which is the fastest in flattened order.
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    return tl.reshape(tl.join(words & 0xFFFF, words >> 16), [BLOCKS, BLOCK])


@triton.jit
def _load_parameter(at, start, left, P: tl.constexpr, MASTER: tl.constexpr, BLOCKS: tl.constexpr, VECTOR: tl.constexpr):
    if MASTER and P == BFLOAT16:
        if at[REMAINDER] != 0:
            p = load_master(at[PARAM], at[REMAINDER], start, left, BLOCKS, VECTOR)
        else:
            p = load(at[PARAM], start, left, P, BLOCKS, VECTOR)
        return p
    else:
        return load(at[PARAM], start, left, P, BLOCKS, VECTOR)


@triton.jit
def _store_parameter(
    p, at, start, left, seed, counter, P: tl.constexpr, MASTER: tl.constexpr, STOCHASTIC: tl.constexpr,
    BLOCKS: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """The stored p, float32."""
    kept = p
    if MASTER and P == BFLOAT16:
        if at[REMAINDER] != 0:
            store_master(p, at[PARAM], at[REMAINDER], start, left, BLOCKS, VECTOR)
        else:
            kept = p.to(tl.bfloat16).to(tl.float32)
            store(p, at[PARAM], start, left, P, BLOCKS, VECTOR)
    else:
        if STOCHASTIC and P != FLOAT32:
            kept = round_stochastically(p, _halves(seed, counter, BLOCKS), P)
        if P == BFLOAT16:
            kept = kept.to(tl.bfloat16).to(tl.float32)
        elif P == FLOAT16:
            kept = kept.to(tl.float16).to(tl.float32)
        store(kept, at[PARAM], start, left, P, BLOCKS, VECTOR)
    return kept


@triton.jit
def _lerp(m, g, share, rest):
    """m + share (g - m), from the end that has the larger share as torch's lerp does; rest: 1 - share."""
    return tl.fma(tl.where(share < 0.5, share, -rest), g - m, tl.where(share < 0.5, m, g))


@triton.jit
def _span(
    at, start, left, numbers, coefficient, options, flags, ema_rate, seed, counter,
    RULE: tl.constexpr, CODE: tl.constexpr, HAS_W: tl.constexpr, MASTER: tl.constexpr, HAS_EMA: tl.constexpr,
    STOCHASTIC: tl.constexpr, BLOCKS: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """The step of the elements of a row from start. at: the values of the row's columns."""
    P: tl.constexpr = CODE & 15
    S: tl.constexpr = CODE >> 8 & 15
    rate, root, keep, pull, b1, c1, b2, c2, eps = numbers
    p = _load_parameter(at, start, left, P, MASTER, BLOCKS, VECTOR)
    g = load(at[GRAD], start, left, CODE >> 4 & 15, BLOCKS, VECTOR) * coefficient
    if RULE == ADAM:
        m = _load_state(at, 0, start, left, S, True, BLOCKS, VECTOR)
        v = _load_state(at, 1, start, left, S, False, BLOCKS, VECTOR)
        g = tl.where(pull != 0, tl.fma(pull, p, g), g)  # an infinite p without decay
        p *= keep  # p - decay * p would be NaN for an infinite p
        m = _lerp(m, g, c1, b1)
        v = tl.fma(c2 * g, g, b2 * v)
        _store_state(m, at, 0, start, left, S, True, BLOCKS, VECTOR)
        _store_state(v, at, 1, start, left, S, False, BLOCKS, VECTOR)
        if HAS_W and (options & AMSGRAD) != 0:
            v = tl.maximum(v, _load_state(at, 2, start, left, S, False, BLOCKS, VECTOR), tl.PropagateNan.ALL)
            _store_state(v, at, 2, start, left, S, False, BLOCKS, VECTOR)
        p = tl.fma(-rate, m / tl.fma(tl.sqrt(v), root, eps), p)
    elif RULE == SGD:
        g = tl.where(pull != 0, g + pull * p, g)
        p *= keep
        if b1 != 0:
            b = g
            if flags & FIRST == 0:
                b = b1 * _load_state(at, 0, start, left, S, True, BLOCKS, VECTOR) + c2 * g
            _store_state(b, at, 0, start, left, S, True, BLOCKS, VECTOR)
            g = tl.where((options & NESTEROV) != 0, g + b1 * b, b)
        p -= rate * g
    else:
        m = _load_state(at, 0, start, left, S, True, BLOCKS, VECTOR)
        between = b1 * m + c1 * g
        p *= keep
        p -= tl.where(between > 0, rate, tl.where(between < 0, -rate, between))  # NaN stays
        m = _lerp(m, g, c2, b2)
        _store_state(m, at, 0, start, left, S, True, BLOCKS, VECTOR)
    kept = _store_parameter(p, at, start, left, seed, counter, P, MASTER, STOCHASTIC, BLOCKS, VECTOR)
    if HAS_EMA and at[EMA] != 0:
        average = load(at[EMA], start, left, FLOAT32, BLOCKS, VECTOR)
        store(average + ema_rate * (kept - average), at[EMA], start, left, FLOAT32, BLOCKS, VECTOR)


@triton.jit
def _coefficient(control_C, squares_P, count):
    """The factor for gradients, float64. The first program stores their norm."""
    coefficient = 1.0 / tl.load(control_C + GRAD_SCALE).to(tl.float64)
    if squares_P is not None:
        i = tl.arange(0, PARTIALS)
        norm = tl.sqrt(tl.sum(tl.load(squares_P + i, i < count, 0.0), 0))
        clip = tl.load(control_C + MAX_NORM) / (norm + 1e-6)
        coefficient *= tl.where(clip >= 1, 1.0, clip)  # a norm that is NaN makes the gradients NaN
        if tl.program_id(0) == 0:
            tl.store(control_C + NORM, norm.to(tl.float32))
    return coefficient


@triton.jit(do_not_specialize=["count", "tiles", "seed", "offset"])
def update_kernel(
    rows_N, owner_T, hyper_G, control_C, squares_P, count, tiles, ema_rate, seed: tl.int64, offset: tl.int64,
    RULE: tl.constexpr, CODE: tl.constexpr, HAS_W: tl.constexpr, MASTER: tl.constexpr, HAS_EMA: tl.constexpr,
    STOCHASTIC: tl.constexpr,
):  # fmt: skip
    """CODE: a tuple of the values in the column kCodes, each with the number of elements that are moved together, and
    the number in registers at a time."""
    coefficient = _coefficient(control_C, squares_P, count)
    tile = tl.program_id(0)
    if (tl.load(control_C + FOUND_INF) == 0) & (tile < tiles):
        row = rows_N + tl.load(owner_T + tile).to(tl.int64) * COLUMNS
        at = (
            tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3), tl.load(row + 4), tl.load(row + 5),
            tl.load(row + 6), tl.load(row + 7), tl.load(row + 8), tl.load(row + 9),
        )  # fmt: skip
        every = at[0] | at[1] | at[2] | at[3] | at[4] | at[5] | at[6] | at[7] | at[8] | at[9]
        hyper = hyper_G + tl.load(row + GROUP) * HYPER
        options = tl.load(hyper + OPTIONS).to(tl.int32)
        factor = tl.where((options & MAXIMIZE) != 0, -coefficient, coefficient).to(tl.float32)
        numbers = _numbers(row, hyper, RULE)
        code, flags = tl.load(row + CODES), tl.load(row + FLAGS)
        begin = (tile - tl.load(row + FIRST_TILE)) * TILE
        end = tl.minimum(tl.load(row + NUMEL), begin + TILE)
        counter = offset.to(tl.int64) + tile.to(tl.int64) * (TILE // 8)
        for k in tl.static_range(len(CODE)):
            if code == CODE[k][0]:
                if (end - begin == TILE) & (every & 15 == 0):
                    for start in range(begin, end, CODE[k][2]):
                        _span(
                            at, start, end - start, numbers, factor, options, flags, ema_rate, seed.to(tl.int64),
                            counter + (start - begin) // 8, RULE, CODE[k][0], HAS_W, MASTER, HAS_EMA, STOCHASTIC,
                            CODE[k][2] // BLOCK, CODE[k][1],
                        )  # fmt: skip
                else:
                    for start in range(begin, end, PIECE):
                        _span(
                            at, start, end - start, numbers, factor, options, flags, ema_rate, seed.to(tl.int64),
                            counter + (start - begin) // 8, RULE, CODE[k][0], HAS_W, MASTER, HAS_EMA, STOCHASTIC,
                            PIECE // BLOCK, 0,
                        )  # fmt: skip


# ---- launches


def partials(tiles):
    """The number of sums that `prepare` leaves for this many tiles."""
    return max(1, min(tiles, PARTIALS.value))


def prepare(rows, owner, control, squares, queue):
    n, tiles = rows.shape[0], owner.numel()
    programs = -(-n // STEPS.value) if squares is None else squares.numel()
    if programs:
        launch(prepare_kernel, (programs,), rows, owner, control, squares, n, tiles, num_warps=8)


def _formats(code):
    return {code & 15, code >> 4 & 15, code >> 8 & 15}


def _vector(code, ema):
    """The number of elements of a row with this code that a thread moves at once.

    16 bytes of its widest numbers. For blocks of codes, a warp has whole lines, so a scale is found within the warp.
    """
    formats = _formats(code)
    return 4 if (ema or FLOAT32.value in formats) and formats.isdisjoint({INT8.value, INT4.value}) else 8


def update(rows, owner, hyper, control, squares, rule, ema_decay, seed, offset, queue, features):
    tiles = owner.numel()
    count = 0 if squares is None else squares.numel()
    assert count <= PARTIALS.value
    codes, how = [(code, _vector(code, features.ema), SPAN) for code in features.codes], {"num_warps": WARPS}
    if any(code >> 8 & 15 in (INT8.value, INT4.value) for code in features.codes):
        # 32-bit numbers would need more registers, so half as many elements are used.
        codes = [(code, vector, CODED_SPAN >> (FLOAT32.value in _formats(code))) for code, vector, _ in codes]
        how = {"num_warps": CODED_WARPS}
        if not (features.amsgrad or features.remainder or features.ema or seed >= 0):  # which would spill
            how["maxnreg"] = CODED_REGISTERS
    launch(
        update_kernel, (max(tiles, 1),),
        rows, owner, hyper, control, squares, count, tiles, 1.0 - ema_decay, max(seed, 0), offset,
        rule, tuple(codes), features.amsgrad, features.remainder, features.ema, seed >= 0,
        enable_fp_fusion=False, **how,
    )  # fmt: skip
