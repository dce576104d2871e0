"""Which class's forward computes a module, and how it is put there.

A module keeps its class: `put` attaches a holder (hfnn/core/holder.py). Two kinds of objects get a subclass instead,
which keeps the name of their class: optimizers (hfnn/optim/swap.py), and modules of libraries that derive the forward
of each class from the existing one, so that hfnn's must be inside (gradient checkpointing of transformers). Such a
class is made here, once for each (original, room, like). It is pickled as these three, so a new process makes it again.

A converted module returns permanently to its class's own forward if something that a proof depends on changes
(hfnn/patterns/held.py).
"""

import copyreg
import functools
import weakref

from torch import nn

from hfnn import ops
from hfnn.core.context import compiling
from hfnn.core.holder import attach, foreign_forward, forward_of, holder_of, like_of, settings
from hfnn.core.kernel import log
from hfnn.patterns.probe import new_class

# torch's class -> the room's, the room's -> torch's, the room's -> its op, from the index of ops.
ROOMS = {torch_class: room for op in ops.ALL for torch_class, room in op.modules.items()}
_TORCH = {room: torch_class for torch_class, room in ROOMS.items()}
_OPS = {room: op for op in ops.ALL for room in op.modules.values()}
# Of torch's classes, before any replacement.
FORWARDS = {torch_class: forward_of(torch_class) for torch_class in ROOMS}
# Files whose `__init_subclass__` derives the forward of each class from the existing one. Those of other authors may
# register the class, so they are not called.
_DERIVE = ("transformers.modeling_layers",)


def underivable(cls: type, room: type, like) -> str | None:
    """Why a class that needs a subclass cannot have one, or None."""
    try:
        if like is not None and any(map(_derives, cls.__mro__)):
            make_subclass(cls, room, like)
    except Exception as error:  # this runs the author's code
        return f"its class cannot be derived from: {error}"
    return None


def put(module: nn.Module, room: type, like) -> None:
    """Convert a module."""
    if like is not None and any(map(_derives, type(module).__mro__)):
        object.__setattr__(module, "__class__", make_subclass(type(module), room, like))
    else:
        attach(module, room, like)


def _derives(base: type) -> bool:
    return base.__module__ in _DERIVE and "__init_subclass__" in vars(base)


class Converted:
    """The base of classes made by `make_subclass`. They have `_hfnn_original`, `_hfnn_room` and `_hfnn_like`."""

    _hfnn_lapsed = None  # on an instance: what changed

    def __init_subclass__(cls, **kwargs):
        if "_hfnn_original" not in vars(cls):  # a class derived from ours
            return super().__init_subclass__(**kwargs)
        if cls._hfnn_like is not None:  # an optimizer has none
            cls.forward = _while_it_holds(cls)
        for base in filter(_derives, cls.__mro__):
            vars(base)["__init_subclass__"].__get__(None, cls)()

    def __reduce_ex__(self, protocol):
        holds(self)  # a copy would take the present class as its reference
        reduced = super().__reduce_ex__(max(protocol, 2))
        cls = type(self)
        if "_hfnn_original" not in vars(cls) or reduced[0] is not copyreg.__newobj__:
            return reduced  # a class derived from ours, or an original with its own pickling
        return _again, (cls._hfnn_original, cls._hfnn_room, cls._hfnn_like, *reduced[1][1:]), *reduced[2:]


def holds(module) -> bool:
    """Whether a converted module is still computed by hfnn; for code that computes it without calling it."""
    holder = holder_of(module)
    if holder is not None:
        return holder.holds()
    cls = next((cls for cls in type(module).__mro__ if "_hfnn_original" in vars(cls)), None)
    if cls is not None and cls._hfnn_like is not None and module._hfnn_lapsed is None:
        why = cls._hfnn_held.changed(cls._hfnn_original, module)
        if why is not None:
            log.warning("%s runs its own forward again: %s after hfnn.convert", type(module).__name__, why)
            vars(module)["_hfnn_lapsed"] = why
    return module._hfnn_lapsed is None if cls is not None else is_converted(module)


def ended(module) -> str:
    """Why a converted module is not computed by hfnn any more."""
    holder = holder_of(module)
    why = module._hfnn_lapsed if holder is None else holder.why
    return why or "that of its class was replaced"


def _again(original, room, like, *args):
    if issubclass(original, nn.Module) and not any(map(_derives, original.__mro__)):  # a pickle of 0.2.0
        module = original.__new__(original, *args)
        attach(module, room, like)
        return module
    cls = make_subclass(original, room, like)
    return cls.__new__(cls, *args)


# By the ids of the original and of what its proof depends on, which live as long as a class made from them. Only
# modules keep these classes alive.
_made: weakref.WeakValueDictionary[tuple, type] = weakref.WeakValueDictionary()


def make_subclass(original: type, room: type, like=None) -> type:
    """The subclass of `original` whose forward is that of `room`. It keeps the name, for code that identifies classes
    by name.

    `like` tells where the room finds its numbers in a module of this class (hfnn/patterns), if needed. Raises what
    subclassing the class raises.
    """
    held = None if like is None else like.depends(original)
    key = id(original), room, like, *(() if held is None else held.key)
    found = _made.get(key)
    if found is not None:
        return found
    members = {
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "_hfnn_original": original,
        "_hfnn_room": room,
        "_hfnn_like": like,
        "_hfnn_held": held,
    }
    made = _made[key] = new_class(original, original.__name__, (Converted, room, original), members)
    return made


def _while_it_holds(cls: type):
    """The forward of cls, while what the proof depends on is unchanged."""
    original, room, like = cls._hfnn_original, cls._hfnn_room, cls._hfnn_like
    chosen, small = getattr(room, "forward_for", None), getattr(room, "_hfnn_small", None)
    forward = room.forward if chosen is None else chosen(original)

    @functools.wraps(original.forward)
    def run(self, *args, **kwargs):
        # First the check for small calls, in which torch's own op would run anyway.
        if compiling() or (small is not None and small(self, like, args, kwargs)) or not holds(self):
            return original.forward(self, *args, **kwargs)
        return forward(self, like, *args, **kwargs)

    return run


def restore(module: nn.Module) -> None:
    """Restore the class and attributes of a converted module."""
    holder = holder_of(module)
    if holder is not None:
        holder.release()
        return
    cls = type(module)
    object.__setattr__(module, "__class__", original(cls))
    vars(module).pop("_hfnn_lapsed", None)
    for name in settings(cls):
        if foreign_forward(module):  # a forward wrapped since then still calls the room, which reads them
            vars(module).setdefault(name, getattr(cls, name))
        else:
            vars(module).pop(name, None)


def is_converted(module: nn.Module) -> bool:
    """Whether hfnn computes the module's forward: `hfnn.convert` has converted it, or it was made as hfnn's.

    >>> model = hfnn.convert(torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.Flatten()))
    >>> type(model[0]), hfnn.is_converted(model[0]), hfnn.is_converted(model[1])
    (<class 'torch.nn.modules.normalization.LayerNorm'>, True, False)
    """
    return holder_of(module) is not None or isinstance(module, (Converted, *_TORCH))


def original(cls: type) -> type | None:
    """The class that cls replaced, or None if `convert` did not make cls."""
    cls = vars(cls).get("_hfnn_plain", cls)  # of a captured model
    return vars(cls).get("_hfnn_original") or _TORCH.get(cls)


def op_of(module: nn.Module):
    """The op that computes a converted module."""
    like, room = like_of(module), target(module)
    if like is not None:
        return like.op
    return next((_OPS[base] for base in room.__mro__ if base in _OPS), None) or room.op


def title(module: nn.Module) -> str:
    """A description of a converted module: "hfnn.LayerNorm", "hfnn rms_norm, offset 1"."""
    like = like_of(module)
    room = next((base for base in target(module).__mro__ if base in _TORCH), None)
    return str(like) if like is not None else f"hfnn.{room.__name__}" if room else f"hfnn {op_of(module).name}"


def target(module: nn.Module) -> type:
    """The class that computes a converted module, or did until its proof ended."""
    holder = holder_of(module)
    return type(module) if holder is None else holder.target
