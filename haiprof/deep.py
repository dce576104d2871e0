"""Detailed profiling of a few steps, on request: operators and kernels, Python stacks, the CUDA allocator."""

import json
import sys
import threading
import time
from collections import Counter

from haiprof import record

TOP = 40  # number of written rows of stacks and of rooms
INTERVAL = 0.005  # seconds between samples of the Python stacks


class Window:
    """Starts with the next step of the collector's process, and ends after `steps` steps.

    what: some of "operators", "stacks", "memory". torch.profiler is started and stopped in the training thread, because
    it profiles the thread that starts it. The waiting thread does the rest. For operators, the FLOPs of one step more
    are counted before.
    """

    def __init__(self, collector, steps, what):
        unknown = set(what) - {"operators", "stacks", "memory"}
        if unknown or steps < 1:
            raise ValueError(f"steps={steps}, what={list(what)}: takes 1 or more, of operators, stacks and memory")
        if collector.window is not None:
            raise RuntimeError("another deep window is open")
        self._collector, self._what, self._left, self._steps = collector, set(what), steps, steps
        self.disturbs = bool(self._what - {"stacks"})  # whether its steps take longer
        self._over, self._stop = threading.Event(), threading.Event()
        self._profiler = self._sampler = self._error = self._counter = self._modules = None
        self.flops = None  # of a step
        self.stacks, self.files = Counter(), []
        collector.window = self
        collector.works = self.disturbs  # until the files are written

    def on_step(self):
        """Runs in the training thread, between two steps."""
        try:
            if self._over.is_set():  # it was closed in another thread, while FLOPs were counted
                self._count_no_more()
                self._collector.window = None
            elif "operators" in self._what and self._counter is None and self.flops is None:
                from haiprof import operators

                self._counter = operators.Flops()
            elif self._sampler is None:
                self._begin()
            else:
                self._left -= 1
                if self._left == 0:
                    self.close()
        except Exception as error:
            self._error = error
            self.close()

    def _begin(self):
        import torch

        if "operators" in self._what:
            from haiprof import operators

            self._count_no_more()
            self._modules = operators.Modules(self._collector.phases.models())
            self._modules.install()
            activities = [torch.profiler.ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(torch.profiler.ProfilerActivity.CUDA)
            self._profiler = torch.profiler.profile(
                activities=activities, record_shapes=True, profile_memory=True, with_stack="hfnn" in sys.modules
            )
            self._profiler.start()
            if not (torch.distributed.is_available() and torch.distributed.is_initialized()):  # otherwise torch sets it
                rank, size = record.rank_of()
                self._profiler.add_metadata_json("distributedInfo", json.dumps({"rank": rank, "world_size": size}))
        if "memory" in self._what and torch.cuda.is_initialized():
            torch.cuda.memory._record_memory_history(stacks="python")  # C++ frames take minutes to name
        thread = threading.get_ident()
        self._sampler = threading.Thread(target=self._sample, args=(thread,), name="haiprof stacks", daemon=True)
        if "stacks" in self._what:
            self._sampler.start()

    def _count_no_more(self):
        """In the training thread."""
        counter, self._counter = self._counter, None
        self.flops = counter.end()

    def _sample(self, thread):
        while not self._stop.wait(INTERVAL):
            frame, names = sys._current_frames().get(thread), []
            while frame is not None:
                code = frame.f_code
                names.append(f"{code.co_filename}:{frame.f_lineno} {code.co_name}")
                frame = frame.f_back
            if names:
                self.stacks[";".join(reversed(names))] += 1

    def close(self):
        """Ends it, from any thread; recorded data stays."""
        if self._collector.window is self and not self._over.is_set():
            if self._counter is None:
                self._collector.window = None
            elif threading.get_ident() == self._collector.phases.thread:
                self._count_no_more()
                self._collector.window = None
            self._stop.set()  # first: what follows is no part of a step
            if self._modules is not None:
                self._modules.remove()
            if self._profiler is not None:
                try:
                    self._profiler.stop()
                except Exception as error:
                    self._error, self._profiler = error, None
            self._over.set()

    def wait(self, seconds) -> list[str]:
        """Waits for the end and returns the written files. Raises TimeoutError if the steps did not run within
        `seconds`."""
        try:
            return self._wait(seconds)
        finally:
            self._collector.works = False

    def _wait(self, seconds):
        if not self._over.wait(seconds):
            self.close()
            raise TimeoutError(f"{self._left} steps less than asked for came in {seconds:.0f} s")
        if self._error is not None:
            raise self._error
        if self._sampler is not None and self._sampler.is_alive():
            self._sampler.join(10)
        stem = self._collector.writer.stem
        if self._profiler is not None:
            self._operators(f"{stem}.operators.json.gz")
        if self.stacks:
            path = f"{stem}.stacks.txt"  # "collapsed" format, the input of flame graphs
            with open(path, "w", encoding="utf-8") as file:
                file.writelines(f"{stack} {count}\n" for stack, count in self.stacks.most_common())
            self._told(path, {"kind": "stacks", "rows": [[_innermost(s), n] for s, n in self.stacks.most_common(TOP)]})
        if "memory" in self._what:
            self._memory(f"{stem}.memory.pickle")
        return self.files

    def _told(self, path, line):
        self.files.append(path)
        with self._collector._lock:
            self._collector.writer.write({**line, "wall": time.time()})

    def _operators(self, path):
        import torch

        from haiprof import operators

        self._profiler.export_chrome_trace(path)
        events = operators.read(path)
        rows, host, gpu = operators.rows(self._profiler)
        line = {"kind": "operators", "steps": self._steps, "rows": rows, "host": host, "on_gpu": gpu}
        line |= {"gpu": operators.launches(events, self._steps), "flops": self.flops}
        if torch.cuda.is_initialized():
            line["device"] = torch.cuda.get_device_name()
            line["peak"] = operators.peak(line["device"])
        line |= {"rooms": _rooms(events) if "hfnn" in sys.modules else [], "hfreduce": _hfreduce()}
        self._told(path, line)

    def _memory(self, path):
        import torch

        if not torch.cuda.is_initialized():
            with self._collector._lock:
                self._collector.writer.write({"kind": "missing", "why": {"allocator snapshot": "CUDA is not in use"}})
            return
        torch.cuda.memory._dump_snapshot(path)
        torch.cuda.memory._record_memory_history(enabled=None)
        self._told(path, {"kind": "memory"})


def _innermost(stack):
    return stack.rpartition(";")[2]


def _rooms(events) -> list:
    """[room, calls, seconds] of hfnn's ops: Python functions of hfnn/ops and hfnn/kernels, and autograd nodes."""
    calls, seconds = Counter(), Counter()
    for event in events:
        name = event.get("name", "")
        if event.get("cat") == "python_function" and ("hfnn/ops/" in name or "hfnn/kernels/" in name):
            room = name[name.index("hfnn/") :].replace("(", ":", 1).replace("): ", " ")
        elif event.get("cat") == "cpu_op" and name.startswith("_") and name.endswith("Backward"):
            room = name
        else:
            continue
        calls[room] += 1
        seconds[room] += event.get("dur", 0) / 1e6
    return [[room, calls[room], taken] for room, taken in seconds.most_common(TOP)]


def _hfreduce() -> list[str]:
    """The connections between ranks and their kinds, for each of hfreduce's groups."""
    from haiprof.collectives import _hfreduce

    return [f"{name}: {backend.describe()}" for name, backend in _hfreduce()]
