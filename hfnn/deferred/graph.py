"""The graph of a `hfnn.deferred.Deferred`, and a gradient of logits that is not computed either.

    loss -> logits, and logits derived from them -> hidden, weight, bias

Backward of a loss of unread logits reaches the logits as in torch. So hooks on them run, and `retain_grad` and
`torch.autograd.grad(loss, logits)` work. The gradient is a `Gradient`: it has the shape of the logits' gradient,
without its memory. The product at the end takes the gradients of hidden, weight and bias from `linear_cross_entropy`,
which has computed them. If a Gradient is read on the way, it is computed, and the computed gradient continues from
there.
"""

import functools
import weakref

import torch
from torch.utils._pytree import tree_map_only

from hfnn.core import flops
from hfnn.core.context import context, uncompiled
from hfnn.core.node import Function
from hfnn.deferred.recorded import METADATA, name_of

# Whether the graph is retained for another backward after the running one.
keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph
_AGAIN = (
    "Trying to backward through the graph a second time (or directly access saved tensors after they have already been "
    "freed). Saved intermediate values of the graph are freed when you call .backward() or autograd.grad(). Specify "
    "retain_graph=True if you need to backward through the graph a second time or if you need to access saved tensors "
    "after calling backward."
)


def _held(ctx):
    """The values that a node of this graph holds; it releases them if the graph is not retained."""
    held = ctx.held
    if held is None:
        raise again()
    if not keeps_graph():
        ctx.held = None
    return held


def again() -> RuntimeError:
    """torch's error for a graph that has been freed."""
    return RuntimeError(_AGAIN)


class Logits(Function):
    """hidden weight^T + bias, the first logits of a product."""

    @staticmethod
    def forward(ctx, make, product, hidden, weight, bias):
        ctx.held = product
        ctx.set_materialize_grads(False)
        return make()

    @staticmethod
    def backward(ctx, dy):
        product, needs = _held(ctx), ctx.needs_input_grad[2:]
        if dy is None:
            return (None,) * 5
        given = product.hidden, product.weight, product.bias
        with flops.instead(torch.nn.functional.linear, *given, needs=needs):
            if type(dy) is Gradient and dy.parts is not None:
                return None, None, *dy.of_product(needs)
            return None, None, *product.backward(computed(dy), needs)


class Step(Function):
    """The result of the last step of a plan, applied to the logits before it. read: has their numbers, if these were
    computed and the step's gradient needs them."""

    @staticmethod
    def forward(ctx, make, plan, before, read, logits):
        ctx.held = plan, before, read
        ctx.set_materialize_grads(False)
        return make()

    @staticmethod
    def backward(ctx, dy):
        plan, before, read = _held(ctx)
        if type(dy) is Gradient and dy.parts is not None:
            dy = Gradient.of(before, dy.parts)
        elif dy is not None:
            dy, create_graph = computed(dy), torch.is_grad_enabled()
            with torch.enable_grad():
                if not plan.reads(before):
                    y = before.like().requires_grad_()
                else:
                    y = read[0] if read and not create_graph else before.logits(create_graph)
                y = y if create_graph else y.detach().requires_grad_()
                (dy,) = torch.autograd.grad(plan.steps[-1](y), y, dy, create_graph=create_graph)
        return None, None, None, None, dy


class DeferredLoss(Function):
    """A loss of logits, without them. fused(hidden, weight, bias): the loss; composed(logits): the same from them."""

    @staticmethod
    def forward(ctx, plan, fused, composed, logits):
        ctx.set_materialize_grads(False)
        product = plan.product
        with torch.enable_grad():
            given = product.leaves()
            loss = fused(*given)
        ctx.held = _Part(plan, composed, given, loss)
        ctx.inner = (loss.grad_fn,)
        return loss.detach()

    @staticmethod
    def backward(ctx, dy):
        part, create_graph = _held(ctx), torch.is_grad_enabled()
        if ctx.held is None:
            ctx.inner = ()
        part.plan.product.keep_after_backward()
        if create_graph or context(dy) is not None:
            return None, None, None, part.gradient(part.plan, dy, create_graph)
        return None, None, None, Gradient.of(part.plan, [(part, dy)])


class _Part:
    """A loss and the sources of its gradient: given and loss, a separate graph, until they are used."""

    def __init__(self, plan, composed, given, loss):
        self.plan, self.composed, self.given, self.loss = plan, composed, given, loss

    def of_product(self, dy) -> list:
        """The gradients of hidden, weight and bias, from the loss that was computed without logits."""
        if self.loss is None:
            raise again()
        keep, loss, given = keeps_graph(), self.loss, self.given
        if not keep:
            self.loss = self.given = None
        wanted = [t for t in given if t is not None and t.requires_grad]
        grads = iter(torch.autograd.grad(loss, wanted, dy, retain_graph=keep))
        return [next(grads) if t is not None and t.requires_grad else None for t in given]

    def gradient(self, plan, dy, create_graph: bool = False):
        """The gradient of the logits of `plan`, from which this loss's logits were derived."""
        with torch.enable_grad():
            y = plan.logits(create_graph)
            y = y if create_graph else y.detach().requires_grad_()
            z = functools.reduce(lambda z, step: step(z), self.plan.steps[len(plan.steps) :], y)
            return torch.autograd.grad(self.composed(z), y, dy, create_graph=create_graph)[0]


def _strides(plan, last) -> tuple | None:
    """Of the gradient of logits from which those of a loss, of the plan `last`, were derived; None: contiguous."""
    if plan.second or not last.second:
        return None
    with torch.enable_grad():
        y = plan.meta.detach().requires_grad_()
        z = functools.reduce(lambda z, step: step(z), last.steps[len(plan.steps) :], y)
        return torch.autograd.grad(z, y, torch.empty_like(z, memory_format=torch.contiguous_format))[0].stride()


class Gradient(torch.Tensor):
    """The gradient of logits, computed when it is read.

    parts: losses with their own gradients, of which this is the sum; None once it is computed.
    """

    @staticmethod
    def of(plan, parts: list) -> "Gradient":
        meta = plan.meta
        x = torch.Tensor._make_wrapper_subclass(
            Gradient, meta.shape, strides=_strides(plan, parts[0][0].plan), dtype=meta.dtype, device=plan.product.device
        )
        x._plan, x.parts, x._value = plan, parts, None
        plan.product.readers.append(weakref.ref(x))
        return x

    def of_product(self, needs) -> list:
        """The gradients of hidden, weight and bias, None if not needed."""
        found = [part.of_product(dy) for part, dy in self.parts]
        sums = [sum(same[1:], same[0]) if same[0] is not None else None for same in zip(*found, strict=True)]
        return [g if need else None for g, need in zip(sums, needs, strict=True)]

    def waits(self) -> bool:
        """Whether it is still to be computed."""
        return self._value is None

    def compute(self) -> None:
        self._plan.product.outcome.read = True
        with torch.inference_mode(False), torch.no_grad():
            parts = [part.gradient(self._plan, dy) for part, dy in self.parts]
            self._value, self.parts = sum(parts[1:], parts[0]), None

    def computed(self) -> torch.Tensor:
        if self._value is None:
            self.compute()
        return self._value

    @classmethod
    @uncompiled
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if args and type(args[0]) is Gradient and name_of(func) in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        return _on_values(func, args, kwargs)

    @classmethod
    @uncompiled
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.add.Tensor and not kwargs and all(type(x) is Gradient and x.parts for x in args):
            a, b = args
            if a._plan is b._plan:  # the gradients of two losses, which the engine adds up
                return Gradient.of(a._plan, [*a.parts, *b.parts])
        return _on_values(func, args, kwargs)

    def __repr__(self, *, tensor_contents=None):
        return repr(self.computed())


def computed(x):
    """A gradient as a plain tensor."""
    return x.computed() if type(x) is Gradient else x


def _on_values(func, args, kwargs):
    """func of the computed gradients; if it writes to one and returns it, the Gradient that stands for it."""
    seen = {}

    def value(x):
        seen[id(x.computed())] = x
        return x.computed()

    args, kwargs = tree_map_only(Gradient, value, (args, kwargs or {}))
    result = func(*args, **kwargs)
    return seen.get(id(result), result)


class ComputedLogits(Function):
    """The computed logits of a Deferred, with the graph that the Deferred has in C++. inner: see `Product.value`."""

    @staticmethod
    def forward(ctx, logits, value, inner):
        ctx.set_materialize_grads(False)
        ctx.held = inner
        return value.detach()

    @staticmethod
    def backward(ctx, dy):
        return dy, None, None
