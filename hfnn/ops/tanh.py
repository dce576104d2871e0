"""Hyperbolic tangent.

y = tanh(x),    dy/dx = 1 - y^2

torch keeps y too: what differs is the time.
"""

import torch
from torch import nn

from hfnn.kernel import Op
from hfnn.ops.unary import SHAPES, Kept, keeping_output, kernels, normal, wide


def reference(x):
    """The definition, in the dtype of x."""
    return torch.tanh(x)


OP = Op(
    "tanh",
    reference,
    torch.tanh,
    kernels=kernels(1 << 15),
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
    return dy * (1 - y * y)


TANH = Kept(1, _gradient, fast=(torch.bfloat16, torch.float16))


def tanh(input, *, prefer="auto"):
    """`torch.tanh`; in float32 on the CPU that is torch's own op.

    Shapes: any; the result has the shape and dtype of input. prefer: "auto" | "memory" | "speed" (`hfnn.convert`).
    Raises what torch raises.
    """
    y = None if _passes(input, prefer) else keeping_output(OP, TANH, input, prefer)
    return torch.tanh(input) if y is None else y


class Tanh(nn.Tanh):
    """`torch.nn.Tanh`. `prefer` is set by `hfnn.convert`."""

    prefer = "auto"

    def forward(self, input):
        return tanh(input, prefer=self.prefer)


OP.modules[nn.Tanh] = Tanh
