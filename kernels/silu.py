"""Sigmoid linear unit; csrc/silu.h has the contract.

    y = x s,   dx = dy (s + x s (1 - s)),   s = 1 / (1 + exp(-x))

Where exp overflows, below -88.7, s is 0, as in torch.
"""

import triton
import triton.language as tl

from .elementwise import apply
from .launch import launch

BLOCK = 2048  # elements per program: 16 per thread, two 16-byte loads at 16 bits
WARPS = 4


@triton.jit
def _sigmoid(x, CHEAP: tl.constexpr):
    """sigmoid(x) and exp(-x) of a float32 block."""
    if CHEAP:
        e = tl.exp2(x * -1.4426950408889634)
        # A division scales its arguments first; a reciprocal root and a square are two instructions.
        r = tl.rsqrt(1.0 + e)
        s = r * r
    else:
        # The rounding error of the exponent would cost |x| half ulps of e, so it becomes a separate factor of exp2. The
        # bounds, beyond which e is 0 or infinite, prevent infinity minus infinity.
        z = tl.minimum(tl.maximum(x, -128.0), 128.0)
        t = z * -1.4426950408889634
        rest = tl.fma(z, -1.925963e-8, tl.fma(z, -1.4426950408889634, -t))
        e = tl.exp2(t) * tl.fma(rest, 0.6931471805599453, 1.0)
        s = 1.0 / (1.0 + e)
    return s, e


@triton.jit
def _value(x, CHEAP: tl.constexpr):
    s, _ = _sigmoid(x, CHEAP)
    return x * s


@triton.jit
def _gradient(dy, x, CHEAP: tl.constexpr):
    s, e = _sigmoid(x, CHEAP)
    rest = tl.where(x > 0, e * s, 1.0 - s)  # 1 - s without cancellation
    return dy * tl.fma(x * s, rest, s)


@triton.jit(do_not_specialize=["n"])
def forward_kernel(x_N, y_N, n, CHEAP: tl.constexpr, BLOCK: tl.constexpr):
    apply(None, x_N, y_N, n, _value, (CHEAP,), BLOCK)


@triton.jit(do_not_specialize=["n"])
def backward_kernel(dy_N, x_N, dx_N, n, CHEAP: tl.constexpr, BLOCK: tl.constexpr):
    apply(dy_N, x_N, dx_N, n, _gradient, (CHEAP,), BLOCK)


# Fused multiply-adds are explicit and the compiler adds none, so running forward again gives the same bits.
def forward(x, y, queue):
    n = x.numel()
    if n:
        launch(
            forward_kernel, (-(-n // BLOCK),),
            x, y, n, x.element_size() == 2, BLOCK, num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip


def backward(dy, x, dx, queue):
    n = x.numel()
    if n:
        launch(
            backward_kernel, (-(-n // BLOCK),),
            dy, x, dx, n, x.element_size() == 2, BLOCK, num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip
