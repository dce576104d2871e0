"""CUDA graphs as far as capture needs them. Tests replace `backend` by one that records and replays on the CPU."""

from collections.abc import Callable

import torch


class Graph:
    """What `function` launches, recorded and not run. `results` is what it returned: each replay fills its tensors."""

    def __init__(self, function: Callable, pool, stream):
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            self.results = function()

    def replay(self) -> None:
        self._graph.replay()


class Cuda:
    """What recording needs to know of a GPU."""

    def __init__(self, device: torch.device):
        self.device = torch.device(device.type, torch.cuda.current_device() if device.index is None else device.index)
        self.generator = torch.cuda.default_generators[self.device.index]
        self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(self.device)

    def record(self, function: Callable) -> Graph:
        """All graphs share one pool of memory, so no two of them may be in use at once."""
        with torch.cuda.device(self.device):
            return Graph(function, self._pool, self._stream)

    def recording(self) -> bool:
        """Whether somebody else records this very stream."""
        return torch.cuda.is_current_stream_capturing()

    def stream(self) -> int:
        return torch._C._cuda_getCurrentRawStream(self.device.index)

    def pool_bytes(self) -> int:
        """Bytes that the pool holds of the GPU's memory."""
        segments = torch.cuda.memory_snapshot(self._pool)
        return sum(segment["total_size"] for segment in segments)


def of_device(device: torch.device, model) -> Cuda | None:
    """What records a model on a device, or None where nothing does."""
    return Cuda(device) if device.type == "cuda" else None


backend = of_device
