"""Smooth functions of one input; csrc/unary.h has the functions, their derivatives and the contract."""

import triton
import triton.language as tl

from .elementwise import apply
from .launch import launch
from .logits import _tanh, exp
from .pointwise_loss import _log1p
from .silu import _sigmoid

BLOCK = 2048  # elements per program: 16 per thread, two 16-byte loads at 16 bits
WARPS = 4

SIGMOID, TANH, SOFTPLUS, LOGSIGMOID, ELU, SOFTSIGN, EXP, SQRT, MISH, HARDSWISH, QUICK_GELU, RELU_SQUARED = (
    tl.constexpr(kind) for kind in range(12)
)


@triton.jit
def _reciprocal(z, CHEAP: tl.constexpr):
    """1 / z for z >= 1. A division scales its argument first; a reciprocal root and a square are two instructions."""
    if CHEAP:
        r = tl.rsqrt(z)
        return r * r
    else:
        return 1.0 / z


@triton.jit
def _power(n):
    """2^n of an int32 block, for normal results."""
    return ((n + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _split(z):
    """n and expm1(r), with z = n log(2) + r and |r| <= log(2) / 2."""
    shifted = tl.fma(z, 1.44269504, 12582912.0)  # 1.5 * 2^23: the nearest integer is in the low bits
    n = shifted - 12582912.0
    r = tl.fma(n, 2.12194440e-4, tl.fma(n, -0.693359375, z))  # log(2) in two parts
    tail = tl.fma(tl.fma(0.00139504857, r, 0.00836888794), r, 0.041666206)
    tail = tl.fma(tl.fma(tail, r, 0.166665182), r, 0.5)
    return shifted.to(tl.int32, bitcast=True) - 0x4B400000, tl.fma(tail, r * r, r)


@triton.jit
def _exp(x, CHEAP: tl.constexpr):
    """exp(x) for every x. The cheap version, for 16 bits, has a relative error that grows by |x| half ulps."""
    if CHEAP:
        return tl.exp2(x * 1.4426950408889634)
    else:
        z = tl.where(x > 89.0, 89.0, tl.where(x < -104.0, -104.0, x))
        n, less = _split(z)
        half = n >> 1
        return (less + 1.0) * _power(half) * _power(n - half)


@triton.jit
def _expm1(z, CHEAP: tl.constexpr):
    """exp(z) - 1 for z <= 0."""
    if CHEAP:
        near = z * tl.fma(z, tl.fma(z, 0.16666667, 0.5), 1.0)
        return tl.where(z > -0.03125, near, tl.exp2(z * 1.4426950408889634) - 1.0)
    else:
        n, less = _split(z)
        power = _power(n)
        return tl.where(z < -18.0, -1.0, tl.fma(less, power, power - 1.0))


@triton.jit
def _softplus(z, CHEAP: tl.constexpr):
    """log(1 + exp(-|z|)): softplus(z) - max(z, 0)."""
    e = exp(-tl.abs(z), CHEAP)
    if CHEAP:
        near = e * tl.fma(e, tl.fma(e, 0.33333333, -0.5), 1.0)  # the hardware's logarithm is inaccurate near 1
        return tl.where(e < 0.03125, near, tl.log2(1.0 + e) * 0.6931471805599453)
    else:
        return _log1p(e)


@triton.jit
def _tanh_exactly(u):
    """tanh(u) to float32's last place: 1 - 2 e / (1 + e) with e = exp(-2 |u|), below 1 a polynomial fitted to 5e-9."""
    a = tl.abs(u)
    e = exp(-2.0 * a, False)
    large = 1.0 - 2.0 * e / (1.0 + e)
    v = a * a
    poly = tl.fma(v, -0.000349694252, 0.00227287109)
    poly = tl.fma(v, poly, -0.00791004766)
    poly = tl.fma(v, poly, 0.021464346)
    poly = tl.fma(v, poly, -0.0538728721)
    poly = tl.fma(v, poly, 0.133322462)
    poly = tl.fma(v, poly, -0.333332896)
    value = tl.where(a < 1.0, tl.fma(poly * v, a, a), large)
    return tl.where(u < 0, -value, value)


@triton.jit
def _mish(x, CHEAP: tl.constexpr):
    """exp(x) = e, w = e (e + 2) and 1 / (w + 2): tanh(log(1 + e)) is w / (w + 2), and 1 from x = 20 on."""
    e = exp(tl.where(x > 20.0, 20.0, x), CHEAP)
    w = e * (e + 2.0)
    return e, w, _reciprocal(w + 2.0, CHEAP)


@triton.jit
def _value(x, a, b, c, KIND: tl.constexpr, CHEAP: tl.constexpr):
    if KIND == SIGMOID:
        e = exp(-tl.abs(x), CHEAP)
        r = _reciprocal(1.0 + e, CHEAP)
        return tl.where(x < 0, e * r, r)
    elif KIND == TANH:
        return _tanh(x, True)[0] if CHEAP else _tanh_exactly(x)
    elif KIND == SOFTPLUS:
        z = a * x
        return tl.where(z > b, x, (tl.where(z > 0, z, 0.0) + _softplus(z, CHEAP)) / a)
    elif KIND == LOGSIGMOID:
        return tl.where(x > 0, 0.0, x) - _softplus(x, CHEAP)
    elif KIND == ELU:
        return tl.where(x > 0, b * x, a * b * _expm1(c * tl.where(x > 0, 0.0, x), CHEAP))
    elif KIND == SOFTSIGN:
        return x / (1.0 + tl.abs(x))
    elif KIND == EXP:
        return _exp(x, CHEAP)
    elif KIND == SQRT:
        return tl.sqrt(x) if CHEAP else tl.sqrt_rn(x)
    elif KIND == MISH:
        _, w, share = _mish(x, CHEAP)
        return x * (w * share)
    elif KIND == HARDSWISH:
        above = x + 3.0
        return tl.where(x >= 3.0, x, x * tl.where(above < 0, 0.0, above) * 0.16666667)  # x * 6 would overflow
    elif KIND == RELU_SQUARED:
        r = tl.where(x < 0, 0.0, x)  # a NaN stays one
        return r * r
    else:
        s, _ = _sigmoid(x * 1.702, CHEAP)
        return x * s


@triton.jit
def _gradient(dy, kept, a, b, c, limit, KIND: tl.constexpr, CHEAP: tl.constexpr):
    """limit: the limit of elu, rounded to the dtype of y."""
    if KIND == SIGMOID:
        return dy * (kept * (1.0 - kept))
    elif KIND == TANH:
        return dy * (1.0 - kept * kept)
    elif KIND == SOFTPLUS:
        z = a * kept
        return tl.where(z > b, dy, dy * (0.0 - _expm1(-z, CHEAP)))
    elif KIND == LOGSIGMOID:
        return dy * (0.0 - _expm1(kept, CHEAP))
    elif KIND == ELU:
        below = tl.where(kept <= limit, 0.0, c * (kept + a * b))
        return dy * tl.where(kept > 0, b, below)
    elif KIND == SOFTSIGN:
        rest = 1.0 - tl.abs(kept)
        return dy * (rest * rest)
    elif KIND == EXP:
        return dy * kept
    elif KIND == SQRT:
        return dy / (2.0 * kept)
    elif KIND == MISH:
        e, w, share = _mish(kept, CHEAP)
        bend = 4.0 * (e * share) * ((1.0 + e) * share)
        return dy * (w * share + kept * tl.where(kept > 20.0, 0.0, bend))
    elif KIND == HARDSWISH:
        inner = kept * 0.33333333 + 0.5
        return tl.where(kept <= -3.0, 0.0, dy * tl.where(kept >= 3.0, 1.0, inner))
    elif KIND == RELU_SQUARED:
        return tl.where(kept <= 0, 0.0, dy * (2.0 * kept))
    else:
        s, e = _sigmoid(kept * 1.702, CHEAP)
        rest = tl.where(kept > 0, e * s, 1.0 - s)  # 1 - s without cancellation
        return dy * tl.fma(kept * s, 1.702 * rest, s)


@triton.jit(do_not_specialize=["n"])
def forward_kernel(
    x_N, y_N, n, a: tl.float32, b: tl.float32, c: tl.float32,
    KIND: tl.constexpr, CHEAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    apply(None, x_N, y_N, n, _value, (a, b, c, KIND, CHEAP), BLOCK)


@triton.jit(do_not_specialize=["n"])
def backward_kernel(
    dy_N, kept_N, dx_N, n, a: tl.float32, b: tl.float32, c: tl.float32,
    KIND: tl.constexpr, CHEAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    limit = tl.full([1], -(a * b), tl.float32).to(kept_N.dtype.element_ty).to(tl.float32)
    apply(dy_N, kept_N, dx_N, n, _gradient, (a, b, c, limit, KIND, CHEAP), BLOCK)


# Fused multiply-adds are explicit and the compiler adds none, so running forward again gives the same bits.
def forward(x, y, kind, a, b, c, queue):
    n = x.numel()
    if n:
        launch(
            forward_kernel, (-(-n // BLOCK),),
            x, y, n, a, b, c, kind, x.element_size() == 2, BLOCK, num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip


def backward(dy, kept, dx, kind, a, b, c, queue):
    n = kept.numel()
    if n:
        launch(
            backward_kernel, (-(-n // BLOCK),),
            dy, kept, dx, n, a, b, c, kind, kept.element_size() == 2, BLOCK, num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip
