"""Adaptive max pooling over one, two or three dimensions, keeping the position of each maximum in its window.

    y_o = max x_i over floor(o I / O) <= i < ceil((o + 1) I / O)    for I inputs and O outputs, in each dimension

If O divides I, this is max pooling with windows of I / O, done by hfnn/ops/max_pool.py. Otherwise the windows differ,
and torch's own kernels run in both directions. Instead of the int64 index, the number of the maximum within the largest
window is kept, 2 to 8 bits; backward makes the index from it. torch also keeps x, which is replaced by a dummy.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hfnn.core import bits
from hfnn.core.kernel import Op
from hfnn.core.node import Function
from hfnn.ops import max_pool
from hfnn.ops.avg_pool import Keeps, sizes_of, takes
from hfnn.ops.flat import flat, link_before, links, zeros_or_none

aten = torch.ops.aten
# By number of dimensions. One dimension is done as two with a height of 1, as in torch.
_FORWARD = {2: aten.adaptive_max_pool2d.default, 3: aten.adaptive_max_pool3d.default}
_BACKWARD = {2: aten.adaptive_max_pool2d_backward.default, 3: aten.adaptive_max_pool3d_backward.default}


@functools.lru_cache(maxsize=256)
def _largest(inputs: int, outputs: int) -> int:
    """The size of the largest window in a dimension."""
    return max(-(-(o + 1) * inputs // outputs) - o * inputs // outputs for o in range(outputs))


def _begins(inputs: int, outputs: int, d: int, device):
    """Where each window begins, along dimension -d."""
    return (torch.arange(outputs, device=device) * inputs // outputs).view(-1, *(1,) * (d - 1))


class _AdaptiveMaxPool(Function):
    @staticmethod
    def forward(ctx, x, before, sizes):
        own, link = links(x, before)
        ctx.set_materialize_grads(False)
        y, at = _FORWARD[len(sizes)](x, sizes)
        ctx.like, ctx.sizes, ctx.strides = Keeps(x), sizes, at.stride()
        code, unit = 0, 1
        for d in range(1, len(sizes) + 1):
            inputs, outputs = x.shape[-d], sizes[-d]
            code = code + unit * (at % inputs - _begins(inputs, outputs, d, x.device))
            at, unit = at // inputs, unit * _largest(inputs, outputs)
        ctx.save_for_backward(bits.pack(code.to(torch.uint8), max_pool.code_width(unit)), link)
        return y, own

    @staticmethod
    def backward(ctx, dy, dlink):
        packed, link = ctx.saved_tensors
        like, sizes, dims = ctx.like, ctx.sizes, len(ctx.sizes)
        if dy is None:
            return zeros_or_none(dlink, like.shape), None, None
        positions = math.prod(map(_largest, like.shape[-dims:], sizes))
        code, at, unit = bits.unpack(packed, dy.shape, max_pool.code_width(positions), torch.uint8).long(), 0, 1
        for d in range(1, dims + 1):
            inputs, outputs = like.shape[-d], sizes[-d]
            largest = _largest(inputs, outputs)
            at = at + unit * (code % largest + _begins(inputs, outputs, d, dy.device))
            code, unit = code // largest, unit * inputs
        at = torch.empty_strided(at.shape, ctx.strides, dtype=at.dtype, device=at.device).copy_(at)
        return flat(_BACKWARD[dims](dy, like.empty(dy.dtype), at).to(like.dtype), link), None, None


def _adaptive(dims, x, output_size, prefer):
    """The result, or None if torch's own op must run or raise."""
    sizes = sizes_of(x, output_size, dims)
    if sizes is None or min(sizes) < 1 or 0 in x.shape or max_pool._keeps_channels_last(x, dims):
        return None
    inputs = tuple(x.shape[-dims:])
    if all(i % o == 0 for i, o in zip(inputs, sizes, strict=True)):
        window = tuple(i // o for i, o in zip(inputs, sizes, strict=True))
        return max_pool.max_pool(max_pool.OPS[dims - 1], dims, x, window, None, 0, 1, False, prefer)
    if math.prod(map(_largest, inputs, sizes)) > max_pool.LARGEST or not takes(x, prefer):
        return None
    if dims == 1:
        x, sizes = x.unsqueeze(-2), (1, *sizes)
    y = _AdaptiveMaxPool.apply(x, link_before(x), sizes)[0]
    return y.squeeze(-2) if dims == 1 else y


def _passes(x, prefer) -> bool:
    """Whether torch's own op runs without further checks."""
    return max_pool.OPS[0].passes(x, prefer) or not isinstance(x, torch.Tensor)


def adaptive_max_pool1d(
    input: Tensor, output_size: int | Sequence[int | None] | None, return_indices: bool = False, *, prefer: str = "auto"
) -> Tensor | Any:
    """`torch.nn.functional.adaptive_max_pool1d`, keeping 2 to 8 bits an output instead of its input and indices.

    Windows of more than 256 positions are left to torch's own op. Raises what torch raises.

    Args:
        input: (N, C, L) or (C, L).
        output_size: Of the last dimension; None: as in input.
        return_indices: Whether torch's own op runs, and also returns the positions of the maxima.
    PREFER
    """
    y = None if return_indices or _passes(input, prefer) else _adaptive(1, input, output_size, prefer)
    return nn.functional.adaptive_max_pool1d(input, output_size, return_indices) if y is None else y


def adaptive_max_pool2d(
    input: Tensor, output_size: int | Sequence[int | None] | None, return_indices: bool = False, *, prefer: str = "auto"
) -> Tensor | Any:
    """`torch.nn.functional.adaptive_max_pool2d`, keeping 2 to 8 bits an output instead of its input and indices.

    Windows of more than 256 positions are left to torch's own op. Raises what torch raises.

    Args:
        input: (N, C, H, W) or (C, H, W).
        output_size: Of the last 2 dimensions; None: as in input.
        return_indices: Whether torch's own op runs, and also returns the positions of the maxima.
    PREFER
    """
    y = None if return_indices or _passes(input, prefer) else _adaptive(2, input, output_size, prefer)
    return nn.functional.adaptive_max_pool2d(input, output_size, return_indices) if y is None else y


def adaptive_max_pool3d(
    input: Tensor, output_size: int | Sequence[int | None] | None, return_indices: bool = False, *, prefer: str = "auto"
) -> Tensor | Any:
    """`torch.nn.functional.adaptive_max_pool3d`, keeping 2 to 8 bits an output instead of its input and indices.

    Windows of more than 256 positions are left to torch's own op. Raises what torch raises.

    Args:
        input: (N, C, D, H, W) or (C, D, H, W).
        output_size: Of the last 3 dimensions; None: as in input.
        return_indices: Whether torch's own op runs, and also returns the positions of the maxima.
    PREFER
    """
    y = None if return_indices or _passes(input, prefer) else _adaptive(3, input, output_size, prefer)
    return nn.functional.adaptive_max_pool3d(input, output_size, return_indices) if y is None else y


class AdaptiveMaxPool1d(nn.AdaptiveMaxPool1d):
    """`torch.nn.AdaptiveMaxPool1d`: the same arguments and defaults. `prefer` is set by `hfnn.convert`."""

    prefer = "auto"

    def forward(self, input: Tensor) -> Tensor | Any:
        return adaptive_max_pool1d(input, self.output_size, self.return_indices, prefer=self.prefer)


class AdaptiveMaxPool2d(nn.AdaptiveMaxPool2d):
    """`torch.nn.AdaptiveMaxPool2d`: the same arguments and defaults. `prefer` is set by `hfnn.convert`."""

    prefer = "auto"

    def forward(self, input: Tensor) -> Tensor | Any:
        return adaptive_max_pool2d(input, self.output_size, self.return_indices, prefer=self.prefer)


class AdaptiveMaxPool3d(nn.AdaptiveMaxPool3d):
    """`torch.nn.AdaptiveMaxPool3d`: the same arguments and defaults. `prefer` is set by `hfnn.convert`."""

    prefer = "auto"

    def forward(self, input: Tensor) -> Tensor | Any:
        return adaptive_max_pool3d(input, self.output_size, self.return_indices, prefer=self.prefer)


def _sample(dims, case, dtype, device, generator=None):
    shape = (*(1,) * (dims + 1 - len(case)), *case)
    return (torch.randn(shape, generator=generator).to(dtype).to(device), (1,) * (dims - 1) + (5,)), {}


def _op(dims, module, room) -> Op:
    """No kernels of its own: max_pool's run, or torch's. `convert` finds the module here."""
    name = f"adaptive_max_pool{dims}d"
    torchs = getattr(nn.functional, name)
    sample = functools.partial(_sample, dims)
    op = Op(name, torchs, torchs, (), sample, ((3, 769),), recipe=False, like_input=False)
    op.modules[module] = room
    return op


OPS = (
    _op(1, nn.AdaptiveMaxPool1d, AdaptiveMaxPool1d),
    _op(2, nn.AdaptiveMaxPool2d, AdaptiveMaxPool2d),
    _op(3, nn.AdaptiveMaxPool3d, AdaptiveMaxPool3d),
)
