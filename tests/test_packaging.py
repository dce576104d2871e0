"""The installed package: sdist -> wheel -> a clean folder, the repository out of reach. Also without a compiler."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import hfnn

ROOT = Path(__file__).parents[1]
KERNELS = sorted(path.stem for path in (ROOT / "kernels").glob("*.py"))


def run(*command, cwd=ROOT, **environment):
    result = subprocess.run(command, cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True)
    assert result.returncode == 0, f"{command}\n{result.stdout[-3000:]}\n{result.stderr[-3000:]}"
    return result.stdout


def pip(*arguments, **environment):
    return run(sys.executable, "-m", "pip", *arguments, PIP_NO_INDEX="1", PIP_NO_CACHE_DIR="1", **environment)


def python(target, *arguments, **environment):
    """Python at / that sees `target` and this environment's packages, but not the editable install.

    -S skips the .pth files, and with them the import hook of an editable install.
    """
    path = [str(target), *(p for p in sys.path if p and Path(p) not in (ROOT, ROOT / "tests"))]
    return run(sys.executable, "-S", *arguments, cwd="/", PYTHONPATH=os.pathsep.join(path), **environment)


# One test from the sdist to the end, not one per claim, so the wheel is built only once.
@pytest.mark.rest
@pytest.mark.timeout(600)
def test_sdist_makes_a_wheel_that_runs_from_anywhere(tmp_path):
    run(sys.executable, "-c", f"from scikit_build_core.build import build_sdist; build_sdist({str(tmp_path)!r})")
    (sdist,) = tmp_path.glob("hfnn-*.tar.gz")
    no_cuda = ("-C", "cmake.define.HFNN_CUDA=OFF")
    quick = tmp_path / "c++"  # -O0 takes a third of the time; this test checks the contents, not the speed
    quick.write_text('#!/bin/sh\nexec c++ "$@" -O0\n')
    quick.chmod(0o755)
    pip("wheel", "--no-build-isolation", "--no-deps", *no_cuda, "-w", str(tmp_path), str(sdist), CXX=str(quick))
    (wheel,) = tmp_path.glob("hfnn-*.whl")
    holds_our_packages_and_nothing_else(zipfile.ZipFile(wheel).namelist())

    target = tmp_path / "installed"
    pip("install", "--no-deps", "--target", str(target), str(wheel))
    python(target, "-c", CLEAN_AND_COMPILED, str(target))
    report = python(target, "-m", "hfnn.info")
    assert "OpenMP" in report and "switched off (HFNN_CUDA)" in report


PACKAGES = {
    "hfnn": ["_C", "_autograd"],
    "hfreduce": ["_C", "_c10d"],
    "haiscale": [],
    "hfrecord": ["_C"],
    "haiprof": [],
}  # and their compiled modules
HOOKS = ["_haiprof_autoload.py", "_haiscale_autoload.py"]  # what `import torch` calls


def holds_our_packages_and_nothing_else(names):
    metadata = f"hfnn-{hfnn.__version__}.dist-info"
    assert {name.split("/")[0] for name in names} == {*PACKAGES, *HOOKS, metadata}
    modules = {name for name in names if name.endswith(".py")}
    source = {str(path.relative_to(ROOT)) for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    written = {"hfnn/_build.py", "hfreduce/_build.py"}
    assert modules == source | written | set(HOOKS) | {f"hfnn/kernels/{stem}.py" for stem in KERNELS}
    typed = {str(path.relative_to(ROOT)) for package in PACKAGES for path in (ROOT / package).rglob("*.pyi")}
    assert typed | {f"{package}/py.typed" for package in PACKAGES} <= set(names) and typed
    extensions = {name.partition(".")[0] for name in names if name.endswith(".so")}
    assert extensions == {f"{package}/{name}" for package, compiled in PACKAGES.items() for name in compiled}
    assert {f"{metadata}/licenses/LICENSE", f"{metadata}/entry_points.txt"} <= set(names)
    nodes = {f"hfnn/{path.relative_to(ROOT)}" for path in (ROOT / "csrc").glob("autograd/*")}
    assert nodes | {"hfnn/csrc/tensor.h"} <= set(names)  # for a build at import


CLEAN_AND_COMPILED = """
import importlib.metadata, importlib.util, sys, torch, hfnn, hfnn.kernels, hfreduce
from hfnn import _C
assert hfnn.__file__.startswith(sys.argv[1]) and _C.__file__.startswith(sys.argv[1])
assert hfnn.__version__ == importlib.metadata.version("hfnn")
for name in ("kernels", "csrc", "tests", "bench", "examples"):
    spec = importlib.util.find_spec(name)  # another package of the machine may have the name
    assert spec is None or not (spec.origin or "").startswith(sys.argv[1]), name + " came with hfnn"
norm, x = hfnn.LayerNorm(8), torch.randn(2, 8, requires_grad=True)
with hfnn.use("cpp"):
    y = norm(x)
assert y.grad_fn.name() == "_LayerNormBackward"
assert hfnn.core.native.extension.__file__.startswith(sys.argv[1])
y.sum().backward()
assert hfreduce.__file__.startswith(sys.argv[1])
torch.distributed.init_process_group("hfreduce", store=torch.distributed.HashStore(), rank=0, world_size=1)
torch.distributed.all_reduce(x.detach())
assert hfreduce.operations() == 1
torch.testing.assert_close(y, torch.layer_norm(x, (8,), norm.weight, norm.bias))
"""


def test_without_a_compiler_torch_runs_and_hfnn_says_so(tmp_path):
    none = {"CXX": "/nonexistent", "CC": "/nonexistent", "CUDACXX": "/nonexistent"}
    none["XDG_CACHE_HOME"] = str(tmp_path / "cache")  # elsewhere, hfnn._autograd may have been built before
    in_target = ("--target", str(tmp_path / "installed"), "-C", f"build-dir={tmp_path / 'build'}")
    pip("install", "--no-build-isolation", "--no-deps", *in_target, str(ROOT), **none)
    said = python(tmp_path / "installed", "-c", ONLY_TORCH, **none)
    assert "hfnn._autograd is missing: not built: no C++ compiler (/nonexistent)" in said
    assert "hfreduce's torch backend was not built: no C++ build to add it to" in said
    assert "no working C++ compiler was found" in python(tmp_path / "installed", "-m", "hfnn.info", **none)


def test_import_torch_works_whatever_the_state_of_our_files(tmp_path):
    """An editable install whose clone is broken, then deleted; and an environment that finds our metadata elsewhere."""
    clone, venv = tmp_path / "clone", tmp_path / "venv"
    clone.mkdir()
    for name in ("CMakeLists.txt", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, clone)
    for name in (*PACKAGES, "kernels"):
        shutil.copytree(ROOT / name, clone / name, ignore=shutil.ignore_patterns("__pycache__"))
    run(sys.executable, "-m", "venv", "--without-pip", str(venv))
    (site,) = venv.glob("lib/python*/site-packages")
    lent = [p for p in sys.path if Path(p).name == "site-packages"]
    # Not by a .pth file, which would also give it this environment's editable install.
    environment = {"PYTHONPATH": os.pathsep.join(lent), "CXX": "/nonexistent", "CC": "/nonexistent"}
    pip("--python", str(venv), "install", "--no-build-isolation", "--no-deps", "-e", str(clone), **environment)

    def imports(*said, **variables):
        program = (
            "import torch; from importlib.metadata import entry_points as e; print(len(e(group='torch.backends')))"
        )
        done = subprocess.run(
            [venv / "bin" / "python", "-c", program],
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(site), *lent]), **variables},
            cwd="/",
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0 and int(done.stdout) >= 2, done.stderr
        assert all(text in done.stderr for text in said) and bool(done.stderr) == bool(said), done.stderr

    for package in ("haiprof", "haiscale"):
        (clone / package / "__init__.py").write_text("raise RuntimeError('a broken upgrade')")
    said = "haiprof does not profile this process", "nothing is switched in this process"
    imports(*said, HAIPROF="1", HAISCALE_AUTO="1")
    shutil.rmtree(clone)
    imports()
    for editable in site.glob("_editable*"):
        editable.unlink()  # nothing is left but the metadata and what lies beside it
    imports()


ONLY_TORCH = """
import torch, hfnn, hfreduce
norm, x = hfnn.LayerNorm(8), torch.randn(2, 8)
assert torch.equal(norm(x), torch.layer_norm(x, (8,), norm.weight, norm.bias))
try:
    with hfnn.use("cpp"):
        norm(x)
except hfnn.NoKernel as error:
    print(error)
try:
    torch.distributed.init_process_group("hfreduce", store=torch.distributed.HashStore(), rank=0, world_size=1)
except ImportError as error:
    print(error)
"""


@pytest.mark.skipif(shutil.which("cmake") is None, reason="cmake is not in the path")
@pytest.mark.slow
def test_nvcc_runs_for_a_gpu_or_for_architectures_that_are_named(tmp_path):
    """Architectures named once stay set for later builds in the same folder."""
    found, here = shutil.which("nvcc") is not None, any(Path("/dev").glob("nvidia[0-9]*"))
    nvcc = "nvcc" if found else "no working nvcc was found"
    for named, said in [("", nvcc if here else "set CUDAARCHS"), ("90-real", nvcc)] + [("", nvcc)] * found:
        pybind11 = run(sys.executable, "-m", "pybind11", "--cmakedir").strip()
        options = f"-DPython_EXECUTABLE={sys.executable}", f"-Dpybind11_DIR={pybind11}"
        run("cmake", "-S", str(ROOT), "-B", str(tmp_path), *options, CUDAARCHS=named)
        cuda = (tmp_path / "_build.py").read_text().partition('cuda = "')[2].partition('"')[0]
        assert said in cuda, f"CUDAARCHS={named!r}"


def test_transformers_works_from_the_root():
    """From the root, transformers' check for a package named kernels finds our folder; this must not break it."""
    pytest.importorskip("transformers")
    run(sys.executable, "-c", "import kernels; from transformers.models.gpt2 import modeling_gpt2", cwd=ROOT)
