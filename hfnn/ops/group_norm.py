"""Group normalisation, optionally followed by an activation.

    y = f(z),    z = (x - mean) * rstd * weight + bias,    rstd = 1 / sqrt(var + eps)

Wu and He, "Group Normalization", ECCV 2018. Mean and variance are computed per group: some neighbouring channels of one
sample. Forward reads x for its statistics and again for y, from the cache if a group fits; with f it still only writes
y. Backward computes f' from x, so only x and the statistics are kept.

Names end in their shape: G groups; NCS as kernels take x (csrc/group_norm.h): samples, channels, elements of each, or
samples, elements, channels where the channels are last in memory.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hfnn.core.context import autocasting, on_gpu
from hfnn.core.kernel import WORTH_ELEMENTS, Op, forced, kernels
from hfnn.core.node import below, described, double_backward, select
from hfnn.ops.batch_norm import ACTIVATIONS, _activated
from hfnn.ops.layer_norm import statistics_dtype
from hfnn.ops.layout import LAST, ambiguous, suggested

LEAST_PLANE = 256  # elements
MOST_GROUPS = 65535  # of all samples together: the second dimension of a grid


def reference(x, num_groups, weight=None, bias=None, eps=1e-5, act=None, negative_slope=0.01):
    """The definition, in the dtype of x."""
    grouped, shape = x.reshape(x.shape[0], num_groups, -1), (-1, *(1,) * (x.dim() - 2))
    centred = grouped - grouped.mean(-1, keepdim=True)
    y = (centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)).view(x.shape)
    y = y if weight is None else y * weight.view(shape)
    return _activated(y if bias is None else y + bias.view(shape), act, negative_slope)


def _in_torch(input, num_groups, weight=None, bias=None, eps=1e-5, act=None, negative_slope=0.01):
    """torch's own ops, for arguments of `group_norm_act`."""
    return _activated(F.group_norm(input, num_groups, weight, bias, eps), act, negative_slope)


def sample(case, dtype, device, generator=None):
    """Arguments of a case: (N, C, ...), optionally with a suffix: "silu", "relu_last", ...; four groups, or 3, 2, 1.

    "last", "first": where the channels are in memory. Shapes are extended to two dimensions, and to a batch of two.
    """
    form = case[-1] if isinstance(case[-1], str) else ""
    shape, words = case[: len(case) - bool(form)], form.split("_")
    shape = shape if len(shape) > 1 else (2, *shape)
    shape = (2, *shape[1:]) if math.prod(shape) == shape[1] else shape
    draw = lambda *size: torch.randn(size, generator=generator).to(dtype).to(device)  # noqa: E731
    x = draw(*shape)
    if "last" in words and len(shape) in LAST:
        x = x.to(memory_format=LAST[len(shape)])
    groups = 32 if shape[1] % 32 == 0 else next(n for n in (4, 3, 2, 1) if shape[1] % n == 0)
    args = x, groups, draw(shape[1]), draw(shape[1]), 1e-5
    act = "_".join(word for word in words if word not in ("first", "last"))
    return (*args, act) if act else args, {}


def _op(name, torchs, floor, cases, bench, **more):
    return Op(
        name, reference, torchs, kernels=kernels("group_norm", floor, cuda=1 << 25), sample=sample,
        cases=cases, bench=bench, probe=(1,), traffic=(3, 5), sums=True, worth=(WORTH_ELEMENTS, 1 << 23), **more,
    )  # fmt: skip


# The shapes of Stable Diffusion 2.1's UNet, with five images, and one of its VAE.
_BENCH = (5, 320, 64, 64), (5, 640, 32, 32), (5, 1280, 16, 16), (5, 2560, 16, 16), (1, 128, 512, 512)
OP = _op(
    "group_norm",
    lambda input, num_groups, *args, **how: F.group_norm(input, num_groups, *args, **how),
    1 << 62,
    ((4, 12), (2, 3, 769), (3, 6, 6, 7), (3, 64, 4, 4), (2, 12, 20, 21)),
    tuple((*shape, form) for shape in _BENCH for form in ("first", "last")),
    small=(3, 12),
)
ACT = _op(
    "group_norm_act",
    _in_torch,
    1 << 19,
    (
        (4, 12, "silu"), (2, 3, 769, "silu"), (3, 6, 6, 7, "silu"), (4, 6, 5, "relu"), (4, 6, 5, 7, "hardswish"),
        (4, 6, 5, "leaky_relu"), (4, 6, 5, "relu6"),
    ),
    tuple((*shape, form) for shape in _BENCH for form in ("silu", "silu_last")),
    small=(3, 12, "silu"),
)  # fmt: skip
OPS = OP, ACT
_passes = OP.passes


def _dense(x, layout, last):
    """x in that format, and its memory as kernels take it: (N, C, S), or (N, S, C) if `last`."""
    x = x.contiguous(memory_format=layout)
    return x, _seen(x, last)


def _seen(x, last):
    if x is None:
        return None
    channels, size = x.shape[1], x.numel() // (x.shape[0] * x.shape[1])
    shape = (x.shape[0], size, channels) if last else (x.shape[0], channels, size)
    return x.as_strided(shape, (channels * size, shape[2], 1))


def _partials(kernel, x, groups, last):
    channels, size = x.shape[1], x.numel() // (x.shape[0] * x.shape[1])
    count = kernel.partials(x.shape[0], channels, size, groups, last)
    return torch.empty(count, dtype=statistics_dtype(x), device=x.device)


def _compute(x, weight, bias, how):
    """(y, mean_NG, rstd_NG)"""
    kernel, groups, eps, kind, slope, layout, last, out_dtype, _ = how
    x, x_NCS = _dense(x, layout, last)
    y = torch.empty_like(x, dtype=out_dtype, memory_format=layout)
    mean, rstd = (torch.empty(x.shape[0], groups, dtype=statistics_dtype(x), device=x.device) for _ in range(2))
    kernel.forward(
        x_NCS, weight, bias, _seen(y, last), mean, rstd, _partials(kernel, x, groups, last), eps, kind, slope, last,
        kernel.queue(x),
    )  # fmt: skip
    return y, mean, rstd


def _gradients(dy, needs, how, x, weight, bias, mean, rstd):
    kernel, groups, _, kind, slope, layout, last, _, bias_dtype = how
    (x, x_NCS), (dy, dy_NCS) = (_dense(t, layout, last) for t in (x, dy))
    dx = torch.empty_like(x, memory_format=layout) if needs[0] else None
    dweight = torch.empty_like(weight) if needs[1] else None
    dbias = x.new_empty(x.shape[1], dtype=bias_dtype) if needs[2] else None
    kernel.backward(
        dy_NCS, x_NCS, weight, bias, mean, rstd, _seen(dx, last), dweight, dbias,
        _partials(kernel, x, groups, last), kind, slope, last, kernel.queue(x),
    )  # fmt: skip
    return dx, dweight, dbias


def _second(dy, needs, how, x, weight, bias, mean, rstd):
    _, groups, eps, kind, slope, *_, bias_dtype = how
    if bias is None and bias_dtype is not None:  # any value will do if backward does not read it
        bias = x.new_zeros(x.shape[1], dtype=bias_dtype)
    return double_backward(_formula(groups, eps, kind, slope, dy.dtype), (x, weight, bias), needs, dy)


def _build(how, x, weight, bias, mean, rstd):
    kernel, _, _, kind, slope, layout, last, out_dtype, _ = how
    x, x_NCS = _dense(x, layout, last)
    y = torch.empty_like(x, dtype=out_dtype, memory_format=layout)
    kernel.rebuild(x_NCS, weight, bias, _seen(y, last), mean, rstd, kind, slope, last, kernel.queue(x))
    return y


# Without an activation, only the rebuild of y reads the bias. So it may be written to before backward.
_NODE = described("_GroupNorm", "xxhcc", _build, _gradients, _second)
_ACT_NODE = described("_GroupNorm", "xxxcc", _build, _gradients, _second)


def _formula(groups, eps, kind, slope, out_dtype):
    """torch's own ops in the widest dtype at hand, returning what the kernel returned."""

    def formula(x, weight, bias):
        wide = torch.promote_types(x.dtype, torch.float32)
        # torch's backward crashes on a channels-last x whose gradient is not requested.
        x = x if x.requires_grad else x.contiguous()
        weight, bias = (None if t is None else t.to(wide) for t in (weight, bias))
        return _in_torch(x.to(wide), groups, weight, bias, eps, ACTIVATIONS[kind], slope).to(out_dtype)

    return formula


def _fits(x, groups, weight, bias, eps, out) -> bool:
    """Whether a kernel accepts these; if not, torch's own op runs or raises."""
    if x.dim() < 2 or x.numel() == 0 or type(groups) is not int or type(eps) not in (int, float):
        return False
    if groups <= 0 or x.shape[1] % groups or x.numel() == groups:
        return False
    if on_gpu(x) and x.numel() <= 2 * x.shape[0] * groups:  # the gradient of two numbers is only rounding error
        return False
    channels = x.shape[1:2]
    if any(p is not None and (p.shape != channels or not p.is_contiguous()) for p in (weight, bias)):
        return False
    if weight is None and bias is not None:  # torch's backward raises
        return False
    # On CUDA torch accepts parameters of another dtype only under autocast.
    return (
        not on_gpu(x)
        or out is not None
        or autocasting(x)
        or all(p is None or p.dtype is x.dtype for p in (weight, bias))
    )


def _slower(size, kind) -> bool:
    """Whether torch's own ops are faster on the CPU, for planes of so many elements.

    Measured for planes of 64 and less. The norm alone takes about torch's time. Its gain is what its consumers need not
    keep, which is nothing without gradients.
    """
    return size < LEAST_PLANE or not (kind or torch.is_grad_enabled())


def run(op, x, groups, weight, bias, eps, kind, slope, prefer, out=None, contiguous=False):
    """The result by a kernel, or None if torch's own ops must run. out: its dtype, if it is not torch's choice;
    contiguous: it is so, whatever x is."""
    kernel = None if op.passes(x, prefer) else select(op, x, weight, bias, out=out, prefer=prefer)
    if kernel is None or not _fits(x, groups, weight, bias, eps, out):
        return None
    size = x.numel() // (x.shape[0] * x.shape[1])
    if not on_gpu(x) and prefer != "memory" and forced() is None and _slower(size, kind):
        return None
    if kind and ambiguous(x):
        return None  # the activation's result has another layout than the norm's
    # torch's result is contiguous on CUDA, whatever x is.
    if on_gpu(x) and prefer != "memory" and forced() is None and suggested(x) is not torch.contiguous_format:
        return None  # needs a copy, and backward is not faster
    layout = torch.contiguous_format if contiguous or on_gpu(x) else suggested(x)
    last = layout is not torch.contiguous_format
    if kernel.name == "triton" and (last or x.shape[0] * groups > MOST_GROUPS):
        return None  # the former in the interpreter
    last = last or (kernel.name == "cpp" and size == 1)
    bias_dtype = None if bias is None else bias.dtype
    how = kernel, groups, eps, kind, slope, layout, last, out or op.out_dtype(x), bias_dtype
    y, mean, rstd = below(_compute, x, weight, bias, how)
    return (_ACT_NODE if kind else _NODE)(y, how, x, weight, bias, mean, rstd)


def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    prefer: str = "auto",
) -> Tensor:
    """`torch.nn.functional.group_norm`, whose result its consumer can rebuild. Statistics are float32.

    The result has the dtype that torch returns. Raises what torch raises.

    Args:
        input: (N, C, ...); on the CPU also channels last, which the result keeps.
        num_groups: Of channels; divides C.
        weight: (C,), float32 or of the input's dtype, or None.
        bias: Like weight.
        eps: Added to the variance.
        prefer: "auto", "memory" or "speed", as in `hfnn.convert`.

    >>> hfnn.functional.group_norm(torch.tensor([[[1.0, 3.0], [2.0, 6.0]]]), 2)
    tensor([[[-1.0000,  1.0000],
             [-1.0000,  1.0000]]])
    """
    y = run(OP, input, num_groups, weight, bias, eps, 0, 0.0, prefer)
    return F.group_norm(input, num_groups, weight, bias, eps) if y is None else y


def fused(x, groups, weight, bias, eps, out, prefer):
    """The result in dtype `out`, or None if torch's own ops must run: for forwards that compute it in float32."""
    return run(OP, x, groups, weight, bias, eps, 0, 0.0, prefer, out)


def group_norm_act(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    act: str | None = None,
    negative_slope: float = 0.01,
    *,
    prefer: str = "auto",
) -> Tensor:
    """`act(group_norm(input, ...))` in one pass after the statistics.

    Input and the statistics are kept for backward. act works in float32, and y is rounded once. Raises what torch
    raises.

    Args:
        input: As in `group_norm`.
        num_groups: As in `group_norm`.
        weight: As in `group_norm`.
        bias: As in `group_norm`.
        eps: As in `group_norm`.
        act: "relu", "leaky_relu", "relu6", "silu", "hardswish" or None.
        negative_slope: Of leaky_relu.
        prefer: "auto", "memory" or "speed", as in `hfnn.convert`.

    Raises:
        ValueError: Another `act`.
    """
    if act not in ACTIVATIONS:
        raise ValueError(f"act={act!r}: choose one of {', '.join(map(repr, ACTIVATIONS))}")
    y = run(ACT, input, num_groups, weight, bias, eps, ACTIVATIONS.index(act), negative_slope, prefer)
    return _in_torch(input, num_groups, weight, bias, eps, act, negative_slope) if y is None else y


class GroupNorm(nn.GroupNorm):
    """`torch.nn.GroupNorm`: the same arguments, defaults and state dict. `prefer` is set by `hfnn.convert`.

    Args:
        num_groups: Of channels; divides num_channels.
        num_channels: C of inputs (N, C, ...).
        eps: Added to the variance.
        affine: Whether there are weight and bias.
        device: Of the parameters.
        dtype: Of the parameters.
        bias: Whether there is a bias.
    """

    prefer = "auto"

    def forward(self, input: Tensor) -> Tensor:
        if _passes(input, self.prefer):  # the whole cost in a small call
            return F.group_norm(input, self.num_groups, self.weight, self.bias, self.eps)
        return group_norm(input, self.num_groups, self.weight, self.bias, self.eps, prefer=self.prefer)


OP.modules[nn.GroupNorm] = GroupNorm
