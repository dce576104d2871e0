"""The logarithm of the softmax over the last dimension, by the kernels of softmax.py.

y = x - lse,    lse = log(sum(exp(x)));    dx = dy - exp(y) * sum(dy)
"""

import torch
from torch import Tensor, nn

from hfnn.core.kernel import Op
from hfnn.ops import softmax


def reference(x, dim=None, _stacklevel=3, dtype=None):
    """The definition, in the dtype of x or in `dtype`."""
    x = x if dtype is None else x.to(dtype)
    return x - x.logsumexp(dim, keepdim=True)


OP = Op(
    "log_softmax",
    reference,
    nn.functional.log_softmax,
    kernels=softmax.KERNELS,
    sample=softmax.sample,
    cases=softmax.CASES,
    probe=(-1,),
    small=(3, 5),
    bench=((32768, 8192),),
    saves=False,
    recipe=False,
    sums=True,
)


def log_softmax(
    input: Tensor,
    dim: int | None = None,
    _stacklevel: int = 3,
    dtype: torch.dtype | None = None,
    *,
    prefer: str = "auto",
) -> Tensor:
    """`torch.nn.functional.log_softmax`. Sums are float32. Raises what torch raises.

    Args:
        input: (*, C). The result has its shape.
        dim: Where exponentials are summed. Kernels work along the last dimension, torch's own op along others.
        _stacklevel: As in torch.
        dtype: Of the result; None: as torch chooses it.
    PREFER
    """
    y = softmax.along_last(OP, input, dim, dtype, True, prefer)
    return nn.functional.log_softmax(input, dim, _stacklevel, dtype) if y is None else y


class LogSoftmax(nn.LogSoftmax):
    """`torch.nn.LogSoftmax`: the same arguments and defaults. `prefer` is set by `hfnn.convert`.

    Args:
        dim: Where exponentials are summed.
    """

    prefer = "auto"

    def forward(self, input: Tensor) -> Tensor:
        return log_softmax(input, self.dim, _stacklevel=5, prefer=self.prefer)


OP.modules[nn.LogSoftmax] = LogSoftmax
