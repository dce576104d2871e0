"""Activations of tensors that can be built again, by torch's ops: nothing is kept.

Such a tensor's node is kept in place of the tensor, so the result can be built again, too, and needs no bits. torch's
in-place ops do the same here: what they write over is not needed, because it is built from what its own node keeps.
"""

import torch
from torch import Tensor

from hfnn.core.context import on_gpu
from hfnn.core.kernel import forced
from hfnn.core.node import below, carries, described, double_backward

_aten, _nn = torch.ops.aten, torch._C._nn
# By name: torch's op, the same in place, and dx of (dy, x, ...); each takes the op's numbers after the tensors. relu's
# gradient has the layout of its result.
_FORMS = {
    "relu": (
        torch.relu, torch.relu_,
        lambda dy, x: _aten.threshold_backward(dy, x if x.is_contiguous() else torch.relu(x), 0),
    ),
    "leaky_relu": (
        _nn.leaky_relu, _nn.leaky_relu_, lambda dy, x, slope: _aten.leaky_relu_backward(dy, x, slope, False)
    ),
    "relu6": (_nn.relu6, _nn.relu6_, lambda dy, x: _aten.hardtanh_backward(dy, x, 0, 6)),
    "hardtanh": (_nn.hardtanh, _nn.hardtanh_, _aten.hardtanh_backward),
    "silu": (_nn.silu, _nn.silu_, _aten.silu_backward),
    "hardswish": (_nn.hardswish, _nn.hardswish_, _aten.hardswish_backward),
}  # fmt: skip
BEHIND = tuple(_FORMS)
# From which size on, on the CPU and on a GPU: below, host time decides, or a convolution keeps the result in any case.
BEHIND_ELEMENTS = 1 << 18, 1 << 23


def _build(how, x):
    _, name, numbers = how
    return _FORMS[name][0](x, *numbers)


def _gradients(dy, needs, how, x):
    _, name, numbers = how
    return (_FORMS[name][2](dy, x, *numbers),)


def _second(dy, needs, how, x):
    return double_backward(lambda x: _build(how, x), (x,), needs, dy)


_NODE = described("_Behind", "x", _build, _gradients, _second)


def pays(x: Tensor, prefer: str) -> bool:
    """Whether to build x again in backward, if possible, in place of what its reader would keep."""
    always = prefer == "memory" or forced() is not None
    large = always or (prefer == "auto" and x.numel() >= BEHIND_ELEMENTS[on_gpu(x)])
    return large and torch.is_grad_enabled() and x.requires_grad and carries(x)


def behind(name: str, x: Tensor, arguments: tuple, prefer: str) -> Tensor | None:
    """The result for torch's arguments after x, the last of which is `inplace`; None if it is another op, x cannot be
    built again, or torch's own op must run, or raise."""
    if name not in _FORMS or not pays(x, prefer):
        return None
    *numbers, inplace = arguments
    how = None, name, tuple(numbers)
    if not inplace:
        return _NODE(below(_build, how, x), how, x)
    if x._base is not None or (name == "leaky_relu" and not numbers[0] > 0):  # its gradient is that of its result
        return None
    return _NODE(lambda x: _FORMS[name][1](x, *numbers), how, x)
