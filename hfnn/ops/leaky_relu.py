"""Leaky rectified linear unit.

    y = x where x > 0, else a x;   dx = dy where x > 0, else a dy

Maas, Hannun and Ng, "Rectifier Nonlinearities Improve Neural Network Acoustic Models", 2013. torch keeps x.
"""

import torch
from torch import nn

from hfnn.kernel import Op
from hfnn.ops import piecewise

_leaky_relu = torch._C._nn.leaky_relu


def reference(x, negative_slope=0.01):
    """The definition, in the dtype of x."""
    return torch.where(x > 0, x, x * negative_slope)


def sample(case, dtype, device, generator=None):
    """Arguments of `leaky_relu` for x of shape `case[:-1]`; the last entry of a case is the slope."""
    *shape, slope = case
    return (piecewise.sampled(shape, dtype, device, generator, (0,)), slope), {}


OP = Op(
    "leaky_relu",
    reference,
    _leaky_relu,
    kernels=piecewise.kernels(1 << 21),
    sample=sample,
    cases=tuple((*shape, slope) for shape in piecewise.SHAPES for slope in (0.01, -0.3)),
    traffic=(2, 2),
    small=(3, 5, 0.1),
    bench=((*piecewise.BENCH, 0.01),),
    recipe=False,
)
_passes = OP.passes


def leaky_relu(input, negative_slope=0.01, inplace=False, *, prefer="auto"):
    """`torch.nn.functional.leaky_relu`, keeping a bit an element instead of the input.

    Shapes: any; the result has the shape and dtype of input. prefer: "auto" | "memory" | "speed" (`hfnn.convert`). With
    inplace=True torch's own op runs, and for a slope of 0, whose gradient of an infinity is a NaN that relu's is not.
    Raises what torch raises.
    """
    kernel = None if _passes(input, prefer) else OP.select(input, prefer=prefer)
    if inplace:
        return nn.functional.leaky_relu(input, negative_slope, True)
    if kernel is None or negative_slope == 0:
        return _leaky_relu(input, negative_slope)
    return piecewise.run(input, piecewise.LEAKY_RELU, kernel, negative_slope, outside=negative_slope)


class LeakyReLU(nn.LeakyReLU):
    """`torch.nn.LeakyReLU`: the same arguments and defaults. `prefer` is set by `hfnn.convert`."""

    prefer = "auto"

    def forward(self, input):
        return leaky_relu(input, self.negative_slope, self.inplace, prefer=self.prefer)


OP.modules[nn.LeakyReLU] = LeakyReLU
