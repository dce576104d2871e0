"""Recipes: tensors that backward can rebuild instead of keeping.

In eager mode a producer keeps its input and its consumer keeps its output, so a cheap op between two matrix products
costs a full tensor. A room whose output is cheap to rebuild calls `attach(y, build, *sources)`; a consumer that would
save y for its backward calls `take(y)` and saves the sources instead, most of which the producer keeps anyway:

    producer    return attach(ctx, y, build, x, weight)            # y == build(x, weight), bit for bit
    consumer    found = take(x)                                    # None: save x as torch does
    forward     ctx.recipe, sources = found; ctx.save_for_backward(weight, *sources)
    backward    x = ctx.recipe.rebuild(sources)                    # shared by siblings, freed by the last one

A room that keeps its input is a consumer too: `save(ctx, x)` in forward and `saved(ctx)` in backward do both halves.

A recipe belongs to one Python tensor object. Whatever does not carry it along (a view, a copy, a stock consumer, no
grad mode) simply keeps the tensor as torch would. `take` hands a recipe out only while the output and every source are
what they were when it was attached (`_version` and `data_ptr`): after an in-place change the tensor is saved. And only
where saved tensors have the same hooks as at the producer: a checkpoint repeats producer and consumer together then,
and the repeated forward saves what the first one did.
"""

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterator

import torch
from torch._subclasses import FakeTensor
from torch.utils.weak import TensorWeakRef

_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_task, _retained = torch._C._current_graph_task_id, torch._C._autograd._get_current_graph_task_keep_graph

_enabled = True
resharded = False  # set where parameters share memory in turns, by haiscale.fsdp


@contextlib.contextmanager
def disabled() -> Iterator[None]:
    """No recipes inside the `with` block: every consumer saves its input, as torch does."""
    global _enabled
    before, _enabled = _enabled, False
    try:
        yield
    finally:
        _enabled = before


class Recipe:
    """How to rebuild one tensor, and the rebuilt tensor while the consumers of one backward share it.

    `build(*tensors)` runs in backward; where grad mode is on there (create_graph=True) it must be differentiable.
    `build.into(dtype)`, if there is one, builds the tensor as a cast to that dtype would leave it.
    """

    __slots__ = ("_dtype", "_parts", "_served", "_shared", "_users", "build")

    def __init__(self, build: Callable, parts: tuple, dtype: torch.dtype):
        self.build = build
        self._parts = parts  # for each tensor of build: None, or (recipe, n) when that recipe makes it of n sources
        self._dtype = dtype
        self._users = self._served = 0
        self._shared = None  # (where, the tensor): see `_where`

    def rebuild(self, sources, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The tensor, in `dtype` where a consumer worked on a cast of it."""
        dtype = self._dtype if dtype is None else dtype
        if torch.is_grad_enabled():  # create_graph: no sharing, each consumer gets a graph of its own
            return as_dtype(self._make(sources), dtype)
        where = _where(sources)
        y = self._found(where, dtype)
        if y is None:
            y = as_dtype(self._make(sources, dtype), dtype)
            counter.rebuilt += 1
        self._served += 1
        if self._served >= self._users:
            self._free()
        else:
            self._keep(where, y)
        return y

    def _make(self, sources, dtype: torch.dtype | None = None) -> torch.Tensor:
        build, tensors = self.build, _collect(self._parts, sources, Recipe._ingredient)
        # Kernels take a result that is as wide as their input, or wider: not one half for another.
        if dtype not in (None, self._dtype) and hasattr(build, "into") and tensors[0].dtype in (dtype, torch.float32):
            build = build.into(dtype)
        return build(*tensors)

    def _ingredient(self, sources) -> torch.Tensor:
        """The tensor as a source of another one: shared with the consumers of its own that are still to come."""
        if torch.is_grad_enabled() or self._served >= self._users:
            return self._make(sources)
        where = _where(sources)
        y = self._found(where, self._dtype)
        if y is None:
            y = self._make(sources)
            counter.rebuilt += 1
            self._keep(where, y)
        return y

    def _found(self, where: tuple, dtype: torch.dtype) -> torch.Tensor | None:
        """What another consumer left in this backward, on this stream."""
        shared = self._shared
        if shared is None or shared[0] != where or shared[1].dtype is not dtype:
            return None
        return shared[1]

    def _keep(self, where: tuple, y: torch.Tensor) -> None:
        if self._shared is None or self._shared[1] is not y:
            self._shared = where, y
            # A partial backward may never reach the last consumer; the end of this one comes for certain.
            torch.autograd.Variable._execution_engine.queue_callback(self._free)

    def _free(self) -> None:
        self._shared = None
        self._served = 0


def _where(sources) -> tuple:
    """The backward and the stream that run: only there is a rebuilt tensor shared."""
    x = sources[0]
    return _task(), torch._C._cuda_getCurrentRawStream(x.get_device()) if x.is_cuda else None


class _Tag:
    """What `attach` remembers of a tensor. hooks: those that saved tensors had there."""

    __slots__ = ("__weakref__", "_low", "hooks", "marks", "recipe", "ref", "sources")

    def __init__(self, recipe: Recipe, sources: tuple, marks: list):
        self.recipe, self.sources, self.marks, self.hooks = recipe, sources, marks, _hooks_now()
        self._low = None

    def cast(self, y: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """y in `dtype`, made once for consumers that follow one another."""
        if dtype is y.dtype:
            return y
        if self._low is None or self._low.dtype is not dtype:
            _let_go_of_last_cast(self)
            self._low = y.to(dtype=dtype)
        return self._low


# The tag that holds a cast. No graph keeps that cast, so it may go as soon as another tensor is cast.
_casting: weakref.ref | None = None


def _let_go_of_last_cast(tag: _Tag) -> None:
    global _casting
    last, _casting = _casting, weakref.ref(tag)
    before = None if last is None else last()
    if before is not None:
        before._low = None


def _hooks_now():
    """What is called for each saved tensor, or None: another object in each region that a checkpoint repeats."""
    top = _hooks(True)
    return None if top is None else top[0]


# By id() of the tensor, each with a weak reference that proves it is the same one. Not an attribute of the tensor: a
# copy, a pickle or a saved file of it must not carry a recipe.
tags: dict[int, _Tag] = {}


def _marks(y: torch.Tensor, sources: tuple) -> list:
    """What changes when y or a source is written to (`_version`), or given other memory (`data_ptr`)."""
    if type(y) is FakeTensor:  # has no memory
        return [t._version for t in (y, *sources) if t is not None]
    return [(t._version, t.data_ptr()) for t in (y, *sources) if t is not None]


def as_dtype(y: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """y in `dtype` (None: as it is), without a call where there is nothing to do."""
    # By its keyword: by place, torch tries another signature first, for a third of the price.
    return y if dtype is None or y.dtype is dtype else y.to(dtype=dtype)


def find(x: torch.Tensor) -> _Tag | None:
    """The recipe of x if it still holds, without counting a consumer."""
    tag = tags.get(id(x))
    if tag is None or not _enabled or tag.ref() is not x or tag.marks != _marks(x, tag.sources):
        return None
    if tag.hooks is not _hooks_now():
        del tags[id(x)]  # of no use any more, and a checkpoint is to keep x alone
        return None
    return tag


def attach(ctx, y: torch.Tensor, build: Callable, *sources: torch.Tensor | None, kept=()) -> torch.Tensor:
    """Record for y that `build(*sources, *kept)` gives it again, bit for bit; returns y.

    ctx: of the Function that makes y, whose `saved` ends the recipe, or None. A source that has a recipe itself is
    replaced by that recipe's sources; None is handed on as None. kept: what the room made, or keeps as torch does.

    Does nothing where no backward can follow, or where a source is neither of the graph nor a parameter: of an input or
    a buffer nobody can tell when it is filled anew.
    """
    if not _enabled:
        return y
    parts, held, graph = [None] * len(sources), [], False
    sharded = parameters_may_be_resharded()
    for i, source in enumerate(sources):
        tag = find(source) if id(source) in tags else None
        if tag is not None:
            parts[i] = tag.recipe, len(tag.sources)
            held.extend(tag.sources)
            graph = True
            continue
        if source is not None:
            if source.requires_grad:
                graph = True
            elif source.is_inference() or not isinstance(source, torch.nn.Parameter):
                return y
            if sharded and isinstance(source, torch.nn.Parameter):
                source = _own_copy(source)
        held.append(source)
    if not graph:
        return y
    held = (*held, *kept)
    tag = _Tag(Recipe(build, (*parts, *[None] * len(kept)), y.dtype), held, _marks(y, held))
    key = id(y)
    tag.ref = weakref.ref(y, lambda _: tags.pop(key, None))
    tags[key] = tag
    if ctx is not None:
        ctx.made = (*getattr(ctx, "made", ()), tag.ref)
    return y


def take(x: torch.Tensor) -> _Tag | None:
    """The recipe of x for a consumer that will save its sources instead of x, or None to save x.

    Every taker is counted: the last one to rebuild in backward frees what they share.
    """
    tag = find(x)
    if tag is not None:
        tag.recipe._users += 1
        counter.taken += 1
    return tag


def save(ctx, *tensors: torch.Tensor | None) -> None:
    """`ctx.save_for_backward`, with the sources of a recipe in place of each tensor that has one. Goes with `saved`."""
    parts, kept = [None] * len(tensors), []
    for i, x in enumerate(tensors):
        tag = take(x) if id(x) in tags else None
        if tag is not None:
            parts[i] = tag.recipe, len(tag.sources)
            kept.extend(tag.sources)
        else:
            kept.append(x)
    ctx.parts = parts
    ctx.save_for_backward(*kept)


def saved(ctx) -> list[torch.Tensor | None]:
    """What was given to `save`, rebuilt where that is needed."""
    tensors = _collect(ctx.parts, ctx.saved_tensors, Recipe.rebuild)
    release(ctx)
    return tensors


def release(ctx) -> None:
    """The results of ctx have no recipe any more: after its last backward nobody is to keep its sources."""
    if not _retained():
        for ref in getattr(ctx, "made", ()):
            tags.pop(id(ref()), None)


def _collect(parts, sources, rebuild) -> list:
    """The tensors that `parts` tell of: each is the next of the sources, or a recipe makes it of the next n."""
    tensors, at = [], 0
    for part in parts:
        if part is None:
            tensors.append(sources[at])
            at += 1
        else:
            recipe, count = part
            tensors.append(rebuild(recipe, sources[at : at + count]))
            at += count
    return tensors


# By (id of the tensor, dtype of the cast): weak reference to the tensor, its marks, weak reference to the cast.
_casts: dict[tuple, tuple] = {}


def cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x in `dtype`, differentiable. Of a tensor of the graph one cast serves all consumers while any of them keeps it.

    Any other tensor may be filled anew from one call to the next by what moves no version: numpy, a receive, `.data`.
    """
    if x.dtype is dtype or x.grad_fn is None or type(x) is FakeTensor:
        return as_dtype(x, dtype)
    low = known_cast(x, dtype)
    if low is None:
        low, key = x.to(dtype=dtype), (id(x), dtype)
        _casts[key] = weakref.ref(x, lambda _: _casts.pop(key, None)), _marks(x, ()), TensorWeakRef(low)
    return low


def known_cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """The cast of x that a consumer keeps."""
    ref, marks, low = _casts.get((id(x), dtype), (None,) * 3)
    return None if ref is None or ref() is not x or marks != _marks(x, ()) else low()


def parameters_may_be_resharded() -> bool:
    """Whether parameters are sharded in this process: one's memory may then be gone, or another's, before backward."""
    states = sys.modules.get("torch.distributed._composable_state")  # of fully_shard
    return resharded or bool(states is not None and states._module_state_mapping)


def _own_copy(parameter: torch.Tensor) -> torch.Tensor:
    with torch.enable_grad():
        return parameter.clone()


class _Counter:
    """How often recipes were handed out and rebuilt, for tests and `report`."""

    def __init__(self):
        self.reset()

    def reset(self) -> None:
        self.taken = self.rebuilt = 0


counter = _Counter()
