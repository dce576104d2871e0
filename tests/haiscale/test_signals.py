"""checkpoint.on_signal with workers of DataLoaders, which get the signal, too."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import soon

from .test_launch import gone

WORKER = Path(__file__).parents[1] / "workers" / "asked.py"


def processes(pid: int) -> list[int]:
    """A process and all that it has started."""
    path = Path(f"/proc/{pid}/task/{pid}/children")
    children = path.read_text().split() if path.exists() else []
    return [pid, *(found for child in children for found in processes(int(child)))]


@pytest.fixture
def start(tmp_path):
    """Starts a program, by a launcher or alone. What still runs at the end is killed."""
    started = []

    def start(number, *names, by=()):
        command = [sys.executable, *by, WORKER, tmp_path, signal.Signals(number).name, *names]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        started.append(subprocess.Popen(command, **pipes, env=environment, start_new_session=True))
        return started[-1]

    yield start
    for process in started:
        for pid in processes(process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.communicate(timeout=10)


def running(process) -> list[int]:
    """Waits for a loader; the pids of its workers."""
    for line in process.stdout:
        if "running" in line:
            return json.loads(line[line.index("[", line.index("running")) :])
    raise AssertionError(process.stderr.read())


LOADERS = ["torch", "persistent", "hfrecord", "stateful", "hangs", "kept"]
SPAWNED = ["torch-spawn", "hfrecord-spawn", "stateful-spawn"]


@pytest.mark.parametrize(
    ("number", "names"),
    [
        (signal.SIGTERM, LOADERS),
        pytest.param(signal.SIGTERM, SPAWNED, marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, SPAWNED + LOADERS, marks=pytest.mark.slow),
        pytest.param(signal.SIGUSR1, SPAWNED + LOADERS, marks=pytest.mark.slow),
    ],
)
def test_workers_that_get_the_signal(start, tmp_path, number, names):
    """As from Slurm: each process gets it. The loader goes on, the rank saves, and then no worker is left, not even one
    that hangs: at the end of its loader, or of Python if the loader still exists (kept)."""
    process, workers = start(number, *names), []
    for name in names:
        mine = set(running(process)) - set(workers)
        assert len(mine) == 2
        workers += mine
        for pid in processes(process.pid):
            os.kill(pid, number)
        assert process.stdout.readline() == f"saved {3 * (name == 'kept')}\n", process.stderr.read()
        assert name == "kept" or all(map(gone, mine))
        assert any((tmp_path / name).iterdir())
    out, error = process.communicate(timeout=soon(20))
    assert (process.returncode, out, error) == (0, "", "") and all(map(gone, workers))


@pytest.mark.slow
def test_workers_of_a_rank_that_is_killed(start):
    process = start(signal.SIGTERM, "torch")
    workers = running(process)
    for pid in processes(process.pid):
        os.kill(pid, signal.SIGTERM)
    process.kill()
    assert all(map(gone, workers))


BY = {
    "launch": ["-m", "haiscale.launch", "--nproc", "2"],
    "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
}


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
@pytest.mark.parametrize("by", BY)
def test_the_launcher_gets_the_signal(start, tmp_path, by, number):
    more = ["--signals-to-handle", "SIGTERM,SIGUSR1"] if (by, number) == ("torchrun", signal.SIGUSR1) else []
    launcher = start(number, "torch", by=BY[by] + more)
    running(launcher)
    left = [running(launcher), processes(launcher.pid)][1]
    launcher.send_signal(number)
    out, error = launcher.communicate(timeout=soon(60))
    assert out.count("saved 0") == 2 and any((tmp_path / "torch").iterdir()), error
    assert len(left) >= 7 and all(map(gone, left)) and launcher.returncode == (by == "torchrun")
