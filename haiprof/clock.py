"""The clocks of hosts: the offset of this process's clock from rank 0's, measured with datagrams.

Method: "Network Time Protocol Version 4" (RFC 5905, chapter 8); of several exchanges the fastest is used. Rank 0 writes
its address into the folder that all ranks share. If all ranks are on one host, there are no exchanges.
"""

import bisect
import contextlib
import json
import os
import socket
import struct
import threading
import time
from pathlib import Path

FILE = "clock.json"  # has the address of rank 0
ASKED, LOST, PATIENCE, EVERY = 16, 3, 0.2, 60.0  # exchanges, allowed losses; seconds per exchange, between rounds
TIME = struct.Struct("!d")


def on_several_hosts() -> bool:
    """Whether there are several hosts, by the launcher's environment."""
    size, here = os.environ.get("WORLD_SIZE", ""), os.environ.get("LOCAL_WORLD_SIZE", "")
    return size.isdigit() and here.isdigit() and int(here) < int(size)


class Server:
    """A thread that answers with its time, until `close`."""

    def __init__(self, folder):
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("", 0))
        address = os.environ.get("MASTER_ADDR") or socket.gethostname()
        new = Path(folder, f"{FILE}.{os.getpid()}")
        new.write_text(json.dumps({"address": address, "port": self._socket.getsockname()[1]}))
        new.replace(Path(folder, FILE))
        self._thread = threading.Thread(target=self._run, name="haiprof clock", daemon=True)
        self._thread.start()

    def _run(self):
        with contextlib.suppress(OSError):  # closed
            while True:
                asked, sender = self._socket.recvfrom(64)
                if not asked:
                    return
                self._socket.sendto(asked + TIME.pack(time.time()), sender)

    def close(self):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as own:
            own.sendto(b"", ("127.0.0.1", self._socket.getsockname()[1]))
        self._thread.join(10)
        self._socket.close()


class Asker:
    """offsets: measured (time, seconds to add to it); due: the time.monotonic of the next measurement."""

    def __init__(self, folder):
        self._file, self.due, self.offsets = Path(folder, FILE), 0.0, []

    def ask(self) -> dict | None:
        """A line for the file: `offset`, by which rank 0's clock is ahead, and its maximum error, `error`; in seconds.

        None if rank 0 has not published its address yet. Raises OSError if it does not answer.
        """
        if not self._file.exists():
            return None
        where = json.loads(self._file.read_text())
        self.due = time.monotonic() + EVERY
        best, lost = None, 0
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as own:
            own.settimeout(PATIENCE)
            own.connect((where["address"], where["port"]))
            for _ in range(ASKED):
                try:
                    found = _exchange(own)
                except TimeoutError:
                    lost += 1
                    if lost == LOST and best is None:
                        raise
                    continue
                best = found if best is None or found["error"] < best["error"] else best
        self.offsets.append((best["wall"], shift(best)))
        return best


def _exchange(own) -> dict:
    begin = time.time()
    own.send(TIME.pack(begin))
    while True:
        answer = own.recv(64)
        if answer[: TIME.size] == TIME.pack(begin):  # not the answer to an earlier request
            break
    end = time.time()
    (there,) = TIME.unpack(answer[TIME.size :])
    return {"kind": "clock", "wall": end, "offset": there - (begin + end) / 2, "error": (end - begin) / 2}


def shift(line) -> float:
    """Seconds to add to times of this process: 0 if the offset is not larger than its error."""
    return line["offset"] if abs(line["offset"]) > line["error"] else 0.0


def at(offsets, when: float) -> float:
    """Seconds to add to a time, interpolated between measurements; 0 if there are none."""
    if not offsets:
        return 0.0
    i = bisect.bisect_right(offsets, (when, float("inf")))
    if i in (0, len(offsets)):
        return offsets[min(i, len(offsets) - 1)][1]
    (begin, before), (end, after) = offsets[i - 1], offsets[i]
    return before + (after - before) * (when - begin) / (end - begin)
