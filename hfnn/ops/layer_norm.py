"""Layer normalisation over the last dimensions.

    y = (x - mean) * rstd * weight + bias,    rstd = 1 / sqrt(var + eps)

Ba, Kiros and Hinton, "Layer Normalization", 2016. https://arxiv.org/abs/1607.06450

Names end in their shape: R rows (every leading dimension, flattened), C columns (the normalised ones, flattened).
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hfnn.core import native, recipe
from hfnn.core.context import compiling
from hfnn.core.function import Function, double_backward
from hfnn.core.kernel import Kernel, Op, kernels
from hfnn.ops.layout import ambiguous, in_rows, like


def reference(x, normalized_shape, weight=None, bias=None, eps=1e-5):
    """The definition, in the dtype of x."""
    dims = tuple(range(-len(normalized_shape), 0))
    centred = x - x.mean(dims, keepdim=True)
    y = centred * torch.rsqrt(centred.square().mean(dims, keepdim=True) + eps)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def sample(case, dtype, device, generator=None):
    """Arguments of `layer_norm` for x of shape `case`."""
    x = torch.randn(case, generator=generator).to(dtype).to(device)
    weight, bias = (torch.randn(case[-1:], generator=generator).to(dtype).to(device) for _ in range(2))
    return (x, case[-1:], weight, bias), {}


OP = Op(
    "layer_norm",
    reference,
    torch.layer_norm,
    kernels=kernels(
        "layer_norm",
        1 << 17,
        Kernel("cuda", "hfnn._C:cuda.layer_norm", "cuda", max_cols=65536, out=False, min_elements=1 << 24),
        max_cols=65536,
    ),
    sample=sample,
    cases=((1, 257), (3, 769), (5, 3, 64), (257, 1024), (0, 8), (2, 8192)),
    probe=((1,),),
    small=(3, 5),
    bench=((131072, 1024), (65536, 4096), (32768, 8192), (8192, 32768)),
    sums=True,
)
_passes = OP.passes


def _compute(x, weight, bias, eps, normalized_shape, out_dtype, kernel):
    """(y, mean_R, rstd_R)"""
    x_RC = rows(x, normalized_shape)
    # Not a view of the kernel's (R, C): autograd and fully_shard treat in-place changes of views differently.
    y = torch.empty_like(x, dtype=out_dtype, memory_format=torch.contiguous_format)
    mean_R = torch.empty(x_RC.shape[0], dtype=statistics_dtype(x), device=x.device)
    rstd_R = torch.empty_like(mean_R)
    kernel.forward(x_RC, flat(weight), flat(bias), y.view(x_RC.shape), mean_R, rstd_R, eps, kernel.queue(x))
    return y, mean_R, rstd_R


class _LayerNorm(Function):
    @staticmethod
    def forward(ctx, x, weight, bias, eps, normalized_shape, out_dtype, kernel):
        ctx.set_materialize_grads(False)
        y, mean_R, rstd_R = _compute(x, weight, bias, eps, normalized_shape, out_dtype, kernel)
        recipe.save(ctx, x, weight, bias, made=(mean_R, rstd_R))
        ctx.eps, ctx.shape, ctx.kernel = eps, normalized_shape, kernel
        return recipe.carry(ctx, y, _rebuild(normalized_shape, eps, out_dtype, kernel))

    @staticmethod
    def backward(ctx, dy):
        x, weight, bias, mean_R, rstd_R = recipe.saved(ctx)
        needs = ctx.needs_input_grad[:3]
        if torch.is_grad_enabled():
            formula = _formula(ctx.shape, ctx.eps, dy.dtype)
            return (*double_backward(formula, (x, weight, bias), needs, dy), None, None, None, None)
        x_RC, dy_RC = rows(x, ctx.shape), rows(dy, ctx.shape)
        dx_RC = like(x_RC) if needs[0] else None
        dweight = torch.empty_like(weight) if needs[1] else None
        dbias = torch.empty_like(bias) if needs[2] else None
        partials = None
        if needs[1] or needs[2]:
            num_partials = ctx.kernel.partials(*x_RC.shape)
            partials = torch.empty(2, num_partials, x_RC.shape[1], dtype=mean_R.dtype, device=x.device)
        ctx.kernel.backward(
            dy_RC, x_RC, flat(weight), mean_R, rstd_R, dx_RC, flat(dweight), flat(dbias), partials, ctx.kernel.queue(x)
        )
        return None if dx_RC is None else dx_RC.view(x.shape), dweight, dbias, None, None, None, None


def _rebuild(normalized_shape, eps, out_dtype, kernel):
    def build(x, weight, bias, mean_R, rstd_R):
        if torch.is_grad_enabled():
            return _formula(normalized_shape, eps, out_dtype)(x, weight, bias)
        x_RC = rows(x, normalized_shape)
        y_RC = like(x_RC, out_dtype)
        kernel.rebuild(x_RC, flat(weight), flat(bias), mean_R, rstd_R, y_RC, kernel.queue(x))
        return y_RC.view(x.shape)

    build.into = lambda dtype: _rebuild(normalized_shape, eps, dtype, kernel)  # rounded once, from float32, either way
    return build


def _formula(normalized_shape, eps, out_dtype):
    """torch's own op in the widest dtype at hand, returning what the kernel returned."""

    def formula(x, weight, bias):
        wide = torch.promote_types(x.dtype, torch.float32)
        weight, bias = (None if t is None else t.to(wide) for t in (weight, bias))
        return torch.layer_norm(x.to(wide), normalized_shape, weight, bias, eps).to(out_dtype)

    return formula


def _second(dy, needs, x, weight, bias, dims, eps, offset):
    """The gradients by differentiable ops."""
    return double_backward(_formula(x.shape[-dims:], eps, dy.dtype), (x, weight, bias), needs, dy)


_native = native.call("norm", OP, _second, True)


def rows(x, normalized_shape):
    """x (*, *normalized_shape) as contiguous x_RC."""
    return x.contiguous().view(-1, math.prod(normalized_shape))


def statistics_dtype(x):
    """float32 for float32 and narrower x."""
    return torch.float64 if x.dtype is torch.float64 else torch.float32


def flat(parameter):
    """A parameter of normalized_shape, or its gradient, as (C,)."""
    return parameter if parameter is None or parameter.dim() == 1 else parameter.view(-1)


def _run(*args):
    return _LayerNorm.apply(*args) if torch.is_grad_enabled() else _compute(*args)[0]


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    prefer: str = "auto",
) -> Tensor:
    """`torch.nn.functional.layer_norm`, whose result its consumer can rebuild. Statistics are float32.

    The result has the shape of input and the dtype that torch returns. Raises what torch raises.

    Args:
        input: (*, *normalized_shape).
        normalized_shape: The last dimensions, over which mean and variance are taken.
        weight: Of normalized_shape, float32 or of the input's dtype, or None.
        bias: Like weight.
        eps: Added to the variance.
    PREFER
    """
    y = None
    if not compiling() and normalized_shape is not None:
        y = _native(input, normalized_shape, weight, bias, eps, 0.0, None, prefer)
    if y is NotImplemented:
        y = _in_python(input, normalized_shape, weight, bias, eps, prefer)
    return torch.layer_norm(input, normalized_shape, weight, bias, eps) if y is None else y


def _in_python(input, normalized_shape, weight, bias, eps, prefer):
    kernel = None if _passes(input, prefer) else OP.select(input, weight, bias, row=normalized_shape, prefer=prefer)
    if kernel is None or not fits(input, normalized_shape, weight, bias):
        return None
    return _run(input, weight, bias, eps, normalized_shape, OP.out_dtype(input), kernel)


def fits(x, normalized_shape, *parameters) -> bool:
    """Whether the shapes agree, and parameters are contiguous; if not, torch's own op runs, or raises."""
    shape = tuple(normalized_shape)
    if not shape or 0 in shape or x.shape[-len(shape) :] != shape:
        return False
    return all(p is None or (p.shape == shape and p.is_contiguous()) for p in parameters)


def fused(x, weight, bias, eps, out, prefer):
    """The room's result over the last dimension, in dtype `out`; None if no kernel accepts the call.

    For modules that compute this op in their own words (hfnn/patterns/lookalike.py), whose own code runs otherwise.
    """
    y = None if compiling() else _native(x, None, weight, bias, eps, 0.0, out, prefer)
    if y is not NotImplemented:
        return y
    shape = x.shape[-1:]
    if not in_rows(x) or ambiguous(x):  # the module's own result has other strides
        return None
    kernel = OP.select(x, weight, bias, row=shape, out=out, prefer=prefer)
    if kernel is None or not fits(x, shape, weight, bias):
        return None
    return _run(x, weight, bias, eps, tuple(shape), out, kernel)


class LayerNorm(nn.LayerNorm):
    """`torch.nn.LayerNorm`: the same arguments, defaults and state dict.

        y = (x - mean) * rstd * weight + bias,    rstd = 1 / sqrt(var + eps)

    Args:
        normalized_shape: the sizes of the last dimensions, over which mean and var are taken.
        eps: added to the variance.
        elementwise_affine: whether there are weight and bias, of normalized_shape.
        bias: whether there is a bias, if there is a weight.
        device: of the parameters.
        dtype: of the parameters: float32, or the inputs'.

    Shapes: input (*, *normalized_shape); the result has its shape, and the dtype that torch returns. Statistics are
    float32 (float64 for float64). `prefer` is set by `hfnn.convert`. Raises what torch raises.

    >>> hfnn.LayerNorm(4)(torch.tensor([[1.0, 1.0, 3.0, 3.0]])).detach()
    tensor([[-1.0000, -1.0000,  1.0000,  1.0000]])
    """

    prefer = "auto"

    def forward(self, input: Tensor) -> Tensor:
        return layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps, prefer=self.prefer)


OP.modules[nn.LayerNorm] = LayerNorm
