"""Starts ranks on this host, from a shell or from a program.

    python -m haiscale.launch --nproc 4 train.py --lr 1e-4          # or -m package.module
    haiscale.spawn(main, 4, args=(options,))                        # main(local_rank, options), four times

Each rank is a process with torchrun's environment (RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR,
MASTER_PORT), on its own cores near its GPU (`haiscale.binding`). A program runs as under torchrun, a function in a
process of Python's multiprocessing (`haiscale.processes`). Each line of output is prefixed with the rank. When one
fails, the others get a short time to report, and are then killed. The traceback of the first is shown, and the launcher
exits with its exit code. SIGTERM, SIGINT, SIGHUP, SIGUSR1 and SIGUSR2 are forwarded. If the launcher itself is killed,
Linux kills the ranks.
"""

import argparse
import contextlib
import multiprocessing
import os
import random
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing.connection import wait
from typing import Any

from haiscale.binding import Share, shares
from haiscale.coordinator import Coordinator
from haiscale.output import Output
from haiscale.processes import CONNECTION, Function, Program, Rank, options_of_python, signal_name

__all__ = ["RankFailed", "Ranks", "spawn"]

LAST_WORDS = 10.0  # seconds that the other ranks get to report after one has failed
_PASSED_ON = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2]
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class RankFailed(RuntimeError):
    """A rank ended with an exit code other than 0.

    Attributes:
        rank: The first such rank.
        exitcode: As in Python's multiprocessing: a negative value is the number of a signal.
        why: How it ended, in a line.
    """

    def __init__(self, message: str, rank: int, exitcode: int, why: str):
        super().__init__(message)
        self.rank, self.exitcode, self.why = rank, exitcode, why


def spawn(
    fn: Callable[..., object],
    nprocs: int,
    args: tuple[Any, ...] = (),
    bind_numa: bool = True,
    join: bool = True,
    *,
    prefix: bool = True,
    grace: float = 30.0,
) -> "Ranks | None":
    """Runs fn(local_rank, *args) in `nprocs` processes of this host.

    Args:
        fn: A function of a module, because it is pickled. A script calls spawn under `if __name__ == "__main__":`.
        nprocs: Number of processes.
        args: Are pickled, too.
        bind_numa: Whether each rank gets its own cores.
        join: Whether to wait until all have ended. Otherwise call `join` of the result.
        prefix: Whether each output line of a rank begins with its number and passes through this process. Otherwise
            ranks write to this process's output directly.
        grace: Seconds that ranks have to end after a forwarded signal.

    Returns:
        None, or without join the running `Ranks`.

    Raises:
        RankFailed: A rank failed. The message says which, when and why.
        ValueError: nprocs is less than one.
    """
    output = Output() if prefix else None
    ranks = Ranks(partial(Function, fn, args), environment(nprocs), output, bind_numa=bind_numa, grace=grace)
    if not join:
        return ranks
    ranks.join()
    return None


def environment(nprocs: int, nnodes: int = 1, node_rank: int = 0, master: str | None = None) -> list[dict[str, str]]:
    """The environment that torchrun would set for each rank of this host. master: "host:port" of rank 0, for several
    hosts."""
    if nprocs < 1:
        raise ValueError(f"{nprocs} ranks are not accepted: start at least 1")
    if not 0 <= node_rank < nnodes:
        raise ValueError(f"node rank {node_rank} of {nnodes} hosts is not accepted: they are numbered from 0")
    if nnodes > 1 and master is None:
        raise ValueError(f"{nnodes} hosts need the address of the first: give HOST:PORT, the same on all of them")
    address, _, port = (master or f"127.0.0.1:{_free_port()}").rpartition(":")
    if not address or not port.isdigit():
        raise ValueError(f"master {master!r} is not accepted: give HOST:PORT")
    shared = {"MASTER_ADDR": address, "MASTER_PORT": port, "WORLD_SIZE": nnodes * nprocs, "LOCAL_WORLD_SIZE": nprocs}
    shared |= {"GROUP_RANK": node_rank, "GROUP_WORLD_SIZE": nnodes}
    return [
        {key: str(value) for key, value in {**shared, "LOCAL_RANK": local, "RANK": node_rank * nprocs + local}.items()}
        for local in range(nprocs)
    ]


def spare_environments(options: argparse.Namespace) -> list[dict[str, str]]:
    """Those of spares: with numbers after the last rank's, and the local ranks of the first ones."""
    count, nproc = options.spare, options.nproc
    if count and not options.survive:
        raise ValueError(f"--spare {count} needs --survive: otherwise a rank that fails ends the job")
    if count < 0:
        raise ValueError(f"{count} spares are not accepted")
    if options.survive and options.nnodes > 1:
        raise ValueError("--survive is for the ranks of one host: several hosts are not supported")
    return [environment(nproc)[i % nproc] | {"RANK": str(nproc + i)} for i in range(count)]


def as_torchrun(variables: dict[str, str]) -> dict[str, str]:
    """Adds what torchrun also sets, as for a rendezvous at a given address, without restarts."""
    shared = {"ROLE_NAME": "default", "ROLE_RANK": variables["RANK"], "ROLE_WORLD_SIZE": variables["WORLD_SIZE"]}
    elastic = {"RUN_ID": "none", "RESTART_COUNT": "0", "MAX_RESTARTS": "0", "USE_AGENT_STORE": "False"}
    elastic["SIGNALS_TO_HANDLE"] = ",".join(number.name for number in _PASSED_ON)
    nccl = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")}
    return variables | shared | {f"TORCHELASTIC_{key}": value for key, value in elastic.items()} | nccl


def _free_port() -> int:
    """A free port below the range that Linux uses for outgoing connections."""
    while True:
        port = random.SystemRandom().randrange(15000, 32000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


class Ranks:
    """Running ranks of this host, created by `spawn`. `processes` has them in order."""

    def __init__(
        self,
        start: Callable[..., Rank],
        environments: Sequence[dict[str, str]],
        output: Output | None,
        *,
        bind_numa: bool = True,
        grace: float = 30.0,
        spares: int | None = None,
    ):
        """start(local rank, its environment, pipes for its output): a Rank. output: shows what they write. spares: how
        many of them, the last ones, wait for the death of another; None: a rank that fails ends all."""
        self._grace, self._asked, self._deadline, self._killed = grace, None, None, []
        size = len(environments) - (spares or 0)
        self._coordinator = None if spares is None else Coordinator(size, self._say, self._kill, self._place)
        self._ranks: list[Rank] = []
        self._output = output
        places = self._places = shares(size) if bind_numa and hasattr(os, "sched_setaffinity") else None
        self._begin = time.monotonic()
        try:
            for local, variables in enumerate(environments):
                self._start(start, local, variables, places and places[local % size])
        except BaseException:
            self.kill()
            raise
        if self._output:
            self._output.start()

    @property
    def processes(self) -> list[multiprocessing.process.BaseProcess]:
        """The processes of the ranks, in order."""
        return [rank.process for rank in self._ranks]

    @property
    def is_unused(self) -> bool:
        """Whether ranks may fail, and none has called haiscale.survive.run."""
        return self._coordinator is not None and not self._coordinator.was_asked

    def _start(self, start: Callable, local: int, variables: dict[str, str], place: Share | None) -> None:
        pipes = self._output.pipes(int(variables["RANK"])) if self._output else ()
        variables = {
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(place.threads if place else 1))
        } | variables
        ends = [*pipes]
        if self._coordinator:
            ends.append(self._coordinator.connect())
            variables[CONNECTION] = str(ends[-1].fileno())
        with _on(place):
            self._ranks.append(start(local, variables, pipes))
        for end in ends:
            end.close()

    def join(self, timeout: float | None = None) -> bool:
        """Waits until all ranks have ended. Signals are forwarded while the main thread is in this method.

        Args:
            timeout: Seconds after which it returns False; None: never.

        Raises:
            RankFailed: A rank failed.
            KeyboardInterrupt: SIGINT ended them.
        """
        until = None if timeout is None else time.monotonic() + timeout
        try:
            with self._passing_on():
                while running := [rank for rank in self._ranks if rank.process.exitcode is None]:
                    if until is not None and time.monotonic() > until:
                        return False
                    wakes = [wake for rank in running for wake in rank.wakes]
                    wait(wakes + (self._coordinator.connections if self._coordinator else []), 0.1)
                    self._look()
        except BaseException:
            self.kill()
            self._show_held()
            raise
        self._end_output()
        self._look()
        failed = [rank for rank in self._ranks if rank.process.exitcode and not self._survived(rank)]
        if failed and self._asked != signal.SIGINT:
            raise self._failure(failed)
        self._show_held()
        if failed:
            raise KeyboardInterrupt
        return True

    def _look(self) -> None:
        for rank in self._ranks:
            rank.look()
        if self._coordinator:
            self._coordinator.is_asked = self._asked is not None
        if self._coordinator and self._coordinator.look(self._ranks) and self._asked is None:
            return
        now, failed = time.monotonic(), any(rank.failed_at is not None for rank in self._ranks)
        if failed and self._deadline is None:
            self._deadline = now + LAST_WORDS
        if self._deadline is not None and now > self._deadline:
            self.kill()

    def kill(self) -> None:
        """Kills all ranks at once, with the processes that they have started."""
        for rank in self._ranks:
            if rank.process.exitcode is None:
                self._killed.append(rank.number)
                self._kill(rank)
        for rank in self._ranks:
            rank.process.join(10)
        self._end_output()

    def _kill(self, rank: Rank) -> None:
        """Kills a rank, if it runs, and the processes that it has started."""
        # Each rank leads a session, unless it has just started.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(rank.process.pid, signal.SIGKILL)
        if rank.process.exitcode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank.process.pid, signal.SIGKILL)

    def _place(self, rank: Rank, local: int) -> None:
        """Moves a spare, with its threads, to the cores of the rank that it replaces."""
        if self._places:
            for thread in os.listdir(f"/proc/{rank.process.pid}/task"):
                with contextlib.suppress(ProcessLookupError):
                    os.sched_setaffinity(int(thread), self._places[local].cpus)

    def _survived(self, rank: Rank) -> bool:
        return self._coordinator is not None and self._coordinator.survived(rank)

    def _say(self, line: str) -> None:
        print(f"haiscale.survive: {line}", file=sys.stderr, flush=True)

    def _end_output(self) -> None:
        if self._output and self._output.is_alive():
            self._output.finish()

    def _show_held(self, but: int | None = None) -> None:
        if self._output:
            self._output.show_held(but)

    def _failure(self, failed: list[Rank]) -> RankFailed:
        # Ranks that we killed ourselves are not the cause.
        own = [rank for rank in failed if rank.number not in self._killed or rank.traceback] or failed
        first, *others = sorted(own, key=lambda rank: rank.failed_at or 0)
        self._show_held(but=first.number if first.is_printed else None)
        after = (first.failed_at or self._begin) - self._begin
        asked = f" after {signal_name(self._asked)} was passed on to all" if self._asked else ""
        who = f"rank {first.number} (pid {first.process.pid})"
        lines = [f"{who} was the first to fail, {after:.1f} s after the start{asked}:"]
        lines += [first.traceback.rstrip() or f"it {first.fate()}; what it printed is above"]
        lines += [f"then rank {rank.number}: {rank.fate()}" for rank in others]
        lines += [f"rank {rank.number} was still running, and was killed" for rank in failed if rank not in own]
        return RankFailed("\n".join(lines), first.number, first.process.exitcode, first.fate())

    @contextlib.contextmanager
    def _passing_on(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._pass_on) for number in _PASSED_ON}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _pass_on(self, number: int, frame) -> None:
        if number in _ENDING:
            if self._asked is not None:  # a second signal means: do not wait
                self._deadline = 0.0
                return
            self._asked, self._deadline = number, time.monotonic() + self._grace
        for rank in self._ranks:
            if rank.process.exitcode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank.process.pid, number)


@contextlib.contextmanager
def _on(place: Share | None) -> Iterator[None]:
    """Binds this thread, so that processes started meanwhile inherit the binding before they import anything."""
    if place is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, place.cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def parse(argv=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m haiscale.launch", description="Starts ranks on this host.")
    add = parser.add_argument
    add("--nproc", type=int, required=True, metavar="N", help="ranks on this host")
    add("--nnodes", type=int, default=1, metavar="N", help="hosts; the same command runs on each of them")
    add("--node-rank", type=int, default=0, metavar="I", help="the number of this host, from 0")
    add("--master", metavar="HOST:PORT", help="where rank 0 listens; needed with several hosts")
    add("--grace", type=float, default=30.0, metavar="SECONDS", help="to exit after SIGTERM or SIGINT (default: 30)")
    add("--survive", action="store_true", help="go on without ranks that fail; the program calls haiscale.survive.run")
    add("--spare", type=int, default=0, metavar="N", help="processes that wait to replace failed ranks")
    add("--no-bind", dest="bind", action="store_false", help="do not bind ranks to cores")
    add("--no-prefix", dest="prefix", action="store_false", help="do not prefix the output of ranks")
    add("-m", dest="module", action="store_true", help="PROGRAM is the name of a module")
    add("program", metavar="PROGRAM")
    add("arguments", nargs=argparse.REMAINDER, metavar="...", help="arguments of the program")
    options = parser.parse_args(argv)
    if not options.module and not os.path.exists(options.program):
        parser.error(f"{options.program}: no such file")
    try:
        found = environment(options.nproc, options.nnodes, options.node_rank, options.master)
        found += spare_environments(options)
        options.environment = [as_torchrun(variables) for variables in found]
    except ValueError as error:
        parser.error(str(error))
    return options


def main(argv=None) -> int:
    options = parse(argv)
    output, ranks = Output(hold=True) if options.prefix else None, None
    command = [sys.executable, *options_of_python(), "-u", *(["-m"] if options.module else []), options.program]
    try:
        with tempfile.TemporaryDirectory(prefix="haiscale_launch_") as folder:
            start = partial(Program, command + options.arguments, folder, output)
            spares = options.spare if options.survive else None
            ranks = Ranks(
                start, options.environment, output, bind_numa=options.bind, grace=options.grace, spares=spares
            )
            ranks.join()
    except RankFailed as failed:
        print(failed, file=sys.stderr)
        return failed.exitcode if failed.exitcode > 0 else 128 - failed.exitcode
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    finally:
        if ranks and ranks.is_unused:
            print("--survive had no effect: the program has not called haiscale.survive.run", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
