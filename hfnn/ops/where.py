"""A choice between two values by a mask, element by element, keeping the mask in bits.

    y = a where mask, else b;    da = dy where mask, else 0;    db = 0 where mask, else dy

torch keeps the mask, a byte an element; here it is packed into an eighth of that (hfnn/bits.py), at each call, for a
mask may be filled anew in between by what moves no version. Of a mask that is broadcast the small one is kept. Values
and gradients are torch's own to the bit.
"""

import torch

from hfnn import bits
from hfnn.kernel import FLOATS, Kernel, Op, is_plain
from hfnn.ops.layout import in_rows

_where = torch.where


def reference(condition, a, b):
    """The definition, in the dtype of a, whose NaNs and infinities are not for products."""
    return a * condition + b * ~condition


def sample(case, dtype, device, generator=None):
    """Arguments of `where` for a and b of shape `case`."""
    a, b, level = (torch.randn(case, generator=generator) for _ in range(3))
    return tuple(t.to(device) for t in (level > 0, a.to(dtype), b.to(dtype))), {}


NEVER = 1 << 62  # elements from which this is faster: it is smaller, and takes a launch more

# Of where and masked_fill: the choice is torch's, the packing theirs.
KERNELS = (
    Kernel("triton", "hfnn.kernels.bits", "cuda", min_elements=NEVER),
    Kernel("cpp", "hfnn._C:cpu.bits", "cpu", (*FLOATS, torch.float64), min_elements=NEVER),
)


def pack(mask):
    """The bits of a boolean mask without the dimensions along which it was expanded."""
    return bits.pack(_small(mask))


def _small(mask):
    """An expanded mask before it was expanded."""
    return mask[tuple(slice(0, 1) if step == 0 else slice(None) for step in mask.stride())]


def small_shape(mask) -> tuple[int, ...]:
    """The shape that `pack` packs."""
    return tuple(min(size, 1) if step == 0 else size for size, step in zip(mask.shape, mask.stride(), strict=True))


def broadcasts(mask, x) -> bool:
    """Whether a mask is a plain boolean one, on x's device, that broadcasts to x and does not broaden it."""
    if not is_plain(mask) or mask.dtype is not torch.bool or mask.device != x.device or mask.dim() > x.dim():
        return False
    shape = x.shape[x.dim() - mask.dim() :]
    return all(size in (1, wanted) for size, wanted in zip(mask.shape, shape, strict=True))


OP = Op(
    "where",
    reference,
    _where,
    kernels=KERNELS,
    sample=sample,
    cases=((3, 769), (64, 1024), (0, 4), (1,)),
    small=(3, 5),
    bench=((16384, 8192),),
    recipe=False,
)
_passes = OP.passes


class _Where(torch.autograd.Function):
    @staticmethod
    def forward(ctx, mask, packed, a, b):
        ctx.save_for_backward(packed)
        ctx.shape = small_shape(mask)
        return _where(mask, a, b)

    @staticmethod
    def backward(ctx, dy):
        (packed,) = ctx.saved_tensors
        mask, (_, _, needs_a, needs_b) = bits.unpack(packed, ctx.shape), ctx.needs_input_grad
        return None, None, _where(mask, dy, 0) if needs_a else None, _where(mask, 0, dy) if needs_b else None


def _alike(value, x) -> bool:
    """Whether a value is a number, x itself, a tensor like it, or a single number in a tensor without a gradient."""
    if not isinstance(value, torch.Tensor):
        return type(value) in (int, float, bool)
    if not is_plain(value) or value.dtype is not x.dtype or value.is_cpu != x.is_cpu:
        return False
    return value.shape == x.shape or (value.dim() == 0 and not value.requires_grad)


def where(condition, input=None, other=None, *, prefer="auto"):
    """`torch.where`, keeping an eighth of a byte an element for a mask instead of a byte.

    Shapes: condition (bool) broadcasts to that of input and other, which have one shape and dtype, or of which one is a
    number; anything else is left to torch's own op. prefer: "auto" | "memory" | "speed" (`hfnn.convert`). Raises what
    torch raises.
    """
    if input is None or other is None:
        return _where(condition, *(value for value in (input, other) if value is not None))
    x = input if isinstance(input, torch.Tensor) and input.dim() else other
    if not isinstance(x, torch.Tensor) or _passes(x, prefer) or not _wants_gradient(input, other):
        return _where(condition, input, other)
    if OP.select(x, prefer=prefer) is None or not all(_alike(value, x) for value in (input, other)):
        return _where(condition, input, other)
    if not broadcasts(condition, x) or not (condition.is_contiguous() or in_rows(_small(condition))):
        return _where(condition, input, other)
    return _Where.apply(condition, pack(condition), input, other)


def _wants_gradient(*values) -> bool:
    return torch.is_grad_enabled() and any(isinstance(t, torch.Tensor) and t.requires_grad for t in values)
