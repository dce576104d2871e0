"""Leaky rectified linear unit with trainable slopes, one for all channels or one per channel.

    y = x where x > 0, else w x;   dx = dy where x > 0, else w dy;   dw = sum of dy x where x <= 0

He et al., "Delving Deep into Rectifiers", ICCV 2015. The gradient of w needs x, which torch keeps. If x can be built
again, w alone is kept, and the result can be built again, too. Otherwise, if w requires no gradient, as in a frozen
layer, one bit per element and w are enough.
"""

import torch
from torch import Tensor, nn

from hfnn.core import bits
from hfnn.core.context import autocasting
from hfnn.core.kernel import WORTH_ELEMENTS, Op, kernels
from hfnn.core.node import Function, below, described, double_backward
from hfnn.ops import piecewise, table
from hfnn.ops.behind import BEHIND_ELEMENTS, pays
from hfnn.ops.flat import flat, link_before, links, zeros_or_none
from hfnn.ops.layout import ambiguous, laid

_prelu = torch.prelu


def reference(x, weight):
    """The definition, in the dtype of x."""
    return torch.where(x > 0, x, x * _along(weight, x).to(x.dtype))


def sample(case, dtype, device, generator=None):
    """Arguments of `prelu` for x of shape `case[:-1]`; the last entry tells whether there is one weight per channel.

    The weight is a keyword, because it requires no gradient here.
    """
    *shape, how = case
    weight = torch.randn(shape[1] if how == "channels" else 1, generator=generator).to(dtype).to(device)
    return (piecewise.crossing(shape, generator, (0,)).to(dtype).to(device),), {"weight": weight}


OP = Op(
    "prelu",
    reference,
    _prelu,
    # The products are torch's own; a kernel packs the bits.
    kernels=kernels("bits", 1 << 62, cuda=1 << 62),
    sample=sample,
    cases=((1, "one"), *((*shape, how) for shape in table.SHAPES[1:] for how in ("one", "channels"))),
    traffic=(2, 2),
    probe=lambda x: (x.new_empty(1),),
    small=(3, 5, "channels"),
    bench=((*table.BENCH, "channels"),),
    recipe=False,
    worth=(BEHIND_ELEMENTS[0], WORTH_ELEMENTS),
)
_passes = OP.passes


class _PReLU(Function):
    @staticmethod
    def forward(ctx, x, before, weight):
        own, link = links(x, before)
        ctx.save_for_backward(bits.pack(x > 0), weight, link)
        ctx.set_materialize_grads(False)
        y = _prelu(x, weight)
        ctx.shape, ctx.strides, ctx.dtype = x.shape, y.stride(), x.dtype
        return y, own

    @staticmethod
    def backward(ctx, dy, dlink):
        packed, weight, link = ctx.saved_tensors
        if dy is None:
            return zeros_or_none(dlink, ctx.shape), None, None
        above = bits.unpack(packed, ctx.shape)
        if 1 in dy.shape and dy.stride() != ctx.strides and not torch.is_grad_enabled():
            # By torch's own op, on numbers with the signs of x, because its strides in dimensions of size 1 are
            # special.
            x = laid(torch.where(above, 1, -1).to(dy.dtype), ctx.strides)
            weight = weight.to(dy.dtype).view([-1 if d == min(1, dy.dim() - 1) else 1 for d in range(dy.dim())])
            return torch.ops.aten._prelu_kernel_backward(dy, x, weight)[0], None, None
        # In torch's ops, so it is linear in dy for a second backward, too.
        dx = torch.where(above, dy, dy * _along(weight, dy).to(dy.dtype))
        return flat(laid(dx.to(ctx.dtype), ctx.strides), link), None, None


def _build(how, x, weight):
    return _prelu(x, weight)


def _gradients(dy, needs, how, x, weight):
    dx, dweight = torch.ops.aten._prelu_kernel_backward(dy, x, _along(weight, x))
    return dx, dweight.sum_to_size(_along(weight, x).shape).view(weight.shape) if needs[1] else None


def _second(dy, needs, how, x, weight):
    return double_backward(_prelu, (x, weight), needs, dy)


_NODE = described("_PReLU", "xx", _build, _gradients, _second)


def _along(weight, x):
    """The weight aligned with the channels of x, its dimension 1."""
    return weight.view(-1, *(1 for _ in range(x.dim() - 2))) if weight.numel() > 1 else weight.view(())


def prelu(input: Tensor, weight: Tensor, *, prefer: str = "auto") -> Tensor:
    """`torch.nn.functional.prelu`; keeps nothing of an input that can be built again, and otherwise one bit per element
    instead of it if weight requires no gradient.

    The result has the shape of input. Raises what torch raises.

    Args:
        input: Of any shape.
        weight: The slope for x < 0: one element, or as many as dimension 1 of input has.
    PREFER
    """
    if _passes(input, prefer):
        return _prelu(input, weight)
    wanted = torch.is_grad_enabled() and input.requires_grad
    if OP.select(input, weight, prefer=prefer) is None or not wanted:
        return _prelu(input, weight)
    if pays(input, prefer) and weight.dtype is input.dtype and not autocasting(input):
        return _NODE(below(_prelu, input, weight), (None,), input, weight)
    if weight.requires_grad or ambiguous(input):
        return _prelu(input, weight)
    return _PReLU.apply(input, link_before(input), weight)[0]


class PReLU(nn.PReLU):
    """`torch.nn.PReLU`: the same arguments, defaults and state dict. `prefer` is set by `hfnn.convert`.

    Args:
        num_parameters: Slopes: 1, or one for each channel.
        init: Their first value.
        device: Of the parameters.
        dtype: Of the parameters.
    """

    prefer = "auto"

    def forward(self, input: Tensor) -> Tensor:
        return prelu(input, self.weight, prefer=self.prefer)


OP.modules[nn.PReLU] = PReLU
