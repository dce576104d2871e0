"""The core under ThreadSanitizer, AddressSanitizer and UndefinedBehaviorSanitizer, ranks as threads: driver.cpp, and
accelerator.cpp over played GPUs.
"""

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CORE = ROOT / "csrc" / "hfreduce"
COMPILER = shutil.which(os.environ.get("CXX", "g++"))


def build(folder, *flags):
    """The programs and the core, each file on its own, as many at a time as there are cores."""
    core = [f for f in CORE.glob("*.cpp") if f.stem != "bindings" and not f.stem.startswith("c10d")]
    core += (CORE / "cuda").glob("*.cpp")
    programs = [Path(__file__).with_name(name) for name in ("driver.cpp", "accelerator.cpp")]

    def compiled(source):
        built = folder / f"{source.parent.name}_{source.stem}.o"
        command = [COMPILER, "-std=c++17", "-O1", "-g1", *flags, "-I", CORE, "-c", source, "-o", built]
        subprocess.run(command, check=True, timeout=200)
        return built

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        objects = list(pool.map(compiled, core + programs))
    runs = []
    for program, own in zip(programs, objects[len(core) :], strict=True):
        runs.append(folder / program.stem)
        command = [COMPILER, *flags, *objects[: len(core)], own, "-o", runs[-1], "-pthread"]
        subprocess.run(command, check=True, timeout=100)
    return runs


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_clean(sanitizer, tmp_path):
    for program in build(tmp_path, f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"):
        result = subprocess.run([program, "5", "1"], capture_output=True, text=True, timeout=250)
        assert result.returncode == 0 and result.stdout == "ok\n", (program.name, result.stderr[-6000:])
