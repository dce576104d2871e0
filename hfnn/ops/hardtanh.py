"""A line between two bounds.

    y = min(max(x, a), b),   dx = dy where a < x < b, else 0

Collobert, "Large Scale Machine Learning", 2004. torch keeps x. `clamp` is the same map, but for its gradient at the
bounds.
"""

import torch
from torch import nn

from hfnn.kernel import Op
from hfnn.ops import piecewise

_hardtanh = torch._C._nn.hardtanh


def reference(x, min_val=-1.0, max_val=1.0):
    """The definition, in the dtype of x."""
    return torch.where(x > min_val, torch.where(x < max_val, x, max_val), min_val)


def sample(case, dtype, device, generator=None):
    """Arguments of `hardtanh` for x of shape `case[:-2]`; the last entries of a case are the bounds."""
    *shape, low, high = case
    return (piecewise.sampled(shape, dtype, device, generator, (low, high)), low, high), {}


OP = Op(
    "hardtanh",
    reference,
    _hardtanh,
    kernels=piecewise.kernels(1 << 21),
    sample=sample,
    cases=tuple((*shape, *bounds) for shape in piecewise.SHAPES for bounds in ((-1.0, 1.0), (-0.5, 4.0))),
    traffic=(2, 2),
    small=(3, 5, -1.0, 2.5),
    bench=((*piecewise.BENCH, -1.0, 1.0),),
    recipe=False,
)
_passes = OP.passes


def hardtanh(input, min_val=-1.0, max_val=1.0, inplace=False, *, prefer="auto"):
    """`torch.nn.functional.hardtanh`, keeping a bit an element instead of the input.

    Shapes: any; the result has the shape and dtype of input. prefer: "auto" | "memory" | "speed" (`hfnn.convert`). With
    inplace=True torch's own op runs. Raises what torch raises.
    """
    kernel = None if _passes(input, prefer) else OP.select(input, prefer=prefer)
    if inplace or not min_val <= max_val:
        return nn.functional.hardtanh(input, min_val, max_val, inplace)
    if kernel is None:
        return _hardtanh(input, min_val, max_val)
    return piecewise.run(input, piecewise.HARDTANH, kernel, min_val, max_val)


class Hardtanh(nn.Hardtanh):
    """`torch.nn.Hardtanh`: the same arguments and defaults. `prefer` is set by `hfnn.convert`."""

    prefer = "auto"

    def forward(self, input):
        return hardtanh(input, self.min_val, self.max_val, self.inplace, prefer=self.prefer)


OP.modules[nn.Hardtanh] = Hardtanh
