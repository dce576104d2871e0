"""Square root.

y = sqrt(x),    dy/dx = 1 / (2 y)

torch keeps y too: what differs is the time.
"""

import torch

from hfnn.kernel import Op
from hfnn.ops.unary import SHAPES, Kept, keeping_output, kernels, wide


def reference(x):
    """The definition, in the dtype of x."""
    return torch.sqrt(x)


def sample(case, dtype, device, generator=None):
    """x of shape `case`, above 1/16: at 0 the derivative is infinite."""
    return (torch.randn(case, generator=generator).mul(2).abs().add(1 / 16).to(dtype).to(device),), {}


OP = Op(
    "sqrt",
    reference,
    torch.sqrt,
    kernels=kernels(1 << 19),
    sample=sample,
    cases=SHAPES,
    small=(3, 5),
    bench=((16384, 8192),),
    saves=False,
    recipe=False,
)
_passes = OP.passes


def _gradient(dy, y):
    dy, y = wide(dy, y)
    return dy / (2 * y)


SQRT = Kept(7, _gradient, fast=(torch.float32, torch.bfloat16, torch.float16, torch.float64))


def sqrt(input, *, prefer="auto"):
    """`torch.sqrt`.

    Shapes: any; the result has the shape and dtype of input. prefer: "auto" | "memory" | "speed" (`hfnn.convert`).
    Raises what torch raises.
    """
    y = None if _passes(input, prefer) else keeping_output(OP, SQRT, input, prefer)
    return torch.sqrt(input) if y is None else y
