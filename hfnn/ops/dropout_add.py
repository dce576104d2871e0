"""A residual connection with dropout, which keeps only a seed.

    y = residual + dropout(x),    dx = dropout of dy by the same mask,    dresidual = dy

For one (seed, offset), the mask is bitwise equal to that of hfnn/ops/dropout.py. The sum is rounded once; dropout and
an addition would round twice. Under autocast, a Linear's low-precision result is added to a float32 residual. The sum
is then float32, by torch's promotion rules, and dx has low precision again.
"""

import torch
from torch import Tensor, nn

from hfnn.core import native
from hfnn.core.context import compiling
from hfnn.core.kernel import Kernel, Op, kernels
from hfnn.ops import dropout


def reference(x, residual, p=0.5, training=True, *, mask=None):
    """The definition for a given boolean mask of what is kept, in the dtype of x."""
    return residual + dropout.reference(x, p, training, mask=mask)


def _torch(input, residual, p=0.5, training=True):
    return residual + torch.dropout(input, p, training)


def sample(case, dtype, device, generator=None):
    """Arguments of `dropout_add` for tensors of shape `case[:-1]`; the last entry of a case is p."""
    *shape, p = case
    x, residual = (torch.randn(shape, generator=generator) for _ in range(2))
    # So large that no sum rounds to its residual. So the mask can be recovered from the sum.
    x = x + torch.where(x < 0, -0.5, 0.5)
    return (x.to(dtype).to(device), residual.to(dtype).to(device), p, True), {}


OP = Op(
    "dropout_add",
    reference,
    _torch,
    kernels=kernels(
        "dropout", 1 << 13, Kernel("cuda", "hfnn._C:cuda.dropout", "cuda", out=False, min_elements=1 << 24)
    ),
    sample=sample,
    cases=dropout.OP.cases,
    traffic=(3, 2),
    probe=lambda x: (x, 0.5, True),
    small=(3, 5, 0.5),
    pin=lambda args, y: {"mask": y != args[1]},
    recipe=False,
    bench=((16384, 8192, 0.1),),
)


def dropout_add(
    input: Tensor, residual: Tensor, p: float = 0.5, training: bool = True, *, prefer: str = "auto"
) -> Tensor:
    """`residual + torch.nn.functional.dropout(input, p, training)`, which keeps 16 bytes instead of a mask.

    The result has the dtype that torch gives the sum, and is rounded once. Raises what torch raises.

    Args:
        input: Of any shape.
        residual: Of input's shape; for one that needs broadcasting torch's own ops run.
        p: The probability of a zero, in [0, 1], exact to 2^-32.
        training: Whether there is dropout.
        prefer: "auto", "memory" or "speed", as in `hfnn.convert`.

    >>> hfnn.functional.dropout_add(torch.tensor([1.0]), torch.tensor([2.0]), training=False)
    tensor([3.])
    """
    if not (training and 0 < p < 1):
        if 0 <= p < 1:
            return torch.add(residual, input)
        return residual + nn.functional.dropout(input, p, training)
    y = None if compiling() else _native(input, residual, float(p), prefer)
    if y is NotImplemented:
        y = OP.left(input, residual, out=getattr(residual, "dtype", None), prefer=prefer)
    return residual + torch.dropout(input, p, training) if y is None else y


_native = native.call("dropout_add", OP)
