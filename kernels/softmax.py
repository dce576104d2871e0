"""Softmax of rows, or its logarithm; csrc/softmax.h has the contract, logits.py the arithmetic.

    y = exp(x - m) / s   or   (x - m) - log(s),   m = max_c x_c,   s = sum_c exp(x_c - m)
    dx = y (dy - sum_c dy_c y_c)   or   dy - exp(y) sum_c dy_c

Letters: R rows, C columns, T rows of a tile; a wide row is processed in blocks of G groups of L lanes. A row of only
-inf gives NaN.
"""

import triton
import triton.language as tl

from .logits import LOWEST, add_block, add_lanes, columns, exp, launch_rows, plan_for, tile_at

# (columns up to, elements of a tile, warps). Rows wider than the last line are processed in blocks of its tile and read
# twice: with one program of 32 warps per multiprocessor, the row is in the L2 cache the second time.
FORWARD = ((1024, 2048, 4), (4096, 4096, 4), (8192, 8192, 8), (16384, 16384, 32))
BACKWARD = ((1024, 2048, 4), (4096, 4096, 8), (8192, 8192, 16), (16384, 16384, 32))


@triton.jit
def _of_sum(s, LOG: tl.constexpr):
    return tl.log(s) if LOG else tl.div_rn(1.0, s)


@triton.jit
def _value(x, m, s, of_sum, LOG: tl.constexpr, CHEAP: tl.constexpr):
    if LOG:
        return (x - m) - of_sum
    e = exp(x - m, CHEAP)
    # A product with the inverse is rounded once more, which is invisible in 16 bits.
    return e * of_sum if CHEAP else tl.div_rn(e, s)


@triton.jit
def _part(dy, y, LOG: tl.constexpr):
    """The contribution of a column to the row's sum in backward."""
    return dy if LOG else dy * y


@triton.jit
def _slope(dy, y, sum, LOG: tl.constexpr, CHEAP: tl.constexpr):
    return tl.fma(-exp(y, CHEAP), sum, dy) if LOG else y * (dy - sum)


@triton.jit(do_not_specialize=["R", "units"])
def forward_kernel(
    x_RC, y_RC, R, units,
    LOG: tl.constexpr, CHEAP: tl.constexpr, UNIT: tl.constexpr, T: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    C = units * UNIT
    _, exists, _, in_row, start, inside = tile_at(tl.program_id(0), 0, R, C, T, BLOCK_C)
    x = tl.load(x_RC + start + inside, mask=exists & in_row, other=float("-inf")).to(tl.float32)
    m = tl.max(x, 1)[:, None]
    s = tl.sum(exp(x - m, CHEAP), 1)[:, None]
    y = _value(x, m, s, _of_sum(s, LOG), LOG, CHEAP)
    tl.store(y_RC + start + inside, y.to(y_RC.dtype.element_ty), mask=exists & in_row)


@triton.jit
def _add(m_L, s_L, x_C, column, C, CHEAP: tl.constexpr, EVEN: tl.constexpr, G: tl.constexpr, L: tl.constexpr):
    col, in_row = columns(column, C, EVEN, L, G)
    x = tl.load(x_C + col, mask=in_row, other=float("-inf"), eviction_policy="evict_last").to(tl.float32)
    return add_block(m_L, s_L, x, CHEAP)


@triton.jit
def _store(
    x_C, y_C, column, C, m, s, of_sum,
    LOG: tl.constexpr, CHEAP: tl.constexpr, EVEN: tl.constexpr, G: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    col, in_row = columns(column, C, EVEN, L, G)
    x = tl.load(x_C + col, mask=in_row, other=0.0, eviction_policy="evict_first").to(tl.float32)
    tl.store(y_C + col, _value(x, m, s, of_sum, LOG, CHEAP).to(y_C.dtype.element_ty), mask=in_row)


@triton.jit(do_not_specialize=["units"])
def forward_wide_kernel(
    x_RC, y_RC, units,
    LOG: tl.constexpr, CHEAP: tl.constexpr, UNIT: tl.constexpr, G: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    """Forward of one row, read from memory and then from the caches."""
    C = units * UNIT
    even = C // (G * L) * (G * L)
    start = tl.program_id(0).to(tl.int64) * C
    x_RC += start
    y_RC += start
    m_L = tl.full([L], LOWEST, tl.float32)
    s_L = tl.zeros([L], tl.float32)
    for column in tl.range(0, even, G * L):
        m_L, s_L = _add(m_L, s_L, x_RC, column, C, CHEAP, True, G, L)
    if even < C:
        m_L, s_L = _add(m_L, s_L, x_RC, even, C, CHEAP, False, G, L)
    m, s = add_lanes(m_L, s_L, CHEAP)
    of_sum = _of_sum(s, LOG)
    for column in tl.range(0, even, G * L):
        _store(x_RC, y_RC, column, C, m, s, of_sum, LOG, CHEAP, True, G, L)
    if even < C:
        _store(x_RC, y_RC, even, C, m, s, of_sum, LOG, CHEAP, False, G, L)


@triton.jit(do_not_specialize=["R", "units"])
def backward_kernel(
    dy_RC, y_RC, dx_RC, R, units,
    LOG: tl.constexpr, CHEAP: tl.constexpr, UNIT: tl.constexpr, T: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    C = units * UNIT
    _, exists, _, in_row, start, inside = tile_at(tl.program_id(0), 0, R, C, T, BLOCK_C)
    y = tl.load(y_RC + start + inside, mask=exists & in_row, other=0.0).to(tl.float32)
    dy = tl.load(dy_RC + start + inside, mask=exists & in_row, other=0.0).to(tl.float32)
    sum = tl.sum(_part(dy, y, LOG), 1)[:, None]
    dx = _slope(dy, y, sum, LOG, CHEAP)
    tl.store(dx_RC + start + inside, dx.to(dx_RC.dtype.element_ty), mask=exists & in_row)


@triton.jit(do_not_specialize=["units"])
def backward_wide_kernel(
    dy_RC, y_RC, dx_RC, units,
    LOG: tl.constexpr, CHEAP: tl.constexpr, UNIT: tl.constexpr, G: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    """Backward of one row, read from memory and then from the caches."""
    C = units * UNIT
    start = tl.program_id(0).to(tl.int64) * C
    dy_RC += start
    y_RC += start
    dx_RC += start
    sum_L = tl.zeros([L], tl.float32)
    for column in tl.range(0, C, G * L):
        col, in_row = columns(column, C, False, L, G)
        dy = tl.load(dy_RC + col, mask=in_row, other=0.0, eviction_policy="evict_last").to(tl.float32)
        y = 0.0
        if not LOG:
            y = tl.load(y_RC + col, mask=in_row, other=0.0, eviction_policy="evict_last").to(tl.float32)
        sum_L += tl.sum(_part(dy, y, LOG), 0)
    sum = tl.sum(sum_L, 0)
    for column in tl.range(0, C, G * L):
        col, in_row = columns(column, C, False, L, G)
        dy = tl.load(dy_RC + col, mask=in_row, other=0.0, eviction_policy="evict_first").to(tl.float32)
        y = tl.load(y_RC + col, mask=in_row, other=0.0, eviction_policy="evict_first").to(tl.float32)
        dx = _slope(dy, y, sum, LOG, CHEAP)
        tl.store(dx_RC + col, dx.to(dx_RC.dtype.element_ty), mask=in_row)


def _launch(tile_kernel, wide_kernel, table, tensors, log, cheap):
    R, C = tensors[0].shape
    if R == 0 or C == 0:
        return
    plan = plan_for(C, tensors[0].element_size(), table)
    launch_rows(tile_kernel, wide_kernel, plan, R, tensors, (log, cheap))


def forward(x, y, log, queue):
    _launch(forward_kernel, forward_wide_kernel, FORWARD, (x, y), log, y.element_size() == 2)


def backward(dy, y, dx, log, queue):
    _launch(backward_kernel, backward_wide_kernel, BACKWARD, (dy, y, dx), log, dx.element_size() == 2)
