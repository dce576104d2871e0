"""Restores the state that measurements change, and limits their time."""

import contextlib
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator

import torch
from torch import nn

from hfnn.core import parts


class State:
    """The state of a model and the generators. In the `with` block gradients are None; after it everything is
    restored."""

    def __init__(self, model: nn.Module):
        self.model = model
        held = [*model.parameters(), *model.buffers()]
        self._tensors = [(t, t.data, parts.copy(t, "cpu")) for t in held]
        self._buffers = [(m, {**m._buffers}) for m in model.modules()]
        self._modes = [(m, m.training) for m in model.modules()]
        self._gradients = [(p, p.grad) for p in model.parameters()]
        self._random = _random()

    def restore(self, layout: bool = False) -> None:
        """Sets gradients to None. layout: also gives tensors their own memory again."""
        for module, buffers in self._buffers:
            module._buffers.update(buffers)
        for tensor, data, value in self._tensors:
            if layout:
                tensor.data = data
            parts.write(tensor, value)
        for module, mode in self._modes:
            module.training = mode
        for p, _ in self._gradients:
            p.grad = None
        _set_random(self._random)

    def drew(self) -> bool:
        """Whether torch's generators have advanced."""
        now = _random()
        return any(not torch.equal(a, b) for a, b in zip(now["torch"], self._random["torch"], strict=True))

    def __enter__(self):
        self.restore()

    def __exit__(self, *why):
        self.restore(layout=True)
        for p, gradient in self._gradients:
            p.grad = gradient


def _random() -> dict:
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    numpy = sys.modules.get("numpy")
    of_numpy = numpy.random.get_state() if numpy else None
    return {"python": random.getstate(), "numpy": of_numpy, "torch": [torch.get_rng_state(), *cuda]}


def _set_random(states: dict) -> None:
    random.setstate(states["python"])
    if states["numpy"] is not None:
        sys.modules["numpy"].random.set_state(states["numpy"])
    cpu, *cuda = states["torch"]
    torch.set_rng_state(cpu)
    if cuda:
        torch.cuda.set_rng_state_all(cuda)


def dropouts(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """(module, the name of its probability) for modules that draw."""
    found = [(m, "p") for m in model.modules() if isinstance(m, nn.modules.dropout._DropoutNd)]
    found += [(m, "dropout") for m in model.modules() if isinstance(m, (nn.RNNBase, nn.MultiheadAttention))]
    return [(m, name) for m, name in found if m.training and getattr(m, name) > 0]


@contextlib.contextmanager
def without(dropouts) -> Iterator[None]:
    before = [(m, name, getattr(m, name)) for m, name in dropouts]
    for module, name, _ in before:
        setattr(module, name, 0.0)
    try:
        yield
    finally:
        for module, name, p in before:
            setattr(module, name, p)


class Dropped(Exception):
    """Why a candidate is rejected."""


class Over(BaseException):
    """The time is over. Not an Exception, so that code on the way does not handle it as its own error."""


@contextlib.contextmanager
def deadline(end: float) -> Iterator[None]:
    """Raises Over in the block when time.monotonic() reaches `end`, by an alarm; this only works in the main thread."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return
    armed = [True]

    def over(number, frame):
        if armed.pop() if armed else False:
            raise Over

    begin = time.monotonic()
    before = signal.signal(signal.SIGALRM, over)
    left, interval = signal.setitimer(signal.ITIMER_REAL, max(end - begin, 1e-3))
    try:
        yield
    finally:
        armed.clear()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if left:
            signal.setitimer(signal.ITIMER_REAL, max(left - (time.monotonic() - begin), 1e-3), interval)
