"""The benchmark on tiny shapes: what it writes, what it refuses, which providers it skips."""

import csv
import functools
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import hfnn

KERNEL = next((k.name for k in hfnn.ops.OPS["gelu"].kernels if k.device == "cpu" and k.missing is None), None)
needs_kernel = pytest.mark.skipif(KERNEL is None, reason="no kernel for the CPU was built")


@needs_kernel
@pytest.mark.parametrize("op", ["gelu", "layer_norm", "dropout"])
def test_rows(bench, op, monkeypatch):
    monkeypatch.setenv("HFNN_COMMIT", "v1-2-gabc")
    importlib.import_module("report")._circumstances.cache_clear()
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
    """Every op is found, as module and as function, in both passes."""
    status, files = bench("--small")
    assert status == 0
    ((name, rows),) = files.items()
    assert name.endswith("-small.csv")
    kinds = {op.name: ("functional", "module") if op.modules else ("functional",) for op in hfnn.ops.CONTRACT}
    wanted = {(name, p, k) for name in kinds for p in ("hfnn", "torch") for k in kinds[name]}
    found = {(r["op"], r["provider"], r["pass"].split()[0]) for r in rows if float(r["host_us"]) > 0}
    assert found == wanted
    assert {r["pass"].split()[1] for r in rows} == {"forward", "forward+backward"}
    assert f"of {len(rows) // 2} slower" in capsys.readouterr().out


def test_small_shapes_that_torch_refuses(bench, capsys, monkeypatch):
    """They are reported and skipped, e.g. a window of three in one element. A refusal by hfnn alone is an error."""
    monkeypatch.setattr(importlib.import_module("small"), "RULE", (1, 16))
    status, files = bench("--small", "avg_pool1d", "relu")
    (rows,) = files.values()
    assert status == 0 and {(r["op"], r["case"]) for r in rows} == {
        ("avg_pool1d", "1x16"),
        ("relu", "1x1"),
        ("relu", "1x16"),
    }
    out = capsys.readouterr().out
    for kind in ("functional", "module"):
        assert f"skipped: avg_pool1d {kind} of 1 torch.float32: torch says: Given input size: (1x1x1)" in out

    def refuse(*args, **kwargs):
        raise RuntimeError("ours alone")

    monkeypatch.setattr(hfnn.functional, "relu", refuse)
    with pytest.raises(RuntimeError, match="ours alone"):
        bench("--small", "relu")


@needs_kernel
def test_a_loss_is_timed_as_a_whole_too(bench):
    _, files = bench("cross_entropy", "--case", "8x64", "--kernel", KERNEL, "--against", "torch", "--rounds", "3")
    (rows,) = files.values()
    assert [r["pass"] for r in rows] == ["forward"] * 2 + ["backward"] * 2 + ["both"] * 2
    forward, backward, both = (float(r["gbps"]) * float(r["device_us"]) for r in rows[::2])
    assert both == pytest.approx(forward + backward, rel=1e-3), "the bytes of a whole are those of its parts"
    assert float(rows[4]["rel_error"]) == max(float(r["rel_error"]) for r in rows[:4:2])


def test_who_makes_the_gradient_in_forward_is_timed_as_a_whole_only(bench, monkeypatch):
    """Providers that compute the gradient in forward. They get logits of their own, because they overwrite them."""
    rivals = importlib.import_module("rivals")

    class InPlace(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, target):
            loss = torch.nn.functional.cross_entropy(x, target)
            x.detach().sub_(x.logsumexp(1, keepdim=True)).exp_()
            ctx.save_for_backward(x.detach())
            return loss

        @staticmethod
        def backward(ctx, dy):
            return ctx.saved_tensors[0] * dy, None

    def rival(op, name, device):
        def own_logits(args):
            return args[0].detach().clone().requires_grad_(), *args[1:]

        return rivals.Provider(name, InPlace.apply, prepare=own_logits, whole=True)

    own = rivals.rival
    monkeypatch.setattr(rivals, "rival", lambda *a: (rival if a[1] == "liger" else own)(*a))
    arguments = ("--case", "8x64", "--kernel", "--against", "liger", "torch", "--rounds", "3")
    _, files = bench("cross_entropy", *arguments)
    (rows,) = files.values()
    assert [r["pass"] for r in rows if r["provider"] == "liger"] == ["both"]
    errors = [float(r["rel_error"]) for r in rows if r["provider"] == "torch"]
    assert max(errors) < 1e-6, "another's logits were written over"


@pytest.fixture
def head(bench, monkeypatch):
    """`bench --head` on tiny heads."""
    heads = importlib.import_module("heads")
    monkeypatch.setitem(heads.TOKENS, "cpu", (8, 40))
    monkeypatch.setitem(heads.SIZES, "cpu", (16, 300))
    monkeypatch.setitem(heads.AUTOCAST, "cpu", 8)
    return lambda *arguments: bench("--head", "--rounds", "3", *arguments)


@needs_kernel
def test_heads(head, capsys):
    status, files = head("--kernel", "auto", KERNEL, "--against", "torch", "liger")
    assert status == 0
    ((name, rows),) = files.items()
    assert name.endswith("-heads.csv")
    mine = ["hfnn", "hfnn 1MiB", "hfnn 16MiB", f"hfnn {KERNEL}"]
    chunked = ["torch chunked"] if hasattr(torch.nn, "LinearCrossEntropyOptions") else []
    found = {}
    for r in rows:
        found.setdefault((r["case"], r["dtype"]), []).append(r["provider"])
        assert r["op"] == "linear_cross_entropy" and r["pass"] == "both"
        assert float(r["device_us"]) > 0 and float(r["tflops"]) > 0
        assert max(float(r[f"{what}_error"]) for what in ("loss", "dx", "dw")) < (
            1e-6 if r["dtype"] == "float32" else 0.1
        )
        gradients = 4 * (16 * int(r["case"].split("x")[0]) + 16 * 300)
        assert float(r["peak_mib"]) * 2**20 >= gradients
    cases = [("8x16x300", "float32"), ("8x16x300", "autocast"), ("40x16x300", "float32")]
    assert found == {case: ["torch", *mine, *chunked] for case in cases}
    assert {r["kernel"] for r in rows if r["provider"] == mine[-1]} == {KERNEL}
    assert {float(r[f"{what}_ratio"]) for r in rows if r["provider"] == "torch" for what in ("dx", "dw")} == {1.0}
    out = capsys.readouterr().out
    assert "skipped: liger linear_cross_entropy: runs on CUDA only" in out
    assert "40x16x300" in out and f"hfnn {KERNEL}" in out


def test_a_head_that_is_wrong_is_not_timed(head, monkeypatch, capsys):
    own = hfnn.functional.linear_cross_entropy
    monkeypatch.setattr(hfnn.functional, "linear_cross_entropy", lambda *a, **kw: own(*a, **kw) * 1.001)
    status, files = head("--case", "8x16x300")
    assert status == 1 and not files
    out = capsys.readouterr().out
    assert "RED: hfnn 1MiB" in out and "gradient 1: error 0.001" in out and "refused: linear_cross_entropy" in out


def test_a_head_without_memory_is_skipped(head, monkeypatch, capsys):
    def short(*args, **kwargs):
        raise torch.OutOfMemoryError("tried to allocate 16 GiB")

    monkeypatch.setattr(torch.nn.functional, "cross_entropy", short)
    status, files = head("--case", "8x16x300", "--kernel", "--against")
    assert status == 0 and not files
    assert "skipped: torch linear_cross_entropy (8, 16, 300)" in capsys.readouterr().out


def test_a_head_has_three_sizes(head):
    with pytest.raises(SystemExit, match="tokens x hidden x vocabulary, got 8x16"):
        head("--case", "8x16")


def test_one_number_may_be_an_ulp_off(bench):
    """torch's own may be exact by chance."""
    broken, error = importlib.import_module("check").broken, hfnn.testing.Error
    loss, exact = torch.ones(()), error(0.0, 0.0)
    assert not broken([loss], [error(1.2e-7, 1.2e-7)], [exact])
    assert broken([loss], [error(3e-7, 3e-7)], [exact])
    assert broken([torch.ones(9)], [error(1.2e-7, 1.2e-7)], [exact])


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


# Whole models


@pytest.fixture
def models(bench):
    """bench/models.py as a module."""
    pytest.importorskip("transformers")
    return importlib.import_module("models")


@pytest.mark.slow
def test_models(tmp_path):
    pytest.importorskip("transformers")
    script = Path(__file__).parents[1] / "bench" / "models.py"
    command = [sys.executable, script, "--device", "cpu", "--tiny", "--steps", "2", "--results", tmp_path]
    command += ["--models", "gpt2", "--modes", "eager", "hfnn-memory", "liger"]
    env = os.environ | {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "0"}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped: liger gpt2: Liger has nothing for it" in done.stdout and "hfnn-memory" in done.stdout
    (file,) = tmp_path.glob("*-models.csv")
    eager, ours = csv.DictReader(file.read_text().splitlines())
    for r in (eager, ours):
        assert (r["op"], r["case"], r["dtype"], r["pass"]) == ("gpt2", "2x32xtiny", "autocast", "step")
        assert float(r["device_us"]) > 0 and not r["error"] and r["steps"] == "2"
    assert (eager["provider"], ours["provider"]) == ("eager", "hfnn-memory")
    assert float(ours["hooks_gib"]) < float(eager["hooks_gib"])
    assert float(ours["peak_gib"]) < float(eager["peak_gib"])
    assert float(ours["loss"]) == pytest.approx(float(eager["loss"]), rel=0.01)


@pytest.mark.rest
def test_pairs(tmp_path):
    """One row per mode for each batch, with the ratio to the first mode."""
    pytest.importorskip("transformers")
    script = Path(__file__).parents[1] / "bench" / "models.py"
    command = [sys.executable, script, "--pairs", "--device", "cpu", "--tiny", "--steps", "3", "--results", tmp_path]
    command += ["--modes", "eager", "hfnn"]
    env = os.environ | {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "0"}
    done = subprocess.run([*command, "--models", "gpt2-lora", "unet"], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = tmp_path.glob("*-pairs.csv")
    rows = [r for r in csv.DictReader(file.read_text().splitlines()) if r["op"] == "gpt2-lora"]
    assert [r["case"] for r in rows[::2]] == ["1x32xtiny", "2x32xtiny"]
    for stock, ours in zip(rows[::2], rows[1::2], strict=True):
        assert (stock["provider"], stock["ratio"], ours["provider"], ours["pairs"]) == ("eager", "1", "hfnn", "3")
        near = float(ours["device_us"]) / float(stock["device_us"])
        assert 0.5 * near < float(ours["ratio"]) < 2 * near and float(ours["host_us"]) > 0


@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.rest
def test_compiled_and_tuned_models(models, monkeypatch, one_thread):
    """All of them reach eager's loss."""
    options = models.parse(["--models", "gpt2", "--device", "cpu", "--tiny"])
    asked, compile = [], torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, backend: asked.append(backend) or compile(f, backend="hfnn_eager"))
    monkeypatch.setattr(hfnn, "tune", functools.partial(hfnn.tune, among=["converted"]))
    eager, *others = (models.Training("gpt2", mode, options) for mode in ("eager", "hfnn-compile", "tuned"))
    assert others[1].calls().startswith("tuned: ")
    for _ in range(2):
        loss = eager.step()
        for training in others:
            assert training.step().item() == pytest.approx(loss.item(), rel=0.02)  # other dropout masks
    assert asked == ["hfnn"]


def test_a_model_that_fails_is_a_row(models, tmp_path, monkeypatch, capsys):
    """The other models still run. A failure of eager or hfnn is an error."""
    answers = {"eager": {"us": [1e3, 2e3, 3e3], "loss": 2.0}, "hfnn": {"us": [1e3], "loss": 2.1}}
    answers |= {"compile": {"error": "status 1: OutOfMemoryError: too large"}, "liger": {"skip": "not here"}}
    answers["hfnn-memory"] = {"us": [1e3], "loss": float("nan")}
    monkeypatch.setattr(models, "ask", lambda name, mode, options: answers[mode])
    arguments = ["--models", "bert", "--device", "cpu", "--layers", "3", "--results", str(tmp_path), "--modes"]
    assert models.main([*arguments, *answers]) == 1
    (file,) = tmp_path.glob("*.csv")
    rows = {r["provider"]: r for r in csv.DictReader(file.read_text().splitlines())}
    assert list(rows) == ["eager", "hfnn", "compile", "hfnn-memory"]
    assert rows["eager"]["device_us"] == "2000" and rows["eager"]["spread_pct"] == "100"
    assert rows["eager"]["case"] == "32x512x3layers" and "OutOfMemoryError" in rows["compile"]["error"]
    out = capsys.readouterr().out
    assert "RED: hfnn bert: a loss of 2.1 where eager has 2" in out and "RED: hfnn-memory bert: a loss of nan" in out
    assert "RED: compile" not in out and "skipped: liger bert: not here" in out
    assert models.main([*arguments, "eager", "compile"]) == 0
    importlib.import_module("report").show(tmp_path, "time", False)
    assert "2000 us" in capsys.readouterr().out, "the usual table has them too"


def test_a_model_has_a_limit_and_a_reason(models, tmp_path, monkeypatch):
    options = models.parse(["--device", "cpu", "--tiny"])
    stuck, broken = tmp_path / "stuck.py", tmp_path / "broken.py"
    stuck.write_text("import time; time.sleep(600)")
    broken.write_text("raise ValueError('no such thing')")
    for script, limit, words in ((stuck, 1, "over its limit of 1 s"), (broken, 60, "status 1: ValueError: no such")):
        monkeypatch.setattr(models, "__file__", str(script))
        options.limit = limit
        assert words in models.ask("gpt2", "eager", options)["error"]


def test_depth(models, tmp_path, monkeypatch, capsys):
    depth = importlib.import_module("depth")
    monkeypatch.setattr(depth, "MODELS", {"llama3": depth.MODELS["llama3"]})
    monkeypatch.setitem(depth.SHAPES, "cpu", (2, 16, 64))
    assert models.main(["--depth", "--device", "cpu", "--results", str(tmp_path)]) == 0
    (file,) = tmp_path.glob("*-depth.csv")
    rows = list(csv.DictReader(file.read_text().splitlines()))
    assert [(r["dtype"], r["provider"]) for r in rows] == [
        (dtype, mode) for dtype in ("autocast", "bfloat16") for mode in ("eager", "hfnn-memory")
    ]
    weights = 64 * 64 * (2 + 2 / 4 + 3 * 3.5)  # q and output, k and v, the MLP's
    assert float(rows[0]["casts_u"]) == pytest.approx(2 * weights / (2 * 16 * 64))
    assert float(rows[1]["casts_u"]) == float(rows[2]["casts_u"]) == 0
    assert float(rows[1]["hooks_u"]) < float(rows[0]["hooks_u"]) and rows[0]["requested_u"] == ""
    assert "llama3" in capsys.readouterr().out


def test_pages_say_what_the_results_say(monkeypatch, capsys):
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "bench")
    page = importlib.import_module("results_page")
    assert page.main(["--check"]) == 0, capsys.readouterr().out
    monkeypatch.setattr(page, "TABLES", page.TABLES[1:])
    assert page.main(["--check"]) == 1


def test_host_time_of_models(bench_script, capsys):
    pytest.importorskip("transformers")
    status, rows = bench_script("host")("--models", "opt")
    assert status == 0
    assert [row["provider"] for row in rows] == ["torch", "hfnn-auto"]
    assert all(float(row["host_us"]) > 0 and int(row["calls"]) > 100 for row in rows)
    assert float(rows[1]["low"]) <= float(rows[1]["ratio"]) <= float(rows[1]["high"])
    assert "opt" in capsys.readouterr().out
