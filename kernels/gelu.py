"""Gaussian error linear unit; csrc/gelu.h has the contract.

    y = x Phi(x),   dx = dy (Phi(x) + x phi(x)),   Phi(x) = (1 + erf(x / sqrt 2)) / 2,   phi = Phi'

The tanh approximation is computed as y = x sigmoid(2u), u = sqrt(2 / pi) (x + 0.044715 x^3): the same function, without
the cancellation of 1 + tanh(u) at negative x.
"""

import triton
import triton.language as tl

from .elementwise import apply
from .launch import launch

BLOCK = 2048  # elements per program: 16 per thread, two 16-byte loads at 16 bits
WARPS = 4


# libdevice's erf needs more instructions than 16-bit traffic leaves time for. With a = |x| and t = 1 / (1 + 0.375 a),
#   Phi(-a) = exp(-a^2 / 2) t (c1 + c2 t + c3 t^2 + c4 t^3 + c5 t^4)
# is off by at most 2.7e-5 of itself for every a below 13, where float32 ends: a tenth of half an ulp of float16, a
# hundredth of half an ulp of bfloat16. The coefficients are this form's minimax fit. The exponential is phi's too.
@triton.jit
def _reciprocal(z, CHEAP: tl.constexpr):
    """1 / z for z >= 1. A division scales its argument first; a reciprocal root and a square are two instructions."""
    if CHEAP:
        r = tl.rsqrt(z)
        return r * r
    return 1.0 / z


@triton.jit
def _normal(x, CHEAP: tl.constexpr):
    """Phi(x) and phi(x) of a float32 block."""
    bell = tl.exp2(x * x * -0.7213475204444817)
    if CHEAP:
        a = tl.abs(x)
        t = _reciprocal(tl.fma(a, 0.375, 1.0), CHEAP)
        poly = tl.fma(t, -0.09134633, 0.20184635)
        poly = tl.fma(t, poly, 0.08235078)
        poly = tl.fma(t, poly, 0.1581176)
        poly = tl.fma(t, poly, 0.14901983)
        tail = poly * t * bell
        cdf = tl.where(x < 0, tail, 1.0 - tail)
    else:
        cdf = tl.fma(tl.erf(x * 0.7071067811865476), 0.5, 0.5)
    return cdf, bell * 0.3989422804014327


@triton.jit
def _sigmoid_2u(x, CHEAP: tl.constexpr):
    """sigmoid(2u) and exp(-2u), with the factor -2 sqrt(2 / pi) log2(e) multiplied into the polynomial of u."""
    e = tl.exp2(x * tl.fma(x * x, -0.10294324, -2.3022082))
    return _reciprocal(1.0 + e, CHEAP), e


@triton.jit
def _value(x, TANH: tl.constexpr, CHEAP: tl.constexpr):
    if TANH:
        s, _ = _sigmoid_2u(x, CHEAP)
        return x * s
    else:
        cdf, _ = _normal(x, CHEAP)
        return x * cdf


@triton.jit
def _gradient(dy, x, TANH: tl.constexpr, CHEAP: tl.constexpr):
    if TANH:
        s, e = _sigmoid_2u(x, CHEAP)
        rest = tl.where(x > 0, e * s, 1.0 - s)  # 1 - s without cancellation
        return dy * tl.fma(x * s * rest, tl.fma(x * x, 0.2140644, 1.5957691), s)
    else:
        cdf, pdf = _normal(x, CHEAP)
        return dy * tl.fma(x, pdf, cdf)


@triton.jit(do_not_specialize=["n"])
def forward_kernel(x_N, y_N, n, TANH: tl.constexpr, CHEAP: tl.constexpr, BLOCK: tl.constexpr):
    apply(None, x_N, y_N, n, _value, (TANH, CHEAP), BLOCK)


@triton.jit(do_not_specialize=["n"])
def backward_kernel(dy_N, x_N, dx_N, n, TANH: tl.constexpr, CHEAP: tl.constexpr, BLOCK: tl.constexpr):
    apply(dy_N, x_N, dx_N, n, _gradient, (TANH, CHEAP), BLOCK)


# Fused multiply-adds are explicit and the compiler adds none, so running forward again gives the same bits.
def forward(x, y, tanh, queue):
    _launch(x, y, tanh, y.element_size() == 2)


def rebuild(x, y, tanh, queue):
    _launch(x, y, tanh, False)


def _launch(x, y, tanh, cheap):
    n = x.numel()
    if n:
        launch(forward_kernel, (-(-n // BLOCK),), x, y, n, tanh, cheap, BLOCK, num_warps=WARPS, enable_fp_fusion=False)


def backward(dy, x, dx, tanh, queue):
    n = x.numel()
    if n:
        launch(
            backward_kernel, (-(-n // BLOCK),),
            dy, x, dx, n, tanh, dy.element_size() == 2, BLOCK, num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip
