"""haiscale.launch and haiscale.spawn: real processes, what they receive, and how they end."""

import ast
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from ranks import soon

import haiscale
from haiscale import launch

WORKERS = Path(__file__).parents[1] / "workers"


@pytest.fixture
def spawned(monkeypatch):
    """The worker's functions, importable by the ranks."""
    monkeypatch.syspath_prepend(WORKERS)
    import spawned

    return spawned


def gone(pid):
    """Whether a process has ended, after a short wait. Zombies count as ended."""
    for _ in range(200):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.02)
    return False


def until(path, seconds=20):
    """The content of a file, once it is there."""
    end = time.monotonic() + soon(seconds)
    while not path.exists() or not path.read_text():
        assert time.monotonic() < end, f"no {path.name} in {seconds} s"
        time.sleep(0.01)
    return path.read_text()


def run(folder, *arguments, **options):
    """Runs `python -m haiscale.launch` to its end."""
    command = [sys.executable, "-P", "-m", "haiscale.launch", *map(str, arguments)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, **options)


def test_spawn(spawned, tmp_path, capfd):
    haiscale.spawn(spawned.mark, 2, args=(str(tmp_path),))
    found = [ast.literal_eval((tmp_path / f"rank{rank}").read_text()) for rank in range(2)]
    for rank, (environment, _) in enumerate(found):
        assert environment["RANK"] == environment["LOCAL_RANK"] == str(rank)
        assert environment["WORLD_SIZE"] == environment["LOCAL_WORLD_SIZE"] == "2"
        assert environment["MASTER_ADDR"] == "127.0.0.1"
    assert len({environment["MASTER_PORT"] for environment, _ in found}) == 1
    cpus = [set(place) for _, place in found]
    allowed = os.sched_getaffinity(0)
    assert cpus[0] | cpus[1] <= allowed and (not cpus[0] & cpus[1] or len(allowed) < 4)
    out, error = capfd.readouterr()
    assert sorted(out.splitlines()) == ["[rank 0] out of 0", "[rank 1] out of 1"]
    assert sorted(error.splitlines()) == ["[rank 0] error of 0", "[rank 1] error of 1"]


def test_unbound_and_without_prefix(spawned, tmp_path, capfd):
    haiscale.spawn(spawned.mark, 1, args=(str(tmp_path),), bind_numa=False, prefix=False)
    assert set(ast.literal_eval((tmp_path / "rank0").read_text())[1]) == os.sched_getaffinity(0)
    assert capfd.readouterr().out == "out of 0\n"


@pytest.mark.parametrize("how", ["raises", "exits", "killed", "killed, seen late"])
def test_the_first_failure_is_told(spawned, tmp_path, how, monkeypatch):
    """Also the consequences on other ranks, and the case of a slow launcher that finds all ranks dead at once."""
    how, *late = how.split(", ")
    if late:
        monkeypatch.setattr(launch, "wait", lambda *_: time.sleep(3))
    with pytest.raises(launch.RankFailed) as failed:
        haiscale.spawn(spawned.fails, 3, args=(str(tmp_path), how, True))
    text = str(failed.value)
    assert failed.value.rank == 1 and failed.value.exitcode == {"raises": 1, "exits": 7, "killed": -9}[how]
    first, *rest = text.splitlines()
    assert first.startswith("rank 1 (pid ") and "was the first to fail" in first
    wanted = {
        "raises": 'raise ValueError("what was given\\nand more")',
        "exits": "it ended with exit code 7; what it printed is above",
        "killed": "it was killed by SIGKILL; dmesg may say why",
    }
    assert wanted[how] in text and "launch.py" not in text, text
    # In the order of failure, which varies.
    assert sorted(rest[-2:]) == [f"then rank {rank}: RuntimeError: rank 1 is gone" for rank in (0, 2)]


def test_whoever_does_not_end_is_ended(spawned, tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "LAST_WORDS", 0.2)
    with pytest.raises(launch.RankFailed, match="ValueError: what was given") as failed:
        haiscale.spawn(spawned.fails, 2, args=(str(tmp_path), "raises", False))
    assert str(failed.value).endswith("rank 0 was still running, and was killed")
    assert gone((tmp_path / "pid0").read_text())


def test_spawn_without_waiting(spawned, tmp_path):
    ranks = haiscale.spawn(spawned.waits, 2, args=(str(tmp_path), 0), join=False)
    until(tmp_path / "pid0")
    assert not ranks.join(timeout=0.01) and len(ranks.processes) == 2
    ranks.kill()
    assert all(gone((tmp_path / "pid0").read_text()) for process in ranks.processes)


def test_from_another_thread(spawned, tmp_path):
    """Signals cannot be caught there."""
    thread = threading.Thread(target=haiscale.spawn, args=(spawned.mark, 1, (str(tmp_path),)))
    thread.start()
    thread.join(30)
    assert (tmp_path / "rank0").exists()


@pytest.fixture
def started(tmp_path):
    """Starts a launcher of two waiting ranks, whose reaction to SIGTERM is an exit code. Still running ones are killed
    at the end."""
    launchers = []

    def start(answer, *options):
        script = tmp_path / "script.py"
        script.write_text(
            f"import os, sys; sys.path.insert(0, {str(WORKERS)!r}); import spawned\n"
            f"spawned.waits(int(os.environ['RANK']), {str(tmp_path)!r}, {answer!r})\n"
        )
        command = [sys.executable, "-P", "-m", "haiscale.launch", "--nproc", "2", *options, script]
        launchers.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        pids = [int(until(tmp_path / f"{name}{rank}")) for rank in range(2) for name in ("pid", "child")]
        return launchers[0], pids

    yield start
    for launcher in launchers:
        launcher.kill()
        launcher.communicate(timeout=10)


@pytest.mark.parametrize("answer", [0, 5])
def test_signals_are_passed_on_and_exit_codes_back(started, tmp_path, answer):
    launcher, pids = started(answer)
    launcher.send_signal(signal.SIGUSR1)
    assert [until(tmp_path / f"signal{rank}") for rank in range(2)] == [str(int(signal.SIGUSR1))] * 2
    launcher.send_signal(signal.SIGTERM)
    _, error = launcher.communicate(timeout=20)
    assert launcher.returncode == answer and all(map(gone, pids))
    assert not answer or "after SIGTERM was passed on to all" in error


def test_who_ignores_a_signal_is_killed_when_the_grace_is_over(started):
    launcher, pids = started(None, "--grace", "0.2")
    launcher.send_signal(signal.SIGTERM)
    launcher.communicate(timeout=20)
    assert launcher.returncode == 128 + signal.SIGKILL and all(map(gone, pids))


def test_nobody_outlives_a_killed_launcher(started):
    launcher, pids = started(None)
    launcher.kill()
    assert all(gone(pid) for pid in pids[::2]), "ranks; their own children are theirs to look after"
    for pid in pids[1::2]:
        os.kill(pid, signal.SIGKILL)


def test_a_program_and_its_arguments(tmp_path):
    (tmp_path / "train.py").write_text(
        "import sys, pickle\nclass A: pass\npickle.dumps(A())\nprint(__name__, sys.argv)\nsys.exit(len(sys.argv))"
    )
    done = run(tmp_path, "--nproc", 1, "train.py", "--lr", "1e-4")
    assert done.returncode == 3, done.stderr
    assert done.stdout == "[rank 0] __main__ ['train.py', '--lr', '1e-4']\n"
    assert "rank 0 (pid " in done.stderr and "it ended with exit code 3" in done.stderr


def test_a_module_and_its_traceback(tmp_path):
    (tmp_path / "broken.py").write_text("def step():\n    raise KeyError('loss')\nstep()\n")
    done = run(tmp_path, "--nproc", 1, "-m", "broken", env=os.environ | {"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert lines[1] == "Traceback (most recent call last):" and "broken.py" in lines[2], done.stderr
    assert lines[-1] == "KeyError: 'loss'"


BAD = {
    "--nproc 2 missing.py": "missing.py: no such file",
    "--nproc 0 .": "0 ranks are not accepted",
    "--nproc 1 --nnodes 2 .": "2 hosts need the address of the first",
    "--nproc 1 --nnodes 2 --node-rank 2 --master a:1 .": "node rank 2 of 2 hosts is not accepted",
    "--nproc 1 --master a .": "master 'a' is not accepted: give HOST:PORT",
}


@pytest.mark.parametrize("arguments", BAD)
def test_bad_arguments(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        launch.parse(arguments.split())
    assert stop.value.code == 2 and BAD[arguments] in capsys.readouterr().err


def test_environment_of_the_second_host():
    first, second = launch.environment(2, nnodes=3, node_rank=1, master="a:29500")
    assert (first["RANK"], second["RANK"], second["LOCAL_RANK"]) == ("2", "3", "1")
    assert second["WORLD_SIZE"] == "6" and second["MASTER_ADDR"] == "a" and second["MASTER_PORT"] == "29500"
    assert second["GROUP_RANK"] == "1"


def test_nothing_of_it_imports_torch():
    code = "import sys, haiscale.launch; haiscale.spawn, haiscale.pipeline; assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
