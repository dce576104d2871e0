"""What a step needs at most."""

import weakref
from collections.abc import Callable, Iterator

import torch
from torch.utils._python_dispatch import TorchDispatchMode


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
        for tensor in tensors(nest):
            storage = tensor.untyped_storage()
            key, size = storage._cdata, storage.nbytes() if counts else 0
            if key not in self._known:
                self._known[key] = weakref.ref(storage, lambda _, key=key, size=size: self._forget(key, size))
                self.now += size
        self.peak = max(self.peak, self.now)

    def _forget(self, key: int, size: int) -> None:
        del self._known[key]
        self.now -= size


def tensors(nest) -> Iterator[torch.Tensor]:
    """Every tensor in a nest of dicts, tuples and lists."""
    if isinstance(nest, torch.Tensor):
        yield nest
    elif isinstance(nest, dict):
        for value in nest.values():
            yield from tensors(value)
    elif isinstance(nest, (tuple, list)):
        for value in nest:
            yield from tensors(value)
