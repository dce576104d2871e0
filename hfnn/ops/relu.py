"""Rectified linear unit.

    y = max(x, 0),   dx = dy where x > 0, else 0

Nair and Hinton, "Rectified Linear Units Improve Restricted Boltzmann Machines", ICML 2010. torch keeps y, which is free
where the next op keeps it too, and 2 or 4 bytes an element where it does not; a bit an element is enough.
"""

import torch
from torch import nn

from hfnn.kernel import Op
from hfnn.ops import piecewise

_relu = torch.relu


def reference(x):
    """The definition, in the dtype of x."""
    return torch.where(x > 0, x, 0)


def sample(case, dtype, device, generator=None):
    """Arguments of `relu` for x of shape `case`."""
    return (piecewise.sampled(case, dtype, device, generator, (0,)),), {}


OP = Op(
    "relu",
    reference,
    _relu,
    kernels=piecewise.kernels(1 << 21),
    sample=sample,
    cases=piecewise.SHAPES,
    traffic=(2, 2),
    small=(3, 5),
    bench=(piecewise.BENCH,),
    recipe=False,
)
_passes = OP.passes


def relu(input, inplace=False, *, keep="bits", prefer="auto"):
    """`torch.nn.functional.relu`, keeping a bit an element.

    keep: "bits", or "output" to keep y as torch does. Bits are better where nothing else keeps y: before a pooling, a
    dropout, an addition, a concatenation, a frozen layer. Before a linear layer or a convolution, which keeps its
    input, the output costs nothing more, and bits would. Shapes: any; the result has the shape and dtype of input.
    prefer: "auto" | "memory" | "speed" (`hfnn.convert`). With inplace=True torch's own op runs. Raises what torch
    raises, and ValueError for another `keep`.
    """
    kernel = None if _passes(input, prefer) else OP.select(input, prefer=prefer)
    if kernel is None or inplace or keep != "bits":
        if keep != "bits" and keep != "output":
            raise ValueError(f'keep={keep!r}: choose "bits" or "output"')
        return torch.relu_(input) if inplace else _relu(input)
    return piecewise.run(input, piecewise.RELU, kernel)


class ReLU(nn.ReLU):
    """`torch.nn.ReLU`: the same arguments and defaults. `prefer` is set by `hfnn.convert`, and so is `keep` ("bits" |
    "output") where it knows what keeps the result.
    """

    prefer = "auto"
    keep = "bits"

    def forward(self, input):
        return relu(input, self.inplace, keep=self.keep, prefer=self.prefer)


OP.modules[nn.ReLU] = ReLU
