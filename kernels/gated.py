"""Gated products; csrc/gated.h has the contract.

    y = f(gate) * up,   dgate = dy up f'(gate),   dup = dy f(gate)

The functions f are those of silu.py and gelu.py, relu and the sigmoid. A program processes a tile of (R, C) elements.
If no tensor has gaps, everything is one row. If rows are apart, as the halves of a packed tensor, the number of columns
of a tile divides the row, so few programs need a mask.
"""

import triton
import triton.language as tl

from .gelu import _normal, _sigmoid_2u
from .launch import launch
from .silu import _sigmoid

TILE = 2048  # elements per program: 16 per thread, two 16-byte loads of each tensor at 16 bits
NARROW = 256  # columns of the narrowest tile, if a row has as many: 16 bytes per thread of a warp at 16 bits
WARPS = 4

SILU = tl.constexpr(0)
GELU_ERF = tl.constexpr(1)
GELU_TANH = tl.constexpr(2)
RELU = tl.constexpr(3)
SIGMOID = tl.constexpr(4)


@triton.jit
def _curve(x, KIND: tl.constexpr, CHEAP: tl.constexpr):
    """f(x) and f'(x) of a float32 block; unused results cost nothing."""
    if KIND == GELU_ERF:
        cdf, pdf = _normal(x, CHEAP)
        return x * cdf, tl.fma(x, pdf, cdf)
    elif KIND == GELU_TANH:
        s, e = _sigmoid_2u(x, CHEAP)
        rest = tl.where(x > 0, e * s, 1.0 - s)  # 1 - s without cancellation
        return x * s, tl.fma(x * s * rest, tl.fma(x * x, 0.2140644, 1.5957691), s)
    elif KIND == RELU:
        return tl.where(x <= 0, 0.0, x), tl.where(x <= 0, 0.0, 1.0)
    elif KIND == SIGMOID:
        s, e = _sigmoid(x, CHEAP)
        return s, s * tl.where(x > 0, e * s, 1.0 - s)
    elif KIND == SILU:
        s, e = _sigmoid(x, CHEAP)
        return x * s, tl.fma(x * s, tl.where(x > 0, e * s, 1.0 - s), s)
    else:  # quick gelu
        z = x * 1.702
        s, e = _sigmoid(z, CHEAP)
        return x * s, tl.fma(z * s, tl.where(x > 0, e * s, 1.0 - s), s)


@triton.jit
def _forward_tile(gate_RC, up_RC, y_RC, g, u, o, mask, KIND: tl.constexpr, CHEAP: tl.constexpr):
    value, _ = _curve(tl.load(gate_RC + g, mask=mask).to(tl.float32), KIND, CHEAP)
    y = value * tl.load(up_RC + u, mask=mask).to(tl.float32)
    tl.store(y_RC + o, y.to(y_RC.dtype.element_ty), mask=mask)


@triton.jit
def _backward_tile(
    dy_RC, gate_RC, up_RC, dgate_RC, dup_RC, d, g, u, dg, du, mask, KIND: tl.constexpr, CHEAP: tl.constexpr
):
    x = tl.load(gate_RC + g, mask=mask).to(tl.float32)
    dy = tl.load(dy_RC + d, mask=mask).to(tl.float32)
    value, slope = _curve(x, KIND, CHEAP)
    if dgate_RC is not None:
        by_up = dy * tl.load(up_RC + u, mask=mask).to(tl.float32)
        dgate = by_up * slope
        if KIND == RELU:  # in the flat part the gradient is 0, for any dy and up
            dgate = tl.where(x <= 0, 0.0, by_up)
        tl.store(dgate_RC + dg, dgate.to(dgate_RC.dtype.element_ty), mask=mask)
    if dup_RC is not None:
        tl.store(dup_RC + du, (dy * value).to(dup_RC.dtype.element_ty), mask=mask)


@triton.jit
def _place(rows, cols, R: tl.constexpr, C: tl.constexpr):
    """This program's first row and column, its indices (R, C), and whether all of them are inside."""
    blocks = tl.cdiv(cols, C)
    row = tl.program_id(0) // blocks
    row0, col0 = row.to(tl.int64) * R, (tl.program_id(0) - row * blocks).to(tl.int64) * C
    r, c = tl.arange(0, R)[:, None], tl.arange(0, C)[None, :]
    return row0, col0, r, c, (row0 + R <= rows) & (col0 + C <= cols)


@triton.jit
def _within(r, c, S, R: tl.constexpr):
    """Offsets in a tile with row stride S. For one row nothing is added, which the compiler would not detect."""
    if R == 1:
        return c
    else:
        return r * S + c


@triton.jit(do_not_specialize=["rows"])
def forward_kernel(
    gate_RC, up_RC, y_RC, rows, cols, gate_S, up_S, y_S, KIND: tl.constexpr, CHEAP: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    row0, col0, r, c, full = _place(rows, cols, R, C)
    gate_RC += row0 * gate_S + col0
    up_RC += row0 * up_S + col0
    y_RC += row0 * y_S + col0
    g, u, o = _within(r, c, gate_S, R), _within(r, c, up_S, R), _within(r, c, y_S, R)
    if full:
        _forward_tile(gate_RC, up_RC, y_RC, g, u, o, None, KIND, CHEAP)
    else:
        mask = (r < rows - row0) & (c < cols - col0)
        _forward_tile(gate_RC, up_RC, y_RC, g, u, o, mask, KIND, CHEAP)


@triton.jit(do_not_specialize=["rows"])
def backward_kernel(
    dy_RC, gate_RC, up_RC, dgate_RC, dup_RC, rows, cols, dy_S, gate_S, up_S, dgate_S, dup_S,
    KIND: tl.constexpr, CHEAP: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    row0, col0, r, c, full = _place(rows, cols, R, C)
    dy_RC += row0 * dy_S + col0
    gate_RC += row0 * gate_S + col0
    up_RC += row0 * up_S + col0
    if dgate_RC is not None:
        dgate_RC += row0 * dgate_S + col0
    if dup_RC is not None:
        dup_RC += row0 * dup_S + col0
    d, g, u = _within(r, c, dy_S, R), _within(r, c, gate_S, R), _within(r, c, up_S, R)
    dg, du = _within(r, c, dgate_S, R), _within(r, c, dup_S, R)
    if full:
        _backward_tile(dy_RC, gate_RC, up_RC, dgate_RC, dup_RC, d, g, u, dg, du, None, KIND, CHEAP)
    else:
        mask = (r < rows - row0) & (c < cols - col0)
        _backward_tile(dy_RC, gate_RC, up_RC, dgate_RC, dup_RC, d, g, u, dg, du, mask, KIND, CHEAP)


def _plan(tensors):
    """(rows, cols, the tensors' strides, R, C, number of programs), where everything may be one long row."""
    rows, cols = tensors[0].shape
    if all(t is None or t.is_contiguous() for t in tensors):
        rows, cols, strides = 1, rows * cols, [0] * len(tensors)
        # If Triton 3.6 knows that there is one column, it fails to lay out a wider tile of one row.
        C = TILE if cols > 1 else 1
    else:
        strides = [0 if t is None else t.stride(0) for t in tensors]
        divisor = min(cols & -cols, TILE)
        C = divisor if divisor >= NARROW else min(triton.next_power_of_2(cols), TILE)
    R = min(TILE // C, triton.next_power_of_2(rows)) if rows else 1
    return rows, cols, strides, R, C, -(-rows // R) * -(-cols // C)


# Fused multiply-adds are explicit and the compiler adds none, so running forward again gives the same bits.
def forward(gate, up, y, kind, queue):
    rows, cols, strides, R, C, programs = _plan((gate, up, y))
    if programs:
        launch(
            forward_kernel, (programs,),
            gate, up, y, rows, cols, *strides, kind, gate.element_size() == 2, R, C,
            num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip


def backward(dy, gate, up, dgate, dup, kind, queue):
    rows, cols, strides, R, C, programs = _plan((dy, gate, up, dgate, dup))
    if programs and (dgate is not None or dup is not None):
        launch(
            backward_kernel, (programs,),
            dy, gate, up, dgate, dup, rows, cols, *strides, kind, gate.element_size() == 2, R, C,
            num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip
