"""A stand-in for CUDA graphs on the CPU: the recording is a function, which each replay calls again. With a GPU, fuzzer
and tests use CUDA graphs instead.

As with graphs, recording changes nothing (the function's draws and writes are undone), each replay writes its results
into the memory of the first ones, and all graphs of a model share one pool. Once another forward or a backward was
replayed, what a forward kept for its own backward is gone. A replay may overwrite the results of others.
"""

import contextlib
import weakref

import torch

from hfnn.capture import graph

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Played:
    """Replaces `hfnn.capture.graph.Graph`."""

    def __init__(self, function, backend):
        self._function, self._backend, self._grad = function, backend, torch.is_grad_enabled()
        with backend.undone():
            self.results = function()
        self._of_backward = not hasattr(self.results, "tensors")
        self._memory = [None if t is None else t.detach() for t in _tensors(self.results)]
        backend.graphs.add(self)

    def replay(self):
        self._spoil()
        with torch.set_grad_enabled(self._grad):
            results = self._function()
        with torch.no_grad():
            for memory, t in zip(self._memory, _tensors(results), strict=True):
                if memory is not None:
                    memory.copy_(t)
        if self._backend.last is not None:
            self._backend.last.results = None
        self._backend.last = None if self._of_backward else self
        self.results = results

    def _spoil(self):
        """Overwrites the results of other graphs, except those of a forward until its backward has run."""
        for other in self._backend.graphs:
            if other is not self and not (self._of_backward and other is self._backend.last):
                for t in other._memory:
                    if t is not None:
                        t.fill_(77)


def _tensors(results):
    return list(getattr(results, "tensors", results))


class Backend:
    """Replaces `hfnn.capture.graph.Cuda`."""

    def __init__(self, device, model):
        self.device, self.generator, self.last, self._model = device, torch.default_generator, None, model
        self.graphs = weakref.WeakSet()

    def record(self, function):
        return Played(function, self)

    def recording(self):
        return False

    def stream(self):
        return 0

    def pinned(self, numbers):
        return torch.zeros(numbers, dtype=torch.int64)

    def drain(self):
        pass  # the caller's own thread runs backward on the CPU

    def wait(self, done):
        assert done()

    def pool_bytes(self):
        return sum(t.nbytes for graph in self.graphs for t in graph._memory if t is not None)

    @contextlib.contextmanager
    def undone(self):
        state, buffers = self.generator.get_state(), [(b, b.clone()) for b in self._model.buffers()]
        try:
            yield
        finally:
            self.generator.set_state(state)
            for b, value in buffers:
                b.data.copy_(value)


@contextlib.contextmanager
def played():
    """CPU models are captured with the stand-in; GPU models with CUDA graphs."""
    before = graph.backend
    graph.backend = lambda device, model: Backend(device, model) if device.type == "cpu" else before(device, model)
    try:
        yield
    finally:
        graph.backend = before
