"""CUDA graphs as far as capture needs them. Tests replace `backend` by one that records and replays on the CPU."""

import contextlib
import gc
import time
import warnings
import weakref
from collections.abc import Callable

import torch


class Graph:
    """What `function` launches, recorded and not run. `results` is what it returned: each replay fills its tensors."""

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
    """A graph that is destroyed while another one is recorded spoils it."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


_broken = []


def _repair(graph: torch.cuda.CUDAGraph, pool) -> None:
    """After a capture that CUDA gave up, torch's allocator still serves it, and the generator still draws for it."""
    _broken.append(graph)  # the allocator for pinned memory holds its address
    device = torch.cuda.current_device()
    with contextlib.suppress(RuntimeError):  # where torch has come so far by itself
        torch._C._cuda_endAllocateToPool(device, pool)
        torch._C._cuda_releasePool(device, pool)
    again = torch.cuda.CUDAGraph()
    again.capture_begin(capture_error_mode="thread_local")
    torch.empty(1, device=device).uniform_()
    again.capture_end()


class Cuda:
    """What recording needs to know of a GPU."""

    def __init__(self, device: torch.device):
        self.device = torch.device(device.type, torch.cuda.current_device() if device.index is None else device.index)
        self.generator = torch.cuda.default_generators[self.device.index]
        self._pool, self._stream = None, torch.cuda.Stream(self.device)
        self._graphs: weakref.WeakSet[Graph] = weakref.WeakSet()

    def record(self, function: Callable) -> Graph:
        """All graphs share one pool of memory, so no two of them may be in use at once."""
        if not self._graphs:  # torch ends a pool with its last graph
            self._pool = torch.cuda.graph_pool_handle()
        torch.cuda.empty_cache()  # what eager calls needed, and the last pool
        with torch.cuda.device(self.device):
            current = torch.cuda.current_stream()
            self._stream.wait_stream(current)
            graph = Graph(function, self._pool, self._stream)
            current.wait_stream(self._stream)  # to which torch gave a generator's first state, which a replay replaces
        self._graphs.add(graph)
        return graph

    def recording(self) -> bool:
        """Whether somebody else records this very stream."""
        return torch.cuda.is_current_stream_capturing()

    def stream(self) -> int:
        return torch._C._cuda_getCurrentRawStream(self.device.index)

    def pinned(self, numbers: int) -> torch.Tensor:
        """Memory of the host that a graph may copy integers to."""
        return torch.zeros(numbers, dtype=torch.int64, pin_memory=True)

    def wait(self, done: Callable[[], bool]) -> None:
        """Until what this stream was given makes done() true."""
        while not done():
            if torch.cuda.current_stream(self.device).query() and not done():
                raise RuntimeError("hfnn: a graph has run and left no answers")
            time.sleep(0)

    def pool_bytes(self) -> int:
        """Bytes that the pool holds of the GPU's memory."""
        return self._sum("total_size")

    def used_bytes(self) -> int:
        """Bytes of the pool that torch's allocator counts as in use: those of tensors that are alive."""
        return self._sum("allocated_size")

    def _sum(self, what: str) -> int:
        return sum(segment[what] for segment in torch.cuda.memory_snapshot(self._pool)) if self._graphs else 0


def of_device(device: torch.device, model) -> Cuda | None:
    """What records a model on a device, or None where nothing does."""
    return Cuda(device) if device.type == "cuda" else None


backend = of_device
