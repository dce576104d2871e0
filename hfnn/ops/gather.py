"""Elements of x by an index along one dimension, keeping the index alone.

    y[i, j] = x[i, index[i, j]],    dx[i, k] = sum of dy[i, j] over the j with index[i, j] = k    (dim 1 of two)

torch keeps x too, for its shape: logits, where the log-probabilities of some classes are gathered. Both directions are
torch's own kernels.
"""

import torch

from hfnn.kernel import Op, is_plain
from hfnn.ops.avg_pool import takes

_gather = torch.gather


def reference(x, dim, index):
    """The definition, in the dtype of x."""
    return _gather(x, dim, index)


def sample(case, dtype, device, generator=None):
    """Arguments of `gather` for x of shape `case`, three of each row."""
    x = torch.randn(case, generator=generator).to(dtype).to(device)
    index = torch.randint(case[-1], (*case[:-1], 3), generator=generator).to(device)
    return (x, -1, index), {}


# No kernels of its own: torch's run.
OP = Op("gather", reference, _gather, kernels=(), sample=sample, cases=((3, 769),), recipe=False, like_input=False)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dim, index):
        ctx.save_for_backward(index)
        ctx.shape, ctx.dim = x.shape, dim
        return _gather(x, dim, index)

    @staticmethod
    def backward(ctx, dy):
        (index,) = ctx.saved_tensors
        zeros = torch.zeros(ctx.shape, dtype=dy.dtype, device=dy.device)
        if torch.is_grad_enabled():
            return zeros.scatter_add(ctx.dim, index, dy), None, None
        return zeros.scatter_add_(ctx.dim, index, dy), None, None


def gather(input, dim, index, *, sparse_grad=False, prefer="auto"):
    """`torch.gather`, keeping the index and not the input.

    Shapes: as torch's. Sparse gradients are left to torch's own op. prefer: "auto" | "memory" | "speed"
    (`hfnn.convert`). Raises what torch raises.
    """
    if sparse_grad or not takes(input, prefer) or not is_plain(index) or type(dim) is not int:
        return _gather(input, dim, index, sparse_grad=sparse_grad)
    return _Gather.apply(input, dim, index)
