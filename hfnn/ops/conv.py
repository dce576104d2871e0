"""Convolutions and transposed convolutions that keep a recipe of their input instead of the input.

    y[n, o] = b[o] + sum of w[o, c] * x[n, c] over the channels c of o's group          (*: w slides over x)

torch's own kernels run in both directions, on the operands and in the layouts that torch uses. So results and gradients
are bitwise equal to torch's. Only what is kept for backward differs. If the input has a recipe (hfnn/core/node.py),
its sources are kept instead. If the weight is frozen, nothing of the input is kept, because torch's backward then reads
only its sizes and strides. Under autocast, the weight's cast is made again in backward instead of kept.

The node exists only in C++ (csrc/autograd/conv.cpp). Without it the convolution is torch's. On a GPU it is also torch's
for inputs of less than 2^23 elements, except with prefer="memory", because rebuilding costs host time that a small step
would wait for.
"""

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from hfnn.core import native
from hfnn.core.context import compiling
from hfnn.core.kernel import Op
from hfnn.ops.linear import FLOORS

# Dynamo finds torch's functions by these names.
_conv1d, _conv2d, _conv3d = (native.call("convolution", dims, False, FLOORS) for dims in (1, 2, 3))
_conv_transpose1d, _conv_transpose2d, _conv_transpose3d = (
    native.call("convolution", dims, True, FLOORS) for dims in (1, 2, 3)
)


def conv1d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: str | int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    *,
    prefer: str = "auto",
) -> Tensor:
    """`torch.nn.functional.conv1d`, keeping a recipe of its input where the input has one.

    Raises what torch raises.

    Args:
        input: (N, C, L).
        weight: (O, C / groups, K).
        bias: (O,) or None.
        stride: Of the windows.
        padding: Zeros at each end, or "same" or "valid".
        dilation: The step between elements of a window.
        groups: Divides both numbers of channels.
        prefer: "auto", "memory" or "speed", as in `hfnn.convert`: from which size casts are not kept under autocast.
    """
    y = NotImplemented if compiling() else _conv1d(input, weight, bias, stride, padding, dilation, 0, groups, prefer)
    return torch.conv1d(input, weight, bias, stride, padding, dilation, groups) if y is NotImplemented else y


def conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: str | int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    *,
    prefer: str = "auto",
) -> Tensor:
    """`torch.nn.functional.conv2d`, keeping a recipe of its input where the input has one.

    Raises what torch raises.

    Args:
        input: (N, C, H, W).
        weight: (O, C / groups, K, K').
        bias: (O,) or None.
        stride: Of the windows.
        padding: Zeros at each end, or "same" or "valid".
        dilation: The step between elements of a window.
        groups: Divides both numbers of channels.
        prefer: "auto", "memory" or "speed", as in `hfnn.convert`: from which size casts are not kept under autocast.

    >>> hfnn.functional.conv2d(torch.ones(1, 1, 3, 3), torch.ones(1, 1, 2, 2))
    tensor([[[[4., 4.],
              [4., 4.]]]])
    """
    y = NotImplemented if compiling() else _conv2d(input, weight, bias, stride, padding, dilation, 0, groups, prefer)
    return torch.conv2d(input, weight, bias, stride, padding, dilation, groups) if y is NotImplemented else y


def conv3d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: str | int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    *,
    prefer: str = "auto",
) -> Tensor:
    """`torch.nn.functional.conv3d`, keeping a recipe of its input where the input has one.

    Raises what torch raises.

    Args:
        input: (N, C, D, H, W).
        weight: (O, C / groups, K, K', K'').
        bias: (O,) or None.
        stride: Of the windows.
        padding: Zeros at each end, or "same" or "valid".
        dilation: The step between elements of a window.
        groups: Divides both numbers of channels.
        prefer: "auto", "memory" or "speed", as in `hfnn.convert`: from which size casts are not kept under autocast.
    """
    y = NotImplemented if compiling() else _conv3d(input, weight, bias, stride, padding, dilation, 0, groups, prefer)
    return torch.conv3d(input, weight, bias, stride, padding, dilation, groups) if y is NotImplemented else y


def conv_transpose1d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    output_padding: int | Sequence[int] = 0,
    groups: int = 1,
    dilation: int | Sequence[int] = 1,
    *,
    prefer: str = "auto",
) -> Tensor:
    """`torch.nn.functional.conv_transpose1d`, keeping a recipe of its input where the input has one.

    Raises what torch raises.

    Args:
        input: (N, C, L).
        weight: (C, O / groups, K).
        bias: (O,) or None.
        stride: Of the windows.
        padding: Zeros at each end that the convolution had.
        output_padding: Added to the size of the result at one end.
        dilation: The step between elements of a window.
        groups: Divides both numbers of channels.
        prefer: "auto", "memory" or "speed", as in `hfnn.convert`: from which size casts are not kept under autocast.
    """
    y = NotImplemented
    if not compiling():
        y = _conv_transpose1d(input, weight, bias, stride, padding, dilation, output_padding, groups, prefer)
    if y is not NotImplemented:
        return y
    return torch.conv_transpose1d(input, weight, bias, stride, padding, output_padding, groups, dilation)


def conv_transpose2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    output_padding: int | Sequence[int] = 0,
    groups: int = 1,
    dilation: int | Sequence[int] = 1,
    *,
    prefer: str = "auto",
) -> Tensor:
    """`torch.nn.functional.conv_transpose2d`, keeping a recipe of its input where the input has one.

    Raises what torch raises.

    Args:
        input: (N, C, H, W).
        weight: (C, O / groups, K, K').
        bias: (O,) or None.
        stride: Of the windows.
        padding: Zeros at each end that the convolution had.
        output_padding: Added to the size of the result at one end.
        dilation: The step between elements of a window.
        groups: Divides both numbers of channels.
        prefer: "auto", "memory" or "speed", as in `hfnn.convert`: from which size casts are not kept under autocast.
    """
    y = NotImplemented
    if not compiling():
        y = _conv_transpose2d(input, weight, bias, stride, padding, dilation, output_padding, groups, prefer)
    if y is not NotImplemented:
        return y
    return torch.conv_transpose2d(input, weight, bias, stride, padding, output_padding, groups, dilation)


def conv_transpose3d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    output_padding: int | Sequence[int] = 0,
    groups: int = 1,
    dilation: int | Sequence[int] = 1,
    *,
    prefer: str = "auto",
) -> Tensor:
    """`torch.nn.functional.conv_transpose3d`, keeping a recipe of its input where the input has one.

    Raises what torch raises.

    Args:
        input: (N, C, D, H, W).
        weight: (C, O / groups, K, K', K'').
        bias: (O,) or None.
        stride: Of the windows.
        padding: Zeros at each end that the convolution had.
        output_padding: Added to the size of the result at one end.
        dilation: The step between elements of a window.
        groups: Divides both numbers of channels.
        prefer: "auto", "memory" or "speed", as in `hfnn.convert`: from which size casts are not kept under autocast.
    """
    y = NotImplemented
    if not compiling():
        y = _conv_transpose3d(input, weight, bias, stride, padding, dilation, output_padding, groups, prefer)
    if y is not NotImplemented:
        return y
    return torch.conv_transpose3d(input, weight, bias, stride, padding, output_padding, groups, dilation)


def _forward(call: Callable, base: type) -> Callable:
    """The forward of a module by `call`. torch's runs for other padding modes, and if the instance has another
    `_conv_forward`."""

    @functools.wraps(base.forward)
    def forward(self, input: Tensor) -> Tensor:
        if self.padding_mode != "zeros" or compiling() or "_conv_forward" in self.__dict__:
            return base.forward(self, input)
        # As in the functions, without the call.
        y = call(input, self.weight, self.bias, self.stride, self.padding, self.dilation, 0, self.groups, self.prefer)
        return base.forward(self, input) if y is NotImplemented else y

    return forward


def _transposed(call: Callable, base: type) -> Callable:
    """As `_forward`. torch's forward also runs if an output size is requested."""

    @functools.wraps(base.forward)
    def forward(self, input: Tensor, output_size: int | Sequence[int | None] | None = None) -> Tensor:
        if output_size is not None or self.padding_mode != "zeros" or compiling() or "_output_padding" in self.__dict__:
            return base.forward(self, input, output_size)
        y = call(
            input, self.weight, self.bias, self.stride, self.padding, self.dilation, self.output_padding, self.groups,
            self.prefer,
        )  # fmt: skip
        return base.forward(self, input) if y is NotImplemented else y

    return forward


class Conv1d(nn.Conv1d):
    """`torch.nn.Conv1d`: the same arguments, defaults and state dict.

    Args:
        in_channels: C of the input.
        out_channels: C of the result.
        kernel_size: Of the windows.
        stride: Of the windows.
        padding: Zeros at each end.
        dilation: The step between elements of a window.
        groups: Divides both numbers of channels.
        bias: Whether there is a bias.
        padding_mode: "zeros"; with others torch's own op runs.
        device: Of the parameters.
        dtype: Of the parameters.
    """

    prefer, forward = "auto", _forward(_conv1d, nn.Conv1d)


class Conv2d(nn.Conv2d):
    """`torch.nn.Conv2d`: the same arguments, defaults and state dict.

    Args:
        in_channels: C of the input.
        out_channels: C of the result.
        kernel_size: Of the windows.
        stride: Of the windows.
        padding: Zeros at each end.
        dilation: The step between elements of a window.
        groups: Divides both numbers of channels.
        bias: Whether there is a bias.
        padding_mode: "zeros"; with others torch's own op runs.
        device: Of the parameters.
        dtype: Of the parameters.
    """

    prefer, forward = "auto", _forward(_conv2d, nn.Conv2d)


class Conv3d(nn.Conv3d):
    """`torch.nn.Conv3d`: the same arguments, defaults and state dict.

    Args:
        in_channels: C of the input.
        out_channels: C of the result.
        kernel_size: Of the windows.
        stride: Of the windows.
        padding: Zeros at each end.
        dilation: The step between elements of a window.
        groups: Divides both numbers of channels.
        bias: Whether there is a bias.
        padding_mode: "zeros"; with others torch's own op runs.
        device: Of the parameters.
        dtype: Of the parameters.
    """

    prefer, forward = "auto", _forward(_conv3d, nn.Conv3d)


class ConvTranspose1d(nn.ConvTranspose1d):
    """`torch.nn.ConvTranspose1d`: the same arguments, defaults and state dict.

    Args:
        in_channels: C of the input.
        out_channels: C of the result.
        kernel_size: Of the windows.
        stride: Of the windows.
        padding: Zeros at each end.
        output_padding: Added to the size of the result at one end.
        groups: Divides both numbers of channels.
        bias: Whether there is a bias.
        dilation: The step between elements of a window.
        padding_mode: "zeros", the only one in torch.
        device: Of the parameters.
        dtype: Of the parameters.
    """

    prefer, forward = "auto", _transposed(_conv_transpose1d, nn.ConvTranspose1d)


class ConvTranspose2d(nn.ConvTranspose2d):
    """`torch.nn.ConvTranspose2d`: the same arguments, defaults and state dict.

    Args:
        in_channels: C of the input.
        out_channels: C of the result.
        kernel_size: Of the windows.
        stride: Of the windows.
        padding: Zeros at each end.
        output_padding: Added to the size of the result at one end.
        groups: Divides both numbers of channels.
        bias: Whether there is a bias.
        dilation: The step between elements of a window.
        padding_mode: "zeros", the only one in torch.
        device: Of the parameters.
        dtype: Of the parameters.
    """

    prefer, forward = "auto", _transposed(_conv_transpose2d, nn.ConvTranspose2d)


class ConvTranspose3d(nn.ConvTranspose3d):
    """`torch.nn.ConvTranspose3d`: the same arguments, defaults and state dict.

    Args:
        in_channels: C of the input.
        out_channels: C of the result.
        kernel_size: Of the windows.
        stride: Of the windows.
        padding: Zeros at each end.
        output_padding: Added to the size of the result at one end.
        groups: Divides both numbers of channels.
        bias: Whether there is a bias.
        dilation: The step between elements of a window.
        padding_mode: "zeros", the only one in torch.
        device: Of the parameters.
        dtype: Of the parameters.
    """

    prefer, forward = "auto", _transposed(_conv_transpose3d, nn.ConvTranspose3d)


def _sample(dims, case, dtype, device, generator=None):
    """x of shape (N, C, ...) and weights for as many output channels, windows of 3."""
    shape = (*(2,) * (dims + 2 - len(case)), *case)
    shapes = shape, (shape[1], shape[1], *(3,) * dims), (shape[1],)
    return (*(torch.randn(s, generator=generator).to(dtype).to(device) for s in shapes), 1, 1), {}


def _op(name, dims, module, room) -> Op:
    """No kernels of its own: torch's run. `convert` finds the module here."""
    torchs = getattr(torch, name)
    op = Op(name, torchs, torchs, (), functools.partial(_sample, dims), ((3, 769),), recipe=False)
    op.modules[module] = room
    return op


OPS = (
    _op("conv1d", 1, nn.Conv1d, Conv1d),
    _op("conv2d", 2, nn.Conv2d, Conv2d),
    _op("conv3d", 3, nn.Conv3d, Conv3d),
    _op("conv_transpose1d", 1, nn.ConvTranspose1d, ConvTranspose1d),
    _op("conv_transpose2d", 2, nn.ConvTranspose2d, ConvTranspose2d),
    _op("conv_transpose3d", 3, nn.ConvTranspose3d, ConvTranspose3d),
)
