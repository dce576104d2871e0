"""Modules in whose graph a row (row.py) is found: the rewritten graph, its proof, and what `convert` does with it.

A module gets the rest of its graph as its forward: its parts are called as before, and the ops run in between. Before,
the new forward, with torch's calls for the rows, is compared with the module's own on random numbers: in four dtypes,
training and eval, and in other shapes than those of the trace.
"""

import functools
import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import fx, nn

from hfnn.core.context import is_bare, is_plain, transformed
from hfnn.core.holder import like_of, stock_of, target_of
from hfnn.core.kernel import forced
from hfnn.ops import dropout, group_norm, layer_norm, linear
from hfnn.ops.gated import OP
from hfnn.ops.mlp import MLP, GatedMLP
from hfnn.patterns import graph, probe, shapes
from hfnn.patterns.feedforward import product
from hfnn.patterns.graph import name_of
from hfnn.patterns.kinds import Act, Map, function_of, kind_of
from hfnn.patterns.names import asks_types
from hfnn.patterns.norm_act import Cat
from hfnn.patterns.probe import Refusal
from hfnn.patterns.proof import Match, Proofs, arguments, compare
from hfnn.patterns.row import Site, find, is_map
from hfnn.patterns.rows import ROWS
from hfnn.patterns.subclass import original


class Rewritten:
    """Mixin for a module in whose graph rows were found: the rewritten graph, or the class's own forward."""

    prefer = "auto"
    _hfnn_when = "while the fused parts are those of the proof and carry no hooks, which would not be called"

    def _hfnn_small(self, like, args: tuple, kwargs: dict) -> bool:
        """Whether torch's own ops would compute the product between the maps, because it is small."""
        if like.map is None or len(args) != 1 or kwargs or type(args[0]) is not torch.Tensor or not args[0].dim():
            return False
        width, size = getattr(self._modules.get(like.map), "out_features", None), args[0].numel()
        if not size or width is None or forced() is not None:
            return False
        return size // args[0].shape[-1] * width < like.op.floors[self.prefer][args[0].is_cuda]

    def forward(self, like, *args, **kwargs):
        if (
            len(args) != like.inputs or kwargs or transformed() or not all(map(is_plain, args))
            or not like.open(self) or not like.takes(self, args)
        ):  # fmt: skip
            return stock_of(self).forward(self, *args, **kwargs)
        return compiled(like.sources[self.training])(self, *args)


@dataclass(frozen=True)
class Fused(Match):
    """A rewritten graph. sources: its code in eval and in training; found: (row, names, f) of each site; names: of all
    parts; held: (part, what it must be) of the parts that are not called; maps: parts whose results may be computed
    again in backward; keep: activations whose results are kept anyway; map: the first map of a module that has only
    products; dtypes: parts whose weights must have one dtype, which a forward may ask for; given: the inputs' sizes,
    None where any will do and ... for any number of them, or None for all inputs; casts: whether the result depends on
    the inputs' dtype, which must be one, and that of the parameters, unless these are of float32; own: the module's
    parameters with their shapes.
    """

    inputs: int
    sources: tuple[str, str]
    found: tuple[tuple[str, str, str | None], ...]
    names: tuple[str, ...]
    held: tuple[tuple[str, str], ...]
    maps: tuple[str, ...]
    keep: tuple[str, ...]
    map: str | None
    dtypes: tuple[str, ...]
    given: tuple[tuple[int | None, ...], ...] | None
    casts: bool
    own: tuple[tuple[str, tuple[int, ...]], ...]
    mixin = Rewritten

    def ops(self) -> list:
        found = [(ROWS[name].op, f) for name, _, f in self.found]
        return [op[f] if isinstance(op, dict) else op for op, f in found]

    @property
    def op(self):
        return self.ops()[0]

    def __str__(self) -> str:
        by_op = {}
        for op, (_, title, f) in zip(self.ops(), self.found, strict=True):
            by_op.setdefault(op.name + (f" ({f})" if op is OP else ""), []).append(title)
        return "hfnn " + "; ".join(f"{op} of {', '.join(dict.fromkeys(titles))}" for op, titles in by_op.items())

    def open(self, module) -> bool:
        """Whether the parts are those of the proof, and those that the ops replace need not be called."""
        parts = module._modules
        if tuple(parts) != self.names or None in parts.values():
            return False
        weights = [parts[name]._parameters.get("weight") for name in self.dtypes]
        if len({weight.dtype for weight in weights if weight is not None}) > 1:
            return False
        own = module._parameters
        if any(own.get(name) is None or tuple(own[name].shape) != shape for name, shape in self.own):
            return False
        return all(_is_open(parts[name], kind) for name, kind in self.held)

    def takes(self, module, args) -> bool:
        """Whether the inputs are of those for which the graph was made."""
        if self.casts:
            dtype, own = args[0].dtype, [module._parameters[name].dtype for name, _ in self.own]
            if any(x.dtype is not dtype for x in args) or any(p not in (dtype, torch.float32) for p in own):
                return False
        return self.given is None or all(map(_fits, args, self.given))


def _fits(x, sizes) -> bool:
    if sizes[0] is Ellipsis:
        return x.dim() > 1 and x.shape[-1] == sizes[1]
    return x.dim() == len(sizes) and all(n is None or n == size for n, size in zip(sizes, x.shape, strict=True))


def _is_open(part, kind: str) -> bool:
    """Whether a part computes what its kind says, and need not be called."""
    if kind == "identity":
        return type(part) is nn.Identity and is_bare(part)
    if kind in _ROOMS:
        return target_of(part) is _ROOMS[kind] and is_bare(part)
    return is_bare(part) and function_of(part) == kind


# Others draw and round in another way.
_ROOMS = {
    "dropout": dropout.Dropout, "layer_norm": layer_norm.LayerNorm, "group_norm": group_norm.GroupNorm,
    "map": linear.Linear,
}  # fmt: skip


@functools.lru_cache(maxsize=1024)
def compiled(source: str) -> Callable:
    """The function of a source that torch.fx wrote."""
    return _function(source, lambda row: row.compute)


def _function(source: str, of_row: Callable) -> Callable:
    names = {"torch": torch, "hfnn_cat": of_row(Cat), **{f"hfnn_{own.__name__}": own for own in graph.OWN}}
    names |= {f"hfnn_{name}": of_row(row) for name, row in ROWS.items()}
    exec(source, names)
    return names["forward"]


def recognise(module: nn.Module) -> Match | Refusal | None:
    """How to treat the module, or why it is left alone; None if no row is in its graph."""
    like = read(module)
    return like if not isinstance(like, Match) or like.found else None


def read(module: nn.Module) -> Fused | Refusal | None:
    """The rewritten graph of a module, also if no row is in it; None if it has other parts than the rows."""
    parts, cls = module._modules, type(module)
    foreign = cls.__module__.startswith(("torch.", "hfnn.")) and cls is not nn.Sequential
    if foreign or len(parts) > 64 or None in parts.values() or module._buffers:
        return None
    kinds, inputs = {name: kind_of(part) for name, part in parts.items()}, arguments(cls)
    but, loud = _hint(kinds, cls, inputs)
    if but is None:
        return None
    classes = {name: weakref.ref(original(type(part)) or type(part)) for name, part in parts.items()}
    own = tuple((name, p if p is None else tuple(p.shape)) for name, p in module._parameters.items())
    first = _firsts(parts)
    key = own, *((name, kind, classes[name], first[id(parts[name])]) for name, kind in kinds.items())
    like = _proofs.of(module, key, lambda notes: _prove(module, notes, kinds, inputs or 1), but)
    return like if loud or isinstance(like, Match) else None


_proofs = Proofs()


def _firsts(parts) -> dict[int, str]:
    """The first names of parts, by their ids."""
    return {id(part): name for name, part in reversed(parts.items())}


def _hint(kinds, cls, inputs) -> tuple[str | None, bool]:
    """(how a reason begins, whether reports say it); None for a module that is not traced."""
    found = list(kinds.values())
    maps, acts = (sum(isinstance(kind, of) for kind in found) for of in (Map, Act))
    if inputs in (0, 1, 2) and "batch_norm" in found:
        return "it has batch norms, but ", True
    if cls is nn.Sequential or inputs not in (0, 1, 2, 3) or (inputs == 0 and not maps) or len(found) > MOST_PARTS:
        return None, False
    if "other" in found or not maps or inputs > 2:
        return "", False
    if inputs < 2:
        return "it has the parts of a feed-forward network, but ", maps > 1 and acts > 0
    only = maps == 1 and {*found} - {None, "dropout", "layer_norm"} == {kind for kind in found if isinstance(kind, Map)}
    return ("it has the parts of a residual connection, but " if "dropout" in found else ""), only


MOST_PARTS = 16


def _traced(module, notes, kinds, training, shapes, dtype=torch.bfloat16) -> fx.Graph:
    trace = graph.Trace(dtype)
    clone = _clone(module, notes, kinds, training, dtype, trace)
    with torch.no_grad():
        y = type(clone).forward(clone, *(trace.input(f"x{i}", shape) for i, shape in enumerate(shapes)))
    if not isinstance(y, graph.Value) or y.node.op == "placeholder":
        raise Refusal(f"its forward returns {'its input' if isinstance(y, graph.Value) else f'a {type(y).__name__}'}")
    if any(map(probe.changes, (clone, *clone._modules.values()))):
        raise Refusal("its forward changes attributes of the module")
    trace.graph.output(y.node)
    trace.graph.casts, trace.graph.compared = trace.casts, trace.compared
    for node in trace.graph.nodes:
        node.meta["kind"] = kinds.get(node.target) if node.op == "call_module" else None
    return trace.graph


def _clone(module, notes, kinds, training, dtype, trace=None):
    # A batch norm is tried with few channels.
    how, first = (training, notes, dtype, trace, "batch_norm" not in kinds.values()), _firsts(module._modules)
    made = {}
    for number, (name, part) in enumerate(module._modules.items()):
        made[name] = made.get(first[id(part)]) or graph.stand_in(part, name, number + 1, kinds[name], *how)
    return probe.clone(module, notes, training, graph.stand_ins(module, "", dtype, trace), made)


CASES = tuple(itertools.product((torch.float64, torch.float32, torch.bfloat16, torch.float16), (False, True)))


def _graphs(traced, module, kinds, inputs):
    """(the graphs in eval and in training, the inputs' shapes, the sizes that they must have)"""
    why = None
    for sizes, given in shapes.candidates(module, kinds, inputs):
        try:
            graphs = [traced(training, sizes[0]) for training in (False, True)]
            for training, of in zip((False, True), graphs, strict=True):
                others = (traced(training, shape) for shape in sizes[1:])
                if any((str(other), other.compared) != (str(of), of.compared) for other in others):
                    raise Refusal("its forward depends on sizes")
                graph.follow(of, traced(training, sizes[0], torch.float16))
            return graphs, sizes, given
        except Exception as refusal:  # this runs the author's code
            why = why or refusal
    raise why or Refusal("the shapes of its inputs are not known")


def _prove(module, notes, kinds, inputs) -> Fused:
    of = module, notes, kinds
    graphs, sizes, given = _graphs(functools.partial(_traced, *of), module, kinds, inputs)
    # What a part of another author returns is not known.
    unknown = [part for name, part in module._modules.items() if kinds[name] in (None, "norm", "other")]
    of_torch = all((original(type(part)) or type(part)).__module__.startswith("torch.") for part in unknown)
    if not of_torch and asks_types(type(module), notes.methods):
        raise Refusal("its forward asks for the type of a value")
    for name, part in notes.parts.items():
        if part.methods - {"forward"}:
            raise Refusal(f"its forward calls {', '.join(sorted(part.methods - {'forward'}))} of {name}")
    exact = "batch_norm" in kinds.values() or not sum(map(graph.name_formulas, graphs))
    limits = any(name_of(node) == "normalize" for each in graphs for node in each.nodes)  # which it computes itself
    like = _rewritten(module, kinds, inputs, graphs, given)
    if not like.found and not like.maps and not like.keep:
        if "batch_norm" not in kinds.values():
            raise Refusal("it puts its parts together in another way")
        return like
    # A formula rounds in its own way.
    how = {"limits": limits} | ({"within": 0.0, "wide": False} if exact else {})
    for number, (dtype, training) in enumerate(CASES):
        function = _function(like.sources[training], lambda row: row.by_parts)
        x = [(torch.randn(shape) * (1.0, 1.0, 100.0)[number % 3]).to(dtype) for shape in sizes[number % 3]]
        compare(functools.partial(_clone, *of, training), function, x, dtype, like.casts, how)
    return like


def _rewritten(module, kinds, inputs, graphs, given) -> Fused:
    casts = any(name_of(node) == "as_type" for of in graphs for node in of.nodes) or (
        any(p is not None for p in module._parameters.values()) and any(of.casts for of in graphs)
    )
    in_eval, sites = map(_sites, graphs)
    held = {name: kind for name, kind in kinds.items() if kind == "identity"}
    for site in (*in_eval, *sites):
        held |= site.held() if site.row.whole else {}
    products = [site for site in sites if site.row.pattern is product]
    maps, keep = _chains(graphs[1], products)
    return Fused(
        inputs=inputs,
        found=tuple((site.row.pattern.__name__, site.title(), site.f) for site in sites),
        names=tuple(module._modules),
        held=tuple(held.items()),
        maps=tuple(filter(None, maps)),
        keep=tuple(keep),
        map=products[0].producer("gate") if products and len(products) == len(sites) else None,
        dtypes=tuple(
            name for name, kind in kinds.items() if isinstance(kind, Map) and "batch_norm" not in kinds.values()
        ),
        given=given,
        casts=casts,
        own=tuple((name, tuple(p.shape)) for name, p in module._parameters.items() if p is not None),
        sources=tuple(map(_source, graphs, (in_eval, sites))),
    )


def _sites(of: fx.Graph) -> list[Site]:
    """The sites of all rows, without one in another, in the order of the graph."""
    found, taken = [], set()
    for row in ROWS.values():
        for root in (node for node in of.nodes if node.op in ("call_function", "call_module")):
            site = find(row, root)
            if site is not None and not taken & set(site.inner):
                found.append(site)
                taken |= set(site.inner)
    if not any(site.row.alone for site in found):
        return []
    order = list(of.nodes)
    return sorted(found, key=lambda site: order.index(site.inner[0]))


def _source(of: fx.Graph, sites) -> str:
    """The graph with the ops of the sites, as the source of a function."""
    made, convolves = {}, any(node.meta.get("kind") == "batch_norm" for node in of.nodes)
    for site in sites:
        with of.inserting_before(site.inner[0]):
            given = [fx.map_arg(site.bound[name], lambda node: made.get(node, node)) for name in site.row.names]
            given = [of.get_attr(value) if isinstance(value, str) else value for value in given]
            op = of.call_function(site.row.stands, (of.get_attr("prefer"), *given, *site.more))
        made[site.inner[0]] = op
        site.inner[0].replace_all_uses_with(op)
        for node in site.inner:
            of.erase_node(node)
    for node in [node for node in of.nodes if convolves and name_of(node) == "cat"]:
        node.target, node.args = Cat.stands, (of.get_attr("prefer"), *node.args)
    for node in list(of.nodes):
        if node.op == "get_attr" and node.users:
            min(node.users).prepend(node)  # where it is read
        elif node.op == "get_attr":
            of.erase_node(node)
    return of.python_code("self").src


def _chains(of: fx.Graph, products) -> tuple[list[str], list[str]]:
    """(maps whose results only a product or an activation reads, relus whose results a map keeps)."""
    maps, keep = [site.producer(name) for site in products for name in ("gate", "up")], []
    for node in filter(is_map, of.nodes):
        path = [node]
        while len(path[-1].users) == 1 and (len(path) == 1 or not is_map(path[-1])):
            path += path[-1].users
        act = path[1].meta.get("kind") if len(path) > 2 and is_map(path[-1]) else None
        if isinstance(act, Act) and act.f == "relu" and len(path) == 3:
            keep.append(path[1].target)
        elif isinstance(act, Act) and act.f not in (None, "relu") and all(n.op == "call_module" for n in path):
            maps.append(node.target)
    return maps, keep


def is_own(module: nn.Module) -> bool:
    """Whether the module is one of hfnn's networks, for which torch has no class."""
    return isinstance(module, (MLP, GatedMLP))


def settings(module: nn.Module, recompute: str | None) -> dict[nn.Module, dict[str, object]]:
    """The attributes that `convert` sets on parts of the module, by part; empty if it is no feed-forward network.

    recompute="gemm": the results of the first maps are recomputed in backward. A relu whose result the next map keeps
    needs neither bits nor a recomputation, because that result is kept.
    """
    if is_own(module):
        if module.activation == "relu" and isinstance(module, MLP):
            return {}
        return {module._modules[name]: {"recompute": recompute == "gemm"} for name in module._hfnn_first}
    like, parts = like_of(module), module._modules
    # What is read sets nothing without a part that may be an activation.
    acts = (p for p in parts.values() if p is not None and not p._parameters and not p._modules)
    like = like if isinstance(like, Fused) or all(type(p) is nn.Dropout for p in acts) else read(module)
    if isinstance(like, Fused) and tuple(parts) != like.names:  # changed after it was converted
        return {}
    if isinstance(like, Fused) and like.dtypes:
        recomputed = {parts[name]: {"recompute": recompute == "gemm"} for name in like.maps}
        return {**recomputed, **{parts[name]: {"keep": "output"} for name in like.keep}}
    pairs = [*itertools.pairwise(parts.values())] if type(module) is nn.Sequential else []
    kept = [part for part, after in pairs if isinstance(after, _PRODUCTS) and after.weight.requires_grad]
    keeping = parts.values() if _has_pair(parts) else kept
    return {part: {"keep": "output"} for part in keeping if isinstance(part, nn.ReLU)}


_PRODUCTS = nn.Linear, nn.modules.conv._ConvNd  # which keep their input


def _has_pair(parts) -> bool:
    """Whether the parts include a map and the map back, as in OPT's layers, which contain a network and more.

    A relu in the same module is probably between them. A guess is enough here, because it only affects memory.
    """
    shapes = [(part.in_features, part.out_features) for part in parts.values() if isinstance(part, nn.Linear)]
    return any(shape[::-1] in shapes and shape[0] < shape[1] for shape in shapes)
