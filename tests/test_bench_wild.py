"""Public programs beside stock, on a program that the test writes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[1] / "bench"
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
def wild(tmp_path):
    """Runs bench/wild.py on two programs, one of them unseen: (exit status, rows, what --out says, output). It has a
    process of its own: it forks, which autograd forbids to one that has run other tests."""
    for name in ("seen", "unseen"):
        file = tmp_path / "programs" / "someone" / name / "src" / "models" / "model.py"
        file.parent.mkdir(parents=True)
        file.write_text(PROGRAM)
    entries = [ENTRY | {"name": name, "repository": f"someone/{name}"} for name in ("seen", "unseen")]
    manifest, out = tmp_path / "manifest.json", tmp_path / "out.json"
    manifest.write_text(json.dumps([entries[0], entries[1] | {"unseen": True}]))

    def run(*arguments, before=""):
        program = f"import sys; sys.path.insert(0, {str(BENCH)!r}); import wild, hfnn\n{before}\nsys.exit(wild.main())"
        common = ("--device", "cpu", "--results", tmp_path, "--manifest", manifest, "--out", out)
        command = [sys.executable, "-c", program, tmp_path / "programs", *common, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        (file,) = tmp_path.glob("*-wild.csv")
        return done.returncode, file.read_text().splitlines(), json.loads(out.read_text()), done.stdout

    return run


def test_programs(wild):
    status, lines, found, out = wild("--pairs", "2")
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


PLANTED = """
convert = hfnn.convert

def planted(model, prefer):
    if prefer == "auto":
        model[1].down.bias.register_hook(lambda gradient: gradient * 1.001)
    return convert(model, prefer=prefer)

hfnn.convert = planted
"""


def test_a_wrong_gradient(wild):
    """It is told with its side and its parameter."""
    status, _, found, out = wild("--programs", "seen", "--pairs", "0", before=PLANTED)
    assert status == 1 and "RED: seen: hfnn-auto, 1.down.bias: 1" in out and "RED: seen: hfnn-memory" not in out
    assert found["seen"]["torch"]["rel_error"] < 1e-5


def test_a_program_that_fails(wild, tmp_path):
    (tmp_path / "programs/someone/seen/src/models/model.py").write_text("raise ImportError('no such thing')")
    status, _, found, out = wild("--pairs", "0")
    assert status == 1 and list(found) == ["unseen"] and "RED: seen: failed" in out
