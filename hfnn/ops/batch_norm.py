"""Batch normalisation, optionally followed by a sum and an activation.

    y = f(z),    z = (x - mean) * rstd * weight + bias + residual,    rstd = 1 / sqrt(var + eps)

Ioffe and Szegedy, "Batch Normalization: Accelerating Deep Network Training by Reducing Internal Covariate Shift", ICML
2015. Forward reads x once for its statistics, and writes y; with f and the sum it still only writes y. Backward reads
its inputs twice. f' is computed from x, or with a residual, which is not kept, from one bit per element: f must then be
piecewise linear.

Names end in their shape: C channels, PCS as kernels take x (csrc/batch_norm.h): planes, channels, the elements of a
plane; with channels last in memory, S is 1.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hfnn.core import bits, native
from hfnn.core.context import compiling, is_plain
from hfnn.core.kernel import Op, kernels
from hfnn.core.node import double_backward
from hfnn.ops import piecewise, smooth
from hfnn.ops.flat import flat
from hfnn.ops.layout import LAST

# The activations, by their numbers in the kernels; those up to PIECEWISE may follow a sum.
ACTIVATIONS = None, "relu", "leaky_relu", "relu6", "silu", "hardswish"
PIECEWISE = ACTIVATIONS.index("relu6")
LEAST_PLANE = 128  # elements
LEAST_LAST = 1 << 20  # elements, with channels last


def reference(
    x, running_mean=None, running_var=None, weight=None, bias=None, training=False, momentum=0.1, eps=1e-5,
    residual=None, act=None, negative_slope=0.01
):  # fmt: skip
    """The definition, in the dtype of x; the running statistics do not change."""
    dims, shape = (0, *range(2, x.dim())), (-1, *(1,) * (x.dim() - 2))
    if training:
        centred = x - x.mean(dims, keepdim=True)
        var = centred.square().mean(dims, keepdim=True)
    else:
        centred, var = x - running_mean.view(shape), running_var.view(shape)
    y = centred * torch.rsqrt(var + eps)
    y = y if weight is None else y * weight.view(shape)
    y = y if bias is None else y + bias.view(shape)
    return _activated(y if residual is None else y + residual, act, negative_slope)


def _activated(z, act, negative_slope):
    if act is None:
        return z
    return F.leaky_relu(z, negative_slope) if act == "leaky_relu" else getattr(F, act)(z)


def _in_torch(*args, residual=None, act=None, negative_slope=0.01, **how):
    """torch's own ops, for arguments of `batch_norm_act`."""
    args, behind = args[:8], args[8:]
    residual, act, negative_slope = *behind, *(residual, act, negative_slope)[len(behind) :]
    z = F.batch_norm(*args, **how)
    return _activated(z if residual is None else z + residual, act, negative_slope)


def sample(case, dtype, device, generator=None):
    """Arguments of a case: (N, C, ...), optionally with a suffix: "relu", "add_relu", "silu_last", ... .

    "last", "first": where the channels are in memory. Shapes are extended to two dimensions, and to a batch of two.
    """
    form = case[-1] if isinstance(case[-1], str) else ""
    shape, words = case[: len(case) - bool(form)], form.split("_")
    shape = shape if len(shape) > 1 else (2, *shape)
    shape = (2, *shape[1:]) if math.prod(shape) == shape[1] else shape
    draw = lambda *size: torch.randn(size, generator=generator).to(dtype).to(device)  # noqa: E731
    x, residual = draw(*shape), draw(*shape) if "add" in words else None
    if "last" in words and len(shape) in LAST:
        x, residual = (t if t is None else t.to(memory_format=LAST[len(shape)]) for t in (x, residual))
    args = x, None, None, draw(shape[1]), draw(shape[1]), True, 0.1, 1e-5
    act = "_".join(word for word in words if word not in ("add", "first", "last"))
    return (*args, residual, act) if act else args, {}


def _op(name, torchs, floor, cases, bench, **more):
    return Op(
        name, reference, torchs, kernels=kernels("batch_norm", floor, cuda=1 << 22), sample=sample,
        cases=cases, bench=bench, traffic=(3, 5), saves=False, sums=True, **more,
    )  # fmt: skip


# The shapes of ResNet-50.
_BENCH = (128, 64, 112, 112), (128, 256, 56, 56), (128, 512, 28, 28), (128, 1024, 14, 14), (128, 2048, 7, 7)
OP = _op(
    "batch_norm",
    lambda *args, **how: F.batch_norm(*args, **how),
    1 << 18,
    ((4, 3), (2, 3, 769), (3, 5, 6, 7, "last"), (64, 12, 5), (2, 3, 40, 41)),
    tuple((*shape, form) for shape in _BENCH for form in ("last", "first")),
    small=(3, 5),
)
ACT = _op(
    "batch_norm_act",
    _in_torch,
    1 << 18,
    (
        (4, 3, "relu"), (2, 3, 769, "add_relu"), (2, 3, 769, "silu"), (3, 8, 6, 7, "add_relu_last"),
        (3, 5, 6, 7, "relu_last"), (3, 5, 6, 7, "hardswish_last"), (4, 6, 5, "leaky_relu"), (4, 6, 5, "add_leaky_relu"),
        (4, 6, 5, "relu6"), (4, 6, 5, "add_relu6"),
    ),
    tuple(
        (*shape, form) for shape in _BENCH for form in ("relu_last", "add_relu_last", "silu_last", "relu", "add_relu")
    ),
    small=(3, 5, "silu"),
    recipe=False,  # where there is a residual, with which a case begins
)  # fmt: skip
OPS = OP, ACT


def _planes(x, layout):
    """x in that format as (P, C, S): a view of its memory."""
    if x is None:
        return None
    if layout is torch.contiguous_format:
        return x.view(*x.shape[:2], math.prod(x.shape[2:]))
    channels = x.shape[1]
    return x.as_strided((x.numel() // channels, channels, 1), (channels, 1, 1))


def _mask(packed, x, layout):
    """The flags of x, of its shape."""
    x_PCS = _planes(x, layout)
    planes, channels, size = x_PCS.shape
    if size == 1:
        found = bits.unpack(packed, x_PCS.shape)
    else:
        found = bits.unpack(packed.view(-1), (planes, channels, 8 * packed.shape[-1]))[..., :size]
    return (
        found.reshape(x.shape)
        if layout is torch.contiguous_format
        else torch.empty_like(x, dtype=torch.bool).copy_(found.view(x.shape[0], *x.shape[2:], channels).movedim(-1, 1))
    )


def _formula(how, out_dtype, act=True):
    """z, or y, in torch's ops in the widest dtype at hand, returning what the kernel returned."""
    training, _, eps, kind, slope = how

    def formula(x, weight, bias, mean, rstd):
        wide, channels = torch.promote_types(x.dtype, torch.float32), (-1, *(1,) * (x.dim() - 2))
        weight, bias = (None if t is None else t.to(wide) for t in (weight, bias))
        if training:
            z = F.batch_norm(x.to(wide), None, None, weight, bias, True, 0.0, eps)
        else:
            z = (x.to(wide) - mean.view(channels)) * rstd.view(channels)
            z = z if weight is None else z * weight.view(channels)
            z = z if bias is None else z + bias.view(channels)
        return (_activated(z, ACTIVATIONS[kind], slope) if act else z).to(out_dtype)

    return formula


def _second(dy, needs, x, weight, bias, mean, rstd, flags, how, last, bias_dtype, residual):
    """The gradients by differentiable ops. last: whether kernels saw channels last; bias_dtype: if there is a bias;
    residual: a link to it (hfnn/ops/flat.py), or None."""
    kind, slope = how[3:]
    if bias is None and bias_dtype is not None:  # any value will do if forward did not keep it
        bias = x.new_zeros(x.shape[1], dtype=bias_dtype)
    if flags is not None:
        layout = LAST[x.dim()] if last else torch.contiguous_format
        outside = slope if ACTIVATIONS[kind] == "leaky_relu" else 0.0
        dy = torch.where(_mask(flags, x.contiguous(memory_format=layout), layout), dy, dy * outside)
        # The flags depend on all that was added up, with a derivative of 0.
        dy = flat(flat(dy, _formula(how, dy.dtype, False)(x, weight, bias, mean, rstd)), residual)
    formula = _formula(how, dy.dtype, flags is None)
    return *double_backward(lambda *given: formula(*given, mean, rstd), (x, weight, bias), needs[:3], dy), (
        dy if needs[3] else None
    )


# For either op, by its size limits. Where no kernel is worthwhile, C++ runs torch's ops. _APART: limits of activations.
_BEHIND = {op.name: op.floors for op in (*piecewise.OPS, *smooth.OPS)}
_APART = [OP.floors, *(_BEHIND[act] for act in ACTIVATIONS[1:])]
_native, _native_act = (
    native.call("batch_norm", op, _second, PIECEWISE, LEAST_PLANE, LEAST_LAST, _APART) for op in OPS
)


def batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *,
    prefer: str = "auto",
) -> Tensor:
    """`torch.nn.functional.batch_norm`, whose result its consumer can rebuild. Statistics are float32.

    The result has the dtype of input. Raises what torch raises.

    Args:
        input: (N, C, ...), contiguous or channels last, which the result keeps.
        running_mean: (C,), float32 or of the input's dtype, or None.
        running_var: Like running_mean.
        weight: Like running_mean.
        bias: Like running_mean.
        training: Whether the batch's statistics are used, towards which running_mean and running_var then move.
        momentum: By which part they move.
        eps: Added to the variance.
        prefer: "auto", "memory" or "speed", as in `hfnn.convert`.

    >>> hfnn.functional.batch_norm(torch.tensor([[1.0], [3.0]]), None, None, training=True)
    tensor([[-1.0000],
            [ 1.0000]])
    """
    of_x = running_mean, running_var, weight, bias, training, momentum, eps
    y = None if compiling() else _native(input, *of_x, None, 0, 0.0, prefer)
    if y is NotImplemented:
        y = OP.left(input, weight, bias, out=input.dtype, prefer=prefer)
    return F.batch_norm(input, *of_x) if y is None else y


def batch_norm_act(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    residual: Tensor | None = None,
    act: str | None = None,
    negative_slope: float = 0.01,
    *,
    prefer: str = "auto",
) -> Tensor:
    """`act(batch_norm(input, ...) + residual)` in one pass after the statistics.

    Arguments as of `batch_norm`, and: residual of input's shape and dtype, or None; act: "relu", "leaky_relu" (with
    `negative_slope`), "relu6", "silu", "hardswish" or None. Input and the statistics are kept for backward. With a
    residual, which is not kept, one bit per element is kept too, and silu and hardswish run separately. The sum and act
    work in float32, and the result is rounded once. Raises ValueError for another `act`, else what torch raises.
    """
    if act not in ACTIVATIONS:
        raise ValueError(f"act={act!r}: choose one of {', '.join(map(repr, ACTIVATIONS))}")
    of_x = running_mean, running_var, weight, bias, training, momentum, eps
    y = fused(input, *of_x, residual, act, negative_slope, prefer)
    if y is not None:
        return y
    if residual is None:
        return _in_torch(input, *of_x, residual, act, negative_slope)
    return _activated(batch_norm(input, *of_x, prefer=prefer) + residual, act, negative_slope)


def fused(x, running_mean, running_var, weight, bias, training, momentum, eps, residual, act, negative_slope, prefer):
    """`batch_norm_act` in one call, or None if a norm, a sum and an activation must run separately."""
    of_x = running_mean, running_var, weight, bias, training, momentum, eps, residual, ACTIVATIONS.index(act)
    y = None if compiling() else _native_act(x, *of_x, negative_slope, prefer)
    return ACT.left(x, weight, bias, out=x.dtype, prefer=prefer) if y is NotImplemented else y


def arguments(module: nn.Module) -> tuple:
    """The arguments that torch's module passes besides the input; counts a batch, as its forward does."""
    factor = 0.0 if module.momentum is None else module.momentum
    if module.training and module.track_running_stats and module.num_batches_tracked is not None:
        module.num_batches_tracked.add_(1)
        if module.momentum is None:
            factor = 1.0 / float(module.num_batches_tracked)
    mean, var = module.running_mean, module.running_var
    training = module.training or (mean is None and var is None)
    if module.training and not module.track_running_stats:
        mean = var = None
    return mean, var, module.weight, module.bias, training, factor, module.eps


class _Module:
    """Common base of the three modules. `prefer` is set by `hfnn.convert`."""

    prefer = "auto"

    def forward(self, input: Tensor) -> Tensor:
        if compiling() or not is_plain(input):
            return nn.modules.batchnorm._BatchNorm.forward(self, input)
        self._check_input_dim(input)
        return batch_norm(input, *arguments(self), prefer=self.prefer)


class BatchNorm1d(_Module, nn.BatchNorm1d):
    """`torch.nn.BatchNorm1d`: the same arguments, defaults and state dict."""


class BatchNorm2d(_Module, nn.BatchNorm2d):
    """`torch.nn.BatchNorm2d`: the same arguments, defaults and state dict."""


class BatchNorm3d(_Module, nn.BatchNorm3d):
    """`torch.nn.BatchNorm3d`: the same arguments, defaults and state dict."""


OP.modules.update({nn.BatchNorm1d: BatchNorm1d, nn.BatchNorm2d: BatchNorm2d, nn.BatchNorm3d: BatchNorm3d})
