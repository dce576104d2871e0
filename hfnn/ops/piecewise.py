"""What relu, hardtanh, clamp and other piecewise linear maps share: a bit an element, kept instead of a tensor.

    dx = dy * inside where the bit of the element is set, dy * outside elsewhere

The slope of such a map has two values, so backward needs to know of each element which one, and nothing else: an eighth
of a byte where torch keeps the input, or the output, in two or four. Forward makes the bits in the pass that makes y.
csrc/piecewise.h has the maps and says which side of a kink, and which slope of a NaN, is torch's.

dx is linear in dy, so backward is a function that is its own backward, and can be differentiated any number of times.
"""

import functools

import torch

from hfnn import bits
from hfnn.kernel import FLOATS, Function, Kernel
from hfnn.ops.flat import flat, link_before, links, zeros_or_none
from hfnn.ops.layout import _dense, in_order, laid, result_strides

RELU, LEAKY_RELU, HARDTANH, CLAMP, THRESHOLD, HARDSHRINK, SOFTSHRINK, HARDSIGMOID = range(8)

# Of these, whose gradient has the layout of x whatever that of dy is; of the others torch asks dy first.
_LIKE_X = (RELU, LEAKY_RELU, CLAMP, THRESHOLD)

# Sizes for the contract tests, for maps without options and with one kind of them.
SHAPES = ((1,), (3, 769), (64, 1024), (0, 4))
BENCH = (16384, 8192)


def kernels(min_elements: int) -> tuple[Kernel, ...]:
    """The kernels of every map here; min_elements: on the CPU."""
    return (
        Kernel("triton", "hfnn.kernels.piecewise", "cuda", min_elements=1 << 24),
        Kernel("cpp", "hfnn._C:cpu.piecewise", "cpu", (*FLOATS, torch.float64), min_elements=min_elements),
    )


class _Piecewise(Function):
    @staticmethod
    def forward(ctx, x, before, kind, a, b, inside, outside, kernel):
        y, flags, strides = _compute(x, kind, a, b, kernel, True)
        # torch's clamp has a choice of dy alone.
        own, link = (None, None) if kind == CLAMP else links(x, before)
        ctx.save_for_backward(flags, link)
        ctx.set_materialize_grads(False)
        ctx.how, ctx.shape = (strides, kind in _LIKE_X, inside, outside, kernel), x.shape
        return y, own

    @staticmethod
    def backward(ctx, dy, dlink):
        flags, link = ctx.saved_tensors
        dx = zeros_or_none(dlink, ctx.shape) if dy is None else flat(_gradient(dy, flags, *ctx.how), link)
        return dx, *(None,) * 7


class _Gradient(torch.autograd.Function):
    """dx of dy, for a backward that is to be differentiated: linear in dy, so its own backward."""

    @staticmethod
    def forward(ctx, dy, flags, *how):
        ctx.save_for_backward(flags)
        ctx.how = how
        with torch.no_grad():
            return _gradient(dy, flags, *ctx.how)

    @staticmethod
    def backward(ctx, ddx):
        (flags,) = ctx.saved_tensors
        return _gradient(ddx, flags, *ctx.how), *(None,) * 6


def _compute(x, kind, a, b, kernel, keep):
    """(y, the bits or None, the strides whose memory the bits go along)"""
    x = _dense(x)
    y = torch.empty_like(x)
    flags = x.new_empty(bits.size(x.numel()), dtype=torch.uint8) if keep else None
    kernel.forward(in_order(x), in_order(y), flags, kind, a, b, kernel.queue(x))
    return y, flags, x.stride()


def _gradient(dy, flags, strides, like_x, inside, outside, kernel):
    if torch.is_grad_enabled():
        return _Gradient.apply(dy, flags, strides, like_x, inside, outside, kernel)
    in_step = laid(dy, strides)
    dx = torch.empty_like(in_step)
    kernel.backward(in_order(in_step), flags, in_order(dx), inside, outside, kernel.queue(dy))
    return dx if in_step is dy or like_x else laid(dx, result_strides(dy, dx))


def run(x, kind, kernel, a=0.0, b=0.0, inside=1.0, outside=0.0):
    """The map of x by a kernel, keeping bits where a gradient is wanted."""
    if torch.is_grad_enabled() and x.requires_grad:
        return _Piecewise.apply(x, None if kind == CLAMP else link_before(x), kind, a, b, inside, outside, kernel)[0]
    return _compute(x, kind, a, b, kernel, False)[0]


@functools.lru_cache(1024)
def rounded(value: float, dtype: torch.dtype) -> float:
    """A bound as torch compares with it where it first rounds it to the dtype of x."""
    return torch.tensor(value, dtype=torch.float64).to(dtype).item()


def sampled(shape, dtype, device, generator=None, kinks=()):
    """Random x of a scale that crosses the kinks, and none too near to one to be told from it in 16 bits."""
    x = torch.randn(shape, generator=generator).mul_(3)
    for kink in kinks:
        x = torch.where((x - kink).abs() < 0.06, kink + 0.15, x)
    return x.to(dtype).to(device)
