"""Logistic sigmoid.

y = 1 / (1 + exp(-x)),    dy/dx = y (1 - y)

torch keeps y too: what differs is the time.
"""

import torch
from torch import nn

from hfnn.kernel import Op
from hfnn.ops.unary import SHAPES, Kept, keeping_output, kernels, normal, wide


def reference(x):
    """The definition, in the dtype of x."""
    return 1 / (1 + torch.exp(-x))


OP = Op(
    "sigmoid",
    reference,
    torch.sigmoid,
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
    return dy * (y * (1 - y))


SIGMOID = Kept(0, _gradient)


def sigmoid(input, *, prefer="auto"):
    """`torch.sigmoid`.

    Shapes: any; the result has the shape and dtype of input. prefer: "auto" | "memory" | "speed" (`hfnn.convert`).
    Raises what torch raises.
    """
    y = None if _passes(input, prefer) else keeping_output(OP, SIGMOID, input, prefer)
    return torch.sigmoid(input) if y is None else y


class Sigmoid(nn.Sigmoid):
    """`torch.nn.Sigmoid`. `prefer` is set by `hfnn.convert`."""

    prefer = "auto"

    def forward(self, input):
        return sigmoid(input, prefer=self.prefer)


OP.modules[nn.Sigmoid] = Sigmoid
