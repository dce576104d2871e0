"""A number wherever a mask is set, keeping the mask in bits.

    y = value where mask, else x;    dx = 0 where mask, else dy

As hfnn/ops/where.py, which has the packed masks: torch keeps a byte an element of the mask.
"""

import torch

from hfnn import bits
from hfnn.kernel import Op
from hfnn.ops.where import KERNELS, broadcasts, pack, small_shape

_masked_fill = torch.masked_fill


def reference(x, mask, value):
    """The definition, in the dtype of x, for a finite value."""
    return x * ~mask + value * mask


def sample(case, dtype, device, generator=None):
    """Arguments of `masked_fill` for x of shape `case`."""
    x, level = (torch.randn(case, generator=generator) for _ in range(2))
    return (x.to(dtype).to(device), (level > 0).to(device), -2.0), {}


OP = Op(
    "masked_fill",
    reference,
    _masked_fill,
    kernels=KERNELS,
    sample=sample,
    cases=((3, 769), (64, 1024), (0, 4), (1,)),
    probe=lambda x: (x > 0, 0.0),
    small=(3, 5),
    bench=((16384, 8192),),
    recipe=False,
    like_input=False,  # as far as tests with another x go: the others have its shape
)
_passes = OP.passes


class _MaskedFill(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, mask, packed, value):
        ctx.save_for_backward(packed)
        ctx.shape = small_shape(mask)
        return _masked_fill(x, mask, value)

    @staticmethod
    def backward(ctx, dy):
        (packed,) = ctx.saved_tensors
        return _masked_fill(dy, bits.unpack(packed, ctx.shape), 0), None, None, None


def masked_fill(input, mask, value, *, prefer="auto"):
    """`torch.masked_fill`, keeping an eighth of a byte an element for the mask instead of a byte.

    Shapes: mask (bool) broadcasts to that of input; value is a number, or a tensor of one that needs no gradient.
    Others are left to torch's own op. prefer: "auto" | "memory" | "speed" (`hfnn.convert`). Raises what torch raises.
    """
    kernel = None if _passes(input, prefer) else OP.select(input, prefer=prefer)
    if kernel is None or not (input.requires_grad and torch.is_grad_enabled()) or not broadcasts(mask, input):
        return _masked_fill(input, mask, value)
    if isinstance(value, torch.Tensor) and (value.requires_grad or value.dim() != 0):
        return _masked_fill(input, mask, value)
    return _MaskedFill.apply(input, mask, pack(mask), value)
