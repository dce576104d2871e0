"""Softplus, a smooth relu.

y = log(1 + exp(beta x)) / beta,  x itself where beta x > threshold;    dy/dx = sigmoid(beta x)

Dugas et al., "Incorporating Second-Order Functional Knowledge for Better Option Pricing", NeurIPS 2000.
"""

import torch
from torch import nn

from hfnn.kernel import Op
from hfnn.ops.unary import SHAPES, Rebuilt, keeping_input, kernels, normal

_softplus = torch._C._nn.softplus


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
)
_passes = OP.passes


def _gradient(dy, x, beta, threshold):
    return torch.ops.aten.softplus_backward(dy, x, beta, threshold)


SOFTPLUS = Rebuilt(2, _softplus, _gradient)


def softplus(input, beta=1, threshold=20, *, prefer="auto"):
    """`torch.nn.functional.softplus`, keeping its input and letting its consumer rebuild the output.

    Shapes: any; the result has the shape and dtype torch gives it. With beta <= 0 torch's own op runs. prefer: "auto" |
    "memory" | "speed" (`hfnn.convert`). Raises what torch raises.
    """
    if _passes(input, prefer) or not beta > 0:
        # Numbers cost torch a fifth of a microsecond.
        return _softplus(input) if beta == 1 and threshold == 20 else _softplus(input, beta, threshold)
    y = keeping_input(OP, SOFTPLUS, input, prefer, options=(float(beta), float(threshold)))
    return _softplus(input, beta, threshold) if y is None else y


class Softplus(nn.Softplus):
    """`torch.nn.Softplus`: the same arguments and defaults. `prefer` is set by `hfnn.convert`."""

    prefer = "auto"

    def forward(self, input):
        return softplus(input, self.beta, self.threshold, prefer=self.prefer)


OP.modules[nn.Softplus] = Softplus
