"""The core under ThreadSanitizer, AddressSanitizer and UndefinedBehaviorSanitizer, with ranks as threads: driver.cpp;
with emulated GPUs gpus_of_hosts.cpp, over TCP, and device_messages.cpp. Under ThreadSanitizer also accelerator.cpp,
with kernels on threads (emulated/). Also checks with the linker that no name has two definitions.
"""

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import compiler
import pytest

HERE = Path(__file__).parent
CORE = HERE.parents[1] / "csrc" / "hfreduce"


def build(folder, programs, *flags):
    """Builds these programs and the core, files separately, one per core; for `accelerator` also the kernels."""
    kernels = "accelerator" in programs
    core = [f for f in CORE.rglob("*.cpp") if f.stem != "bindings" and f.parent.name != "torch"]
    kernels = [*(CORE / "cuda/p2p").glob("*.cu")] if kernels else []
    programs = [HERE / f"{name}.cpp" for name in programs]
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
@pytest.mark.parametrize("sanitizer", [pytest.param("thread", marks=pytest.mark.rest), "address,undefined"])
def test_clean(sanitizer, tmp_path):
    programs = ["driver", "gpus_of_hosts", "device_messages"] + ["accelerator"] * (sanitizer == "thread")
    for program in build(tmp_path, programs, f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"):
        result = subprocess.run([program, "1", "1"], capture_output=True, text=True, timeout=250)
        assert result.returncode == 0 and result.stdout == "ok\n", (program.name, result.stderr[-6000:])


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(compiler.COMPILER is None, reason="no C++ compiler")
def test_no_name_has_two_definitions(tmp_path):
    """Across files only the linker can detect this, and only with the compiler's type information (LTO)."""
    build(tmp_path, ["accelerator"], "-fPIC", "-flto=2", "-Wodr", "-Werror=odr")
    other = tmp_path / "other.cpp"
    other.write_text("struct A { virtual int f(); int x; }; int A::f() { return x; } A* a() { return new A; }\n")
    one = tmp_path / "one.cpp"
    one.write_text("struct A { virtual ~A(); double y; }; A::~A() {} int main() { A a; return a.y > 0; }\n")
    with pytest.raises(subprocess.CalledProcessError):
        compiler.run("-flto=2", "-Werror=odr", one, other, "-o", tmp_path / "both", stderr=subprocess.DEVNULL)
