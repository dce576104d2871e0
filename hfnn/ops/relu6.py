"""Rectified linear unit with a ceiling: hardtanh between 0 and 6.

    y = min(max(x, 0), 6),   dx = dy where 0 < x < 6, else 0

Krizhevsky, "Convolutional Deep Belief Networks on CIFAR-10", 2010. torch keeps x.
"""

import torch
from torch import nn

from hfnn.kernel import Op
from hfnn.ops import piecewise

_relu6 = torch._C._nn.relu6


def reference(x):
    """The definition, in the dtype of x."""
    return torch.where(x > 0, torch.where(x < 6, x, 6), 0)


def sample(case, dtype, device, generator=None):
    """Arguments of `relu6` for x of shape `case`."""
    return (piecewise.sampled(case, dtype, device, generator, (0, 6)),), {}


OP = Op(
    "relu6",
    reference,
    _relu6,
    kernels=piecewise.kernels(1 << 21),
    sample=sample,
    cases=piecewise.SHAPES,
    traffic=(2, 2),
    small=(3, 5),
    bench=(piecewise.BENCH,),
    recipe=False,
)
_passes = OP.passes


def relu6(input, inplace=False, *, prefer="auto"):
    """`torch.nn.functional.relu6`, keeping a bit an element instead of the input.

    Shapes: any; the result has the shape and dtype of input. prefer: "auto" | "memory" | "speed" (`hfnn.convert`). With
    inplace=True torch's own op runs. Raises what torch raises.
    """
    kernel = None if _passes(input, prefer) else OP.select(input, prefer=prefer)
    if kernel is None or inplace:
        return nn.functional.relu6(input, True) if inplace else _relu6(input)
    return piecewise.run(input, piecewise.HARDTANH, kernel, 0.0, 6.0)


class ReLU6(nn.ReLU6):
    """`torch.nn.ReLU6`: the same arguments and defaults. `prefer` is set by `hfnn.convert`."""

    prefer = "auto"

    def forward(self, input):
        return relu6(input, self.inplace, prefer=self.prefer)


OP.modules[nn.ReLU6] = ReLU6
