"""Relu and dropout in one op that keeps only the result.

    y = max(x, 0) / (1 - p) where word >= round(p * 2^32), else 0;    dx = dy / (1 - p) where y != 0, else 0

An element with y = 0 was dropped or not positive, and has no gradient in either case. So backward only needs y, which
the next layer keeps anyway; torch also keeps relu's result and a mask. The random draw is that of dropout.
"""

import torch
from torch import Tensor, nn

from hfnn.core.kernel import Kernel, Op, kernels
from hfnn.core.node import Function
from hfnn.ops import piecewise, table
from hfnn.ops.dropout import philox_seed
from hfnn.ops.layout import _dense, in_order, like


def reference(x, p=0.5, training=True, *, mask=None):
    """The definition for a given boolean mask of what is kept, in the dtype of x."""
    y = torch.where(x > 0, x, 0)
    return y * mask / (1 - p) if training else y


def _by_torch(x, p=0.5, training=True):
    return torch.dropout(torch.relu(x), p, training)


def sample(case, dtype, device, generator=None):
    """Arguments of `relu_dropout` for x of shape `case[:-1]`; the last entry of a case is p."""
    *shape, p = case
    return (piecewise.crossing(shape, generator, (0,)).to(dtype).to(device), p, True), {}


OP = Op(
    "relu_dropout",
    reference,
    _by_torch,
    kernels=kernels("dropout", 1 << 13, Kernel("cuda", "hfnn._C:cuda.dropout", "cuda", min_elements=1 << 24)),
    sample=sample,
    cases=tuple((*shape, p) for shape in table.SHAPES for p in (0.1, 0.5)),
    traffic=(2, 3),
    probe=(0.5, True),
    small=(3, 5, 0.5),
    pin=lambda args, y: {"mask": (y != 0) | (args[0] <= 0)},
    recipe=False,
    bench=((*table.BENCH, 0.1),),
)
_passes = OP.passes


class _ReluDropout(Function):
    @staticmethod
    def forward(ctx, x, p, drawn, kernel):
        ctx.set_materialize_grads(False)
        y = _compute(x, p, drawn, kernel)
        ctx.save_for_backward(y)
        ctx.scale = 1 / (1 - p)
        return y

    @staticmethod
    def backward(ctx, dy):
        (y,) = ctx.saved_tensors
        # relu's gradient distinguishes y > 0 from y = 0, and passes NaNs.
        dx = torch.ops.aten.threshold_backward(dy, y, 0)
        return dx * ctx.scale if torch.is_grad_enabled() else dx.mul_(ctx.scale), None, None, None


def _compute(x, p, drawn, kernel):
    """Relu after the dropout, in place: the result is the same, because the factor between them is positive."""
    x = _dense(x)
    y = like(x)
    kernel.forward(in_order(x), in_order(y), round(p * 2**32), 1 / (1 - p), *drawn, kernel.queue(x))
    return y.relu_()


def relu_dropout(input: Tensor, p: float = 0.5, training: bool = True, *, prefer: str = "auto") -> Tensor:
    """`dropout(relu(input), p, training)`, which keeps only its result. Raises what torch raises.

    Args:
        input: Of any shape and dtype, which the result has.
        p: The probability of a zero, in [0, 1], exact to 2^-32. For 0 and 1 torch's own ops run.
        training: Whether there is dropout. Without it torch's own ops run.
    PREFER
    """
    if not training or not 0 < p < 1:
        return nn.functional.dropout(torch.relu(input), p, training)
    kernel = None if _passes(input, prefer) else OP.select(input, prefer=prefer)
    if kernel is None:
        return _by_torch(input, p)
    drawn = philox_seed(input)
    if torch.is_grad_enabled() and input.requires_grad:
        return _ReluDropout.apply(input, p, drawn, kernel)
    return _compute(input, p, drawn, kernel)
