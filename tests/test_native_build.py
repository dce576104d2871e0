"""hfnn._autograd where the package has none for the torch at hand: `import hfnn` builds it, once.

The tests import a copy of the package, without the module, in processes of their own. Except in one test, the
"compiler" copies this environment's module, because a compilation takes a minute.
"""

import ctypes
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import compiler
import pytest

from hfnn.core import build, native

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.skipif(native.extension is None or os.name != "posix", reason="there is no module to copy")

SAYS = """
import torch, hfnn
from torch import nn
model, x = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64)), torch.randn(512, 64, requires_grad=True)
stock = hfnn.memory.saved_bytes(lambda: model(x)).total
hfnn.convert(model, prefer="memory")
hfnn.convert(nn.Sequential(nn.LayerNorm(64)))
saved = stock - hfnn.memory.saved_bytes(lambda: model(x)).total
model(x).sum().backward()
extension = hfnn.core.native.extension
print("native:", extension and extension.__file__, "recipe:", saved == x.nbytes)
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """A folder with hfnn as a wheel built without torch installs it."""
    folder = tmp_path_factory.mktemp("package")
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    shutil.copytree(ROOT / "hfnn", folder / "hfnn", ignore=ignored)
    shutil.copytree(ROOT / "kernels", folder / "hfnn" / "kernels", ignore=ignored)
    shutil.copytree(ROOT / "csrc" / "autograd", folder / "hfnn" / "csrc" / "autograd")
    for header in (ROOT / "csrc").glob("*.h"):
        shutil.copy(header, folder / "hfnn" / "csrc")
    shutil.copy(importlib.util.find_spec("hfnn._C").origin, folder / "hfnn")
    written = Path(importlib.util.find_spec("hfnn._build").origin).read_text()
    (folder / "hfnn" / "_build.py").write_text(written + '\ntorch_version = ""\n')
    return folder


@pytest.fixture
def machine(package, tmp_path):
    return Machine(package, tmp_path)


class Machine:
    """Runs programs on the copy, with a cache folder and a compiler of their own."""

    def __init__(self, package, folder):
        self.package, self.folder, self.cache, self.calls = package, folder, folder / "cache", folder / "calls"
        self.calls.touch()
        self.compiles(f'cp "{native.extension.__file__}" "$out"')

    def compiles(self, how: str) -> None:
        """The compiler from now on: it notes its call, and runs these lines, where $out is the file to make."""
        script = self.folder / "compiler"
        find = 'while [ "$1" != -o ]; do shift; done; out=$2'
        script.write_text(f'#!/bin/sh\necho $$ >> "{self.calls}"\n{find}\n{how}\n')
        script.chmod(0o755)

    def start(self, *arguments, preexec_fn=None, **environment):
        # -S skips the .pth files, and with them the import hook of an editable install.
        path = [str(self.package), *(p for p in sys.path if p and Path(p) not in (ROOT, ROOT / "tests"))]
        own = {
            "PYTHONPATH": os.pathsep.join(path),
            "XDG_CACHE_HOME": str(self.cache),
            "CXX": str(self.folder / "compiler"),
        }
        return subprocess.Popen(
            [sys.executable, "-S", *(arguments or ("-c", SAYS))], cwd="/", env={**os.environ, **own, **environment},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=preexec_fn,
        )  # fmt: skip

    def run(self, *arguments, **more):
        return said(self.start(*arguments, **more))

    @property
    def compiled(self) -> int:
        return len(self.calls.read_text().split())

    @property
    def left(self) -> list[str]:
        return sorted(path.name for path in self.cache.glob("hfnn/autograd/*/*"))


def said(process, code=0):
    out, err = process.communicate(timeout=500)
    assert process.returncode == code, out + err
    return out, err


def wait_for(true):
    for _ in range(6000):
        if true():
            return
        time.sleep(0.01)
    raise AssertionError("it took more than a minute")


def test_many_processes_build_once(machine):
    machine.compiles(f'sleep 2; cp "{native.extension.__file__}" "$out"')
    outs, errs = zip(*map(said, [machine.start() for _ in range(3)]), strict=True)
    assert machine.compiled == 1 and "".join(errs).count("building hfnn._autograd") == 1, errs
    assert len(set(outs)) == 1 and f"native: {machine.cache}" in outs[0] and "recipe: True" in outs[0]
    assert machine.left == ["_autograd.so", "lock"]
    assert machine.run() == (outs[0], "") and machine.compiled == 1


@pytest.mark.slow
def test_a_killed_build_is_taken_over(machine):
    machine.compiles(f'head -c 1000 "{native.extension.__file__}" > "$out"; sleep 600')
    killed = machine.start()
    wait_for(lambda: machine.compiled)
    waiting = machine.start()
    compiling = int(machine.calls.read_text())
    time.sleep(1)
    machine.compiles(f'cp "{native.extension.__file__}" "$out"')
    killed.kill()
    said(killed, -signal.SIGKILL)
    try:
        out, _ = said(waiting)
    finally:
        os.kill(compiling, signal.SIGKILL)
    assert "recipe: True" in out and machine.compiled == 2 and machine.left == ["_autograd.so", "lock"]


@pytest.mark.slow
def test_an_interrupt_ends_a_build_and_leaves_nothing(machine):
    machine.compiles("exec sleep 600")
    process = machine.start(preexec_fn=os.setsid)
    wait_for(lambda: machine.compiled)
    os.killpg(process.pid, signal.SIGINT)  # as by the terminal
    _, err = said(process, -signal.SIGINT)
    assert "KeyboardInterrupt" in err and machine.left == ["lock"]


def without_privileges():
    """root, too, then needs permission to write."""
    PR_CAPBSET_DROP, CAP_DAC_OVERRIDE = 24, 1
    ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, CAP_DAC_OVERRIDE)


def locked(folder, writable):
    for path in [folder, *folder.rglob("*")]:
        path.chmod(path.stat().st_mode | 0o200 if writable else path.stat().st_mode & ~0o222)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="capabilities are Linux's")
def test_read_only_folders(machine):
    locked(machine.package, False)
    try:
        out, err = machine.run(preexec_fn=without_privileges)
        assert "recipe: True" in out and err.count("\n") == 1
        locked(machine.cache, False)
        assert machine.run(preexec_fn=without_privileges) == (out, "")  # a cache that another filled
        machine.cache = machine.folder / "empty"
        machine.cache.mkdir(0o555)
        out, err = machine.run(preexec_fn=without_privileges)
    finally:
        locked(machine.package, True)
    assert "native: None" in out and err.count("\n") == 1, err
    assert f"Permission denied: '{machine.cache}/hfnn'" in err and err.endswith("python -m hfnn.info --build\n")


@pytest.mark.slow
def test_a_failed_build(machine):
    """It is said once with the command, tried again by the command alone, and then works."""
    machine.compiles("echo no such header >&2; exit 1")
    out, err = machine.run()
    assert "native: None" in out and err.count("python -m hfnn.info --build") == 1
    (failed,) = machine.cache.rglob("failed.txt")
    assert str(failed) in err and "no such header" in failed.read_text() and "-std=c++20" in failed.read_text()
    out, err = machine.run()
    assert "native: None" in out and err.count("\n") == 1 and machine.compiled == 1
    _, err = said(machine.start("-m", "hfnn.info", "--build"), 1)
    assert str(failed) in err and machine.compiled == 2
    machine.compiles(f'cp "{native.extension.__file__}" "$out"')
    out, _ = machine.run("-m", "hfnn.info", "--build")
    assert out == f"hfnn._autograd: {failed.parent}/_autograd.so\n" and machine.left == ["_autograd.so", "lock"]
    assert "recipe: True" in machine.run()[0] and machine.compiled == 3


@pytest.mark.parametrize(
    "how", ["no compiler", *(pytest.param(how, marks=pytest.mark.slow) for how in ("a broken module", "switched off"))]
)
def test_import_works_without_it(machine, how):
    machine.compiles('echo no module > "$out"')
    environment = {"no compiler": {"CXX": "/nonexistent"}, "switched off": {"HFNN_AUTOGRAD": "0"}}.get(how, {})
    out, err = machine.run(**environment)
    assert "native: None" in out and machine.compiled == (how == "a broken module")
    why = {"no compiler": "no C++ compiler (/nonexistent)", "a broken module": "_autograd.so: "}.get(how, "")
    assert why in err and err.count("hfnn.info --build") == (how != "switched off"), err


@pytest.mark.slow
@pytest.mark.rest  # .ci/run does the same with an install
@pytest.mark.timeout(900)
@pytest.mark.skipif(compiler.COMPILER is None, reason="no C++ compiler")
def test_a_module_older_than_its_sources(tmp_path):
    """After a pull, the Python code of an editable install may call what an earlier build lacks."""
    module = tmp_path / "_autograd.so"
    module.touch()
    assert not build.outdated(str(module))
    newest = max(path.stat().st_mtime for path in (ROOT / "csrc" / "autograd").iterdir())
    os.utime(module, (newest - 1, newest - 1))
    assert build.outdated(str(module))


def test_the_compiler(machine):
    out, err = machine.run(CXX=compiler.COMPILER)
    assert f"native: {machine.cache}" in out and "recipe: True" in out and err.count("\n") == 1, err
    assert sysconfig.get_config_var("SOABI") in out
