"""Absolute value.

    y = |x|,    dx = dy * sign(x)

The sign is kept, in two bits an element; torch keeps x. sign(0) and sign(NaN) are 0, as torch's.
"""

import torch

from hfnn.kernel import Op
from hfnn.ops.compare import ABS, compare, kernels
from hfnn.ops.layout import in_rows

_abs = torch.abs


def reference(x):
    """The definition, in the dtype of x."""
    return x.where(x > 0, -x)


def sample(case, dtype, device, generator=None):
    """Arguments of `abs` for x of shape `case`; none is nearer to the kink than a tenth."""
    x = torch.randn(case, generator=generator)
    return ((x + x.sign() / 10).to(dtype).to(device),), {}


OP = Op(
    "abs",
    reference,
    _abs,
    kernels=kernels(1 << 20),
    sample=sample,
    cases=((1,), (3, 769), (64, 1024), (0, 4)),
    traffic=(2.125, 2.125),
    small=(3, 5),
    bench=((16384, 8192),),
    recipe=False,
)
_passes = OP.passes


def abs(input, *, prefer="auto"):
    """`torch.abs`, keeping two bits an element instead of its input.

    Shapes: any; the result has the shape and dtype of input. Integers and complex numbers are left to torch's own op.
    prefer: "auto" | "memory" | "speed" (`hfnn.convert`). Raises what torch raises.
    """
    kernel = None if _passes(input, prefer) else OP.select(input, prefer=prefer)
    # Where torch's result has other strides, its own op runs.
    return _abs(input) if kernel is None or not in_rows(input) else compare(input, None, ABS, kernel)
