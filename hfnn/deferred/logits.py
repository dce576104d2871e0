"""Logits that have not been read yet.

    logits = hidden weight^T + bias

A language model returns its logits together with its loss, and training uses only the loss. A `Deferred` stands for the
logits: it has their shape, dtype and device, but no memory. Operations that models apply between the product and the
loss (casts, reshapes, indices of the leading dimensions, factors, a soft cap, a constant row) are recorded.
`torch.nn.functional.cross_entropy` of a Deferred becomes `hfnn.functional.linear_cross_entropy`, which never holds the
logits. Any other operation computes them once, as forward would have done, and continues with the result. Logits have
their graph from the beginning (hfnn/deferred/graph.py). If they are read after an optimizer step, they are still those
of their forward (hfnn/deferred/product.py).
"""

import functools
import itertools
import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from hfnn import functional
from hfnn.core import flops, kernel
from hfnn.core.context import PLAIN, autocasting, context, uncompiled
from hfnn.deferred.graph import ComputedLogits, DeferredLoss, Logits, Step, computed
from hfnn.deferred.product import Product, saving_hooks
from hfnn.deferred.recorded import GRAPH, HANDLERS, METADATA, name_of, ways
from hfnn.ops import cross_entropy
from hfnn.ops.head import no_autocast, product_dtype

HALVES = (torch.bfloat16, torch.float16)


def defer(hidden, weight, bias, *, compact: bool = False, prefer: str = "auto") -> "Deferred | None":
    """`torch.nn.functional.linear(hidden, weight, bias)` as a Deferred, or None if it must be computed at once.

    compact, prefer: as in `hfnn.functional.linear_cross_entropy`. None for tensors that are not plain, inside tracers
    and transforms, if `_version` cannot be read (inference tensors), and for arguments that torch would refuse.
    """
    given = [t for t in (hidden, weight, bias) if t is not None]
    if hidden.is_meta or kernel.forced() == "torch" or flops.watched() or context(*given) is not None:
        return None
    if any(type(t) not in PLAIN or t.is_inference() or not t.is_floating_point() for t in given):
        return None
    if weight.dim() != 2 or hidden.shape[-1:] != weight.shape[1:] or not weight.numel() or hidden.dim() < 2:
        return None
    dtypes = {t.dtype for t in given}
    autocast = autocasting(hidden)
    if len({t.device for t in given}) > 1 or (len(dtypes) > 1 and (not autocast or torch.float64 in dtypes)):
        return None
    dtype = hidden.dtype if hidden.dtype is torch.float64 else product_dtype(hidden)
    product = Product(hidden, weight, bias, dtype, torch.is_grad_enabled(), compact, prefer)
    if hidden.is_contiguous():
        meta = torch.empty(*hidden.shape[:-1], weight.shape[0], dtype=dtype, device="meta")
    else:  # torch knows the strides of its result, but is slow
        with no_autocast(hidden):
            meta = nn.functional.linear(*(_meta(t, dtype) for t in (hidden, weight)))
    return Deferred.of(Epilogue(product, meta, product.grad and any(t.requires_grad for t in given)))


def _meta(x, dtype=None):
    """Shape and strides of x without its numbers."""
    return torch.empty_strided(x.shape, x.stride(), dtype=dtype or x.dtype, device="meta")


@dataclass(frozen=True)
class Epilogue:
    """How a Deferred follows from its product: z = after tanh(before (hidden weight^T + bias + row)), or without tanh.

    meta: shape and strides, on the device "meta"; grad: whether the logits require grad; rows: selects the rows of
    hidden for these logits, in their order; second: whether the classes are dimension 1, not the last; logs: whether
    log_softmax was applied; steps: make these logits from those of the product.
    """

    product: Product
    meta: torch.Tensor
    grad: bool
    rows: tuple[Callable, ...] = field(default=(), repr=False)
    row: torch.Tensor | None = None
    before: float = 1.0
    after: float = 1.0
    capped: bool = False
    second: bool = False
    logs: bool = False
    steps: tuple[Callable, ...] = field(default=(), repr=False)

    def reads(self, before: "Epilogue") -> bool:
        """Whether the gradient of the last step needs the numbers of `before`, the plan that it follows."""
        return (self.capped, self.logs) != (before.capped, before.logs)

    def then(self, step, meta=None, **changes) -> "Epilogue":
        meta = step(self.meta) if meta is None else meta
        # Tensors made outside grad mode have no graph.
        grad = self.grad and torch.is_grad_enabled()
        return replace(self, **{"meta": meta, "grad": grad, "steps": (*self.steps, step), **changes})

    def logits(self, graph: bool = False) -> torch.Tensor:
        """The numbers, also after a write to sources that were copied. graph: and their graph, in grad mode."""
        product = self.product
        (product.check_unwritten if graph else product.check)(numbers=True)
        given = (product.hidden, product.weight, product.bias) if graph else product.given()
        return functools.reduce(lambda y, step: step(y), self.steps, product.logits(*given))

    def like(self) -> torch.Tensor:
        """A tensor of the same layout with arbitrary values."""
        return torch.empty_strided(
            self.meta.shape, self.meta.stride(), dtype=self.meta.dtype, device=self.product.device
        )

    def loss(self, logits: "Deferred", function, target, weight, options) -> torch.Tensor | None:
        """`function` of `logits`, whose plan this is, without computing them; or None. function: cross_entropy, or
        nll_loss of their log_softmax."""
        product = self.product
        if any(type(t) not in PLAIN or t.device != product.device for t in (target, weight) if t is not None):
            return None
        if target.dtype is not torch.int64 or (self.meta.dim() != 2 and not self.second):
            return None
        if target.shape != self.meta.shape[:1] + self.meta.shape[2:]:
            return None
        if self.meta.dtype is not product.dtype and (product.dtype, self.meta.dtype) not in _WIDER:
            return None
        product.check()
        if self.grad and product.change() is not None:  # the gradient needs what was written to
            return None
        product.outcome.used = True
        out = cross_entropy.OP.out_dtype(self.meta.new_empty(0, device=product.device))
        if not self.grad:
            with torch.no_grad():
                return self._fused(*product.given(), target, weight, out, options)

        def fused(*given):
            return self._fused(*given, target, weight, out, options)

        def composed(y):
            with no_autocast(y):
                return function(y.to(out), target, None if weight is None else weight.to(out), **options)

        return DeferredLoss.apply(self, fused, composed, logits)

    def _fused(self, hidden, matrix, bias, target, weight, out, options):
        product = self.product
        hidden = functools.reduce(lambda h, rows: rows(h), self.rows, hidden)
        if self.row is not None:
            row = self.row.reshape(-1).to(matrix.dtype)
            bias = row if bias is None else bias + row
        # c tanh(b x) is softcap tanh(scale x / softcap) for softcap = |c| and scale = b c.
        softcap, scale = (abs(self.after), self.before * self.after) if self.capped else (None, self.before)
        if math.isclose(scale, 1.0, rel_tol=1e-12):
            scale = 1.0
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
    """A tensor that is computed when it is read."""

    @staticmethod
    def of(plan: Epilogue, parent: "Deferred | None" = None) -> "Deferred":
        product, read = plan.product, []  # read: what the last step has read, if it was computed
        make = functools.partial(_empty, plan)
        if not plan.grad:
            y = make()
        elif parent is None:
            y = Logits.apply(make, product, product.hidden, product.weight, product.bias)
        else:
            y = Step.apply(make, plan, parent._plan, read, parent)
        y._plan, y._parent, y._value, y._node, y._hooks, y._read = plan, parent, None, None, [], read
        y._grad_mode = torch.is_grad_enabled() if parent is not None else product.grad
        product.members.append(weakref.ref(y))
        return y

    @classmethod
    @uncompiled
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in _ENGINE:
            return _ENGINE[func](*args, **kwargs)
        name = name_of(func)
        if name in GRAPH and type(args[0]) is Deferred:
            return GRAPH[name](*args, **kwargs)
        if args and type(args[0]) is Deferred and args[0]._value is None:
            if name == "grad_fn":  # DDP adds its sink to outputs that have one
                return None
            if name in METADATA:
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
            if name in HANDLERS and not args[0]._adopted() and saving_hooks() == args[0]._plan.product.hooks:
                result = HANDLERS[name](args[0], func, args[1:], kwargs)
                if result is not None:
                    return result
        return _on_values(func, args, kwargs)

    @classmethod
    @uncompiled
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        # C++ code arrives here, below autograd, where no graph can be made: the graph of `_Logits` is already in use.
        bare = functools.partial(Deferred._bare, mutable=func._schema.is_mutable)
        args, kwargs = tree_map_only(Deferred, bare, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __repr__(self, *, tensor_contents=None):
        if self._value is not None:
            return repr(self._value)
        return f"Deferred(shape={tuple(self.shape)}, dtype={self.dtype}, not computed)"

    def then(self, step: Callable, **changes) -> "Deferred":
        """The result of `step` on these logits, without computing them; `changes` are changes of the plan."""
        return Deferred.of(self._plan.then(step, **changes), parent=self)

    def steps(self) -> "list[Epilogue]":
        """The plans that lead from the product to these logits."""
        before = [] if self._parent is None else self._parent.steps()
        return [*before, self._plan]

    @staticmethod
    def again(steps: "list[Epilogue]", hidden) -> "Deferred":
        """The result of the steps on the same product with other hidden states."""
        first = steps[0].product
        product = Product(hidden, first.weight, first.bias, first.dtype, first.grad, first.compact, first.prefer)
        found = None
        for plan in steps:
            found = Deferred.of(replace(plan, product=product), found)
        return found

    def computed(self) -> torch.Tensor:
        """The logits. Raises RuntimeError if they can no longer be computed."""
        if self._value is None:
            self._plan.product.compute()
        return self._value

    def waits(self) -> bool:
        """Whether these are still to be computed."""
        return self._value is None

    def _compute(self):
        plan, parent, inner = self._plan, self._parent, None
        with torch.set_grad_enabled(self._grad_mode):
            if parent is None:
                value, inner = plan.product.value(plan.grad)
            else:
                value = plan.steps[-1](parent._value)
        if (plan.grad and (parent is None or not value._is_view())) or self._adopted():
            if parent is not None and plan.reads(parent._plan):
                self._read.append(parent._value.detach())
            with torch.enable_grad():
                value = ComputedLogits.apply(self, value.detach(), inner)
            self._node = value.grad_fn
        elif value.requires_grad:
            # A view stays a view, so its gradient does not pass this tensor's node.
            for hook in self._hooks:
                value.register_hook(hook)
            if self.retains_grad:
                value.retain_grad()
        self._parent, self._value, self._made_by = None, value, value.grad_fn

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
        with torch.no_grad():
            return self._plan.logits()


def _on_values(func, args, kwargs):
    """func of the computed logits; if it writes to them and returns them, the Deferred that stands for them."""
    seen = {}

    def value(deferred):
        seen[id(deferred.computed())] = deferred
        return deferred.computed()

    args, kwargs = tree_map_only(Deferred, value, (args, kwargs))
    result = func(*args, **kwargs)
    return seen.get(id(result), result)


def _ways(inputs) -> list[list[torch.Tensor]]:
    """The tensors through which the gradient of each input comes: see `recorded.ways`."""
    found = [ways(x) if type(x) is Deferred else (True, None) for x in inputs]
    return [
        [t for t in (x if node else None, value) if t is not None]
        for x, (node, value) in zip(inputs, found, strict=True)
    ]


def _gradients(outputs, inputs, grad_outputs=None, allow_unused=False, materialize_grads=False, **options) -> tuple:
    """`torch.autograd.grad` with logits among the tensors."""
    outputs, grad_outputs = tree_map_only(Deferred, Deferred.computed, (outputs, grad_outputs))
    asked, allow_unused = _ways(inputs), allow_unused or materialize_grads
    flat = list(itertools.chain.from_iterable(asked))
    with torch._C.DisableTorchFunctionSubclass():
        unused = allow_unused or len(flat) > len(asked)
        grads = iter(torch.autograd.grad(outputs, flat, grad_outputs, allow_unused=unused, **options))
    sums = []
    for i, (x, found) in enumerate(zip(inputs, asked, strict=True)):
        there = [computed(g) for g in itertools.islice(grads, len(found)) if g is not None]
        if not there and not allow_unused:
            raise RuntimeError(
                f"The differentiated Tensor at index {i} appears to not have been used in the graph. Set "
                "allow_unused=True if this is the desired behavior."
            )
        zeros = torch.zeros_like(x) if materialize_grads and not there else None
        sums.append(sum(there[1:], there[0]) if there else zeros)
    return tuple(sums)


def _backward(tensors, grad_tensors=None, inputs=None, **options) -> None:
    """`torch.autograd.backward` with logits among the tensors."""
    tensors, grad_tensors = tree_map_only(Deferred, Deferred.computed, (tensors, grad_tensors))
    inputs = None if inputs is None else list(itertools.chain.from_iterable(_ways(inputs)))
    with torch._C.DisableTorchFunctionSubclass():
        torch.autograd.backward(tensors, grad_tensors, inputs=inputs, **options)


_ENGINE = {torch.autograd.grad: _gradients, torch.autograd.backward: _backward}
