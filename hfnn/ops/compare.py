"""What abs, maximum, minimum and l1_loss share: the order of two numbers is all that backward needs.

    dx_i = dy_i * factor[code_i],    code = 0 where a = b, 1 where a < b, 2 where a > b, 3 where either is a NaN

A code is two bits (csrc/compare.h), a quarter of a byte an element; torch keeps the inputs themselves. Slopes are
constant, so that backward is linear in dy, is its own backward, and can be differentiated as often as torch's.
"""

import math

import torch

from hfnn import bits
from hfnn.kernel import FLOATS, Kernel, Op, is_plain
from hfnn.ops.flat import flat, link_before, links, zeros_or_none
from hfnn.ops.layout import in_rows, like_dy

ABS, MAXIMUM, MINIMUM, CODES = range(4)  # as in csrc/compare.h
NONE = math.nan  # as a factor: no gradient, whatever dy is

# Of a and of b, in the order of the codes.
FACTORS = {
    ABS: ((0.0, -1.0, 1.0, 0.0),),
    MAXIMUM: ((0.5, NONE, 1.0, 1.0), (0.5, 1.0, NONE, 1.0)),
    MINIMUM: ((0.5, 1.0, NONE, 1.0), (0.5, NONE, 1.0, 1.0)),
}


def kernels(min_elements: int) -> tuple[Kernel, ...]:
    """The kernels of every op here; min_elements: on the CPU."""
    return (
        Kernel("triton", "hfnn.kernels.compare", "cuda", min_elements=1 << 24),
        Kernel("cpp", "hfnn._C:cpu.compare", "cpu", (*FLOATS, torch.float64), min_elements=min_elements),
    )


class _Compare(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b, before, kind, kernel):
        y, codes = _values(a, b, kind, kernel, with_codes=True)
        # torch's maximum has a choice of dy alone.
        own, link = links(a, before) if kind == ABS else (None, None)
        ctx.save_for_backward(codes, link)
        ctx.set_materialize_grads(False)
        ctx.factors, ctx.kernel, ctx.shape = FACTORS[kind], kernel, a.shape
        return y, own

    @staticmethod
    def backward(ctx, dy, dlink):
        codes, link = ctx.saved_tensors
        if dy is None:
            return zeros_or_none(dlink, ctx.shape), *(None,) * 4
        da, *db = (
            flat(slope(dy, codes, factors, ctx.kernel), link) if need else None
            for factors, need in zip(ctx.factors, ctx.needs_input_grad, strict=False)
        )
        if not db:  # of two inputs torch's gradients have their layout, and not that of dy
            da = like_dy(da, dy)
        return da, *(db or (None,)), None, None, None


class _Slope(torch.autograd.Function):
    """dx of dy: linear in dy, so its own backward."""

    @staticmethod
    def forward(ctx, dy, codes, factors, kernel):
        ctx.save_for_backward(codes)
        ctx.factors, ctx.kernel = factors, kernel
        return _product(dy, codes, factors, kernel)

    @staticmethod
    def backward(ctx, dy):
        (codes,) = ctx.saved_tensors
        return slope(dy, codes, ctx.factors, ctx.kernel), None, None, None


def slope(dy, codes, factors, kernel):
    """dy times the factor of each code; differentiable in dy where that is asked. kernel: one of `kernels`."""
    if torch.is_grad_enabled():
        return _Slope.apply(dy, codes, factors, kernel)
    return _product(dy, codes, factors, kernel)


def _product(dy, codes, factors, kernel):
    dy = dy.contiguous()
    dx = torch.empty_like(dy)
    kernel.backward(dy, codes, dx, *factors, kernel.queue(dx))
    return dx


def _values(a, b, kind, kernel, with_codes):
    """(y, codes or None)"""
    a, b = a.contiguous(), None if b is None else b.contiguous()
    y = torch.empty_like(a)
    codes = empty_codes(a) if with_codes else None
    kernel.forward(a, b, y, codes, kind, kernel.queue(a))
    return y, codes


def empty_codes(x):
    """Memory for the codes of x."""
    return torch.empty(bits.size(x.numel(), 2), dtype=torch.uint8, device=x.device)


def compare(a, b, kind, kernel):
    """y of a and b (None for ABS), keeping what backward needs where there will be one."""
    if torch.is_grad_enabled() and (a.requires_grad or (b is not None and b.requires_grad)):
        return _Compare.apply(a, b, link_before(a) if kind == ABS else None, kind, kernel)[0]
    return _values(a, b, kind, kernel, with_codes=False)[0]


def select(op, a, b, prefer):
    """The kernel of `op` for two tensors of one shape and dtype, or None for torch's own op."""
    kernel = op.select(a, b, prefer=prefer)
    if kernel is None or not is_plain(b) or a.shape != b.shape or a.dtype is not b.dtype:
        return None
    return kernel if in_rows(a) and in_rows(b) else None  # torch's result has other strides


def pair(case, dtype, device, generator=None):
    """Arguments of maximum and minimum for a and b of shape `case`, no two elements nearer than a tenth."""
    a, difference = (torch.randn(case, generator=generator) for _ in range(2))
    b = a + difference + difference.sign() / 10
    return tuple(t.to(dtype).to(device) for t in (a, b)), {}


# For rooms whose first kernel is another one: the codes of two tensors (kind CODES), and their slopes.
ORDER = Op("compare", torch.sub, torch.sub, kernels(0), sample=lambda *_: None)
