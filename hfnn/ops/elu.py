"""Exponential linear unit; selu.py and celu.py are the same function with other numbers.

y = scale x for x > 0, else scale alpha (exp(input_scale x) - 1)
dy/dx = scale for y > 0, else input_scale (y + scale alpha)

Clevert, Unterthiner and Hochreiter, "Fast and Accurate Deep Network Learning by Exponential Linear Units (ELUs)", 2015.
https://arxiv.org/abs/1511.07289

torch keeps x, this room y. On the left, where y nears its limit, the derivative is then as exact as y is: to an ulp of
the limit, while that of x is exact to an ulp of itself. Where y has reached the limit, the derivative is 0.
"""

import torch
from torch import nn

from hfnn.kernel import Op
from hfnn.ops.unary import SHAPES, Kept, keeping_output, kernels, wide

_elu = torch._C._nn.elu


def reference(x, alpha=1.0):
    """The definition, in the dtype of x."""
    return torch.where(x > 0, x, alpha * torch.expm1(x.clamp(max=0)))


def away_from_0(shape, dtype, device, generator=None):
    """x of a shape, not within 1e-2 of 0, where the slope may jump."""
    x = torch.randn(shape, generator=generator).mul(2)
    return (x + torch.where(x < 0, -1e-2, 1e-2)).to(dtype).to(device)


def sample(case, dtype, device, generator=None):
    """Arguments of `elu` for x of shape `case[:-1]`; the last entry of a case is alpha."""
    *shape, alpha = case
    return (away_from_0(shape, dtype, device, generator),), {"alpha": alpha}


OP = Op(
    "elu",
    reference,
    _elu,
    kernels=kernels(1 << 15),
    sample=sample,
    cases=tuple((*shape, alpha) for shape in SHAPES for alpha in (1.0, 1.3)),
    small=(3, 5, 1.3),
    bench=((16384, 8192, 1.0),),
    recipe=False,
)
_passes = OP.passes


def _gradient(dy, y, alpha, scale, input_scale):
    limit = torch.tensor(-alpha * scale, dtype=y.dtype).item()  # as y has it
    dy, y = wide(dy, y)
    left = torch.where(y <= limit, 0, input_scale * (y + alpha * scale))
    return dy * torch.where(y > 0, scale, left)


ELU_LIKE = Kept(4, _gradient)


def elu(input, alpha=1.0, inplace=False, *, prefer="auto"):
    """`torch.nn.functional.elu`, keeping its output, which the next layer keeps too, instead of its input.

    Shapes: any; the result has the shape and dtype of input. With alpha < 0, of which y does not tell the side, or
    inplace=True torch's own op runs. prefer: "auto" | "memory" | "speed" (`hfnn.convert`). Raises what torch raises.
    """
    if inplace:
        return torch._C._nn.elu_(input, alpha)
    y = None if _passes(input, prefer) or not alpha >= 0 else keeping_output(OP, ELU_LIKE, input, prefer, alpha, 1, 1)
    return _elu(input, alpha) if y is None else y


class ELU(nn.ELU):
    """`torch.nn.ELU`: the same arguments and defaults. `prefer` is set by `hfnn.convert`."""

    prefer = "auto"

    def forward(self, input):
        return elu(input, self.alpha, self.inplace, prefer=self.prefer)


OP.modules[nn.ELU] = ELU
