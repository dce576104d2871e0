"""A process that has imported torch and forks ranks, which saves them the imports. ranks.py uses it.

A rank is a separate process, without other ranks' state; it saves the seconds of the imports. Unlike separate
interpreters, forks share the hash seed, so `make test-all` does not fork.
"""

import atexit
import contextlib
import functools
import gc
import importlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

IMPORTED = (  # only torch's and third-party modules, which start no threads
    "torch", "torch.distributed.fsdp", "torch.distributed.pipelining", "torch.distributed.checkpoint",
    "transformers.models.gpt2.modeling_gpt2",
)  # fmt: skip
WANTED = not os.environ.get("FRESH_RANKS") and hasattr(os, "fork")


class Forked:
    """A rank, with the interface of subprocess.Popen."""

    def __init__(self, server, pid):
        self._server, self.pid = server, pid

    def poll(self):
        return self._server.code(self.pid)

    def wait(self, timeout):
        end = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(f"rank with pid {self.pid}", timeout)
            time.sleep(0.005)
        return self.poll()

    def send_signal(self, number):
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


class Server:
    """The forking process, seen from the process that uses it. `environment` is its ranks' environment."""

    def __init__(self):
        self._connection, theirs = multiprocessing.Pipe()
        self._codes, self.environment = {}, _environment()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-X", "faulthandler", __file__, str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},  # no driver state survives a fork
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()
        atexit.register(self._end)

    def _end(self):
        self._connection.close()
        self._process.wait()

    def fork(self, arguments, output) -> Forked:
        self._connection.send((arguments, str(output), os.getcwd()))
        while (pid := self._take()) is None:
            pass
        return Forked(self, pid)

    def code(self, pid):
        """The exit code of a rank, or None while it runs."""
        while self._connection.poll():
            self._take()
        return self._codes[pid]

    def _take(self):
        pid, code = self._connection.recv()
        self._codes[pid] = code
        return pid if code is None else None


def _environment():
    return {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}


@functools.cache
def _server(pid) -> Server:
    return Server()


def server() -> Server | None:
    """This process's server, or None if this process's environment has changed since it started."""
    if not WANTED:
        return None
    found = _server(os.getpid())
    return found if found.environment == _environment() else None


def serve(connection):
    """The server's loop. Returns in each rank with its arguments; in the server, None at the end."""
    for name in IMPORTED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.freeze()
    running = set()
    while True:
        if connection.poll(0.005 if running else None):
            try:
                arguments, output, folder = connection.recv()
            except EOFError:
                break
            pid = os.fork()
            if pid == 0:
                connection.close()
                _become_a_rank(output, folder)
                return arguments
            running.add(pid)
            connection.send((pid, None))
        for pid in list(running):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                running.remove(pid)
                connection.send((pid, os.waitstatus_to_exitcode(status)))
    for pid in running:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    return None


def _become_a_rank(output, folder):
    os.setsid()  # so that its children can be killed with it
    os.chdir(folder)
    with open(output, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    import ranks

    arguments = serve(multiprocessing.connection.Connection(int(sys.argv[1])))
    if arguments is not None:
        ranks._main(*arguments)
