"""Leaky rectified linear unit with random slopes.

    y = x where x > 0, else r x;   dx = dy where x > 0, else r dy;   r uniform in [lower, upper), one an element

Xu et al., "Empirical Evaluation of Rectified Activations in Convolutional Network", 2015. torch keeps x and r. Here one
bit per element is kept, and the seed with which r is drawn again in backward. The seed comes from torch's default
generator, so `torch.manual_seed` and the recomputation of activation checkpoints reproduce it. In evaluation the slope
is the mean, and the op is leaky_relu.
"""

import torch
from torch import Tensor, nn

from hfnn.core import bits
from hfnn.core.context import capturing, compiling, context, on_gpu
from hfnn.core.kernel import WORTH_ELEMENTS, Op, forced
from hfnn.core.node import Function, drawing
from hfnn.ops import piecewise, table
from hfnn.ops.dropout import philox_seed
from hfnn.ops.flat import flat, link_before, links, zeros_or_none

_rrelu = torch.rrelu


def reference(x, lower=1 / 8, upper=1 / 3, training=False, *, slopes=None):
    """The definition for given slopes, in the dtype of x."""
    return torch.where(x > 0, x, x * (slopes if training else (lower + upper) / 2))


def sample(case, dtype, device, generator=None):
    """Arguments of `rrelu` for x of shape `case`."""
    return (piecewise.crossing(case, generator, (0,)).to(dtype).to(device), 1 / 8, 1 / 3, True), {}


# No own kernels: torch draws the numbers.
OP = Op(
    "rrelu",
    reference,
    _rrelu,
    kernels=(),
    sample=sample,
    cases=table.SHAPES,
    small=(3, 5),
    pin=lambda args, y: {"slopes": (y / args[0]).detach()},
    recipe=False,
)


class _RReLU(Function):
    @staticmethod
    def forward(ctx, x, before, *how):
        own, link = links(x, before)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(bits.pack(x <= 0), link)
        ctx.how, ctx.shape = how, x.shape
        return _compute(x, *how), own

    @staticmethod
    def backward(ctx, dy, dlink):
        packed, link = ctx.saved_tensors
        if dy is None:
            return zeros_or_none(dlink, ctx.shape), *(None,) * 5
        # In torch's ops, so it is linear in dy for a second backward, too.
        dx = torch.where(bits.unpack(packed, dy.shape), dy * _slopes(dy, *ctx.how), dy)
        return flat(dx, link), *(None,) * 5


def _compute(x, *how):
    return torch.where(x <= 0, x * _slopes(x, *how), x).contiguous()  # as in torch


def _slopes(x, lower, upper, seed, offset):
    """The slopes for a seed and an offset, in the shape, dtype and device of x."""
    generator = torch.Generator(x.device).manual_seed(seed)
    if x.is_cuda:
        generator.set_offset(offset)
    with drawing():  # for one dy, in a batched backward
        return torch.empty(x.shape, dtype=x.dtype, device=x.device).uniform_(lower, upper, generator=generator)


def _takes(x, prefer):
    """Whether the room runs; it saves memory but no time.

    This does not depend on whether a gradient is needed: a checkpoint's first pass needs none, but must draw the same
    numbers as the second.
    """
    if compiling():
        return False
    if prefer == "speed" or (prefer == "auto" and x.numel() < WORTH_ELEMENTS) or forced() == "torch":
        return False
    if not (x.is_cpu or x.is_cuda) or not x.is_floating_point() or context(x) is not None:
        return False
    if not on_gpu(x) and x.dtype is torch.float16:  # torch's own op raises
        return False
    return not (x.is_cuda and capturing())  # the seed would be frozen into the graph


def rrelu(
    input: Tensor,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
    inplace: bool = False,
    *,
    prefer: str = "auto",
) -> Tensor:
    """`torch.nn.functional.rrelu`; keeps one bit per element and a seed instead of the input and the slopes.

    The slopes differ from those that torch draws from the same seed. Inside CUDA graph capture torch's own op runs.
    Raises what torch raises.

    Args:
        input: Of any shape and dtype, which the result has.
        lower: Of slopes for x < 0.
        upper: Of slopes for x < 0.
        training: Whether slopes are random. Otherwise they are (lower + upper) / 2.
        inplace: Whether torch's own op runs, and writes the result to input.
    PREFER
    """
    if not training and not inplace and lower <= upper and not torch._C._are_functorch_transforms_active():
        return piecewise.leaky_relu(input, (lower + upper) / 2, prefer=prefer)
    if inplace:
        return nn.functional.rrelu(input, lower, upper, training, True)
    if not lower <= upper or not _takes(input, prefer):
        return _rrelu(input, lower, upper, training)
    seed, offset, _ = philox_seed(input)
    if torch.is_grad_enabled() and input.requires_grad:
        return _RReLU.apply(input, link_before(input), lower, upper, seed, offset)[0]
    return _compute(input, lower, upper, seed, offset)


class RReLU(nn.RReLU):
    """`torch.nn.RReLU`: the same arguments and defaults. `prefer` is set by `hfnn.convert`.

    Args:
        lower: Of slopes for x < 0.
        upper: Of slopes for x < 0.
        inplace: Whether torch's own op runs, and writes the result to the input.
    """

    prefer = "auto"

    def forward(self, input: Tensor) -> Tensor:
        return rrelu(input, self.lower, self.upper, self.training, self.inplace, prefer=self.prefer)


OP.modules[nn.RReLU] = RReLU
