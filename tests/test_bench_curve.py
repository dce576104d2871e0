"""bench/curve.py on a tiny model: the runs, the picture, the verdict, and a run that is too slow."""

import csv
import importlib
import math
import os
import subprocess
import sys
from xml.etree import ElementTree

import pytest


@pytest.mark.rest
def test_curve(bench, tmp_path, capsys):
    """Both runs start from the same weights; each panel of the picture has a line per run."""
    pytest.importorskip("transformers")
    curve = importlib.import_module("curve")
    arguments = ["--device", "cpu", "--results", str(tmp_path)]
    tiny = ["--tiny", "--steps", "3", "--seeds", "5"]
    env = os.environ | {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, curve.__file__, *arguments, *tiny], capture_output=True, text=True, env=env)
    assert "the stock seeds' spread" in done.stdout and not done.stderr, done.stdout + done.stderr
    (file,) = tmp_path.glob("*-curve.csv")
    rows = list(csv.DictReader(file.read_text().splitlines()))
    found = {(r["provider"], r["pass"], r["step"]): float(r["loss"]) for r in rows}
    each = [("train", "1"), ("train", "2"), ("train", "3"), ("validation", "0"), ("validation", "3")]
    assert found.keys() == {(provider, *one) for provider in ("eager", "hfnn") for one in each}
    assert found["eager", "validation", "0"] == pytest.approx(found["hfnn", "validation", "0"], abs=3e-3)
    (text,) = {(r["text_sha256"], r["text_bytes"], r["seed"], r["case"]) for r in rows}
    assert len(text[0]) == 16 and int(text[1]) > 500_000 and text[2:] == ("5", "2x32xtiny")
    assert curve.main([*arguments, "--draw", "--svg", str(tmp_path / "curve.svg")]) == done.returncode
    assert capsys.readouterr().out == done.stdout
    tags = [element.tag.rpartition("}")[2] for element in ElementTree.parse(tmp_path / "curve.svg").iter()]
    assert tags.count("polyline") == 4


def test_curve_verdict(bench):
    """Three failures: NaN, a mean further off than the stock seeds are from each other, and a missing run."""
    drawing = importlib.import_module("curve_drawing")
    stock = {0: 3.00, 1: 3.02, 2: 3.04}
    for ours, within in (
        ({0: 3.03, 1: 3.05, 2: 3.07}, True),
        ({0: 3.05, 1: 3.07, 2: 3.09}, False),
        ({0: math.nan}, False),
    ):
        assert drawing.verdict(stock, ours)[0] is within
    assert (
        "spread: +0.0300, spread 0.0400, standard error of the differences by seed 0.0000"
        in (drawing.verdict(stock, {seed: loss + 0.03 for seed, loss in stock.items()})[1])
    )
    common = {"steps": 3, "step": 3, "pass": "validation", "seed": 0, "peak_gib": "", "error": ""}
    rows = [common | {"provider": provider, "loss": 3.0} for provider in ("eager", "hfnn")]
    failed = common | {"provider": "hfnn", "seed": 1, "pass": "error", "error": "status -9"}
    assert drawing.table(rows) == 0 and drawing.table([*rows, failed]) == 1


def test_a_run_that_is_too_slow_is_killed(bench, tmp_path):
    """It gives a row, and nothing waits for it. Runs are concurrent, so rows come in any order."""
    pytest.importorskip("transformers")
    curve = importlib.import_module("curve")
    options = curve.parse(["--device", "cpu", "--tiny", "--seeds", "0", "--limit", "0"])
    found = list(curve.started(tmp_path, options))
    assert sorted((provider, seed, columns["pass"]) for provider, seed, columns in found) == [
        ("eager", 0, "error"),
        ("hfnn", 0, "error"),
    ]
    assert all("status -9" in columns["error"] for *_, columns in found)
