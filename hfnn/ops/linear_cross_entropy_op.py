"""`linear_cross_entropy` as a torch operator, which compilers treat as one unit.

    torch.ops.hfnn.linear_cross_entropy -> loss, and its gradients by hidden, weight and bias

With the formula, a compiled graph would hold all logits and their gradient. The operator runs the room
(hfnn/ops/linear_cross_entropy.py) in forward, and backward scales the gradients that forward has made. If autograd also
records backward (create_graph=True), backward uses torch's formula.
"""

import functools
from dataclasses import dataclass

import torch
from torch import nn

from hfnn.core.node import double_backward
from hfnn.ops import linear_cross_entropy as room
from hfnn.ops.head import no_autocast


@torch.library.custom_op("hfnn::linear_cross_entropy", mutates_args=())
def operator(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    class_weight: torch.Tensor | None,
    needs: list[bool],
    reduction: str,
    ignore_index: int,
    label_smoothing: float,
    compact: bool,
    dtype: torch.dtype,
    out_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(loss, gradients of hidden, weight and bias: empty if not in `needs`) with products in `dtype`.

    hidden (T, H), weight (V, H), bias (V,) or None, target (T,) int64, class_weight (V,) or None; reduction: "mean" or
    "sum". The loss is a scalar of `out_dtype`.
    """
    with _as_outside(), torch.enable_grad(), multiplying(hidden, dtype, (weight, bias)):
        given = [t if t is None else t.detach() for t in (hidden, weight, bias)]
        if hidden.dtype is dtype:  # under autocast: the room does not accept hidden states narrower than the weight
            given[0] = given[0].to(weight.dtype)
        for t, need in zip(given, needs, strict=True):
            if need:
                t.requires_grad_()
        loss = room.linear_cross_entropy(
            given[0],
            given[1],
            target,
            given[2],
            weight=class_weight,
            reduction=reduction,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            compact=compact,
            dtype=out_dtype,
        )
        wanted = [t for t, need in zip(given, needs, strict=True) if need]
        grads = iter(torch.autograd.grad(loss, wanted) if wanted else ())
    like = (hidden, weight, bias)
    found = [
        next(grads).to(t.dtype).contiguous() if need else hidden.new_empty(0)
        for t, need in zip(like, needs, strict=True)
    ]
    return loss.detach().to(out_dtype), *found


def _as_outside():
    """Enables autograd and autocast as for any call, because torch runs an operator below them."""
    inside = torch._C._dispatch_tls_local_exclude_set()
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), inside - _BELOW)


_BELOW = functools.reduce(
    lambda keys, name: keys.add(torch._C._parse_dispatch_key(name)),
    ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor", "AutocastCPU", "AutocastCUDA"),
    torch._C.DispatchKeySet.from_raw_repr(0),
)


@operator.register_fake
def _(hidden, weight, bias, target, class_weight, needs, reduction, ignore_index, label_smoothing, compact, dtype, out):
    like = (hidden, weight, bias)
    grads = [t.new_empty(t.shape) if need else hidden.new_empty(0) for t, need in zip(like, needs, strict=True)]
    return hidden.new_empty((), dtype=out), *grads


def multiplying(hidden: torch.Tensor, dtype: torch.dtype, others):
    """The state in which torch multiplies in `dtype`."""
    if all(t is None or t.dtype is dtype for t in (hidden, *others)):
        return no_autocast(hidden)
    return torch.autocast(hidden.device.type, dtype)


@dataclass(frozen=True)
class _Formula:
    """torch's own ops for the operator's arguments."""

    target: torch.Tensor
    class_weight: torch.Tensor | None
    options: tuple

    def __call__(self, hidden, weight, bias):
        reduction, ignore_index, smoothing, _, dtype, out_dtype = self.options
        with multiplying(hidden, dtype, (weight, bias)):
            logits = nn.functional.linear(hidden, weight, bias).to(out_dtype)
        options = {"reduction": reduction, "ignore_index": ignore_index, "label_smoothing": smoothing}
        with no_autocast(hidden):
            return nn.functional.cross_entropy(logits, self.target, self.class_weight, **options)


def _setup(ctx, inputs, output):
    hidden, weight, bias, target, class_weight, needs, *options = inputs
    ctx.needs, ctx.options = needs, tuple(options)
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(hidden, weight, bias, target, class_weight, *output[1:])


def _backward(ctx, dy, *_):
    hidden, weight, bias, target, class_weight, *grads = ctx.saved_tensors
    nothing = (None,) * 9
    if dy is None:
        return None, None, None, *nothing
    if torch.is_grad_enabled():
        formula = _Formula(target, class_weight, ctx.options)
        return *double_backward(formula, (hidden, weight, bias), ctx.needs, dy), *nothing
    # In the factor's dtype if that is wider, as in the room: rounded once.
    return *((g * dy).to(g.dtype) if need else None for g, need in zip(grads, ctx.needs, strict=True)), *nothing


operator.register_autograd(_backward, setup_context=_setup)
