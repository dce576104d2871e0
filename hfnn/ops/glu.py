"""Gated linear unit: the first half of a tensor, times the sigmoid of the second.

    y = a * sigmoid(b),   (a, b) = the halves of x along its last dimension

Dauphin et al., "Language Modeling with Gated Convolutional Networks", 2017. https://arxiv.org/abs/1612.08083
"""

import torch
from torch import nn

from hfnn.kernel import Op
from hfnn.ops import gated
from hfnn.ops.gated import product

_glu = torch._C._nn.glu


def reference(x, dim=-1):
    """The definition, in the dtype of x."""
    a, b = x.chunk(2, dim)
    return a * torch.sigmoid(b)


def sample(case, dtype, device, generator=None):
    """Arguments of `glu` for a result of shape `case`."""
    *rows, cols = case
    return (torch.randn((*rows, 2 * cols), generator=generator).mul(2).to(dtype).to(device),), {}


# Its output does have a recipe. The contract's consumers take outputs as wide as the input, which this is not: the
# recipe has its tests in tests/ops/test_gated.py.
OP = Op(
    "glu",
    reference,
    _glu,
    kernels=gated.kernels(1 << 17),
    sample=sample,
    cases=gated.SHAPES,
    traffic=(1.5, 2.5),
    probe=lambda x: (0,),  # the empty input has one column, and no rows to halve
    small=(3, 5),
    bench=((16384, 8192),),
    recipe=False,
    like_input=False,
)
_passes = OP.passes


def glu(input, dim=-1, *, prefer="auto"):
    """`torch.nn.functional.glu`, letting its consumer rebuild the output.

    Shapes: input (..., 2F), result (..., F) along the last dimension; along another one torch's own op runs. prefer:
    "auto" | "memory" | "speed" (`hfnn.convert`). Raises what torch raises.
    """
    if _passes(input, prefer) or dim not in (-1, input.dim() - 1) or input.dim() == 0 or input.shape[-1] % 2:
        return _glu(input, dim)
    y = product(OP, "sigmoid", input, None, False, prefer)
    return _glu(input, dim) if y is None else y


class GLU(nn.GLU):
    """`torch.nn.GLU`: the same arguments and defaults. `prefer` is set by `hfnn.convert`."""

    prefer = "auto"

    def forward(self, input):
        return glu(input, self.dim, prefer=self.prefer)


OP.modules[nn.GLU] = GLU
