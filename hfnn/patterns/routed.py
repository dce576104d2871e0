"""Modules whose own code calls torch's functions: recognised by reading this code, and run with these calls routed.

Swapping modules does not reach a model that calls `nn.functional.dropout` in its forward. `recognise` finds such
modules by the byte code of their class. Once converted, their forward runs with the calls in this code routed
(hfnn/patch.py), and no others: calls inside a submodule belong to the submodule. Activation checkpointing depends on
this: it calls a submodule again in backward, outside of this forward, and must get the same functions.
"""

import ast
import dis
import functools
import inspect
import re
import textwrap
import tokenize
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from hfnn.core.classes import cache_by_class
from hfnn.core.context import PLAIN, compiling
from hfnn.core.holder import stock_of
from hfnn.core.kernel import PREFERENCES, forced
from hfnn.patch import CAT, PLACES, Place, here, install, uninstall
from hfnn.patterns.probe import Refusal
from hfnn.patterns.proof import Match

# The number of elements of a module's first input from which routing its calls may pay for its host time.
SMALL = 1 << 12


class Routed:
    """Mixin for such a module: its own forward, with the calls in its own code routed."""

    prefer = "auto"

    def _hfnn_small(self, like, args: tuple, kwargs: dict) -> bool:
        """Whether it runs torch's functions because its first input is small."""
        x = args[0] if args else next(iter(kwargs.values()), None)
        return type(x) in PLAIN and x.numel() < SMALL and self.prefer != "memory" and forced() is None

    @property
    def _hfnn_when(self) -> str:
        return f"called in {calls(stock_of(self)).where}"

    @staticmethod
    def forward_for(cls: type) -> Callable:
        return _within(cls.forward, calls(cls))


def _within(forward: Callable, found: "Calls") -> Callable:
    """`forward` with the calls in its own code routed."""
    places, codes = found.places, found.codes
    alone = {prefer: ({}, codes, prefer) for prefer in PREFERENCES}

    def run(self, like, *args, **kwargs):
        # In training also without grad mode: reentrant checkpointing runs forward so, and again in grad mode.
        if compiling() or not (torch.is_grad_enabled() or self.training):
            return forward(self, *args, **kwargs)
        outer = here.state
        install(places)
        here.state = alone[self.prefer] if outer is None else (outer[0], codes, self.prefer)
        try:
            return forward(self, *args, **kwargs)
        finally:
            here.state = outer
            uninstall(places)

    return run


@dataclass(frozen=True)
class RoutedCalls(Match):
    """names: of the functions that the module's own code calls."""

    names: tuple[str, ...]
    mixin = Routed

    def __str__(self) -> str:
        return f"hfnn {', '.join(self.names)} inside"


class RoutedCat(Routed):
    """Of a module with several convolutions, also torch.cat: of features, which are often kept anyway. Elsewhere it
    puts tokens and angles together, which nothing keeps."""

    @property
    def _hfnn_when(self) -> str:
        return f"called in {calls(stock_of(self), True).where}"

    @staticmethod
    def forward_for(cls: type) -> Callable:
        return _within(cls.forward, calls(cls, True))


@dataclass(frozen=True)
class RoutedWithCat(RoutedCalls):
    mixin = RoutedCat


@dataclass(frozen=True, eq=False)
class Calls:
    """The calls of functions that hfnn has in a class's own code."""

    places: tuple[Place, ...]
    codes: frozenset
    where: str


def recognise(module: nn.Module) -> Match | Refusal | None:
    """How to treat the module, or why its calls cannot be routed; None if it makes none."""
    found, convolves = calls(type(module), True), True
    if found is not None:
        convolves = sum(isinstance(part, _ConvNd) for part in module.modules()) > 1
        found = calls(type(module), convolves)
    if not isinstance(found, Calls):
        return found and Refusal(found)
    names = tuple(sorted({place.name for place in found.places}))
    return (RoutedWithCat if convolves else RoutedCalls)(names)


# torch, and libraries that use a model's parts in their own way.
_FOREIGN = ("torch", "hfnn", "peft")
_CHECKPOINT = re.compile(r"(^|_)checkpoint(_|$)|checkpointing_func")
# It derives the forward of each class from the existing one, also from ours.
_CHECKPOINTS_SUBCLASSES = "transformers.modeling_layers"


@cache_by_class
def calls(cls: type, convolves: bool = False) -> Calls | str | None:
    """The calls of the class's forward, and of functions and methods of the same file that it calls, at most two deep.

    convolves: also those of torch.cat. None if there are none; a reason if calls are repeated in backward without
    calling the module again.
    """
    known = {**PLACES, (torch, "cat"): CAT} if convolves else PLACES
    forward = _unwrapped(cls.forward)
    if forward is None or _is_foreign(cls) or _is_foreign(forward):
        return None
    found: dict[types.FunctionType, set[Place]] = {}
    _collect(forward, cls, 0 if _checkpoints(forward) else 2, found, known)
    found = {function: places for function, places in found.items() if places}
    if not found:
        return None
    if any(_checkpoints(f) for f in _wrappers(cls.forward) if f.__globals__["__name__"] != _CHECKPOINTS_SUBCLASSES):
        return "its forward is wrapped by a function that checkpoints it: what that calls again cannot be routed"
    for function in found:
        why = _names_uncalled(function, known)
        if why is not None:
            return why
    places = tuple(dict.fromkeys(place for places in found.values() for place in sorted(places, key=id)))
    codes = frozenset(code for function in found for code in _codes(function))
    return Calls(places, codes, ", ".join(function.__name__ for function in found))


def _names_uncalled(function, known) -> str | None:
    """Why a function may not get a routed one: it may compare it, look it up, or keep it."""
    tree = _tree(function.__code__)
    if tree is None:
        return f"the source of {function.__name__} is not there to be read"
    for node in _uncalled(tree):
        owner = _module(node.value, function) if isinstance(node, ast.Attribute) else None
        if owner is not None and (owner, node.attr) in known:
            return f"{function.__name__} names {ast.unparse(node)} without calling it"
    return None


@functools.lru_cache(maxsize=64)
def _tree(code: types.CodeType) -> ast.AST | None:
    """The syntax tree of a function, or None if its source is not there to be read."""
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(code)))
    except (OSError, SyntaxError, tokenize.TokenError):  # the last: the file is no code, as of a notebook
        return None


def _uncalled(tree: ast.AST) -> list[ast.Name | ast.Attribute]:
    """The names in a function's code, and chains of attributes, that are not just called."""
    called = {id(call.func) for call in _calls_in(tree)}
    return [node for node in ast.walk(tree) if isinstance(node, ast.Name | ast.Attribute) and id(node) not in called]


def _only_calls(function, name: str) -> bool:
    """Whether a function calls the helper of this name, and does not pass it on: others may call it again in backward.

    Functions of the file may be passed on, but not to what an instance holds: transformers passes eager attention to
    the look-up of attention.
    """
    tree = _tree(function.__code__)
    if tree is None:
        return False
    used = [node for node in _uncalled(tree) if ast.unparse(node) == name]
    if "." in name:
        return not used
    own = f"{function.__code__.co_varnames[0]}." if function.__code__.co_varnames else "."
    held = [call for call in _calls_in(tree) if ast.unparse(call.func).startswith(own)]
    return not any(node in _given(call) for call in held for node in used)


def _calls_in(tree: ast.AST) -> list[ast.Call]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call)]


def _given(call: ast.Call) -> list[ast.expr]:
    """The arguments of a call."""
    return [*call.args, *(keyword.value for keyword in call.keywords)]


def _passes_inner(function) -> bool:
    """Whether a function passes a function that it defines to another one, which may call it again in backward."""
    if not any(isinstance(constant, types.CodeType) for constant in function.__code__.co_consts):
        return False
    tree = _tree(function.__code__)
    if tree is None:
        return True
    inner = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            inner.add(node.name)
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Lambda):
            inner.update(target.id for target in node.targets if isinstance(target, ast.Name))
    given = [x for call in _calls_in(tree) for x in _given(call)]
    return any(isinstance(x, ast.Lambda) or (isinstance(x, ast.Name) and x.id in inner) for x in given)


def _module(node, function) -> types.ModuleType | None:
    """The module that a name or a chain of attributes refers to."""
    if isinstance(node, ast.Name):
        value = function.__globals__.get(node.id)
    elif isinstance(node, ast.Attribute):
        value = getattr(_module(node.value, function), node.attr, None)
    else:
        return None
    return value if isinstance(value, types.ModuleType) else None


def _is_foreign(thing) -> bool:
    return thing.__module__ is None or thing.__module__.partition(".")[0] in _FOREIGN


def _unwrapped(function) -> types.FunctionType | None:
    """The function under its decorators, or None if it is not written in Python."""
    function = inspect.unwrap(function)
    return function if type(function) is types.FunctionType else None


def _wrappers(function) -> Iterator[types.FunctionType]:
    """The decorators' functions around a function."""
    while hasattr(function, "__wrapped__"):
        if type(function) is types.FunctionType:
            yield function
        function = function.__wrapped__


def _checkpoints(function) -> bool:
    """Whether a function seems to checkpoint parts of its own code: by the names in it, or by what they refer to."""
    names = {name for code in _nested(function.__code__) for name in code.co_names}
    values = [function.__globals__.get(name) for name in names]
    values += [cell.cell_contents for cell in function.__closure__ or () if cell != types.CellType()]
    return any(map(_CHECKPOINT.search, names)) or any(map(_is_checkpoint, values))


def _is_checkpoint(value) -> bool:
    """Whether this is torch's or another function that checkpoints, under any name."""
    value = value.func if isinstance(value, functools.partial) else value
    if not isinstance(value, types.FunctionType):
        return False
    return value.__module__ == "torch.utils.checkpoint" or _CHECKPOINT.search(value.__name__) is not None


def _codes(function) -> tuple[types.CodeType, ...]:
    """The code of a function, and of the functions inside it unless they are checkpointed or passed to others."""
    alone = _checkpoints(function) or _passes_inner(function)
    return (function.__code__,) if alone else tuple(_nested(function.__code__))


def _nested(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _nested(constant)


def _collect(function, cls, depth: int, found: dict, known: dict = PLACES) -> None:
    """Adds to `found` the places that a function looks up, and those of its helpers."""
    found[function] = set()
    for code in _codes(function):
        for thing, name in _looked_up(code, function, cls, known):
            if isinstance(thing, Place):
                found[function].add(thing)
            elif depth and thing not in found and not _checkpoints(thing) and _only_calls(function, name):
                _collect(thing, cls, depth - 1, found, known)


def _looked_up(code, function, cls, known) -> Iterator[tuple[Place | types.FunctionType, str]]:
    """Places and helpers with their names, in the order of the code: `F.gelu`, `helper`, `self.helper`."""
    first = function.__code__.co_varnames[:1]
    value = None  # value of the name or chain of attributes so far
    for instruction in instructions(code):
        name = instruction.argval
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            value = function.__globals__.get(name)
            helper = _helper(value, function)
            if helper is not None:
                yield helper, name
        elif instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            place = known.get((value, name)) if isinstance(value, types.ModuleType) else None
            if place is not None:
                yield place, name
            elif value is _SELF:
                helper = _helper(inspect.getattr_static(cls, name, None), function)
                if helper is not None:
                    yield helper, f"{first[0]}.{name}"
            value = getattr(value, name, None) if isinstance(value, types.ModuleType) else None
        elif instruction.opname.startswith(("LOAD_FAST", "LOAD_DEREF")):
            last = name[-1] if isinstance(name, tuple) else name  # newer Pythons load two at once
            value = _SELF if (last,) == first else None
        elif instruction.opname != "EXTENDED_ARG":
            value = None


_SELF = object()
instructions = functools.lru_cache(maxsize=1024)(lambda code: tuple(dis.get_instructions(code)))


def _helper(value, function) -> types.FunctionType | None:
    """A plain function of the same file."""
    value = getattr(value, "__func__", value)
    found = _unwrapped(value) if type(value) is types.FunctionType else None
    return found if found is not None and found.__globals__ is function.__globals__ else None
