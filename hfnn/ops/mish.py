"""Mish.

y = x tanh(log(1 + exp(x)))

Misra, "Mish: A Self Regularized Non-Monotonic Activation Function", 2019. https://arxiv.org/abs/1908.08681
"""

import torch
from torch import nn

from hfnn.kernel import Op
from hfnn.ops import recode, unary
from hfnn.ops.unary import SHAPES, Rebuilt, keeping_input, kernels, normal

_mish = torch._C._nn.mish


def reference(x):
    """The definition, in the dtype of x."""
    return x * torch.tanh(x.clamp(min=0) + torch.log1p(torch.exp(-x.abs())))


OP = Op(
    "mish",
    reference,
    _mish,
    kernels=kernels(1 << 13),
    sample=normal,
    cases=SHAPES,
    small=(3, 5),
    bench=((16384, 8192),),
    likes={"": {}},
)
_passes = OP.passes
MISH = Rebuilt(8, _mish)


def mish(input, inplace=False, *, prefer="auto", keep="input"):
    """`torch.nn.functional.mish`, keeping its input and letting its consumer rebuild the output.

    Shapes: any; the result has the shape and dtype of input. With inplace=True torch's own op runs. keep: as in
    `hfnn.functional.gelu`. prefer: "auto" | "memory" | "speed" (`hfnn.convert`). Raises what torch raises, and
    ValueError for an unknown `keep`.
    """
    if keep != "input":
        recode.check(keep)
    if inplace:
        return torch._C._nn.mish_(input)
    y = None if _passes(input, prefer) else keeping_input(OP, MISH, input, prefer, keep)
    return _mish(input) if y is None else y


def fused(x, out, prefer):
    """For modules that compute this op in their own words: `hfnn.ops.unary.fused`."""
    return unary.fused(OP, MISH, x, out, prefer)


class Mish(nn.Mish):
    """`torch.nn.Mish`: the same arguments and defaults. `prefer` is set by `hfnn.convert`; `keep` as in `mish`."""

    prefer, keep = "auto", "input"

    def forward(self, input):
        return mish(input, self.inplace, prefer=self.prefer, keep=self.keep)


OP.modules[nn.Mish] = Mish
