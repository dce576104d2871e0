"""Exponential linear unit; selu.py and celu.py are the same function with other numbers.

y = scale x for x > 0, else scale alpha (exp(input_scale x) - 1)

Clevert, Unterthiner and Hochreiter, "Fast and Accurate Deep Network Learning by Exponential Linear Units (ELUs)", 2015.
https://arxiv.org/abs/1511.07289
"""

import torch
from torch import nn

from hfnn.kernel import Op
from hfnn.ops.unary import SHAPES, Rebuilt, keeping_input, kernels

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
)
_passes = OP.passes


def _gradient(dy, x, alpha, scale, input_scale):
    return torch.ops.aten.elu_backward(dy, alpha, scale, input_scale, False, x)


ELU_LIKE = Rebuilt(4, _elu, _gradient)


def elu(input, alpha=1.0, inplace=False, *, prefer="auto"):
    """`torch.nn.functional.elu`, keeping its input and letting its consumer rebuild the output.

    Shapes: any; the result has the shape and dtype of input. With inplace=True torch's own op runs. prefer: "auto" |
    "memory" | "speed" (`hfnn.convert`). Raises what torch raises.
    """
    if inplace:
        return torch._C._nn.elu_(input, alpha)
    options = float(alpha), 1.0, 1.0
    y = None if _passes(input, prefer) else keeping_input(OP, ELU_LIKE, input, prefer, options=options)
    return _elu(input, alpha) if y is None else y


class ELU(nn.ELU):
    """`torch.nn.ELU`: the same arguments and defaults. `prefer` is set by `hfnn.convert`."""

    prefer = "auto"

    def forward(self, input):
        return elu(input, self.alpha, self.inplace, prefer=self.prefer)


OP.modules[nn.ELU] = ELU
