"""Clones on which a module's forward is tried, and the record of what it reads.

A module's own `forward` is run on a clone: another object of its class, with the module's attributes, small random
parts on the CPU and no hooks. Objects that the clone holds are copied when they are first read, so nothing is shared
with the module. The proof depends only on what is read of the clone, `Reads`: attributes of the instance, attributes of
objects that it holds (`self.config.x`), and functions of its class. The proof is reused for modules for which these are
the same (proof.py), and becomes invalid once they change (subclass.py).
"""

import enum
import functools
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import nn

from hfnn.core.holder import added

CONTAINERS = (list, dict, set)
MODULE_STATE = frozenset(vars(nn.Module()))
_NOTES = "_hfnn_notes"  # key in the dict of a watched object
_OWN = "_hfnn_own"  # the names in the dict of a watched class


class ABSENT:
    """Placeholder for an attribute that was requested but does not exist."""


class Refusal(Exception):
    """Why a module does not match a pattern: raised by a proof, and returned by a pattern."""


@dataclass(frozen=True)
class Reads:
    """What a forward read of its module. attributes: of the instance, by name, with their values; paths: of objects
    that it holds, as (("config", "hidden_act"), value), and of the instance's own lists, dicts and sets; methods: the
    names that it used of the class; names: those that the class's code reads outside of the module (names.py).
    """

    attributes: tuple[tuple[str, object], ...] = ()
    paths: tuple[tuple[tuple[str, ...], object], ...] = ()
    methods: tuple[str, ...] = ()
    names: tuple[str, ...] = ()

    def __hash__(self):  # values need not be hashable
        return hash((tuple(name for name, _ in self.attributes), tuple(path for path, _ in self.paths), self.methods))

    def without(self, names: tuple[str, ...]) -> "Reads":
        """All except some attributes."""
        return replace(self, attributes=tuple(read for read in self.attributes if read[0] not in names))

    def match(self, module: nn.Module) -> bool:
        """Whether the module still holds the values that were read."""
        state = vars(module)
        same = all(frozen(state.get(name, ABSENT)) == value for name, value in self.attributes)
        return same and self.moved(module) is None

    def moved(self, module: nn.Module) -> tuple[str, ...] | None:
        """The path of a value that has changed, or None."""
        return next((path for path, value in self.paths if frozen(_at(module, path)) != value), None)


NOTHING = Reads()


def _at(module, path):
    for name in path:
        state = vars(module) if hasattr(module, "__dict__") else {}
        module = state.get(name, state.get("_modules", {}).get(name, ABSENT))
    return module


@dataclass(frozen=True)
class _Itself:
    """A value compared by identity."""

    value: object

    def __eq__(self, other):
        return type(other) is _Itself and other.value is self.value

    __hash__ = object.__hash__


# Values that do not change.
VALUES = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.memory_format, enum.Enum, type)
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType, torch.jit.ScriptFunction)


def frozen(value):
    """The comparison key of a value: instances often hold their own `partial` or bound method."""
    if hasattr(type(value), "_hfnn_of"):  # a view of a config (hfnn/adapters/views.py)
        value = value._hfnn_of
    if isinstance(value, functools.partial):
        return functools.partial, value.func, frozen(value.args), frozen(value.keywords)
    if isinstance(value, types.MethodType) and isinstance(value.__self__, nn.Module):
        return types.MethodType, value.__func__
    if isinstance(value, (list, tuple)):
        return type(value), tuple(map(frozen, value))
    if isinstance(value, dict):
        return type(value), tuple((name, frozen(each)) for name, each in value.items())
    if isinstance(value, set):
        return type(value), frozenset(value)
    return (type(value), value) if isinstance(value, VALUES) else _Itself(value)


def _of_note(value, name: str):
    if isinstance(value, torch.Tensor):
        raise Refusal(f"its forward reads {name}, a tensor that is no parameter, which may be written to")
    if not _is_comparable(value) and not _is_plain_object(value):
        raise Refusal(f"its forward reads {name}, a {type(value).__name__}, whose changes would not be seen")
    return frozen(value)


def _is_comparable(value) -> bool:
    """Whether `frozen` of a value changes if the value does."""
    if isinstance(value, functools.partial):
        return all(map(_is_comparable, (value.func, value.args, value.keywords)))
    if isinstance(value, (*VALUES, *_FUNCTIONS, range, slice)):
        return True
    if isinstance(value, types.MethodType):
        return isinstance(value.__self__, (nn.Module, type))
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(map(_is_comparable, value))
    return isinstance(value, dict) and all(map(_is_comparable, value.values()))


def _is_plain_object(value) -> bool:
    """Whether reads of its attributes can be recorded (`_of_path`): the value has nothing but attributes."""
    if isinstance(value, (nn.Module, *CONTAINERS, tuple)) or not hasattr(value, "__dict__"):
        return False
    return type(value).__basicsize__ <= _Plain.__basicsize__ or isinstance(value, types.SimpleNamespace)


class _Plain:
    pass


class Notes:
    """The record of reads of the clones of one module."""

    def __init__(self, module: nn.Module):
        self.module, self.cls, self.ours = module, type(module), added(module)
        self.attributes, self.paths, self.methods = {}, {}, set()
        self.parts: dict[str, Notes] = {}

    def of_part(self, name: str, part: nn.Module) -> "Notes":
        """The record of reads of a part: attributes of it are paths of the module."""
        return self.parts.setdefault(name, Notes(part))

    def reads(self) -> Reads:
        in_order = lambda found: tuple(sorted(found.items()))  # noqa: E731
        for name, part in self.parts.items():
            own = {(attribute,): value for attribute, value in part.attributes.items() if attribute != "forward"}
            self.paths |= {(name, *path): value for path, value in {**own, **part.paths}.items()}
        return Reads(in_order(self.attributes), in_order(self.paths), tuple(sorted(self.methods)))

    def note(self, name: str) -> None:
        """Record that `clone.name` is read."""
        own, module = vars(self.module), self.module
        if name in own and name not in self.ours:
            if name not in self.attributes:
                self.attributes[name] = _of_note(own[name], name)
                if isinstance(own[name], CONTAINERS):
                    self.paths[name,] = self.attributes[name]
        elif all(part.get(name) is None for part in (module._parameters, module._buffers, module._modules)):
            where = next((base for base in self.cls.__mro__ if name in vars(base)), None)
            if where is None or not where.__module__.startswith(("torch.", "builtins")):
                self.attributes[name] = frozen(ABSENT)
                if where is not None:
                    self.methods.add(name)


class _NoHook:
    """First base of an internal class: the author's `__init_subclass__` does not run."""

    def __init_subclass__(cls, **kwargs):
        pass


class _Watched:
    """A base of a class whose instances record reads, after any `__getattribute__` of the author."""

    def __getattribute__(self, name):
        get = object.__getattribute__
        if name[:2] != "__" and name not in MODULE_STATE:
            state = get(self, "__dict__")
            note = state.get(_NOTES)
            if note is not None:
                note(self, state, name)
        return get(self, name)


def new_class(cls: type, name: str, bases: tuple, members: dict) -> type:
    """A class with the metaclass of `cls`, whose own code does not run: it may register classes, or refuse them."""
    meta = type(cls)
    known = next(base for base in meta.__mro__ if base.__module__ in ("builtins", "abc", "typing"))
    return known.__new__(meta, name, bases, members)


# By the id of the class that each derives from.
_watched_classes: weakref.WeakValueDictionary[int, type] = weakref.WeakValueDictionary()


def _watched(cls: type, state: dict, note: Callable):
    """An object of a class with these attributes, which calls `note(object, its dict, name)` for each read.

    Raises Refusal if the class cannot be subclassed.
    """
    try:
        made = _watched_classes.get(id(cls))
        if made is None:
            in_python = isinstance(cls.__getattribute__, types.FunctionType)
            bases = (_NoHook, cls, _Watched) if in_python else (_NoHook, _Watched, cls)
            made = new_class(cls, cls.__name__, bases, {"__module__": cls.__module__, _OWN: ()})
            setattr(made, _OWN, frozenset(vars(made)))
            _watched_classes[id(cls)] = made
        found = made.__new__(made) if issubclass(cls, types.SimpleNamespace) else object.__new__(made)
    except Exception as error:  # this runs the author's code
        raise Refusal(f"{cls.__name__} cannot be derived from: {error}") from None
    vars(found).update({**state, _NOTES: note})
    return found


def _copied(value, name: str, clone, notes: Notes):
    """The clone's replacement for a value that it might share with the module."""
    if isinstance(value, CONTAINERS):
        return value.copy()
    if isinstance(value, types.MethodType) and value.__self__ is notes.module:
        return types.MethodType(value.__func__, clone)
    return value if _is_shared(value) else _of_path(value, (name,), notes)


def _is_shared(value) -> bool:
    """Whether a clone may share the module's value: immutable values, and values that are no plain objects."""
    return isinstance(value, (nn.Module, torch.Tensor)) or _is_comparable(value) or not _is_plain_object(value)


def _of_path(value, path: tuple[str, ...], notes: Notes):
    """A watched copy of an object that the module holds by a path."""

    def note(watched, state, name):
        if name not in state:
            of_its_class = next((vars(base)[name] for base in type(watched).__mro__ if name in vars(base)), ABSENT)
            if of_its_class is not ABSENT and not isinstance(of_its_class, VALUES):
                return
        there, here = vars(value).get(name, ABSENT), (*path, name)
        notes.paths[here] = _of_note(there, ".".join(here))
        if name not in state or state[name] is not there:
            return
        if isinstance(there, CONTAINERS):
            state[name] = there.copy()
        elif not _is_shared(there):
            state[name] = _of_path(there, here, notes)

    return _watched(type(value), vars(value), note)


def attributes(module: nn.Module) -> dict:
    """The author's attributes of the module, besides parameters."""
    ours = {"prefer"} | added(module)
    return {name: value for name, value in vars(module).items() if name not in MODULE_STATE and name not in ours}


def clone(
    module: nn.Module,
    notes: Notes,
    training: bool,
    parameters: dict,
    modules: dict | None = None,
    changed: dict | None = None,
    cls: type | None = None,
    buffers: dict | None = None,
) -> nn.Module:
    """Another object of the module's class (or of `cls`), with its attributes except those `changed`, and no hooks.

    `changes` tells whether its own forward changed anything.
    """
    changed = changed or {}
    own = {**attributes(module), **changed}
    made = {}

    def note(watched, state, name):
        notes.note(name)
        if name in own and name not in made and name not in changed:
            made[name] = _copied(own[name], name, watched, notes)
            if state.get(name) is own[name]:
                state[name] = made[name]

    state = {
        **vars(nn.Module()),
        "training": training,
        "_parameters": dict(parameters),
        "_buffers": dict(buffers or {}),
        "_modules": dict(modules or {}),
    }
    before = {name: list(part.items()) for name, part in state.items() if isinstance(part, dict)}
    found = _watched(cls or type(module), {**state, **own}, note)
    vars(found)[_CHANGES] = lambda: _changes(vars(found), own, made, before, training)
    return found


_CHANGES = "_hfnn_changes"


def changes(found: nn.Module) -> bool:
    """Whether its forward changed attributes of a clone, of its class, or of objects that it holds."""
    cls = type(found)
    return vars(found)[_CHANGES]() or vars(cls).keys() != getattr(cls, _OWN)  # type(self).calls += 1


def _changes(state, own, made, before, training) -> bool:
    names = state.keys() - MODULE_STATE - {_NOTES, _CHANGES, "prefer"}
    if names != own.keys() or state["training"] is not training:
        return True
    if any(len(state[name]) != len(part) for name, part in before.items()):
        return True
    return any(
        state[name] is not made.get(name, value) or (name in made and _differ(value, made[name]))
        for name, value in own.items()
    )


def _differ(value, made) -> bool:
    """Whether a copy differs from its original."""
    if made is value or isinstance(value, types.MethodType):
        return False
    if isinstance(value, CONTAINERS):
        return value != made
    own, now = vars(value), {name: each for name, each in vars(made).items() if name != _NOTES}
    return own.keys() != now.keys() or any(
        own[name] is not now[name]
        and (own[name] != now[name] if isinstance(own[name], (*CONTAINERS, *VALUES)) else _differ(own[name], now[name]))
        for name in own
    )


def of_class(cls: type, name: str):
    """A class's attribute of this name; for a class method, which is bound anew each time, the function."""
    value = getattr(cls, name, ABSENT)
    return getattr(value, "__func__", value)
