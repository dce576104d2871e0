"""Continuously differentiable exponential linear unit: elu with an alpha that scales x too (elu.py).

y = x for x > 0, else alpha (exp(x / alpha) - 1);    dy/dx = 1 for y > 0, else y / alpha + 1

Barron, "Continuously Differentiable Exponential Linear Units", 2017. https://arxiv.org/abs/1704.07483
"""

import torch
from torch import nn

from hfnn.kernel import Op
from hfnn.ops.elu import ELU_LIKE, away_from_0
from hfnn.ops.unary import SHAPES, keeping_input, kernels


def reference(x, alpha=1.0):
    """The definition, in the dtype of x."""
    return torch.where(x > 0, x, alpha * torch.expm1(x.clamp(max=0) / alpha))


def sample(case, dtype, device, generator=None):
    """Arguments of `celu` for x of shape `case[:-1]`; the last entry of a case is alpha."""
    *shape, alpha = case
    return (away_from_0(shape, dtype, device, generator),), {"alpha": alpha}


OP = Op(
    "celu",
    reference,
    torch.celu,
    kernels=kernels(1 << 15),
    sample=sample,
    cases=tuple((*shape, alpha) for shape in SHAPES for alpha in (1.0, 0.7)),
    small=(3, 5, 0.7),
    bench=((16384, 8192, 1.0),),
)
_passes = OP.passes


def celu(input, alpha=1.0, inplace=False, *, prefer="auto"):
    """`torch.nn.functional.celu`, keeping its input and letting its consumer rebuild the output.

    Shapes: any; the result has the shape and dtype of input. With alpha <= 0 or inplace=True torch's own op runs.
    prefer: "auto" | "memory" | "speed" (`hfnn.convert`). Raises what torch raises.
    """
    if inplace:
        return torch.celu_(input, alpha)
    if _passes(input, prefer) or not alpha > 0:
        return torch.celu(input, alpha)
    y = keeping_input(OP, ELU_LIKE, input, prefer, options=(float(alpha), 1.0, 1 / alpha))
    return torch.celu(input, alpha) if y is None else y


class CELU(nn.CELU):
    """`torch.nn.CELU`: the same arguments and defaults. `prefer` is set by `hfnn.convert`."""

    prefer = "auto"

    def forward(self, input):
        return celu(input, self.alpha, self.inplace, prefer=self.prefer)


OP.modules[nn.CELU] = CELU
