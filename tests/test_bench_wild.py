"""Public programs beside stock, on a program that the test writes."""

import json

import pytest

import hfnn

PROGRAM = """
import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, width, dropout):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x):
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))
"""
ENTRY = {
    "field": "language",
    "commit": "0" * 40,
    "root": "src",
    "file": "models/model.py",
    "make": "nn.Sequential(Block(16, p), Block(16, p))",
    "inputs": {"x": "torch.randn(4, 8, 16)", "y": "torch.randn(4, 8, 16)"},
    "loss": "F.mse_loss(model(x), y)",
}


@pytest.fixture
def wild(bench_script, tmp_path):
    """Runs bench/wild.py on two programs, one of them unseen: (exit status, rows, what --out says)."""
    for name in ("seen", "unseen"):
        file = tmp_path / "programs" / "someone" / name / "src" / "models" / "model.py"
        file.parent.mkdir(parents=True)
        file.write_text(PROGRAM)
    entries = [ENTRY | {"name": name, "repository": f"someone/{name}"} for name in ("seen", "unseen")]
    manifest, out = tmp_path / "manifest.json", tmp_path / "out.json"
    manifest.write_text(json.dumps([entries[0], entries[1] | {"unseen": True}]))

    def run(*arguments):
        load = bench_script("wild")
        common = ("--device", "cpu", "--results", str(tmp_path), "--manifest", str(manifest), "--out", str(out))
        status = load.script.main([str(tmp_path / "programs"), *common, *arguments])
        (file,) = tmp_path.glob("*-wild.csv")
        return status, file.read_text().splitlines(), json.loads(out.read_text())

    return run


def test_programs(wild, capsys):
    status, lines, found = wild("--pairs", "2")
    out = capsys.readouterr().out
    assert status == 0 and len(lines) == 7 and list(found) == ["seen", "unseen"]
    for sides in found.values():
        stock, memory, auto = sides.values()
        assert memory["saved_bytes"] < stock["saved_bytes"] and auto["saved_bytes"] <= stock["saved_bytes"]
        assert all(side["rel_error"] < 1e-5 and side["loss_error"] < 1e-5 for side in sides.values())
        assert memory["low"] <= memory["ratio"] <= memory["high"] and stock["ratio"] == ""
        kept = {(line, op, *shape): size for size, line, op, shape in stock["lines"]}
        assert kept["src/models/model.py:14", "Gelu", 4, 8, 64] == 2 * 4 * (4 * 8 * 64), "input of gelu, two blocks"
        assert sum(kept.values()) <= stock["saved_bytes"]
    assert "seen, 1 programs, hfnn-memory" in out and "unseen, 1 programs, hfnn-auto" in out
    assert list(wild("--seen", "--pairs", "0")[2]) == ["seen"]


def test_a_wrong_gradient(wild, monkeypatch, capsys):
    """It is told with its side and its parameter."""
    convert = hfnn.convert

    def planted(model, prefer):
        if prefer == "auto":
            model[1].down.bias.register_hook(lambda gradient: gradient * 1.001)
        return convert(model, prefer=prefer)

    monkeypatch.setattr(hfnn, "convert", planted)
    status, _, found = wild("--programs", "seen", "--pairs", "0")
    out = capsys.readouterr().out
    assert status == 1 and "RED: seen: hfnn-auto, 1.down.bias: 1" in out and "RED: seen: hfnn-memory" not in out
    assert found["seen"]["torch"]["rel_error"] < 1e-5


def test_a_program_that_fails(wild, tmp_path, capsys):
    (tmp_path / "programs/someone/seen/src/models/model.py").write_text("raise ImportError('no such thing')")
    status, _, found = wild("--pairs", "0")
    assert status == 1 and list(found) == ["unseen"] and "RED: seen: failed" in capsys.readouterr().out
