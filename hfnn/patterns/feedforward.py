"""Rows between the maps of feed-forward networks: products of a gate, and a ReLU before dropout."""

from torch import fx

from hfnn.ops import OPS, relu_dropout
from hfnn.ops.gated import OP, gated
from hfnn.patterns.graph import name_of
from hfnn.patterns.row import Row, dropout, is_map


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
    return relu_dropout.relu_dropout(h, *dropout(drop), prefer=prefer)


ROWS = (
    Row(product, {"act": "gate"}, _product, PRODUCTS, _of_maps, define=_defined),
    Row(dropped_relu, {"relu": "relu", "drop": "dropout"}, _dropped_relu, relu_dropout.OP, _before_map),
)
