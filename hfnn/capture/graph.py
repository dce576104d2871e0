"""The CUDA graph functions that capture needs. Tests replace `backend` by one that records and replays on the CPU."""

import contextlib
import gc
import time
import warnings
import weakref
from collections.abc import Callable

import torch


class Graph:
    """The launches of `function`, recorded but not run. `results` is what it returned: each replay fills its
    tensors."""

    def __init__(self, function: Callable, pool, stream):
        self._graph = torch.cuda.CUDAGraph()
        with _no_collection(), torch.cuda.stream(stream):
            self._graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                self.results = function()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # of the same
                    self._end(pool)
                raise
            self._end(pool)

    def _end(self, pool) -> None:
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "The CUDA Graph is empty")
                self._graph.capture_end()
        except RuntimeError:
            _repair(self._graph, pool)
            raise

    def replay(self) -> None:
        self._graph.replay()


@contextlib.contextmanager
def _no_collection():
    """Destroying a graph while another one is recorded would break the recording."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


_broken = []


def _repair(graph: torch.cuda.CUDAGraph, pool) -> None:
    """After a capture that CUDA aborted, torch's allocator and generator still act as if it went on."""
    _broken.append(graph)  # the allocator for pinned memory holds its address
    device = torch.cuda.current_device()
    with contextlib.suppress(RuntimeError):  # if torch has already done this itself
        torch._C._cuda_endAllocateToPool(device, pool)
        torch._C._cuda_releasePool(device, pool)
    again = torch.cuda.CUDAGraph()
    again.capture_begin(capture_error_mode="thread_local")
    torch.empty(1, device=device).uniform_()
    again.capture_end()


class Cuda:
    """What recording needs from a GPU."""

    def __init__(self, device: torch.device):
        self.device = torch.device(device.type, torch.cuda.current_device() if device.index is None else device.index)
        self.generator = torch.cuda.default_generators[self.device.index]
        self._pool, self._stream = None, torch.cuda.Stream(self.device)
        self._graphs: weakref.WeakSet[Graph] = weakref.WeakSet()

    def record(self, function: Callable) -> Graph:
        """All graphs share one memory pool, so no two of them may be in use at once."""
        if not self._graphs:  # torch frees a pool with its last graph
            self._pool = torch.cuda.graph_pool_handle()
        torch.cuda.empty_cache()  # memory of eager calls, and of the last pool
        with torch.cuda.device(self.device):
            current = torch.cuda.current_stream()
            self._stream.wait_stream(current)
            graph = Graph(function, self._pool, self._stream)
            current.wait_stream(self._stream)  # torch put a generator's first state there, which a replay replaces
        self._graphs.add(graph)
        return graph

    def recording(self) -> bool:
        """Whether other code records this stream."""
        return torch.cuda.is_current_stream_capturing()

    def stream(self) -> int:
        return torch._C._cuda_getCurrentRawStream(self.device.index)

    def pinned(self, numbers: int) -> torch.Tensor:
        """Host memory that a graph may copy integers to."""
        return torch.zeros(numbers, dtype=torch.int64, device="cpu", pin_memory=True)

    def drain(self) -> None:
        """Wait until no thread of the autograd engine holds results of an earlier backward.

        The thread of a device lets go of them after the caller has them, at the latest before its next task.
        """
        x = torch.ones((), device="cuda", requires_grad=True)
        torch.autograd.grad(x.exp(), x)

    def wait(self, done: Callable[[], bool]) -> None:
        """Wait until the work of this stream makes done() true."""
        while not done():
            if torch.cuda.current_stream(self.device).query() and not done():
                raise RuntimeError("hfnn: a graph has run and left no answers")
            time.sleep(0)

    def pool_bytes(self) -> int:
        """Bytes of GPU memory that the pool holds."""
        return self._sum("total_size")

    def used_bytes(self) -> int:
        """Bytes of the pool that torch's allocator counts as in use: those of living tensors."""
        return self._sum("allocated_size")

    def _sum(self, what: str) -> int:
        return sum(segment[what] for segment in torch.cuda.memory_snapshot(self._pool)) if self._graphs else 0


def of_device(device: torch.device, model) -> Cuda | None:
    """The backend that records a model on a device, or None."""
    return Cuda(device) if device.type == "cuda" else None


backend = of_device
