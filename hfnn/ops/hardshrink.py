"""Hard shrinkage: what is small becomes 0.

    y = 0 where -l <= x <= l, else x;   dx = 0 there, else dy

Donoho and Johnstone, "Ideal spatial adaptation by wavelet shrinkage", Biometrika 1994. torch keeps x.
"""

import torch
from torch import nn

from hfnn.kernel import Op
from hfnn.ops import piecewise

_hardshrink = torch.hardshrink


def reference(x, lambd=0.5):
    """The definition, in the dtype of x."""
    return torch.where(x.abs() <= lambd, 0, x)


def sample(case, dtype, device, generator=None):
    """Arguments of `hardshrink` for x of shape `case[:-1]`; the last entry of a case is lambd."""
    *shape, lambd = case
    return (piecewise.sampled(shape, dtype, device, generator, (-lambd, lambd)), lambd), {}


OP = Op(
    "hardshrink",
    reference,
    _hardshrink,
    kernels=piecewise.kernels(1 << 21),
    sample=sample,
    cases=tuple((*shape, 0.5) for shape in piecewise.SHAPES),
    traffic=(2, 2),
    small=(3, 5, 0.5),
    bench=((*piecewise.BENCH, 0.5),),
    recipe=False,
)
_passes = OP.passes


def hardshrink(input, lambd=0.5, *, prefer="auto"):
    """`torch.nn.functional.hardshrink`, keeping a bit an element instead of the input.

    Shapes: any; the result has the shape and dtype of input. prefer: "auto" | "memory" | "speed" (`hfnn.convert`).
    Raises what torch raises.
    """
    kernel = None if _passes(input, prefer) else OP.select(input, prefer=prefer)
    if kernel is None:
        return _hardshrink(input, lambd)
    return piecewise.run(input, piecewise.HARDSHRINK, kernel, piecewise.rounded(lambd, input.dtype))


class Hardshrink(nn.Hardshrink):
    """`torch.nn.Hardshrink`: the same arguments and defaults. `prefer` is set by `hfnn.convert`."""

    prefer = "auto"

    def forward(self, input):
        return hardshrink(input, self.lambd, prefer=self.prefer)


OP.modules[nn.Hardshrink] = Hardshrink
