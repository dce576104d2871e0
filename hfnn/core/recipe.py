"""Recipes: tensors that backward can rebuild instead of keeping.

In eager mode a producer keeps its input and its consumer keeps the producer's output. So a cheap op between two matrix
products costs a full tensor. But the node that made y, `y.grad_fn`, keeps the sources of y for its own backward. So a
consumer keeps that node instead of y. In backward the node builds y again:

    producer    save(ctx, x, weight, made=(rstd,))     # as ctx.save_for_backward
                return carry(ctx, y, build)            # y == build(x, weight, rstd), bit for bit
    consumer    token = take(x)                        # None: save x, as torch does
    backward    x = token.tensor()                     # shared by siblings, freed by the last one

A room that keeps its input is a consumer, too: `save` keeps a token instead of a tensor if it can, and `saved` returns
all tensors. `Function` (function.py) calls `finish` at the end of each backward. Unless the graph is retained, tokens
end there, and a producer builds once more the outputs for which tokens still exist.

`take` returns a token only while the output and everything that its node saved are unchanged, and only if the hooks of
saved tensors are the same as at the producer. A checkpoint then repeats both, and the repeated forward saves the same
as the first one. A limit of this fallback: it does not see a write through a view of a tensor that is gone itself.
"""

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterator

import torch
from torch._subclasses import FakeTensor
from torch.autograd.function import BackwardCFunction
from torch.utils.weak import TensorWeakRef

from hfnn.core import bits, context, flops
from hfnn.core.counter import counter
from hfnn.core.function import of_many, written_to
from hfnn.core.native import extension as native

_hooks, _at_the_end = torch._C._autograd._top_saved_tensors_default_hooks, torch.autograd.Variable._execution_engine
_task, _retained = torch._C._current_graph_task_id, torch._C._autograd._get_current_graph_task_keep_graph

# Nodes that building a tensor may run, at most (in C++: kLongest). A result that would take more is kept, as in torch.
LONGEST = 16

_resharded = False
_enabled = True


@contextlib.contextmanager
def disabled() -> Iterator[None]:
    """No recipes inside the `with` block: every consumer saves its input, as in torch."""
    before = _enabled
    _enable(False)
    try:
        yield
    finally:
        _enable(before)


def _enable(on: bool) -> None:
    global _enabled
    _enabled = on
    if native is not None:
        native.set_recipes(on)


class Kept:
    """What a node keeps besides its saved tensors: tokens by their position among these, recipes by output index."""

    __slots__ = ("__weakref__", "hooks", "marks", "outputs", "steps", "tokens", "unpacked")

    def __init__(self, tokens: dict):
        self.tokens, self.outputs, self.hooks = tokens, {}, _hooks_now()
        self.steps = 1 + sum(token.steps for token in tokens.values())
        self.marks = None  # of the saved tensors, if they make a recipe
        self.unpacked = None  # (a backward, the results of the hooks of saved tensors in it)

    def holds(self, node) -> bool:
        """Whether everything that the node saved is unchanged."""
        if self.hooks is None:
            try:
                same = self.marks == _places(node.saved_tensors)
            except RuntimeError:  # written to
                return False
        else:  # hooks must not be called here; nothing is known about freed tensors
            seen = ((ref(), mark) for ref, *mark in self.marks)
            same = all(t is None or [t._version, *_places((t,))] == mark for t, mark in seen)
        return same and (not self.tokens or all(token.holds() for token in self.tokens.values()))

    def finish(self, node) -> None:
        """Ends the node's own backward."""
        if not _retained():
            for output in self.outputs.values():
                if output.alive:
                    output.leave(node)
                if output.token is not None:
                    output.token.release()
            for token in self.tokens.values():
                token.release()
            self.tokens, self.outputs, self.marks, self.hooks = {}, {}, None, None
        self.unpacked = None

    def forget(self) -> None:
        self.unpacked = None


class _Output:
    """How to build one output of a node again, and the result that its consumers share in one backward (one task)."""

    __slots__ = ("alive", "build", "dtype", "left", "look", "served", "shared", "steps", "task", "token")

    def __init__(self, y, build, token, steps):
        self.build, self.token, self.dtype, self.look = build, token, y.dtype, _look(y)
        self.steps = steps  # nodes that building it runs
        self.alive = self.served = 0  # tokens, and those of them that `task` has served
        self.task = self.shared = None
        self.left = None  # the tensor that the producer built at its end, or why it could not

    def make(self, node, dtype=None) -> torch.Tensor:
        tensors, build = list(raw(node)), self.build
        for at, token in node.recipe.tokens.items():
            tensors[at] = token.get(None, False)
        if self.token is not None:
            tensors.insert(0, self.token.get(None, True))
        # Kernels support a result dtype as wide as their input's, or wider: not bfloat16 for float16 or vice versa.
        if dtype not in (None, self.dtype) and hasattr(build, "into") and tensors[0].dtype in (dtype, torch.float32):
            build = build.into(dtype)
        with torch._C._DisableAutocast():
            return as_dtype(build(*tensors), dtype)

    def holds(self) -> bool:
        return self.token is None or self.token.holds()

    def forget(self) -> None:
        self.task, self.served, self.shared = None, 0, None

    def leave(self, node) -> None:
        """Builds the tensor for tokens that outlive the node's saved tensors."""
        try:
            with torch.no_grad():
                self.left = self.make(node)
        except RuntimeError as error:  # does not concern this backward
            self.left = error


class Unread:
    """A parameter that is the first argument of `build` and that the room's own backward does not read: for `carry`."""

    __slots__ = ("_mark", "_p")
    steps = 0

    def __init__(self, p: torch.Tensor):
        p = _own_copy(p) if parameters_may_be_resharded() else p
        self._p, self._mark = p, (p._version, *_places((p,)))

    def holds(self) -> bool:
        return self._p is not None and self._mark == (self._p._version, *_places((self._p,)))

    def get(self, dtype, last) -> torch.Tensor:
        if not self.holds():
            raise written_to(self._p, self._mark[0])
        return self._p

    def release(self) -> None:
        self._p = None


class Token:
    """A consumer's reference to the node that made its input, kept instead of that input."""

    __slots__ = ("_node", "_output", "_task", "_x", "steps")

    def __init__(self, node, output: _Output, x: torch.Tensor):
        self._node, self._output, self._task, self._x = node, output, None, weakref.ref(x)
        self.steps = output.steps
        output.alive += 1

    def tensor(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The tensor, in `dtype` if the consumer worked on a cast of it; otherwise raises if it was written to."""
        output, x = self._output, self._x()
        if x is not None and dtype in (None, output.dtype):
            x._fix_weakref()
            if x._version != output.look[0]:
                raise written_to(x, output.look[0])
        return self.get(dtype, True)

    def get(self, dtype: torch.dtype | None, last: bool) -> torch.Tensor:
        """The tensor, shared with other tokens in this backward. last: this token will not need it again in this
        backward."""
        output, dtype = self._output, dtype or self._output.dtype
        if output.left is not None:
            return _left(output.left, dtype)
        if torch.is_grad_enabled():  # create_graph: each consumer gets a graph of its own
            return output.make(self._node, dtype)
        task = _task()
        if output.task != task:
            output.task, output.served, output.shared = task, 0, None
        y = output.shared
        if y is None or y.dtype is not dtype:
            y = output.make(self._node, dtype)
            counter.here[1] += 1
        if last and self._task != task:
            self._task = task
            output.served += 1
        if output.served >= output.alive:
            output.shared = None
        elif output.shared is not y:
            output.shared = y
            # A partial backward may never reach the last consumer, but this backward always ends.
            _at_the_end.queue_callback(output.forget)
        return y

    def holds(self) -> bool:
        """Whether the tensor can be built as it was."""
        output, node = self._output, self._node
        return output.left is not None or (output.holds() and node.recipe.holds(node))

    def release(self) -> None:
        """The consumer no longer needs it."""
        output, self._output = self._output, None
        if output is not None:
            self._node = None
            output.alive -= 1
            output.served -= output.task is not None and self._task == output.task
            if output.served >= output.alive:
                output.shared = None
            if not output.alive:
                output.left = None

    __del__ = release


def _left(y, dtype) -> torch.Tensor:
    """A tensor that a producer left. Differentiating through it is an error, as in torch: the producer's graph is
    gone."""
    if isinstance(y, RuntimeError):
        raise y
    if torch.is_grad_enabled():
        y = y.detach().requires_grad_()
        y.register_hook(_second_time)
    return as_dtype(y, dtype)


def _second_time(dy):
    raise RuntimeError("Trying to backward through the graph a second time: specify retain_graph=True the first time.")


def _hooks_now():
    """The hooks of saved tensors, or None: a different object in each region that a checkpoint repeats."""
    top = _hooks(True)
    return None if top is None else top[0]


def _places(tensors) -> list:
    return [t.data_ptr() for t in tensors if t is not None and type(t) is not FakeTensor]


def _look(y) -> tuple:
    """A value that changes if the tensor is written to, gets other memory, or is used on another stream."""
    if type(y) is FakeTensor:
        return y._version, y.shape, y.stride()
    stream = torch._C._cuda_getCurrentRawStream(y.get_device()) if y.is_cuda else None
    return y._version, y.data_ptr(), y.shape, y.stride(), stream


def as_dtype(y: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """y in `dtype` (None: unchanged), without a call if there is nothing to do."""
    # With a keyword: for a positional argument torch tries another signature first, which is a third of the cost.
    return y if dtype is None or y.dtype is dtype else y.to(dtype=dtype)


def _output_of(x) -> _Output | None:
    """The recipe that the node of x has for it, by a fast check. A view has its own node."""
    if type(x) is torch.Tensor or type(x) is FakeTensor:
        node = x.grad_fn
        if isinstance(node, BackwardCFunction):
            kept = getattr(node, "recipe", None)
            return kept.outputs.get(x.output_nr) if type(kept) is Kept else None
    return None


def carries(x: torch.Tensor) -> bool:
    """Whether calling `take` is worthwhile, in a fraction of its time."""
    return _output_of(x) is not None or (native is not None and native.carries(x))


def take(x: torch.Tensor) -> Token | None:
    """A token for a consumer to keep instead of x, or None to save x."""
    token = None if native is None else native.take(x)
    return _take(x) if token is None else token


def _take(x: torch.Tensor) -> Token | None:
    """A token of a Python node."""
    output = _output_of(x)
    if output is None or not _enabled or output.look != _look(x):
        return None
    node = x.grad_fn
    if node.recipe.hooks is not _hooks_now() or not (output.holds() and node.recipe.holds(node)):
        return None
    counter.here[0] += 1
    return Token(node, output, x)


def save(ctx, *sources: "torch.Tensor | Token | None", made: tuple = ()) -> None:
    """`ctx.save_for_backward(*sources, *made)`, with a token instead of each source that has one, or is one.

    made: tensors that the room makes itself, or keeps as torch does. Outputs carry no recipe if a source is neither in
    the graph nor a parameter: an input or a buffer may be refilled without a trace.
    """
    tensors, tokens, sound = [*sources, *made], {}, _enabled
    for at, x in enumerate(sources):
        if x is None or isinstance(x, torch.nn.Parameter):
            continue
        token = take(x) if isinstance(x, torch.Tensor) else x
        if token is not None:
            tensors[at], tokens[at] = None, token
        elif x.requires_grad:
            bits.keeps_whole(x)
        else:
            sound = sound and context.in_checkpoint()  # as is_source does in C++
    if sound and parameters_may_be_resharded():
        tensors = [_own_copy(x) if isinstance(x, torch.nn.Parameter) else x for x in tensors]
    ctx.save_for_backward(*tensors)
    kept = ctx.recipe = Kept(tokens)
    if sound and kept.hooks is None:  # versions are compared by torch
        kept.marks = _places(tensors)
    elif sound:
        kept.marks = [(TensorWeakRef(t), t._version, *_places((t,))) for t in tensors if t is not None]


def carry(ctx, y: torch.Tensor, build: Callable, number: int = 0, token: Token | None = None) -> torch.Tensor:
    """Records that `build` makes y, output `number` of ctx, bit for bit from the arguments of `save`; returns y.

    If grad mode is on in backward (create_graph=True), `build` must be differentiable. `build.into(dtype)`, if it
    exists, builds y cast to that dtype. token: of the first argument of `build`, if the room's own backward does not
    need it.
    """
    kept = ctx.recipe
    steps = kept.steps + (0 if token is None else token.steps)
    if kept.marks is not None and steps <= LONGEST:
        kept.outputs[number] = _Output(y, build, token, steps)
    return y


def raw(ctx) -> tuple:
    """`ctx.saved_tensors`, with None for tokens.

    If others build with the node, hooks are called once per backward, because those of a checkpoint raise after that.
    `ctx.recipe` is None if `save` was not called.
    """
    kept = ctx.recipe
    if kept is None or kept.hooks is None or not kept.outputs:
        return ctx.saved_tensors
    task = _task()
    if kept.unpacked is None or kept.unpacked[0] != task:
        kept.unpacked = task, ctx.saved_tensors
        _at_the_end.queue_callback(kept.forget)
    return kept.unpacked[1]


def saved(ctx) -> list | tuple:
    """The arguments of `save`, in the backward of ctx."""
    tensors, tokens = raw(ctx), ctx.recipe.tokens
    if tokens:
        tensors = list(tensors)
        for at, token in tokens.items():
            tensors[at] = token.tensor()
    return tensors


def parameters_may_be_resharded() -> bool:
    """Whether parameters are sharded in this process: a parameter's memory may then be freed or reused before
    backward."""
    states = sys.modules.get("torch.distributed._composable_state")  # of fully_shard
    return _resharded or bool(states is not None and states._module_state_mapping)


def parameters_are_resharded(on: bool = True) -> None:
    """Parameters of this process take turns in shared memory, so no recipe may refer to one. Called by
    haiscale.fsdp."""
    global _resharded
    _resharded = on
    if native is not None:
        native.set_resharded(on)


def _own_copy(parameter: torch.Tensor) -> torch.Tensor:
    with torch.enable_grad():
        return parameter.clone()


if native is not None:
    capturing = getattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: False)
    native.connect(_take, of_many, capturing, bits.keeps_whole, flops.watched, FakeTensor)
