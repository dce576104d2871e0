"""The host-staged reduction of CUDA tensors, on a GPU emulated by threads (fake_gpu.h): staged.cpp."""

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import compiler
import pytest

HERE = Path(__file__).parent
CORE = HERE.parents[1] / "csrc" / "hfreduce"
SOURCES = [CORE / f"{name}.cpp" for name in ["collectives/reduce", "transport/segment", "cuda/staged/reduce_workers"]]
# Two files are called staged.cpp.
OBJECTS = {**{file: file.stem for file in SOURCES}, CORE / "cuda/staged/staged.cpp": "a", HERE / "staged.cpp": "test"}

pytestmark = pytest.mark.skipif(compiler.COMPILER is None, reason="no C++ compiler")


def build(folder, *flags):
    def compiled(source, name):
        how = ("-std=c++17", "-O1", "-g1", *flags, "-I", CORE, "-I", HERE)
        compiler.run(*how, "-c", source, "-o", name, timeout=200, cwd=folder)

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(compiled, OBJECTS.keys(), OBJECTS.values()))
    compiler.run(*flags, *OBJECTS.values(), "-o", "run", "-pthread", timeout=100, cwd=folder)
    return folder / "run"


def run(program, what, rounds, seed=1):
    result = subprocess.run([program, what, str(rounds), str(seed)], capture_output=True, text=True, timeout=150)
    assert result.returncode == 0 and result.stdout == "ok\n", f"{what}: {result.stderr[-6000:]}"


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_bits_orders_and_leavers(tmp_path):
    """All dtypes and operations; random sequences in threads and in processes, on one host and on several; ranks that
    stop and die."""
    program = build(tmp_path)
    for what, rounds in {"pairs": 8, "sequences": 24, "processes": 12, "hosts": 8}.items():
        run(program, what, rounds)
    for what, rounds in {"leavers": 16, "host_leavers": 6, "dead": 1, "carried": 1}.items():
        run(program, what, rounds)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_clean(sanitizer, tmp_path):
    """Ranks that were released early are left out with ThreadSanitizer: their streams may overwrite what others still
    read."""
    program = build(tmp_path, f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all")
    for what in ["pairs", "sequences", "hosts"] + ["leavers", "host_leavers"] * (sanitizer != "thread"):
        run(program, what, 2)
