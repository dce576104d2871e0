"""The larger of two numbers, element by element.

    y = max(a, b),    da = dy where a > b, dy / 2 where a = b, else 0;    db likewise

Which of the three it was is kept, in two bits an element; torch keeps a and b. Where either is a NaN, y is a NaN and
both gradients are dy, as torch's.
"""

import torch

from hfnn.kernel import Op
from hfnn.ops.compare import MAXIMUM, compare, kernels, pair, select

_maximum = torch.maximum


def reference(a, b):
    """The definition, in the dtype of a."""
    return a.where(a > b, b)


OP = Op(
    "maximum",
    reference,
    _maximum,
    kernels=kernels(1 << 14),
    sample=pair,
    cases=((1,), (3, 769), (64, 1024), (0, 4)),
    traffic=(3.125, 4.25),
    probe=lambda x: (x,),
    small=(3, 5),
    bench=((16384, 8192),),
    recipe=False,
    like_input=False,  # as far as tests with another x go: the others have its shape
)
_passes = OP.passes


def maximum(input, other, *, prefer="auto"):
    """`torch.maximum`, keeping two bits an element instead of both inputs.

    Shapes: input and other of one shape and dtype; what would have to be broadcast or cast is left to torch's own op.
    The result has their shape and dtype. prefer: "auto" | "memory" | "speed" (`hfnn.convert`). Raises what torch
    raises.
    """
    kernel = None if _passes(input, prefer) else select(OP, input, other, prefer)
    return _maximum(input, other) if kernel is None else compare(input, other, MAXIMUM, kernel)
