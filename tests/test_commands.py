"""hfnn, hfrecord, haiprof and hfreduce as real processes: help, one-line errors, results, interrupts."""

import functools
import importlib
import os
import re
import signal
import subprocess
import sys
import time
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from haiprof import command

ROOT = Path(__file__).parents[1]
COMMANDS = "hfnn", "hfrecord", "haiprof", "hfreduce"
# Subcommands that have their own help.
HELPS = [
    *((name,) for name in COMMANDS),
    *(("hfnn", sub) for sub in ("info", "report", "plan", "warmup")),
    *(("hfrecord", sub) for sub in ("info", "verify", "bench", "unpack", "pack", "convert")),
    *(("haiprof", sub) for sub in ("run", "attach", "report", "diff")),
    *(("hfreduce", sub) for sub in ("explain", "tune")),
]
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "120"}


def start(name, *arguments, **options):
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | options
    program = [sys.executable, "-P" if sys.version_info >= (3, 11) else "-s", "-m", name, *map(str, arguments)]
    # A shell without job control starts background processes with interrupts ignored.
    options["preexec_fn"] = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    return subprocess.Popen(program, env=os.environ | ENVIRONMENT, **options)


def run(name, *arguments, **options):
    """(exit status, stdout, stderr)"""
    process = start(name, *arguments, **options)
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


@pytest.mark.parametrize("name", COMMANDS)
def test_help(name):
    status, out, err = run(name, "--help")
    assert (status, err) == (0, "") and out.startswith(f"usage: {name} ")


@pytest.mark.parametrize("words", [words for words in HELPS if words[1:]], ids=" ".join)
def test_help_of_a_subcommand(words, capsys):
    """In this process, to import shared modules once."""
    name, *given = words
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"{name}.__main__").main([*given, "--help"])
    assert ended.value.code == 0 and capsys.readouterr().out.startswith(f"usage: {' '.join(words)} ")


def test_bench_hands_its_arguments_on():
    status, out, err = run("hfnn", "bench", "--help")
    assert status == 0 and "--against" in out, err


ERRORS = {
    ("hfnn",): "COMMAND",
    ("hfnn", "report", "no/such/model"): "'no/such/model' is no folder",
    ("hfnn", "report", "gpt2", "--what"): "unrecognized arguments: --what",
    ("hfrecord", "verify", "/nowhere.hfr"): "/nowhere.hfr",
    ("hfrecord", "verify"): "path",
    ("haiprof", "run"): "haiprof run -- torchrun",
    ("haiprof", "report", "/nowhere"): "/nowhere",
    ("haiprof", "run", "--", "/nowhere"): "/nowhere",
    ("hfreduce", "explain", "shout", 4): "invalid choice: 'shout'",
    ("hfreduce", "tune", "--ranks", 1): "at least 2",
}


@pytest.mark.parametrize("words", ERRORS, ids=lambda words: " ".join(map(str, words)))
def test_an_error_is_one_line_and_ends_with_2(words):
    status, out, err = run(*words)
    assert status == 2 and not out, err
    assert err.count("\n") == 1 and err.startswith(words[0]) and ERRORS[words] in err, err


def test_results(tmp_path):
    status, out, err = run("hfnn", "info")
    assert status == 0 and "layer_norm" in out, err
    status, out, err = run("hfnn", "report", "gpt2")
    assert status == 0, err
    assert "GPT2LMHeadModel, 124,439,808 parameters" in out and "138 modules swapped, 0 left alone" in out
    assert re.search(r"ln_1  x12 +│ torch.LayerNorm +│ hfnn.LayerNorm", out) and "meta" not in out
    (tmp_path / "files").mkdir()
    (tmp_path / "files/a.txt").write_text("a record")
    assert run("hfrecord", "pack", tmp_path / "files", tmp_path / "out")[1].endswith("1 records\n")
    assert "1 records are whole" in run("hfrecord", "verify", tmp_path / "out")[1]
    status, out, err = run("hfreduce", "explain", "all_reduce", 4 << 20, "--ranks", 8)
    assert status == 0 and "all_reduce of 4 MiB, 8 ranks on 1 host" in out, err


def test_a_plan(tmp_path, monkeypatch):
    lines = (
        "from torch import empty, nn",
        "class Loss(nn.Linear):",
        "    def forward(self, x): return super().forward(x).sum()",
        "def example(): return Loss(4, 4), empty(2, 4)",
    )
    (tmp_path / "train.py").write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)
    status, out, err = run("hfnn", "plan", "train:example", "--memory", "1MiB", "--device", "cpu")
    assert status == 0 and "stock: 1MiB is enough for a batch of" in out, err
    assert "no module named" in run("hfnn", "plan", "trains:example")[2].lower()


@pytest.mark.slow
def test_a_report_of_a_config_and_of_timm(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(num_hidden_layers=3, architectures=["LlamaForSequenceClassification"])
    config.save_pretrained(tmp_path)
    for path in tmp_path, tmp_path / "config.json":
        out = run("hfnn", "report", path, "--prefer", "memory")[1]
        assert "LlamaForSequenceClassification" in out and "input_layernorm  x3" in out
    pytest.importorskip("timm")
    assert "ResNet, 11,689,512 parameters" in run("hfnn", "report", "resnet18")[1]


def interrupted(process, ready):
    """(status, stderr) of a process that gets a terminal's interrupt once `ready()` returns."""
    ready()
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    return process.returncode, err


def test_an_interrupt_of_hfnn(tmp_path, monkeypatch):
    """While it waits for a driver that does not answer."""
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\necho up > {tmp_path}/up; exec sleep 100\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    process = start("hfnn", "info", start_new_session=True)

    def ready():
        while not (tmp_path / "up").exists():
            assert process.poll() is None, process.communicate()
            time.sleep(0.01)

    assert interrupted(process, ready) == (130, "")


def test_an_interrupt_of_hfrecord(tmp_path):
    """Its input is a pipe. Once the pipe is open for writing, the command waits for data."""
    os.mkfifo(tmp_path / "a.jsonl")
    process = start("hfrecord", "convert", tmp_path / "a.jsonl", tmp_path / "out", start_new_session=True)
    writers = []
    assert interrupted(process, lambda: writers.append((tmp_path / "a.jsonl").open("w"))) == (130, "")
    writers[0].close()


def test_an_interrupted_run_of_haiprof(tmp_path):
    program = "import signal; signal.signal(signal.SIGINT, signal.SIG_DFL); print('up', flush=True); signal.pause()"
    process = start("haiprof", "run", "--out", tmp_path, "--", sys.executable, "-c", program, start_new_session=True)
    status, err = interrupted(process, process.stdout.readline)
    assert status == 130 and "Traceback" not in err and "left nothing" in err


def test_what_is_no_error_of_a_user_is_raised(capsys):
    def broken():
        raise TypeError("a defect")

    def of_user():
        raise RuntimeError("two\nlines")

    with pytest.raises(TypeError):
        command.run("x", broken)
    assert command.run("x", of_user, (RuntimeError,)) == 2 and capsys.readouterr().err == "x: two lines\n"
    assert command.run("x", lambda: None) == 0 and command.run("x", lambda: 3) == 3


def test_every_command_is_installed_and_is_the_module():
    text = (ROOT / "pyproject.toml").read_text().partition("[project.scripts]")[2].partition("\n\n")[0]
    assert dict(re.findall(r'^(\w+) = "([\w.:]+)"', text, re.M)) == {n: f"{n}.__main__:main" for n in COMMANDS}
    for entry in entry_points(group="console_scripts", name="hfnn"):
        assert entry.load().__module__ == "hfnn.__main__"
