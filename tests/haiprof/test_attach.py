"""`attach`: to runs started with HAIPROF=idle, with HAIPROF=1, and without either."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import ranks

from haiprof import __main__ as command
from haiprof import attach, control, operators, record, trace, verdict

TRAINS = """
import sys, threading, time, pathlib, torch
from torch import nn
torch.set_num_threads(1)
folder = pathlib.Path(sys.argv[1])
model = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

def a_slow_function():
    while not (folder / "stop").exists():
        model(torch.randn(8, 32)).square().mean().backward()
        time.sleep(0.02)
        optimizer.step(); optimizer.zero_grad()
        names = sorted(thread.name for thread in threading.enumerate())
        (folder / "new").write_text(chr(10).join(names))
        (folder / "new").replace(folder / "threads")

a_slow_function()
print("weights", [bool(p.isfinite().all()) for p in model.parameters()])
"""


@pytest.fixture
def training(tmp_path):
    """training(mode) -> a process that trains until the test ends. It must then exit cleanly, without output."""
    running = []

    def start(mode):
        env = {name: own for name, own in os.environ.items() if not name.startswith("HAIPROF")}
        env["PYTHONWARNINGS"] = "ignore"  # torch.profiler's warnings vary with its version
        env |= {"HAIPROF": mode, "HAIPROF_DIR": str(tmp_path / "run")} if mode else {}
        (tmp_path / "own").mkdir()
        process = subprocess.Popen(
            [sys.executable, "-c", TRAINS, str(tmp_path / "own")],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        running.append(process)
        deadline = time.monotonic() + ranks.soon(60)
        while not (tmp_path / "own" / "threads").exists():
            assert process.poll() is None and time.monotonic() < deadline, process.stderr.read()
            time.sleep(0.02)
        return process

    yield start
    (tmp_path / "own" / "stop").touch()
    for process in running:
        out, err = process.communicate(timeout=60)
        # Ignores the messages of torch.profiler and its C++ libraries.
        own = re.compile(r"rofil|^(ERROR|WARNING|INFO):\d|^\[W\d")
        said = [line for line in err.splitlines() if line and ("haiprof" in line or not own.search(line))]
        assert process.returncode == 0 and out.startswith("weights") and not said, err


def threads(tmp_path):
    """Names of the process's threads, as it sees them at least one step from now."""
    for _ in range(2):
        (tmp_path / "own" / "threads").unlink()
        while not (tmp_path / "own" / "threads").exists():
            time.sleep(0.005)
    return (tmp_path / "own" / "threads").read_text().split("\n")


def test_an_idle_run(tmp_path, training):
    process = training("idle")
    before = threads(tmp_path)
    assert before == ["MainThread", "haiprof socket"], "it waits, and does nothing else"
    assert [path.name for path in (tmp_path / "run").iterdir()] == [f"{process.pid}.sock"]
    out = tmp_path / "out"
    asked = ["attach", str(process.pid), "--steps", "5", "--operators", "--stacks", "--memory", "--out", str(out)]
    assert command.main(asked) == 0
    assert threads(tmp_path) == before, "no thread is left"

    (run,) = record.load(out)
    assert run["run"]["pid"] == process.pid and run["end"][0]["steps"] >= 5
    names = [row[0] for row in run["operators"][0]["rows"]]
    assert "aten::addmm" in names and len(names) <= operators.TOP
    assert run["operators"][0]["flops"] == 2 * 8 * (2 * 32 * 32 + 3 * 32)
    stacks = next(out.glob("*.stacks.txt")).read_text()
    assert "a_slow_function" in stacks and "a_slow_function" in run["stacks"][0]["rows"][0][0]
    (file,) = out.glob("*.operators.json.gz")
    assert trace.read(file)["distributedInfo"] == {"rank": 0, "world_size": 1}
    assert any("allocator snapshot" in line["why"] for line in run["missing"])

    again = tmp_path / "again"  # this time by folder, without options
    assert attach.attach(str(tmp_path / "run"), str(again), 3, 30.0, []) == str(again)
    (rank,) = verdict.judge(record.load(again)).ranks
    assert rank.steps >= 3 and rank.phases["other"] > 0.015, "the slow function is in no phase"
    assert threads(tmp_path) == before


def test_a_run_that_is_profiled_anyway(tmp_path, training):
    """It continues to be profiled, into its own files."""
    process = training("1")
    folder = attach.attach(str(process.pid), str(tmp_path / "elsewhere"), 3, 30.0, ["stacks"])
    assert folder == str(tmp_path / "run") and not (tmp_path / "elsewhere").exists()
    (run,) = record.load(folder)
    assert run["stacks"] and Path(f"{run['stem']}.trace.json.gz").exists()
    assert "haiprof" in threads(tmp_path)
    (path,) = control.sockets(folder)
    assert control.ask(path, {"do": "info"})["running"]
    with pytest.raises(RuntimeError, match="steps=0"):
        control.ask(path, {"do": "deep", "steps": 0, "what": ["stacks"], "seconds": 1})
    with pytest.raises(RuntimeError, match="steps less than asked for came in 0 s"):
        control.ask(path, {"do": "deep", "steps": 10**6, "what": ["stacks"], "seconds": 0.2})


def test_a_run_that_knows_of_nothing(tmp_path, training, capsys):
    process = training("")
    before = threads(tmp_path)
    begin = time.monotonic()
    out = attach.attach(str(process.pid), str(tmp_path / "out"), 5, 30.0, [])
    taken = time.monotonic() - begin
    assert threads(tmp_path) == before == ["MainThread"]
    (run,) = record.load(out)
    if "stacks" in run["missing"][0]["why"]:
        pytest.skip(run["missing"][0]["why"]["stacks"])  # no py-spy, or no permission to ptrace
    assert "a_slow_function" in next(Path(out).glob("*.stacks.txt")).read_text()
    told = capsys.readouterr()
    assert "a_slow_function" in told.out
    assert f"process {process.pid} was started without haiprof" in told.err and "HAIPROF=idle" in told.err
    assert len(run["counters"]) >= 5 and run["counters"][-1]["process.cpu"] > 0
    assert "HAIPROF=1" in run["missing"][0]["why"]["phases"]
    assert taken < ranks.soon(3)
    (finding,) = verdict.judge([run]).findings
    assert finding.kind == "nothing" and "HAIPROF=1" in finding.text and "optimizer" not in finding.text


def test_a_process_that_does_not_answer_in_time(tmp_path, monkeypatch, capsys):
    """What it wrote before is still reported."""

    def ask(path, request, timeout=10.0):
        if request["do"] == "start":
            return {"folder": str(tmp_path)}
        raise TimeoutError("timed out")

    (tmp_path / "7.sock").touch()
    monkeypatch.setattr(control, "sockets", lambda target: [tmp_path / "7.sock"])
    monkeypatch.setattr(control, "ask", ask)
    assert attach.attach(str(tmp_path), str(tmp_path), 3, 1.0, []) == str(tmp_path)
    told = capsys.readouterr().err
    assert "process 7: no answer to 'wait' after 61 s" in told and "'stop' after 60 s" in told


def test_who_is_not_there(tmp_path, capsys):
    assert command.main(["attach", str(tmp_path)]) == 2
    assert "no process that runs has a socket there" in capsys.readouterr().err
    (tmp_path / "7.sock").touch()
    assert command.main(["attach", str(2**22 - 1)]) == 2
    assert "there is no process" in capsys.readouterr().err


def test_sockets_of_the_dead_are_removed(tmp_path):
    script = "import socket, sys; socket.socket(socket.AF_UNIX).bind(sys.argv[1])"
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "7.sock")], check=True)
    assert control.sockets(str(tmp_path)) == [] and not list(tmp_path.iterdir())
