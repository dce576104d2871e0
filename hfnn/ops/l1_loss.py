"""Absolute error.

    loss = mean or sum of |x - target|,    dx = dloss (/ N) * sign(x - target)

The sign is kept, in two bits an element; torch keeps the difference. sign(0) and sign(NaN) are 0, as torch's.
"""

import torch
from torch import nn

from hfnn.kernel import Op, is_plain
from hfnn.ops.compare import CODES, ORDER, empty_codes, slope
from hfnn.ops.flat import flat, link_before, links, zeros_or_none
from hfnn.ops.layer_norm import statistics_dtype
from hfnn.ops.layout import _alike, _flat
from hfnn.ops.pointwise_loss import CASES, Loss, _compute, kernels, reduced


def reference(x, target, reduction="mean"):
    """The definition, in the dtype of x."""
    d = x - target
    return reduced(d.where(d > 0, -d), reduction)


def sample(case, dtype, device, generator=None):
    """Arguments of `l1_loss` for x and target of shape `case[:-1]`, no two elements nearer than a tenth.

    The last entry of a case is the reduction. The target goes by name: it is data, and seldom wants a gradient.
    """
    *shape, reduction = case
    target, difference = (torch.randn(shape, generator=generator) for _ in range(2))
    x = target + difference + difference.sign() / 10
    return (x.to(dtype).to(device),), {"target": target.to(dtype).to(device), "reduction": reduction}


OP = Op(
    "l1_loss",
    reference,
    nn.functional.l1_loss,
    kernels=kernels(1 << 18),
    sample=sample,
    cases=CASES,
    traffic=(4, 1),
    probe=lambda x: (x,),
    small=(3, 5, "mean"),
    bench=((16384, 8192, "mean"),),
    recipe=False,
    like_input=False,
)
_passes = OP.passes
# Smooth L1 without its smooth part; what curvature there is, there is none of.
_ABSOLUTE = Loss(2, torch.zeros_like)
_SIGNS = ((0.0, -1.0, 1.0, 0.0), (-0.0, 1.0, -1.0, -0.0))  # by which x and the target get theirs


class _L1Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, target, before, mean, out_dtype, kernel):
        x, target = _alike(x, target)
        order, codes = ORDER.find(x), empty_codes(x)
        order.forward(_flat(x), _flat(target), None, codes, CODES, order.queue(x))
        own, link = links(x, before)
        ctx.save_for_backward(codes, link)
        ctx.set_materialize_grads(False)
        ctx.order, ctx.count = order, x.numel() if mean else 1
        ctx.shape, ctx.strides, ctx.dtype = x.shape, x.stride(), x.dtype
        return _compute(x, target, _ABSOLUTE, 0.0, mean, out_dtype, kernel)[0], own

    @staticmethod
    def backward(ctx, dy, dlink):
        codes, link = ctx.saved_tensors
        wanted = tuple(zip(_SIGNS, ctx.needs_input_grad[:2], strict=True))
        if dy is None:
            return *(zeros_or_none(dlink, ctx.shape) if need else None for _, need in wanted), *(None,) * 4
        factor = dy.to(statistics_dtype(torch.empty(0, dtype=ctx.dtype))).view(1) / ctx.count
        make = _differentiable if torch.is_grad_enabled() else _signed
        grads = (flat(make(ctx, codes, factor, signs), link) if need else None for signs, need in wanted)
        return *grads, *(None,) * 4


def _signed(ctx, codes, factor, signs):
    """The factor with the sign of each code, laid out as x was."""
    dx = torch.empty_strided(ctx.shape, ctx.strides, dtype=ctx.dtype, device=codes.device)
    ctx.order.backward(factor, codes, _flat(dx), *signs, ctx.order.queue(dx))
    return dx


def _differentiable(ctx, codes, factor, signs):
    dx = slope(factor.expand(ctx.shape.numel()), codes, signs, ctx.order).to(ctx.dtype)
    return dx.as_strided(ctx.shape, ctx.strides)


def absolute_loss(op, input, target, reduction, prefer, *refused):
    """The reduced loss by a kernel, or None where torch's own op is to run, or to raise.

    `refused` are arguments that no kernel takes, None where absent.
    """
    kernel = None if op.passes(input, prefer) else op.select(input, target, prefer=prefer)
    if kernel is None or reduction not in ("mean", "sum") or any(argument is not None for argument in refused):
        return None
    if not is_plain(target) or target.shape != input.shape or target.dtype is not input.dtype:
        return None
    how = (reduction == "mean", op.out_dtype(input), kernel)
    if not torch.is_grad_enabled() or not (input.requires_grad or target.requires_grad):
        return _compute(input, target, _ABSOLUTE, 0.0, *how)[0]
    return _L1Loss.apply(input, target, link_before(input), *how)[0]


def l1_loss(input, target, size_average=None, reduce=None, reduction="mean", weight=None, *, prefer="auto"):
    """`torch.nn.functional.l1_loss`, keeping two bits an element instead of input and target.

    Shapes: input and target of one shape and dtype; others, weights and reduction="none" are left to torch's own op, as
    are the deprecated size_average and reduce. The result is a scalar of the dtype torch returns. prefer: "auto" |
    "memory" | "speed" (`hfnn.convert`). Raises what torch raises. Sums are float32.
    """
    if _passes(input, prefer):
        return nn.functional.l1_loss(input, target, size_average, reduce, reduction, weight)
    loss = absolute_loss(OP, input, target, reduction, prefer, size_average, reduce, weight)
    if loss is None:
        return nn.functional.l1_loss(input, target, size_average, reduce, reduction, weight)
    return loss


class L1Loss(nn.L1Loss):
    """`torch.nn.L1Loss`: the same arguments and defaults. `prefer` is set by `hfnn.convert`."""

    prefer = "auto"

    def forward(self, input, target):
        return l1_loss(input, target, reduction=self.reduction, prefer=self.prefer)


OP.modules[nn.L1Loss] = L1Loss
