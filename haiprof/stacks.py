"""Where a thread is, line by line, and what the kernel says that it does there: runs, sleeps, waits for a lock, a disk,
or something else.

A sample is taken from another thread, which holds Python's global lock meanwhile. So a thread that waits in futex may
wait for the sampler only. It is looked at again a millisecond later, and counts as waiting if it has not run since.

The number of a system call is in /proc/self/task/<tid>/syscall ("proc" in section 5 of Linux's manual).
"""

import ast
import linecache
import os
import platform
import re
import stat
import sys
import sysconfig
import threading
import time
from collections import Counter
from itertools import islice
from pathlib import Path

from haiprof import record

RUNS, SLEEPS, LOCK, DISK, WAITS = "runs", "sleeps", "lock", "disk", "waits"
AGAIN, RAN = 0.001, 0.05  # seconds until a thread is looked at again; the share of them from which it has run
DEEPEST = 200  # frames
# Numbers of system calls: (x86_64, aarch64). Calls on a descriptor wait for a disk if that is a file.
CALLS = {
    SLEEPS: {(35, 101), (230, 115)},  # nanosleep, clock_nanosleep
    LOCK: {(202, 98)},  # futex
    "descriptor": {(0, 63), (1, 64), (17, 67), (18, 68), (19, 65), (20, 66), (295, 69), (296, 70), (40, 71)}
    | {(327, 286), (328, 287)},
    DISK: {(74, 82), (75, 83), (26, 227), (162, 81), (306, 267), (2, -1), (257, 56), (87, -1), (263, 35), (82, -1)}
    | {(264, 38), (4, -1), (262, 79), (76, 45), (77, 46), (285, 47)},  # fsync, fdatasync, msync, sync, open, unlink...
    "select": {(23, -1), (270, 72)},  # which sleeps if it has no descriptors
}
_COLUMN = {"x86_64": 0, "aarch64": 1}.get(platform.machine())
NUMBERS = {} if _COLUMN is None else {row[_COLUMN]: what for what, rows in CALLS.items() for row in rows}

# What a library does for the line that calls it, by a part of its files' names.
AREAS = {
    "checkpoint": ("torch/serialization.py", "torch/distributed/checkpoint/", "safetensors/", "haiscale/checkpoint.py"),
    "logging": (
        *("/logging/__init__.py", "/logging/handlers.py", "/tensorboard/", "tensorboardX/", "/wandb/", "/mlflow/"),
        *("/loguru/", "/rich/console.py", "/tqdm/"),
    ),
    "lock": ("/threading.py", "/queue.py", "/concurrent/futures/", "/multiprocessing/"),
}
_ROOT = Path(__file__).parents[1]
_LIBRARIES = (
    *(sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib", "platlib")),
    *(f"{_ROOT / name}{os.sep}" for name in ("haiprof", "haiscale", "hfnn", "hfrecord", "hfreduce")),
    *("<frozen", "<__array_function__"),
)
_files: dict[str, tuple[bool, str]] = {}  # by name: whether a user wrote it, its area


def _file(name):
    if name not in _files:
        area = next((area for area, parts in AREAS.items() if any(part in name for part in parts)), "")
        _files[name] = not name.startswith(_LIBRARIES), area
    return _files[name]


class Thread:
    """A thread of this process, by its ident."""

    def __init__(self, ident):
        self.ident = ident
        self._clock = time.pthread_getcpuclockid(ident) if hasattr(time, "pthread_getcpuclockid") else None
        native = next((each.native_id for each in threading.enumerate() if each.ident == ident), None)
        try:
            self._calls = os.open(f"/proc/self/task/{native}/syscall", os.O_RDONLY)
        except OSError:  # not on Linux, or not permitted
            self._calls = None

    def close(self):
        if self._calls is not None:
            os.close(self._calls)
            self._calls = None

    def __del__(self):
        self.close()

    def doing(self) -> str:
        """RUNS, also if it waits for a processor; or what it waits for. Gives up Python's global lock in LOCK."""
        what = self._call()
        if what != LOCK:
            return what
        if self._clock is None:
            return RUNS
        before = time.clock_gettime_ns(self._clock)
        time.sleep(AGAIN)
        ran = time.clock_gettime_ns(self._clock) - before
        return LOCK if ran < RAN * AGAIN * 1e9 and self._call() == LOCK else RUNS

    def _call(self):
        if self._calls is None:
            return RUNS
        try:
            words = os.pread(self._calls, 200, 0).split()
            if not words or words[0] == b"running":
                return RUNS
            number = int(words[0])
            if number < 0:
                return DISK  # outside of calls: a page that is read from a file or from swap
            what = NUMBERS.get(number, WAITS)
            if what == "descriptor":
                return DISK if stat.S_ISREG(os.fstat(int(words[1], 16)).st_mode) else WAITS
            if what == "select":
                return SLEEPS if int(words[1], 16) == 0 else WAITS
            return what
        except (OSError, ValueError):  # the thread has ended, or its descriptor was closed
            return RUNS


class Place:
    """Where a sample was taken. own: the innermost frame in a user's file, or else the innermost one."""

    def __init__(self, frame):
        self.code, self.line, self.last = frame.f_code, frame.f_lineno, frame.f_lasti
        self.area, self.own, own_last = "", None, -1
        while frame is not None:
            users, area = _file(frame.f_code.co_filename)
            self.area = self.area or area
            if users:
                own_last = frame.f_lasti
                self.own = frame.f_code, frame.f_lineno
                break
            frame = frame.f_back
        if self.own is None:
            self.own, own_last = (self.code, self.line), self.last
        self.key = (*self.own, own_last, self.code, self.line, self.area)


def described(place: Place) -> list[str]:
    """[the user's line, its text, the expression that it is at, the innermost line or "" if it is the same one, what
    the library does]."""
    code, line, last, inner, inner_line, area = place.key
    text = linecache.getline(code.co_filename, line).strip()
    expression = _expression(code, line, last) or text
    within = "" if (inner, inner_line) == (code, line) else f"{where(inner.co_filename, inner_line)} {inner.co_name}"
    return [f"{where(code.co_filename, line)} {code.co_name}", _public(text), _public(expression), within, area]


def by_user(name) -> bool:
    """Whether a file is in no library."""
    return _file(name)[0]


def source(name, line) -> str:
    """A line of a file, and its text."""
    return f"{where(name, line)}  {_public(linecache.getline(name, line).strip())}"


def where(name, line) -> str:
    """The place in a file, whose name is relative to the working directory or to that of its library."""
    for folder in (os.getcwd() + os.sep, *sorted(_LIBRARIES, key=len, reverse=True)):
        if folder.endswith(os.sep) and name.startswith(folder):
            name = name[len(folder) :]
            break
    return f"{name}:{line}"


def _expression(code, line, last):
    """The text of the instruction that runs, of Python 3.11 or newer: without arguments, if it is a call."""
    if not hasattr(code, "co_positions") or last < 0:
        return ""
    first, final, begin, end = next(islice(code.co_positions(), last // 2, None), (None,) * 4)
    if first is None or final is None or begin is None or end is None or first != final:
        return ""
    text = linecache.getline(code.co_filename, first).encode()[begin:end].decode(errors="replace")
    try:
        called = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError):
        return text
    return f"{ast.unparse(called.func)}()" if isinstance(called, ast.Call) else text


def _public(text):
    """The text, cut, or asterisks if it may contain a secret."""
    if record.LOOKS_SECRET.search(text) or (record.SECRET.search(text) and re.search("[\"']", text)):
        return record.HIDDEN
    return text if len(text) <= 100 else text[:97] + "..."


def place_of(ident) -> Place | None:
    frame = sys._current_frames().get(ident)
    return None if frame is None else Place(frame)


class Samples:
    """Samples of a thread until they are assigned to the steps in which they were taken."""

    def __init__(self):
        self._thread, self._waiting, self.rows, self.n = None, [], Counter(), 0
        self._places = {}

    def take(self, ident, others):
        """others(): idents of the other threads to be named if this one waits for a lock."""
        if self._thread is None or self._thread.ident != ident:
            self._thread = Thread(ident)
        place, now = place_of(ident), time.perf_counter()
        if place is None:
            return
        doing = self._thread.doing()
        if doing == LOCK:
            again = place_of(ident)
            doing = LOCK if again is not None and again.key == place.key else RUNS
        holders = [place_of(other) for other in others()] if doing == LOCK else ()
        self._waiting.append((now, doing, place, [each for each in holders if each is not None]))
        del self._waiting[:-20000]

    def assign(self, steps):
        """Counts the samples of these steps by phase, and forgets those before the last one's end."""
        if not steps:
            return
        waiting, end = self._waiting, steps[-1].end
        self._waiting = [sample for sample in waiting if sample[0] >= end]
        i = 0
        for step in steps:
            spans = sorted(step.spans, key=lambda span: span.start)
            while i < len(waiting) and waiting[i][0] < step.end:
                when, doing, place, holders = waiting[i]
                i += 1
                if when >= step.begin:
                    phase = next((span.name for span in spans if span.start <= when < span.end), "other")
                    self._count("forward" if phase == "inference" else phase, doing, place)
                    for holder in holders:
                        self._count("meanwhile", "", holder)

    def _count(self, phase, doing, place):
        self._places.setdefault(place.key, place)
        self.rows[phase, doing, place.key] += 1
        self.n += phase != "meanwhile"

    def line(self, most=60) -> dict | None:
        """A line for the file, of what was counted since the last one: rows of phase, what the thread does, number of
        samples, and what `described` tells."""
        if not self.n:
            return None
        merged = Counter()
        for (phase, doing, key), n in self.rows.most_common(5 * most):
            merged[(phase, doing, *described(self._places[key]))] += n
        rows = [[phase, doing, n, *more] for (phase, doing, *more), n in merged.most_common(most)]
        n, self.rows, self.n, self._places = self.n, Counter(), 0, {}
        return {"kind": "samples", "n": n, "rows": rows}
