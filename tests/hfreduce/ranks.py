"""Real rank processes for the tests of hfreduce: a function of a worker file, once per rank.

    results = ranks.run(WORKER, "reduces", 4, tmp_path, count=1000)

calls `reduces(rank, size, store, count=1000)` of the file WORKER in four concurrent processes; `store` is a path for
torch's FileStore. The results (JSON) are returned, by rank. Processes are forked from one that has imported torch
(forks.py). With `env` or `prefix` they are new interpreters, which take seconds to start: put many checks into one
function. Tests and workers alike `import ranks`.

`start` is for tests that interfere: it returns the processes at once. A worker reports progress with
`ranks.reached(store, name)`, and `Ranks.until(name)` waits until all, or some, ranks have reported it.
"""

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

WITHOUT_GPUS = {"CUDA_VISIBLE_DEVICES": ""}
OUTPUT = 12000  # characters of a failing rank's output that are shown, the last ones


def run(worker, function, size, folder, *, timeout=60, env=None, prefix=None, gpus=False, **arguments):
    """What each rank returned. AssertionError with the output of all ranks if one fails or the timeout expires.

    worker: the path of a Python file. folder: each call makes its own folder in it. env: added to this process's
    environment; a function of the rank, or a dict. prefix: put before each rank's command (nsenter, taskset); a
    function of the rank, or a list. gpus: whether ranks see the machine's GPUs; if torch sees a GPU, it
    expects more than comparisons on CPUs have.
    """
    with start(worker, function, size, folder, env=env, prefix=prefix, gpus=gpus, **arguments) as ranks:
        codes = ranks.wait(timeout, after_failure=10)
        assert not any(codes), f"exit codes {codes}\n{ranks.output()}"
        return ranks.results()


def soon(seconds):
    """The time limit for something that takes less than `seconds`: scaled up when processes wait for a core."""
    return seconds * max(1, os.getloadavg()[0] / os.cpu_count())


@contextlib.contextmanager
def start(worker, function, size, folder, *, env=None, prefix=None, gpus=False, **arguments):
    """The running processes, as `Ranks`. Those still running are killed at the end of the block."""
    ranks = Ranks(worker, function, size, Path(folder), env, prefix, gpus, arguments)
    try:
        yield ranks
    finally:
        ranks.kill()


class Ranks:
    def __init__(self, worker, function, size, folder, env, prefix, gpus, arguments):
        folder.mkdir(parents=True, exist_ok=True)
        number = sum(1 for path in folder.iterdir() if path.name.startswith("ranks"))
        self.folder = folder / f"ranks{number}"
        self.folder.mkdir()
        self.store = str(self.folder / "store")
        self.processes, self.size = [], size
        own = (str(worker), function, str(size), self.store)
        server = None
        if env is None and prefix is None and not gpus:
            import forks  # ranks do not have it on their path

            server = forks.server()
        for rank in range(size):
            each = (*own, str(rank), json.dumps(arguments))
            if server is not None:
                process = server.fork(each, self._path("output", rank))
            else:
                before = prefix(rank) if callable(prefix) else prefix or []
                own_env = env(rank) if callable(env) else env or {}
                process = self._interpreter(before, each, own_env if gpus else {**WITHOUT_GPUS, **own_env}, rank)
            self.processes.append(process)

    def _interpreter(self, before, arguments, env, rank):
        with open(self._path("output", rank), "w") as output:
            return subprocess.Popen(
                [*before, sys.executable, "-P", "-X", "faulthandler", __file__, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1", **env},
                start_new_session=True,  # so that its children can be killed with it
            )

    def _path(self, kind, rank):
        return Path(f"{self.store}.{kind}.{rank}")

    def wait(self, timeout, ranks=None, after_failure=None):
        """Waits for the given ranks (default: all) and returns their exit codes.

        AssertionError with all output when the timeout expires. after_failure: seconds that the others get once a rank
        has failed. Both are scaled up when processes wait for a core (`soon`).
        """
        ranks = range(self.size) if ranks is None else ranks
        begin = time.monotonic()
        deadline = begin + soon(timeout)
        while None in (codes := [self.processes[rank].poll() for rank in ranks]):
            if after_failure is not None and any(codes):
                deadline, after_failure = min(deadline, time.monotonic() + soon(after_failure)), None
            if (now := time.monotonic()) > deadline:
                output = self.output(stacks=True)
                raise AssertionError(f"still running after {now - begin:.0f} s, exit codes so far {codes}\n{output}")
            time.sleep(0.01)
        return codes

    def until(self, name, timeout=30, ranks=None):
        """Waits until the given ranks (default: all) have called `reached(store, name)`."""
        deadline = time.monotonic() + soon(timeout)
        for rank in range(self.size) if ranks is None else ranks:
            while not self._path(name, rank).exists():
                ended = self.processes[rank].poll() is not None and not self._path(name, rank).exists()
                assert not ended, f"rank {rank} ended before {name!r}\n{self.output()}"
                late = time.monotonic() > deadline
                assert not late, f"rank {rank} has not reached {name!r} in {timeout} s\n{self.output(stacks=True)}"
                time.sleep(0.002)

    def signal(self, rank, number):
        """Sends a signal to a rank's process, not to its children."""
        self.processes[rank].send_signal(number)

    def output(self, stacks=False):
        """What every rank printed. stacks: first prints the stacks of its threads, which ends the ranks."""
        if stacks:
            for process in self.processes:
                if process.poll() is None:
                    process.send_signal(signal.SIGCONT)
                    process.send_signal(signal.SIGABRT)
            for process in self.processes:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(2)
        texts = [self._path("output", rank).read_text(errors="replace") for rank in range(self.size)]
        return "\n".join(f"--- rank {rank}:\n{text[-OUTPUT:]}" for rank, text in enumerate(texts))

    def results(self):
        """What each rank's function returned; None for those that did not return."""
        paths = [self._path("result", rank) for rank in range(self.size)]
        return [json.loads(path.read_text()) if path.exists() else None for path in paths]

    def kill(self):
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):  # the session has the id of its leader
                os.killpg(process.pid, signal.SIGKILL)
            process.send_signal(signal.SIGKILL)  # one forked just now may not lead a session yet
            process.wait(10)


def reached(store, name, rank=None):
    """Tells the test that this rank has reached `name`."""
    Path(f"{store}.{name}.{_rank if rank is None else rank}").touch()


_rank = None  # this process's rank, if it is one


def loaded(path, name=None):
    """Loads a file as a module."""
    spec = importlib.util.spec_from_file_location(name or Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _main(worker, function, size, store, rank, arguments):
    global _rank
    _rank = int(rank)
    sys.modules["ranks"] = sys.modules[__name__]  # this file, for the worker to import
    sys.path[:0] = [str(Path(worker).parent), str(Path(__file__).parent)]
    result = getattr(loaded(worker), function)(_rank, int(size), store, **json.loads(arguments))
    Path(f"{store}.result.{rank}").write_text(json.dumps(result))


if __name__ == "__main__":
    _main(*sys.argv[1:])
