"""Linear maps that keep a recipe of their input instead of the input.

    y = x W^T + b    (`Linear`)          y = x W + b    (`Conv1D` of transformers)

The products are torch's own, on the operands and in the layouts that torch uses. Only what is kept for backward
differs: if the input has a recipe (hfnn/core/recipe.py), its sources are kept instead. Under autocast the input is cast
once for all consumers, and the weight's cast is made again instead of kept. With recompute=True the output has a
recipe, too: its consumers keep nothing, and the product runs again in backward.

Gradients are bitwise equal to torch's, except those of float32 tensors under autocast on a GPU, for inputs from
`FLOORS` on. There torch rounds each product to 16 bits, casts it to float32, and adds it to the products of the same
input. Here a product has float32 results and is added to the sum directly, and the sum for a bias' gradient is a
product with a row of ones. This gives fewer roundings, and 5 to 10% less time for a captured step
(docs/notes/models.md). exact=True keeps torch's order.
"""

import functools

import torch
from torch import Tensor, nn

from hfnn.core import flops, native, recipe
from hfnn.core.context import compiling, context, in_checkpoint
from hfnn.core.function import Function, wanted
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


# No own kernels: the products are torch's. `convert` and the tests still find the room here.
OP = Op("linear", reference, _linear_of_torch, kernels=(), sample=sample, cases=((3, 5, 64, 32), (7, 16, 1)))


class _Linear(Function):
    """y = x @ weight_OI^T + bias in `dtype`, which keeps the token of x, or x in `dtype`, and the weight uncast.

    `how` has the token, or None and x in `dtype`. This is not a further input but the kept value, through which a
    second derivative reaches x. `weight_OI` is not a leaf if its gradient is needed: its node shows whether the engine
    wants the gradient in this pass (zero-bubble schedules ask first for the input's gradient alone, then for the
    weight's, and no product may run twice).
    """

    @staticmethod
    def forward(ctx, x, weight_OI, bias, how):
        ctx.set_materialize_grads(False)
        token, low, dtype, recompute, wide = how
        if recompute:
            recipe.save(ctx, low if token is None else token, weight_OI, bias)
        else:  # a tensor that may change, because only the other's gradient is needed, is not kept
            ctx.save_for_backward(low if weight_OI.requires_grad else None, weight_OI if x.requires_grad else None)
            ctx.recipe = None if token is None else recipe.Kept({0: token})
        ctx.dtype, ctx.of = dtype, [t.dtype if wide and t is not None else dtype for t in (x, weight_OI, bias)]
        low = as_dtype(x, dtype) if low is None else low
        ctx.by_rows = weight_OI.stride() == (weight_OI.shape[1], 1)
        ctx.by_columns = not low.is_contiguous() and _rows(low).stride(0) == 1 < low.shape[-1]
        y = _product(low, weight_OI, bias, dtype)
        # With more than two dimensions torch's result is a view of rows. A view returned by a Function may not be
        # written to in place.
        y = y.data if y._is_view() else y
        return recipe.carry(ctx, y, functools.partial(_product_again, dtype=dtype)) if recompute else y

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
        if needs_weight and wanted(nodes[1][0]):  # first, so that the tensor rebuilt for it is freed before dx exists
            if x is None:
                x = ctx.recipe.tokens[0].tensor(ctx.dtype)
            dweight = _outer(dy_RO, _rows(x), ctx.by_rows, ctx.of[1])
            del x
        if needs_x and wanted(nodes[0][0]):
            weight = as_dtype(weight_OI, ctx.dtype)
            # In the layout of x, as in torch.
            dx = _mm(weight.t(), dy_RO.t(), ctx.of[0]).t() if ctx.by_columns else _mm(dy_RO, weight, ctx.of[0])
            dx = dx.view(*dy.shape[:-1], weight_OI.shape[1])
        if needs_bias:
            dbias = dy_RO.sum(0) if ctx.of[2] is ctx.dtype else _mm(_ones(dy_RO), dy_RO, ctx.of[2])[0]
        return dx, dweight, dbias, None


def _explained(error, dtype):
    """torch's error for a tensor that was written to, with the reason why torch's own Linear may not have raised it."""
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


def _product_again(*given, dtype):
    with flops.uncounted(profiled=True):  # torch has no such product
        return _product(*given, dtype)


def _rows(x):
    """x (*, C) as (R, C)."""
    return x.flatten(0, -2) if x.dim() > 1 else x[None]


def _outer(dy_RO, x_RI, by_rows, dtype):
    """dy^T x (out, in), computed in the weight's own layout, as torch does."""
    return _mm(dy_RO.t(), x_RI, dtype) if by_rows else _mm(x_RI.t(), dy_RO, dtype).t()


def _mm(a, b, dtype):
    """a @ b in `dtype`; for 16-bit operands without an intermediate 16-bit result."""
    if a.dtype is dtype or torch.is_grad_enabled():
        return torch.mm(a, b)
    return torch.mm(a, b, out_dtype=dtype) if a.is_cuda else torch.mm(a.to(dtype), b.to(dtype))


def _ones(dy_RO):
    return dy_RO.new_ones(1, dy_RO.shape[0])


def _linear(x, weight_OI, bias, recompute, prefer, exact, own_casts=False):
    """x @ weight_OI^T + bias, or None if torch's own op must run, or raise."""
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
                return None  # torch's own op raises, or works in float64, which autocast does not change
            casts = casts or t.dtype is not dtype
    if casts and (own_casts and x.dtype not in (dtype, torch.float32) if autocast else not own_casts):
        return None  # as above, or the module and autocast round to different dtypes
    # Recomputed from tensors of the graph. A weight that fully_shard frees again would have to be copied.
    recompute = recompute and x.requires_grad and not recipe.parameters_may_be_resharded() and not flops.watched()
    token = recipe.take(x) if recompute or weight_OI.requires_grad else None
    if token is None and not recompute and not (casts and (x.requires_grad or weight_OI.requires_grad)):
        return None
    if weight_OI.requires_grad and weight_OI.is_leaf:
        weight_OI = weight_OI.view_as(weight_OI)
    elif not (isinstance(weight_OI, torch.nn.Parameter) or in_checkpoint()):  # as `lasting` in C++
        weight_OI = recipe.cast(weight_OI, dtype)
    low = recipe.cast(x, dtype) if token is None else None
    wide = casts and autocast and not exact and x.numel() >= FLOORS[prefer] and (x.is_cuda or wide_on_cpu)
    return flops.after(_linear_of_torch, _Linear.apply, x, weight_OI, bias, (token, low, dtype, recompute, wide))


# Under autocast, by preference: the smallest input for which dropping the casts of input and weight is worth host time.
FLOORS = {"auto": WORTH_ELEMENTS, "memory": 0, "speed": float("inf")}
wide_on_cpu = False  # for tests: compute gradients on the CPU as on a GPU


def linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    recompute: bool = False,
    prefer: str = "auto",
    exact: bool = False,
) -> Tensor:
    """`torch.nn.functional.linear`, which keeps a recipe of its input if there is one. Raises what torch raises.

    Args:
        input: (*, in).
        weight: (out, in).
        bias: (out,) or None.
        recompute: Whether consumers keep nothing of the result, which backward then computes again.
        prefer: "auto", "memory" or "speed", as in `hfnn.convert`: from which size casts are not kept under autocast.
        exact: Whether gradients are bitwise equal to torch's also on a GPU under autocast.

    >>> hfnn.functional.linear(torch.tensor([1.0, 2.0]), torch.tensor([[3.0, 4.0]]))
    tensor([11.])
    """
    # If there is nothing to gain, torch's op runs in this line.
    y = None if compiling() else _native(input, weight, bias, recompute, prefer, False, exact, True, False)
    if y is NotImplemented:
        gains = _gains(input, recompute, prefer) and weight.dim() == 2
        y = _linear(input, weight, bias, recompute, prefer, exact) if gains else None
    return _linear_of_torch(input, weight, bias) if y is None else y


_native = native.call("linear", FLOORS)


def is_torchs(input, recompute: bool, prefer: str, casts: bool) -> bool:
    """Whether torch's own op keeps as little of this input, by the fastest check; False if it does not tell."""
    return _native(input, None, None, recompute, prefer, False, False, False, casts) is None


def _gains(input, recompute, prefer, casts=False) -> bool:
    if not isinstance(input, torch.Tensor):
        return False  # torch's own op raises
    return recompute or recipe.carries(input) or ((casts or _autocasting()) and input.numel() >= FLOORS[prefer])


def keeping_less(input, weight, bias, recompute=False, prefer="auto", columns=False, exact=False, casts=False):
    """`linear`, or None if the module's own forward must run. columns: False, or, for a weight stored as (in, out), its
    `out`; then the ops of transformers' Conv1D run here, too. casts: whether the module casts weight and bias to the
    input's dtype, as autocast does."""
    whole = columns is not False
    y = None if compiling() else _native(input, weight, bias, recompute, prefer, columns, exact, whole, casts)
    if y is NotImplemented:
        gains = _gains(input, recompute, prefer, casts) and not (whole and _refuses_view(input))
        y = _linear(input, weight.t() if whole else weight, bias, recompute, prefer, exact, casts) if gains else None
    return y


def _refuses_view(x) -> bool:
    """Whether x, as the input of a Conv1D, has no view as rows: an error of its own forward."""
    try:
        x.detach().view(-1, x.shape[-1])
    except RuntimeError:
        return True
    return False


class Linear(nn.Linear):
    """`torch.nn.Linear`: the same arguments, defaults and state dict. `convert` sets `prefer`, `recompute`, `exact`.

    Args:
        in_features: Size of the last dimension of the input.
        out_features: Size of the last dimension of the result.
        bias: Whether there is a bias.
        device: Of the parameters.
        dtype: Of the parameters.
    """

    prefer, recompute, exact = "auto", False, False

    def forward(self, input: Tensor) -> Tensor:
        recompute, prefer, exact = self.recompute, self.prefer, self.exact
        if not compiling():
            own, parameters = self.__dict__, self._parameters
            if "weight" in parameters and "bias" in parameters and "weight" not in own and "bias" not in own:
                weight, bias = parameters["weight"], parameters["bias"]  # without Module.__getattr__
            else:  # parametrised or pruned, say
                weight, bias = self.weight, self.bias
            # As in `linear`, without the call.
            y = _native(input, weight, bias, recompute, prefer, False, exact, True, False)
            if y is not None and y is not NotImplemented:
                return y
        return linear(input, self.weight, self.bias, recompute=recompute, prefer=prefer, exact=exact)


OP.modules[nn.Linear] = Linear
