"""Linear maps that keep a recipe of their input instead of the input.

    y = x W^T + b    (`Linear`)          y = x W + b    (`Conv1D` of transformers)

The products are torch's own, on the operands and in the layouts torch uses. What differs is what backward needs: where
the input comes with a recipe (hfnn/core/recipe.py), its sources are kept instead. Under autocast the input is cast once
for all consumers, and the weight's cast is made again instead of kept. With recompute=True the output has a recipe,
too: its consumers keep nothing, and the product runs again in backward.

Gradients are torch's to the bit, but for those of float32 tensors under autocast on a GPU, of inputs from `FLOORS` on.
torch rounds each product to 16 bits, casts it to float32, and adds it to the products of the same input. Here a product
has float32 results at once and is added where the sum is, and the sum of a bias' gradient is a product with a row of
ones: fewer roundings, and 5 to 10% less time for a captured step (docs/notes/models.md). exact=True keeps torch's
order.
"""

import functools

import torch
from torch import nn

from hfnn.core import native, recipe
from hfnn.core.context import compiling, context
from hfnn.core.function import Function
from hfnn.core.kernel import WORTH_ELEMENTS, Op
from hfnn.core.recipe import as_dtype

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


class _Linear(Function):
    """y = x @ weight_OI^T + bias in `dtype`, keeping the token of x, or x in `dtype`; the weight as it is.

    `how` has the token, or None and x in `dtype`: no further input, but what is kept, by which a second derivative
    reaches x. `weight_OI` is no leaf where its gradient is wanted: its node tells whether the engine wants it in this
    pass (zero-bubble schedules ask for the input's alone, then for the weight's, and no product may run twice).
    """

    @staticmethod
    def forward(ctx, x, weight_OI, bias, how):
        token, low, dtype, recompute, wide = how
        if recompute:
            recipe.save(ctx, low if token is None else token, weight_OI, bias)
        else:  # what may change where only the other's gradient is wanted is not kept
            ctx.save_for_backward(low if weight_OI.requires_grad else None, weight_OI if x.requires_grad else None)
            ctx.recipe = None if token is None else recipe.Kept({0: token})
        ctx.dtype, ctx.of = dtype, [t.dtype if wide and t is not None else dtype for t in (x, weight_OI, bias)]
        low = as_dtype(x, dtype) if low is None else low
        ctx.by_rows = weight_OI.stride() == (weight_OI.shape[1], 1)
        ctx.by_columns = not low.is_contiguous() and _rows(low).stride(0) == 1 < low.shape[-1]
        y = _product(low, weight_OI, bias, dtype)
        # Of more than two dimensions torch's is a view of rows, and what a Function returns as a view may not be
        # written to in place.
        y = y.data if y._is_view() else y
        return recipe.carry(ctx, y, functools.partial(_product, dtype=dtype)) if recompute else y

    @staticmethod
    def backward(ctx, dy):
        try:
            x, weight_OI, *_ = recipe.raw(ctx)
        except RuntimeError as error:
            raise _explained(error, ctx.dtype) from None
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        nodes = ctx.next_functions
        dx = dweight = dbias = None
        dy_RO = _rows(dy)
        if needs_weight and _wanted(nodes[1][0]):  # first, so that what is rebuilt for it is gone before dx is there
            if x is None:
                x = ctx.recipe.tokens[0].tensor(ctx.dtype)
            dweight = _outer(dy_RO, _rows(x), ctx.by_rows, ctx.of[1])
            del x
        if needs_x and _wanted(nodes[0][0]):
            weight = as_dtype(weight_OI, ctx.dtype)
            # As torch, in the layout of x.
            dx = _mm(weight.t(), dy_RO.t(), ctx.of[0]).t() if ctx.by_columns else _mm(dy_RO, weight, ctx.of[0])
            dx = dx.view(*dy.shape[:-1], weight_OI.shape[1])
        if needs_bias:
            dbias = dy_RO.sum(0) if ctx.of[2] is ctx.dtype else _mm(_ones(dy_RO), dy_RO, ctx.of[2])[0]
        return dx, dweight, dbias, None


def _explained(error, dtype):
    """torch's error on a tensor that was written to, and why torch's own Linear may not have raised it."""
    if dtype is torch.float32 or "modified by an inplace operation" not in str(error):
        return error
    return RuntimeError(
        f"{error}\nUnder autocast hfnn.Linear keeps its weight, where torch keeps a 16-bit copy: call backward before "
        "the weight is written to (an optimizer's step, load_state_dict), or leave this module to torch with "
        "hfnn.convert(model, skip=...)."
    )


def _product(x, weight_OI, bias, dtype):
    bias = None if bias is None else as_dtype(bias, dtype)
    return _linear_of_torch(as_dtype(x, dtype), as_dtype(weight_OI, dtype), bias)


def _rows(x):
    """x (*, C) as (R, C)."""
    return x.flatten(0, -2) if x.dim() > 1 else x[None]


def _outer(dy_RO, x_RI, by_rows, dtype):
    """dy^T x (out, in), computed in the weight's own layout, as torch does."""
    return _mm(dy_RO.t(), x_RI, dtype) if by_rows else _mm(x_RI.t(), dy_RO, dtype).t()


def _mm(a, b, dtype):
    """a @ b in `dtype`: of 16-bit operands without a result of 16 bits in between."""
    if a.dtype is dtype or torch.is_grad_enabled():
        return torch.mm(a, b)
    return torch.mm(a, b, out_dtype=dtype) if a.is_cuda else torch.mm(a.to(dtype), b.to(dtype))


def _ones(dy_RO):
    return dy_RO.new_ones(1, dy_RO.shape[0])


def _wanted(node) -> bool:
    """Whether this pass of the engine runs the node of an input. A leaf's it cannot be asked for: it raises."""
    return not node.next_functions or torch._C._will_engine_execute_node(node)


def _linear(x, weight_OI, bias, recompute, prefer, exact):
    """x @ weight_OI^T + bias, or None where torch's own op is to run, or to raise."""
    if not torch.is_grad_enabled() or not (x.is_cuda or x.is_cpu) or x.dim() == 0 or x.shape[-1] != weight_OI.shape[1]:
        return None
    if context(x, weight_OI, bias) is not None:
        return None
    device = "cuda" if x.is_cuda else "cpu"
    autocast = torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if autocast else x.dtype
    casts = False
    for t in (x, weight_OI, bias):
        if t is not None:
            if not t.is_floating_point() or t.device != x.device or (autocast and t.dtype is torch.float64):
                return None  # torch's own op raises, or works in float64, which autocast leaves alone
            casts = casts or t.dtype is not dtype
    if casts and not autocast:
        return None  # as above
    # Computed again of what is in the graph; and a weight that fully_shard takes away again would have to be copied.
    recompute = recompute and x.requires_grad and not recipe.parameters_may_be_resharded()
    token = recipe.take(x) if recompute or weight_OI.requires_grad else None
    if token is None and not recompute and not (casts and (x.requires_grad or weight_OI.requires_grad)):
        return None
    if weight_OI.requires_grad and weight_OI.is_leaf:
        weight_OI = weight_OI.view_as(weight_OI)
    low = recipe.cast(x, dtype) if token is None else None
    wide = casts and not exact and x.numel() >= FLOORS[prefer] and (x.is_cuda or wide_on_cpu)
    return _Linear.apply(x, weight_OI, bias, (token, low, dtype, recompute, wide))


# Under autocast, by preference: the smallest input of which not to keep a cast, nor of the weight, is worth host time.
FLOORS = {"auto": WORTH_ELEMENTS, "memory": 0, "speed": float("inf")}
wide_on_cpu = False  # for tests: gradients are made on the CPU as on a GPU


def linear(input, weight, bias=None, *, recompute=False, prefer="auto", exact=False):
    """`torch.nn.functional.linear`, keeping a recipe of its input where the input has one.

    Shapes: input (*, in), weight (out, in), bias (out,) or None; result (*, out). recompute: the rooms that consume the
    result keep nothing of it, and it is computed again in backward. prefer: "auto" | "memory" | "speed"
    (`hfnn.convert`): from which size of input on casts are not kept under autocast. exact: gradients are torch's to the
    bit on a GPU under autocast, too. Raises what torch raises.
    """
    # Where there is nothing to gain, torch's op runs within this line.
    y = None if compiling() else _native(input, weight, bias, recompute, prefer, False, exact, True)
    if y is NotImplemented:
        gains = _gains(input, recompute, prefer) and weight.dim() == 2
        y = _linear(input, weight, bias, recompute, prefer, exact) if gains else None
    return _linear_of_torch(input, weight, bias) if y is None else y


_native = native.call("linear", FLOORS)


def _gains(input, recompute, prefer) -> bool:
    return recompute or recipe.carries(input) or (_autocasting() and input.numel() >= FLOORS[prefer])


def keeping_less(input, weight, bias, recompute=False, prefer="auto", by_columns=False, exact=False):
    """`linear`, or None where there is nothing to gain. by_columns: the weight is stored as (in, out)."""
    y = None if compiling() else _native(input, weight, bias, recompute, prefer, by_columns, exact, False)
    if y is NotImplemented:
        weight = weight.t() if by_columns else weight
        y = _linear(input, weight, bias, recompute, prefer, exact) if _gains(input, recompute, prefer) else None
    return y


class Linear(nn.Linear):
    """`torch.nn.Linear`: the same arguments, defaults and state dict. `convert` sets `prefer`, `recompute`, `exact`."""

    prefer, recompute, exact = "auto", False, False

    def forward(self, input):
        weight, bias, recompute, prefer, exact = self.weight, self.bias, self.recompute, self.prefer, self.exact
        # As `linear` has it, without the call.
        y = None if compiling() else _native(input, weight, bias, recompute, prefer, False, exact, True)
        if y is None or y is NotImplemented:
            return linear(input, weight, bias, recompute=recompute, prefer=prefer, exact=exact)
        return y


OP.modules[nn.Linear] = Linear
