"""Squared error near the target, absolute error far from it.

    loss = mean or sum of d^2 / 2 where |d| < delta, else delta (|d| - delta / 2),    d = x - target
    g = d where |d| < delta, else delta sign(d);    dg/dx = [|d| < delta] = [|g| < delta]

Huber, "Robust Estimation of a Location Parameter", Annals of Mathematical Statistics 1964.
"""

import torch
from torch import nn

from hfnn.kernel import Op
from hfnn.ops.layer_norm import statistics_dtype
from hfnn.ops.pointwise_loss import CASES, Loss, kernels, pair, pointwise_loss, reduced


def reference(x, target, reduction="mean", delta=1.0):
    """The definition, in the dtype of x."""
    d = (x - target).abs()
    return reduced((d * d / 2).where(d < delta, delta * (d - delta / 2)), reduction)


def _curvature(g, target, delta):
    # In the straight part g is delta as kernels round it: to float32 (but for float64), then to the dtype of g.
    delta = torch.tensor(delta, dtype=statistics_dtype(g)).to(g.dtype).item()
    return (g.abs() < delta).to(g.dtype)


OP = Op(
    "huber_loss",
    reference,
    nn.functional.huber_loss,
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
HUBER = Loss(1, _curvature)


def huber_loss(input, target, reduction="mean", delta=1.0, weight=None, *, prefer="auto"):
    """`torch.nn.functional.huber_loss`, keeping one tensor instead of input and target.

    Shapes: input and target of one shape and dtype; others, weights and reduction="none" are left to torch's own op.
    The result is a scalar of the dtype torch returns. prefer: "auto" | "memory" | "speed" (`hfnn.convert`). Raises what
    torch raises. Sums are float32.
    """
    refused = weight if delta > 0 else delta  # torch's own op says what is wrong with a delta
    loss = pointwise_loss(OP, HUBER, input, target, float(delta), reduction, prefer, refused)
    if loss is None:
        return nn.functional.huber_loss(input, target, reduction, delta, weight)
    return loss


class HuberLoss(nn.HuberLoss):
    """`torch.nn.HuberLoss`: the same arguments and defaults. `prefer` is set by `hfnn.convert`."""

    prefer = "auto"

    def forward(self, input, target):
        return huber_loss(input, target, reduction=self.reduction, delta=self.delta, prefer=self.prefer)


OP.modules[nn.HuberLoss] = HuberLoss
