"""Changing the class of a living module, and changing it back.

An exact torch class becomes its room's class: `nn.LayerNorm` -> `hfnn.LayerNorm`. Any other class keeps its name and
everything it adds: the module's class becomes a subclass of it whose `forward` is a room's. Such a class is made here,
once for each (original, room, like), and is pickled as these three, so that a fresh process makes it again.
"""

import copyreg
import weakref

from torch import nn

from hfnn import ops

# torch's class -> the room's, the room's -> torch's, the room's -> its op: read from the index of ops.
ROOMS = {torch_class: room for op in ops.ALL for torch_class, room in op.modules.items()}
_TORCH = {room: torch_class for torch_class, room in ROOMS.items()}
_OPS = {room: op for op in ops.ALL for room in op.modules.values()}


class Dressed:
    """What classes made by `dress` have in common. Attributes: `_hfnn_original`, `_hfnn_room` and `_hfnn_like`."""

    def __reduce_ex__(self, protocol):
        reduced = super().__reduce_ex__(max(protocol, 2))
        cls = type(self)
        if "_hfnn_original" not in vars(cls) or reduced[0] is not copyreg.__newobj__:
            return reduced  # a class derived from ours, or an original that has its own way to be pickled
        return _again, (cls._hfnn_original, cls._hfnn_room, cls._hfnn_like, *reduced[1][1:]), *reduced[2:]


def _again(original, room, like, *args):
    cls = dress(original, room, like)
    return cls.__new__(cls, *args)


# By the number of the original, which is there for as long as a class that derives from it is. Nobody but their modules
# keeps them.
_dressed: weakref.WeakValueDictionary[tuple, type] = weakref.WeakValueDictionary()


def dress(original: type, room: type, like=None) -> type:
    """The subclass of `original` whose forward is that of `room`; it keeps the name, for what is told by names.

    `like` says where the room finds its numbers in a module of this class (hfnn/lookalike.py), if it needs telling.
    Raises TypeError where the class cannot be derived from.
    """
    key = id(original), room, like
    found = _dressed.get(key)
    if found is not None:
        return found
    names = {
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "_hfnn_original": original,
        "_hfnn_room": room,
        "_hfnn_like": like,
        "_hfnn_dtypes": {},  # what hfnn/lookalike.py asks but once
    }
    made = _dressed[key] = type(original)(original.__name__, (Dressed, room, original), names)
    return made


def is_converted(module: nn.Module) -> bool:
    """Whether a room computes the module's forward; also where `fully_shard` or alike derived from its class since."""
    return isinstance(module, (Dressed, *_TORCH))


def original(cls: type) -> type | None:
    """The class that was swapped for cls, or None where cls is not one that `convert` puts in place."""
    return vars(cls).get("_hfnn_original") or _TORCH.get(cls)


def op_of(cls: type):
    """The op whose room computes the forward of a converted class."""
    like, room = getattr(cls, "_hfnn_like", None), getattr(cls, "_hfnn_room", cls)
    if like is not None:
        return like.op
    return next((_OPS[base] for base in room.__mro__ if base in _OPS), None) or room.op


def title(cls: type) -> str:
    """What a converted class is now, for people: "hfnn.LayerNorm", "hfnn rms_norm, offset 1"."""
    like = getattr(cls, "_hfnn_like", None)
    room = next((base for base in cls.__mro__ if base in _TORCH), None)
    return str(like) if like is not None else f"hfnn.{room.__name__}" if room else f"hfnn {op_of(cls).name}"
