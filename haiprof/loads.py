"""The time that each worker of a loader spends on a batch: kept in memory that parent and forked workers share."""

import mmap
import os
import struct
import time

import torch
from torch.utils.data._utils import fetch

from haiprof.places import Places

WORKERS = 64  # those with a higher number are not timed
ROW = struct.Struct("dd")  # batches, seconds


class _Shared:
    """Written by the workers of this process, `pid`."""

    pid = rows = None


def prepare():
    """Before workers are forked: memory of this process, not that of its parent."""
    if _Shared.pid != os.getpid() and torch.utils.data.get_worker_info() is None:
        _Shared.pid, _Shared.rows = os.getpid(), mmap.mmap(-1, WORKERS * ROW.size)


class Loads:
    """Times the batches of workers while it is installed."""

    def __init__(self):
        self._places, self._read = Places(), {}

    def install(self):
        for name in ("_MapDatasetFetcher", "_IterableDatasetFetcher"):
            if "fetch" in vars(getattr(fetch, name, object)):
                self._places.replace(getattr(fetch, name), "fetch", _timed)

    def remove(self):
        self._places.restore()

    def read(self) -> dict[str, list[float]]:
        """By worker: batches and seconds since the last call. Workers that do not come from a fork tell nothing."""
        found = {}
        for worker in range(WORKERS) if _Shared.pid == os.getpid() else ():
            n, seconds = ROW.unpack_from(_Shared.rows, worker * ROW.size)
            before, before_seconds = self._read.get(worker, (0.0, 0.0))
            if n > before:
                found[str(worker)] = [n - before, seconds - before_seconds]
                self._read[worker] = n, seconds
        return found


def _timed(call):
    def fetch(self, *args, **kwargs):
        worker = torch.utils.data.get_worker_info()
        if worker is None or worker.id >= WORKERS or _Shared.rows is None:
            return call(self, *args, **kwargs)
        begin = time.perf_counter()
        batch = call(self, *args, **kwargs)
        n, seconds = ROW.unpack_from(_Shared.rows, worker.id * ROW.size)
        ROW.pack_into(_Shared.rows, worker.id * ROW.size, n + 1, seconds + time.perf_counter() - begin)
        return batch

    return fetch
