"""Batch normalisation followed by a sum and an activation; csrc/batch_norm.h has the contract.

A tile is a matrix. With LAST, channels are last in memory: rows are positions, columns are channels. Otherwise rows are
planes and columns are their elements: for sums the planes of one channel, elsewhere all planes in order.

Statistics and sums: Q programs per channel or block of channels, each over tiles that are one grid apart, with a sum or
a mean in each lane. Then one kernel combines the Q partial results of a channel. There are no atomic additions.
"""

import triton
import triton.language as tl

from .launch import launch

IDENTITY, RELU, LEAKY_RELU, RELU6, SILU, HARDSWISH = (tl.constexpr(k) for k in range(6))
ELEMENTS = 4096  # of a tile
WARPS = 8
PROGRAMS = 1024  # approximate number of programs for sums; more than any GPU runs at once
MERGE_Q, MERGE_C = 32, 32


@triton.jit
def _value(z, slope, KIND: tl.constexpr):
    if KIND == RELU:
        return tl.where(z < 0, 0.0, z)
    elif KIND == LEAKY_RELU:
        return tl.where(z > 0, z, z * slope)
    elif KIND == RELU6:
        return tl.where(z < 0, 0.0, tl.where(z > 6, 6.0, z))
    elif KIND == SILU:
        return tl.div_rn(z, 1.0 + tl.exp(-z))
    elif KIND == HARDSWISH:
        t = z + 3.0
        return z * tl.where(t < 0, 0.0, tl.where(t > 6, 6.0, t)) / 6.0
    else:
        return z


@triton.jit
def _flag(z, KIND: tl.constexpr):
    if KIND == RELU:
        return (z <= 0) == 0
    elif KIND == RELU6:
        return ((z <= 0) | (z >= 6)) == 0
    else:
        return z > 0


@triton.jit
def _times_slope(g, z, slope, KIND: tl.constexpr):
    if KIND == RELU:
        return tl.where(z <= 0, 0.0, g)
    elif KIND == LEAKY_RELU:
        return tl.where(z > 0, g, g * slope)
    elif KIND == RELU6:
        return tl.where((z <= 0) | (z >= 6), 0.0, g)
    elif KIND == SILU:
        s = 1.0 / (1.0 + tl.exp(-z))
        return g * (s + z * s * (1.0 / (1.0 + tl.exp(z))))
    elif KIND == HARDSWISH:
        return tl.where(z < -3, 0.0, tl.where(z <= 3, g * (z / 3.0 + 0.5), g))
    else:
        return g


@triton.jit
def _load_channel(v_C, channel, exists, absent: tl.constexpr):
    if v_C is not None:
        return tl.load(v_C + channel, mask=exists, other=0.0, eviction_policy="evict_last").to(tl.float32)
    else:
        return absent


@triton.jit
def _numbers(w_C, b_C, mean_C, rstd_C, channel, exists):
    """mean, rstd, scale and bias of channels."""
    mean = tl.load(mean_C + channel, mask=exists, other=0.0, eviction_policy="evict_last")
    rstd = tl.load(rstd_C + channel, mask=exists, other=0.0, eviction_policy="evict_last")
    return mean, rstd, rstd * _load_channel(w_C, channel, exists, 1.0), _load_channel(b_C, channel, exists, -0.0)


@triton.jit
def _bytes(row, column, exists, rows_of_bytes, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr):
    """Pointers to the flags of a tile, (BLOCK_R, BLOCK_N / 8), and whether they exist."""
    byte = column // 8 + tl.arange(0, BLOCK_N // 8)[None, :]
    return row.to(tl.int64) * rows_of_bytes + byte, exists & (byte < rows_of_bytes)


@triton.jit
def _gradient(
    dy, x, mean, scale, bias, slope, bits, at_bits, there, KIND: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr
):  # fmt: skip
    """dy f'(z), from the flags if there are any."""
    if bits is not None:
        packed = tl.load(bits + at_bits, mask=there, other=0).to(tl.int32)
        flags = (packed[:, :, None] >> tl.arange(0, 8)[None, None, :]) & 1
        flags = tl.reshape(flags, [BLOCK_R, BLOCK_N])
        return tl.where(flags != 0, dy, dy * slope if KIND == LEAKY_RELU else 0.0)
    else:
        return _times_slope(dy, tl.fma(x - mean, scale, bias), slope, KIND)


@triton.jit
def _channels(block, C, LAST: tl.constexpr, BLOCK_N: tl.constexpr):
    """The channels of a program, and which exist."""
    if LAST:
        channel = block * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        return channel, channel < C
    else:
        return block, True


@triton.jit
def _place(tile, block, P, C, S, LAST: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr):
    """For a tile of a channel or a block of channels: first column, rows of flags, which exist; pointers to its
    elements, and which exist."""
    if LAST:
        channel, known = _channels(block, C, LAST, BLOCK_N)
        row = tile * BLOCK_R + tl.arange(0, BLOCK_R)[:, None]
        there = row < P
        return block * BLOCK_N, row, there, row.to(tl.int64) * C + channel, there & known
    else:
        blocks = tl.cdiv(S, BLOCK_N)
        column = tile % blocks * BLOCK_N
        plane = tile // blocks * BLOCK_R + tl.arange(0, BLOCK_R)[:, None]
        s = column + tl.arange(0, BLOCK_N)[None, :]
        there = plane < P
        row = plane.to(tl.int64) * C + block
        return column, row, there, row * S + s, there & (s < S)


@triton.jit
def moments_kernel(
    x, partials, P, C, S, Q, LAST: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """Mean, squares around it, and count of the elements of program q, for each channel."""
    q, block = tl.program_id(0), tl.program_id(1)
    tiles = tl.cdiv(P, BLOCK_R) * (1 if LAST else tl.cdiv(S, BLOCK_N))
    mean = tl.zeros([BLOCK_R, BLOCK_N], tl.float32)
    squares = tl.zeros([BLOCK_R, BLOCK_N], tl.float32)
    count = tl.zeros([BLOCK_R, 1 if LAST else BLOCK_N], tl.float32)
    for tile in tl.range(q, tiles, Q):
        _column, _row, there, at, exists = _place(tile, block, P, C, S, LAST, BLOCK_R, BLOCK_N)
        value = tl.load(x + at, mask=exists, other=0.0).to(tl.float32)
        counts = there if LAST else exists  # columns that are no channels do not matter
        count += counts.to(tl.float32)
        delta = value - mean
        mean += tl.where(counts, delta * (1.0 / tl.maximum(count, 1.0)), 0.0)
        squares += tl.where(counts, delta * (value - mean), 0.0)
    count = tl.broadcast_to(count, [BLOCK_R, BLOCK_N])
    if LAST:
        n = tl.sum(count, 0)[None, :]
        all = tl.sum(mean * count, 0)[None, :] / tl.maximum(n, 1.0)
        all += tl.sum((mean - all) * count, 0)[None, :] / tl.maximum(n, 1.0)  # corrects the rounding of the sum
        squares = tl.sum(squares + count * (mean - all) * (mean - all), 0)[None, :]
        channel, known = _channels(block, C, LAST, BLOCK_N)
        tl.store(partials + q * C + channel, all, mask=known)
        tl.store(partials + (Q + q) * C + channel, squares, mask=known)
        tl.store(partials + (2 * Q + q) * C + channel, n, mask=known)
    else:
        n = tl.sum(count)
        all = tl.sum(mean * count) / tl.maximum(n, 1.0)
        all += tl.sum((mean - all) * count) / tl.maximum(n, 1.0)
        squares = tl.sum(squares + count * (mean - all) * (mean - all))
        tl.store(partials + q * C + block, all)
        tl.store(partials + (Q + q) * C + block, squares)
        tl.store(partials + (2 * Q + q) * C + block, n)


@triton.jit
def _sum_q(values, Q, C, column, exists, BLOCK_Q: tl.constexpr, BLOCK_C: tl.constexpr):
    """The sum of (Q, C) over its rows, in an order that depends on Q."""
    total = tl.zeros([BLOCK_Q, BLOCK_C], tl.float64)
    for first in tl.range(0, Q, BLOCK_Q):
        q = first + tl.arange(0, BLOCK_Q)[:, None]
        total += tl.load(values + q * C + column, mask=(q < Q) & exists, other=0.0).to(tl.float64)
    return tl.sum(total, 0)[None, :]


@triton.jit
def _move(running_C, column, exists, momentum, value):
    before = tl.load(running_C + column, mask=exists).to(tl.float32)
    moved = (1.0 - momentum) * before + momentum * value.to(tl.float32)
    tl.store(running_C + column, moved.to(running_C.dtype.element_ty), mask=exists)


# In float64, which is free for so few numbers: a rounding error of rstd would affect all of y.
@triton.jit
def settle_kernel(
    partials, mean_C, rstd_C, running_mean, running_var, momentum: tl.float32, eps: tl.float32, Q, C,
    BLOCK_Q: tl.constexpr, BLOCK_C: tl.constexpr
):  # fmt: skip
    """mean and rstd of each channel, and the update of the running statistics."""
    column = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    exists = column < C
    n = tl.maximum(_sum_q(partials + 2 * Q * C, Q, C, column, exists, BLOCK_Q, BLOCK_C), 1.0)
    weighted = tl.zeros([BLOCK_Q, BLOCK_C], tl.float64)
    for first in tl.range(0, Q, BLOCK_Q):
        q = first + tl.arange(0, BLOCK_Q)[:, None]
        here = (q < Q) & exists
        of_q = tl.load(partials + q * C + column, mask=here, other=0.0).to(tl.float64)
        weighted += of_q * tl.load(partials + 2 * Q * C + q * C + column, mask=here, other=0.0)
    mean = tl.sum(weighted, 0)[None, :] / n
    squares = tl.zeros([BLOCK_Q, BLOCK_C], tl.float64)
    for first in tl.range(0, Q, BLOCK_Q):
        q = first + tl.arange(0, BLOCK_Q)[:, None]
        here = (q < Q) & exists
        off = tl.load(partials + q * C + column, mask=here, other=0.0).to(tl.float64) - mean
        count = tl.load(partials + 2 * Q * C + q * C + column, mask=here, other=0.0)
        squares += tl.load(partials + Q * C + q * C + column, mask=here, other=0.0) + count * off * off
    squares = tl.sum(squares, 0)[None, :]
    spread = squares / n + eps
    rstd = tl.where(spread == 0, 0.0, 1.0 / tl.sqrt(tl.where(spread == 0, 1.0, spread)))
    tl.store(mean_C + column, mean.to(tl.float32), mask=exists)
    tl.store(rstd_C + column, rstd.to(tl.float32), mask=exists)
    if running_mean is not None:
        _move(running_mean, column, exists, momentum, mean)
        _move(running_var, column, exists, momentum, squares / tl.maximum(n - 1.0, 1.0))


@triton.jit
def _tile(rows, columns, C, LAST: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr):
    """For this program's tile of all elements, in order: rows, which exist; first column; channels, which exist;
    pointers to the elements, and which exist."""
    blocks = tl.cdiv(columns, BLOCK_N)
    column = tl.program_id(0) % blocks * BLOCK_N
    row = tl.program_id(0) // blocks * BLOCK_R + tl.arange(0, BLOCK_R)[:, None]
    i = column + tl.arange(0, BLOCK_N)[None, :]
    there = row < rows
    at = row.to(tl.int64) * columns + i
    if LAST:
        return row, there, column, i, i < columns, at, there & (i < columns)
    else:
        return row, there, column, row % C, there, at, there & (i < columns)


@triton.jit
def forward_kernel(
    x, w_C, b_C, residual, y, bits, mean_C, rstd_C, slope: tl.float32, rows, columns, C,
    LAST: tl.constexpr, KIND: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    row, there, column, channel, known, at, exists = _tile(rows, columns, C, LAST, BLOCK_R, BLOCK_N)
    mean, _, scale, bias = _numbers(w_C, b_C, mean_C, rstd_C, channel, known)
    z = tl.fma(tl.load(x + at, mask=exists, other=0.0).to(tl.float32) - mean, scale, bias)
    if residual is not None:
        z += tl.load(residual + at, mask=exists, other=0.0).to(tl.float32)
    tl.store(y + at, _value(z, slope, KIND).to(y.dtype.element_ty), mask=exists)
    if bits is not None:
        flags = (_flag(z, KIND) & exists).to(tl.int32)
        flags = tl.reshape(flags, [BLOCK_R, BLOCK_N // 8, 8]) << tl.arange(0, 8)[None, None, :]
        at_bits, there = _bytes(row, column, there, tl.cdiv(columns, 8), BLOCK_R, BLOCK_N)
        tl.store(bits + at_bits, tl.sum(flags, 2).to(tl.uint8), mask=there)


@triton.jit
def sums_kernel(
    dy, x, w_C, b_C, bits, mean_C, rstd_C, dresidual, partials, slope: tl.float32, P, C, S, Q,
    LAST: tl.constexpr, KIND: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """The sums of g * xhat and of g over the elements of program q, for each channel; and g into dresidual."""
    q, block = tl.program_id(0), tl.program_id(1)
    tiles = tl.cdiv(P, BLOCK_R) * (1 if LAST else tl.cdiv(S, BLOCK_N))
    channel, known = _channels(block, C, LAST, BLOCK_N)
    mean, rstd, scale, bias = _numbers(w_C, b_C, mean_C, rstd_C, channel, known)
    with_x = tl.zeros([BLOCK_R, BLOCK_N], tl.float32)
    alone = tl.zeros([BLOCK_R, BLOCK_N], tl.float32)
    for tile in tl.range(q, tiles, Q):
        column, row, there, at, exists = _place(tile, block, P, C, S, LAST, BLOCK_R, BLOCK_N)
        at_bits, has_bits = _bytes(row, column, there, tl.cdiv(C if LAST else S, 8), BLOCK_R, BLOCK_N)
        value = tl.load(x + at, mask=exists, other=0.0).to(tl.float32)
        g = tl.load(dy + at, mask=exists, other=0.0).to(tl.float32)
        g = _gradient(g, value, mean, scale, bias, slope, bits, at_bits, has_bits, KIND, BLOCK_R, BLOCK_N)
        if dresidual is not None:
            tl.store(dresidual + at, g.to(dresidual.dtype.element_ty), mask=exists)
        with_x += tl.where(exists, g * (value - mean), 0.0)
        alone += g
    if LAST:
        tl.store(partials + q * C + channel, tl.sum(with_x, 0)[None, :] * rstd, mask=known)
        tl.store(partials + (Q + q) * C + channel, tl.sum(alone, 0)[None, :], mask=known)
    else:
        tl.store(partials + q * C + block, tl.sum(with_x) * rstd)
        tl.store(partials + (Q + q) * C + block, tl.sum(alone))


@triton.jit
def finish_kernel(partials, dweight, dbias, Q, C, BLOCK_Q: tl.constexpr, BLOCK_C: tl.constexpr):
    """The total sums, written to the first rows of partials and to the gradients of the parameters."""
    column = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    exists = column < C
    with_x = _sum_q(partials, Q, C, column, exists, BLOCK_Q, BLOCK_C).to(tl.float32)
    alone = _sum_q(partials + Q * C, Q, C, column, exists, BLOCK_Q, BLOCK_C).to(tl.float32)
    tl.store(partials + column, with_x, mask=exists)
    tl.store(partials + Q * C + column, alone, mask=exists)
    if dweight is not None:
        tl.store(dweight + column, with_x.to(dweight.dtype.element_ty), mask=exists)
    if dbias is not None:
        tl.store(dbias + column, alone.to(dbias.dtype.element_ty), mask=exists)


@triton.jit
def backward_kernel(
    dy, x, w_C, b_C, bits, mean_C, rstd_C, dx, dresidual, partials, slope: tl.float32, n: tl.float32, Q, rows, columns,
    C, TRAINING: tl.constexpr, LAST: tl.constexpr, KIND: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    row, there, column, channel, known, at, exists = _tile(rows, columns, C, LAST, BLOCK_R, BLOCK_N)
    mean, rstd, scale, bias = _numbers(w_C, b_C, mean_C, rstd_C, channel, known)
    at_bits, has_bits = _bytes(row, column, there, tl.cdiv(columns, 8), BLOCK_R, BLOCK_N)
    value = tl.load(x + at, mask=exists, other=0.0).to(tl.float32)
    g = tl.load(dy + at, mask=exists, other=0.0).to(tl.float32)
    g = _gradient(g, value, mean, scale, bias, slope, bits, at_bits, has_bits, KIND, BLOCK_R, BLOCK_N)
    if dresidual is not None:
        tl.store(dresidual + at, g.to(dresidual.dtype.element_ty), mask=exists)
    if dx is not None:
        if TRAINING:
            mean_gx = tl.load(partials + channel, mask=known, other=0.0, eviction_policy="evict_last") / n
            mean_g = tl.load(partials + Q * C + channel, mask=known, other=0.0, eviction_policy="evict_last") / n
            g = g - mean_g - (value - mean) * (rstd * mean_gx)
        tl.store(dx + at, (scale * g).to(dx.dtype.element_ty), mask=exists)


def _power(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def _blocks(size: int, most: int) -> tuple[int, int]:
    """(rows, columns) of a tile, for rows of this many elements; bits need eight columns."""
    columns = min(most, max(8, _power(size)))
    return ELEMENTS // columns, columns


def _split(P, C, S) -> tuple[int, int, int, int]:
    """(Q, programs along the channels, rows, columns of a tile) for sums."""
    rows, columns = _blocks(C, 128) if S == 1 else _blocks(S, 1024)
    rows = min(rows, max(1, _power(P)))
    along = -(-C // columns) if S == 1 else C
    tiles = -(-P // rows) * (1 if S == 1 else -(-S // columns))
    return max(1, min(tiles, -(-PROGRAMS // along))), along, rows, columns


def _elements(P, C, S) -> tuple[int, int, int, int, int]:
    """(programs, rows, columns, rows and columns of a tile) of all elements."""
    rows, columns = (P, C) if S == 1 else (P * C, S)
    block_r, block_n = _blocks(columns, 512)
    block_r = min(block_r, max(1, _power(rows)))
    return -(-rows // block_r) * -(-columns // block_n), rows, columns, block_r, block_n


def partials(P, C, S):
    return _split(P, C, S)[0]


def forward(
    x, weight, bias, residual, y, bits, mean, rstd, running_mean, running_var, partials, momentum, eps, kind, slope,
    queue
):  # fmt: skip
    P, C, S = x.shape
    Q, along, rows, columns = _split(P, C, S)
    launch(moments_kernel, (Q, along), x, partials, P, C, S, Q, S == 1, rows, columns, num_warps=WARPS)
    launch(
        settle_kernel, (-(-C // MERGE_C),),
        partials, mean, rstd, running_mean, running_var, momentum, eps, Q, C, MERGE_Q, MERGE_C, num_warps=4
    )  # fmt: skip
    rebuild(x, weight, bias, residual, y, bits, mean, rstd, kind, slope, queue)


def rebuild(x, weight, bias, residual, y, bits, mean, rstd, kind, slope, queue):
    P, C, S = x.shape
    programs, rows, columns, block_r, block_n = _elements(P, C, S)
    launch(
        forward_kernel, (programs,),
        x, weight, bias, residual, y, bits, mean, rstd, slope, rows, columns, C, S == 1, kind, block_r, block_n,
        num_warps=WARPS, enable_fp_fusion=False
    )  # fmt: skip


def backward(
    dy, x, weight, bias, bits, mean, rstd, dx, dresidual, dweight, dbias, partials, training, kind, slope, queue
):  # fmt: skip
    P, C, S = x.shape
    sums = dweight is not None or dbias is not None or (dx is not None and training)
    Q, along, rows, columns = _split(P, C, S)
    if sums:
        launch(
            sums_kernel, (Q, along),
            dy, x, weight, bias, bits, mean, rstd, dresidual, partials, slope, P, C, S, Q, S == 1, kind, rows, columns,
            num_warps=WARPS
        )  # fmt: skip
        launch(finish_kernel, (-(-C // MERGE_C),), partials, dweight, dbias, Q, C, MERGE_Q, MERGE_C, num_warps=4)
        if dresidual is not None:  # it equals g, except for the rounding, which torch's also has
            dy, bits, kind, dresidual = dresidual, None, 0, None
    if dx is not None or dresidual is not None:
        programs, rows, columns, block_r, block_n = _elements(P, C, S)
        launch(
            backward_kernel, (programs,),
            dy, x, weight, bias, bits, mean, rstd, dx, dresidual, partials, slope, float(P * S), Q, rows, columns, C,
            training, S == 1, kind, block_r, block_n, num_warps=WARPS
        )  # fmt: skip
