"""Backward of a part of a model, whole or in two parts: gradients of its inputs now, of its weights later.

In backward, a layer `y = x W` computes `dx = dy W^T`, which others wait for, and `dW = x^T dy`, which nobody waits for.
`split` runs the pass that ends at the inputs and leaves the second kind of products out; what they need is kept by
`Weights`, whose `run` computes them. No product of matrices runs twice.

Where a product is left out is read from the graph. A node is *on the way* if an input is reached from it; the engine
has to run it. A parameter is put off if, from the output, it is reached through one single node on the way, and that
node is a product whose two gradients can be had one by one (PRODUCTS). Every other parameter (of norms, of embeddings,
used twice, or inside of a function written in Python) gets its gradient in the first pass, together with the inputs:
right for every graph, and its gradient is cheap, or could not be had alone.

The idea of the split is from Qi et al., Zero Bubble Pipeline Parallelism, 2023, https://arxiv.org/abs/2401.10241
"""

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

# Nodes in C++, by name and without their number, that compute just those gradients that this pass wants: torch's, and
# hfnn's Linear.
PRODUCTS = frozenset(
    f"{name}Backward"
    for name in ("Addmm", "Mm", "Bmm", "Addbmm", "Baddbmm", "Linear", "Mv", "Addmv", "Convolution", "_Linear")
)
TOGETHER = 64 << 20  # bytes of weights' gradients that are handed to torch's engine at once: a call takes the host long
# And functions in Python that ask the engine themselves, by the names of their classes.
SEPARABLE = frozenset({("hfnn.ops.linear", "_Linear")})


def edges(outputs: Sequence[Tensor | None]) -> list[GradientEdge | None]:
    """Where backward begins, for each output, without keeping the output's values; None for one without a graph."""
    return [get_gradient_edge(y) if isinstance(y, Tensor) and y.requires_grad else None for y in outputs]


def whole(roots: Sequence[GradientEdge | None], gradients: Sequence[Tensor | None]) -> None:
    """The usual backward: `.grad` of every leaf is added to. Roots or gradients that are None are left out."""
    roots, gradients = _present(roots, gradients)
    if roots:
        torch.autograd.backward(roots, gradients)


def split(
    roots: Sequence[GradientEdge | None],
    gradients: Sequence[Tensor | None],
    inputs: Sequence[Tensor | None],
    hold: bool = False,
) -> "Weights":
    """Adds to `.grad` of the inputs (leaves), and of the parameters that are not put off; `Weights` has the others.

    hold: no parameter's `.grad` is touched before `Weights.run`, which then adds to all of them in one backward of the
    engine: for wrappers that count gradients, and begin to average when the last one is there.
    """
    roots, gradients = _present(roots, gradients)
    leaves = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]
    put_off, now = _plan(roots, {get_gradient_edge(x).node for x in leaves})
    weights = Weights(put_off, hold)
    handles = [node.register_prehook(_note(weights.found, node)) for node in put_off]
    try:
        if roots and hold:
            found = torch.autograd.grad(
                roots, leaves + now, gradients, retain_graph=bool(put_off), allow_unused=True, materialize_grads=False
            )
            for x, dx in zip(leaves, found, strict=False):
                x.grad = dx
            weights.held = list(zip(now, found[len(leaves) :], strict=True))
        elif roots:
            torch.autograd.backward(roots, gradients, retain_graph=bool(put_off), inputs=leaves + now)
    finally:
        for handle in handles:
            handle.remove()
    return weights


class Weights:
    """The gradients that `split` has put off. It keeps the graph alive, and what the products need."""

    def __init__(self, put_off: dict[Node, tuple[list[Tensor], list[int], Node]], hold: bool):
        self._put_off, self._hold = put_off, hold
        self.found: dict[Node, tuple[Tensor | None, ...]] = {}  # the gradients of the nodes' outputs
        self.held: list[tuple[Tensor, Tensor | None]] = []

    def run(self) -> None:
        """Adds to `.grad` of the parameters that were put off, and lets go of the graph."""
        roots, gradients, parameters, size = [], [], [], 0
        for node in list(self._put_off):
            mine, sides, _above = self._put_off.pop(node)  # what keeps it alive, until the next one is taken
            found = [(GradientEdge(node, i), dy) for i, dy in enumerate(self.found.pop(node, ())) if dy is not None]
            apart = _apart(node, sides, found[0][1]) if found else []
            if apart is None:
                self._add(*zip(*found, strict=True), mine)
                continue
            for edge, dy in apart:
                roots.append(edge)
                gradients.append(dy)
                size += dy.nbytes
            parameters += mine if apart else []
            if size > TOGETHER:
                self._add(roots, gradients, parameters)
                roots, gradients, parameters, size = [], [], [], 0
        if roots:
            self._add(roots, gradients, parameters)
        held, self.held = [(p, dp) for p, dp in self.held if dp is not None], []
        whole([get_gradient_edge(p) for p, _ in held], [dp for _, dp in held])

    def _add(self, roots, gradients, parameters):
        if self._hold:
            self.held += zip(parameters, torch.autograd.grad(roots, parameters, gradients), strict=True)
        else:
            torch.autograd.backward(roots, gradients, inputs=parameters)


@torch.no_grad()
def _apart(node, sides, dy):
    """[(edge, its gradient)] of the inputs of a product that are told by number: as torch's node computes them, but
    without those of the others. None where that is left to torch's engine, which runs one node in a call.
    """
    kind, edges = node.name().rstrip("0123456789"), node.next_functions
    if dy.is_complex() or dy.layout != torch.strided:
        return None
    if kind == "MmBackward" and sides == [1]:
        weight, x = 1, node._saved_self
    elif kind == "AddmmBackward" and 1 not in sides and node._saved_alpha == node._saved_beta == 1:
        weight, x = 2, node._saved_mat1 if 2 in sides else None
    else:
        return None
    found = []
    for side in sides:
        if side == weight:
            # In the order of the weight's own memory, as torch's node does.
            (rows, _), strides = node._saved_mat2_sym_sizes, node._saved_mat2_sym_strides
            gradient = dy.t().mm(x).t() if tuple(strides) == (1, rows) else x.t().mm(dy)
        else:
            gradient = dy.sum_to_size(edges[side][0]._input_metadata[edges[side][1]].shape)
        found.append((GradientEdge(*edges[side]), gradient))
    return found


@contextlib.contextmanager
def without_graph() -> Iterator[None]:
    """No graph within, nor casts of weights without one that autocast keeps for those who want one afterwards."""
    cache = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        with torch.no_grad():
            yield
    finally:
        torch.set_autocast_cache_enabled(cache)


def _present(roots, gradients):
    pairs = [(root, dy) for root, dy in zip(roots, gradients, strict=True) if root is not None and dy is not None]
    return [root for root, _ in pairs], [dy for _, dy in pairs]


def _note(found, node):
    def hook(gradients):
        found[node] = gradients

    return hook


def _plan(roots, inputs):
    """({product: (parameters whose gradients it computes later, by which of its inputs they are reached, what keeps it
    alive)}, parameters whose gradients are computed now).
    """
    roots = {root.node: root.ownership_token for root in roots}
    on_the_way, behind = set(inputs), {}  # behind: of the other nodes, the leaves that are reached from them
    through = defaultdict(set)  # of each leaf, the nodes on the way from which it is reached by leaving the way
    above: dict[Node, Node | None] = {}  # of each node one that leads to it, or the token of a root
    for node, after in _inputs_first(roots):
        above.update(dict.fromkeys(after, node))
        if node in on_the_way or not on_the_way.isdisjoint(after):
            on_the_way.add(node)
            for following in after:
                for leaf in behind.get(following, ()):
                    through[leaf].add(node)
        elif hasattr(node, "variable"):
            behind[node] = {node}
        else:
            behind[node] = set().union(*(behind[following] for following in after))
    for root in roots.keys() - on_the_way:
        for leaf in behind[root]:
            through[leaf].add(root)
    put_off, now = defaultdict(list), []
    for leaf, nodes in through.items():
        (first, *others) = nodes
        if others or first not in on_the_way or not _separable(first):
            now.append(leaf.variable)
        else:
            put_off[first].append(leaf.variable)
    above.update(roots)
    return {node: (found, _sides(node, behind), _owner(node, above)) for node, found in put_off.items()}, now


def _owner(node, above):
    """A node that keeps this one alive: itself, unless it is a function's in Python, which before torch 2.13 lives only
    as long as some node of C++ leads to it.
    """
    while isinstance(node, torch._C._FunctionBase):
        node = above[node]
    return node


def _sides(node, behind):
    """The inputs of a node from which nothing but leaves is reached, by their numbers."""
    return [i for i, (following, _) in enumerate(node.next_functions) if behind.get(following)]


def _separable(node):
    name = node.name().rstrip("0123456789")
    function = getattr(type(node), "_forward_cls", None)
    if function is not None:
        return (function.__module__, function.__name__) in SEPARABLE
    return name in PRODUCTS


def _inputs_first(roots):
    """All nodes that are reached from the roots, each with those that it leads to, and behind them."""
    order, seen, stack = [], set(), [(node, None) for node in roots]
    while stack:
        node, after = stack.pop()
        if after is not None:
            order.append((node, after))
        elif node not in seen:
            seen.add(node)
            after = [following for following, _ in node.next_functions if following is not None]
            stack.append((node, after))
            stack.extend((following, None) for following in after if following not in seen)
    return order
