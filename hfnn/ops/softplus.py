"""Softplus, a smooth relu.

y = log(1 + exp(beta x)) / beta,  x itself where beta x > threshold;    dy/dx = 1 - exp(-beta y)

Dugas et al., "Incorporating Second-Order Functional Knowledge for Better Option Pricing", NeurIPS 2000.

torch keeps x, this room y. From y alone it cannot be told on which side of the threshold x was when it was near; the
two slopes there differ by exp(-threshold), less than float32 sees for the thresholds that the room takes.
"""

import torch
from torch import nn

from hfnn.kernel import Op
from hfnn.ops.unary import SHAPES, Kept, keeping_output, kernels, normal, wide

_softplus = torch._C._nn.softplus
LOWEST_THRESHOLD = 18


def reference(x, beta=1.0, threshold=20.0):
    """The definition, in the dtype of x."""
    z = x * beta
    return torch.where(z > threshold, x, (z.clamp(min=0) + torch.log1p(torch.exp(-z.abs()))) / beta)


def sample(case, dtype, device, generator=None):
    """Arguments of `softplus` for x of shape `case[:-1]`; the last entry of a case is beta."""
    *shape, beta = case
    (x,), _ = normal(shape, dtype, device, generator)
    return (x,), {"beta": beta}


OP = Op(
    "softplus",
    reference,
    _softplus,
    kernels=kernels(1 << 17),
    sample=sample,
    cases=tuple((*shape, beta) for shape in SHAPES for beta in (1.0, 2.5)),
    small=(3, 5, 2.5),
    bench=((16384, 8192, 1.0),),
    recipe=False,
)
_passes = OP.passes


def _gradient(dy, y, beta, threshold, _):
    dy, y = wide(dy, y)
    z = beta * y
    return torch.where(z > threshold, dy, dy * -torch.expm1(-z))


SOFTPLUS = Kept(2, _gradient)


def softplus(input, beta=1, threshold=20, *, prefer="auto"):
    """`torch.nn.functional.softplus`, keeping its output, which the next layer keeps too, instead of its input.

    Shapes: any; the result has the shape and dtype torch gives it. With beta <= 0 or a threshold below 18 torch's own
    op runs. prefer: "auto" | "memory" | "speed" (`hfnn.convert`). Raises what torch raises.
    """
    if _passes(input, prefer) or not (beta > 0 and threshold >= LOWEST_THRESHOLD):
        # Numbers cost torch a fifth of a microsecond.
        return _softplus(input) if beta == 1 and threshold == 20 else _softplus(input, beta, threshold)
    y = keeping_output(OP, SOFTPLUS, input, prefer, beta, threshold)
    return _softplus(input, beta, threshold) if y is None else y


class Softplus(nn.Softplus):
    """`torch.nn.Softplus`: the same arguments and defaults. `prefer` is set by `hfnn.convert`."""

    prefer = "auto"

    def forward(self, input):
        return softplus(input, self.beta, self.threshold, prefer=self.prefer)


OP.modules[nn.Softplus] = Softplus
