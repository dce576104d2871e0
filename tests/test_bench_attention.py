"""bench/attention.py on tiny calls: what is timed, what is refused, and that counts and comparisons are right."""

import csv
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import hfnn
from hfnn.ops.attention.reference import reference

KERNEL = next((k.name for k in hfnn.ops.attention.OP.kernels if k.device == "cpu" and k.missing is None), None)
needs_kernel = pytest.mark.skipif(KERNEL is None, reason="no kernel for the CPU was built")


@pytest.fixture
def attention(bench_script):
    """`attention(*arguments)` -> (exit status, rows), with bench/attention.py and its cases as attributes."""
    main = bench_script("attention")
    main.calls = importlib.import_module("attention_calls")
    return main


@needs_kernel
def test_every_case(attention, capsys):
    """Our kernel runs each case with right results; cases without a torch op are reported."""
    status, rows = attention("--kernel", KERNEL, "--against", "flash")
    assert status == 0
    ours = [r for r in rows if r["provider"] == f"hfnn {KERNEL}"]
    assert [r["case"].split("x", 5)[-1] for r in ours[::2]] == list(attention.calls.CASES)
    for r in ours:
        assert r["kernel"] == KERNEL and float(r["device_us"]) > 0 and float(r["tflops"]) > 0 and r["error"] == ""
        assert float(r["rel_error"]) < 1e-6
    assert {r["pass"] for r in ours} == {"forward", "backward"}
    flash = {r["case"].split("x", 5)[-1]: r["error"] for r in rows if r["provider"] == "flash"}
    assert set(flash) == {"causal", "gpt2", "gqa", "dropout", "varlen"}
    assert [name for name, error in flash.items() if error] == ["dropout"], "torch has none on the CPU"
    out = capsys.readouterr().out
    assert "skipped: flash padding: flash takes no mask" in out and "sinks: torch's op has no such argument" in out


def test_whoever_is_wrong_is_not_timed(attention, monkeypatch, capsys):
    own = hfnn.functional.scaled_dot_product_attention
    monkeypatch.setattr(hfnn.functional, "scaled_dot_product_attention", lambda *a, **kw: own(*a, **kw) * 1.001)
    status, rows = attention("--kernel", "auto", "--against", "flash", "--case", "causal", "varlen")
    assert status == 1 and len(rows) == 8
    assert all(r["device_us"] == "" for r in rows), "nobody is timed while we are wrong"
    assert all(r["error"].startswith("wrong: output: error 0.001") for r in rows if r["provider"] == "hfnn")
    assert "RED: hfnn causal" in capsys.readouterr().out


def test_a_rival_that_is_wrong_is_a_row(attention, monkeypatch):
    wrong = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(attention.script, "_sdpa", lambda *args, **kwargs: wrong(*args, **kwargs) * 1.01)
    status, rows = attention("--kernel", "auto", "--against", "flash", "--case", "gqa")
    assert status == 0
    assert {(r["provider"], r["error"][:14], r["device_us"] != "") for r in rows} == {
        ("hfnn", "", True),
        ("flash", "wrong: output:", False),
    }


def test_what_fails_is_a_row_with_its_reason(attention, monkeypatch, capsys):
    def broken(*args, **kwargs):
        raise ValueError("no such thing")

    monkeypatch.setattr(hfnn.functional, "scaled_dot_product_attention", broken)
    status, rows = attention("--kernel", "auto", "--against", "--case", "gpt2")
    assert status == 1 and {r["error"] for r in rows} == {"ValueError: no such thing"}


@pytest.mark.parametrize("name", ["causal", "window", "padding", "varlen", "bias"])
def test_the_pairs_that_count(attention, name):
    """Checked against a dense matrix of the pairs."""
    problem = attention.calls.draw(attention.calls.CASES[name].tiny(), torch.float32, "cpu")
    batch, heads, _, length, width = problem.case.shape
    i, j = torch.arange(length)[:, None], torch.arange(length)
    sees = torch.ones(batch, length, length, dtype=torch.bool)
    if "causal" in problem.options:
        sees &= j <= i
    if "left" in problem.options:
        sees &= i - j <= problem.options["left"]
    if problem.starts:
        which = torch.bucketize(j, torch.tensor(problem.starts[1:]), right=True)
        sees &= which[:, None] == which
    if problem.lengths is not None:
        sees &= problem.padding[:, 0]
    pairs = heads * int(sees.sum())
    assert problem.flops == (4 * width * pairs, 10 * width * pairs)


def test_ragged_batches(attention):
    starts = attention.calls.ragged(65536, 600, 4096)
    lengths = torch.tensor(starts).diff()
    assert starts[0] == 0 and starts[-1] == 65536 and lengths.min() >= 1 and lengths.max() <= 4096
    assert 400 < lengths.double().mean() < 800 and lengths.double().std() > 300
    assert starts == attention.calls.ragged(65536, 600, 4096)


def test_the_part_is_of_the_whole(attention):
    """What `exactly` computes for one key head equals that part of the whole call. Without hfnn, in float64."""
    for name in ("gqa", "sinks", "bias", "padding"):
        problem = attention.calls.draw(attention.calls.CASES[name].tiny(), torch.float64, "cpu")
        y = reference(*problem.leaves[:3], **whole(problem))
        found = problem.part([y.detach(), *torch.autograd.grad(y, problem.leaves, problem.dout)])
        for a, b in zip(found, problem.exactly(), strict=True):
            torch.testing.assert_close(a.double(), b.double(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["causal", "gqa", "window", "softcap", "alibi", "sinks", "padding", "varlen"])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_is_told_the_same(attention, monkeypatch, name):
    """Forward only, uncompiled: flex_attention has no backward on the CPU."""
    monkeypatch.setattr(torch, "compile", lambda f, **options: f)
    problem = attention.calls.draw(attention.calls.CASES[name].tiny(), torch.float32, "cpu")
    for x in problem.leaves:
        x.requires_grad_(False)
    run = attention.script._flex(problem)
    with torch.no_grad():
        (y,) = problem.part([run.call()])
    torch.testing.assert_close(y.double(), problem.exactly()[0], rtol=1e-5, atol=1e-5)


def whole(problem) -> dict:
    given = {"is_causal": "causal" in problem.options, "enable_gqa": problem.gqa}
    given |= {"sinks": problem.leaves[3]} if "sinks" in problem.options else {}
    given |= {"attn_mask": problem.leaves[3]} if "bias" in problem.options else {}
    return given | ({"attn_mask": problem.padding} if problem.lengths is not None else {})


@pytest.mark.slow
def test_packing(tmp_path):
    pytest.importorskip("transformers")
    script = Path(__file__).parents[1] / "bench" / "attention.py"
    command = [sys.executable, script, "--packing", "--device", "cpu", "--tiny", "--rounds", "3", "--seconds", "0.01"]
    env = os.environ | {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "0"}
    done = subprocess.run([*command, "--results", tmp_path], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = tmp_path.glob("*-packing.csv")
    rows = list(csv.DictReader(file.read_text().splitlines()))
    assert [r["provider"] for r in rows] == ["padded torch", "padded hfnn", "packed torch", "packed hfnn"]
    for r in rows:
        assert r["error"] == "" and float(r["tokens_per_s"]) == pytest.approx(96e6 / float(r["device_us"]), rel=1e-3)
        assert float(r["loss"]) == pytest.approx(float(rows[0]["loss"]), rel=1e-4)
