"""Negative log-likelihood of classes, for callers who compute log-probabilities themselves.

    loss_r = -w[t_r] x[r, t_r]

The arithmetic is torch's own; there is nothing to gain. But torch keeps the input for backward, which only needs its
shape. Here it is not kept. `cross_entropy` computes the same number faster.
"""

import torch
from torch import Tensor, nn
from torch.nn import _reduction

from hfnn.core.context import autocasting, compiling, context
from hfnn.core.kernel import Op, forced
from hfnn.core.node import Function, double_backward
from hfnn.ops.flat import flat, link_before, links, zeros_or_none

_REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}


def reference(input, target, weight=None, size_average=None, ignore_index=-100, reduce=None, reduction="mean"):
    """The definition, in the dtype of the input."""
    x = input.movedim(min(1, input.dim() - 1), -1)
    counted = target != ignore_index
    index = target.where(counted, 0)
    share = counted.to(x.dtype) if weight is None else weight.to(x.dtype)[index] * counted
    loss = -share * x.gather(-1, index.unsqueeze(-1)).squeeze(-1).where(counted, 0)
    if reduction == "none":
        return loss
    return loss.sum() / share.sum() if reduction == "mean" else loss.sum()


def sample(case, dtype, device, generator=None):
    """Arguments of `nll_loss` for x of shape `case`, (N, C, ...)."""
    x = torch.randn(case, generator=generator).log_softmax(1)
    target = torch.randint(case[1], (case[0], *case[2:]), generator=generator)
    return (x.to(dtype).to(device), target.to(device)), {}


# No own kernels, as in `linear`.
OP = Op(
    "nll_loss",
    reference,
    nn.functional.nll_loss,
    kernels=(),
    sample=sample,
    cases=((3, 5),),
    recipe=False,
    like_input=False,
)


class _NLLLoss(Function):
    @staticmethod
    def forward(ctx, x, before, target, weight, reduction, ignore_index):
        many = torch.ops.aten.nll_loss2d_forward if x.dim() == 4 else torch.ops.aten.nll_loss_forward
        loss, total = many(x, target, weight, reduction, ignore_index)
        own, link = links(x, before)
        ctx.save_for_backward(target, weight, total, link)
        ctx.set_materialize_grads(False)
        ctx.rest, ctx.shape, ctx.dtype = (reduction, ignore_index), x.shape, x.dtype
        return loss, own

    @staticmethod
    def backward(ctx, dy, dlink):
        target, weight, total, link = ctx.saved_tensors
        nothing = (None,) * 5
        if dy is None:
            return zeros_or_none(dlink, ctx.shape), *nothing
        # Only the shape and the dtype of the input are read, never an element.
        x = dy.new_empty(()).to(ctx.dtype).expand(ctx.shape)
        if torch.is_grad_enabled():  # the loss is linear in the input: its gradient depends only on dy
            like = torch.zeros(ctx.shape, dtype=ctx.dtype, device=dy.device, requires_grad=True)
            names = {value: name for name, value in _REDUCTIONS.items()}

            def formula(x):
                return nn.functional.nll_loss(x, target, weight, ignore_index=ctx.rest[1], reduction=names[ctx.rest[0]])

            return flat(*double_backward(formula, (like,), (True,), dy), link), *nothing
        many = torch.ops.aten.nll_loss2d_backward if len(ctx.shape) == 4 else torch.ops.aten.nll_loss_backward
        return many(dy, x, target, weight, *ctx.rest, total), *nothing


def _fits(x, target) -> bool:
    """Whether there is an aten function for the dimensions; otherwise torch's own function runs, or raises.

    It also runs without elements: its result and its gradient have other strides.
    """
    dims = x.dim()
    if dims not in (1, 2, 4) or target.dim() != dims - 1 or not x.numel():
        return False
    return dims == 1 or target.size(0) == x.size(0)  # aten compares the others, with torch's errors


def nll_loss(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Tensor:
    """`torch.nn.functional.nll_loss`, which does not keep its input for backward. Raises what torch raises.

    Args:
        input: Logarithms of probabilities, (C), (N, C) or (N, C, d1, ...).
        target: int64, without the classes' dimension.
        weight: (C,) or None.
        size_average: Deprecated, as in torch.
        ignore_index: The class of rows that do not count.
        reduce: Deprecated, as in torch.
        reduction: "mean", "sum", or "none": of target's shape.
    """
    if size_average is not None or reduce is not None:
        reduction = _reduction.legacy_get_string(size_average, reduce)
    plain = torch.is_grad_enabled() and not compiling() and forced() != "torch" and reduction in _REDUCTIONS
    if plain and input.requires_grad and context(input, target, weight) is None and _fits(input, target):
        autocast = autocasting(input)
        x = input.float() if autocast and input.dtype.itemsize < 4 else input
        return _NLLLoss.apply(x, link_before(x), target, weight, _REDUCTIONS[reduction], ignore_index)[0]
    return nn.functional.nll_loss(input, target, weight, None, ignore_index, None, reduction)


class NLLLoss(nn.NLLLoss):
    """`torch.nn.NLLLoss`: the same arguments and defaults.

    Args:
        weight: (C,) or None.
        size_average: Deprecated, as in torch.
        ignore_index: The class of rows that do not count.
        reduce: Deprecated, as in torch.
        reduction: "mean", "sum" or "none".
    """

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return nll_loss(input, target, self.weight, ignore_index=self.ignore_index, reduction=self.reduction)


OP.modules[nn.NLLLoss] = NLLLoss
