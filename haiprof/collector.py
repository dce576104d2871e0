"""The collector of a process: hooks in the training thread, and a separate thread that counts and writes.

It starts with the first module call, backward pass or optimizer step. So launchers and loader workers, which also
import torch, write no files. A failure is logged once and ends the collector; the training continues.
"""

import atexit
import bisect
import contextlib
import itertools
import logging
import multiprocessing.util
import os
import random
import sys
import threading
import time
from collections import deque
from pathlib import Path

import torch

from haiprof import clock, record, trace
from haiprof.collectives import Arrivals, Waits
from haiprof.counters import Counters
from haiprof.events import Captures, Events
from haiprof.growth import Watch
from haiprof.phases import BACKWARD, Hooks, Phases
from haiprof.record import PHASES
from haiprof.stacks import Samples

with contextlib.suppress(ImportError):
    import psutil  # noqa: F401 -- not first in the collector's thread: a child forked meanwhile would have half of it

log = logging.getLogger("haiprof")
SAMPLE = 20  # backward passes examined per reading of collectives
OFTEN, RARELY, AT_FIRST = 0.02, 0.1, 20.0  # seconds between samples of the stack, at first and after so many seconds
REST = 300  # but at least so many times what a sample takes of the processor, if counters are not read more often
SHOWN = ("process.cpu", "process.memory", "gpu.busy", "gpu.power", "gpu.clock", "gpu.reserved")  # counters in the trace


class Collector:
    """hz: counter readings per second. partial: whether it starts within a step, which is then left out."""

    def __init__(self, folder, hz=1.0, partial=False):
        self.folder, self.interval = Path(folder), 1 / hz
        self.events, self.captures = Events(), Captures()
        self.phases = Phases(self._on_step, self.fail, self.events.mark if torch.version.cuda else None, self._begin)
        self.hooks, self.waits = Hooks(self.phases), Waits(self._last_arrivals)
        self.arrivals, self.counters, self.writer, self.window = Arrivals(), None, None, None
        self.done, self.latest = 0, {}  # finished steps; the values of the metrics
        self._partial, self._steps = partial, deque()
        self._spans, self._timeline, self._readings = deque(maxlen=20000), deque(maxlen=5000), deque(maxlen=20000)
        self._lock, self._over, self._thread, self._failed = self.captures.lock, threading.Event(), None, False
        self._loader = self.metrics = self._time = None
        self._missing = {}  # as last written
        self.samples, self._samples_due = Samples(), 0.0  # time.monotonic of their next line
        self._ready = float("inf")  # time.perf_counter from which on steps are no longer those of its own start
        self.works = False  # whether a window takes time
        self._disturbed = False  # whether the running step has paid for a window or a census
        self._watch, self._before = Watch(), {}  # totals as last written
        self._captures, self._ticks = {}, 0  # (name, counts) of captured models
        self._between, self._at_exit = threading.Condition(), None  # of multiprocessing

    def start(self):
        try:
            self.waits.install()
            self.captures.install()
            self.hooks.install()
        except Exception:
            self.fail()
        atexit.register(self.stop)
        return self

    def _begin(self):
        """Runs in the training thread, before its first phase."""
        if torch.utils.data.get_worker_info() is not None:
            self._remove()
            return
        self._head = record.header(backend=_backend())
        self._offset = self._head["wall"] - self._head["perf"]
        self.rank = self._head["rank"]
        self.writer = record.Writer(self.folder, self._head)
        if clock.on_several_hosts():
            self._time = clock.Asker(self.folder) if self.rank else clock.Server(self.folder)
        self._begun = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="haiprof", daemon=True)
        self._thread.start()
        # A forked Process ends without atexit. Not in `start`: it forgets what was registered while it was forked.
        self._at_exit = multiprocessing.util.Finalize(None, self.stop, exitpriority=0)

    def fail(self):
        """Called in an exception handler, in any thread: logs once, and stops."""
        if not self._failed:
            self._failed = True
            log.warning("haiprof stops profiling this process; the training goes on", exc_info=True)
            self._over.set()
            self._remove()
            if self.writer is not None:
                self.writer.close()

    def _remove(self):
        self.phases.stopped = True  # wrappers that are still held only pass calls on
        self.hooks.remove()
        self.waits.remove()
        self.captures.remove()

    def detach(self):
        """Removes the hooks in a forked child, and leaves the files and the thread to its parent."""
        self._forget_exit()
        self._remove()

    def _forget_exit(self):
        atexit.unregister(self.stop)
        if self._at_exit is not None:
            self._at_exit.cancel()

    def stop(self):
        """Removes the hooks, writes the rest, and ends the thread."""
        self._forget_exit()
        if self.window is not None:
            self.window.close()
        self._remove()
        self._over.set()
        self._watch.close()
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join(10)
        for served in (self.metrics, self._time):
            if hasattr(served, "close"):
                served.close()
        if self.writer is None or self._failed:
            return
        try:
            self.phases.finish()
            with self.captures.none():
                self.arrivals.due = self._samples_due = 0.0
                self._tick()
                self._write_captures()
                self.writer.write({"kind": "end", "wall": time.time(), "steps": self.done})
                self.writer.close()
                self._write_trace()
        except Exception:
            self.fail()
        self.writer = None

    def flush(self):
        """Writes everything collected so far, and the trace."""
        with self.captures.none():
            if self.writer is not None and not self._failed:
                self.arrivals.due = self._samples_due = 0.0
                self._tick()
                self._write_captures()
                self._write_trace()

    def _on_step(self, step):
        if self._partial:
            self._partial = False
            return
        self._spans.extend((span.name, span.start, span.end) for span in step.spans)
        self._timeline.append((f"ProfilerStep#{self.done}", step.begin, step.end))
        if not self._disturbed:
            self.events.add(self.done, step)
        self._steps.append((self.done, step.without_marks(), self.waits.by_phase(step), self._disturbed))
        self.done += 1
        self._disturbed = self.works
        if self.window is not None:
            self.window.on_step()
        self._disturbed |= self._watch.step()
        with self._between:
            self._between.notify_all()

    def wait_for(self, steps, timeout) -> bool:
        """Waits for this many more steps; returns whether they were done within `timeout` seconds."""
        goal = self.done + steps
        with self._between:
            return self._between.wait_for(lambda: self.done >= goal or self._over.is_set(), timeout)

    def _run(self):
        try:
            counters = Counters(
                gpu=lambda: self.events.device, thread=lambda: self.phases.thread, folders=[self.folder]
            )
            counters.read()
            counters.missing.update(self._serve())
            self.counters, wait = counters, min(self.interval, 1.0)
            self._tell_missing()
            begun = self._ready = time.perf_counter()
            due, pause, spent = begun + wait, OFTEN, time.thread_time()
            draws = random.Random()  # apart from the program's random numbers
            while not self._over.wait(pause * (0.5 + draws.random())):
                self.samples.take(self.phases.thread, self._others)
                least = OFTEN if time.perf_counter() < begun + AT_FIRST else RARELY
                pause = max(least, min(REST * (time.thread_time() - spent), self.interval))
                if time.perf_counter() >= due:
                    with self.captures.none(self.interval) as nothing_is_captured:
                        if nothing_is_captured and not self._over.is_set():
                            self._tick()
                    wait *= 2 if self.writer.full() else 1
                    due = time.perf_counter() + wait
                spent = time.thread_time()
        except Exception:
            self.fail()

    def _others(self):
        """The threads that the program has started besides the training thread."""
        names = [each for each in threading.enumerate() if not each.name.startswith("haiprof")]
        return [each.ident for each in names if each.ident != self.phases.thread]

    def _tell_missing(self):
        """What is not measured and why, if this has changed; an empty reason if it is now measured."""
        now = self.counters.missing
        why = {name: reason for name, reason in now.items() if self._missing.get(name) != reason}
        why |= {name: "" for name in self._missing if name not in now}
        if why:
            self._missing = dict(now)
            self.writer.write({"kind": "missing", "why": why})

    def _serve(self):
        """Opens the metrics port if requested; returns the reason if this fails."""
        if "HAIPROF_PORT" not in os.environ:
            return {}
        from haiprof.metrics import Metrics

        try:
            self.metrics = Metrics(self, int(os.environ["HAIPROF_PORT"]))
        except (OSError, ValueError) as error:
            return {"metrics": f"HAIPROF_PORT={os.environ['HAIPROF_PORT']}: {error}"}
        return {}

    def _tick(self):
        """Writes everything new since the last call."""
        self._ticks += 1
        if self._ticks & (self._ticks - 1) == 0:  # only at the 1st, 2nd, 4th, ... time, because there are many modules
            self._find_captures()
        if self.phases.loader != self._loader:
            self._loader = self.phases.loader
            self.writer.write({"kind": "loader", **self._loader})
        self._write_steps([self._steps.popleft() for _ in range(len(self._steps))])
        if self.counters is not None:
            reading = self.counters.read()
            reading |= {"steps": self.done, "own": self.works}
            self.writer.write({"kind": "counters", "wall": time.time(), **reading})
            self._readings.extend((name, time.time(), reading[name]) for name in SHOWN if name in reading)
            self.latest.update(reading)
            held = reading.get("gpu.allocated", reading.get("process.memory"))
            self._watch.note(0 if self.works else self.done, held)
            self._tell_missing()
        if (line := self._watch.line()) is not None:
            self.writer.write(line)
        if time.perf_counter() >= self.arrivals.due:
            self._write_arrivals()
        if isinstance(self._time, clock.Asker) and time.monotonic() >= self._time.due:
            self._ask_the_time()

    def _write_steps(self, steps):
        """Lines of consecutive steps. The first step warms up and has a line of its own; so have steps with work of
        haiprof."""
        for kind, group in itertools.groupby(steps, lambda row: (not row[0], row[3] or row[1].begin < self._ready)):
            group = list(group)
            line = self._line(group)
            if kind == (False, False):
                self.samples.assign([step for _, step, *_ in group])
                gpu = self.events.read()
                line |= {"gpu": gpu} if gpu else {}
            elif kind == (False, True):
                line["own"] = True
            self.writer.write(line)
        now = time.monotonic()
        if now >= self._samples_due and (line := self.samples.line()):
            self._samples_due = now + min(60.0, max(2.0, now - self._begun))
            self.writer.write(line)

    def _others_of_a_line(self):
        return {
            "collecting": self._since("collecting", self.phases.collecting),
            "messages": self._since("messages", self.waits.messages),
            "batch": self.phases.batches(),
            "workers": self.hooks.loads.read(),
        }

    def _since(self, name, value):
        """The increase of a total since the last call."""
        before, self._before[name] = self._before.get(name, 0), value
        return value - before

    def _ask_the_time(self):
        try:
            line = self._time.ask()
        except OSError as error:
            self.counters.missing["clock"] = f"rank 0's clock does not answer: {error or type(error).__name__}"
        else:
            self.counters.missing.pop("clock", None)
            if line is not None:
                self.writer.write(line)

    def _write_arrivals(self):
        for line in self.arrivals.read():
            self.writer.write({**line, **self._exposed(line)})

    def _find_captures(self):
        """Keeps the counts of captured models, which may be gone when the process ends."""
        if "hfnn.capture.captured" not in sys.modules:
            return
        with contextlib.suppress(RuntimeError):  # a module was added meanwhile
            for module in (each for root in self.phases.models() for each in root.modules()):
                if "_hfnn_capture" in vars(module):
                    counts = vars(module)["_hfnn_capture"].counts
                    self._captures[id(counts)] = type(module).__name__, counts

    def _write_captures(self):
        """The calls of captured models: replays, and uncaptured calls by reason."""
        self._find_captures()
        for number, (name, counts) in enumerate(self._captures.values()):
            counts = dict(counts)
            line = {"model": name, "number": number, "replayed": counts.pop("replayed", 0), "as_it_is": counts}
            self.writer.write({"kind": "captures", "wall": time.time(), **line})

    def _last_arrivals(self):
        """Runs before a process group ends together with its records."""
        try:
            with self._lock:
                if self.writer is not None and not self._over.is_set():
                    self._write_arrivals()
        except Exception:
            self.fail()

    def _line(self, steps):
        """Sums over consecutive steps, in seconds."""
        sums = dict.fromkeys((*PHASES, "other"), 0.0)
        for _, step, *_ in steps:
            for name, seconds in step.seconds().items():
                sums[name] += seconds
        waited = {}
        for _, _, own, _ in steps:
            for name, seconds in own.items():
                waited[name] = waited.get(name, 0.0) + seconds
        lengths = [step.end - step.begin for _, step, *_ in steps]
        line = {
            "kind": "steps",
            "wall": steps[0][1].begin + self._offset,
            "until": steps[-1][1].end + self._offset,
            "first": steps[0][0],
            "n": len(steps),
            "seconds": sum(lengths),
            "slowest": max(lengths),
            "gap": sum(step.gap for _, step, *_ in steps),
            "passes": sum(step.passes() for _, step, *_ in steps),
            "waited": waited,
            **{name: value for name, value in self._others_of_a_line().items() if value},
            **sums,
        }
        for name in ("seconds", *sums):
            self.latest[f"step.{name}"] = line[name] / len(steps)
        self.latest["steps"] = self.done
        return line

    def _exposed(self, line):
        """Seconds from the last collective that a backward pass started to its end, when nothing else is left to do.

        Not on GPUs, where the host does not wait. `backwards`: the number of passes with a collective.
        """
        if torch.cuda.is_initialized():
            return {}
        starts = sorted(line["wall"] + row[1] - self._offset for row in line["rows"])
        total, n = 0.0, 0
        for name, begin, end in reversed(list(self._spans)):
            if not starts or end < starts[0] or n == SAMPLE:
                break
            last = bisect.bisect_right(starts, end) - 1
            if name == BACKWARD and starts[last] >= begin:
                total += end - starts[last] - self.waits.within(starts[last], end)
                n += 1
        return {"exposed": total, "backwards": n}

    def _write_trace(self):
        offsets = self._time.offsets if isinstance(self._time, clock.Asker) else ()

        def moved(perf):
            wall = perf + self._offset
            return wall + clock.at(offsets, wall)

        lanes = ([(name, moved(begin), moved(end)) for name, begin, end in rows] for rows in self._lanes())
        readings = [(name, wall + clock.at(offsets, wall), value) for name, wall, value in self._readings]
        found = trace.events(self._head, *lanes, counters=readings)
        trace.write(f"{self.writer.stem}.trace.json.gz", self._head, found)

    def _lanes(self):
        waits = [("wait", begin, end) for begin, end in self.waits.spans]
        return list(self._spans), waits, list(self._timeline)


def _backend():
    dist = torch.distributed
    return dist.get_backend() if dist.is_available() and dist.is_initialized() else ""


def new_folder() -> str:
    """haiprof-<date>-<time>-<pid> in the working directory."""
    return os.path.abspath(time.strftime(f"haiprof-%Y%m%d-%H%M%S-{os.getpid()}"))
