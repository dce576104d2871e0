"""Measures when a rank's actions ran: by the host's clock on the CPU, by events on the stream on CUDA."""

import contextlib
import time

import torch

from haiscale.pipeline.actions import Action


class Clock:
    """The spans of the last step. Recording one takes some microseconds on the host and does not wait for the
    device."""

    def __init__(self, device: torch.device):
        self._device, self._cuda = device, device.type == "cuda"
        self._pool: list = []  # events, for reuse
        self._spans: list[tuple[Action, object, object]] = []

    def begin(self) -> None:
        """Discards the last step."""
        if self._cuda:
            self._pool += [event for _, start, end in self._spans for event in (start, end)]
        self._spans = []

    @contextlib.contextmanager
    def span(self, action: Action):
        start = self._now()
        yield
        self._spans.append((action, start, self._now()))

    def _now(self):
        if not self._cuda:
            return time.perf_counter()
        event = self._pool.pop() if self._pool else torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def spans(self) -> list[tuple[Action, float, float]]:
        """(action, start, end) in seconds of wall-clock time, so that ranks can be compared. Waits for the device."""
        if not self._cuda:
            offset = time.time() - time.perf_counter()
            return [(action, start + offset, end + offset) for action, start, end in self._spans]
        torch.cuda.synchronize(self._device)
        mark = self._now()
        mark.synchronize()
        now = time.time()
        return [
            (action, now - start.elapsed_time(mark) / 1e3, now - end.elapsed_time(mark) / 1e3)
            for action, start, end in self._spans
        ]
