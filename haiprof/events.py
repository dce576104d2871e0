"""CUDA events between phases, and concurrent captures of CUDA graphs.

An event is read in the collector's thread, two steps later. While a graph is captured in torch's default mode, an event
query from another thread would abort the capture (cudaStreamCaptureModeGlobal in "Stream Management" of the CUDA
Runtime API). So the collector's thread makes no CUDA calls then, and a capture waits until the collector is done.
"""

import contextlib
import threading
from collections import deque

import torch

from haiprof.places import Places
from haiprof.record import PHASES

LATER = 2  # number of steps after which events are read, so that nothing waits for them


class Events:
    """Creates events, and returns seconds on the GPU's clock. `device`: (index, NVML's name) once CUDA is in use."""

    def __init__(self):
        self.device, self._steps = None, deque()

    def mark(self):
        """An event in the current stream; None before CUDA is used, and while a graph is captured."""
        if not torch.cuda.is_initialized() or torch.cuda.is_current_stream_capturing():
            return None
        if self.device is None:  # set here, because the collector's thread has its own current device
            index = torch.cuda.current_device()
            uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)
            self.device = index, uuid and f"GPU-{uuid}"
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def add(self, number, step):
        """Records the step with this number, in the training thread; the first one is a warm-up and is left out."""
        if number and step.spans and step.spans[0].marks:
            self._steps.append((number, [(span.name, span.marks) for span in step.spans]))

    def read(self) -> dict:
        """Sums over n steps, by phase and from each step's first event to that of the next; {} if there are none.

        Steps that use several devices, or whose next step has no event, are left out.
        """
        sums, n = {}, 0
        while len(self._steps) > LATER:
            (number, spans), (next_number, following) = self._steps[0], self._steps[1]
            begin, next_begin = spans[0][1][0], following[0][1][0]
            if not next_begin.query():
                break
            self._steps.popleft()
            if next_number != number + 1:
                continue
            try:
                own = {"seconds": begin.elapsed_time(next_begin) / 1e3}
                for name, marks in spans:
                    if marks and None not in marks:
                        name = name if name in PHASES else "forward"
                        own[name] = own.get(name, 0.0) + marks[0].elapsed_time(marks[1]) / 1e3
            except RuntimeError:  # events of two devices, or of a stream that is behind
                continue
            for name, seconds in own.items():
                sums[name] = sums.get(name, 0.0) + seconds
            n += 1
        return {"n": n, **sums} if n else {}


class Captures:
    """Tracks captures of CUDA graphs. `lock`: for work that must not run during a capture."""

    def __init__(self):
        self.lock = threading.Condition(threading.RLock())
        self._under_way, self._places = 0, Places()

    def install(self):
        graph = torch.cuda.CUDAGraph
        if {"capture_begin", "capture_end"} <= vars(graph).keys():
            self._places.replace(graph, "capture_begin", self._begin)
            self._places.replace(graph, "capture_end", self._end)

    def remove(self):
        self._places.restore()

    @contextlib.contextmanager
    def none(self, seconds=10.0):
        """Holds the lock while no graph is captured; yields False if this was not possible within `seconds`."""
        with self.lock:
            yield self.lock.wait_for(lambda: not self._under_way, seconds)

    def _count(self, change):
        with self.lock:
            self._under_way = max(0, self._under_way + change)
            self.lock.notify_all()

    def _begin(self, call):
        def capture_begin(*args, **kwargs):
            self._count(1)
            try:
                return call(*args, **kwargs)
            except BaseException:
                self._count(-1)
                raise

        return capture_begin

    def _end(self, call):
        def capture_end(*args, **kwargs):
            try:
                return call(*args, **kwargs)
            finally:
                self._count(-1)

        return capture_end
