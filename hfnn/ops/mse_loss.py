"""Squared error.

loss = mean or sum of (x - target)^2;    g = 2 (x - target),    dg/dx = 2
"""

import torch
from torch import nn

from hfnn.kernel import Op
from hfnn.ops.pointwise_loss import CASES, Loss, kernels, pair, pointwise_loss, reduced


def reference(x, target, reduction="mean"):
    """The definition, in the dtype of x."""
    return reduced((x - target).square(), reduction)


OP = Op(
    "mse_loss",
    reference,
    nn.functional.mse_loss,
    kernels=kernels(1 << 18),
    sample=pair,
    cases=CASES,
    traffic=(3, 2),
    probe=lambda x: (x,),
    small=(3, 5, "mean"),
    bench=((16384, 8192, "mean"),),
    recipe=False,
    like_input=False,
)
SQUARED = Loss(0, lambda g, target, parameter: torch.full_like(g, 2))


def mse_loss(input, target, size_average=None, reduce=None, reduction="mean", weight=None, *, prefer="auto"):
    """`torch.nn.functional.mse_loss`, keeping one tensor instead of input and target.

    Shapes: input and target of one shape and dtype; others, weights and reduction="none" are left to torch's own op, as
    are the deprecated size_average and reduce. The result is a scalar of the dtype torch returns. prefer: "auto" |
    "memory" | "speed" (`hfnn.convert`). Raises what torch raises. Sums are float32.
    """
    loss = pointwise_loss(OP, SQUARED, input, target, 0.0, reduction, prefer, size_average, reduce, weight)
    if loss is None:
        return nn.functional.mse_loss(input, target, size_average, reduce, reduction, weight)
    return loss


class MSELoss(nn.MSELoss):
    """`torch.nn.MSELoss`: the same arguments and defaults. `prefer` is set by `hfnn.convert`."""

    prefer = "auto"

    def forward(self, input, target):
        return mse_loss(input, target, reduction=self.reduction, prefer=self.prefer)


OP.modules[nn.MSELoss] = MSELoss
