"""Autograd nodes of ops: in C++, described by Python functions, or Functions in Python.

A consumer that would save its input y keeps the node that made y instead, if this node can *build* y again from what it
keeps for its own backward (csrc/autograd/room.h has the rules). Frequent ops are nodes in C++. The others that keep
their producer or are kept are *described*:

    NODE = described("_Op", "xc", build, gradients, second)

    y, statistic = below(compute, x, ...)            # without a graph
    return NODE(y, (kernel, *numbers), x, statistic)

    build(how, *tensors)                 y again, bit for bit
    gradients(dy, needs, how, *tensors)  a tuple with one gradient for each input, None where not needed
    second(dy, needs, how, *tensors)     the same by differentiable ops, under create_graph=True

`how` is a tuple: the kernel or None, then plain values. It must hold no tensor, because Python's garbage collector does
not look into nodes in C++. The functions are called without autograd, except `second`, and without locks. The letters
say what a tensor is; `gradients` and `second` get None for tensors that only `build` reads:

    x   an input: its producer is kept, or the input
    b   the same, and only `build` reads it
    t   the same, and it is kept only if this is by its producer: otherwise y is kept as in torch
    h   a parameter that only `build` reads
    c   a tensor without a gradient: made by the op, or kept as by torch
"""

import contextlib
import functools
from collections.abc import Callable, Iterator

import torch
from torch._functorch.pyfunctorch import temporarily_pop_interpreter_stack
from torch._subclasses import FakeTensor
from torch.autograd import forward_ad

from hfnn.core import bits, flops
from hfnn.core.native import extension
from hfnn.core.written import explained

_functorch, _has_storage = torch._C._functorch, torch._C._has_storage
_is_zeros, _is_negated = torch.Tensor._is_zerotensor, torch.Tensor.is_neg
_retained = torch._C._autograd._get_current_graph_task_keep_graph
_LEVEL = 1  # of is_grads_batched, which does not nest
_REFUSES_TO_DRAW = torch._C.DispatchKeySet(torch._C._parse_dispatch_key("VmapMode"))


def described(label: str, tensors: str, build: Callable, gradients: Callable, second: Callable) -> Callable | None:
    """The call of a described node, or None without the extension: torch's own op then runs."""
    return extension and extension.described(f"{label}Backward", tensors, build, gradients, second)


# below(function, *arguments): the call without a graph.
below = extension and extension.below


def select(op, x: torch.Tensor, *others: torch.Tensor | None, **how):
    """`op.select(...)` for an op with described nodes."""
    return (op.left if extension is None else op.select)(x, *others, **how)


# ---- recipes


class _Counter:
    """How often recipes were handed out and rebuilt, for tests and `report`."""

    def reset(self) -> None:
        if extension is not None:
            extension.reset_counts()

    taken = property(lambda self: extension.counts()[0] if extension is not None else 0)
    rebuilt = property(lambda self: extension.counts()[1] if extension is not None else 0)


counter = _Counter()


@contextlib.contextmanager
def disabled() -> Iterator[None]:
    """No recipes inside the `with` block: every consumer saves its input, as in torch."""
    before = extension is not None and extension.set_recipes(False)
    try:
        yield
    finally:
        if extension is not None:
            extension.set_recipes(before)


def take(x: torch.Tensor):
    """What a Function keeps instead of x, as `ctx.recipe`; None to save x. `tensor()` is x in backward."""
    token = extension and extension.take(x)
    if token is None and x.requires_grad:
        bits.keeps_whole(x)
    return token


def carries(x: torch.Tensor) -> bool:
    """Whether consumers keep the node that made x instead of x."""
    return extension is not None and extension.carries(x)


def parameters_are_resharded(on: bool = True) -> bool:
    """Parameters of this process take turns in shared memory, so no recipe may refer to one. Called by haiscale.fsdp.
    Returns whether they did before."""
    return extension is not None and extension.set_resharded(on)


# ---- Functions


def drawing():
    """Allows random draws in the `with` block, also while gradients are computed for many dy at once."""
    return torch._C._ExcludeDispatchKeyGuard(_REFUSES_TO_DRAW)


class Function(torch.autograd.Function):
    """`apply` is in C++ and omits torch's Python code for functorch, which `context` has excluded: half the cost.

    Forward calls `ctx.set_materialize_grads(False)`: without a gradient, as in some second derivatives, none is given.
    Backward may return gradients in another dtype than the inputs'; the engine casts them. For a batched gradient
    (`is_grads_batched=True`, or a backward inside `torch.func.vmap`) it is called once per element, because kernels
    need real memory. After the last one `ctx.recipe` is released, unless the graph is retained.
    """

    apply = vars(torch._C._FunctionBase)["apply"]

    def __init_subclass__(cls):
        super().__init_subclass__()
        own = vars(cls).get("backward")
        if own is not None:
            cls.backward = staticmethod(_whole(own.__func__))


def _whole(backward: Callable) -> Callable:
    @functools.wraps(backward)
    def whole(ctx, *grads):
        if grads[0] is None and all(dy is None for dy in grads):  # torch's nodes then give no gradients either
            found = (None,) * len(ctx.needs_input_grad)
        else:
            try:
                found = _one_by_one(backward, ctx, grads)
            except RuntimeError as error:
                error.args = (explained(ctx, str(error)),)
                raise
        kept = getattr(ctx, "recipe", None)
        if kept is not None and not _retained():
            kept.release()
        return found

    return whole


def _one_by_one(backward, ctx, grads):
    for dy in grads:
        if dy is None:
            continue
        if not _has_storage(dy):
            return _of_many(backward, ctx, grads)
        if type(dy) is torch.Tensor and (_is_zeros(dy) or _is_negated(dy)):
            return _one_by_one(backward, ctx, [_in_memory(g) if type(g) is torch.Tensor else g for g in grads])
    if forward_ad._current_level >= 0:
        return _with_tangents(backward, ctx, grads)
    return backward(ctx, *grads)


def _in_memory(dy):
    """Materialises zeros without memory and lazily negated tensors, for kernels."""
    return dy.clone() if _is_zeros(dy) else dy.resolve_neg()


def _with_tangents(backward, ctx, grads):
    """Forward AD of backward: gradients are linear in dy, so their tangents are the gradients of dy's tangent."""
    duals = [(None, None) if dy is None else forward_ad.unpack_dual(dy) for dy in grads]
    if all(tangent is None for _, tangent in duals):
        return backward(ctx, *grads)
    tangents = [
        dy if dy is None else dy.new_zeros(dy.shape) if tangent is None else _in_memory(tangent)
        for dy, tangent in duals
    ]
    context = _Context(ctx)
    found = [backward(context, *each) for each in ([dy for dy, _ in duals], tangents)]
    found = [each if isinstance(each, tuple) else (each,) for each in found]
    return tuple(dx if dx is None else forward_ad.make_dual(dx, tangent) for dx, tangent in zip(*found, strict=True))


class _Context:
    """A ctx whose saved tensors are unpacked once: a checkpoint does not return them a second time."""

    def __init__(self, ctx):
        vars(self)["_ctx"] = ctx

    def __getattr__(self, name):
        return getattr(self._ctx, name)

    def __setattr__(self, name, value):
        setattr(self._ctx, name, value)

    @functools.cached_property
    def saved_tensors(self):
        return self._ctx.saved_tensors


def _of_many(backward, ctx, grads):
    """The gradients of each, batched like the given ones."""
    if any(dy is not None and _functorch.is_legacy_batchedtensor(dy) for dy in grads):
        level, batched = _LEVEL, torch._add_batch_dim
        plain = drawing
        apart = [_legacy(dy) for dy in grads]
    elif any(dy is not None and _functorch.is_batchedtensor(dy) for dy in grads):
        level = max(_functorch.maybe_get_level(dy) for dy in grads if dy is not None)
        batched, plain = _functorch._add_batch_dim, temporarily_pop_interpreter_stack
        apart = [(dy, None) if dy is None else _functorch._unwrap_batched(dy, level) for dy in grads]
    else:  # a sparse one, say
        return backward(ctx, *grads)
    count = next(dy.shape[dim] for dy, dim in apart if dim is not None)
    context = _Context(ctx)
    with plain():
        each = [
            _one_by_one(backward, context, [dy if dim is None else dy.select(dim, i) for dy, dim in apart])
            for i in range(count)
        ]
        each = [found if isinstance(found, tuple) else (found,) for found in each]
        stacked = [None if parts[0] is None else torch.stack(parts) for parts in zip(*each, strict=True)]
    return tuple(None if dx is None else batched(dx, 0, level) for dx in stacked)


def of_many(backward: Callable, dy: torch.Tensor) -> tuple:
    """The gradients of a C++ node, whose `backward` takes one dy, for a batched dy."""
    return _of_many(lambda _, one: backward(one), None, (dy,))


def _legacy(dy):
    if dy is None or not _functorch.is_legacy_batchedtensor(dy):
        return dy, None
    return torch._remove_batch_dim(dy, _LEVEL, 0, 0), 0


def wanted(node) -> bool:
    """Whether this pass of the engine, in a backward, runs the node of an input: a backward may be for some inputs."""
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # for a leaf whose gradient is returned
        return True


def double_backward(formula: Callable, inputs: tuple, needs: tuple[bool, ...], dy: torch.Tensor) -> tuple:
    """Gradients that can be differentiated again, for a backward that runs under create_graph=True.

    Differentiates torch's `formula(*inputs)` on the saved tensors; None where `needs` is false.
    """
    if not any(needs):
        return (None,) * len(needs)
    with torch.enable_grad():
        # Aliases, because one tensor may be used in several places with a separate gradient each, also if a weight was
        # frozen after forward. view_as changes the stride of a dimension of size 1, of which torch's gradient of batch
        # norm makes wrong numbers.
        alias = lambda x: x[...] if x.requires_grad else x.detach().requires_grad_()  # noqa: E731
        inputs = tuple(alias(x) if need else x for x, need in zip(inputs, needs, strict=True))
        wanted = [x for x, need in zip(inputs, needs, strict=True) if need]
        with flops.uncounted(profiled=True):
            outputs = formula(*inputs)
        grads = iter(torch.autograd.grad(outputs, wanted, dy, create_graph=True))
    return tuple(next(grads) if need else None for need in needs)


if extension is not None:
    capturing = getattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: False)
    extension.connect(of_many, capturing, bits.keeps_whole, flops.watched, FakeTensor)
