"""Elementwise losses of an input and a target, with a reduction: one row per loss, one pass over both.

    loss = sum_i f(x_i, target_i), or that over the number N of elements;    dx = dloss (/ N) * g,    g = df/dx

Forward computes g while it reads x and target, and keeps g instead of both: one tensor instead of two. Backward is g
times a number, into new memory. A second derivative also needs dg/dx, and x is gone; for these functions it can be
computed from g (`Loss.curvature`). g is a second output of the function, so autograd finds the path from g to x: the
graph of g is this function itself, and `dg` reaches the same backward.

l1_loss keeps the sign of x - target, in two bits per element, and no g.

g is kept in the dtype of x, and dloss / N is applied in float32, because in float16 1 / N alone would be lost.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from hfnn.core.context import is_plain
from hfnn.core.kernel import Op, kernels
from hfnn.core.node import Function
from hfnn.ops import head, table
from hfnn.ops.flat import flat, link_before, links, zeros_or_none
from hfnn.ops.layer_norm import statistics_dtype
from hfnn.ops.layout import _alike, _dense, _flat, like, result_strides
from hfnn.ops.select import CODES, ORDER, empty_codes, slope
from hfnn.ops.table import BENCH

_OPS: list[Op] = []


@dataclass(frozen=True)
class Loss(Op):
    """A row. kind: its number in csrc/pointwise_loss.h; keeps_target: whether curvature needs it.

    numbers(target, *torch's arguments after it): (target, reduction, parameter), or None for torch's own op.
    curvature(g, target, parameter): the derivative of g with respect to x, differentiable where possible; g and target
    have their own dtypes. None: there is none, and signs are kept. The same holds if the parameter is None.
    """

    kind: int = 0
    numbers: Callable = lambda *arguments: None
    curvature: Callable | None = None
    keeps_target: bool = False

    def run(self, input, prefer: str, arguments: tuple):
        """The reduced loss by a kernel, or None if torch's own op must run, or raise."""
        numbers = table.numbers(self, *arguments)
        target, reduction, parameter = numbers or (None, None, None)
        if reduction not in ("mean", "sum"):
            return None
        kernel = self.select(input, target, prefer=prefer)
        if kernel is None or not is_plain(target):
            return None
        if target.shape != input.shape or target.dtype is not input.dtype:
            return None
        signs = self.curvature is None or parameter is None
        how = (self, parameter or 0.0, reduction == "mean", self.out_dtype(input), kernel)
        if not torch.is_grad_enabled() or not (input.requires_grad or target.requires_grad):
            return _compute(input, target, *how)[0]
        if self.keeps_target and (target.requires_grad or _is_kept(input)):
            return None
        if signs:
            return _L1Loss.apply(input, target, link_before(input), *how)[0]
        return _PointwiseLoss.apply(input, target, *how)[0]


def _is_kept(x) -> bool:
    """Whether the op of torch that made x, or the base of this view, keeps it anyway."""
    return hasattr((x if x._base is None else x._base).grad_fn, "_saved_result")


def _compute(x, target, loss, parameter, mean, out_dtype, kernel, with_g=False):
    """(loss, g or None)"""
    count = x.numel()
    x, target = _alike(x, target)
    g = like(x) if with_g else None
    # Without elements, no kernel is launched that would write.
    sums = (torch.empty if count else torch.zeros)(kernel.partials(count), dtype=statistics_dtype(x), device=x.device)
    kernel.forward(_flat(x), _flat(target), sums, _flat(g), loss.kind, parameter, kernel.queue(x))
    total = sums.sum(dtype=torch.float64)
    return (total / count if mean else total).to(out_dtype), g


class _PointwiseLoss(Function):
    @staticmethod
    def forward(ctx, x, target, loss, parameter, mean, out_dtype, kernel):
        if not loss.keeps_target:
            x, target = x.contiguous(), target.contiguous()  # torch's gradient is contiguous, too
        y, g = _compute(x, target, loss, parameter, mean, out_dtype, kernel, with_g=True)
        ctx.save_for_backward(g, target if loss.keeps_target else None)
        ctx.kernel = kernel
        ctx.set_materialize_grads(False)  # dg is None except in a second backward
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
    """dx of dy, of dg, or of both. The target's gradient is -dx, because f depends on x - target if it is needed."""
    wide = statistics_dtype(g)
    dx = None if dy is None else g.to(wide) * (dy.to(wide) / ctx.count)
    if dg is not None:
        bent = dg.to(wide) * ctx.loss.curvature(g, target, ctx.parameter)
        dx = bent if dx is None else dx + bent
    return dx.to(g.dtype)


def _scaled(g, factor, kernel):
    """factor * g in new memory, laid out as g."""
    g = _dense(g)
    y = like(g)
    kernel.forward(_flat(g), factor, _flat(y), kernel.queue(g))
    return y


_SIGNS = ((0.0, -1.0, 1.0, 0.0), (-0.0, 1.0, -1.0, -0.0))  # the signs for the gradients of x and of the target


class _L1Loss(Function):
    @staticmethod
    def forward(ctx, x, target, before, loss, parameter, mean, out_dtype, kernel):
        # torch's gradient is the product of the mean's gradient, which is contiguous, and the signs.
        signs = _alike(x, target)
        x, target = (x.contiguous(), target.contiguous()) if mean else signs
        order, codes = ORDER.find(x), empty_codes(x)
        order.forward(_flat(x), _flat(target), None, codes, CODES, order.queue(x))
        own, link = links(x, before)
        ctx.save_for_backward(codes, link)
        ctx.set_materialize_grads(False)
        ctx.order, ctx.count = order, x.numel() if mean else 1
        ctx.shape, ctx.strides, ctx.dtype = x.shape, x.stride(), x.dtype
        if 1 in x.shape:
            ctx.strides = result_strides(like(x), signs[0]) if mean else result_strides(*signs)
        return _compute(x, target, loss, parameter, mean, out_dtype, kernel)[0], own

    @staticmethod
    def backward(ctx, dy, dlink):
        codes, link = ctx.saved_tensors
        wanted = tuple(zip(_SIGNS, ctx.needs_input_grad[:2], strict=True))
        if dy is None:
            return *(zeros_or_none(dlink, ctx.shape) if need else None for _, need in wanted), *(None,) * 6
        factor = dy.to(statistics_dtype(torch.empty(0, dtype=ctx.dtype))).view(1) / ctx.count
        make = _signed_again if torch.is_grad_enabled() else _signed
        grads = (flat(make(ctx, codes, factor, signs), link) if need else None for signs, need in wanted)
        return *grads, *(None,) * 6


def _signed(ctx, codes, factor, signs):
    """The factor with the sign of each code, laid out as x was."""
    dx = torch.empty_strided(ctx.shape, ctx.strides, dtype=ctx.dtype, device=codes.device)
    ctx.order.backward(factor, codes, _flat(dx), *signs, ctx.order.queue(dx))
    return dx


def _signed_again(ctx, codes, factor, signs):
    dx = slope(factor.expand(ctx.shape.numel()), codes, signs, ctx.order).to(ctx.dtype)
    return dx.as_strided(ctx.shape, ctx.strides)


def _normal(shape, generator):
    return tuple(torch.randn(shape, generator=generator).mul_(2) for _ in range(2))


def _apart(shape, generator):
    """No two elements closer than a tenth."""
    target, difference = (torch.randn(shape, generator=generator) for _ in range(2))
    return target + difference + difference.sign() / 10, target


def _between_0_and_1(shape, generator):
    x, target = _normal(shape, generator)
    return x, target.sigmoid()


def _reduced(loss, reduction):
    """torch's reductions, in the dtype of the loss."""
    return loss if reduction == "none" else getattr(loss, reduction)()


_DOCUMENT = """`torch.nn.functional.{}`, {}

{}

Shapes: input and target of one shape and dtype; others, weights and reduction="none" are left to torch's own op, as are
the deprecated size_average and reduce. The result is a scalar of the dtype torch returns. Sums are float32. Raises what
torch raises.
"""
_KEEPING = "keeping one tensor instead of input and target."


def _row(kind, keeps, text, torchs, base, attributes, reference, numbers, draw=_normal, floor=1 << 18, **more):
    """The function and the module of an op. text: the definition and its source; keeps: what is kept, in words.

    reference(x, target, *options): the loss of each element. attributes: of torch's class `base`, as arguments.
    """

    def of_all(x, target, reduction="mean", **given):
        return _reduced(reference(x, target, **given), reduction)

    # The target is a keyword: it is data, and rarely requires a gradient.
    def sample(case, dtype, device, generator=None):
        *shape, reduction = case
        x, target = (t.to(dtype).to(device) for t in draw(shape, generator))
        return (x,), {"target": target, "reduction": reduction}

    op = Loss(
        torchs.__name__, of_all, torchs,
        kernels=kernels("pointwise_loss", floor),
        sample=sample, cases=table.cases((("mean",), ("sum",))), probe=lambda x: (x,), small=(3, 5, "mean"),
        bench=((*BENCH, "mean"),), recipe=False, like_input=False, kind=kind, numbers=numbers,
        **{"traffic": (3, 2), **more},
    )  # fmt: skip
    _OPS.append(op)
    parameters = list(inspect.signature(numbers).parameters.values())
    function = table.function(op, parameters, _DOCUMENT.format(op.name, keeps, inspect.cleandoc(text)))
    return function, table.module(op, base, base.__name__, function, inputs=("input", "target"), attributes=attributes)


def _without(*refused) -> bool:
    """Whether no torch argument is given that the kernels do not support."""
    return all(argument is None for argument in refused)


l1_loss, L1Loss = _row(
    2, "keeping two bits an element instead of input and target.",
    """loss = mean or sum of |x - target|, dx = dloss (/ N) * sign(x - target), which of 0 and NaN is 0, as torch's.""",
    F.l1_loss, nn.L1Loss, ("reduction",), lambda x, target: (x - target).where(x > target, target - x),
    lambda target, size_average=None, reduce=None, reduction="mean", weight=None: (
        (target, reduction, None) if _without(size_average, reduce, weight) else None
    ),
    draw=_apart, traffic=(4, 1),
)  # fmt: skip

mse_loss, MSELoss = _row(
    0, _KEEPING,
    """loss = mean or sum of (x - target)^2; g = 2 (x - target), dg/dx = 2.

    >>> hfnn.functional.mse_loss(torch.tensor([1.0, 3.0]), torch.tensor([1.0, 1.0]))
    tensor(2.)""",
    F.mse_loss, nn.MSELoss, ("reduction",), lambda x, target: (x - target).square(),
    lambda target, size_average=None, reduce=None, reduction="mean", weight=None: (
        (target, reduction, 0.0) if _without(size_average, reduce, weight) else None
    ),
    curvature=lambda g, target, parameter: torch.full_like(g, 2),
)  # fmt: skip


def _huber(x, target, delta=1.0):
    d = (x - target).abs()
    return (d * d / 2).where(d < delta, delta * (d - delta / 2))


def _huber_curvature(g, target, delta):
    # In the linear part g is delta as kernels round it: to float32 (unless float64), then to the dtype of g.
    delta = torch.tensor(delta, dtype=statistics_dtype(g)).to(g.dtype).item()
    return (g.abs() < delta).to(g.dtype)


huber_loss, HuberLoss = _row(
    1, _KEEPING,
    """loss = mean or sum of d^2 / 2 where |d| < delta, else delta (|d| - delta / 2), d = x - target;
    g = d where |d| < delta, else delta sign(d); dg/dx = [|d| < delta] = [|g| < delta].

    Huber, "Robust Estimation of a Location Parameter", Annals of Mathematical Statistics 1964.""",
    F.huber_loss, nn.HuberLoss, ("reduction", "delta"), _huber,
    lambda target, reduction="mean", delta=1.0, weight=None: (
        (target, reduction, float(delta)) if delta > 0 and weight is None else None
    ),
    curvature=_huber_curvature,
)  # fmt: skip


def _smooth_l1(x, target, beta=1.0):
    d = (x - target).abs()
    return d if beta == 0 else (d * d / (2 * beta)).where(d < beta, d - beta / 2)


smooth_l1_loss, SmoothL1Loss = _row(
    2, "keeping one tensor instead of input and target; a sign where beta is 0.",
    """loss = mean or sum of d^2 / (2 beta) where |d| < beta, else |d| - beta / 2, d = x - target;
    g = d / beta where |d| < beta, else sign(d); dg/dx = [|d| < beta] / beta = [|g| < 1] / beta.

    Girshick, "Fast R-CNN", 2015. https://arxiv.org/abs/1504.08083""",
    F.smooth_l1_loss, nn.SmoothL1Loss, ("reduction", "beta"), _smooth_l1,
    lambda target, size_average=None, reduce=None, reduction="mean", beta=1.0: (
        (target, reduction, float(beta) or None) if beta >= 0 and _without(size_average, reduce) else None
    ),
    curvature=lambda g, target, beta: (g.abs() < 1).to(statistics_dtype(g)) / beta,
)  # fmt: skip


def _binary_curvature(g, target, parameter):
    wide = statistics_dtype(g)
    s = g.to(wide) + target.to(wide)
    return s * (1 - s)


binary_cross_entropy_with_logits, BCEWithLogitsLoss = _row(
    3, "with the gradient made in forward.",
    """loss = mean or sum of max(x, 0) - x target + log(1 + exp(-|x|));
    g = s - target, dg/dx = s (1 - s), s = 1 / (1 + exp(-x)) = g + target.

    The target is kept beside g, for a second backward alone: it is data, which its owner keeps anyway. Targets that
    require grad are left to torch's own op.

    >>> hfnn.functional.binary_cross_entropy_with_logits(torch.tensor([0.0, 2.0]), torch.tensor([1.0, 1.0]))
    tensor(0.4100)""",
    F.binary_cross_entropy_with_logits, nn.BCEWithLogitsLoss, ("weight", "pos_weight", "reduction"),
    lambda x, target: torch.logaddexp(x, torch.zeros_like(x)) - x * target,
    lambda target, weight=None, size_average=None, reduce=None, reduction="mean", pos_weight=None: (
        (target, reduction, 0.0) if _without(weight, size_average, reduce, pos_weight) else None
    ),
    draw=_between_0_and_1, floor=1 << 15, curvature=_binary_curvature, keeps_target=True, saves=False,
)  # fmt: skip

OPS = tuple(_OPS)
