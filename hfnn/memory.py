"""How many bytes autograd keeps between forward and backward, and which op keeps them."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch


@dataclass
class Saved:
    """Bytes kept for backward: `total` over unique storages, `by_op` with each storage counted at its first keeper."""

    total: int = 0
    by_op: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"{size:>14,}  {op}" for op, size in sorted(self.by_op.items(), key=lambda item: -item[1])]
        return "\n".join([f"{self.total:>14,}  bytes kept for backward", *lines])


class _Kept:
    """A saved tensor, as packed: the storage is what costs."""

    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor
        storage = tensor.untyped_storage()
        self.key, self.nbytes = storage._cdata, storage.nbytes()


def saved_bytes(fn: Callable[[], object]) -> Saved:
    """Run `fn` and count what autograd keeps for its backward.

    fn returns a tensor, or any nest of tuples, lists and dicts with tensors, that depends on what is to be counted.
    Counts unique storages, for two nodes that save one storage pay once. Parameters do not count, nor what shares their
    memory. Memory held outside autograd's saved tensors (attributes of a ctx, cuDNN's reserve space) is not seen.
    """
    current: list[_Kept] = []

    def unpack(packed):
        current.append(packed)
        return packed.tensor

    with torch.autograd.graph.saved_tensors_hooks(_Kept, unpack):
        result = fn()
    found, nodes = Saved(), list(_nodes(result))
    seen = {
        leaf.untyped_storage()._cdata
        for leaf in (getattr(node, "variable", None) for _, node in nodes)
        if isinstance(leaf, torch.nn.Parameter)
    }
    for op, node in nodes:
        current.clear()
        _touch(node)
        for packed in current:
            if packed.key not in seen:
                seen.add(packed.key)
                found.total += packed.nbytes
                found.by_op[op] = found.by_op.get(op, 0) + packed.nbytes
    return found


def _nodes(result):
    """(name of the op, node) for every node of the graph behind result, from the outputs down."""
    queue = [t.grad_fn for t in _tensors(result) if t.grad_fn is not None]
    seen = set(queue)
    while queue:
        node = queue.pop(0)
        yield node.name().rstrip("0123456789").removesuffix("Backward").lstrip("_"), node
        for after, _ in node.next_functions:
            if after is not None and after not in seen:
                seen.add(after)
                queue.append(after)


def _tensors(nest):
    if isinstance(nest, torch.Tensor):
        yield nest
    elif isinstance(nest, dict):
        for value in nest.values():
            yield from _tensors(value)
    elif isinstance(nest, (tuple, list)):
        for value in nest:
            yield from _tensors(value)


def _touch(node) -> None:
    """Unpack everything that a node saved."""
    if hasattr(node, "saved_tensors"):
        _ = node.saved_tensors
        return
    for attribute in dir(node):
        if attribute.startswith("_saved_"):
            getattr(node, attribute)
