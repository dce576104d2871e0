"""A tensor times a small factor, plus a small shift: adaLN, scale-shift group norm, a norm's learned factor.

    y = x scale + shift,    dx = dy scale,    dscale = sum dy x,    dshift = sum dy

scale and shift are broadcast to x. The operations are torch's, so all bits are. torch keeps x for scale, and a consumer
keeps y. Here y is built again where it is kept, and x's producer is kept instead of x if it can be, as a norm's can.

Peebles and Xie, "Scalable Diffusion Models with Transformers", 2023. https://arxiv.org/abs/2212.09748
"""

import torch
from torch import Tensor

from hfnn.core.context import context
from hfnn.core.kernel import Op
from hfnn.core.node import below, described, double_backward

# How many times scale and shift must be smaller than x, and the bytes of x from which on this pays for its host time.
SMALLER, FLOOR = 4, 1 << 20


def reference(x, scale=None, shift=None):
    """The definition, in the dtypes of its arguments."""
    y = x if scale is None else x * scale
    return y if shift is None else y + shift


OP = Op("affine", reference, reference, (), sample=None)


def _build(how, x, scale, shift):
    scale = scale if how[1] is None else how[1]
    if scale is None or shift is None or torch.result_type(shift, x) is not how[2]:
        return reference(x, scale, shift)
    return (x * scale).add_(shift)  # the same bits, without another tensor


def _gradients(dy, needs, how, x, scale, shift):
    _, number, dtype, of_scale, of_shift = how
    scale = scale if number is None else number
    dshift = dy.sum_to_size(of_shift) if needs[2] else None
    dy = dy.to(dtype)  # of the product
    dx = dy if scale is None else dy * scale if needs[0] else None
    return dx, (dy * x).sum_to_size(of_scale) if needs[1] else None, dshift


def _second(dy, needs, how, x, scale, shift):
    _, number, dtype, _, of_shift = how
    x = dy.new_zeros(dy.shape, dtype=dtype) if x is None else x  # any values will do if backward does not read them
    if shift is None and of_shift is not None:
        shift = dy.new_zeros(of_shift)
    own = lambda x, scale, shift: reference(x, scale if number is None else number, shift)  # noqa: E731
    return double_backward(own, (x, scale, shift), needs, dy)


# Without a gradient of scale, torch does not keep x.
_NODE, _FIXED = (described("_Affine", letters, _build, _gradients, _second) for letters in ("xxb", "txb"))


def affine(
    x: Tensor, scale: Tensor | float | None = None, shift: Tensor | float | None = None, *, prefer: str = "auto"
) -> Tensor:
    """`x * scale + shift` with torch's results, of which a consumer keeps nothing of x's size.

    Args:
        x: (...), a tensor that can be built again, to save memory.
        scale: A number or a tensor that is broadcast to x, or None.
        shift: Like scale.
    PREFER
    """
    number = None if isinstance(scale, Tensor) else scale
    small = [each for each in (scale, shift) if isinstance(each, Tensor)]
    if (
        _NODE is None or not torch.is_grad_enabled() or prefer == "speed" or (prefer == "auto" and x.nbytes < FLOOR)
        or context(x, *small) is not None or not all(is_small(each, x) for each in small)
        or not (shift is None or isinstance(shift, Tensor))
    ):  # fmt: skip
        return reference(x, scale, shift)
    scale = scale if number is None else None
    of = [None if each is None else tuple(each.shape) for each in (scale, shift)]
    how = None, number, x.dtype if scale is None else torch.result_type(x, scale), *of
    node = _FIXED if scale is None or not scale.requires_grad else _NODE
    return node(below(_build, how, x, scale, shift), how, x, scale, shift)


def is_small(each, x) -> bool:
    """Whether a tensor is broadcast to x, and much smaller."""
    if each.dim() > x.dim() or each.numel() * SMALLER > x.numel() or each.device != x.device:
        return False
    return all(a in (1, b) for a, b in zip(reversed(each.shape), reversed(x.shape), strict=False))
