"""The benchmark itself, on tiny shapes: what it writes, what it refuses, whom it skips."""

import csv
import importlib
from pathlib import Path

import pytest
import torch

import hfnn

KERNEL = next((k.name for k in hfnn.ops.gelu.OP.kernels if k.device == "cpu" and k.missing is None), None)
needs_kernel = pytest.mark.skipif(KERNEL is None, reason="no kernel for the CPU was built")


@pytest.fixture
def bench(monkeypatch, tmp_path):
    """`bench(*arguments)` runs bench/run.py here on the CPU and returns (exit status, rows by file name)."""
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "bench")
    run, timing = importlib.import_module("run"), importlib.import_module("timing")
    monkeypatch.setitem(timing.COPY_BYTES, "cpu", 1 << 16)
    monkeypatch.setattr(importlib.import_module("small"), "RULE", (16,))
    threads = torch.get_num_threads()

    def main(*arguments):
        common = ["--device", "cpu", "--threads", "1", "--seconds", "0.01", "--results", str(tmp_path)]
        status = run.main([*arguments, *common])
        return status, {p.name: list(csv.DictReader(p.read_text().splitlines())) for p in tmp_path.glob("*.csv")}

    yield main
    torch.set_num_threads(threads)


@needs_kernel
@pytest.mark.parametrize("op", ["gelu", "layer_norm", "dropout"])
def test_rows(bench, op, monkeypatch):
    monkeypatch.setenv("HFNN_COMMIT", "v1-2-gabc")
    status, files = bench(op, "--case", "8x64", "--kernel", KERNEL, "--against", "torch", "--rounds", "3")
    assert status == 0
    (rows,) = files.values()
    assert list(rows[0]) == list(importlib.import_module("report").COLUMNS)
    assert [(r["provider"], r["kernel"], r["pass"]) for r in rows] == [
        ("hfnn", KERNEL, "forward"),
        ("torch", "", "forward"),
        ("hfnn", KERNEL, "backward"),
        ("torch", "", "backward"),
    ]
    for r in rows:
        assert r["op"] == op and r["case"].startswith("8x64") and r["dtype"] == "float32" and r["threads"] == "1"
        assert float(r["device_us"]) > 0 and r["host_us"] == "", "on a CPU there is one clock"
        assert float(r["pct_of_copy"]) == pytest.approx(100 * float(r["gbps"]) / float(r["copy_gbps"]), rel=1e-3)
        assert float(r["spread_pct"]) >= 0 and float(r["rel_error"]) < 1e-6
        assert r["commit"] == "v1-2-gabc" and r["torch"] == torch.__version__
    assert int(rows[0]["saved_bytes"]) <= int(rows[1]["saved_bytes"]) + 8 * 8


@needs_kernel
def test_rows_are_only_added(bench, capsys):
    arguments = ("gelu", "--case", "8x64", "--kernel", KERNEL, "--rounds", "3")
    bench(*arguments)
    _, files = bench(*arguments)
    (rows,) = files.values()
    assert len(rows) == 8
    capsys.readouterr()
    assert bench("--table")[0] == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "8x64" in line]
    assert len(lines) == 2, "a line for each pass, with the newest rows"
    cell = importlib.import_module("report")._cell
    assert all(cell(r, "time") in lines[0] for r in rows[4:6])


@needs_kernel
def test_a_wrong_kernel_is_not_timed(bench, monkeypatch, capsys):
    gelu = hfnn.functional.gelu
    monkeypatch.setattr(hfnn.functional, "gelu", lambda *args, **kwargs: gelu(*args, **kwargs) * 1.001)
    status, files = bench("gelu", "--case", "8x64", "--kernel", KERNEL, "--rounds", "3")
    assert status == 1 and not files
    out = capsys.readouterr().out
    assert "RED: hfnn" in out and "output: error 0.001" in out and "gradient 0: error 0.001" in out
    assert "refused: gelu" in out and out.rstrip().endswith("while a kernel is wrong"), "a table was printed"


@needs_kernel
def test_who_is_skipped_is_told(bench, capsys):
    _, files = bench(
        "gelu", "linear", "--case", "8x64", "--kernel", KERNEL, "cuda", "--against", "liger", "--rounds", "3"
    )
    out = capsys.readouterr().out
    assert "skipped: liger gelu: runs on CUDA only" in out
    assert "skipped: hfnn cuda gelu" in out and "NoKernel" in out
    assert "skipped: linear: has no kernels of its own" in out
    assert {r["provider"] for rows in files.values() for r in rows} == {"hfnn"}


def test_small_shapes(bench, capsys):
    """Every op is found as module and as function, in both passes."""
    status, files = bench("--small")
    assert status == 0
    ((name, rows),) = files.items()
    assert name.endswith("-small.csv")
    wanted = {(op.name, p, k) for op in hfnn.ops.ALL for p in ("hfnn", "torch") for k in ("functional", "module")}
    found = {(r["op"], r["provider"], r["pass"].split()[0]) for r in rows if float(r["host_us"]) > 0}
    assert found == wanted
    assert {r["pass"].split()[1] for r in rows} == {"forward", "forward+backward"}
    assert f"of {len(rows) // 2} slower" in capsys.readouterr().out


@needs_kernel
def test_plots(bench, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    bench("gelu", "--case", "8x64", "--kernel", KERNEL, "--rounds", "3")
    assert bench("--plot")[0] == 0
    names = sorted(p.name for p in tmp_path.glob("*.png"))
    assert [name.split("-", 1)[1] for name in names] == ["gelu-backward.png", "gelu-forward.png"]


def test_crossover_is_the_start_of_the_last_good_run(bench):
    first = importlib.import_module("small")._first
    assert first((1, 2, 4, 8), (1.2, 0.9, 0.98, 1.5)) == 4
    assert first((1, 2), (2.0, 0.5)) is None
    assert first((1, 2), (1.0, 1.0)) == 1
