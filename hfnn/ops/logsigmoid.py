"""Logarithm of the logistic sigmoid.

y = -log(1 + exp(-x)) = min(x, 0) - log(1 + exp(-|x|)),    dy/dx = 1 - exp(y)

torch keeps x, and on the CPU a buffer of its size.
"""

import torch
from torch import nn

from hfnn.kernel import Op
from hfnn.ops.unary import SHAPES, Rebuilt, keeping_input, kernels, normal

_logsigmoid = torch._C._nn.log_sigmoid


def reference(x):
    """The definition, in the dtype of x."""
    return x.clamp(max=0) - torch.log1p(torch.exp(-x.abs()))


OP = Op(
    "logsigmoid",
    reference,
    _logsigmoid,
    kernels=kernels(1 << 17),
    sample=normal,
    cases=SHAPES,
    small=(3, 5),
    bench=((16384, 8192),),
)
_passes = OP.passes


LOGSIGMOID = Rebuilt(3, _logsigmoid, through_y=True)


def logsigmoid(input, *, prefer="auto"):
    """`torch.nn.functional.logsigmoid`, keeping its input and letting its consumer rebuild the output.

    Shapes: any; the result has the shape and dtype of input. prefer: "auto" | "memory" | "speed" (`hfnn.convert`).
    Raises what torch raises.
    """
    if _passes(input, prefer):
        return _logsigmoid(input)
    # On the CPU torch's result is contiguous, whatever the input.
    y = keeping_input(OP, LOGSIGMOID, input.contiguous() if input.is_cpu else input, prefer)
    return _logsigmoid(input) if y is None else y


class LogSigmoid(nn.LogSigmoid):
    """`torch.nn.LogSigmoid`. `prefer` is set by `hfnn.convert`."""

    prefer = "auto"

    def forward(self, input):
        return logsigmoid(input, prefer=self.prefer)


OP.modules[nn.LogSigmoid] = LogSigmoid
