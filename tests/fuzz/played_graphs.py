"""A stand-in for CUDA graphs that runs on the CPU: what is recorded is a function, which each replay calls again.

As with graphs, recording changes nothing (what the function drew and wrote is undone), each replay writes its results
into the memory of the first ones, and all graphs of a model share one pool: once another forward or a backward was
replayed, what a forward kept for its own backward is gone.
"""

import contextlib

import torch

from hfnn.capture import graph


class Played:
    """Of `hfnn.capture.graph.Graph`."""

    def __init__(self, function, backend):
        self._function, self._backend, self._grad = function, backend, torch.is_grad_enabled()
        with backend.undone():
            self.results = function()
        self._memory = [None if t is None else t.detach() for t in _tensors(self.results)]

    def replay(self):
        with torch.set_grad_enabled(self._grad):
            results = self._function()
        with torch.no_grad():
            for memory, t in zip(self._memory, _tensors(results), strict=True):
                if memory is not None:
                    memory.copy_(t)
        if self._backend.last is not None:
            self._backend.last.results = None
        self._backend.last = self if hasattr(results, "tensors") else None
        self.results = results


def _tensors(results):
    return list(getattr(results, "tensors", results))


class Backend:
    """Of `hfnn.capture.graph.Cuda`."""

    def __init__(self, device, model):
        self.device, self.generator, self.last, self._model = device, torch.default_generator, None, model

    def record(self, function):
        return Played(function, self)

    def recording(self):
        return False

    def stream(self):
        return 0

    def pool_bytes(self):
        return 0

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
    """Models on the CPU are captured, by the stand-in."""
    before, graph.backend = graph.backend, lambda device, model: Backend(device, model)
    try:
        yield
    finally:
        graph.backend = before
