"""Cross-entropy between probabilities given as logits and targets between 0 and 1.

    loss = mean or sum of max(x, 0) - x target + log(1 + exp(-|x|))
    g = s - target,    dg/dx = s (1 - s),    s = 1 / (1 + exp(-x)) = g + target

The target is kept beside g, for a second backward alone: it is data, which its owner keeps anyway.
"""

import torch
from torch import nn

from hfnn.kernel import Op
from hfnn.ops.layer_norm import statistics_dtype
from hfnn.ops.pointwise_loss import CASES, Loss, kernels, pair, pointwise_loss, reduced


def reference(x, target, reduction="mean"):
    """The definition, in the dtype of x."""
    return reduced(torch.logaddexp(x, torch.zeros_like(x)) - x * target, reduction)


def sample(case, dtype, device, generator=None):
    """As `pair`, with a target between 0 and 1."""
    args, options = pair(case, dtype, device, generator)
    return args, {**options, "target": options["target"].sigmoid()}


def _curvature(g, target, parameter):
    wide = statistics_dtype(g)
    s = g.to(wide) + target.to(wide)
    return s * (1 - s)


OP = Op(
    "binary_cross_entropy_with_logits",
    reference,
    nn.functional.binary_cross_entropy_with_logits,
    kernels=kernels(1 << 15),
    sample=sample,
    cases=CASES,
    traffic=(3, 2),
    probe=lambda x: (x,),
    small=(3, 5, "mean"),
    bench=((16384, 8192, "mean"),),
    saves=False,
    recipe=False,
    like_input=False,
)
BINARY = Loss(3, _curvature, keeps_target=True)


def binary_cross_entropy_with_logits(
    input, target, weight=None, size_average=None, reduce=None, reduction="mean", pos_weight=None, *, prefer="auto"
):
    """`torch.nn.functional.binary_cross_entropy_with_logits`, with the gradient made in forward.

    Shapes: input and target of one shape and dtype; weights, targets that require grad and reduction="none" are left to
    torch's own op, as are the deprecated size_average and reduce. The result is a scalar of the dtype torch returns.
    prefer: "auto" | "memory" | "speed" (`hfnn.convert`). Raises what torch raises. Sums are float32.
    """
    others = (size_average, reduce, weight, pos_weight)
    loss = pointwise_loss(OP, BINARY, input, target, 0.0, reduction, prefer, *others)
    if loss is None:
        return OP.torch(input, target, weight, size_average, reduce, reduction, pos_weight)
    return loss


class BCEWithLogitsLoss(nn.BCEWithLogitsLoss):
    """`torch.nn.BCEWithLogitsLoss`: the same arguments, defaults and state dict. `prefer` is set by `hfnn.convert`."""

    prefer = "auto"

    def forward(self, input, target):
        return binary_cross_entropy_with_logits(
            input,
            target,
            self.weight,
            pos_weight=self.pos_weight,
            reduction=self.reduction,
            prefer=self.prefer,
        )


OP.modules[nn.BCEWithLogitsLoss] = BCEWithLogitsLoss
