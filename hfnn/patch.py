"""torch's own functions, routed to hfnn's: in a block (`patch_torch`), or where a module's own code calls them.

    with hfnn.patch_torch():
        loss = model(batch)             # nn.functional.gelu(x) in whatever code is now hfnn.functional.gelu(x)

While any thread is in such a block, the attributes of torch.nn.functional and of torch hold functions that check at
each call whether this thread routes it. So other threads see torch's behaviour, and a call from inside an hfnn op
reaches torch's original. After the last block, torch is as it was before.
"""

import contextlib
import ctypes
import functools
import inspect
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn
from torch.overrides import _get_overloaded_args, handle_torch_function, has_torch_function

from hfnn import functional
from hfnn.core.context import PLAIN, bare_mode, compiling
from hfnn.core.kernel import PREFERENCES
from hfnn.core.options import one_of

_getframe, _current_backward = sys._getframe, torch._C._current_graph_task_id
_KEY = "hfnn.patch"  # key of the routing, in the state that torch passes to the threads of a backward pass


class _Here(threading.local):
    """The routing of a thread.

    state: None, or (names routed everywhere, with their `prefer`; code in which every name is routed, and its
    `prefer`). patches: those that this thread has started, in order.
    """

    state: tuple[dict[str, str], frozenset, str] | None = None

    def __init__(self):
        self.patches: list[Patch] = []
        self._shared: list | None = None

    def share(self, state) -> None:
        """Make it effective in the threads of backward passes started here, to which torch passes stashed objects.

        One list per thread is stashed, permanently, because torch before 2.12 keeps it without counting a reference.
        """
        if self._shared is None:
            self._shared = [None]
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._shared))
            torch._C._stash_obj_in_tls(_KEY, self._shared)
        self._shared[0] = state


here = _Here()
_NOTHING = {}, frozenset(), "auto"
_lock = threading.Lock()


@dataclass(eq=False)
class Place:
    """An attribute of a torch module that holds a function; users: the number of blocks that route it at present."""

    owner: types.ModuleType
    name: str
    original: Callable
    routed: Callable
    users: int = 0


def _routed(name: str, original: Callable, ours: Callable) -> Callable:
    """The replacement for torch's function: calls `ours` if the call is routed, else `original`."""
    known = {*inspect.signature(getattr(functional, name)).parameters, *inspect.signature(ours).parameters}
    has_prefer = "prefer" in known
    known.discard("prefer")

    def routed(*args, **kwargs):
        if compiling():  # Dynamo inlines this, so it sees the original
            return original(*args, **kwargs)
        before = here.state
        state = _of_backward() if before is None else before
        if state is None or state is _NOTHING:
            return _as_torch(original, args, kwargs)
        prefer, caller = state[0].get(name), _getframe(1)
        if prefer is not None:
            # The backward of an hfnn op, run by torch's engine; its formulas use torch's functions.
            own = caller.f_globals.get("__name__", "").startswith("hfnn.")
        elif caller.f_code in state[1]:
            prefer, own = state[2], False
        else:
            return _as_torch(original, args, kwargs)
        # A name that only torch knows: `out`, or one of numpy's, as `axis`.
        own = own or not known.issuperset(kwargs) or _is_overridden(args, kwargs)
        # Calls from inside must reach torch: rooms fall back to it, and torch's functions call one another.
        here.state = _NOTHING
        try:
            if own:
                return _as_torch(original, args, kwargs)
            if has_prefer and prefer != "auto":
                kwargs["prefer"] = prefer
            return ours(*args, **kwargs)
        finally:
            here.state = before

    functools.update_wrapper(routed, original)
    routed.routes = original
    return routed


def _is_overridden(args, kwargs) -> bool:
    """Whether an argument is a Tensor subclass with its own functions, or a mode of the user's sees the call."""
    given = (*args, *kwargs.values())
    if not has_torch_function(given):  # it is true in a mode as well
        return False
    return not bare_mode() or any(type(x) not in PLAIN for x in _get_overloaded_args(given))


def _as_torch(original, args, kwargs):
    """torch's own call. torch would pass the replacement, `routed`, to subclasses of Tensor, but their tables have the
    original.
    """
    if type(original) is types.FunctionType and has_torch_function((*args, *kwargs.values())):
        return handle_torch_function(original, (*args, *kwargs.values()), *args, **kwargs)
    return original(*args, **kwargs)


def _of_backward():
    """The routing of the thread that called backward, in a thread of the engine; None elsewhere."""
    if _current_backward() == -1 or not torch._C._is_key_in_tls(_KEY):
        return None
    return torch._C._get_obj_in_tls(_KEY)[0]


def _takes(ours: Callable, original: Callable) -> bool:
    """Whether hfnn's function takes whatever torch's takes."""
    try:
        theirs = list(inspect.signature(original).parameters.values())
    except ValueError:  # in C, without a signature: the rooms' tests use torch's arguments
        return True
    known = list(inspect.signature(ours).parameters)
    positional = [p.name for p in theirs if p.kind is p.POSITIONAL_OR_KEYWORD]
    named = {p.name for p in theirs if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    return known[: len(positional)] == positional and named <= set(known)


# Functions of torch itself whose arguments differ from torch.nn.functional's.
_ARGUMENTS = {
    "dropout": lambda ours: lambda input, p, train, **how: ours(input, p, train, **how),
    "layer_norm": lambda ours: lambda *args, cudnn_enable=True, **how: ours(*args[:5], **how),
    "log_softmax": lambda ours: lambda input, dim, dtype=None, **how: ours(input, dim, dtype=dtype, **how),
    "softmax": lambda ours: lambda input, dim, dtype=None, **how: ours(input, dim, dtype=dtype, **how),
}
# Functions whose arguments are the first ones of torch.nn.functional's.
_TWINS = ("celu", "prelu", "relu", "rms_norm", "selu", "sigmoid", "tanh")


def _places() -> Iterator[Place]:
    for name in functional.__all__:
        ours, original = getattr(functional, name), getattr(nn.functional, name, None)
        if original is None or not _takes(ours, original):
            continue
        yield Place(nn.functional, name, original, _routed(name, original, ours))
        if name in _ARGUMENTS or name in _TWINS:
            original, ours = getattr(torch, name), _ARGUMENTS.get(name, lambda ours: ours)(ours)
            yield Place(torch, name, original, _routed(name, original, ours))


PLACES = {(place.owner, place.name): place for place in _places()}
CAT = Place(torch, "cat", torch.cat, _routed("cat", torch.cat, functional.cat))  # where a module's own code calls it
NAMES = tuple(sorted({name for _, name in PLACES}))


def install(places) -> None:
    with _lock:
        for place in places:
            place.users += 1
            # Functions that were replaced by others are left alone.
            if place.users == 1 and getattr(place.owner, place.name) is place.original:
                setattr(place.owner, place.name, place.routed)


def uninstall(places) -> None:
    with _lock:
        for place in places:
            place.users -= 1
            if place.users == 0 and getattr(place.owner, place.name) is place.routed:
                setattr(place.owner, place.name, place.original)


@contextlib.contextmanager
def unrouted() -> Iterator[None]:
    """Use torch's functions inside the `with` block, whatever this thread has started: for comparisons with them."""
    before, here.state = here.state, _NOTHING
    try:
        yield
    finally:
        here.state = before


_Function = TypeVar("_Function", bound=Callable[..., Any])


class Patch:
    """The result of `patch_torch`: for `with`, as a decorator, or with start and stop."""

    def __init__(self, names: tuple[str, ...], prefer: str):
        self.names, self.prefer = dict.fromkeys(names, prefer), prefer

    @functools.cached_property
    def places(self) -> list[Place]:
        return [place for place in PLACES.values() if place.name in self.names]

    def start(self) -> None:
        """Route calls of this thread from now on, until `stop`."""
        if compiling():
            return
        install(self.places)
        here.patches.append(self)
        _renew()

    def stop(self) -> None:
        """Undo one `start` of this thread. Raises ValueError if there was none."""
        if compiling():
            return
        if not any(patch is self for patch in here.patches):
            raise ValueError("stop() of a hfnn.patch_torch() that this thread did not start, or has stopped already")
        last = max(i for i, patch in enumerate(here.patches) if patch is self)
        del here.patches[last]
        _renew()
        uninstall(self.places)

    def __enter__(self) -> "Patch":
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def __call__(self, function: _Function) -> _Function:
        """`function`, run with calls routed."""

        @functools.wraps(function)
        def run(*args, **kwargs):
            if compiling():
                return function(*args, **kwargs)
            with self:
                return function(*args, **kwargs)

        return run


def _renew() -> None:
    """The combined state of the patches that the thread has started, later ones first."""
    names = {}
    for patch in here.patches:
        names |= patch.names
    _, codes, prefer = here.state or _NOTHING
    here.state = (names, codes, prefer) if names or codes else None
    here.share((names, *_NOTHING[1:]) if names else None)


def patch_torch(only: str | Iterable[str] | None = None, prefer: str = "auto") -> Patch:
    """Route torch.nn.functional's functions, and their equivalents in torch (torch.softmax, ...), to hfnn.functional's.

    For code that cannot be converted: `with hfnn.patch_torch(): ...`, `@hfnn.patch_torch()` on a function, or `patch =
    hfnn.patch_torch(); patch.start(); ...; patch.stop()`. It applies only to this thread and to backward passes started
    in it, and may be nested. It affects functions that are looked up when they are called: `nn.functional.gelu(x)`,
    `F.gelu(x)`, torch's own modules; but not `x.softmax(-1)`, nor a name imported before (`from ... import gelu`). A
    function that other code has replaced is left alone. Under torch.compile, torch's own functions run. With activation
    checkpointing, backward must also run inside, because it must recompute with the same functions.

    Args:
        only: One or several names; None: all.
        prefer: "auto", "memory" or "speed", as in `hfnn.convert`.

    Raises:
        ValueError: An unknown name or value.
    """
    names = NAMES if only is None else (only,) if isinstance(only, str) else tuple(only)
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        raise ValueError(f"patch_torch(only={unknown[0]!r}): choose from {', '.join(NAMES)}")
    one_of("prefer", prefer, PREFERENCES)
    return Patch(names, prefer)
