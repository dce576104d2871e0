"""The bytes that autograd keeps between forward and backward, and which op keeps them."""

import gc
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from hfnn.core import native, parts
from hfnn.core.context import PLAIN
from hfnn.memory.peak import tensors

# Used instead of an op, for tensors in no graph that the result leads to.
FROM_PYTHON = "held from Python, as by a checkpoint"


@dataclass
class Saved:
    """Bytes kept for backward: `total` over unique storages, `by_op` with each storage counted at its first keeper.

    casts: the part of the total that is casts of parameters by autocast; aside: bytes that nodes hold as attributes
    instead of saved tensors (a loss that makes its gradients in forward), not in the total.
    """

    total: int = 0
    by_op: dict[str, int] = field(default_factory=dict)
    casts: int = 0
    aside: int = 0

    def __str__(self) -> str:
        lines = [f"{size:>14,}  {op}" for op, size in sorted(self.by_op.items(), key=lambda item: -item[1])]
        return "\n".join([f"{self.total:>14,}  bytes kept for backward", *lines])


class SavedTensor:
    """A saved tensor, as packed; its storages are counted. module: for `hfnn.memory.report`."""

    def __init__(self, tensor: torch.Tensor):
        # Detached: otherwise an op that saves its own result would hold its own node, and neither would ever be freed.
        self.tensor = tensor.detach()
        self.storages = parts.storages(tensor)
        self.cast = _is_cast_of_parameter(tensor)
        self.module: str | None = None


class Record:
    """Everything that was packed, while something keeps it."""

    def __init__(self):
        self._refs: list[weakref.ref] = []

    def pack(self, tensor: torch.Tensor) -> SavedTensor:
        kept = SavedTensor(tensor)
        self._refs.append(weakref.ref(kept))
        return kept

    def alive(self, reached) -> list[SavedTensor]:
        """The kept tensors, in the order in which they were saved; reached: those known to be kept, from the graph."""
        kept = [k for k in (ref() for ref in self._refs) if k is not None]
        if any(k not in reached for k in kept):
            del kept
            gc.collect()  # nodes in a cycle are not really kept
            kept = [k for k in (ref() for ref in self._refs) if k is not None]
        return kept


def saved_bytes(fn: Callable[[], object]) -> Saved:
    """Run `fn` and count what autograd keeps for its backward.

    fn returns a tensor, or any nest of tuples, lists and dicts with tensors, that depends on everything to be counted.
    Unique storages are counted: two nodes that save one storage count once. Parameters and tensors that share their
    memory do not count. Memory that torch's ops hold in other ways (cuDNN's reserve space) is not seen. For a part
    under gradient checkpointing, only its inputs are kept.

    Args:
        fn: A function without arguments.

    >>> x = torch.ones(1024, requires_grad=True)
    >>> hfnn.memory.saved_bytes(lambda: torch.relu(x)).total
    4096
    >>> hfnn.memory.saved_bytes(lambda: hfnn.functional.relu(x, prefer="memory")).total
    128
    """
    record = Record()
    with torch.autograd.graph.saved_tensors_hooks(record.pack, unpack):
        result = fn()
    found, graph = Saved(), list(nodes(result))
    seen = {key for p in leaves(node for _, node in graph) for key in parts.storages(p)}
    for kept, op, size in counted(record, graph, seen):
        found.total += size
        found.by_op[op] = found.by_op.get(op, 0) + size
        found.casts += size * kept.cast
    # Last: a tensor that is a saved tensor of any node counts as such.
    for _, node in graph:
        found.aside += sum(size for _, size in set_aside(node, seen))
    return found


def counted(record: Record, graph: list, seen: set[int]) -> Iterator[tuple[SavedTensor, str, int]]:
    """(what was packed and is kept, its op, bytes) of storages that are not in `seen`, which then has them, too.

    graph: (name of the op, node), as `nodes` gives them.
    """
    ops: dict[SavedTensor, str] = {}
    for op, node in graph:
        for kept in packed(node):
            ops.setdefault(kept, op)
    for kept in (*ops, *record.alive(reached=ops)):
        if new := kept.storages.keys() - seen:
            seen |= new
            yield kept, ops.get(kept, FROM_PYTHON), sum(kept.storages[key] for key in new)


def unpack(kept: SavedTensor) -> torch.Tensor:
    return kept.tensor


def nodes(result) -> Iterator[tuple[str, object]]:
    """(name of the op, node) for every node of the graph behind result, from the outputs down.

    A node may hold a graph of its own, by `inner` nodes (hfnn/deferred/graph.py).
    """
    queue = [t.grad_fn for t in tensors(result) if t.grad_fn is not None]
    seen = set(queue)
    while queue:
        node = queue.pop(0)
        yield node.name().rstrip("0123456789").removesuffix("Backward").lstrip("_"), node
        for after in (*getattr(node, "inner", ()), *(after for after, _ in node.next_functions)):
            if after is not None and after not in seen:
                seen.add(after)
                queue.append(after)


def leaves(graph) -> Iterator[torch.nn.Parameter]:
    """The parameters that a graph ends in."""
    for node in graph:
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, torch.nn.Parameter):
            yield leaf


def packed(node) -> Iterator[SavedTensor]:
    """A node's saved tensors in packed form: unpacking would make a checkpoint compute its part again."""
    if native.extension is not None:
        yield from (data for data in native.extension.packed(node) if isinstance(data, SavedTensor))
    for attribute in dir(node):
        if attribute.startswith("_raw_saved_"):
            raw = getattr(node, attribute)
            for one in raw if isinstance(raw, (tuple, list)) else (raw,):
                if isinstance(one.data, SavedTensor):
                    yield one.data


def set_aside(node, seen: set[int]) -> Iterator[tuple[int, int]]:
    """(storage, bytes) of tensors that a node holds as attributes; those in `seen` are skipped, the others added."""
    for tensor in tensors(getattr(node, "__dict__", None)):
        if type(tensor) not in PLAIN or tensor.is_meta:  # no memory of its own
            continue
        for key, size in parts.storages(tensor).items():
            if key not in seen:
                seen.add(key)
                yield key, size


def _is_cast_of_parameter(tensor: torch.Tensor) -> bool:
    """Whether this is a parameter in another dtype, or a view of such a cast."""
    node = (tensor if tensor._base is None else tensor._base).grad_fn
    if node is None or not node.name().startswith("ToCopyBackward"):
        return False
    return isinstance(getattr(node.next_functions[0][0], "variable", None), torch.nn.Parameter)
