"""A line above a threshold, and a constant up to it.

    y = x where x > t, else v;   dx = dy where x > t, else 0

torch keeps x.
"""

import torch
from torch import nn

from hfnn.kernel import Op
from hfnn.ops import piecewise

_threshold = torch.threshold


def reference(x, threshold, value):
    """The definition, in the dtype of x."""
    return torch.where(x > threshold, x, value)


def sample(case, dtype, device, generator=None):
    """Arguments of `threshold` for x of shape `case[:-2]`; the last entries of a case are the threshold, the value."""
    *shape, threshold, value = case
    return (piecewise.sampled(shape, dtype, device, generator, (threshold,)), threshold, value), {}


OP = Op(
    "threshold",
    reference,
    _threshold,
    kernels=piecewise.kernels(1 << 21),
    sample=sample,
    cases=tuple((*shape, 0.5, -2.0) for shape in piecewise.SHAPES),
    traffic=(2, 2),
    probe=(0.0, 0.0),
    small=(3, 5, 0.5, -2.0),
    bench=((*piecewise.BENCH, 0.0, 0.0),),
    recipe=False,
)
_passes = OP.passes


def threshold(input, threshold, value, inplace=False, *, prefer="auto"):
    """`torch.nn.functional.threshold`, keeping a bit an element instead of the input.

    Shapes: any; the result has the shape and dtype of input. prefer: "auto" | "memory" | "speed" (`hfnn.convert`). With
    inplace=True torch's own op runs. Raises what torch raises.
    """
    kernel = None if _passes(input, prefer) else OP.select(input, prefer=prefer)
    if inplace:
        return nn.functional.threshold(input, threshold, value, True)
    if kernel is None:
        return _threshold(input, threshold, value)
    return piecewise.run(input, piecewise.THRESHOLD, kernel, threshold, value)


class Threshold(nn.Threshold):
    """`torch.nn.Threshold`: the same arguments and defaults. `prefer` is set by `hfnn.convert`."""

    prefer = "auto"

    def forward(self, input):
        return threshold(input, self.threshold, self.value, self.inplace, prefer=self.prefer)


OP.modules[nn.Threshold] = Threshold
