"""The core under ThreadSanitizer, AddressSanitizer and UndefinedBehaviorSanitizer, ranks as threads: driver.cpp, and
over played GPUs gpus_of_hosts.cpp, by TCP, and device_messages.cpp. Under ThreadSanitizer also accelerator.cpp, with
kernels on threads (emulated/).
"""

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import compiler
import pytest

HERE = Path(__file__).parent
CORE = HERE.parents[1] / "csrc" / "hfreduce"


def build(folder, kernels, *flags):
    """The programs and the core, each file on its own, as many at a time as there are cores. kernels: these, too."""
    core = [f for f in CORE.rglob("*.cpp") if f.stem != "bindings" and f.parent.name != "torch"]
    kernels = [*(CORE / "cuda/p2p").glob("*.cu")] if kernels else []
    programs = [HERE / name for name in ("driver.cpp", "gpus_of_hosts.cpp", "device_messages.cpp")]
    programs += [HERE / "accelerator.cpp"] if kernels else []
    include = ("-I", HERE / "emulated", "-I", HERE, "-I", CORE)

    def compiled(source):
        built = folder / f"{source.parent.name}_{source.stem}_{source.suffix[1:]}.o"
        how = ("-std=c++17", "-O1", "-g1", "-ffp-contract=off", "-Wno-unknown-pragmas", *flags, *include)
        compiler.run("-x", "c++", *how, "-c", source, "-o", built, timeout=200)
        return built

    sources = core + kernels + programs
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        objects = dict(zip(sources, pool.map(compiled, sources), strict=True))
    with_kernels = [f for f in core if f != CORE / "cuda/p2p/no_kernels.cpp"] + kernels
    runs = []
    for program in programs:
        others = with_kernels if program.stem == "accelerator" else core
        runs.append(folder / program.stem)
        compiler.run(*flags, *(objects[f] for f in (*others, program)), "-o", runs[-1], "-pthread", timeout=100)
    return runs


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(compiler.COMPILER is None, reason="no C++ compiler")
@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_clean(sanitizer, tmp_path):
    for program in build(tmp_path, sanitizer == "thread", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"):
        result = subprocess.run([program, "1", "1"], capture_output=True, text=True, timeout=250)
        assert result.returncode == 0 and result.stdout == "ok\n", (program.name, result.stderr[-6000:])
