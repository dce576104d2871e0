"""Softmax over the last dimension; log_softmax.py is its logarithm, by the same kernels.

    y = exp(x - lse),    lse = log(sum(exp(x)));    dx = y * (dy - sum(dy * y))

Backward only needs y, which torch keeps too. The differences are the time, and that a 16-bit x with a float32 result
(`dtype=torch.float32`, autocast) is not copied to float32 first.

Names end in their shape: R rows (every leading dimension, flattened), C columns.
"""

import torch
from torch import Tensor, nn

from hfnn.core.context import is_plain
from hfnn.core.kernel import FLOATS, Kernel, Op
from hfnn.core.node import Function


def reference(x, dim=None, _stacklevel=3, dtype=None):
    """The definition, in the dtype of x or in `dtype`."""
    x = x if dtype is None else x.to(dtype)
    return torch.exp(x - x.logsumexp(dim, keepdim=True))


def sample(case, dtype, device, generator=None):
    """Arguments of `softmax` for x of shape `case`."""
    return (torch.randn(case, generator=generator).to(dtype).to(device), -1), {}


KERNELS = (
    Kernel("cuda", "hfnn._C:cuda.softmax", "cuda", min_elements=1 << 24),
    Kernel("triton", "hfnn.kernels.softmax", "cuda", max_cols=1 << 20, min_elements=1 << 24),
    Kernel("cpp", "hfnn._C:cpu.softmax", "cpu", (*FLOATS, torch.float64), min_elements=1 << 15),
)
CASES = ((30, 257), (10, 769), (5, 3, 64), (257, 1024), (0, 8), (8, 8192), (1, 1))
OP = Op(
    "softmax",
    reference,
    nn.functional.softmax,
    kernels=KERNELS,
    sample=sample,
    cases=CASES,
    probe=(-1,),
    small=(3, 5),
    bench=((32768, 8192), (131072, 1024), (8192, 32768)),
    saves=False,
    recipe=False,
    sums=True,
)


def _compute(x, out_dtype, log, kernel):
    y = torch.empty(x.shape, dtype=out_dtype, device=x.device)
    cols = x.shape[-1]
    kernel.forward(x.contiguous().view(-1, cols), y.view(-1, cols), log, kernel.queue(x))
    return y


class _Softmax(Function):
    @staticmethod
    def forward(ctx, x, out_dtype, log, kernel):
        ctx.set_materialize_grads(False)
        y = _compute(x, out_dtype, log, kernel)
        ctx.save_for_backward(y)
        ctx.dtype, ctx.log, ctx.kernel = x.dtype, log, kernel
        return y

    @staticmethod
    def backward(ctx, dy):
        (y,) = ctx.saved_tensors
        if torch.is_grad_enabled():
            return _differentiable(dy, y, ctx.log).to(ctx.dtype), None, None, None
        dx = torch.empty(y.shape, dtype=ctx.dtype, device=y.device)
        dy_RC, y_RC, dx_RC = (t.contiguous().view(-1, y.shape[-1]) for t in (dy, y, dx))
        ctx.kernel.backward(dy_RC, y_RC, dx_RC, ctx.log, ctx.kernel.queue(y))
        return dx, None, None, None


def _differentiable(dy, y, log):
    """dx as a formula of dy and the saved output, whose graph leads to x."""
    wide = torch.promote_types(y.dtype, torch.float32)
    dy, y = dy.to(wide), y.to(wide)
    if log:
        return dy - y.exp() * dy.sum(-1, keepdim=True)
    return y * (dy - (dy * y).sum(-1, keepdim=True))


def along_last(op, input, dim, dtype, log, prefer):
    """softmax or log_softmax by a kernel, or None if torch's own op must run, or raise."""
    if op.passes(input, prefer) or type(dim) is not int or not is_plain(input):
        return None
    if input.dim() == 0 or dim not in (-1, input.dim() - 1):
        return None
    out = op.out_dtype(input) if dtype is None else dtype
    if out is not input.dtype and (out is not torch.float32 or input.dtype is torch.float64):
        return None
    kernel = op.select(input, row=input.shape[-1:], out=out, prefer=prefer)
    if kernel is None or input.shape[-1] == 0:
        return None
    return (_Softmax.apply if torch.is_grad_enabled() else _compute)(input, out, log, kernel)


def softmax(
    input: Tensor,
    dim: int | None = None,
    _stacklevel: int = 3,
    dtype: torch.dtype | None = None,
    *,
    prefer: str = "auto",
) -> Tensor:
    """`torch.nn.functional.softmax`. Sums are float32. Raises what torch raises.

    Args:
        input: (*, C). The result has its shape.
        dim: Where exponentials are summed. Kernels work along the last dimension, torch's own op along others.
        _stacklevel: As in torch.
        dtype: Of the result; None: as torch chooses it.
        prefer: "auto", "memory" or "speed", as in `hfnn.convert`.

    >>> hfnn.functional.softmax(torch.tensor([0.0, 0.0]), dim=-1)
    tensor([0.5000, 0.5000])
    """
    y = along_last(OP, input, dim, dtype, False, prefer)
    return nn.functional.softmax(input, dim, _stacklevel, dtype) if y is None else y


class Softmax(nn.Softmax):
    """`torch.nn.Softmax`: the same arguments and defaults. `prefer` is set by `hfnn.convert`.

    Args:
        dim: Where exponentials are summed.
    """

    prefer = "auto"

    def forward(self, input: Tensor) -> Tensor:
        return softmax(input, self.dim, _stacklevel=5, prefer=self.prefer)


OP.modules[nn.Softmax] = Softmax
