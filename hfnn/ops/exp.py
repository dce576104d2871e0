"""Exponential.

y = exp(x),    dy/dx = y

torch keeps y too: what differs is the time.
"""

import torch

from hfnn.kernel import Op
from hfnn.ops.unary import SHAPES, Kept, keeping_output, kernels, normal, wide


def reference(x):
    """The definition, in the dtype of x."""
    return torch.exp(x)


OP = Op(
    "exp",
    reference,
    torch.exp,
    kernels=kernels(1 << 22),
    sample=normal,
    cases=SHAPES,
    small=(3, 5),
    bench=((16384, 8192),),
    saves=False,
    recipe=False,
)
_passes = OP.passes


def _gradient(dy, y):
    dy, y = wide(dy, y)
    return dy * y


EXP = Kept(6, _gradient)


def exp(input, *, prefer="auto"):
    """`torch.exp`.

    Shapes: any; the result has the shape and dtype torch gives it. prefer: "auto" | "memory" | "speed"
    (`hfnn.convert`). Raises what torch raises.
    """
    y = None if _passes(input, prefer) else keeping_output(OP, EXP, input, prefer)
    return torch.exp(input) if y is None else y
