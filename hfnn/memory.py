"""How many bytes autograd keeps between forward and backward, which op keeps them, and what a step needs at most."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch.utils._python_dispatch import TorchDispatchMode


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


def peak_bytes(fn: Callable[[], object], device: torch.device | str = "cpu") -> int:
    """Run `fn` and return the most bytes it had allocated at any time, above what was there before it.

    What fn returns is alive until the end and counts. On CUDA this is torch's allocator's count for the current device,
    with its rounding; run fn once before, so that what is allocated once (a workspace of cuBLAS) does not count.
    Elsewhere it is the sum of live storages that torch's ops return: memory that an op takes and gives back within its
    own kernel is not seen. A function made by torch.compile is not for this: torch then runs it uncompiled, for good.
    """
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before, result = torch.cuda.memory_allocated(), fn()
        torch.cuda.synchronize()
        del result
        return torch.cuda.max_memory_allocated() - before
    with _Live() as live:
        result = fn()
    del result
    return live.peak


class _Live(TorchDispatchMode):
    """Counts the storages that ops return, each until it is freed."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self._known: dict[int, weakref.ref] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        # A storage that is first met as an argument was there before.
        self._meet((args, kwargs), counts=False)
        result = func(*args, **kwargs)
        self._meet(result, counts=True)
        return result

    def _meet(self, nest, counts: bool) -> None:
        for tensor in _tensors(nest):
            storage = tensor.untyped_storage()
            key, size = storage._cdata, storage.nbytes() if counts else 0
            if key not in self._known:
                self._known[key] = weakref.ref(storage, lambda _, key=key, size=size: self._forget(key, size))
                self.now += size
        self.peak = max(self.peak, self.now)

    def _forget(self, key: int, size: int) -> None:
        del self._known[key]
        self.now -= size


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
