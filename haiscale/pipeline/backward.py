"""Backward of a part of a model, whole or in two parts: gradients of inputs now, gradients of weights later.

In backward, a layer `y = x W` computes `dx = dy W^T`, for which other ranks wait, and `dW = x^T dy`, for which none
waits. `split` runs the pass that ends at the inputs and leaves out the second kind of products. `Weights` keeps their
operands, and its `run` computes them. No matrix product runs twice.

The graph shows which products can be left out. A node is *on the way* if an input is reachable from it; the engine has
to run it. A parameter is postponed if it is reachable from the output through exactly one node on the way, and this
node is a product whose two gradients can be computed separately (PRODUCTS). Every other parameter (of norms, of
embeddings, used twice, or inside a Python function) gets its gradient in the first pass, together with the inputs. This
is correct for every graph; such gradients are cheap or cannot be computed separately.

The idea of the split is from Qi et al., Zero Bubble Pipeline Parallelism, 2023, https://arxiv.org/abs/2401.10241
"""

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

# C++ nodes, by name without their number, that compute only the gradients needed in this pass: torch's, and hfnn's
# Linear.
PRODUCTS = frozenset(
    f"{name}Backward"
    for name in ("Addmm", "Mm", "Bmm", "Addbmm", "Baddbmm", "Linear", "Mv", "Addmv", "Convolution", "_Linear")
)
TOGETHER = 64 << 20  # bytes of weights' gradients per call of torch's engine, because a call is slow on the host


def edges(outputs: Sequence[Tensor | None]) -> list[GradientEdge | None]:
    """The root of backward for each output, without keeping the output's values; None for an output without a graph."""
    return [get_gradient_edge(y) if isinstance(y, Tensor) and y.requires_grad else None for y in outputs]


def whole(roots: Sequence[GradientEdge | None], gradients: Sequence[Tensor | None]) -> None:
    """The usual backward: adds to `.grad` of every leaf. Roots or gradients that are None are left out."""
    roots, gradients = _present(roots, gradients)
    if roots:
        torch.autograd.backward(roots, gradients)


def split(
    roots: Sequence[GradientEdge | None],
    gradients: Sequence[Tensor | None],
    inputs: Sequence[Tensor | None],
    hold: bool = False,
) -> "Weights":
    """Adds to `.grad` of the inputs (leaves) and of the parameters that are not postponed; `Weights` has the others.

    hold: no parameter's `.grad` changes before `Weights.run`, which then adds to all of them in one backward of the
    engine. For wrappers that count gradients and start to average when the last one arrives.
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
    """The gradients that `split` has postponed. It keeps the graph and the operands of the products alive."""

    def __init__(self, put_off: dict[Node, tuple[list[Tensor], list[int], Node]], hold: bool):
        self._put_off, self._hold = put_off, hold
        self.found: dict[Node, tuple[Tensor | None, ...]] = {}  # the gradients of the nodes' outputs
        self.held: list[tuple[Tensor, Tensor | None]] = []

    def run(self) -> None:
        """Adds to `.grad` of the postponed parameters, and releases the graph."""
        roots, gradients, parameters, size = [], [], [], 0
        for node in list(self._put_off):
            mine, sides, _above = self._put_off.pop(node)  # keeps it alive until the next one is taken
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
        with _without_hooks([p for p, _ in held]):
            whole([get_gradient_edge(p) for p, _ in held], [dp for _, dp in held])

    def _add(self, roots, gradients, parameters):
        if self._hold:
            self.held += zip(parameters, torch.autograd.grad(roots, parameters, gradients), strict=True)
        else:
            torch.autograd.backward(roots, gradients, inputs=parameters)


@contextlib.contextmanager
def _without_hooks(parameters: list[Tensor]) -> Iterator[None]:
    """The gradients of these come from torch.autograd.grad, which has run the parameters' hooks."""
    aside = [(p._backward_hooks, dict(p._backward_hooks)) for p in parameters if p._backward_hooks]
    for hooks, _ in aside:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, those in aside:
            added = dict(hooks)
            hooks.clear()
            hooks.update(those | added)


@torch.no_grad()
def _apart(node, sides, dy):
    """[(edge, its gradient)] for the given inputs of a product, as torch's node computes them, without the gradients of
    other inputs. None if this is left to torch's engine, which runs one node per call.
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
            # In the memory order of the weight, as in torch's node.
            (rows, _), strides = node._saved_mat2_sym_sizes, node._saved_mat2_sym_strides
            gradient = dy.t().mm(x).t() if tuple(strides) == (1, rows) else x.t().mm(dy)
        else:
            gradient = dy.sum_to_size(edges[side][0]._input_metadata[edges[side][1]].shape)
        found.append((GradientEdge(*edges[side]), gradient))
    return found


@contextlib.contextmanager
def without_graph() -> Iterator[None]:
    """Disables grad mode, and autocast's cache, which would keep casts of weights without a graph."""
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
    """({product: (parameters whose gradients it computes later, the input through which each is reachable, an object
    that keeps it alive)}, parameters whose gradients are computed now).
    """
    roots = {root.node: root.ownership_token for root in roots}
    on_the_way, behind = set(inputs), {}  # behind: for the other nodes, the leaves reachable from them
    through = defaultdict(set)  # for each leaf, the nodes on the way at which its path leaves the way
    above: dict[Node, Node | None] = {}  # for each node, one that leads to it, or the token of a root
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
    """A node that keeps this one alive: itself, except for a Python function, which before torch 2.13 lives only as
    long as a C++ node leads to it.
    """
    while isinstance(node, torch._C._FunctionBase):
        node = above[node]
    return node


def _sides(node, behind):
    """The indices of a node's inputs from which only leaves are reachable."""
    return [i for i, (following, _) in enumerate(node.next_functions) if behind.get(following)]


def _separable(node):
    in_python = hasattr(type(node), "_forward_cls")  # a Function of the same name
    return not in_python and node.name().rstrip("0123456789") in PRODUCTS


def _inputs_first(roots):
    """All nodes reachable from the roots, each after the nodes that it leads to."""
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
