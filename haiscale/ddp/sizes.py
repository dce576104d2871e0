"""The size of buckets: measured in the first steps of a model on a machine, and stored for the next run.

Small buckets can be sent earlier; large ones use the connection better. Each candidate is timed for ROUNDS steps, in
turns, so that warm-up favours none. Rank 0 takes the size with the shortest median step, if that is shorter than every
step with the default, and all ranks follow. The file, `path()`, stores results by model, number of ranks, backend and
device.
"""

import datetime
import functools
import json
import logging
import math
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

CANDIDATES = tuple(mib << 20 for mib in (1, 5, 25, 125))  # bytes
DEFAULT = 25 << 20  # torch's; used if sizes cannot be tried
WARM_UP, ROUNDS = 3, 4  # steps
VERSION = 1

_log = logging.getLogger("haiscale.ddp")


class Sizes:
    """The size of the current step's buckets, in bytes: `now`; `why` is the reason for it."""

    def __init__(self, key: str, total: int, given: int | None, device: torch.device):
        self.key, self.device, self.why = key, device, "as given"
        self.now: int
        self.candidates: list[int] = []
        self.taken: list[int] = []
        self.marks: list[Any] = []
        self.times: dict[int, Any] = {}
        if given is not None:
            self.now = given
            return
        self.now, self.why = DEFAULT, "a default"
        smaller = [size for size in CANDIDATES if size < total]
        candidates = smaller + [size for size in CANDIDATES if size >= total][:1]
        if not smaller:
            self.why = "the gradients fit into one"
        elif (known := load().get(key)) is not None:
            self.now, self.why = known["bytes"], f"measured on {known['measured']}, {path()}"
            self.times = {int(size): seconds for size, seconds in known["seconds"].items()}
        else:
            self.candidates, self.why = candidates, "being measured"

    def numbers(self) -> list[int]:
        """The numbers that rank 0 sends to the others, always equally many: its size and its candidates."""
        return [self.now, *self.candidates, *[0] * (len(CANDIDATES) - len(self.candidates))]

    def follow(self, numbers: list[int]) -> None:
        """Adopts rank 0's numbers."""
        self.now, self.candidates = numbers[0], [size for size in numbers[1:] if size]

    def fix(self, why: str) -> None:
        """Stops measuring."""
        if self.candidates:
            self.candidates, self.why = [], why

    def stepped(self, group: dist.ProcessGroup, device: torch.device) -> int:
        """Called by all ranks at the end of each step: chooses the size for the next one."""
        if not self.candidates:
            return self.now
        self.marks.append(self._mark())
        self.taken.append(self.now)
        step = len(self.marks) - WARM_UP
        if step >= ROUNDS * len(self.candidates):
            self._decide(group, device)
        else:
            self.now = self.candidates[max(0, step) % len(self.candidates)]
        return self.now

    def _mark(self):
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def _seconds(self, i):
        """The time of step i, whose buckets had the size `taken[i]`."""
        if self.device.type != "cuda":
            return self.marks[i] - self.marks[i - 1]
        return self.marks[i - 1].elapsed_time(self.marks[i]) / 1e3

    def _decide(self, group, device):
        if self.device.type == "cuda":
            self.marks[-1].synchronize()
        seconds = {size: [] for size in self.candidates}
        for i in range(WARM_UP, len(self.marks)):
            seconds[self.taken[i]].append(self._seconds(i))
        self.times = {size: statistics.median(times) for size, times in seconds.items()}
        best = torch.tensor([_best(seconds)], device=device)
        dist.broadcast(best, dist.get_global_rank(group, 0), group=group)
        self.now, self.why = int(best), f"measured in {len(self.marks)} steps"
        self.candidates, self.marks, self.taken = [], [], []
        if group.rank() == 0 and path() is not None:
            save(self.key, self.now, self.times)


def _best(seconds: dict[int, list[float]]) -> int:
    """The size with the shortest median step; DEFAULT unless that is shorter than every step with DEFAULT."""
    best = min(seconds, key=lambda size: statistics.median(seconds[size]))
    return DEFAULT if min(seconds.get(DEFAULT, [math.inf])) <= statistics.median(seconds[best]) else best


def machine(device: torch.device) -> str:
    """The part of the key for sizes besides model, ranks and backend."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} with {os.cpu_count()} cores"


def path() -> Path | None:
    """HAISCALE_BUCKETS, or haiscale/buckets.json in XDG's cache folder. None, for no file, if HAISCALE_BUCKETS is empty
    or there is no home directory."""
    given = os.environ.get("HAISCALE_BUCKETS")
    if given is not None:
        return Path(given) if given else None
    try:
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:
        return None
    return Path(cache) / "haiscale" / "buckets.json"


def load() -> dict[str, dict]:
    """{key: {"bytes", "measured", "seconds"}}; empty if there is no usable file."""
    file = path()
    if file is None:
        return {}
    try:
        found = json.loads(file.read_text())
        sizes = found["sizes"] if found["version"] == VERSION else {}
        for size in sizes.values():
            _check(size)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        _say(f"{file} cannot be read as a file of bucket sizes, and is ignored: {type(error).__name__}: {error}")
        return {}
    return sizes


def _check(size: dict) -> None:
    """Checks an entry; raises the errors that its use would raise."""
    seconds = [float(seconds) for candidate, seconds in size["seconds"].items() if int(candidate) > 0]
    if not (type(size["bytes"]) is int and size["bytes"] > 0 and type(size["measured"]) is str and seconds):
        raise ValueError(f"{size} is not the size of a model's buckets")


def save(key: str, size: int, times: dict[int, float]) -> None:
    """Adds to the file by replacing it with rename: concurrent readers see the old file."""
    file, seconds = path(), {str(candidate): t for candidate, t in times.items()}
    sizes = load() | {key: {"bytes": size, "measured": datetime.date.today().isoformat(), "seconds": seconds}}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, beside = tempfile.mkstemp(dir=file.parent, prefix=file.name)
        try:
            with os.fdopen(handle, "w") as out:
                json.dump({"version": VERSION, "sizes": sizes}, out, indent=1)
            os.replace(beside, file)
        except BaseException:
            os.unlink(beside)
            raise
    except OSError as error:
        _say(f"the size of buckets that was measured is not kept for the next time: {type(error).__name__}: {error}")


@functools.cache
def _say(what: str) -> None:
    """Logs once per process."""
    _log.warning("%s; HAISCALE_BUCKETS names another file, or none if empty", what)
