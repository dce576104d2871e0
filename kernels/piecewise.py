"""Piecewise linear maps and their bits; csrc/piecewise.h has the contract."""

import triton
import triton.language as tl
from hfnn.kernels import bits

from .launch import launch

BLOCK = 2048  # elements per program: 16 per thread, two 16-byte loads at 16 bits, two bytes of bits
WARPS = 4

RELU, LEAKY_RELU, HARDTANH, CLAMP, THRESHOLD, HARDSHRINK, SOFTSHRINK, HARDSIGMOID = (tl.constexpr(k) for k in range(8))


@triton.jit
def _between(x, a, b):
    """min(max(x, a), b), where a NaN stays NaN."""
    x = tl.where(x < a, a, x)
    return tl.where(x > b, b, x)


@triton.jit
def _value(x, a, b, KIND: tl.constexpr):
    if KIND == RELU:
        return tl.where(x < 0, 0.0, x)
    elif KIND == LEAKY_RELU:
        return tl.where(x > 0, x, x * a)
    elif KIND == THRESHOLD:
        return tl.where(x <= a, b, x)
    elif KIND == HARDSHRINK:
        return tl.where(tl.abs(x) <= a, 0.0, x)
    elif KIND == SOFTSHRINK:
        return tl.where(x > a, x - a, tl.where(x < -a, x + a, x * 0.0))
    elif KIND == HARDSIGMOID:
        return tl.div_rn(_between(x + 3.0, 0.0, 6.0), 6.0)
    else:
        return _between(x, a, b)


# Conditions that hold for a NaN are written as negated comparisons, others as comparisons.
@triton.jit
def _flag(x, a, b, KIND: tl.constexpr):
    if KIND == RELU:
        return (x <= 0) == 0
    elif KIND == LEAKY_RELU:
        return x > 0
    elif KIND == HARDTANH:
        return ((x <= a) | (x >= b)) == 0
    elif KIND == CLAMP:
        return (x >= a) & (x <= b)
    elif KIND == THRESHOLD:
        return (x <= a) == 0
    elif KIND == HARDSHRINK:
        return (tl.abs(x) <= a) == 0
    elif KIND == SOFTSHRINK:
        return (tl.abs(x) <= b) == 0
    else:
        return (x > -3) & (x < 3)


# Only the last program is masked, so the others load whole vectors for any n.
@triton.jit(do_not_specialize=["n"])
def forward_kernel(x_N, y_N, bits_B, n, a: tl.float32, b: tl.float32, KIND: tl.constexpr, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    i, byte = tl.arange(0, BLOCK), tl.arange(0, BLOCK // 8)
    x_N += start
    y_N += start
    if start + BLOCK <= n:
        x = tl.load(x_N + i).to(tl.float32)
        tl.store(y_N + i, _value(x, a, b, KIND).to(y_N.dtype.element_ty))
        if bits_B is not None:
            flags = _flag(x, a, b, KIND).to(tl.int32)
            tl.store(bits_B + start // 8 + byte, bits.joined(flags, 1, BLOCK))
    else:
        inside = i < n - start
        x = tl.load(x_N + i, mask=inside).to(tl.float32)
        tl.store(y_N + i, _value(x, a, b, KIND).to(y_N.dtype.element_ty), mask=inside)
        if bits_B is not None:
            flags = (_flag(x, a, b, KIND) & inside).to(tl.int32)
            tl.store(bits_B + start // 8 + byte, bits.joined(flags, 1, BLOCK), mask=byte * 8 < n - start)


@triton.jit
def _scaled(dy, flags, inside, outside):
    factor = tl.where(flags != 0, inside, outside)
    return tl.where(factor == 0, 0.0, dy * factor)


@triton.jit(do_not_specialize=["n"])
def backward_kernel(dy_N, bits_B, dx_N, n, inside: tl.float32, outside: tl.float32, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    i, byte = tl.arange(0, BLOCK), tl.arange(0, BLOCK // 8)
    dy_N += start
    dx_N += start
    bits_B += start // 8
    if start + BLOCK <= n:
        flags = bits.parted(tl.load(bits_B + byte), 1, BLOCK)
        dy = tl.load(dy_N + i).to(tl.float32)
        tl.store(dx_N + i, _scaled(dy, flags, inside, outside).to(dx_N.dtype.element_ty))
    else:
        flags = bits.parted(tl.load(bits_B + byte, mask=byte * 8 < n - start, other=0), 1, BLOCK)
        dy = tl.load(dy_N + i, mask=i < n - start).to(tl.float32)
        tl.store(dx_N + i, _scaled(dy, flags, inside, outside).to(dx_N.dtype.element_ty), mask=i < n - start)


def forward(x, y, bits, kind, a, b, queue):
    n = x.numel()
    if n:
        launch(
            forward_kernel, (-(-n // BLOCK),),
            x, y, bits, n, a, b, kind, BLOCK, num_warps=WARPS, enable_fp_fusion=False
        )  # fmt: skip


def backward(dy, bits, dx, inside, outside, queue):
    n = dy.numel()
    if n:
        launch(backward_kernel, (-(-n // BLOCK),), dy, bits, dx, n, inside, outside, BLOCK, num_warps=WARPS)
