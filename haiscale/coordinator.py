"""The launcher's side of `haiscale.survive`: which processes are alive, and which of them are the next generation.

A generation is a world of ranks, with process groups and a store of its own. It ends with the first fault: one of its
processes has ended, or has reported an error of communication. The others hear of it, and report how many steps they
have finished. Once all living ones have, they are the next generation. Each seat keeps its place in the order of ranks:
that of an ended process goes to a spare, or is left empty. A process that does not report in time is killed.

    starting --report--> ready --begin--> running --report--> ready ... ready --end, stop--> (the program goes on)
    any of them --its process ends--> ended

A process has one connection. It sends a Report, the error of which it is about to end, or (generation, number, request
to the store, arguments). It gets ("begin", Generation), ("over", reason), ("store", (number, answer)), ("end", ""), or
("stop", reason). What belongs to an older generation is dropped.
"""

import contextlib
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from haiscale.processes import Rank

_NAMED = 0.5  # seconds that a process has to report after an error has named it as missing
_MISSING = re.compile(r"waiting for (rank .*)")


@dataclass
class Report:
    """What a process says when it has no work. step: the number of finished steps; None: its state is not whole."""

    step: int | None
    why: str = ""  # the error that ended the generation
    done: bool = False  # it has come to the end of training
    least: int = 1
    attempts: int = 3
    timeout: float = 300.0


@dataclass
class Generation:
    """What a process gets: its place in the next generation."""

    number: int
    rank: int
    size: int
    seat: int  # the local rank
    step: int  # finished steps, with which it begins
    source: int  # a rank that has finished them
    shares: bool  # whether ranks need the state of `source`
    reason: str = ""  # why there is a new generation


@dataclass
class _Member:
    number: int
    connection: Connection
    state: str = "starting"
    report: Report | None = None
    why: str = ""  # it ends
    since: float = 0.0  # when it was ready
    is_lost: bool = False  # its process ended before training did
    pending: tuple | None = None  # a request to the store that cannot be answered yet
    rank: Rank | None = field(default=None, repr=False)

    @property
    def name(self) -> str:
        return f"rank {self.number}" + (f" (pid {self.rank.process.pid})" if self.rank else "")

    def send(self, *message: Any) -> None:
        with contextlib.suppress(OSError):  # it has ended, which `look` will see
            self.connection.send(message)


class Coordinator:
    """size: ranks; further processes are spares. say: shows a line. kill: ends a process, and those that it started.
    place: moves a process to the cores of a seat."""

    def __init__(
        self,
        size: int,
        say: Callable[[str], None],
        kill: Callable[[Rank], None],
        place: Callable[[Rank, int], None],
    ):
        self._size, self._say, self._kill, self._place = size, say, kill, place
        self._members: list[_Member] = []
        self._seats: list[_Member | None] = []
        self._generation, self._why = -1, ""
        self._since: float | None = None  # when the first fault of this generation was seen
        self._report, self._ends = "", []  # what the first process reported; what is known about those that ended
        self._history: list[str] = []
        self._best, self._fruitless = -1, 0  # finished steps; successive generations that finished none
        self._store: dict[str, bytes] = {}
        self.is_asked = False  # to end: no other generation begins
        self.state = "starting"  # running, completed, stopped: nothing more is done

    # What haiscale.launch calls

    def connect(self) -> Connection:
        """The end of the connection for the next process."""
        mine, theirs = Pipe()
        self._members.append(_Member(len(self._members), mine))
        return theirs

    @property
    def connections(self) -> list[Connection]:
        """What to wait for."""
        return [member.connection for member in self._members if not member.connection.closed]

    @property
    def was_asked(self) -> bool:
        """Whether a process has called `survive.run`."""
        return any(member.report for member in self._members)

    def survived(self, rank: Rank) -> bool:
        """Whether training has come to its end without this rank, which ended before."""
        return self.state == "completed" and self._members[rank.number].is_lost

    def look(self, ranks: Iterable[Rank]) -> bool:
        """Handles what has happened. Whether the processes that have ended are no reason to end the others."""
        for member, rank in zip(self._members, ranks, strict=True):
            member.rank = rank
        # The dead first: what others report follows from that.
        ended = [m for m in self._members if m.state != "ended" and m.rank.process.exitcode is not None]
        for member in ended + [m for m in self._members if m not in ended]:
            while not member.connection.closed and member.connection.poll():
                self._receive(member)
            if member in ended:
                self._ended(member)
        if self.state in ("starting", "running"):
            self._advance()
        return self.state in ("running", "completed")

    # Processes

    def _receive(self, member: _Member) -> None:
        try:
            message = member.connection.recv()
        except (EOFError, OSError):
            member.connection.close()  # its process ends; `look` will see that
            return
        if isinstance(message, str):  # the error of which it is about to end
            member.why = f"failed: {message}"
        elif isinstance(message, Report):
            member.state, member.report, member.pending = "ready", message, None
            member.since = time.monotonic()
            if self.state in ("completed", "stopped"):
                self._dismiss(member)
            elif message.why and self._since is None:
                self._report = f"{member.name} reported {message.why}"
                self._fault(self._report)
        elif member.state == "running" and message[0] == self._generation and self._since is None:
            member.pending = message
            self._answer()

    def _ended(self, member: _Member) -> None:
        is_spare = member.number >= self._size and member not in self._seats
        member.state, member.pending = "ended", None
        member.connection.close()
        if self.state in ("completed", "stopped") or (self.is_asked and member.rank.process.exitcode == 0):
            return
        member.is_lost = True
        self._kill(member.rank)  # what it started
        why = f"{member.name} {member.why or member.rank.fate()}"
        if is_spare:
            self._say(f"a spare has ended: {why}")
        else:
            self._ends.append(why)
            self._fault(why)

    def _fault(self, why: str) -> None:
        if self._since is None:
            self._since = time.monotonic()
            for member in self._members:
                if member.state == "running":
                    member.send("over", why)

    @property
    def _reason(self) -> str:
        return "; ".join(self._ends) or self._report

    # Generations

    def _advance(self) -> None:
        seats = self._seats if self._generation >= 0 else self._members[: self._size]
        faulty = self._since is not None
        if faulty and self._generation < 0:  # as without --survive
            return self._end("stopped", "a rank has failed before training began")
        if faulty and self.is_asked:
            return self._end("stopped", "a signal asked for it")
        living = [member for member in seats if member is not None and member.state != "ended"]
        if any(member.state != "ready" for member in living):
            return self._hurry(living)
        reports = [member.report for member in living]
        if living and not faulty and all(report.done for report in reports):
            return self._end("completed", "")
        if self._generation >= 0 and not faulty:
            return None
        return self._begin(seats)

    def _hurry(self, living: list[_Member]) -> None:
        """Kills those that let the others wait for too long."""
        ready = [member for member in living if member.state == "ready"]
        since, event = self._since, "the fault"
        if since is None:
            if self._generation < 0 or not ready:
                return
            since, event = min(member.since for member in ready), "another rank was done"
        missing = " ".join(line for member in ready for line in _MISSING.findall(member.report.why))
        for member in living:
            if member.state == "running":
                named = f"pid {member.rank.process.pid})" in missing
                after = _NAMED if named else member.report.timeout
                if time.monotonic() - since > after:
                    member.why = f"did not answer, and was killed {after:.1f} s after {event}"
                    self._kill(member.rank)

    def _begin(self, seats: list[_Member | None]) -> None:
        spares = iter([m for m in self._members if m.state == "ready" and m not in seats])
        filled = [m if m is not None and m.state != "ended" else next(spares, None) for m in seats]
        ranks = [member for member in filled if member is not None]
        for member in ranks:
            if self._generation >= 0 and member not in self._seats:
                member.report.step = None  # a spare has no state yet
        steps = [member.report.step for member in ranks if member.report.step is not None]
        if why := self._why_not(ranks, steps):
            return self._end("stopped", why)
        step, reason = max(steps), self._reason
        if reason:
            self._announce(len(ranks), step)
        self._since, self._report, self._ends, self._store = None, "", [], {}
        self._seats, self._generation, self.state = filled, self._generation + 1, "running"
        source = next(rank for rank, member in enumerate(ranks) if member.report.step == step)
        shares = any(member.report.step != step for member in ranks)
        for rank, member in enumerate(ranks):
            seat = filled.index(member)
            if seat != member.number:
                self._place(member.rank, seat)
            member.state = "running"
            own = Generation(self._generation, rank, len(ranks), seat, step, source, shares, reason)
            member.send("begin", own)
        return None

    def _announce(self, count: int, step: int) -> None:
        if self._report:
            self._say(self._report)
        after = (time.monotonic() - self._since) * 1000
        begins = f"generation {self._generation + 1} begins at step {step} with {count} of {self._size} ranks"
        self._say(f"{'; '.join(self._ends) or 'nobody has ended'}; {begins}, {after:.0f} ms after the fault")
        self._history.append(self._reason)

    def _why_not(self, ranks: list[_Member], steps: list[int]) -> str:
        """Why there cannot be another generation."""
        why = ""
        if not ranks:
            why = "no rank is left"
        elif len(ranks) < max(m.report.least for m in ranks):
            why = f"{len(ranks)} of {self._size} ranks are left, and least={max(m.report.least for m in ranks)}"
        elif not steps:
            why = "no rank is left that has the whole state"
        else:
            self._fruitless = 0 if max(steps) > self._best else self._fruitless + 1
            self._best = max(steps)
            attempts = min(member.report.attempts for member in ranks)
            if self._fruitless >= attempts:
                why = f"{attempts} generations in a row have finished no step, and attempts={attempts}"
        return why

    def _end(self, state: str, why: str) -> None:
        self.state, self._why = state, why
        if why and self.was_asked:
            self._say("; ".join([f"training ends: {why}", *self._history, self._reason]))
        for member in self._members:
            if member.state == "ready":
                self._dismiss(member)

    def _dismiss(self, member: _Member) -> None:
        member.send("end" if self.state == "completed" else "stop", self._why)

    # The store of the current generation

    def _answer(self) -> None:
        """Answers the requests that can be answered now; each answer may be what others wait for."""
        again = True
        while again:
            again = False
            for member in self._members:
                if member.pending is not None:
                    _, number, name, *arguments = member.pending
                    done, value = getattr(self, f"_store_{name}")(*arguments)
                    if done:
                        member.pending, again = None, True
                        member.send("store", (number, value))

    def _store_set(self, key: str, value: bytes) -> tuple[bool, Any]:
        self._store[key] = value
        return True, None

    def _store_get(self, key: str) -> tuple[bool, Any]:
        return key in self._store, self._store.get(key)

    def _store_wait(self, keys: list[str]) -> tuple[bool, Any]:
        return all(key in self._store for key in keys), None

    def _store_check(self, keys: list[str]) -> tuple[bool, Any]:
        return True, all(key in self._store for key in keys)

    def _store_add(self, key: str, amount: int) -> tuple[bool, Any]:
        self._store[key] = str(int(self._store.get(key, b"0")) + amount).encode()
        return True, int(self._store[key])

    def _store_delete(self, key: str) -> tuple[bool, Any]:
        return True, self._store.pop(key, None) is not None

    def _store_compare(self, key: str, expected: bytes, desired: bytes) -> tuple[bool, Any]:
        if self._store.get(key, b"") == expected:
            self._store[key] = desired
        return True, self._store.get(key, expected)

    def _store_count(self) -> tuple[bool, Any]:
        return True, len(self._store)
