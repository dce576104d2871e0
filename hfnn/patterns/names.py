"""Names that a class's functions read outside of the module: globals of their files, and enclosing variables.

A proof holds while these have the same values, which is checked at each call (subclass.py). Values that can change
without another assignment, such as lists, refuse the proof, as does code that assigns such names itself. Not followed:
torch's modules, and decorators of other files.
"""

import builtins
import dis
import enum
import functools
import inspect
import re
import types
from collections.abc import Callable, Iterator

import torch

from hfnn.patterns.probe import ABSENT, MODULE_STATE, VALUES, Refusal, of_class

_FUNCTIONS = (types.BuiltinFunctionType, types.MethodDescriptorType, torch.jit.ScriptFunction)
_FIXED = (*VALUES, *_FUNCTIONS, types.FunctionType, types.ModuleType, range, slice, frozenset)
_REGISTRIES = "transformers.activations"  # file of the classes of tables that are filled once
_ASSIGN, _ASSIGN_ENCLOSING = ("STORE_GLOBAL", "DELETE_GLOBAL"), ("STORE_DEREF", "DELETE_DEREF")
_NOT_FOLLOWED = "torch", "hfnn", "math", "numpy"
# Questions about the state of torch (autocast, inference mode, the default dtype), whose answers no proof can hold.
_QUESTION = re.compile(r"(is|are|get)_\w+")
# Those about their arguments, about the machine, and about tools for which modules run their own code.
_ANSWERED = frozenset((
    "is_tensor", "is_floating_point", "is_complex", "is_available", "is_scripting", "is_compiling",
    "is_dynamo_compiling", "is_exporting", "is_in_onnx_export",
))  # fmt: skip


class _Cell:
    """The value of an enclosing variable, as in a dict."""

    def __init__(self, cell):
        self.cell = cell

    def get(self, name, default):
        try:
            return self.cell.cell_contents
        except ValueError:  # not assigned yet
            return default


def outside(cls: type, methods: tuple[str, ...]) -> list[tuple]:
    """[(where, name, value)] of what `forward` and these functions of a class read: `where.get(name, ABSENT) is value`.

    Raises Refusal for values that may change in place, and for assignments.
    """
    found, _ = _followed(cls, methods)
    return [(where, name, value) for (_, name), (where, value) in found.items()]


def _followed(cls: type, methods) -> tuple[dict, set]:
    """What these functions read, and all functions that were followed."""
    found, seen = {}, set()
    for name in ("forward", *methods):
        value = of_class(cls, name)
        for function in _wrapped(value.fget if isinstance(value, property) else value):
            _collect(function, found, seen)
    return found, seen


def asks_types(cls: type, methods) -> bool:
    """Whether `forward` and these functions of a class ask what a value is."""
    asked, functions = {"isinstance", "type", "hasattr", "is_tensor"}, _followed(cls, methods)[1]
    return any(asked & {chain[-1] for chain in _read(function.__code__)[0]} for function in functions)


def _wrapped(function) -> Iterator[types.FunctionType]:
    """A function and those under its decorators, without decorators of other files."""
    innermost = inspect.unwrap(function) if callable(function) else None
    while isinstance(function, types.FunctionType):
        if function.__globals__ is getattr(innermost, "__globals__", None):
            yield function
        function = getattr(function, "__wrapped__", None)


def _collect(function, found: dict, seen: set) -> None:
    if function in seen:
        return
    seen.add(function)
    for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
        _check(value, f"a default of {function.__name__}")
    hooks = [name for name in function.__code__.co_names if name in MODULE_STATE and name.endswith("_hooks")]
    if hooks:
        raise Refusal(f"its {function.__name__} reads {hooks[0]}, of which a clone has none")
    chains, assigned = _read(function.__code__)
    free = function.__code__.co_freevars
    if assigned - set(function.__code__.co_cellvars):
        raise Refusal(f"its {function.__name__} assigns {', '.join(sorted(assigned))}, which is outside of the module")
    for name, cell in zip(free, function.__closure__ or (), strict=True):
        if name != "__class__":
            _hold(_Cell(cell), name, function, found, seen)
    for first, *rest in chains:
        if first not in function.__globals__ and hasattr(builtins, first):
            continue
        where, value = function.__globals__, _hold(function.__globals__, first, function, found, seen)
        of_torch = getattr(value, "__name__", "").partition(".")[0] == "torch" or getattr(torch, first, None) is value
        asked = (rest or [first])[-1]
        if of_torch and _QUESTION.fullmatch(asked) and asked not in _ANSWERED:
            raise Refusal(f"its forward asks torch {asked}, which may change")
        for name in rest:
            where = _names_of(value, name)
            if where is None:
                break
            value = _hold(where, name, function, found, seen)


def _names_of(value, name: str):
    """The dict that has an attribute of a module or class, if it is to be held."""
    if isinstance(value, types.ModuleType):
        followed = value.__name__.partition(".")[0] not in _NOT_FOLLOWED
        return vars(value) if followed and name in vars(value) else None
    if isinstance(value, type) and not issubclass(value, enum.Enum):
        base = next((base for base in value.__mro__ if name in vars(base)), None)
        return None if base is None or base.__module__.startswith(("torch.", "builtins")) else vars(base)
    return None


def _hold(where, name: str, function, found: dict, seen: set):
    value = where.get(name, ABSENT)
    value = getattr(value, "__func__", value)
    _check(value, name)
    if isinstance(value, types.FunctionType) and value.__globals__ is function.__globals__:
        _collect(value, found, seen)
    if not isinstance(value, types.ModuleType):
        of = where.cell if isinstance(where, _Cell) else where
        found.setdefault((id(of), name), (where, where.get(name, ABSENT)))
    return value


def _check(value, name: str) -> None:
    """Raises Refusal unless a value can only change by another assignment to its name."""
    if isinstance(value, tuple):
        parts = value
    elif isinstance(value, functools.partial):
        parts = (value.func, *value.args, *value.keywords.values())
    elif (
        isinstance(value, _FIXED)
        or isinstance(getattr(value, "__wrapped__", None), Callable)
        or type(value).__module__ == _REGISTRIES
    ):
        return
    else:
        raise Refusal(f"its forward reads {name}, a {type(value).__name__} outside of the module, which may change")
    for part in parts:
        _check(part, name)


@functools.lru_cache(maxsize=1024)
def _read(code: types.CodeType) -> tuple[tuple[tuple[str, ...], ...], frozenset[str]]:
    """(the global names that a code reads, each with the attributes read of it; names that it assigns)"""
    chains, assigned, chain = [], set(), ()
    for instruction in dis.get_instructions(code):
        what, name = instruction.opname, instruction.argval
        if what in ("LOAD_GLOBAL", "LOAD_NAME"):
            chain = (name,)
            chains.append(chain)
        elif what in ("LOAD_ATTR", "LOAD_METHOD") and chain:
            chain = (*chain, name)
            chains.append(chain)
        elif what in ("STORE_GLOBAL", "DELETE_GLOBAL") or (
            what in ("STORE_DEREF", "DELETE_DEREF") and name in code.co_freevars
        ):
            assigned.add(name)
        elif what in ("STORE_ATTR", "DELETE_ATTR") and chain:
            assigned.add(".".join((*chain, name)))
        elif what not in ("PUSH_NULL", "EXTENDED_ARG", "PRECALL", "CACHE"):
            chain = ()
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner, more = _read(constant)
            chains += inner
            assigned |= more - set(code.co_cellvars)
    return tuple(dict.fromkeys(chains)), frozenset(assigned)
