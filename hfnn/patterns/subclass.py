"""Changing the class of an existing module, and changing it back.

An exact torch class becomes its room's class: `nn.LayerNorm` -> `hfnn.LayerNorm`. Any other class keeps its name and
everything that it adds: the module's class becomes a subclass of it whose `forward` is the room's. Such a class is made
here, once for each (original, room, like). It is pickled as these three, so a new process makes it again.

A swapped module returns permanently to its class's own forward if something that the swap depends on changes: the
class's forward, or values that a proof read (`like.reads`, hfnn/patterns/probe.py and names.py). Writes past `setattr`,
into `vars(module)`, are not seen.
"""

import copyreg
import functools
import weakref

from torch import nn

from hfnn import ops
from hfnn.core.context import compiling
from hfnn.core.kernel import log
from hfnn.patterns.names import outside
from hfnn.patterns.probe import ABSENT, NOTHING, frozen, new_class, of_class

# torch's class -> the room's, the room's -> torch's, the room's -> its op, from the index of ops.
ROOMS = {torch_class: room for op in ops.ALL for torch_class, room in op.modules.items()}
_TORCH = {room: torch_class for torch_class, room in ROOMS.items()}
_OPS = {room: op for op in ops.ALL for room in op.modules.values()}
# Methods in which a torch module computes: a convolution's forward calls another method.
COMPUTE = ("forward", "_conv_forward", "_output_padding")


def forward_of(cls: type) -> tuple:
    """The functions with which modules of a class compute."""
    return tuple(getattr(cls, name, None) for name in COMPUTE)


# Of torch's classes, before any replacement.
FORWARDS = {torch_class: forward_of(torch_class) for torch_class in ROOMS}
# Attributes that `convert` may set on modules, by what their rooms read.
SETTINGS = ("prefer", "recompute", "keep", "exact", "defer")
# Files whose `__init_subclass__` derives the forward of each class from the existing one. Those of other authors may
# register the class, so they are not called.
_DERIVE = ("transformers.modeling_layers",)


class Converted:
    """The base of classes made by `make_subclass`. They have `_hfnn_original`, `_hfnn_room` and `_hfnn_like`."""

    _hfnn_lapsed = None  # on an instance: what changed

    def _hfnn_look(self):
        """Lapses if the class's held attributes have changed: `_while_it_holds`."""

    def __init_subclass__(cls, **kwargs):
        if "_hfnn_original" not in vars(cls):  # a class derived from ours
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
        """Whether the swap is still valid; for code that computes the module without calling it."""
        cls = next(cls for cls in type(self).__mro__ if "_hfnn_original" in vars(cls))
        cls._hfnn_look(self)
        return self._hfnn_lapsed is None

    def __reduce_ex__(self, protocol):
        self._hfnn_holds()  # a copy would take the present class as its reference
        reduced = super().__reduce_ex__(max(protocol, 2))
        cls = type(self)
        if "_hfnn_original" not in vars(cls) or reduced[0] is not copyreg.__newobj__:
            return reduced  # a class derived from ours, or an original with its own pickling
        return _again, (cls._hfnn_original, cls._hfnn_room, cls._hfnn_like, *reduced[1][1:]), *reduced[2:]


class Proved(Converted):
    """A class proved by attributes that its forward read: `_hfnn_reads`, by name."""

    def __setattr__(self, name, value):
        before = self._hfnn_reads.get(name)
        if before is not None and frozen(value) != before:
            lapse(self, f"its attribute {name} was set")
        super().__setattr__(name, value)

    def __delattr__(self, name):
        if name in self._hfnn_reads:
            lapse(self, f"its attribute {name} was deleted")
        super().__delattr__(name)

    def add_module(self, name, *args, **kwargs):
        self._hfnn_registers(name)
        super().add_module(name, *args, **kwargs)

    def register_parameter(self, name, *args, **kwargs):
        self._hfnn_registers(name)
        super().register_parameter(name, *args, **kwargs)

    def register_buffer(self, name, *args, **kwargs):
        self._hfnn_registers(name)
        super().register_buffer(name, *args, **kwargs)

    def _hfnn_registers(self, name):
        if name in self._hfnn_reads:
            lapse(self, f"{name} was registered")


def _again(original, room, like, *args):
    cls = make_subclass(original, room, like)
    return cls.__new__(cls, *args)


# By the ids of the original and of its held attributes, which live as long as a class made from them. Only modules keep
# these classes alive.
_made: weakref.WeakValueDictionary[tuple, type] = weakref.WeakValueDictionary()


def make_subclass(original: type, room: type, like=None) -> type:
    """The subclass of `original` whose forward is that of `room`. It keeps the name, for code that identifies classes
    by name.

    `like` tells where the room finds its numbers in a module of this class (hfnn/patterns), if needed. Raises what
    subclassing the class raises.
    """
    reads = getattr(like, "reads", NOTHING)
    own = (name for name in COMPUTE if hasattr(original, name) and name not in reads.methods)
    held = [(name, of_class(original, name)) for name in (*own, *reads.methods)]
    names = outside(original, reads.methods) if reads.names else []
    key = id(original), room, like, *(id(value) for _, value in held), *(id(value) for _, _, value in names)
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
        "_hfnn_names": names,
        "_hfnn_reads": dict(reads.attributes),
        "_hfnn_dtypes": {},  # cache of hfnn/patterns/lookalike.py
    }
    base = Proved if reads.attributes else Converted
    made = _made[key] = new_class(original, original.__name__, (base, room, original), members)
    return made


def _while_it_holds(cls: type):
    """The forward of cls, while the original's forward and the values behind the proof are unchanged."""
    original, forward, held, names = cls._hfnn_original, cls.forward, cls._hfnn_held, cls._hfnn_names
    reads = getattr(cls._hfnn_like, "reads", NOTHING)
    moved = reads.moved if reads.paths else None

    def look(self):
        for name, value in held:
            if getattr(original, name, ABSENT) is not value and of_class(original, name) is not value:
                lapse(self, f"{name} of its class was replaced")
        for where, name, value in names:
            if where.get(name, ABSENT) is not value:
                lapse(self, f"{name}, which its class reads, was assigned")
        if moved is not None and (path := moved(self)):
            lapse(self, f"its {'.'.join(path)} was set")

    cls._hfnn_look = look

    # First the check for small calls, in which torch's own op would run anyway: the op's, or the room's own.
    passes = cls._hfnn_like.op.passes if getattr(cls._hfnn_room, "_hfnn_one_input", False) else None
    small = getattr(cls._hfnn_room, "_hfnn_small", None)

    @functools.wraps(original.forward)
    def run(self, *args, **kwargs):
        if passes is not None and (len(args) != 1 or kwargs or passes(args[0], self.prefer)):
            return original.forward(self, *args, **kwargs)
        if not compiling():
            if small is not None and small(self, args, kwargs):
                return original.forward(self, *args, **kwargs)
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
    """Restore the class and attributes of a converted module."""
    cls = type(module)
    object.__setattr__(module, "__class__", original(cls))
    for name in ("_hfnn_lapsed", "_hfnn_use"):
        vars(module).pop(name, None)
    for name in settings(cls):
        if "forward" in vars(module):  # a forward wrapped since then still calls the room, which reads them
            vars(module).setdefault(name, getattr(cls, name))
        else:
            vars(module).pop(name, None)


def settings(cls: type) -> list[str]:
    """The attributes that `convert` may set on modules of a class: those that its room reads."""
    room = getattr(cls, "_hfnn_room", cls)
    return [name for name in SETTINGS if hasattr(room, name)]


def is_converted(module: nn.Module) -> bool:
    """Whether a room computes the module's forward; also if `fully_shard` or similar code has since subclassed its
    class."""
    return isinstance(module, (Converted, *_TORCH))


def original(cls: type) -> type | None:
    """The class that cls replaced, or None if `convert` did not make cls."""
    cls = vars(cls).get("_hfnn_plain", cls)  # of a captured model
    return vars(cls).get("_hfnn_original") or _TORCH.get(cls)


def op_of(cls: type):
    """The op whose room computes the forward of a converted class."""
    like, room = getattr(cls, "_hfnn_like", None), getattr(cls, "_hfnn_room", cls)
    if like is not None:
        return like.op
    return next((_OPS[base] for base in room.__mro__ if base in _OPS), None) or room.op


def title(cls: type) -> str:
    """A description of a converted class: "hfnn.LayerNorm", "hfnn rms_norm, offset 1"."""
    like = getattr(cls, "_hfnn_like", None)
    room = next((base for base in cls.__mro__ if base in _TORCH), None)
    return str(like) if like is not None else f"hfnn.{room.__name__}" if room else f"hfnn {op_of(cls).name}"
