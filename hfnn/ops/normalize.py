"""Vectors of length one, as torch.nn.functional.normalize makes them.

    y = x / max(|x|, eps),    dx = (dy - x (dy x) / (|x| max(|x|, eps))) / max(|x|, eps)

The second term of dx is there only where |x| >= eps. x and its lengths are kept. y is built from them again by the
operation that made it, so it has torch's bits. torch keeps x and, where y is multiplied or consumed, y.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from hfnn.core.context import context
from hfnn.core.kernel import Op
from hfnn.core.node import below, described, double_backward
from hfnn.ops.affine import FLOOR

OP = Op("normalize", F.normalize, F.normalize, (), sample=None)


def _build(how, x, length):
    return x / length.clamp_min(how[2])


def _compute(x, dim, eps):
    length = x.norm(2.0, dim, keepdim=True)
    return _build((None, dim, eps), x, length), length


def _gradients(dy, needs, how, x, length):
    _, dim, eps = how
    limited = length.clamp_min(eps)
    inner = (dy * x).sum(dim, keepdim=True, dtype=torch.promote_types(x.dtype, torch.float32))
    slope = (inner / length / limited).masked_fill_(length < eps, 0)  # none where the limit holds
    return (torch.addcmul(dy, x, slope.to(dy.dtype), value=-1).div_(limited),)


def _second(dy, needs, how, x, length):
    return double_backward(lambda x: F.normalize(x, 2.0, *how[1:]), (x,), needs, dy)


_NODE = described("_Normalize", "xc", _build, _gradients, _second)


def normalize(x: Tensor, p: float = 2.0, dim: int = 1, eps: float = 1e-12, *, prefer: str = "auto") -> Tensor:
    """`torch.nn.functional.normalize`, whose result its consumer can build again.

    Args:
        x: (...).
        p: Of the norm; torch's own op runs unless it is 2.
        dim: Along which the vectors are.
        eps: The least length that is divided by.
    PREFER
    """
    if (
        _NODE is None or p != 2 or type(dim) is not int or not (torch.is_grad_enabled() and x.requires_grad)
        or prefer == "speed" or (prefer == "auto" and x.nbytes < FLOOR) or context(x) is not None
    ):  # fmt: skip
        return F.normalize(x, p, dim, eps)
    y, length = below(_compute, x, dim, eps)
    return _NODE(y, (None, dim, eps), x, length)
