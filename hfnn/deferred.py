"""Logits that nobody has looked at yet.

    logits = hidden weight^T + bias

A language model returns its logits beside its loss, and in training only the loss is used. A `Deferred` stands for the
logits: it has their shape, dtype and device, but no memory. What models do between the product and the loss (casts,
reshapes, indices of the leading dimensions, factors, a soft cap, a constant row) is recorded, and
`torch.nn.functional.cross_entropy` of a Deferred becomes `hfnn.functional.linear_cross_entropy`, which never holds the
logits. Anything else computes them, once, as forward would have done, with their graph, and goes on with those. They
can be computed for as long as the weights are what they were: after that it is an error.
"""

import functools
import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from hfnn import functional, kernel
from hfnn.ops import cross_entropy
from hfnn.ops.head import no_autocast, product_dtype
from hfnn.recorded import HANDLERS, METADATA, PLAIN, name_of, run_hooks

HALVES = (torch.bfloat16, torch.float16)


def defer(hidden, weight, bias, *, compact: bool = False, prefer: str = "auto") -> "Deferred | None":
    """`torch.nn.functional.linear(hidden, weight, bias)` as a Deferred, or None where it is to be computed at once.

    compact, prefer: as in `hfnn.functional.linear_cross_entropy`. None for tensors that are not plain, inside tracers
    and transforms, where `_version` cannot be read (inference tensors), and for what torch would refuse.
    """
    given = [t for t in (hidden, weight, bias) if t is not None]
    if kernel.forced() == "torch" or kernel.context(*given) is not None:
        return None
    if any(type(t) not in PLAIN or t.is_inference() or not t.is_floating_point() for t in given):
        return None
    if weight.dim() != 2 or hidden.shape[-1:] != weight.shape[1:] or not weight.numel() or hidden.dim() < 2:
        return None
    dtypes = {t.dtype for t in given}
    autocast = torch.is_autocast_enabled(hidden.device.type)
    if len({t.device for t in given}) > 1 or (len(dtypes) > 1 and (not autocast or torch.float64 in dtypes)):
        return None
    dtype = hidden.dtype if hidden.dtype is torch.float64 else product_dtype(hidden)
    product = Product(hidden, weight, bias, dtype, torch.is_grad_enabled(), compact, prefer)
    with no_autocast(hidden):
        meta = nn.functional.linear(*(_meta(t, dtype) for t in (hidden, weight)))
    return Deferred.of(Plan(product, meta, product.grad and any(t.requires_grad for t in given), hidden))


def _meta(x, dtype=None):
    """Shape and strides of x without its numbers."""
    return torch.empty_strided(x.shape, x.stride(), dtype=dtype or x.dtype, device="meta")


class Product:
    """The linear map behind a Deferred and all that was derived from it, which are its `members`.

    dtype: what torch multiplies in; grad: whether grad mode was on.
    """

    def __init__(self, hidden, weight, bias, dtype, grad, compact, prefer):
        self.hidden, self.weight, self.bias, self.dtype, self.grad = hidden, weight, bias, dtype, grad
        self.compact, self.prefer = compact, prefer
        self.members: list[weakref.ref] = []
        self._marks: list[tuple] = []
        self.watch(hidden, weight, bias)

    def watch(self, *tensors) -> None:
        """Remember what these are now: `check` raises once they are something else."""
        self._marks += [(t, t._version, t.data_ptr()) for t in tensors if t is not None]

    def check(self) -> None:
        for t, version, pointer in self._marks:
            gone = t.numel() and not t.untyped_storage().nbytes()
            if gone or (t._version, t.data_ptr()) != (version, pointer):
                raise RuntimeError(
                    "these logits were not computed in forward, for the loss needs none, and cannot be computed now: "
                    + ("a weight was resharded" if gone else "the weights have changed")
                    + " since (an optimizer step ran?). Read output.logits between forward and the step."
                )

    def logits(self, hidden, weight, bias):
        """The product as torch computes it, also under the autocast state of forward."""
        hidden, weight = hidden.to(self.dtype), weight.to(self.dtype)
        with no_autocast(hidden):
            return nn.functional.linear(hidden, weight, None if bias is None else bias.to(self.dtype))

    def compute(self) -> None:
        """Every member that is still alive: a view stays a view of the tensor it was taken of, whatever is written."""
        self.check()
        members, self.members = [ref() for ref in self.members], []
        with torch.inference_mode(False):
            for member in members:
                if member is not None:
                    member._compute()


@dataclass(frozen=True)
class Plan:
    """How a Deferred follows from its product: z = after tanh(before (hidden weight^T + bias + row)), or without tanh.

    meta: shape and strides, on the device "meta"; grad: whether the logits require grad; hidden: a row for each row of
    these logits, in their order; steps: what makes the logits from those of the product.
    """

    product: Product
    meta: torch.Tensor
    grad: bool
    hidden: torch.Tensor
    row: torch.Tensor | None = None
    before: float = 1.0
    after: float = 1.0
    capped: bool = False
    steps: tuple[Callable, ...] = field(default=(), repr=False)

    def then(self, step, meta=None, **changes) -> "Plan":
        meta = step(self.meta) if meta is None else meta
        # What is made outside grad mode has no graph.
        grad = self.grad and torch.is_grad_enabled()
        return replace(self, **{"meta": meta, "grad": grad, "steps": (*self.steps, step), **changes})

    def loss(self, target, weight, options) -> torch.Tensor | None:
        """`cross_entropy` of these logits without them, or None."""
        product = self.product
        if any(type(t) not in PLAIN or t.device != product.hidden.device for t in (target, weight) if t is not None):
            return None
        if self.meta.dim() != 2 or target.dtype is not torch.int64 or target.shape != self.meta.shape[:1]:
            return None
        if self.meta.dtype is not product.dtype and (product.dtype, self.meta.dtype) not in _WIDER:
            return None
        product.check()
        hidden, matrix, bias = self.hidden, product.weight, product.bias
        if self.row is not None:
            row = self.row.reshape(-1).to(matrix.dtype)
            bias = row if bias is None else bias + row
        if not self.grad:
            hidden, matrix, bias = (None if t is None else t.detach() for t in (hidden, matrix, bias))
        # c tanh(b x) is softcap tanh(scale x / softcap) for softcap = |c| and scale = b c.
        softcap, scale = (abs(self.after), self.before * self.after) if self.capped else (None, self.before)
        if math.isclose(scale, 1.0, rel_tol=1e-12):
            scale = 1.0
        out = cross_entropy.OP.out_dtype(self.meta.new_empty(0, device=product.hidden.device))
        with self._autocast():
            loss = functional.linear_cross_entropy(
                hidden,
                matrix,
                target.reshape(hidden.shape[:-1]),
                bias,
                weight=weight,
                softcap=softcap,
                logit_scale=scale,
                compact=product.compact,
                dtype=out,
                prefer=product.prefer,
                **options,
            )
        return (loss.reshape(target.shape) if loss.dim() else loss).to(out)

    def _autocast(self):
        """The state in which torch multiplies in the product's dtype."""
        product = self.product
        if all(t is None or t.dtype is product.dtype for t in (product.hidden, product.weight, product.bias)):
            return no_autocast(product.hidden)
        return torch.autocast(product.hidden.device.type, product.dtype)


_WIDER = {(half, torch.float32) for half in HALVES}


class _Logits(torch.autograd.Function):
    """The graph of a Deferred for code in C++, which sees the tensor without its memory and not what it stands for."""

    @staticmethod
    def forward(ctx, plan, hidden, weight, bias):
        ctx.plan = plan
        return _empty(plan)

    @staticmethod
    def backward(ctx, dy):
        product, needs = ctx.plan.product, ctx.needs_input_grad[1:]
        product.check()
        create_graph = torch.is_grad_enabled()
        with torch.enable_grad():
            # Views, so that gradients stop here: the hidden states may come from this very weight.
            given = [None if t is None else t.view_as(t) for t in (product.hidden, product.weight, product.bias)]
            y = product.logits(*given)
            for step in ctx.plan.steps:
                y = step(y)
            wanted = [t for t, need in zip(given, needs, strict=True) if need]
            grads = iter(torch.autograd.grad(y, wanted, dy, create_graph=create_graph))
        return None, *(next(grads) if need else None for need in needs)


class _Adopted(torch.autograd.Function):
    """The computed logits of a Deferred, with the graph that the Deferred has in C++."""

    @staticmethod
    def forward(ctx, deferred, value):
        return value.detach()

    @staticmethod
    def backward(ctx, dy):
        return dy, None


def _empty(plan):
    return torch.Tensor._make_wrapper_subclass(
        Deferred,
        plan.meta.shape,
        strides=plan.meta.stride(),
        storage_offset=plan.meta.storage_offset(),
        dtype=plan.meta.dtype,
        device=plan.product.hidden.device,
    )


class Deferred(torch.Tensor):
    """A tensor that is computed when it is looked at."""

    @staticmethod
    def of(plan: Plan, parent: "Deferred | None" = None) -> "Deferred":
        product = plan.product
        y = _Logits.apply(plan, product.hidden, product.weight, product.bias) if plan.grad else _empty(plan)
        y._plan, y._parent, y._value, y._hooks = plan, parent, None, None
        y._grad_mode = torch.is_grad_enabled() if parent is not None else product.grad
        product.members.append(weakref.ref(y))
        return y

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if args and type(args[0]) is Deferred and args[0]._value is None:
            name = name_of(func)
            if name == "grad_fn":  # DDP puts its sink behind outputs that have one
                return None
            if name in METADATA:
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
            if name in HANDLERS and not args[0]._adopted():
                result = HANDLERS[name](args[0], func, args[1:], kwargs)
                if result is not None:
                    return result
        return _on_values(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        # Code in C++ comes here, below autograd, where no graph can be made: that of `_Logits` is in use already.
        bare = functools.partial(Deferred._bare, mutable=func._schema.is_mutable)
        args, kwargs = tree_map_only(Deferred, bare, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __repr__(self, *, tensor_contents=None):
        if self._value is not None:
            return repr(self._value)
        return f"Deferred(shape={tuple(self.shape)}, dtype={self.dtype}, not computed)"

    def then(self, step: Callable, **changes) -> "Deferred":
        """What `step` makes of these logits, without computing them; `changes` are those of the plan."""
        return Deferred.of(self._plan.then(step, **changes), parent=self)

    def computed(self) -> torch.Tensor:
        """The logits. RuntimeError where they can no longer be computed."""
        if self._value is None:
            self._plan.product.compute()
        return self._value

    def _compute(self):
        plan, product = self._plan, self._plan.product
        with torch.set_grad_enabled(self._grad_mode):
            if self._parent is None:
                self._value = product.logits(product.hidden, product.weight, product.bias)
            else:
                self._value = plan.steps[-1](self._parent._value)
        self._parent = None
        if self._adopted():
            with torch.enable_grad():
                self._value = _Adopted.apply(self, self._value)
        if self._hooks is not None and self._value.requires_grad:
            self._value.register_hook(functools.partial(run_hooks, self._hooks))

    def _adopted(self) -> bool:
        """Whether an autograd.Function made this outside grad mode and returned it: the graph is that Function's."""
        if self._plan.grad:
            return False
        with torch._C.DisableTorchFunctionSubclass():
            return self.requires_grad

    def _bare(self, mutable: bool):
        """The logits without a graph."""
        if self._value is not None or not (self._plan.grad or self._adopted()):
            return self.computed().detach()
        if mutable:
            raise RuntimeError("cannot write to logits that were not computed in forward: write to output.logits + 0")
        product = self._plan.product
        product.check()
        with torch.no_grad():
            y = product.logits(product.hidden, product.weight, product.bias)
            for step in self._plan.steps:
                y = step(y)
        return y


def _on_values(func, args, kwargs):
    """func of the computed logits; where it wrote to them and returns them, the Deferred that stands for them."""
    seen = {}

    def value(deferred):
        seen[id(deferred.computed())] = deferred
        return deferred.computed()

    args, kwargs = tree_map_only(Deferred, value, (args, kwargs))
    result = func(*args, **kwargs)
    return seen.get(id(result), result)
