"""Soft shrinkage: everything moves towards 0, and what is small becomes 0.

    y = x - l where x > l, x + l where x < -l, else 0;   dx = 0 there, else dy

Donoho, "De-noising by soft-thresholding", IEEE Transactions on Information Theory 1995. torch keeps x.

y is computed with l as it is given, and dx compares with l in the dtype of x, on every device as in torch's code for
the CPU. Its CUDA kernels round l to the dtype of x for y too: another y in 16 bits where l is no such number.
"""

import torch
from torch import nn

from hfnn.kernel import Op
from hfnn.ops import piecewise

_softshrink = torch._C._nn.softshrink


def reference(x, lambd=0.5):
    """The definition, in the dtype of x."""
    return torch.where(x > lambd, x - lambd, torch.where(x < -lambd, x + lambd, x * 0))


def sample(case, dtype, device, generator=None):
    """Arguments of `softshrink` for x of shape `case[:-1]`; the last entry of a case is lambd."""
    *shape, lambd = case
    return (piecewise.sampled(shape, dtype, device, generator, (-lambd, lambd)), lambd), {}


OP = Op(
    "softshrink",
    reference,
    _softshrink,
    kernels=piecewise.kernels(1 << 21),
    sample=sample,
    cases=tuple((*shape, 0.5) for shape in piecewise.SHAPES),
    traffic=(2, 2),
    small=(3, 5, 0.5),
    bench=((*piecewise.BENCH, 0.5),),
    recipe=False,
)
_passes = OP.passes


def softshrink(input, lambd=0.5, *, prefer="auto"):
    """`torch.nn.functional.softshrink`, keeping a bit an element instead of the input.

    Shapes: any; the result has the shape and dtype of input. prefer: "auto" | "memory" | "speed" (`hfnn.convert`).
    Raises what torch raises.
    """
    kernel = None if _passes(input, prefer) else OP.select(input, prefer=prefer)
    if kernel is None or not lambd >= 0:
        return _softshrink(input, lambd)
    return piecewise.run(input, piecewise.SOFTSHRINK, kernel, lambd, piecewise.rounded(lambd, input.dtype))


class Softshrink(nn.Softshrink):
    """`torch.nn.Softshrink`: the same arguments and defaults. `prefer` is set by `hfnn.convert`."""

    prefer = "auto"

    def forward(self, input):
        return softshrink(input, self.lambd, prefer=self.prefer)


OP.modules[nn.Softshrink] = Softshrink
