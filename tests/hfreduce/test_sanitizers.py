"""The core under ThreadSanitizer, AddressSanitizer and UndefinedBehaviorSanitizer: driver.cpp, ranks as threads."""

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
    """The driver and the core, each file on its own, as many at a time as there are cores."""
    sources = [f for f in CORE.glob("*.cpp") if f.stem != "bindings" and not f.stem.startswith("c10d")]
    sources.append(Path(__file__).with_name("driver.cpp"))

    def compiled(source):
        command = [COMPILER, "-std=c++17", "-O1", "-g1", *flags, "-I", CORE, "-c", source, "-o", folder / source.stem]
        subprocess.run(command, check=True, timeout=200)
        return folder / source.stem

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        objects = list(pool.map(compiled, sources))
    subprocess.run([COMPILER, *flags, *objects, "-o", folder / "run", "-pthread"], check=True, timeout=100)
    return folder / "run"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_clean(sanitizer, tmp_path):
    driver = build(tmp_path, f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all")
    result = subprocess.run([driver, "5", "1"], capture_output=True, text=True, timeout=250)
    assert result.returncode == 0 and result.stdout == "ok\n", result.stderr[-6000:]
