"""The output of ranks, shown by their parent."""

import os
import re
import sys
import threading
import time
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait

_TRACEBACK = b"Traceback (most recent call last):"
_OTHER = (b"Exception ignored", b"Exception in thread")  # no process ends of these
_CHAINED = (
    b"During handling of the above exception, another exception occurred:",
    b"The above exception was the direct cause of the following exception:",
)
_PREFIX = re.compile(rb"^\[rank\d+\]: ", re.M)  # torch's, in ranks that have a process group
_MOST = 2000  # lines that are kept
_HELD = 1.0  # seconds; a process that has not ended by then may not be ending


@dataclass
class _Stream:
    """One of the two streams of a rank."""

    rank: int
    target: int  # 1 or 2
    part: bytes = b""  # of a line
    before: bytes = b""  # the last line that was not empty
    last: list[bytes] = field(default_factory=list)  # from the last traceback on
    since: float = 0.0  # when that began
    is_held: bool = False  # `last` is not shown yet

    def take(self, lines: list[bytes], hold: bool) -> None:
        """Shows lines, or holds them from a traceback on."""
        shown = []
        for line in lines:
            plain = _PREFIX.sub(b"", line)
            chained = self.last and self.before in _CHAINED
            if hold and self.target == 2 and plain == _TRACEBACK and not chained and not self.before.startswith(_OTHER):
                shown += self._held()
                self.last, self.since, self.is_held = [line], time.monotonic(), True
            elif self.last:
                self.last.append(line)
            if not self.is_held:
                shown.append(line)
            if len(self.last) > _MOST:
                shown += self._held()
                self.last = []
            self.before = plain.strip() or self.before
        self.show(shown)

    def show_held(self) -> None:
        self.show(self._held())

    def _held(self) -> list[bytes]:
        """The lines that are to be shown now."""
        held, self.is_held = self.is_held, False
        return self.last if held else []

    def show(self, lines: list[bytes]) -> None:
        """Bytes as the rank wrote them, unless this process has replaced its streams by ones for text."""
        if not lines:
            return
        stream = sys.stdout if self.target == 1 else sys.stderr
        text = b"".join(b"[rank %d] %s\n" % (self.rank, line) for line in lines)
        stream.flush()
        if hasattr(stream, "buffer"):
            stream.buffer.write(text)
        else:
            stream.write(text.decode(errors="replace"))
        stream.flush()


class Output(threading.Thread):
    """Shows the output of ranks, each line with its rank.

    hold: what a rank writes to standard error from a traceback on is held for a second, so that the traceback with
    which a rank ends can be left out in favour of the launcher's report (`show_held`).
    """

    def __init__(self, hold: bool = False):
        super().__init__(name="output of ranks", daemon=True)
        self._hold = hold
        self._ends: dict[Connection, _Stream] = {}
        self._streams: dict[int, tuple[_Stream, _Stream]] = {}  # by rank
        self._until: float | None = None

    def pipes(self, rank: int) -> tuple[Connection, Connection]:
        """The descriptors for a rank's standard output and error."""
        mine, theirs = zip(*(Pipe(duplex=False) for _ in range(2)), strict=True)
        self._streams[rank] = tuple(_Stream(rank, target) for target in (1, 2))
        self._ends.update(zip(mine, self._streams[rank], strict=True))
        return theirs

    def last_traceback(self, rank: int) -> tuple[float, str] | None:
        """When the last traceback of a rank began, and what it has written to standard error from there on."""
        stream = self._streams[rank][1]
        text = _PREFIX.sub(b"", b"\n".join(stream.last)).decode(errors="replace")
        return (stream.since, text) if text else None

    def run(self) -> None:
        # The pipes end with the last process that holds them, which may be a process left behind by a rank.
        while self._ends and (self._until is None or time.monotonic() < self._until):
            for end in wait(list(self._ends), 0.1):
                chunk, stream = os.read(end.fileno(), 1 << 16), self._ends[end]
                *lines, stream.part = (stream.part + chunk).split(b"\n")
                if not chunk and stream.part:
                    lines = [stream.part]
                try:
                    if lines and stream.target == 1:
                        self._streams[stream.rank][1].show_held()
                    stream.take(lines, self._hold)
                except BrokenPipeError:  # nobody reads this process's output: the rank is to see that
                    chunk = b""
                if not chunk:
                    del self._ends[end]
                    end.close()
            for _, error in self._streams.values():
                if self._until is None and time.monotonic() > error.since + _HELD:
                    error.show_held()

    def finish(self) -> None:
        """All ranks have ended: reads the remaining output."""
        self._until = time.monotonic() + 1
        self.join()

    def show_held(self, but: int | None = None) -> None:
        """Shows what is held, except for the rank `but`. The thread has ended."""
        for rank, (_, error) in self._streams.items():
            if rank != but:
                error.show_held()
