"""When this rank arrived at each collective, to find the rank that makes others wait.

Arrivals come from existing records: torch's flight recorder (gloo, NCCL), and hfreduce's. DDP's reducer calls its
process group from C++, where Python hooks do not see it, but these recorders do. The time for which the host is blocked
is measured in the calls of process groups and in `Work.wait`.

A recorder's dump costs microseconds per entry. So it is read rarely enough that this stays below a few thousandths of
the time.
"""

import json
import math
import os
import pickle
import sys
from collections import deque
from time import perf_counter, time

from haiprof.places import Places

BLOCK = 64  # consecutive collectives written together: fewer would not show which of a step's buckets are late
MOST = 2 * BLOCK  # collectives written per group at a time
SOONEST, LATEST, SHARE = 2.0, 10.0, 0.003  # seconds between dumps at first, later; share of time
RECORDERS = ("_dump_fr_trace", "_dump_nccl_trace")  # NCCL has its own
RECORDER = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")


def prepare():
    """Enables torch's flight recorder, unless the user has decided. torch reads its size at the first collective."""
    if not any(name in os.environ for name in RECORDER):
        os.environ[RECORDER[0]] = "2000"
    os.environ.setdefault("TORCH_NCCL_ENABLE_TIMING", "1")  # durations on GPUs


CALLS = (  # calls of a process group: they block if a backend has no thread for them
    "allreduce", "allreduce_coalesced", "broadcast", "reduce", "allgather", "_allgather_base", "allgather_coalesced",
    "allgather_into_tensor_coalesced", "gather", "scatter", "reduce_scatter", "_reduce_scatter_base",
    "reduce_scatter_tensor_coalesced", "alltoall", "alltoall_base", "barrier", "send", "recv",
)  # fmt: skip


MESSAGES = ("send", "recv")


class Waits:
    """The times for which threads were blocked in collectives: (begin, end) of perf_counter, the newest 20000."""

    def __init__(self, on_destroy):
        """on_destroy(): called before a process group ends."""
        self.spans = deque(maxlen=20000)
        self.messages = 0  # calls of send and recv
        self._places, self._on_destroy = Places(), on_destroy

    def install(self):
        c10d = sys.modules.get("torch._C._distributed_c10d")
        if not hasattr(c10d, "Work"):
            return
        self._places.replace(c10d.Work, "wait", self._timed)
        for name in CALLS:
            if name in vars(c10d.ProcessGroup):
                self._places.replace(c10d.ProcessGroup, name, self._message if name in MESSAGES else self._timed)
        for module in ("torch.distributed", "torch.distributed.distributed_c10d"):
            self._places.replace(sys.modules[module], "destroy_process_group", self._told)

    def remove(self):
        self._places.restore()

    def _timed(self, call):
        spans = self.spans

        def timed(*args, **kwargs):
            begin = perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                spans.append((begin, perf_counter()))

        return timed

    def _message(self, call):
        timed = self._timed(call)

        def message(*args, **kwargs):
            self.messages += 1
            return timed(*args, **kwargs)

        return message

    def _told(self, destroy):
        def destroy_process_group(*args, **kwargs):
            self._on_destroy()
            return destroy(*args, **kwargs)

        return destroy_process_group

    def within(self, begin, end) -> float:
        """Blocked seconds between two times; iterates from the newest."""
        total = 0.0
        for start, stop in reversed(self.spans):
            if stop <= begin:
                break
            total += max(0.0, min(stop, end) - max(start, begin))
        return total

    def by_phase(self, step) -> dict[str, float]:
        """Blocked seconds in a step, by phase: its name, or "other"."""
        found, spans = {}, [*reversed(step.spans)]
        for start, stop in reversed(self.spans):
            if start < step.begin:
                break
            if stop <= step.end:
                name = next((span.name for span in spans if span.start <= start < span.end), "other")
                found[name] = found.get(name, 0.0) + stop - start
        return found


class Arrivals:
    """Lines for the file of this rank: collectives since the last call, by group.

    A row: the collective's number in its group, seconds from `wall` to its arrival, seconds to its end or None, and its
    index in `ops`.
    """

    def __init__(self):
        self._seen = {}  # by group: the last written collective
        self._begun, self.due = perf_counter(), 0.0

    def read(self) -> list[dict]:
        begin = perf_counter()
        by_group = {}
        for group, entry in self._entries():
            if group[0] == "nccl" and not entry["retired"]:
                continue  # its kernel is running, or its duration has not been read yet: it is written later
            if entry["collective_seq_id"] > self._seen.get(group, 0) and not entry["is_p2p"]:
                by_group.setdefault(group, {}).setdefault(entry["collective_seq_id"], entry)
        lines = [self._line(group, entries) for group, entries in by_group.items()]
        now = perf_counter()
        self.due = now + max(min(LATEST, SOONEST + (now - self._begun) / 10), (now - begin) / SHARE)
        return lines

    def _line(self, group, entries):
        before, last = self._seen.get(group, 0), max(entries)
        self._seen[group] = last
        stride = 1
        while (last - before) / stride > MOST:
            stride *= 2  # powers of two: the blocks of a rank that writes fewer are also written by the others
        wall, ops, rows, bytes_ = math.floor(time()), {}, [], 0
        for number, entry in sorted(entries.items()):
            name = entry["profiling_name"].rpartition(":")[2]
            ops[name] = ops.get(name, 0) + 1
            bytes_ += _bytes(entry)
            if number // BLOCK % stride == 0:
                at = round(entry["time_created_ns"] / 1e9 - wall, 6)
                rows.append([number, at, _duration(entry), list(ops).index(name)])
        return {
            "kind": "collectives",
            "wall": wall,
            "group": group[1],
            "backend": group[0],
            "ranks": _ranks(group[1]),
            "n": last - before,
            "seen": len(entries),
            "bytes": bytes_,
            "ops": ops,
            "rows": rows,
        }

    def _entries(self):
        """((backend, name of the group), entry) for each record."""
        c10d = sys.modules.get("torch._C._distributed_c10d")
        for recorder in RECORDERS if _groups() else ():
            if not hasattr(c10d, recorder):
                continue
            dump = pickle.loads(getattr(c10d, recorder)(True, False, False))
            for entry in dump.get("entries", ()):
                backend = entry["profiling_name"].partition(":")[0]
                yield (backend, entry["process_group"][0]), entry
        for name, backend in _hfreduce():
            for entry in json.loads(backend.record())["entries"]:
                yield ("hfreduce", name), entry


def _groups() -> dict:
    """torch.distributed's process groups and their names."""
    dist = sys.modules.get("torch.distributed.distributed_c10d")
    return dist._world.pg_names if dist is not None and getattr(dist, "_world", None) else {}


def _hfreduce():
    native = sys.modules.get("hfreduce._c10d")
    for group, name in list(_groups().items()) if native else ():
        import torch

        try:
            backend = group._get_backend(torch.device("cpu"))
        except RuntimeError:  # a group of other devices
            continue
        backend = getattr(backend, "wrapped_pg", backend)
        if isinstance(backend, native.Backend):
            yield name, backend


def _ranks(name):
    dist = sys.modules["torch.distributed"]
    for group, own in _groups().items():
        if own == name:
            return dist.get_process_group_ranks(group)
    return None  # the group is gone


def _bytes(entry) -> int:
    sizes = {"Float": 4, "Double": 8, "Half": 2, "BFloat16": 2, "Long": 8, "Int": 4, "Short": 2}
    pairs = zip(entry.get("input_sizes", ()), entry.get("input_dtypes", ()), strict=False)
    return sum(math.prod(shape) * sizes.get(dtype, 1) for shape, dtype in pairs)


def _duration(entry):
    """Seconds from arrival to end, if known: of the kernel on GPUs, of the whole operation in hfreduce."""
    if entry.get("duration_ms"):
        return entry["duration_ms"] / 1e3
    ended = entry.get("time_discovered_completed_ns")
    return (ended - entry["time_created_ns"]) / 1e9 if ended else None
