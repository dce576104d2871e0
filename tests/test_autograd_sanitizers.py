"""hfnn._autograd under AddressSanitizer and ThreadSanitizer, with threads that share graphs. Python and torch are not
instrumented: of their work only intercepted locks and allocations of the C library are seen.
"""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import compiler
import pytest
import torch
from torch.utils.cpp_extension import include_paths, library_paths

HERE = Path(__file__).parent
SOURCES = sorted((HERE.parent / "csrc" / "autograd").glob("*.cpp"))


def build(folder, sanitizer, change=lambda text: text):
    """Builds the extension as one binary, at -O1. change: edits the text of room.cpp."""
    copies = folder / "autograd"
    copies.mkdir()
    for file in [*SOURCES, *SOURCES[0].parent.glob("*.h")]:
        text = file.read_text().replace('#include "../', f'#include "{HERE.parent}/csrc/')
        (copies / file.name).write_text(change(text) if file.name == "room.cpp" else text)
    whole, built = folder / "all.cpp", folder / "_autograd.so"
    whole.write_text("".join(f'#include "{copies / file.name}"\n' for file in SOURCES))
    headers = [flag for path in (*include_paths(), sysconfig.get_path("include")) for flag in ("-isystem", path)]
    names = "TORCH_EXTENSION_NAME=_autograd", "TORCH_API_INCLUDE_EXTENSION_H", "AT_PER_OPERATOR_HEADERS"
    names += (f'HFNN_TORCH="{torch.__version__}"',)
    how = ("-std=c++20", "-O1", "-g1", "-fPIC", "-fvisibility=hidden", "-shared", f"-fsanitize={sanitizer}", "-w")
    libraries = [f"-L{path}" for path in library_paths()]
    libraries += ["-ltorch", "-ltorch_cpu", "-ltorch_python", "-lc10", "-ldl"]
    compiler.run(*how, *(f"-D{name}" for name in names), *headers, whole, "-o", built, *libraries, timeout=400)
    return built


def run(built, sanitizer, steps):
    """Preloads libstdc++ beside the sanitizer's library, which looks up there how exceptions are thrown."""
    libraries = [
        subprocess.run(
            [compiler.COMPILER, f"-print-file-name={name}"], capture_output=True, text=True, check=True
        ).stdout.strip()
        for name in (f"lib{sanitizer[0]}san.so", "libstdc++.so")
    ]
    options = {"ASAN_OPTIONS": "detect_leaks=0", "TSAN_OPTIONS": "history_size=4 exitcode=66", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, HERE / "workers" / "threads.py", built, str(steps)],
        env={**os.environ, **options, "LD_PRELOAD": " ".join(libraries)}, capture_output=True, text=True, timeout=280,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.rest
@pytest.mark.timeout(700)
@pytest.mark.skipif(compiler.COMPILER is None, reason="no C++ compiler")
@pytest.mark.parametrize("sanitizer", ["address", "thread"])
def test_clean(sanitizer, tmp_path):
    found = run(build(tmp_path, sanitizer), sanitizer, 20)
    assert found.returncode == 0 and found.stdout.endswith("ok\n"), found.stderr[-6000:]


@pytest.mark.slow
@pytest.mark.rest
@pytest.mark.timeout(700)
@pytest.mark.skipif(compiler.COMPILER is None, reason="no C++ compiler")
def test_a_missing_lock_is_seen(tmp_path):
    built = build(tmp_path, "thread", lambda text: text.replace("std::lock_guard<std::mutex> lock(sharing_);", ""))
    found = run(built, "thread", 20)
    assert "data race" in found.stderr and "room.cpp" in found.stderr
