"""Scripts unaware of haiprof, profiled by `python -m haiprof run`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from haiprof import record, trace, verdict

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(__file__).parent / "scripts"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def profiled(tmp_path, *command, cwd=ROOT):
    """The verdict on a command, and its output; phases add up to steps."""
    folder = tmp_path / "profile"
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "100"}
    run = [sys.executable, "-m", "haiprof", "run", "--hz", "5", "--out", str(folder), "--", *map(str, command)]
    done = subprocess.run(run, cwd=cwd, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "haiprof stops" not in done.stderr and (folder / "report.html").exists()
    found = verdict.judge(record.load(folder))
    for rank in found.ranks:
        assert sum(rank.phases.values()) == pytest.approx(rank.seconds, rel=0.02)
        assert all(rank.phases[name] > 0 for name in ("forward", "backward", "optimizer"))
        named = rank.seconds - rank.phases["other"]
        assert named > 0.5 * rank.seconds, rank.phases
    return found, done.stdout


@pytest.mark.slow
def test_torchrun_and_ddp(tmp_path):
    found, said = profiled(tmp_path, *TORCHRUN, SCRIPTS / "ddp.py", 20)
    assert "loss " in said and "verdict" in said
    assert [(rank.rank, rank.steps) for rank in found.ranks] == [(0, 20), (1, 20)]
    assert len(list((tmp_path / "profile").glob("*.jsonl"))) == 2, "torchrun itself is no rank"
    assert found.late.n >= 19 and all(rank.exposed > 0 for rank in found.ranks)
    assert all(rank.phases["data"] > 0 for rank in found.ranks)
    ranks = [trace.read(f"{rank.run['stem']}.trace.json.gz") for rank in found.ranks]
    assert [each["distributedInfo"]["rank"] for each in ranks] == [0, 1]
    own, other = (steps_of(each) for each in ranks)
    assert own.keys() == other.keys() and len(own) == 20
    for step, (begin, end) in own.items():  # on one clock: a rank cannot be a step ahead
        assert begin < other[step][1] and other[step][0] < end


def steps_of(found):
    events = [event for event in found["traceEvents"] if event["ph"] == "X" and event["tid"] == trace.STEPS]
    return {event["name"]: (event["ts"], event["ts"] + event["dur"]) for event in events}


def test_transformers_trainer(tmp_path):
    pytest.importorskip("accelerate")
    found, _ = profiled(tmp_path, sys.executable, SCRIPTS / "trainer.py", 8)
    (rank,) = found.ranks
    assert rank.steps == 8 and rank.passes == pytest.approx(2), "two micro-batches are a step"
    assert rank.gap > 0, "an evaluation lay between two steps"
    assert rank.phases["data"] > 0


@pytest.mark.slow
def test_train_gpt(tmp_path):
    small = ["--layers", 2, "--width", 64, "--heads", 2, "--seq", 64, "--batch", 2, "--steps", 5, "--no-band"]
    example = ROOT / "examples" / "train_gpt.py"
    found, said = profiled(tmp_path, sys.executable, example, *small, "--out", tmp_path, cwd=tmp_path)
    (rank,) = found.ranks
    assert rank.steps == 5 and rank.passes == pytest.approx(2), "its two models take their steps by turns"
    assert "hfnn" in said
