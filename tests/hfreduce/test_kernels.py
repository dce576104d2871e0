"""The peer-memory kernels emulated by CPU threads, under ThreadSanitizer: kernels.cpp."""

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import compiler
import pytest

HERE = Path(__file__).parent
CORE = HERE.parents[1] / "csrc" / "hfreduce"
SOURCES = (
    *sorted((CORE / "cuda/p2p").glob("*.cu")),
    *(CORE / name for name in ("cuda/p2p/peers.cpp", "collectives/reduce.cpp", "transport/segment.cpp")),
    HERE / "kernels.cpp",
)


@pytest.fixture(scope="module")
def emulated(tmp_path_factory) -> Path:
    """kernels.cpp with every kernel; files are compiled separately, one per core at a time."""
    folder = tmp_path_factory.mktemp("kernels")
    flags = ("-std=c++17", "-O1", "-g1", "-ffp-contract=off", "-Wno-unknown-pragmas", "-fsanitize=thread")
    include = ("-I", HERE / "emulated", "-I", HERE, "-I", CORE)

    def compiled(source):
        out = folder / source.name.replace(".", "_")
        compiler.run("-x", "c++", *flags, *include, "-c", source, "-o", out, timeout=120)
        return out

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        objects = list(pool.map(compiled, SOURCES))
    compiler.run(*flags, *objects, "-o", folder / "run", "-pthread", timeout=60)
    return folder / "run"


@pytest.mark.timeout(300)
@pytest.mark.skipif(compiler.COMPILER is None, reason="no C++ compiler")
def test_right_and_in_order(emulated):
    result = subprocess.run([emulated, "40", "1"], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0 and result.stdout == "ok\n", result.stderr[-6000:]
