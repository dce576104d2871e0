"""Linear maps that keep a recipe of their input instead of the input.

    y = x W^T + b    (`Linear`)          y = x W + b    (`Conv1D` of transformers)

The products are torch's own, on the operands and in the layouts torch uses, so gradients are torch's to the bit. What
differs is what backward needs: where the input comes with a recipe (hfnn/recipe.py), its sources are kept instead.
Under autocast the input is cast once for all consumers, and the weight's cast is made again instead of kept. With
recompute=True the output has a recipe, too: its consumers keep nothing, and the product runs again in backward.
"""

import functools

import torch
from torch import nn

from hfnn import recipe
from hfnn.kernel import Op, compiling, context

_linear_of_torch, _autocasting = nn.functional.linear, torch._C._is_any_autocast_enabled


def reference(x, weight, bias=None):
    """The definition, in the dtype of x."""
    y = x @ weight.t()
    return y if bias is None else y + bias


def sample(case, dtype, device, generator=None):
    """Arguments of `linear` for x of shape `case[:-1]`; the last entry of a case is the number of outputs."""
    *shape, outputs = case
    x, weight, bias = (torch.randn(s, generator=generator) for s in (shape, (outputs, shape[-1]), (outputs,)))
    return tuple(t.to(dtype).to(device) for t in (x, weight, bias)), {}


# No kernels of its own: the products are torch's. `convert` and the tests find the room here all the same.
OP = Op("linear", reference, _linear_of_torch, kernels=(), sample=sample, cases=((3, 5, 64, 32), (7, 16, 1)))


class _Linear(torch.autograd.Function):
    """y = x @ weight_IO + bias in `dtype`, keeping the sources of x's recipe, or x; and the weight as it is.

    `weight_IO` is a view of the parameter, (in, out). The view matters: its node tells whether the engine wants the
    weight's gradient in this pass (zero-bubble schedules ask for the input's alone, then for the weight's, and no
    product may run twice).
    """

    @staticmethod
    def forward(ctx, x, weight_IO, bias, tag, dtype, *sources):
        low = x if tag is None else tag.cast(x, dtype)
        if tag is None and weight_IO.requires_grad:
            sources = (x,)
        ctx.save_for_backward(weight_IO, *sources)
        ctx.recipe, ctx.dtype, ctx.x_dtype = None if tag is None else tag.recipe, dtype, x.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        return _product(low, weight_IO, bias, dtype)

    @staticmethod
    def backward(ctx, dy):
        weight_IO, *sources = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = (_wanted(ctx, i) for i in range(3))
        dx = dweight = dbias = None
        dy_RO = dy.reshape(-1, dy.shape[-1])
        if needs_weight:  # first, so that what is rebuilt for it is gone before dx is there
            x = sources[0] if ctx.recipe is None else ctx.recipe.rebuild(sources, ctx.dtype)
            dweight = _outer(x.reshape(-1, weight_IO.shape[0]), dy_RO, weight_IO).to(weight_IO.dtype)
            del x
        if needs_x:
            dx = (dy_RO @ weight_IO.to(ctx.dtype).t()).view(*dy.shape[:-1], -1).to(ctx.x_dtype)
        if needs_bias:
            dbias = dy_RO.sum(0).to(ctx.bias_dtype)
        return dx, dweight, dbias, *(None for _ in ctx.needs_input_grad[3:])


def _product(x, weight_IO, bias, dtype):
    return _linear_of_torch(x.to(dtype), weight_IO.to(dtype).t(), None if bias is None else bias.to(dtype))


def _outer(x_RI, dy_RO, weight_IO):
    """x^T dy (in, out), computed in the weight's own layout, as torch does."""
    if weight_IO.stride() == (1, weight_IO.shape[0]):  # the transpose of a contiguous (out, in)
        return (dy_RO.t() @ x_RI).t()
    return x_RI.t() @ dy_RO


def _wanted(ctx, i: int) -> bool:
    """Whether this pass of the engine uses the gradient of input i."""
    if not ctx.needs_input_grad[i]:
        return False
    node = ctx.next_functions[i][0]
    if not node.next_functions:  # a leaf: the engine cannot be asked, and says so by raising
        return True
    return torch._C._will_engine_execute_node(node)


def _linear(x, weight_IO, bias, recompute):
    """x @ weight_IO + bias, or None where torch's own op is to run, or to raise."""
    if not torch.is_grad_enabled() or not (x.is_cuda or x.is_cpu) or x.dim() == 0 or x.shape[-1] != weight_IO.shape[0]:
        return None
    if context(x, weight_IO, bias) is not None:
        return None
    device = "cuda" if x.is_cuda else "cpu"
    autocast = torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if autocast else x.dtype
    tensors = [t for t in (x, weight_IO, bias) if t is not None]
    casts = any(t.dtype is not dtype for t in tensors)
    if (casts and not autocast) or not all(t.is_floating_point() and t.device == x.device for t in tensors):
        return None  # torch's own op raises
    tag = recipe.take(x) if weight_IO.requires_grad else None
    if tag is not None:
        y = _Linear.apply(x, weight_IO, bias, tag, dtype, *tag.sources)
    elif casts and (x.requires_grad or weight_IO.requires_grad):
        y = _Linear.apply(recipe.cast(x, dtype), weight_IO, bias, None, dtype)
    elif recompute:
        y = _linear_of_torch(x, weight_IO.t(), bias)
    else:
        return None
    # A weight that fully_shard takes away again would have to be copied.
    if recompute and y.requires_grad and not recipe.parameters_may_be_resharded():
        recipe.attach(y, functools.partial(_product, dtype=dtype), x, weight_IO, bias)
    return y


def linear(input, weight, bias=None, *, recompute=False):
    """`torch.nn.functional.linear`, keeping a recipe of its input where the input has one.

    Shapes: input (*, in), weight (out, in), bias (out,) or None; result (*, out). recompute: the rooms that consume the
    result keep nothing of it, and it is computed again in backward. Raises what torch raises.
    """
    # Where there is nothing to gain, a call pays for no more than this line.
    if not compiling() and (id(input) in recipe.tags or recompute or _autocasting()) and weight.dim() == 2:
        y = _linear(input, weight.t(), bias, recompute)
        if y is not None:
            return y
    return _linear_of_torch(input, weight, bias)


def linear_io(input, weight, bias, recompute=False):
    """`linear` for a weight stored as (in, out), or None where there is nothing to gain."""
    if compiling() or not (id(input) in recipe.tags or recompute or _autocasting()):
        return None
    return _linear(input, weight.view_as(weight), bias, recompute)


class Linear(nn.Linear):
    """`torch.nn.Linear`: the same arguments, defaults and state dict. `recompute` is set by `hfnn.convert`."""

    recompute = False

    def forward(self, input):
        return linear(input, self.weight, self.bias, recompute=self.recompute)


OP.modules[nn.Linear] = Linear
