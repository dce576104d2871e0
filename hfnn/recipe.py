"""Recipes: tensors that backward can rebuild instead of keeping.

In eager mode a producer keeps its input and its consumer keeps its output, so a cheap op between two matrix products
costs a full tensor. A room whose output is cheap to rebuild calls `attach(y, build, *sources)`; a consumer that would
save y for its backward calls `take(y)` and saves the sources instead, most of which the producer keeps anyway:

    producer    return attach(y, build, x, weight)                 # y == build(x, weight), bit for bit
    consumer    found = take(x)                                    # None: save x as torch does
    forward     ctx.recipe, sources = found; ctx.save_for_backward(weight, *sources)
    backward    x = ctx.recipe.rebuild(sources)                    # shared by siblings, freed by the last one

A room that keeps its input is a consumer too: `save(ctx, x)` in forward and `saved(ctx)` in backward do both halves.

A recipe belongs to one Python tensor object. Whatever does not carry it along (a view, a copy, a stock consumer, no
grad mode) simply keeps the tensor as torch would. `take` hands a recipe out only while the output and every source are
what they were when it was attached (`_version` and `data_ptr`): after an in-place change the tensor is saved.
"""

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterator

import torch
from torch._subclasses import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import TensorWeakRef

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

    __slots__ = ("_cache", "_dtype", "_parts", "_served", "_stream", "_users", "build")

    def __init__(self, build: Callable, parts: tuple, dtype: torch.dtype):
        self.build = build
        self._parts = parts  # for each tensor of build: None, or (recipe, n) when that recipe makes it of n sources
        self._dtype = dtype
        self._users = self._served = 0
        self._cache = self._stream = None

    def rebuild(self, sources, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The tensor, in `dtype` where a consumer worked on a cast of it."""
        if torch.is_grad_enabled():  # create_graph: no sharing, each consumer gets a graph of its own
            return as_dtype(self._make(sources), dtype)
        y, stream = self._cache, _stream(sources[0])
        if y is None or stream != self._stream or (dtype is not None and y.dtype is not dtype):
            y = as_dtype(self._make(sources, dtype), dtype)
            counter.rebuilt += 1
        self._served += 1
        if self._served >= self._users:
            self._free()
        else:
            self._keep(y, stream)
        return y

    def _make(self, sources, dtype: torch.dtype | None = None) -> torch.Tensor:
        build, tensors = self.build, _collect(self._parts, sources, Recipe._ingredient)
        if dtype not in (None, self._dtype) and hasattr(build, "into"):
            build = build.into(dtype)
        return build(*tensors)

    def _ingredient(self, sources) -> torch.Tensor:
        """The tensor as a source of another one: shared with the consumers of its own that are still to come."""
        if torch.is_grad_enabled() or self._served >= self._users:
            return self._make(sources)
        y, stream = self._cache, _stream(sources[0])
        if y is None or stream != self._stream or y.dtype is not self._dtype:
            y = self._make(sources)
            counter.rebuilt += 1
            self._keep(y, stream)
        return y

    def _keep(self, y, stream) -> None:
        if self._cache is not y:
            self._cache, self._stream = y, stream
            # A partial backward may never reach the last consumer; the end of this one comes for certain.
            torch.autograd.Variable._execution_engine.queue_callback(self._free)

    def _free(self) -> None:
        self._cache = self._stream = None
        self._served = 0


class _Tag:
    """What `attach` remembers of a tensor, and its casts for as long as it lives."""

    __slots__ = ("_casts", "marks", "recipe", "ref", "sources")

    def __init__(self, recipe: Recipe, sources: tuple, marks: list):
        self.recipe, self.sources, self.marks = recipe, sources, marks
        self._casts = {}

    def cast(self, y: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """y in `dtype`, made once for all consumers; it lives as long as y."""
        if dtype is y.dtype:
            return y
        if dtype not in self._casts:
            self._casts[dtype] = y.to(dtype=dtype)
        return self._casts[dtype]


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


def _stream(x: torch.Tensor):
    return torch._C._cuda_getCurrentRawStream(x.get_device()) if x.is_cuda else None


def find(x: torch.Tensor) -> _Tag | None:
    """The recipe of x if it still holds, without counting a consumer."""
    tag = tags.get(id(x))
    if tag is None or not _enabled or tag.ref() is not x or tag.marks != _marks(x, tag.sources):
        return None
    return tag


def attach(y: torch.Tensor, build: Callable, *sources: torch.Tensor | None) -> torch.Tensor:
    """Record for y that `build(*sources)` gives it again, bit for bit; returns y.

    A source that has a recipe itself is replaced by that recipe's sources. None is handed on as None. Does nothing
    where no backward can follow, or where a version cannot be read (inference tensors).
    """
    if not _enabled:
        return y
    parts, kept = [None] * len(sources), []
    sharded = parameters_may_be_resharded()
    for i, source in enumerate(sources):
        if source is not None and source.is_inference():
            return y
        tag = find(source) if id(source) in tags else None
        if tag is not None:
            parts[i] = tag.recipe, len(tag.sources)
            kept.extend(tag.sources)
        else:
            kept.append(_own_copy(source) if sharded and isinstance(source, torch.nn.Parameter) else source)
    kept = tuple(kept)
    tag = _Tag(Recipe(build, tuple(parts), y.dtype), kept, _marks(y, kept))
    key = id(y)
    tag.ref = weakref.ref(y, lambda _: tags.pop(key, None))
    tags[key] = tag
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
    return _collect(ctx.parts, ctx.saved_tensors, Recipe.rebuild)


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


# By (id of the tensor, dtype of the cast, whether the tensor requires a gradient): weak reference to the tensor, its
# marks, weak references to the cast and to its memory.
_casts: dict[tuple, tuple] = {}


def cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x in `dtype`, differentiable; one copy serves all consumers for as long as any of them keeps it."""
    if x.dtype is dtype or x.is_inference() or type(x) is FakeTensor:
        return as_dtype(x, dtype)
    low, memory = known_cast(x, dtype)
    if low is not None:
        return low
    low, key = x.to(dtype), (id(x), dtype, x.requires_grad)
    if memory is not None:
        low.data = torch.empty(0, dtype=dtype, device=x.device).set_(memory, 0, low.shape, low.stride())
    ref = weakref.ref(x, lambda _: _casts.pop(key, None))
    _casts[key] = ref, _marks(x, ()), TensorWeakRef(low), StorageWeakRef(low.untyped_storage())
    return low


def known_cast(x: torch.Tensor, dtype: torch.dtype):
    """(the cast of x that a consumer keeps, or None; its memory where that is in other hands: those of a hook)."""
    ref, marks, low, memory = _casts.get((id(x), dtype, x.requires_grad), (None,) * 4)
    if ref is None or ref() is not x or marks != _marks(x, ()):
        return None, None
    low = low()
    return low, torch.UntypedStorage._new_with_weak_ptr(memory.cdata) if low is None else None


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
