"""What mse_loss, huber_loss, smooth_l1_loss and binary_cross_entropy_with_logits share: one pass over both inputs.

    loss = sum_i f(x_i, target_i), or that over the number N of elements;    dx = dloss (/ N) * g,    g = df/dx

Forward makes g while it has x and target at hand and keeps it instead of them: one tensor for two. Backward is then
g times a number, into new memory. Where backward is to be differentiated again, dg/dx is needed too, and x is gone;
but of these functions it can be told from g (`Loss.curvature`). So that autograd finds its way from g to x, g is a
second output of the function: the graph behind g is this function itself, and `dg` reaches the same backward.

g is kept in the dtype of x, and dloss / N is applied to it in float32: in float16 1 / N alone would be lost.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from hfnn.kernel import FLOATS, Kernel, is_plain
from hfnn.ops import head
from hfnn.ops.layer_norm import statistics_dtype
from hfnn.ops.layout import _alike, _dense, _flat

# Sizes and reductions for the contract tests, of every loss here.
CASES = tuple((*shape, how) for shape in ((1,), (3, 769), (64, 1024), (0, 4)) for how in ("mean", "sum"))


def kernels(min_elements: int) -> tuple[Kernel, ...]:
    """The kernels of every loss here; min_elements: on the CPU."""
    return (
        Kernel("triton", "hfnn.kernels.pointwise_loss", "cuda", min_elements=1 << 24),
        Kernel("cpp", "hfnn._C:cpu.pointwise_loss", "cpu", (*FLOATS, torch.float64), min_elements=min_elements),
    )


@dataclass(frozen=True)
class Loss:
    """One of the functions f. kind: its number in csrc/pointwise_loss.h; keeps_target: whether curvature needs it.

    curvature(g, target, parameter): the derivative of g with respect to x, differentiable as far as it goes; g and
    target come in their own dtype.
    """

    kind: int
    curvature: Callable
    keeps_target: bool = False


def _compute(x, target, loss, parameter, mean, out_dtype, kernel, with_g=False):
    """(loss, g or None)"""
    count = x.numel()
    x, target = _alike(x, target)
    g = torch.empty_like(x) if with_g else None
    # Without elements nothing is launched that would write.
    sums = (torch.empty if count else torch.zeros)(kernel.partials(count), dtype=statistics_dtype(x), device=x.device)
    kernel.forward(_flat(x), _flat(target), sums, _flat(g), loss.kind, parameter, kernel.queue(x))
    total = sums.sum(dtype=torch.float64)
    return (total / count if mean else total).to(out_dtype), g


class _PointwiseLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, target, loss, parameter, mean, out_dtype, kernel):
        y, g = _compute(x, target, loss, parameter, mean, out_dtype, kernel, with_g=True)
        ctx.save_for_backward(g, target if loss.keeps_target else None)
        ctx.kernel = kernel
        ctx.set_materialize_grads(False)  # dg is None but for a second backward
        ctx.loss, ctx.parameter, ctx.count, ctx.scale = loss, parameter, x.numel() if mean else 1, head.SCALE.find(g)
        return y, g

    @staticmethod
    def backward(ctx, dy, dg):
        g, target = ctx.saved_tensors
        needs, nothing = ctx.needs_input_grad[:2], (None,) * 5
        if dy is None and dg is None:
            return None, None, *nothing
        if dg is not None or torch.is_grad_enabled():
            dx = _differentiable(ctx, g, target, dy, dg)
            return dx if needs[0] else None, -dx if needs[1] else None, *nothing
        factor = dy.to(statistics_dtype(g)).view(1) / ctx.count
        return (
            _scaled(g, factor, ctx.scale) if needs[0] else None,
            _scaled(g, -factor, ctx.scale) if needs[1] else None,
            *nothing,
        )


def _differentiable(ctx, g, target, dy, dg):
    """dx of dy, of dg, or of both; the target's gradient is -dx, for where it is wanted f depends on x - target."""
    wide = statistics_dtype(g)
    dx = None if dy is None else g.to(wide) * (dy.to(wide) / ctx.count)
    if dg is not None:
        bent = dg.to(wide) * ctx.loss.curvature(g, target, ctx.parameter)
        dx = bent if dx is None else dx + bent
    return dx.to(g.dtype)


def _scaled(g, factor, kernel):
    """factor * g in new memory, laid out as g."""
    g = _dense(g)
    y = torch.empty_like(g)
    kernel.forward(_flat(g), factor, _flat(y), kernel.queue(g))
    return y


def pointwise_loss(op, loss, input, target, parameter, reduction, prefer, *weights):
    """The reduced loss by a kernel, or None where torch's own op is to run, or to raise.

    `weights` are arguments that no kernel takes, None where absent: weights, and torch's size_average and reduce.
    """
    kernel = None if op.passes(input, prefer) else op.select(input, target, prefer=prefer)
    if kernel is None or reduction not in ("mean", "sum") or any(w is not None for w in weights):
        return None
    if not is_plain(target) or target.shape != input.shape or target.dtype is not input.dtype:
        return None
    how = (loss, parameter, reduction == "mean", op.out_dtype(input), kernel)
    if not torch.is_grad_enabled() or not (input.requires_grad or target.requires_grad):
        return _compute(input, target, *how)[0]
    if loss.keeps_target and target.requires_grad:
        return None
    return _PointwiseLoss.apply(input, target, *how)[0]


def pair(case, dtype, device, generator=None):
    """Arguments of a loss for x and target of shape `case[:-1]`; the last entry of a case is the reduction.

    The target goes by name: it is data, and seldom wants a gradient.
    """
    *shape, reduction = case
    x, target = (torch.randn(shape, generator=generator).mul_(2).to(dtype).to(device) for _ in range(2))
    return (x,), {"target": target, "reduction": reduction}


def reduced(loss, reduction):
    """torch's reductions, in the dtype of the loss."""
    return loss if reduction == "none" else getattr(loss, reduction)()
