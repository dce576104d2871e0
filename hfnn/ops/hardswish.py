"""Hardswish, a piecewise quadratic silu.

y = x min(max(x + 3, 0), 6) / 6;    dy/dx = 0 up to -3, 1 from 3 on, else (2 x + 3) / 6

Howard et al., "Searching for MobileNetV3", 2019. https://arxiv.org/abs/1905.02244
"""

import torch
from torch import nn

from hfnn.kernel import Op
from hfnn.ops import recode, unary
from hfnn.ops.unary import SHAPES, Rebuilt, keeping_input, kernels

_hardswish = torch._C._nn.hardswish


def reference(x):
    """The definition, in the dtype of x, with torch's slopes at -3 and 3."""
    return torch.where(x >= 3, x, torch.where(x <= -3, 0, x * (x + 3) / 6))


def sample(case, dtype, device, generator=None):
    """x of shape `case`, not within 1e-2 of -3 and 3, where the slope jumps."""
    x = torch.randn(case, generator=generator).mul(2)
    near = (x.abs() - 3).abs() < 1e-2
    return (torch.where(near, x * 1.02, x).to(dtype).to(device),), {}


OP = Op(
    "hardswish",
    reference,
    _hardswish,
    kernels=kernels(1 << 22),
    sample=sample,
    cases=SHAPES,
    small=(3, 5),
    bench=((16384, 8192),),
    likes={"": {}},
)
_passes = OP.passes
HARDSWISH = Rebuilt(9, _hardswish)


def hardswish(input, inplace=False, *, prefer="auto", keep="input"):
    """`torch.nn.functional.hardswish`, keeping its input and letting its consumer rebuild the output.

    Shapes: any; the result has the shape and dtype of input. With inplace=True torch's own op runs. keep: as in
    `hfnn.functional.gelu`. prefer: "auto" | "memory" | "speed" (`hfnn.convert`). Raises what torch raises, and
    ValueError for an unknown `keep`.
    """
    if keep != "input":
        recode.check(keep)
    if inplace:
        return torch._C._nn.hardswish_(input)
    y = None if _passes(input, prefer) else keeping_input(OP, HARDSWISH, input, prefer, keep)
    return _hardswish(input) if y is None else y


def fused(x, out, prefer):
    """For modules that compute this op in their own words: `hfnn.ops.unary.fused`."""
    return unary.fused(OP, HARDSWISH, x, out, prefer)


class Hardswish(nn.Hardswish):
    """`torch.nn.Hardswish`: the same arguments and defaults. `prefer` is set by `hfnn.convert`; `keep` as in
    `hardswish`.
    """

    prefer, keep = "auto", "input"

    def forward(self, input):
        return hardswish(input, self.inplace, prefer=self.prefer, keep=self.keep)


OP.modules[nn.Hardswish] = Hardswish
