"""Sums of one function over all elements, with its derivative; csrc/pointwise_loss.h has the contract.

A program sums a run of blocks: BLOCKS of them, or the smallest multiple of BLOCKS that needs at most PROGRAMS runs. The
length of a run, and so the partial sums, depend only on numel.
"""

import triton
import triton.language as tl

from .launch import launch

# Elements per program at a time, blocks per run, maximum number of runs, warps.
BLOCK, BLOCKS, PROGRAMS, WARPS = 2048, 4, 1 << 16, 8

SQUARED, HUBER, SMOOTH_L1, BINARY = (tl.constexpr(kind) for kind in range(4))


@triton.jit
def _log1p(e):
    """log(1 + e) for 0 <= e <= 1, as 2 atanh(w) with w = e / (2 + e): a minimax fit with a relative error of 1e-10."""
    w = e / (2.0 + e)
    v = w * w
    poly = tl.fma(v, 0.121447809, 0.107153698)
    poly = tl.fma(v, poly, 0.143082984)
    poly = tl.fma(v, poly, 0.199994442)
    poly = tl.fma(v, poly, 0.333333378)
    return 2.0 * tl.fma(w * v, poly, w)


@triton.jit
def _value(x, target, parameter, KIND: tl.constexpr):
    """The function and its derivative with respect to x."""
    d = x - target
    a = tl.abs(d)
    if KIND == SQUARED:
        return d * d, 2.0 * d
    elif KIND == BINARY:
        e = tl.exp2(tl.abs(x) * -1.4426950408889634)
        r = 1.0 / (1.0 + e)
        return tl.fma(-x, target, tl.maximum(x, 0.0)) + _log1p(e), tl.where(x < 0, e * r, r) - target
    else:
        # torch scales these two differently: smooth L1 is Huber divided by the parameter.
        near, far, half = 0.5 * d * d, a - 0.5 * parameter, tl.where(d > 0, 1.0, tl.where(d < 0, -1.0, d))
        if KIND == HUBER:
            return tl.where(a < parameter, near, parameter * far), tl.where(a < parameter, d, parameter * half)
        else:
            return tl.where(a < parameter, near / parameter, far), tl.where(a < parameter, d / parameter, half)


@triton.jit
def _add_block(x_N, target_N, dx_N, i, parameter, mask, KIND: tl.constexpr):
    x = tl.load(x_N + i, mask=mask).to(tl.float32)
    target = tl.load(target_N + i, mask=mask).to(tl.float32)
    value, slope = _value(x, target, parameter, KIND)
    if dx_N is not None:
        tl.store(dx_N + i, slope.to(dx_N.dtype.element_ty), mask=mask)
    return value


# Only the last block is masked, so the others load whole vectors for any n.
@triton.jit(do_not_specialize=["n", "blocks"])
def forward_kernel(
    x_N, target_N, sums_P, dx_N, parameter: tl.float32, n, blocks, KIND: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    p = tl.program_id(0)
    start = p.to(tl.int64) * blocks * BLOCK
    x_N += start
    target_N += start
    if dx_N is not None:
        dx_N += start
    length = tl.minimum(n - start, blocks * BLOCK).to(tl.int32)
    even = length // BLOCK * BLOCK
    i = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for first in tl.range(0, even, BLOCK):
        total += _add_block(x_N, target_N, dx_N, first + i, parameter, None, KIND)
    if even < length:
        inside = even + i < length
        total += tl.where(inside, _add_block(x_N, target_N, dx_N, even + i, parameter, inside, KIND), 0.0)
    tl.store(sums_P + p, tl.sum(total, 0))


def _blocks(numel):
    """Blocks of a run."""
    return BLOCKS * max(1, -(-numel // (BLOCK * BLOCKS * PROGRAMS)))


def partials(numel):
    return -(-numel // (_blocks(numel) * BLOCK))


def forward(x, target, sums, dx, kind, parameter, queue):
    n = x.numel()
    if n:
        launch(
            forward_kernel, (partials(n),),
            x, target, sums, dx, parameter, n, _blocks(n), kind, BLOCK, num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip
