"""A row: a small graph of torch calls, written as a function, beside the op that replaces it. `find` finds its sites.

Arguments with a kind are parts or functions, called on one value; the others are values.
"""

import functools
import itertools
import types
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import fx

from hfnn.ops.batch_norm import ACTIVATIONS
from hfnn.ops.gated import GATES
from hfnn.patterns import graph
from hfnn.patterns.graph import name_of
from hfnn.patterns.kinds import Act, Map


@dataclass(frozen=True, eq=False)
class Row:
    """pattern: the graph, as a function; parts: {argument: the kind of what it calls}; compute: the op, a function of
    `prefer`, the pattern's arguments and `more`. op: for reports, or by the activation's name. more: (site) -> further
    arguments, or None if the site does not fit. whole: whether the module's own forward runs if a part must be called;
    else `compute` calls it. define: the pattern, if it needs `more`. numbers: whether a value may be a number. alone:
    whether a graph is rewritten for this row.
    """

    pattern: Callable
    parts: dict[str, str]
    compute: Callable
    op: object
    more: Callable = lambda site: ()
    whole: bool = True
    define: Callable | None = None
    numbers: bool = False
    alone: bool = True

    @property
    def names(self) -> tuple[str, ...]:
        """Of the pattern's arguments."""
        return self.pattern.__code__.co_varnames[: self.pattern.__code__.co_argcount]

    @functools.cached_property
    def stands(self) -> Callable:
        """Stands for `compute` in a source, as hfnn_<name>."""
        found = types.FunctionType((lambda: None).__code__, {}, self.pattern.__name__)
        found.__module__ = "hfnn"
        return found

    @functools.cached_property
    def root(self) -> fx.Node:
        """The last node of the pattern, in the spelling of graph.py."""
        first = self._traced(torch.bfloat16)
        if any(name_of(node) == "to" for node in first.graph.nodes):
            graph.follow(first.graph, self._traced(torch.float16).graph)
        return first

    def _traced(self, dtype) -> fx.Node:
        trace = graph.Trace(dtype)
        part = lambda name: functools.partial(trace.part, name)  # noqa: E731
        given = [part(name) if name in self.parts else trace.input(name, (2, 3, 4)) for name in self.names]
        return self.pattern(*given).node

    def by_parts(self, prefer, *given):
        """What `compute` stands for: torch's calls, and the parts."""
        given, more = given[: len(self.names)], given[len(self.names) :]
        pairs = zip(self.names, given, strict=True)
        called = [functools.partial(call, value) if name in self.parts else value for name, value in pairs]
        return self.define(*called, *more) if self.define else self.pattern(*called)


def call(function, x):
    """What a row calls on a tensor: a part, or a function of graph.CALLS: (name, *further arguments)."""
    return graph.TARGETS[function[0]](x, *function[1:]) if isinstance(function, tuple) else function(x)


def added(y, other, first: bool):
    """y + other, with other as the first operand if it is, because the first one decides the strides."""
    return other + y if first else y + other


def dropout(drop) -> tuple[float, bool]:
    """(p, training) of what a row calls as its dropout."""
    return drop[1:] if isinstance(drop, tuple) else (drop.p, drop.training)


@dataclass(eq=False)
class Site:
    """Where a row was found. bound: the pattern's arguments: nodes, parts by name, and functions; inner: the nodes of
    the pattern, the last first; f: the name of its activation.
    """

    row: Row
    bound: dict
    inner: list
    f: str | None = None
    more: tuple | None = ()

    def producer(self, name: str) -> str | None:
        """The linear part whose result an argument is."""
        node = self.bound[name]
        return node.target if isinstance(node, fx.Node) and is_map(node) else None

    def held(self) -> dict[str, str]:
        """{part that the op replaces: what it must be}"""
        parts = {self.bound[name]: kind for name, kind in self.row.parts.items() if isinstance(self.bound[name], str)}
        return {part: self.f if kind in ("gate", "relu", "norm") else kind for part, kind in parts.items()}

    def is_first(self, name: str) -> bool:
        """Whether an argument is the first operand of the sum or product that reads it, which decides the strides."""
        return any(node.args[0] is self.bound[name] for node in self.inner if name_of(node) in ("add", "add_", "mul"))

    def title(self) -> str:
        """The parts that the op's inputs come from, or those that it replaces."""
        if self.row.whole:
            nodes = [
                self.bound[n] for n in self.bound if n not in self.row.parts and isinstance(self.bound[n], fx.Node)
            ]
            parts = [node.target for node in nodes if node.op == "call_module"]
            maps = [node.target for node in nodes if is_map(node)]
            return ", ".join(maps or [*self.held(), *parts]) or "a formula"
        act = self.bound["act"] if isinstance(self.bound["act"], str) else self.bound["act"][0]
        return " + ".join([self.bound["norm"], *["sum"] * ("residual" in self.bound), act])


def is_map(node) -> bool:
    return node.op == "call_module" and isinstance(node.meta["kind"], Map)


def _bound(kind: str, node: fx.Node):
    """(what a node calls, the name of its activation) if it is of a row's kind, else None. kind: "gate", "relu", "act"
    (behind a batch norm), "formula" (an activation that was written out), "norm" (of layers or groups), "map",
    "function" (any), or that of a part."""
    if kind == "norm":
        of = node.meta["kind"] if node.op == "call_module" else name_of(node)
        called = node.target if node.op == "call_module" else (of, *node.args[1:])
        return (called, of) if of in ("layer_norm", "group_norm") else None
    if node.op == "call_module":
        part = node.meta["kind"]
        if isinstance(part, Act):
            f = part.own if kind == "act" else part.f
            return (node.target, f) if f and kind in ("gate", "act", f) else None
        return (node.target, None) if part == kind or (kind == "map" and isinstance(part, Map)) else None
    name = name_of(node)
    if kind in ("map", "function"):
        fits = kind == "function" and node.op == "call_function" and not node.meta.get("writes")
        return ((name, *node.args[1:]), name) if fits else None
    if kind == "formula":
        return ((name, *node.args[1:]), node.meta["formula"]) if "formula" in node.meta else None
    if kind in ("dropout", "layer_norm", "normalize"):
        return ((name, *node.args[1:]), None) if name == kind and not node.meta.get("writes") else None
    f = name if name != "gelu" or kind == "act" else {"none": "gelu", "tanh": "gelu_tanh"}.get(node.args[1])
    fits = f in ACTIVATIONS[1:] if kind == "act" else f in GATES and kind in ("gate", f)
    return ((name, *node.args[1:]), f) if fits else None


def find(row: Row, root: fx.Node) -> Site | None:
    """The site of a row whose result is `root`."""
    site = Site(row, {}, [])
    if not _fits(site, row.root, root):
        return None
    # What a value was when the pattern's operation read it, it must still be where the op reads it.
    order = list(root.graph.nodes)
    between = [n for n in order[min(map(order.index, site.inner)) : order.index(root)] if n not in site.inner]
    readers = {user for node in site.bound.values() if isinstance(node, fx.Node) for user in node.users}
    if any(node in readers or node.meta.get("writes") for node in between):
        return None
    site.more = row.more(site)
    return None if site.more is None else site


def _fits(site, pattern, node) -> bool:
    """Whether a node is that of the pattern; binds the pattern's arguments."""
    if not isinstance(pattern, fx.Node):
        return type(pattern) is type(node) and pattern == node
    if pattern.op == "placeholder":
        fits = isinstance(node, fx.Node) or (site.row.numbers and type(node) in (int, float))
        return fits and site.bound.setdefault(pattern.name, node) is node
    if not isinstance(node, fx.Node):
        return False
    if site.inner and len(node.users) != 1:
        return False
    if pattern.op == "call_module":
        found = _bound(site.row.parts[pattern.target], node)
        if found is None or site.bound.setdefault(pattern.target, found[0]) != found[0]:
            return False
        site.f = found[1] or site.f
        site.inner.append(node)
        return _fits(site, pattern.args[0], node.args[0])
    if name_of(node) != name_of(pattern):
        return False
    before = dict(site.bound), [*site.inner, node], site.f
    for given in (node.args, node.args[::-1]) if name_of(node) in ("add", "mul") else (node.args,):
        site.bound, site.inner, site.f = dict(before[0]), list(before[1]), before[2]
        if all(map(_fits, itertools.repeat(site), pattern.args, given)):
            return True
    return False
