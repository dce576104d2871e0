"""The peak memory of a step."""

import weakref
from collections.abc import Callable, Iterator

import torch
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from hfnn.core import parts

_DEVICE = torch.ops.prim.device.default


def peak_bytes(fn: Callable[[], object], device: torch.device | str = "cpu") -> int:
    """Run `fn` and return the peak number of bytes that it had allocated, above what was allocated before.

    The result of fn lives until the end and counts. On CUDA this is the count of torch's allocator for the current
    device, with its rounding. Run fn once before, so that one-time allocations (a cuBLAS workspace) do not count. On
    other devices it is the sum of live storages returned by torch's ops. Memory that an op allocates and frees within
    its own kernel is not seen. Do not use it for functions made by torch.compile: torch would run them uncompiled from
    then on.

    Args:
        fn: A function without arguments.
        device: Whose memory is counted.
    """
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before, result = torch.cuda.memory_allocated(), fn()
        torch.cuda.synchronize()
        del result
        return torch.cuda.max_memory_allocated() - before
    with Live() as live:
        result = fn()
    del result
    return live.peak


class Live(TorchDispatchMode):
    """Counts the storages that ops return, each until it is freed."""

    hfnn_runs = True  # as without this mode

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self._known: dict[int, weakref.ref] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is _DEVICE and type(args[0]) is FakeTensor:  # the most frequent op of a step without values
            return args[0].fake_device
        kwargs = kwargs or {}
        # A storage that first appears as an argument existed before.
        self._meet((args, kwargs), counts=False)
        result = func(*args, **kwargs)
        self._meet(result, counts=True)
        return result

    def _meet(self, nest, counts: bool) -> None:
        found = (part for tensor in tensors(nest) for part in parts.dense(tensor))
        for part in (part for part in found if part.device.type != "meta"):
            storage = part.untyped_storage()
            key, size = storage._cdata, storage.nbytes() if counts else 0
            if key not in self._known:
                self._known[key] = weakref.ref(storage, lambda _, key=key, size=size: self._forget(key, size))
                self._born(key, size)
        self.peak = max(self.peak, self.now)

    def _born(self, key: int, size: int) -> None:
        self.now += size

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
