"""`python -m hfnn.info` and `hfnn.warmup`: complete output where everything is there, no crash if parts are missing."""

import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import hfnn
from hfnn import info, ops, warmup
from hfnn.core.kernel import Kernel


def rows(title):
    (table,) = (table for table in info.tables() if table.title == title)
    assert all(len(row) == len(table.header) for row in table.rows)
    return table.rows


def test_every_kernel_of_every_op_is_listed_with_a_verdict():
    listed = {row[:2]: row[-1] for row in rows("kernels")}
    for op in ops.ALL:
        for kernel in op.kernels:
            expected = "yes" if kernel.missing is None else f"no: {kernel.missing}"
            assert listed[op.name, kernel.name] == expected
        assert any(name == op.name for name, _ in listed)
    assert listed["gelu", "cpp"] == "yes", "the suite is meant to run on a build with its C++ kernels"


def test_the_report_names_what_a_bug_report_needs():
    software, hardware = dict(rows("software")), dict(rows("hardware"))
    assert software["hfnn"].startswith(hfnn.__version__)
    assert software["torch"].startswith(torch.__version__)
    assert platform.python_version() in software["Python"]
    assert f"{torch.get_num_threads()} of" in hardware["threads"]
    assert ("GPU 0" in hardware) == torch.cuda.is_available()
    if Path("/proc/cpuinfo").exists() and platform.machine() == "x86_64":
        assert ("avx2" in hardware["CPU features"]) == (torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512"))


def test_environment_shows_our_switches(monkeypatch):
    monkeypatch.setenv("HFNN_DISABLE", "0")
    monkeypatch.setenv("UNRELATED_SECRET", "x")
    shown = dict(rows("environment"))
    assert shown["HFNN_DISABLE"] == "0" and "UNRELATED_SECRET" not in shown


def test_columns_are_aligned():
    table = info.Section("title", ("a", "long header", "last"), [("wide cell", "x", "yes"), ("b", "y", "no: why")])
    title, header, first, second = info.text([table]).splitlines()
    assert title == "title" and first == "  wide cell  x            yes"
    assert header.index("last") == first.index("yes") == second.index("no: why")


def test_what_is_missing_is_said_and_the_rest_is_printed(monkeypatch):
    """Only Python itself works: still one line per item, each with its reason."""

    def broken(*args, **kwargs):
        raise OSError("gone")

    for module, name in (
        (info, "version"),
        (info.importlib, "import_module"),
        (info.subprocess, "run"),
        (info.Path, "read_text"),
        (info.platform, "platform"),
        (torch.cuda, "get_device_properties"),
    ):
        monkeypatch.setattr(module, name, broken)
    monkeypatch.setattr(Kernel, "missing", property(broken))
    report = info.text(info.tables())
    assert report.count("not found: gone") >= 8 + sum(len(op.kernels) for op in ops.ALL)
    assert f"torch uses {torch.get_num_threads()}" in report


def test_found_gives_a_reason_for_errors_without_text():
    assert info.found(lambda: 1 / 0) == "not found: division by zero"
    assert info.found(lambda: next(iter(()))) == "not found: StopIteration"
    with pytest.raises(KeyboardInterrupt):
        info.found(lambda: (_ for _ in ()).throw(KeyboardInterrupt))


@pytest.mark.parametrize("module", ["hfnn.info", "hfnn.warmup"])
def test_runs_as_a_command(module, tmp_path):
    arguments = ["--widths", "64", "--dtypes", "float32"] if module == "hfnn.warmup" else []
    command = [sys.executable, "-W", "error::RuntimeWarning", "-m", module, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    idle = module == "hfnn.warmup" and not torch.cuda.is_available()
    assert ("torch sees no CUDA device" if idle else "layer_norm") in result.stdout


def test_warmup_runs_every_op_with_kernels(device):
    """With the CPU kernels, because the commands do nothing without a GPU. Rebuilt outputs included."""
    for op in ops.ALL:
        for kernel in op.kernels:
            if kernel.device == device and kernel.missing is None:
                assert warmup.warm(op, kernel, (32,), (torch.float32, torch.bfloat16), device, rows=4) > 0


def test_warmup_rebuilds(rebuilt):
    with hfnn.use("cpp"):
        warmup.step(ops.ALL[0], (64, 1024), torch.float32, torch.float32, "cpu")
    assert rebuilt


def test_warmup_has_a_case_for_each_way_of_calling_an_op():
    for op in ops.ALL:
        ways = list(warmup.cases(op, 7, 24))
        assert ways and all(case[:2] == (7, 24) for case in ways)
    gelu = next(op for op in ops.ALL if op.name == "gelu")
    assert set(warmup.cases(gelu, 7, 24)) == {(7, 24, "none"), (7, 24, "tanh")}
