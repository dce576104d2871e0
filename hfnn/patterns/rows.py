"""Patterns that `convert` finds in the graph of a module's forward, and the ops that compute them.

A row is a small graph of torch calls, written as a function, beside its replacement. Arguments with a kind are parts or
functions, called on one value; the others are values. graph.py brings the forward to one spelling first, so that a row
is written once.

    down(act(gate(x)) * up(x)), packed or not       Llama, Gemma, T5 1.1, Phi3, GEGLU of diffusers
    fc2(dropout(relu(fc1(x))))                      T5, OPT
    norm(dropout(dense(x)) + residual)              BERT and its copies; without norm in ViT
    act(batch_norm(x)), act(batch_norm(x) + y)      ResNets, and most convolutional models

rewrite.py searches the graphs of modules for rows, and proves what it finds.
"""

import functools
import itertools
import types
from collections.abc import Callable
from dataclasses import dataclass

from torch import fx

from hfnn.core.context import is_bare, is_plain
from hfnn.ops import OPS, add_norm, batch_norm, dropout_add, relu_dropout
from hfnn.ops.batch_norm import ACTIVATIONS, PIECEWISE
from hfnn.ops.gated import GATES, OP, gated
from hfnn.ops.layout import in_rows
from hfnn.patterns import graph
from hfnn.patterns.graph import name_of
from hfnn.patterns.kinds import ACTIVATIONS_OF, BATCH_NORMS, Act, Map


@dataclass(frozen=True, eq=False)
class Row:
    """pattern: the graph, as a function; parts: {argument: the kind of what it calls}; compute: the op, a function of
    `prefer`, the pattern's arguments and `more`. op: for reports, or by the activation's name. more: (site) -> further
    arguments, or None if the site does not fit. whole: whether the module's own forward runs if a part must be called;
    else `compute` calls it. define: the pattern, if it takes `more`.
    """

    pattern: Callable
    parts: dict[str, str]
    compute: Callable
    op: object
    more: Callable = lambda site: ()
    whole: bool = True
    define: Callable | None = None

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
        trace = graph.Trace()
        part = lambda name: functools.partial(trace.part, name)  # noqa: E731
        given = [part(name) if name in self.parts else trace.input(name, (2, 3, 4)) for name in self.names]
        return self.pattern(*given).node

    def by_parts(self, prefer, *given):
        """What `compute` stands for: torch's calls, and the parts."""
        given, more = given[: len(self.names)], given[len(self.names) :]
        pairs = zip(self.names, given, strict=True)
        called = [functools.partial(call, value) if name in self.parts else value for name, value in pairs]
        return (self.define or self.pattern)(*called, *more)


def call(function, x):
    """What a row calls on a tensor: a part, or a function of graph.CALLS: (name, *further arguments)."""
    return graph.TARGETS[function[0]](x, *function[1:]) if isinstance(function, tuple) else function(x)


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
        return node.target if node is not None and is_map(node) else None

    def held(self) -> dict[str, str]:
        """{part that the op replaces: what it must be}"""
        parts = {self.bound[name]: kind for name, kind in self.row.parts.items() if isinstance(self.bound[name], str)}
        return {part: self.f if kind in ("gate", "relu") else kind for part, kind in parts.items()}

    def title(self) -> str:
        """The parts that the op's inputs come from, or those that it replaces."""
        if self.row.whole:
            return ", ".join(filter(None, (self.producer(n) for n in self.bound if n not in self.row.parts)))
        act = self.bound["act"] if isinstance(self.bound["act"], str) else self.bound["act"][0]
        return " + ".join([self.bound["norm"], *["sum"] * ("residual" in self.bound), act])


def is_map(node) -> bool:
    return node.op == "call_module" and isinstance(node.meta["kind"], Map)


def _bound(kind: str, node: fx.Node):
    """(what a node calls, the name of its activation) if it is of a row's kind, else None. kind: "gate", "relu", "act"
    (behind a batch norm), or that of a part."""
    if node.op == "call_module":
        part = node.meta["kind"]
        if isinstance(part, Act):
            f = part.own if kind == "act" else part.f
            return (node.target, f) if f and kind in ("gate", "act", f) else None
        return (node.target, None) if part == kind else None
    name = name_of(node)
    if kind in ("dropout", "layer_norm"):
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
    if not isinstance(node, fx.Node):
        return False
    if pattern.op == "placeholder":
        return site.bound.setdefault(pattern.name, node) is node
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


def half(node: fx.Node) -> tuple[fx.Node, int] | None:
    """(the tensor, which half of its last dimension this node is)."""
    if name_of(node) != "getitem":
        return None
    whole, index = node.args
    if name_of(whole) in ("chunk", "split"):
        whole, sizes, dim = whole.args
        shape = whole.meta["shape"]
        halves = (2,) if name_of(node.args[0]) == "chunk" else (shape[-1] // 2, (shape[-1] // 2,) * 2)
        fits = sizes in halves and shape[-1] % 2 == 0 and dim in (-1, len(shape) - 1) and index in (0, 1)
        return (whole, index) if fits else None
    shape = whole.meta.get("shape", ())
    if not isinstance(index, tuple) or index[:-1] not in ((Ellipsis,), (slice(None),) * (len(shape) - 1)):
        return None
    middle = shape[-1] // 2
    ends = [slice(None, middle), slice(0, middle), slice(middle, None), slice(middle, shape[-1])]
    return (whole, ends.index(index[-1]) // 2) if index[-1] in ends and shape[-1] % 2 == 0 else None


def product(gate, up, act):
    return act(gate) * up


def _defined(gate, up, act, f, gate_first):
    if up is None:
        gate, up = gate.chunk(2, -1) if gate_first else reversed(gate.chunk(2, -1))
    return product(gate, up, act)


def _of_maps(site):
    """gate and up are results of maps, or the halves of one."""
    gate, up = site.bound["gate"], site.bound["up"]
    (whole, first), (other, second) = half(gate) or (gate, 0), half(up) or (up, 0)
    if whole is other and first != second and len(gate.users) == len(up.users) == 1:
        between = {gate.args[0]: None, up.args[0]: None}  # of chunk and split
        site.inner += [gate, up, *(node for node in between if node is not whole)]
        site.bound |= {"gate": whole, "up": None}
        return (site.f, first == 0) if is_map(whole) else None
    return (site.f, True) if is_map(gate) and is_map(up) else None


def _product(prefer, gate, up, act, f, gate_first):
    return gated(gate, up, f, gate_first=gate_first, prefer=prefer)


PRODUCTS = {
    "silu": OPS["swiglu"], "gelu": OPS["geglu"], "gelu_tanh": OPS["geglu"], "relu": OPS["reglu"],
    "sigmoid": OPS["glu"], "quick_gelu": OP,
}  # fmt: skip


def dropped_relu(h, relu, drop):
    return drop(relu(h))


def _before_map(site):
    """Between two maps, of which the second keeps the result."""
    readers = list(site.inner[0].users)
    return () if site.producer("h") and len(readers) == 1 and is_map(readers[0]) else None


def _dropped_relu(prefer, h, relu, drop):
    return relu_dropout.relu_dropout(h, *_p(drop), prefer=prefer)


def _p(drop):
    return drop[1:] if isinstance(drop, tuple) else (drop.p, drop.training)


def residual_sum(x, residual, drop):
    return drop(x) + residual


def _residual_sum(prefer, x, residual, drop):
    if not (in_rows(x) and in_rows(residual)):  # otherwise the sum has the strides of x
        return call(drop, x) + residual
    return dropout_add.dropout_add(x, residual, *_p(drop), prefer=prefer)


def residual_norm(x, residual, drop, norm):
    return norm(drop(x) + residual)


def _residual_norm(prefer, x, residual, drop, norm):
    if not (in_rows(x) and in_rows(residual)):
        return call(norm, call(drop, x) + residual)
    how = norm[1:] if isinstance(norm, tuple) else (norm.normalized_shape, norm.weight, norm.bias, norm.eps)
    p, training = _p(drop)
    return add_norm.add_layer_norm(x, residual, *how, p=p, training=training, prefer=prefer)[0]


def _of_map(site):
    return () if site.producer("x") else None


def norm_act(x, norm, act):
    return act(norm(x))


def norm_sum_act(x, residual, norm, act):
    return act(norm(x) + residual)


def norm_sum_in_place_act(x, residual, norm, act):
    y = norm(x)
    y += residual
    return act(y)


def _norm_act(prefer, x, norm, act):
    return _norm_sum_act(prefer, x, None, norm, act)


def _norm_sum_act(prefer, x, residual, norm, act, inplace=False):
    """act(norm(x) + residual), by one kernel if possible and nothing observes the parts."""
    own = isinstance(act, tuple)
    name = act[0] if own else ACTIVATIONS_OF.get(type(act))
    fits = residual is None or (
        residual.shape == x.shape and residual.dtype is x.dtype and name in ACTIVATIONS[: PIECEWISE + 1]
    )
    if (
        fits and name is not None and type(norm) in BATCH_NORMS and is_bare(norm) and is_plain(x)
        and (own or is_bare(act))
    ):  # fmt: skip
        norm._check_input_dim(x)
        of_x = batch_norm.arguments(norm)  # also counts a batch
        slope = 0.01 if name != "leaky_relu" else act[1] if own else act.negative_slope
        y = batch_norm.fused(x, *of_x, residual, name, slope, prefer)
        if y is not None:
            return y
        y = batch_norm.batch_norm(x, *of_x, prefer=prefer)
    else:
        y = norm(x)
    if inplace:
        y += residual
    elif residual is not None:
        y = y + residual
    return call(act, y)


def _piecewise(site):
    return () if site.f in ACTIVATIONS[: PIECEWISE + 1] else None


_batch = functools.partial(Row, parts={"norm": "batch_norm", "act": "act"}, op=batch_norm.ACT, whole=False)
_in_place = functools.partial(_norm_sum_act, inplace=True)
_ROWS = (
    Row(product, {"act": "gate"}, _product, PRODUCTS, _of_maps, define=_defined),
    Row(dropped_relu, {"relu": "relu", "drop": "dropout"}, _dropped_relu, relu_dropout.OP, _before_map),
    Row(residual_norm, {"drop": "dropout", "norm": "layer_norm"}, _residual_norm, add_norm.LAYER, _of_map),
    Row(residual_sum, {"drop": "dropout"}, _residual_sum, dropout_add.OP, _of_map),
    _batch(norm_sum_act, compute=_norm_sum_act, more=_piecewise),
    _batch(norm_sum_in_place_act, compute=_in_place, more=_piecewise),
    _batch(norm_act, compute=_norm_act),
)
ROWS = {row.pattern.__name__: row for row in _ROWS}
