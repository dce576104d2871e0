"""The core under ThreadSanitizer, AddressSanitizer and UndefinedBehaviorSanitizer, ranks as threads: driver.cpp, and
accelerator.cpp over played GPUs, with their kernels on threads (emulated/), gpus_of_hosts.cpp, over TCP, and
device_messages.cpp.
"""

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CORE = HERE.parents[1] / "csrc" / "hfreduce"
COMPILER = shutil.which(os.environ.get("CXX", "g++"))


def build(folder, *flags):
    """The programs, the core and the kernels, each file on its own, as many at a time as there are cores."""
    core = [f for f in CORE.glob("*.cpp") if f.stem != "bindings" and not f.stem.startswith("c10d")]
    core += (CORE / "cuda").glob("*.cpp")
    kernels = [*(CORE / "cuda").glob("*.cu")]
    programs = [HERE / name for name in ("driver.cpp", "gpus_of_hosts.cpp", "device_messages.cpp", "accelerator.cpp")]
    include = ("-I", HERE / "emulated", "-I", HERE, "-I", CORE)

    def compiled(source):
        built = folder / f"{source.parent.name}_{source.stem}_{source.suffix[1:]}.o"
        how = ("-std=c++17", "-O1", "-g1", "-ffp-contract=off", "-Wno-unknown-pragmas", *flags, *include)
        subprocess.run([COMPILER, "-x", "c++", *how, "-c", source, "-o", built], check=True, timeout=200)
        return built

    sources = core + kernels + programs
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        objects = dict(zip(sources, pool.map(compiled, sources), strict=True))
    with_kernels = [f for f in core if f != CORE / "cuda/no_kernels.cpp"] + kernels
    runs = []
    for program, others in zip(programs, (core, core, core, with_kernels), strict=True):
        runs.append(folder / program.stem)
        command = [COMPILER, *flags, *(objects[f] for f in (*others, program)), "-o", runs[-1], "-pthread"]
        subprocess.run(command, check=True, timeout=100)
    return runs


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_clean(sanitizer, tmp_path):
    for program in build(tmp_path, f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"):
        result = subprocess.run([program, "1", "1"], capture_output=True, text=True, timeout=250)
        assert result.returncode == 0 and result.stdout == "ok\n", (program.name, result.stderr[-6000:])
