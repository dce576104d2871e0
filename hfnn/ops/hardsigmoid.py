"""A sigmoid of three straight lines.

    y = min(max(x + 3, 0), 6) / 6,   dx = dy / 6 where -3 < x < 3, else 0

Courbariaux, Bengio and David, "BinaryConnect", NeurIPS 2015; with these numbers in Howard et al., "Searching for
MobileNetV3", ICCV 2019. torch keeps x.

y is a quotient on every device, as in torch's code for the CPU; its CUDA kernels multiply with a sixth, and are an ulp
off in places.
"""

import torch
from torch import nn

from hfnn.kernel import Op
from hfnn.ops import piecewise

_hardsigmoid = torch._C._nn.hardsigmoid


def reference(x):
    """The definition, in the dtype of x."""
    return torch.where(x > -3, torch.where(x < 3, (x + 3) / 6, 1), 0)


def sample(case, dtype, device, generator=None):
    """Arguments of `hardsigmoid` for x of shape `case`."""
    return (piecewise.sampled(case, dtype, device, generator, (-3, 3)),), {}


OP = Op(
    "hardsigmoid",
    reference,
    _hardsigmoid,
    kernels=piecewise.kernels(1 << 21),
    sample=sample,
    cases=piecewise.SHAPES,
    traffic=(2, 2),
    small=(3, 5),
    bench=(piecewise.BENCH,),
    recipe=False,
)
_passes = OP.passes


def hardsigmoid(input, inplace=False, *, prefer="auto"):
    """`torch.nn.functional.hardsigmoid`, keeping a bit an element instead of the input.

    Shapes: any; the result has the shape and dtype of input. prefer: "auto" | "memory" | "speed" (`hfnn.convert`). With
    inplace=True torch's own op runs. Raises what torch raises.
    """
    kernel = None if _passes(input, prefer) else OP.select(input, prefer=prefer)
    if kernel is None or inplace:
        return nn.functional.hardsigmoid(input, True) if inplace else _hardsigmoid(input)
    return piecewise.run(input, piecewise.HARDSIGMOID, kernel, inside=1 / 6)


class Hardsigmoid(nn.Hardsigmoid):
    """`torch.nn.Hardsigmoid`: the same arguments and defaults. `prefer` is set by `hfnn.convert`."""

    prefer = "auto"

    def forward(self, input):
        return hardsigmoid(input, self.inplace, prefer=self.prefer)


OP.modules[nn.Hardsigmoid] = Hardsigmoid
