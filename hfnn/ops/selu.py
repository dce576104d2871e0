"""Scaled exponential linear unit: elu with two fixed numbers (elu.py).

y = scale x for x > 0, else scale alpha (exp(x) - 1);    dy/dx = scale for y > 0, else y + scale alpha

Klambauer et al., "Self-Normalizing Neural Networks", NeurIPS 2017. https://arxiv.org/abs/1706.02515
"""

import torch
from torch import nn

from hfnn.kernel import Op
from hfnn.ops.elu import ELU_LIKE, away_from_0
from hfnn.ops.unary import SHAPES, keeping_input, kernels

ALPHA, SCALE = 1.6732632423543772848170429916717, 1.0507009873554804934193349852946


def reference(x):
    """The definition, in the dtype of x."""
    return SCALE * torch.where(x > 0, x, ALPHA * torch.expm1(x.clamp(max=0)))


def sample(case, dtype, device, generator=None):
    """x of shape `case`, away from the kink."""
    return (away_from_0(case, dtype, device, generator),), {}


OP = Op(
    "selu",
    reference,
    torch.selu,
    kernels=kernels(1 << 15),
    sample=sample,
    cases=SHAPES,
    small=(3, 5),
    bench=((16384, 8192),),
)
_passes = OP.passes


def selu(input, inplace=False, *, prefer="auto"):
    """`torch.nn.functional.selu`, keeping its input and letting its consumer rebuild the output.

    Shapes: any; the result has the shape and dtype of input. With inplace=True torch's own op runs. prefer: "auto" |
    "memory" | "speed" (`hfnn.convert`). Raises what torch raises.
    """
    if inplace:
        return torch.selu_(input)
    y = None if _passes(input, prefer) else keeping_input(OP, ELU_LIKE, input, prefer, options=(ALPHA, SCALE, 1.0))
    return torch.selu(input) if y is None else y


class SELU(nn.SELU):
    """`torch.nn.SELU`: the same arguments and defaults. `prefer` is set by `hfnn.convert`."""

    prefer = "auto"

    def forward(self, input):
        return selu(input, self.inplace, prefer=self.prefer)


OP.modules[nn.SELU] = SELU
