"""Softsign.

y = x / (1 + |x|),    dy/dx = 1 / (1 + |x|)^2 = (1 - |y|)^2

torch computes it by three ops and keeps x and 1 + |x|. Where |y| nears 1 the derivative, which is told from y, is as
exact as y is: to an ulp of 1, not of itself. From a power of two on at which the dtype rounds 1 + |x| to |x|, it is 0.
"""

from torch import nn

from hfnn.kernel import Op
from hfnn.ops.unary import SHAPES, Rebuilt, keeping_input, kernels, normal

_softsign = nn.functional.softsign


def reference(x):
    """The definition, in the dtype of x."""
    return x / (1 + x.abs())


OP = Op(
    "softsign",
    reference,
    _softsign,
    kernels=kernels(1 << 13),
    sample=normal,
    cases=SHAPES,
    small=(3, 5),
    bench=((16384, 8192),),
)
_passes = OP.passes


SOFTSIGN = Rebuilt(5, _softsign, through_y=True)


def softsign(input, *, prefer="auto"):
    """`torch.nn.functional.softsign`, in one op, keeping its input and letting its consumer rebuild the output.

    Shapes: any; the result has the shape and dtype of input. prefer: "auto" | "memory" | "speed" (`hfnn.convert`).
    Raises what torch raises.
    """
    if _passes(input, prefer):
        return input / (input.abs() + 1)  # what torch's function does, without the call
    y = keeping_input(OP, SOFTSIGN, input, prefer)
    return _softsign(input) if y is None else y


class Softsign(nn.Softsign):
    """`torch.nn.Softsign`. `prefer` is set by `hfnn.convert`."""

    prefer = "auto"

    def forward(self, input):
        return softsign(input, prefer=self.prefer)


OP.modules[nn.Softsign] = Softsign
