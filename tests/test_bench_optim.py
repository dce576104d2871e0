"""bench/optim.py on few parameters: what is timed, what is counted, and that a wrong optimizer is not timed."""

import pytest
import torch

import hfnn


@pytest.fixture
def optim(bench_script):
    """`optim(*arguments)` -> (exit status, rows), with bench/optim.py as an attribute."""
    return bench_script("optim")


def test_every_mode(optim, capsys):
    status, rows = optim("--case", "gpt2-124m", "--dtype", "bfloat16")
    assert status == 0
    found = {row["provider"]: row for row in rows}
    assert found.keys() >= {*optim.script.MODES} - {"torchao-8bit"}
    if "torchao-8bit" not in found:
        assert "skipped: torchao-8bit" in capsys.readouterr().out
    for mode, row in found.items():
        assert row["kernel"] == ("cpp" if mode.startswith("hfnn") else "torch") and float(row["device_us"]) > 0
        assert float(row["rel_error"]) <= optim.script.MODES[mode]
    sizes = {mode: float(row["state_bytes"]) for mode, row in found.items()}
    assert sizes["hfnn"] == sizes["torch-fused"] == 4 and sizes["hfnn-remainder"] == 10
    assert sizes["hfnn-4bit"] < sizes["hfnn-8bit"] < 4


def test_a_wrong_one_is_not_timed(optim, capsys, monkeypatch):
    right = hfnn.optim.AdamW.step

    def wrong(self, closure=None):
        right(self)
        with torch.no_grad():
            self.param_groups[0]["params"][0].mul_(1.5)

    monkeypatch.setattr(hfnn.optim.AdamW, "step", wrong)
    status, rows = optim("--case", "gpt2-124m", "--dtype", "float32", "--mode", "hfnn", "torch-fused")
    assert status == 1 and [row["provider"] for row in rows] == ["torch-fused"]
    assert "RED: hfnn" in capsys.readouterr().out
