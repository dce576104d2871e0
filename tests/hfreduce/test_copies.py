"""The all-gather of CUDA tensors by copy engines, on GPUs emulated by threads (fake_gpu.h): copies.cpp."""

import subprocess
from pathlib import Path

import compiler
import pytest

HERE = Path(__file__).parent
CORE = HERE.parents[1] / "csrc" / "hfreduce"
SOURCES = (HERE / "copies.cpp", CORE / "cuda/p2p/copies.cpp", CORE / "transport/segment.cpp")


@pytest.mark.timeout(300)
@pytest.mark.skipif(compiler.COMPILER is None, reason="no C++ compiler")
@pytest.mark.parametrize(
    ("sanitizer", "cases"),
    [
        ("thread", ["sequences"]),  # a rank that was released early may read and write freely
        pytest.param("address,undefined", ["sequences", "missing", "late", "leaving"], marks=pytest.mark.slow),
        ("", ["missing", "late", "leaving"]),
    ],
)
def test_right_and_let_go(sanitizer, cases, tmp_path):
    flags = ["-std=c++17", "-O1", "-g1"]
    if sanitizer:
        flags += [f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"]
    compiler.run(*flags, "-I", CORE, "-I", HERE, *SOURCES, "-o", tmp_path / "run", "-pthread", timeout=200)
    rounds = "6" if sanitizer else "16"
    for case in cases:
        result = subprocess.run([tmp_path / "run", case, rounds, "1"], capture_output=True, text=True, timeout=100)
        assert result.returncode == 0 and result.stdout == "ok\n", f"{case}: {result.stderr[-6000:]}"
