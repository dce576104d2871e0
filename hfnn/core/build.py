"""hfnn._autograd, built on this machine where the package has none for the torch that is installed.

It is bound to one version of torch. The package has one if the Python that built it had torch (CMakeLists.txt); `pip
install .` builds without, torch may be replaced later, and so may the sources of an editable install. `import hfnn`
then builds it, once for each version, in `folder()`. One process builds, those that start beside it wait. A build that
is interrupted leaves nothing that counts as one: the module gets its name when it is complete. A build that failed is
not tried again by an import, but by `python -m hfnn.info --build`.
"""

import contextlib
import hashlib
import importlib.util
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import torch

log = logging.getLogger("hfnn")
NAME = "hfnn._autograd"
_PACKAGE = Path(__file__).parents[1]
_SOURCES = next((p for p in (_PACKAGE / "csrc", _PACKAGE.parent / "csrc") if (p / "autograd").is_dir()), None)
_LONGEST = 3600  # seconds
# As in CMakeLists.txt.
_FLAGS = "-std=c++20", "-O2", "-w", "-fPIC", "-shared", "-fvisibility=hidden"
_DEFINED = (
    "TORCH_EXTENSION_NAME=_autograd", "TORCH_API_INCLUDE_EXTENSION_H", "AT_PER_OPERATOR_HEADERS", "NDEBUG",
    f'HFNN_TORCH="{torch.__version__}"', f"_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
)  # fmt: skip


def outdated(file: str) -> bool:
    """Whether the sources of an editable install are newer than the module that was built from them."""
    return _SOURCES is not None and max(source.stat().st_mtime for source in _sources()) > Path(file).stat().st_mtime


def _sources() -> list[Path]:
    return [*sorted(_SOURCES.glob("autograd/*")), *sorted(_SOURCES.glob("*.h"))]


def folder() -> Path:
    """hfnn/autograd/<what the module depends on>, in $XDG_CACHE_HOME or ~/.cache."""
    used = hashlib.sha256(repr((platform.libc_ver(), _FLAGS, _DEFINED)).encode())
    for file in _sources():
        used.update(file.name.encode() + file.read_bytes())
    name = f"torch-{torch.__version__}-{sysconfig.get_config_var('SOABI')}-{used.hexdigest()[:16]}"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hfnn" / "autograd" / name


def load(again: bool = False):
    """The module; it is built first if there is none, or `again`. Raises an exception that says why there is none."""
    if os.name != "posix" or _SOURCES is None:
        raise RuntimeError("not built: pip install --no-build-isolation, with torch installed, builds it")
    place = folder()
    file, failed = place / "_autograd.so", place / "failed.txt"
    if again or not file.exists():
        if failed.exists() and not again:
            raise RuntimeError(f"a build of it failed, see {failed}")
        compiler = _compiler()
        with _alone(place):
            if again or not (file.exists() or failed.exists()):
                _build(compiler, place, file, failed)
        if not file.exists():
            raise RuntimeError(f"a build of it failed, see {failed}")
    spec = importlib.util.spec_from_file_location(NAME, file)
    module = sys.modules[NAME] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[NAME]
        raise
    return module


def _compiler() -> list[str]:
    named = shlex.split(os.environ.get("CXX", ""))
    found = named if named and shutil.which(named[0]) else None
    if not named:
        found = next(([name] for name in ("c++", "g++", "clang++") if shutil.which(name)), None)
    if found is None:
        raise RuntimeError(f"not built: no C++ compiler ({' '.join(named) or 'c++, g++, clang++'})")
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        raise RuntimeError("not built: Python.h was not found (python3-dev, python3-devel)")
    return found


@contextlib.contextmanager
def _alone(place: Path):
    """Waits for the process that builds there. The system ends a lock with its process."""
    import fcntl

    place.mkdir(parents=True, exist_ok=True)
    with open(place / "lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:  # a file system without locks: each builds for itself, and the last one's module stays
            pass
        else:
            for interrupted in place.glob("building-*"):
                shutil.rmtree(interrupted, ignore_errors=True)
        yield


def _build(compiler: list[str], place: Path, file: Path, failed: Path) -> None:
    log.warning("building %s for torch %s, once, in about a minute: %s", NAME, torch.__version__, place)
    with tempfile.TemporaryDirectory(prefix="building-", dir=place, ignore_cleanup_errors=True) as made:
        whole, built = Path(made, "all.cpp"), Path(made, file.name)  # at once: torch's headers take most of the time
        whole.write_text("".join(f'#include "{path}"\n' for path in sorted(_SOURCES.glob("autograd/*.cpp"))))
        at = Path(torch.__file__).parent
        headers = (at / "include", at / "include/torch/csrc/api/include", sysconfig.get_path("include"))
        libraries = [f"-L{at / 'lib'}", *(f"-l{name}" for name in ("c10", "torch_cpu", "torch", "torch_python"))]
        libraries += ["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else ["-ldl", "-l:libstdc++.so.6"]
        command = [
            *compiler, *_FLAGS, *(f"-D{name}" for name in _DEFINED), *(f"-isystem{path}" for path in headers),
            str(whole), "-o", str(built), *libraries,
        ]  # fmt: skip
        try:
            with open(Path(made, failed.name), "w") as said:
                print(shlex.join(command), file=said, flush=True)
                subprocess.run(
                    command, stdin=subprocess.DEVNULL, stdout=said, stderr=said, timeout=_LONGEST, check=True
                )
            with open(built, "rb") as complete:
                os.fsync(complete.fileno())
        except (OSError, subprocess.SubprocessError) as error:
            os.replace(Path(made, failed.name), failed)
            raise RuntimeError(f"a build of it failed, see {failed}") from error
        os.replace(built, file)
    failed.unlink(missing_ok=True)
