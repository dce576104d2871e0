"""Changing the class of a living module, and changing it back.

An exact torch class becomes its room's class: `nn.LayerNorm` -> `hfnn.LayerNorm`. Any other class keeps its name and
everything it adds: the module's class becomes a subclass of it whose `forward` is a room's. Such a class is made here,
once for each (original, room, like), and is pickled as these three, so that a fresh process makes it again.

A swapped module goes back to its class's own forward, and stays there, once something has changed that it was swapped
for: the class's forward, or what a proof read (`like.reads`, hfnn/patterns/probe.py). Writes past `setattr`, into
`vars(module)`, are not seen.
"""

import copyreg
import functools
import weakref

from torch import nn

from hfnn import ops
from hfnn.core.context import compiling
from hfnn.core.kernel import log
from hfnn.patterns.probe import ABSENT, NOTHING, frozen, of_class

# torch's class -> the room's, the room's -> torch's, the room's -> its op: read from the index of ops.
ROOMS = {torch_class: room for op in ops.ALL for torch_class, room in op.modules.items()}
_TORCH = {room: torch_class for torch_class, room in ROOMS.items()}
_OPS = {room: op for op in ops.ALL for room in op.modules.values()}
# Methods in which a module of torch computes: convolutions' forward calls another.
COMPUTE = ("forward", "_conv_forward", "_output_padding")


def forward_of(cls: type) -> tuple:
    """The functions by which modules of a class compute."""
    return tuple(getattr(cls, name, None) for name in COMPUTE)


# Of torch's classes, as they were before anybody replaced one.
FORWARDS = {torch_class: forward_of(torch_class) for torch_class in ROOMS}
# What `convert` may set on modules, by what their rooms read.
SETTINGS = ("prefer", "recompute", "keep", "exact")
# Files whose `__init_subclass__` derives the forward of each class from the one it finds there. Another author's may
# note down the class, and is not called.
_DERIVE = ("transformers.modeling_layers",)


class Converted:
    """The base of classes made by `make_subclass`. They have `_hfnn_original`, `_hfnn_room` and `_hfnn_like`."""

    _hfnn_lapsed = None  # on an instance: what changed

    def _hfnn_look(self):
        """Lapses, where what is held of the class is another: `_while_it_holds`."""

    def __init_subclass__(cls, **kwargs):
        if "_hfnn_original" not in vars(cls):  # somebody derives from ours
            return super().__init_subclass__(**kwargs)
        prepare = getattr(cls._hfnn_room, "prepare", None)
        if prepare is not None:
            prepare(cls)
        if issubclass(cls, nn.Module):  # an optimizer has none
            cls.forward = _while_it_holds(cls)
        for base in cls.__mro__:
            if base.__module__ in _DERIVE and "__init_subclass__" in vars(base):
                vars(base)["__init_subclass__"].__get__(None, cls)()

    def _hfnn_holds(self) -> bool:
        """Whether the module is what it was swapped for; for those that compute it without calling it."""
        cls = next(cls for cls in type(self).__mro__ if "_hfnn_original" in vars(cls))
        cls._hfnn_look(self)
        return self._hfnn_lapsed is None

    def __reduce_ex__(self, protocol):
        self._hfnn_holds()  # what is made of it would hold what the class is now
        reduced = super().__reduce_ex__(max(protocol, 2))
        cls = type(self)
        if "_hfnn_original" not in vars(cls) or reduced[0] is not copyreg.__newobj__:
            return reduced  # a class derived from ours, or an original that has its own way to be pickled
        return _again, (cls._hfnn_original, cls._hfnn_room, cls._hfnn_like, *reduced[1][1:]), *reduced[2:]


class Proved(Converted):
    """What was proved by what its forward read of attributes: `_hfnn_reads`, by name."""

    def __setattr__(self, name, value):
        before = self._hfnn_reads.get(name)
        if before is not None and frozen(value) != before:
            lapse(self, f"its attribute {name} was set")
        super().__setattr__(name, value)

    def __delattr__(self, name):
        if name in self._hfnn_reads:
            lapse(self, f"its attribute {name} was deleted")
        super().__delattr__(name)


def _again(original, room, like, *args):
    cls = make_subclass(original, room, like)
    return cls.__new__(cls, *args)


# By the numbers of the original and of what is held of it, which are there for as long as a class made of them is.
# Nobody but their modules keeps these.
_made: weakref.WeakValueDictionary[tuple, type] = weakref.WeakValueDictionary()


def make_subclass(original: type, room: type, like=None) -> type:
    """The subclass of `original` whose forward is that of `room`; it keeps the name, for what is told by names.

    `like` says where the room finds its numbers in a module of this class (hfnn/patterns), if it needs telling.
    Raises TypeError where the class cannot be derived from.
    """
    reads = getattr(like, "reads", NOTHING)
    own = (name for name in COMPUTE if hasattr(original, name) and name not in reads.methods)
    held = [(name, of_class(original, name)) for name in (*own, *reads.methods)]
    key = id(original), room, like, *(id(value) for _, value in held)
    found = _made.get(key)
    if found is not None:
        return found
    names = {
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "_hfnn_original": original,
        "_hfnn_room": room,
        "_hfnn_like": like,
        "_hfnn_held": held,
        "_hfnn_reads": dict(reads.attributes),
        "_hfnn_dtypes": {},  # what hfnn/patterns/lookalike.py asks but once
    }
    base = Proved if reads.attributes else Converted
    made = _made[key] = type(original)(original.__name__, (base, room, original), names)
    return made


def _while_it_holds(cls: type):
    """The forward that cls has, while the original's, and what it was proved by, are what they were."""
    original, forward, held = cls._hfnn_original, cls.forward, cls._hfnn_held
    reads = getattr(cls._hfnn_like, "reads", NOTHING)
    moved = reads.moved if reads.paths else None

    def look(self):
        for name, value in held:
            if getattr(original, name, ABSENT) is not value and of_class(original, name) is not value:
                lapse(self, f"{name} of its class was replaced")
        if moved is not None and (path := moved(self)):
            lapse(self, f"its {'.'.join(path)} was set")

    cls._hfnn_look = look

    # First what a call pays for that is small: torch's own op would run in any case.
    passes = cls._hfnn_like.op.passes if getattr(cls._hfnn_room, "_hfnn_one_input", False) else None

    @functools.wraps(original.forward)
    def run(self, *args, **kwargs):
        if passes is not None and (len(args) != 1 or kwargs or passes(args[0], self.prefer)):
            return original.forward(self, *args, **kwargs)
        if not compiling():
            look(self)
        if self._hfnn_lapsed is not None:
            return original.forward(self, *args, **kwargs)
        return forward(self, *args, **kwargs)

    return run


def lapse(module: nn.Module, why: str) -> None:
    """From now on a module of a class made here runs its class's own forward; `why` is for `hfnn.report`."""
    if module._hfnn_lapsed is None:
        log.warning("%s runs its own forward again: %s after hfnn.convert", type(module).__name__, why)
        vars(module)["_hfnn_lapsed"] = why


def restore(module: nn.Module) -> None:
    """Give a converted module its class and attributes again."""
    cls = type(module)
    object.__setattr__(module, "__class__", original(cls))
    vars(module).pop("_hfnn_lapsed", None)
    for name in settings(cls):
        if "forward" in vars(module):  # what somebody wrapped since goes on to the room, which reads them
            vars(module).setdefault(name, getattr(cls, name))
        else:
            vars(module).pop(name, None)


def settings(cls: type) -> list[str]:
    """What `convert` may set on modules of a class: what its room reads."""
    room = getattr(cls, "_hfnn_room", cls)
    return [name for name in SETTINGS if hasattr(room, name)]


def is_converted(module: nn.Module) -> bool:
    """Whether a room computes the module's forward; also where `fully_shard` or alike derived from its class since."""
    return isinstance(module, (Converted, *_TORCH))


def original(cls: type) -> type | None:
    """The class that was swapped for cls, or None where cls is not one that `convert` puts in place."""
    cls = vars(cls).get("_hfnn_plain", cls)  # of a captured model
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
