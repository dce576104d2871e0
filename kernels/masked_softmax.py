"""Softmax of masked scores; csrc/masked_softmax.h has the contract, logits.py the arithmetic, softmax.py the plans.

    y = exp(z - m) / s,   z = scale x + mask,   m = max_c z_c,   s = sum_c exp(z_c - m)
    dx = scale y (dy - sum_c dy_c y_c)

Letters: R rows, C columns; a wide row is processed in blocks of G groups of L lanes. Row r is (n, h, t) of (N, H, T),
and step_n, step_h, step_t are the mask's strides along these. Elements that CAUSAL excludes are not read.
"""

import triton
import triton.language as tl

from .logits import LOWEST, add_block, add_lanes, columns, exp, launch_rows, plan_for, tile_at
from .softmax import BACKWARD

# As there, with more threads, because each also has elements of the mask. The last line is for blocks of wider rows.
FORWARD = ((1024, 2048, 4), (4096, 4096, 8), (8192, 8192, 8), (16384, 4096, 8))
REGISTERS = 128  # per thread: by default ptxas uses fewer in some variants, and spills a few bytes


@triton.jit
def _limit(row, T, shift, C, CAUSAL: tl.constexpr):
    """The number of columns of a row that count under CAUSAL."""
    if CAUSAL:
        return tl.minimum(tl.maximum(row % T + shift + 1, 0), C)
    else:
        return row * 0 + C


@triton.jit
def _before(row, H, T, step_n, step_h, step_t):
    """The offset of a row of the mask."""
    head = row // T
    n, h, t = (head // H).to(tl.int64), (head % H).to(tl.int64), (row % T).to(tl.int64)
    return n * step_n + h * step_h + t * step_t


@triton.jit
def _scores(x, mask, before, col, counts, scale, BOOL: tl.constexpr, STEP: tl.constexpr):
    """z in float32, -inf for masked elements. `before` belongs to a row, or to each of several; STEP is 0 or 1."""
    z = x.to(tl.float32) * scale
    if mask is not None:
        add = tl.load(mask + before + col * STEP, mask=counts, other=0)
        if BOOL:
            counts = counts & (add != 0)
        else:
            z += add.to(tl.float32)
    return tl.where(counts, z, float("-inf"))


@triton.jit
def _of_sum(s):
    # In a fully masked row all exponentials are 0, and stay 0.
    return tl.div_rn(1.0, tl.where(s == 0.0, 1.0, s))


@triton.jit
def _value(z, m, s, of_sum, CHEAP: tl.constexpr):
    e = exp(z - m, CHEAP)
    # A product with the inverse is rounded once more, which is invisible in 16 bits.
    return e * of_sum if CHEAP else tl.div_rn(e, tl.where(s == 0.0, 1.0, s))


@triton.jit(do_not_specialize=["H", "T", "shift", "R", "units"])
def forward_kernel(
    x_RC, mask, y_RC, scale: tl.float32, H, T, shift, step_n, step_h, step_t, R, units,
    BOOL: tl.constexpr, STEP: tl.constexpr, CAUSAL: tl.constexpr, CHEAP: tl.constexpr,
    UNIT: tl.constexpr, ROWS: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    C = units * UNIT
    row, exists, col, in_row, start, inside = tile_at(tl.program_id(0), 0, R, C, ROWS, BLOCK_C)
    counts = exists & (col < _limit(row, T, shift, C, CAUSAL))
    x = tl.load(x_RC + start + inside, mask=counts, other=0.0)
    z = _scores(x, mask, _before(row, H, T, step_n, step_h, step_t), col, counts, scale, BOOL, STEP)
    m = tl.maximum(tl.max(z, 1)[:, None], LOWEST)
    s = tl.sum(exp(z - m, CHEAP), 1)[:, None]
    tl.store(y_RC + start + inside, _value(z, m, s, _of_sum(s), CHEAP).to(y_RC.dtype.element_ty), mask=exists & in_row)


@triton.jit(do_not_specialize=["H", "T", "shift", "units"])
def forward_wide_kernel(
    x_RC, mask, y_RC, scale: tl.float32, H, T, shift, step_n, step_h, step_t, units,
    BOOL: tl.constexpr, STEP: tl.constexpr, CAUSAL: tl.constexpr, CHEAP: tl.constexpr,
    UNIT: tl.constexpr, G: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    """Forward of one row, read from memory and then from the caches."""
    C = units * UNIT
    row = tl.program_id(0)
    limit = _limit(row, T, shift, C, CAUSAL)
    before = _before(row, H, T, step_n, step_h, step_t)
    x_RC += row.to(tl.int64) * C
    y_RC += row.to(tl.int64) * C
    m_L = tl.full([L], LOWEST, tl.float32)
    s_L = tl.zeros([L], tl.float32)
    for column in tl.range(0, limit, G * L):
        col, in_row = columns(column, C, False, L, G)
        counts = in_row & (col < limit)
        x = tl.load(x_RC + col, mask=counts, other=0.0, eviction_policy="evict_last")
        m_L, s_L = add_block(m_L, s_L, _scores(x, mask, before, col, counts, scale, BOOL, STEP), CHEAP)
    m, s = add_lanes(m_L, s_L, CHEAP)
    of_sum = _of_sum(s)
    for column in tl.range(0, C, G * L):
        col, in_row = columns(column, C, False, L, G)
        counts = in_row & (col < limit)
        x = tl.load(x_RC + col, mask=counts, other=0.0, eviction_policy="evict_first")
        z = _scores(x, mask, before, col, counts, scale, BOOL, STEP)
        tl.store(y_RC + col, _value(z, m, s, of_sum, CHEAP).to(y_RC.dtype.element_ty), mask=in_row)


@triton.jit
def _load_both(dy_C, y_C, at, counts):
    """y, and dy if y is not 0, in float32."""
    y = tl.load(y_C + at, mask=counts, other=0.0).to(tl.float32)
    dy = tl.load(dy_C + at, mask=counts, other=0.0).to(tl.float32)
    return tl.where(y == 0.0, 0.0, dy), y


@triton.jit
def _slope(dy, y, sum, scale):
    return tl.where(y == 0.0, 0.0, (dy - sum) * y * scale)


@triton.jit(do_not_specialize=["T", "shift", "R", "units"])
def backward_kernel(
    dy_RC, y_RC, dx_RC, scale: tl.float32, T, shift, R, units,
    CAUSAL: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    C = units * UNIT
    row, exists, col, in_row, start, inside = tile_at(tl.program_id(0), 0, R, C, ROWS, BLOCK_C)
    counts = exists & (col < _limit(row, T, shift, C, CAUSAL))
    dy, y = _load_both(dy_RC + start, y_RC + start, inside, counts)
    sum = tl.sum(dy * y, 1)[:, None]
    tl.store(dx_RC + start + inside, _slope(dy, y, sum, scale).to(dx_RC.dtype.element_ty), mask=exists & in_row)


@triton.jit(do_not_specialize=["T", "shift", "units"])
def backward_wide_kernel(
    dy_RC, y_RC, dx_RC, scale: tl.float32, T, shift, units,
    CAUSAL: tl.constexpr, UNIT: tl.constexpr, G: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    """Backward of one row, read from memory and then from the caches."""
    C = units * UNIT
    row = tl.program_id(0)
    limit = _limit(row, T, shift, C, CAUSAL)
    dy_RC += row.to(tl.int64) * C
    y_RC += row.to(tl.int64) * C
    dx_RC += row.to(tl.int64) * C
    sum_L = tl.zeros([L], tl.float32)
    for column in tl.range(0, limit, G * L):
        col, in_row = columns(column, C, False, L, G)
        dy, y = _load_both(dy_RC, y_RC, col, in_row & (col < limit))
        sum_L += tl.sum(dy * y, 0)
    sum = tl.sum(sum_L, 0)
    for column in tl.range(0, C, G * L):
        col, in_row = columns(column, C, False, L, G)
        dy, y = _load_both(dy_RC, y_RC, col, in_row & (col < limit))
        tl.store(dx_RC + col, _slope(dy, y, sum, scale).to(dx_RC.dtype.element_ty), mask=in_row)


def _launch(tile_kernel, wide_kernel, table, arguments, x, size, constants):
    N, H, T, C = x.shape
    R = N * H * T
    if R == 0 or C == 0:
        return
    plan = plan_for(C, size, table)
    launch_rows(tile_kernel, wide_kernel, plan, R, arguments, constants, tile_registers=REGISTERS)


def forward(x, mask, y, scale, causal, shift, queue):
    _, H, T, C = x.shape
    *steps, step = (0, 0, 0, 0) if mask is None else mask.stride()
    bits = mask is not None and not mask.is_floating_point()
    constants = bits, int(step != 0 and C > 1), causal, y.element_size() == 2
    arguments = x, mask, y, scale, H, T, shift, *steps
    _launch(forward_kernel, forward_wide_kernel, FORWARD, arguments, x, x.element_size(), constants)


def backward(dy, y, dx, scale, causal, shift, queue):
    arguments = dy, y, dx, scale, y.shape[2], shift
    _launch(backward_kernel, backward_wide_kernel, BACKWARD, arguments, y, y.element_size(), (causal,))
