"""Max pooling over one, two or three dimensions, keeping the position of each maximum in its window.

    y_o = max_k x[i(o, k)],    i(o, k) = o * stride - padding + k * dilation;    dx_i = sum of dy_o over the o it won

The index k of the maximum takes 2 bits for windows of up to 4 positions, 4 bits up to 16, a byte up to 256. torch keeps
x and an int64 per output. Backward gathers: an element of dx adds its contributions in the order of the windows, also
on the GPU, where torch adds atomically. As in torch, the first of equal numbers wins, and a NaN wins.
"""

import functools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hfnn.core import bits
from hfnn.core.context import on_gpu
from hfnn.core.kernel import WORTH_ELEMENTS, Op, forced, kernels
from hfnn.core.node import Function
from hfnn.ops.flat import flat, link_before, links, zeros_or_none
from hfnn.ops.layout import ambiguous

LARGEST = 256  # positions of a window: larger ones do not fit a byte and are left to torch
PLANE = (1 << 31) - (1 << 16)  # elements of a plane, at most: offsets inside one have 32 bits on the GPU


@dataclass(frozen=True)
class Geometry:
    """A window and how it moves, in three dimensions, and the output sizes in the actual dimensions."""

    window: tuple[int, int, int]
    stride: tuple[int, int, int]
    padding: tuple[int, int, int]
    dilation: tuple[int, int, int]
    out: tuple[int, ...]

    @property
    def width(self) -> int:
        """Bits per code."""
        return code_width(math.prod(self.window))

    @property
    def how(self) -> tuple:
        """The kernel arguments besides tensors."""
        return self.window, self.stride, self.padding, self.dilation


def code_width(positions: int) -> int:
    """The bits needed for this many positions."""
    return 2 if positions <= 4 else 4 if positions <= 16 else 8


def tuple_of(given, dims: int, default=None) -> tuple[int, ...] | None:
    """torch's argument of one number or `dims` numbers as a tuple of ints, or None for anything else."""
    if given is None or given == [] or given == ():
        return default
    numbers = tuple(given) if isinstance(given, (tuple, list)) else (given,)
    if len(numbers) == 1:
        numbers *= dims
    return numbers if len(numbers) == dims and all(type(n) is int for n in numbers) else None


@functools.lru_cache(maxsize=1024)
def _geometry(sizes, window, stride, padding, dilation, ceil_mode) -> Geometry | None:
    """None if the window is too large for a byte, or if torch must handle an argument."""
    out = []
    for size, k, s, p, step in zip(sizes, window, stride, padding, dilation, strict=True):
        if min(size, k, s, step) < 1 or p < 0 or p > k // 2:
            return None
        n = (size + 2 * p - (k - 1) * step - 1 + (s - 1 if ceil_mode else 0)) // s + 1
        out.append(n - 1 if ceil_mode and (n - 1) * s >= size + p else n)
    if min(out) < 1 or math.prod(window) > LARGEST:
        return None
    ones, zeros = (1,) * (3 - len(sizes)), (0,) * (3 - len(sizes))
    return Geometry(ones + window, ones + stride, zeros + padding, ones + dilation, tuple(out))


def _layout(x, dims: int) -> torch.memory_format:
    """The memory format of a result: channels last if x is, else contiguous."""
    if not x.is_contiguous() and x.dim() == dims + 2 and dims > 1:
        last = torch.channels_last if dims == 2 else torch.channels_last_3d
        if x.is_contiguous(memory_format=last):
            return last
    return torch.contiguous_format


def _planes(x, dims: int, layout):
    """(P, D, H, W, C) of a tensor in that format, as a view of its memory."""
    ones = (1,) * (3 - dims)
    if layout is torch.contiguous_format:
        return x.view(math.prod(x.shape[:-dims]), *ones, *x.shape[-dims:], 1)
    return x.movedim(1, -1).view(x.shape[0], *ones, *x.shape[-dims:], x.shape[1])


def _values(x, geometry, kernel):
    """(y, codes, one byte each in the memory order of y)"""
    dims = len(geometry.out)
    layout = _layout(x, dims)
    x, shape = x.contiguous(memory_format=layout), (*x.shape[:-dims], *geometry.out)
    y = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=layout)
    codes = torch.empty(shape, dtype=torch.uint8, device=x.device, memory_format=layout)
    x_, y_, codes_ = (_planes(t, dims, layout) for t in (x, y, codes))
    kernel.forward(x_, y_, codes_, *geometry.how, kernel.queue(x))
    return y, codes_, layout


class _MaxPool(Function):
    @staticmethod
    def forward(ctx, x, before, geometry, kernel):
        y, codes, layout = _values(x, geometry, kernel)
        own, link = links(x, before)
        ctx.save_for_backward(bits.pack(codes, geometry.width), link)
        ctx.set_materialize_grads(False)
        ctx.how = geometry, layout, x.shape, kernel
        return y, own

    @staticmethod
    def backward(ctx, dy, dlink):
        packed, link = ctx.saved_tensors
        if dy is None:
            return zeros_or_none(dlink, ctx.how[2]), None, None, None
        gathered = _GatherPooled.apply if torch.is_grad_enabled() else _gathered
        return flat(gathered(dy, packed, *ctx.how), link), None, None, None


def _gathered(dy, packed, geometry, layout, shape, kernel):
    """dx of dy."""
    dims = len(geometry.out)
    dy = dy.contiguous(memory_format=layout)
    dx = torch.empty(shape, dtype=dy.dtype, device=dy.device, memory_format=layout)
    dy_, dx_ = (_planes(t, dims, layout) for t in (dy, dx))
    codes = bits.unpack(packed, dy_.shape, geometry.width, torch.uint8)
    kernel.backward(dy_, codes, dx_, *geometry.how, kernel.queue(dy))
    return dx


class _GatherPooled(Function):
    """dx of dy, differentiable: each output's gradient goes to the element that it came from."""

    @staticmethod
    def forward(ctx, dy, packed, geometry, layout, shape, kernel):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(packed)
        ctx.how = geometry, layout, shape
        return _gathered(dy, packed, geometry, layout, shape, kernel)

    @staticmethod
    def backward(ctx, ddx):
        (packed,) = ctx.saved_tensors
        geometry, layout, shape = ctx.how
        dims, out = len(geometry.out), (*shape[: -len(geometry.out)], *geometry.out)
        at = _indices(packed, geometry, layout, shape).flatten(-dims)
        return ddx.flatten(-dims).gather(-1, at).view(out), *(None,) * 5


def _indices(packed, geometry, layout, shape):
    """The int64 indices that torch's op returns: of each maximum in its plane of x."""
    dims, out = len(geometry.out), (*shape[: -len(geometry.out)], *geometry.out)
    like = torch.empty(out, dtype=torch.uint8, device="meta", memory_format=layout)
    codes = bits.unpack(packed, (packed.numel() and like.numel(),), geometry.width, torch.uint8)
    k = codes.as_strided(out, like.stride()).long()
    at, unit = 0, 1
    for d in range(1, dims + 1):
        size, window, stride, padding, step = shape[-d], *(triple[-d] for triple in geometry.how)
        o = torch.arange(out[-d], device=packed.device).view(-1, *(1,) * (d - 1))
        at = at + unit * (o * stride - padding + k % window * step)
        k, unit = k // window, unit * size
    return at


@functools.lru_cache(maxsize=64)
def _out_dtype(dims, dtype, device, autocast_dtype) -> torch.dtype:
    """The dtype of torch's op under autocast, which widens some on the CPU; found by running torch on one element."""
    with torch.no_grad():
        return OPS[dims - 1].torch(torch.zeros((1,) * (dims + 1), dtype=dtype, device=device), 1).dtype


def _keeps_channels_last(x, dims) -> bool:
    """Whether torch's result is channels last and ours would not be: torch uses its 2-d op for one dimension."""
    return dims == 1 and x.dim() == 3 and not x.is_contiguous() and x.stride(1) == 1 and x.shape[1] > 1


def _slower(x, dims, prefer) -> bool:
    """Whether torch's own op is faster and little is saved: on the CPU with channels last, by 1.4 to 1.7 times."""
    ours = on_gpu(x) or forced() is not None or _layout(x, dims) is torch.contiguous_format
    return not ours and (prefer == "speed" or x.numel() < WORTH_ELEMENTS)


def max_pool(op, dims, input, kernel_size, stride, padding, dilation, ceil_mode, prefer):
    """The result by a kernel, or None if torch's own op must run or raise."""
    kernel = op.select(input, out=input.dtype, prefer=prefer)
    if kernel is None or input.dim() not in (dims + 1, dims + 2) or 0 in input.shape[-dims - 1 :]:
        return None
    if ambiguous(input):  # torch's result may be channels last
        return None
    if prefer != "memory" and _slower(input, dims, prefer):
        return None
    window, padding, dilation = (tuple_of(given, dims) for given in (kernel_size, padding, dilation))
    stride = tuple_of(stride, dims, window)
    if None in (window, stride, padding, dilation) or _keeps_channels_last(input, dims):
        return None
    geometry = _geometry(tuple(input.shape[-dims:]), window, stride, padding, dilation, bool(ceil_mode))
    channels = 1 if input.is_contiguous() else input.shape[-dims - 1]  # part of the plane if they are last
    if geometry is None or channels * max(math.prod(input.shape[-dims:]), math.prod(geometry.out)) > PLANE:
        return None
    device = "cuda" if input.is_cuda else "cpu"
    if torch.is_autocast_enabled(device) and (input.is_cuda or not on_gpu(input)):  # a GPU's autocast widens none
        input = input.to(_out_dtype(dims, input.dtype, device, torch.get_autocast_dtype(device)))
    if torch.is_grad_enabled() and input.requires_grad:
        return _MaxPool.apply(input, link_before(input), geometry, kernel)[0]
    return _values(input, geometry, kernel)[0]


def reference(dims, x, kernel_size, stride, padding, dilation, ceil_mode):
    """The definition, in the dtype of x."""
    arguments = [tuple_of(given, dims) for given in (kernel_size, stride, padding, dilation)]
    out = _geometry(tuple(x.shape[-dims:]), *arguments, ceil_mode).out
    pads = []
    for size, n, k, s, p, step in zip(x.shape[-dims:], out, *arguments, strict=True):
        pads = [p, max(0, (n - 1) * s + (k - 1) * step + 1 - size - p), *pads]
    x = nn.functional.pad(x, pads, value=-math.inf)
    for n, k, s, _, step in zip(out, *arguments, strict=True):  # the next dimension is always at -dims
        x = x.unfold(-dims, (k - 1) * step + 1, s).narrow(-dims - 1, 0, n)[..., ::step]
    return x.flatten(-dims).max(-1).values


def sample(dims, case, dtype, device, generator=None):
    """Arguments of a pool for x of shape `case[:-1]`, with ones before it where it has too few dimensions.

    The last entry of a case names a window; no two elements are equal before rounding.
    """
    *shape, form = case
    shape = (*(1,) * (dims + 1 - len(shape)), *shape)
    x = torch.randperm(math.prod(shape), generator=generator).to(torch.float64).view(shape)
    return (x.div(max(1, x.numel()) / 4).sub(2).to(dtype).to(device), *FORMS[form](dims)), {}


# By name: kernel_size, stride, padding, dilation, ceil_mode.
FORMS = {
    "halves": lambda dims: (2, 2, 0, 1, True),
    "overlapping": lambda dims: (3, 2, 1, 1, False),
    "dilated": lambda dims: (*((*(n,) * (dims - 1), m) for n, m in ((1, 3), (1, 1), (0, 1), (1, 2))), False),
}


def _op(dims: int, empty: tuple, bench: tuple) -> Op:
    return Op(
        f"max_pool{dims}d",
        functools.partial(reference, dims),
        getattr(torch, f"max_pool{dims}d"),
        kernels=kernels("pool", 1 << 18, cuda=1 << 26),
        sample=functools.partial(sample, dims),
        cases=(*((*shape, form) for form in FORMS for shape in (empty, (3, 769), (64, 1024))), (1, "halves")),
        traffic=(1.4, 1.4),
        small=(3, 5, "overlapping"),
        bench=bench,
        recipe=False,
        like_input=False,
    )


_1D = _op(1, (0, 3, 8), ((64, 512, 4096, "halves"),))
_2D = _op(2, (0, 3, 8, 8), ((64, 64, 112, 112, "overlapping"), (32, 256, 56, 56, "halves")))
_3D = _op(3, (0, 3, 4, 8, 8), ((8, 64, 16, 56, 56, "halves"),))
OPS = _1D, _2D, _3D


def max_pool1d(
    input: Tensor,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
    *,
    prefer: str = "auto",
) -> Tensor | Any:
    """`torch.nn.functional.max_pool1d`, keeping 2 to 8 bits an output instead of its input and indices.

    Windows of more than 256 positions are left to torch's own op. Raises what torch raises.

    Args:
        input: (N, C, L) or (C, L).
        kernel_size: Of the windows.
        stride: Of the windows; None: kernel_size.
        padding: Positions at each end that are never the largest.
        dilation: The step between elements of a window.
        ceil_mode: Whether windows may reach beyond the end.
        return_indices: Whether torch's own op runs, and also returns the positions of the maxima.
    PREFER
    """
    if return_indices:
        return nn.functional.max_pool1d(input, kernel_size, stride, padding, dilation, ceil_mode, True)
    if not _1D.passes(input, prefer):
        y = max_pool(_1D, 1, input, kernel_size, stride, padding, dilation, ceil_mode, prefer)
        if y is not None:
            return y
    return torch.max_pool1d(input, kernel_size, () if stride is None else stride, padding, dilation, ceil_mode)


def max_pool2d(
    input: Tensor,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
    *,
    prefer: str = "auto",
) -> Tensor | Any:
    """`torch.nn.functional.max_pool2d`, keeping 2 to 8 bits an output instead of its input and indices.

    Windows of more than 256 positions are left to torch's own op. Raises what torch raises.

    Args:
        input: (N, C, H, W) or (C, H, W); the result is channels_last where a batched input is.
        kernel_size: Of the windows.
        stride: Of the windows; None: kernel_size.
        padding: Positions at each end that are never the largest.
        dilation: The step between elements of a window.
        ceil_mode: Whether windows may reach beyond the end.
        return_indices: Whether torch's own op runs, and also returns the positions of the maxima.
        prefer: "auto", "memory" or "speed", as in `hfnn.convert`.

    >>> hfnn.functional.max_pool2d(torch.arange(16.0).view(1, 1, 4, 4), 2)
    tensor([[[[ 5.,  7.],
              [13., 15.]]]])
    """
    if return_indices:
        return nn.functional.max_pool2d(input, kernel_size, stride, padding, dilation, ceil_mode, True)
    if not _2D.passes(input, prefer):
        y = max_pool(_2D, 2, input, kernel_size, stride, padding, dilation, ceil_mode, prefer)
        if y is not None:
            return y
    return torch.max_pool2d(input, kernel_size, () if stride is None else stride, padding, dilation, ceil_mode)


def max_pool3d(
    input: Tensor,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
    *,
    prefer: str = "auto",
) -> Tensor | Any:
    """`torch.nn.functional.max_pool3d`, keeping 2 to 8 bits an output instead of its input and indices.

    Windows of more than 256 positions are left to torch's own op. Raises what torch raises.

    Args:
        input: (N, C, D, H, W) or (C, D, H, W).
        kernel_size: Of the windows.
        stride: Of the windows; None: kernel_size.
        padding: Positions at each end that are never the largest.
        dilation: The step between elements of a window.
        ceil_mode: Whether windows may reach beyond the end.
        return_indices: Whether torch's own op runs, and also returns the positions of the maxima.
    PREFER
    """
    if return_indices:
        return nn.functional.max_pool3d(input, kernel_size, stride, padding, dilation, ceil_mode, True)
    if not _3D.passes(input, prefer):
        y = max_pool(_3D, 3, input, kernel_size, stride, padding, dilation, ceil_mode, prefer)
        if y is not None:
            return y
    return torch.max_pool3d(input, kernel_size, () if stride is None else stride, padding, dilation, ceil_mode)


class _Module:
    """Common base of the three modules. `prefer` is set by `hfnn.convert`."""

    prefer = "auto"


_of = operator.attrgetter("kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices")


class MaxPool1d(_Module, nn.MaxPool1d):
    """`torch.nn.MaxPool1d`: the same arguments and defaults."""

    def forward(self, input: Tensor) -> Tensor | Any:
        return max_pool1d(input, *_of(self), prefer=self.prefer)


class MaxPool2d(_Module, nn.MaxPool2d):
    """`torch.nn.MaxPool2d`: the same arguments and defaults."""

    def forward(self, input: Tensor) -> Tensor | Any:
        return max_pool2d(input, *_of(self), prefer=self.prefer)


class MaxPool3d(_Module, nn.MaxPool3d):
    """`torch.nn.MaxPool3d`: the same arguments and defaults."""

    def forward(self, input: Tensor) -> Tensor | Any:
        return max_pool3d(input, *_of(self), prefer=self.prefer)


_1D.modules[nn.MaxPool1d] = MaxPool1d
_2D.modules[nn.MaxPool2d] = MaxPool2d
_3D.modules[nn.MaxPool3d] = MaxPool3d
