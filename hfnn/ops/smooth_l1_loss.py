"""Absolute error, rounded off near the target.

    loss = mean or sum of d^2 / (2 beta) where |d| < beta, else |d| - beta / 2,    d = x - target
    g = d / beta where |d| < beta, else sign(d);    dg/dx = [|d| < beta] / beta = [|g| < 1] / beta

Girshick, "Fast R-CNN", 2015. https://arxiv.org/abs/1504.08083
"""

from torch import nn

from hfnn.kernel import Op
from hfnn.ops.l1_loss import absolute_loss
from hfnn.ops.layer_norm import statistics_dtype
from hfnn.ops.pointwise_loss import CASES, Loss, kernels, pair, pointwise_loss, reduced


def reference(x, target, reduction="mean", beta=1.0):
    """The definition, in the dtype of x."""
    d = (x - target).abs()
    return reduced(d if beta == 0 else (d * d / (2 * beta)).where(d < beta, d - beta / 2), reduction)


def _curvature(g, target, beta):
    return (g.abs() < 1).to(statistics_dtype(g)) / beta


OP = Op(
    "smooth_l1_loss",
    reference,
    nn.functional.smooth_l1_loss,
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
SMOOTH_L1 = Loss(2, _curvature)


def smooth_l1_loss(input, target, size_average=None, reduce=None, reduction="mean", beta=1.0, *, prefer="auto"):
    """`torch.nn.functional.smooth_l1_loss`, keeping one tensor instead of input and target; a sign where beta is 0.

    Shapes: input and target of one shape and dtype; others and reduction="none" are left to torch's own op, as are the
    deprecated size_average and reduce. The result is a scalar of the dtype torch returns. prefer: "auto" | "memory" |
    "speed" (`hfnn.convert`). Raises what torch raises. Sums are float32.
    """
    if beta == 0:
        loss = absolute_loss(OP, input, target, reduction, prefer, size_average, reduce)
    else:
        refused = None if beta > 0 else beta  # torch's own op says what is wrong with it
        how = (float(beta), reduction, prefer, size_average, reduce, refused)
        loss = pointwise_loss(OP, SMOOTH_L1, input, target, *how)
    if loss is None:
        return nn.functional.smooth_l1_loss(input, target, size_average, reduce, reduction, beta)
    return loss


class SmoothL1Loss(nn.SmoothL1Loss):
    """`torch.nn.SmoothL1Loss`: the same arguments and defaults. `prefer` is set by `hfnn.convert`."""

    prefer = "auto"

    def forward(self, input, target):
        return smooth_l1_loss(input, target, reduction=self.reduction, beta=self.beta, prefer=self.prefer)


OP.modules[nn.SmoothL1Loss] = SmoothL1Loss
