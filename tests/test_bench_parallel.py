"""bench/parallel.py on a tiny model: every provider's row, and what happens to one that fails or hangs."""

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest
import ranks

from haiscale import launch

pytest.importorskip("transformers")

SCRIPT = Path(__file__).parents[1] / "bench" / "parallel.py"
TINY = ["--device", "cpu", "--tiny", "--nproc", "2", "--steps", "1", "--rounds", "2", "--backend", "hfreduce"]
DATA = ["alone", "torch-ddp", "haiscale-ddp", "haiscale-ddp+hfnn", "torch-fsdp2", "haiscale-fsdp"]
PIPELINES = ["torch-1f1b", "torch-zbv", "torch-dualpipev", "haiscale-1f1b", "haiscale-zbv", "haiscale-dualpipev"]


def read(folder):
    rows = [row for path in folder.glob("*.csv") for row in csv.DictReader(path.read_text().splitlines())]
    return {row["provider"]: row for row in rows}


@pytest.mark.rest
def test_rows(tmp_path):
    """Torch's schedules run the stages that haiscale cuts. Providers that train the same model get the same loss."""
    arguments = ["--case", "gpt2", "llama-1.1b", "--provider", *DATA, *PIPELINES, "--results", tmp_path]
    done = subprocess.run(
        [sys.executable, SCRIPT, *TINY, *arguments],
        capture_output=True,
        text=True,
        timeout=200,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    rows = read(tmp_path)
    assert done.returncode == 0 and list(rows) == [*DATA, *PIPELINES], done.stdout + done.stderr
    for name, row in rows.items():
        assert row["kernel"] == "hfreduce" and row["ranks"] == "2" and not row["error"]
        assert row["op"] == ("gpt2" if name in DATA else "llama-1.1b") and float(row["device_us"]) > 0
        assert (float(row["predicted_us"] or 0) > 0) == (name in PIPELINES and name.startswith("haiscale")), row
        assert (row["exposed_us"] != "") == (name in DATA and name != "alone"), row
    assert len({rows[name]["loss"] for name in DATA if name != "alone" and "hfnn" not in name}) == 1, rows
    assert len({rows[name]["loss"] for name in PIPELINES}) == 1, rows


@pytest.fixture
def script(monkeypatch):
    """bench/parallel.py as a module, with a stand-in for the measurement on ranks."""
    for folder in (SCRIPT.parent, SCRIPT.parents[1] / "tests" / "workers"):
        monkeypatch.syspath_prepend(folder)
    # tests/fuzz has a wrappers.py as well.
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if Path(folder).name != "fuzz"])
    monkeypatch.delitem(sys.modules, "wrappers", raising=False)
    import spawned

    parallel = ranks.loaded(SCRIPT, "bench_parallel")  # the workers have a parallel.py as well
    monkeypatch.setattr(parallel.wrappers, "measure", spawned.measures)
    monkeypatch.setattr(launch, "LAST_WORDS", 0.5)
    return parallel


@pytest.mark.rest
def test_who_fails_is_a_row(script, tmp_path, capsys):
    """Providers that raise on a rank, hang or are killed give a row; the others are still timed."""
    wanted = ["alone", "torch-ddp", "haiscale-ddp", "torch-fsdp2", "haiscale-fsdp"]
    limit = str(round(ranks.soon(8)))
    status = script.main([*TINY, "--case", "gpt2", "--provider", *wanted, "--results", str(tmp_path), "--limit", limit])
    rows = read(tmp_path)
    assert {name: row["error"] for name, row in rows.items() if row["error"]} == {
        "torch-ddp": "rank 1: NotImplementedError: not on this machine",
        "haiscale-ddp": f"over its limit of {limit} s",
        "haiscale-fsdp": "rank 1: was killed by SIGKILL; dmesg may say why",
    }
    assert status == 1 and [float(rows[name]["device_us"]) for name in ("alone", "torch-fsdp2")] == [200, 200]
    lines = capsys.readouterr().out.splitlines()
    assert any("torch-ddp" in line and "failed: rank 1: NotImpl" in line for line in lines)
    assert [line.split(":")[:2] for line in lines if line.startswith("RED")] == [
        ["RED", " haiscale-ddp gpt2"],
        ["RED", " haiscale-fsdp gpt2"],
    ]


def test_who_learns_something_else_is_red(script):
    base = {"op": "gpt2", "error": "", "loss": "5.0"}
    rows = [{**base, "provider": "torch-ddp"}, {**base, "provider": "haiscale-ddp", "loss": "5.2"}]
    assert list(script.faults(rows)) == ["haiscale-ddp gpt2: a loss of 5.2 where the first provider has 5"]
    rows[1]["loss"] = "5.05"
    assert not list(script.faults(rows))


def test_a_step_without_communication_is_what_it_is_compared_with(script):
    found = {("alone", "gloo"): {"us": 80}, ("torch-ddp", "gloo"): {"us": 100, "alone_us": 90}}
    found[("torch-fsdp2", "gloo")] = {"us": 120, "alone_us": None}
    assert [script.exposed(entry, of, found) for entry, of in found.items()] == [None, 10, 40]
