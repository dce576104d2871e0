"""The sigmoid approximation of gelu, as in CLIP. torch has no such op.

y = x sigmoid(1.702 x)

Hendrycks and Gimpel, "Gaussian Error Linear Units (GELUs)", 2016. https://arxiv.org/abs/1606.08415
"""

import torch
from torch import nn

from hfnn.kernel import Op
from hfnn.ops import recode, unary
from hfnn.ops.unary import SHAPES, Rebuilt, keeping_input, kernels, normal


def reference(x):
    """The definition, in the dtype of x."""
    return x * torch.sigmoid(1.702 * x)


OP = Op(
    "quick_gelu",
    reference,
    reference,
    kernels=kernels(1 << 15),
    sample=normal,
    cases=SHAPES,
    small=(3, 5),
    bench=((16384, 8192),),
    likes={"": {}},
)
_passes = OP.passes
QUICK_GELU = Rebuilt(10, reference)


def quick_gelu(input, *, prefer="auto", keep="input"):
    """x sigmoid(1.702 x) in one op, keeping its input and letting its consumer rebuild the output.

    Shapes: any; the result has the shape and dtype of input. keep: as in `hfnn.functional.gelu`. prefer: "auto" |
    "memory" | "speed" (`hfnn.convert`). Raises ValueError for an unknown `keep`. Without a kernel, by torch's ops.
    """
    if keep != "input":
        recode.check(keep)
    y = None if _passes(input, prefer) else keeping_input(OP, QUICK_GELU, input, prefer, keep)
    return reference(input) if y is None else y


def fused(x, out, prefer):
    """For modules that compute this op in their own words: `hfnn.ops.unary.fused`."""
    return unary.fused(OP, QUICK_GELU, x, out, prefer)


class QuickGELU(nn.Module):
    """`quick_gelu` as a module."""

    prefer, keep = "auto", "input"

    def forward(self, input):
        return quick_gelu(input, prefer=self.prefer, keep=self.keep)
