"""The output of ranks, shown by their parent."""

import os
import sys
import threading
import time
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait


class Output(threading.Thread):
    """Shows the output of ranks, each line with its rank."""

    def __init__(self):
        super().__init__(name="output of ranks", daemon=True)
        self._ends: dict[Connection, tuple[str, int]] = {}  # by pipe end: the prefix of a line, 1 or 2
        self._parts: dict[Connection, bytes] = {}
        self._until: float | None = None

    def pipes(self, rank: int) -> tuple[Connection, Connection]:
        """The descriptors for a rank's standard output and error."""
        made = []
        for target in (1, 2):
            mine, theirs = Pipe(duplex=False)
            self._ends[mine], self._parts[mine] = (f"[rank {rank}] ", target), b""
            made.append(theirs)
        return tuple(made)

    def run(self) -> None:
        # The pipes end with the last process that holds them, which may be a process left behind by a rank.
        while self._ends and (self._until is None or time.monotonic() < self._until):
            for end in wait(list(self._ends), 0.1):
                chunk = os.read(end.fileno(), 1 << 16)
                *lines, self._parts[end] = (self._parts[end] + chunk).replace(b"\r\n", b"\n").split(b"\n")
                if not chunk and self._parts[end]:
                    lines = [self._parts[end]]
                self._show(end, lines)
                if not chunk:
                    del self._ends[end]
                    end.close()

    def _show(self, end: Connection, lines: list[bytes]) -> None:
        before, target = self._ends[end]
        stream = sys.stdout if target == 1 else sys.stderr
        if lines:
            stream.write("".join(f"{before}{line.decode(errors='replace')}\n" for line in lines))
            stream.flush()

    def finish(self) -> None:
        """All ranks have ended: shows the remaining output."""
        self._until = time.monotonic() + 1
        self.join()
