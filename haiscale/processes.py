"""The process of a rank, seen from its parent: a function that multiprocessing runs, or a program.

Both kinds report how they failed. A function sends the error that it raised. A program is as under torchrun: torch's
`@record` writes its error to the file TORCHELASTIC_ERROR_FILE, and all others stand at the end of its standard error.
"""

import contextlib
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from string import Template

from haiscale import _start
from haiscale.output import Output

CONNECTION = "HAISCALE_SURVIVE"  # in a rank's environment: the descriptor of its connection to the launcher
_ENDS = (1, -signal.SIGINT, -signal.SIGABRT, -signal.SIGSEGV)  # exit codes of a program that has printed a traceback
_EXIT = 30.0  # seconds from that to its end
_RUNPY = re.compile(r'^  File "(<frozen runpy>|[^"\n]*runpy\.py)", line \d+, in _run_.*\n(    .*\n)*', re.M)


class Rank:
    """One process. `process` has the attributes of Python's process objects; `wakes` are what to wait for."""

    def __init__(self, number: int, process):
        self.number, self.process = number, process
        self.seen_at = time.monotonic()  # alive
        self.failed_at: float | None = None
        self.error = ""  # in one line
        self.traceback = ""
        self.is_printed = False  # the traceback is part of the output

    def listen(self) -> None:
        """Reads how it failed, if it has reported that."""

    def look(self) -> None:
        """Records when it was last seen alive, if it is dead and has not reported its failure itself.

        The time of its death is unknown. Ranks that failed later may have failed because of it, so it comes before
        them.
        """
        now = time.monotonic()
        self.listen()
        if self.process.exitcode is None:
            self.seen_at = now
        elif self.process.exitcode and self.failed_at is None:
            self.failed_at = self.seen_at

    def fate(self) -> str:
        code = self.process.exitcode
        if self.error:
            return self.error
        if code >= 0:
            return f"ended with exit code {code}"
        return f"was killed by {signal_name(-code)}" + ("; dmesg may say why" if code == -signal.SIGKILL else "")


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # those without a name
        return f"signal {number}"


# Functions


class Function(Rank):
    """A rank that runs fn(local_rank, *args) in a process with the start method "spawn"."""

    def __init__(self, fn: Callable, args: tuple, local: int, variables: dict[str, str], pipes: tuple):
        self._report, theirs = multiprocessing.Pipe(duplex=False)
        number = int(variables["RANK"])
        process = multiprocessing.get_context("spawn").Process(
            target=_run, args=(fn, args, local, variables, theirs, pipes, os.getpid()), name=f"rank {number}"
        )
        process.start()
        theirs.close()
        super().__init__(number, process)

    @property
    def wakes(self) -> list:
        return [self.process.sentinel] + ([] if self.error else [self._report])

    def listen(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while self._report.poll():
                self.failed_at, self.error, self.traceback = self._report.recv()


def _run(fn, args, local: int, variables: dict, report: Connection, pipes: tuple, parent: int) -> None:
    """A rank's process."""
    _start.die_with(parent)
    os.setsid()  # signals from the terminal go to the parent, which forwards them
    os.environ.update(variables)
    for pipe, stream in zip(pipes, (sys.stdout, sys.stderr), strict=False):
        os.dup2(pipe.fileno(), stream.fileno())
        stream.reconfigure(line_buffering=True)
        pipe.close()
    if "torch" in sys.modules:  # unpickling fn has imported it before the environment was set
        sys.modules["torch"].set_num_threads(int(variables["OMP_NUM_THREADS"]))
    try:
        fn(local, *args)
    except Exception as error:
        text = "".join(traceback.format_exception(type(error), error, _own_frames(error)))
        report.send((time.monotonic(), f"{type(error).__name__}: {error}".splitlines()[0], text))
        sys.exit(1)
    except SystemExit as end:
        if end.code not in (None, 0):
            report.send((time.monotonic(), "", ""))  # shutting down the interpreter takes a while
        raise
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


def _own_frames(error: BaseException):
    """The traceback from the user's first frame on."""
    frames = error.__traceback__
    while frames.tb_next and frames.tb_frame.f_globals.get("__name__") == __name__:
        frames = frames.tb_next
    return frames


# Programs


class _Process(subprocess.Popen):
    """With the attributes of Python's process objects."""

    exitcode = property(subprocess.Popen.poll)

    def join(self, timeout: float | None = None) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(timeout)


class Program(Rank):
    """A rank that runs a command, as torchrun would: with this process's standard input, in a session of its own."""

    def __init__(
        self, command: list[str], folder: str, output: Output | None, local: int, variables: dict, pipes: tuple
    ):
        number = int(variables["RANK"])
        command = [Template(argument).safe_substitute(local_rank=local) for argument in command]  # torchrun's macro
        self._errors, self._output = Path(folder, f"{number}.json"), output
        out, error = pipes or (None, None)
        start = [sys.executable, "-S", "-s", _start.__file__, str(os.getpid())]
        environment = os.environ | variables | {"TORCHELASTIC_ERROR_FILE": str(self._errors)}
        connections = [int(variables[CONNECTION])] if CONNECTION in variables else []
        process = _Process(
            start + command, env=environment, stdout=out, stderr=error, start_new_session=True, pass_fds=connections
        )
        super().__init__(number, process)
        try:
            self.wakes = [os.pidfd_open(process.pid)]
        except (AttributeError, OSError):  # not Linux, or an old one: the caller looks again after a short time
            self.wakes = []

    def listen(self) -> None:
        if self.process.exitcode and not self._read_errors() and self.process.exitcode in _ENDS:
            self._read_output()

    def _read_errors(self) -> bool:
        try:
            found = json.loads(self._errors.read_text())["message"]
            written = self._errors.stat().st_mtime
            text, more = (found["message"], found["extraInfo"]) if isinstance(found, dict) else (found, {})
        except (OSError, ValueError, LookupError, TypeError):  # there is none, or it is incomplete
            return False
        self.error, self.traceback = text.partition("\n")[0], more.get("py_callstack", text)
        self.failed_at = written - time.time() + time.monotonic()  # the file itself says it in whole seconds
        return True

    def _read_output(self) -> None:
        since, text = (self._output and self._output.last_traceback(self.number)) or (0.0, "")
        if not text or since < self.seen_at - _EXIT:
            return
        self.failed_at, self.traceback, self.is_printed = since, _RUNPY.sub("", text), True
        last = text.partition("\nException ignored")[0].rpartition("Traceback (most recent call last):\n")[2]
        self.error = next((line for line in last.splitlines() if not line.startswith(" ")), "")


def options_of_python() -> list[str]:
    """The options that this Python was started with, up to its program."""
    found, given = [], iter(sys.orig_argv[1:])
    for argument in given:
        plain, last, value = re.fullmatch(r"(-[^-WXcm]*|)(.?)(.*)", argument, re.S).groups()
        if not plain or last in ("c", "m") or argument == "-":
            return found + [plain] * (len(plain) > 1)
        found.append(argument)
        if (last in ("W", "X") and not value) or argument == "--check-hash-based-pycs":
            found.append(next(given))
    return found
