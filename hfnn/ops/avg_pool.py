"""Average pooling over one, two or three dimensions, windowed and adaptive, which keeps nothing.

    y_o = 1 / n_o * sum of x over window o,    dx_i = sum of dy_o / n_o over the windows o that hold i

torch's own kernels run in both directions, so results are bitwise equal. torch keeps x, although its backward reads
only sizes and strides. Here only these are kept, and backward gets uninitialised memory instead of x.
"""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hfnn.core.context import autocasting, compiling, context, is_plain
from hfnn.core.kernel import PREFERENCES, WORTH_ELEMENTS, Op, forced
from hfnn.core.node import Function
from hfnn.ops.flat import flat, link_before, links, zeros_or_none

aten = torch.ops.aten
_avg_pool1d, _avg_pool2d, _avg_pool3d = torch.avg_pool1d, torch._C._nn.avg_pool2d, torch._C._nn.avg_pool3d
_FLOORS = dict(zip(PREFERENCES, (WORTH_ELEMENTS, 0, float("inf")), strict=True))  # it is not faster, it only keeps less


def takes(x, prefer: str) -> bool:
    """Whether a room that runs torch's own kernels, but keeps less than torch, is worth its host time for x.

    It is not if nothing is kept because no gradient is required.
    """
    if compiling():
        return False
    if not is_plain(x) or x.numel() < _FLOORS[prefer] or forced() == "torch":
        return False
    return x.requires_grad and torch.is_grad_enabled() and x.is_floating_point() and context(x) is None


class Keeps:
    """Shape, strides and dtype of a tensor, to make a similar one."""

    def __init__(self, x):
        self.shape, self.strides, self.dtype, self.device = x.shape, x.stride(), x.dtype, x.device
        if not x.is_contiguous():  # dense strides in the order of x's
            self.strides = torch.empty_like(x, device="meta").stride()

    def empty(self, dtype):
        return torch.empty_strided(self.shape, self.strides, dtype=dtype, device=self.device)


class _AvgPool(Function):
    @staticmethod
    def forward(ctx, x, before, forward, backward, arguments):
        own, link = links(x, before)
        ctx.save_for_backward(link)
        ctx.set_materialize_grads(False)
        ctx.how = Keeps(x), backward
        return forward(x, *arguments), own

    @staticmethod
    def backward(ctx, dy, dlink):
        (link,) = ctx.saved_tensors
        like, backward = ctx.how
        if dy is None:
            return zeros_or_none(dlink, like.shape), *(None,) * 4
        # torch's op, which is differentiable in dy if needed. Autocast may have changed the dtype.
        return flat(backward(dy, like.empty(dy.dtype)).to(like.dtype), link), *(None,) * 4


def _windowed(x, forward, backward, arguments):
    # A single number must be in a list: forward's binding accepts a plain number, backward's does not.
    lists = [list(n) if isinstance(n, (tuple, list)) else [n] for n in arguments[:3]]

    def gradient(dy, x):
        return backward(dy, x, *lists, *arguments[3:])

    return _AvgPool.apply(x, link_before(x), forward, gradient, arguments)[0]


def avg_pool1d(
    input: Tensor,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    *,
    prefer: str = "auto",
) -> Tensor:
    """`torch.nn.functional.avg_pool1d`, keeping nothing. Raises what torch raises.

    Args:
        input: (N, C, L) or (C, L).
        kernel_size: Of the windows.
        stride: Of the windows; None: kernel_size.
        padding: Zeros at each end.
        ceil_mode: Whether windows may reach beyond the end.
        count_include_pad: Whether padding counts as elements of a window.
    PREFER
    """
    stride = () if stride is None else stride
    if not takes(input, prefer):
        return _avg_pool1d(input, kernel_size, stride, padding, ceil_mode, count_include_pad)
    how = tuple(map(_number, (kernel_size, stride, padding)))
    if input.dim() not in (2, 3) or None in how:
        return torch.avg_pool1d(input, kernel_size, stride, padding, ceil_mode, count_include_pad)
    # As torch does it, by a height of 1.
    window, step, pad = how
    how = ((1, window), step and (1, step), (0, pad), ceil_mode, count_include_pad, None)
    return _windowed(input.unsqueeze(-2), _avg_pool2d, aten.avg_pool2d_backward.default, how).squeeze(-2)


def _number(given):
    """An argument of one dimension as a number; () if absent; None if torch must handle it."""
    if isinstance(given, (tuple, list)) and len(given) <= 1:
        given = given[0] if given else ()
    return given if given == () or type(given) is int else None


def avg_pool2d(
    input: Tensor,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
    *,
    prefer: str = "auto",
) -> Tensor:
    """`torch.nn.functional.avg_pool2d`, keeping nothing. Raises what torch raises.

    Args:
        input: (N, C, H, W) or (C, H, W).
        kernel_size: Of the windows.
        stride: Of the windows; None: kernel_size.
        padding: Zeros at each end.
        ceil_mode: Whether windows may reach beyond the end.
        count_include_pad: Whether padding counts as elements of a window.
        divisor_override: Divides the sums instead of the number of elements.
        prefer: "auto", "memory" or "speed", as in `hfnn.convert`.

    >>> hfnn.functional.avg_pool2d(torch.arange(16.0).view(1, 1, 4, 4), 2)
    tensor([[[[ 2.5000,  4.5000],
              [10.5000, 12.5000]]]])
    """
    stride = () if stride is None else stride
    if not takes(input, prefer):
        return _avg_pool2d(input, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override)
    how = kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override
    return _windowed(input, _avg_pool2d, aten.avg_pool2d_backward.default, how)


def avg_pool3d(
    input: Tensor,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
    *,
    prefer: str = "auto",
) -> Tensor:
    """`torch.nn.functional.avg_pool3d`, keeping nothing. Raises what torch raises.

    Args:
        input: (N, C, D, H, W) or (C, D, H, W).
        kernel_size: Of the windows.
        stride: Of the windows; None: kernel_size.
        padding: Zeros at each end.
        ceil_mode: Whether windows may reach beyond the end.
        count_include_pad: Whether padding counts as elements of a window.
        divisor_override: Divides the sums instead of the number of elements.
    PREFER
    """
    stride = () if stride is None else stride
    if not takes(input, prefer):
        return _avg_pool3d(input, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override)
    how = kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override
    return _windowed(input, _avg_pool3d, aten.avg_pool3d_backward.default, how)


def adaptive_avg_pool1d(
    input: Tensor, output_size: int | Sequence[int | None] | None, *, prefer: str = "auto"
) -> Tensor:
    """`torch.nn.functional.adaptive_avg_pool1d`, keeping nothing. Raises what torch raises.

    Args:
        input: (N, C, L) or (C, L).
        output_size: Of the last dimension; None: as in input.
    PREFER
    """
    if takes(input, prefer) and input.dim() in (2, 3):
        size = output_size[0] if isinstance(output_size, (tuple, list)) and len(output_size) == 1 else output_size
        if type(size) is int:
            y = _adaptive(input.unsqueeze(-2), (1, size), aten._adaptive_avg_pool2d, aten._adaptive_avg_pool2d_backward)
            if y is not None:
                return y.squeeze(-2)
    return torch.adaptive_avg_pool1d(input, output_size)


def adaptive_avg_pool2d(
    input: Tensor, output_size: int | Sequence[int | None] | None, *, prefer: str = "auto"
) -> Tensor:
    """`torch.nn.functional.adaptive_avg_pool2d`, keeping nothing. Raises what torch raises.

    Args:
        input: (N, C, H, W) or (C, H, W).
        output_size: Of the last 2 dimensions; None: as in input.
    PREFER
    """
    if takes(input, prefer):
        sizes = sizes_of(input, output_size, 2)
        y = _adaptive(input, sizes, aten._adaptive_avg_pool2d, aten._adaptive_avg_pool2d_backward)
        if y is not None:
            return y
    return nn.functional.adaptive_avg_pool2d(input, output_size)


def adaptive_avg_pool3d(
    input: Tensor, output_size: int | Sequence[int | None] | None, *, prefer: str = "auto"
) -> Tensor:
    """`torch.nn.functional.adaptive_avg_pool3d`, keeping nothing. Raises what torch raises.

    Args:
        input: (N, C, D, H, W) or (C, D, H, W).
        output_size: Of the last 3 dimensions; None: as in input.
    PREFER
    """
    if takes(input, prefer):
        sizes = sizes_of(input, output_size, 3)
        y = _adaptive(input, sizes, aten._adaptive_avg_pool3d, aten._adaptive_avg_pool3d_backward)
        if y is not None:
            return y
    return nn.functional.adaptive_avg_pool3d(input, output_size)


def sizes_of(x, output_size, dims) -> tuple | None:
    """Sizes of the output; a None within output_size means the size of x. Returns None if torch must handle it."""
    if x.dim() not in (dims + 1, dims + 2) or output_size is None:
        return None
    given = tuple(output_size) if isinstance(output_size, (tuple, list)) else (output_size,) * dims
    if len(given) != dims or not all(n is None or type(n) is int for n in given):
        return None
    return tuple(size if n is None else n for n, size in zip(given, x.shape[-dims:], strict=True))


def _adaptive(x, sizes, forward, backward):
    """None if torch's own op must run. For an output of one element it computes a mean, which keeps nothing either."""
    if sizes is None or min(sizes) < 1 or max(sizes) == 1:
        return None
    if len(sizes) == 3 and autocasting(x):
        return None  # the CPU's autocast widens only adaptive_avg_pool3d under this name
    return _AvgPool.apply(x, link_before(x), forward.default, backward.default, (sizes,))[0]


class AvgPool1d(nn.AvgPool1d):
    """`torch.nn.AvgPool1d`: the same arguments and defaults. `prefer` is set by `hfnn.convert`.

    Args:
        kernel_size: Of the windows.
        stride: Of the windows.
        padding: Zeros at each end.
        ceil_mode: Whether windows may reach beyond the end.
        count_include_pad: Whether padding counts as elements of a window.
    """

    prefer = "auto"

    def forward(self, input: Tensor) -> Tensor:
        return avg_pool1d(
            input, self.kernel_size, self.stride, self.padding, self.ceil_mode, self.count_include_pad,
            prefer=self.prefer
        )  # fmt: skip


class AvgPool2d(nn.AvgPool2d):
    """`torch.nn.AvgPool2d`: the same arguments and defaults. `prefer` is set by `hfnn.convert`.

    Args:
        kernel_size: Of the windows.
        stride: Of the windows.
        padding: Zeros at each end.
        ceil_mode: Whether windows may reach beyond the end.
        count_include_pad: Whether padding counts as elements of a window.
        divisor_override: Divides the sums instead of the number of elements.
    """

    prefer = "auto"

    def forward(self, input: Tensor) -> Tensor:
        return avg_pool2d(
            input, self.kernel_size, self.stride, self.padding, self.ceil_mode, self.count_include_pad,
            self.divisor_override, prefer=self.prefer
        )  # fmt: skip


class AvgPool3d(nn.AvgPool3d):
    """`torch.nn.AvgPool3d`: the same arguments and defaults. `prefer` is set by `hfnn.convert`.

    Args:
        kernel_size: Of the windows.
        stride: Of the windows.
        padding: Zeros at each end.
        ceil_mode: Whether windows may reach beyond the end.
        count_include_pad: Whether padding counts as elements of a window.
        divisor_override: Divides the sums instead of the number of elements.
    """

    prefer = "auto"

    def forward(self, input: Tensor) -> Tensor:
        return avg_pool3d(
            input, self.kernel_size, self.stride, self.padding, self.ceil_mode, self.count_include_pad,
            self.divisor_override, prefer=self.prefer
        )  # fmt: skip


class AdaptiveAvgPool1d(nn.AdaptiveAvgPool1d):
    """`torch.nn.AdaptiveAvgPool1d`: the same arguments. `prefer` is set by `hfnn.convert`.

    Args:
        output_size: Of the pooled dimensions; None: as in the input.
    """

    prefer = "auto"

    def forward(self, input: Tensor) -> Tensor:
        return adaptive_avg_pool1d(input, self.output_size, prefer=self.prefer)


class AdaptiveAvgPool2d(nn.AdaptiveAvgPool2d):
    """`torch.nn.AdaptiveAvgPool2d`: the same arguments. `prefer` is set by `hfnn.convert`.

    Args:
        output_size: Of the pooled dimensions; None: as in the input.
    """

    prefer = "auto"

    def forward(self, input: Tensor) -> Tensor:
        return adaptive_avg_pool2d(input, self.output_size, prefer=self.prefer)


class AdaptiveAvgPool3d(nn.AdaptiveAvgPool3d):
    """`torch.nn.AdaptiveAvgPool3d`: the same arguments. `prefer` is set by `hfnn.convert`.

    Args:
        output_size: Of the pooled dimensions; None: as in the input.
    """

    prefer = "auto"

    def forward(self, input: Tensor) -> Tensor:
        return adaptive_avg_pool3d(input, self.output_size, prefer=self.prefer)


def _sample(dims, given, case, dtype, device, generator=None):
    shape = (*(1,) * (dims + 1 - len(case)), *case)
    return (torch.randn(shape, generator=generator).to(dtype).to(device), given), {}


def _op(name, dims, given, module, room) -> Op:
    """No kernels of its own: torch's run. `convert` finds the module here."""
    torchs = getattr(nn.functional, name)
    op = Op(
        name, torchs, torchs, (), functools.partial(_sample, dims, given), ((3, 769),), recipe=False, like_input=False
    )
    op.modules[module] = room
    return op


OPS = (
    _op("avg_pool1d", 1, 3, nn.AvgPool1d, AvgPool1d),
    _op("avg_pool2d", 2, (1, 3), nn.AvgPool2d, AvgPool2d),
    _op("avg_pool3d", 3, (1, 1, 3), nn.AvgPool3d, AvgPool3d),
    _op("adaptive_avg_pool1d", 1, 3, nn.AdaptiveAvgPool1d, AdaptiveAvgPool1d),
    _op("adaptive_avg_pool2d", 2, 3, nn.AdaptiveAvgPool2d, AdaptiveAvgPool2d),
    _op("adaptive_avg_pool3d", 3, 3, nn.AdaptiveAvgPool3d, AdaptiveAvgPool3d),
)
