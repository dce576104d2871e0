"""Softsign.

y = x / (1 + |x|),    dy/dx = 1 / (1 + |x|)^2 = (1 - |y|)^2

torch computes it by three ops and keeps x and 1 + |x|; this room keeps y. Where |y| nears 1 the derivative is as exact
as y is: to an ulp of 1, not of itself. For |x| from a power of two on that the dtype rounds 1 + |x| to |x| at, it is 0.
"""

from torch import nn

from hfnn.kernel import Op
from hfnn.ops.unary import SHAPES, Kept, keeping_output, kernels, normal, wide

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
    recipe=False,
)
_passes = OP.passes


def _gradient(dy, y, a, b, c):
    dy, y = wide(dy, y)
    return dy * (1 - y.abs()).square()


SOFTSIGN = Kept(5, _gradient)


def softsign(input, *, prefer="auto"):
    """`torch.nn.functional.softsign`, in one op, keeping its output instead of two tensors of its input's size.

    Shapes: any; the result has the shape and dtype of input. prefer: "auto" | "memory" | "speed" (`hfnn.convert`).
    Raises what torch raises.
    """
    if _passes(input, prefer):
        return input / (input.abs() + 1)  # what torch's function does, without the call
    y = keeping_output(OP, SOFTSIGN, input, prefer)
    return _softsign(input) if y is None else y


class Softsign(nn.Softsign):
    """`torch.nn.Softsign`. `prefer` is set by `hfnn.convert`."""

    prefer = "auto"

    def forward(self, input):
        return softsign(input, prefer=self.prefer)


OP.modules[nn.Softsign] = Softsign
