"""hfrecord._C against Python: checksums, reads of files on disk and in memory, damage; also under AddressSanitizer."""

import concurrent.futures
import ctypes
import json
import mmap
import os
import subprocess
import sys
import sysconfig
import time
import zlib
from pathlib import Path

import compiler
import numpy as np
import pytest
import ranks

import hfrecord
from hfrecord import format, native

WORKER = Path(__file__).parents[1] / "workers" / "records.py"
CSRC = Path(__file__).parents[2] / "csrc" / "hfrecord"
worker = ranks.loaded(WORKER)
built = pytest.mark.skipif(native.extension is None, reason="hfrecord._C is not built")


@built
def test_checksums_are_zlibs():
    rng = np.random.default_rng(0)
    for size in [*range(700), 1023, 1024, 4096, 100_001, 1 << 20]:
        data = memoryview(rng.bytes(size + 3))[size % 4 : size % 4 + size]
        before = 0 if size % 3 else int(rng.integers(1 << 32))
        found = native.extension.crc32_by_each(data, before)
        assert set(found.values()) == {zlib.crc32(data, before)} and "table" in found
        assert native.extension.crc32(data, before) == zlib.crc32(data, before)
    data = bytearray(1000)
    for at in range(1000):  # the byte at each position counts
        data[at] = 1
        assert set(native.extension.crc32_by_each(data).values()) == {zlib.crc32(data)}
        data[at] = 0


def test_a_processor_with_the_instructions_uses_them():
    with open("/proc/cpuinfo") as file:
        flags = file.read().split()
    if native.extension is None or "pclmulqdq" not in flags:
        pytest.skip("no extension, or no such processor")
    assert ("vpclmul" in native.extension.crc32_by_each(b"")) == ({"vpclmulqdq", "avx512dq"} <= set(flags))
    assert "pclmul" in native.extension.crc32_by_each(b"")


@pytest.fixture(params=["native", "warm", "python"])
def opened(request, monkeypatch):
    """A way of opening files: (path, check) -> FileReader."""
    if request.param == "python":
        monkeypatch.setattr(native, "extension", None)
        return hfrecord.FileReader
    if native.extension is None:
        pytest.skip("hfrecord._C is not built")
    if request.param == "native":
        return hfrecord.FileReader

    def warm(path, check=True):
        found = worker.warmed(hfrecord.FileReader(path, check))
        assert found._looks.warm
        return found

    return warm


RECORDS = [worker.record(i) for i in range(300)] + [b""] * 3 + [bytes(200_000), os.urandom(5 << 20), b"", b"x"]


@pytest.mark.parametrize("kind", ["hfr", "ffr", "zstd"])
def test_records_are_the_same_however_they_are_read(tmp_path, opened, kind):
    path = tmp_path / ("a.ffr" if kind == "ffr" else "a.hfr")
    options = {"compression": "zstd"} if kind == "zstd" else {}
    with (hfrecord.FfrWriter if kind == "ffr" else hfrecord.FileWriter)(path, **options) as writer:
        for record in RECORDS:
            writer.write(record)
    for check in (True, False):
        found = opened(path, check)
        assert found[:] == RECORDS and found[::-1] == RECORDS[::-1]
        order = np.random.default_rng(0).integers(len(RECORDS), size=500)
        assert found.read(order, order) == [RECORDS[i] for i in order]
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            assert all(all(pool.map(lambda k, own=found: own[k::7] == RECORDS[k::7], range(7))) for _ in range(3))


@pytest.mark.parametrize("kind", ["hfr", "ffr"])
def test_damage_is_told_however_it_is_read(tmp_path, opened, kind):
    path = tmp_path / f"a.{kind}"
    with (hfrecord.FfrWriter if kind == "ffr" else hfrecord.FileWriter)(path) as writer:
        for number in range(50):
            writer.write(bytes([number]) * 3000)
    data = bytearray(path.read_bytes())
    at = data.index(bytes([31]) * 3000)
    data[at + 1234] ^= 64
    path.write_bytes(data)
    found = opened(path)
    with pytest.raises(hfrecord.RecordError, match=f"record 31, byte {at}: the checksum does not match") as error:
        found[[3, 31, 5]]
    assert (error.value.path, error.value.record, error.value.offset) == (str(path), 31, at)
    assert opened(path, False)[30:32] == [bytes([30]) * 3000, bytes(data[at : at + 3000])]
    os.truncate(path, at)
    for call in (lambda: found[3], lambda: found.advise([3])):
        with pytest.raises(hfrecord.RecordError, match="cut off while it was open"):
            call()


@built
def test_a_file_is_warm_while_what_is_looked_at_is_in_memory(tmp_path):
    path = tmp_path / "a.hfr"
    with hfrecord.FileWriter(path) as writer:
        for _ in range(64):
            writer.write(os.urandom(100_000))
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    try:
        os.preadv(fd, [bytearray(1)], 3_000_000, os.RWF_NOWAIT)
        pytest.skip("this file system keeps all it is given")
    except BlockingIOError:
        pass
    finally:
        os.close(fd)
    found = hfrecord.FileReader(path)
    for begin in range(0, 64, 4):  # none of these is in memory before it is advised
        found.read(range(begin, begin + 4), ahead=range(begin, begin + 4))
    assert not found._looks.warm
    worker.warmed(found)
    assert found._looks.warm and found[:] == hfrecord.FileReader(path)[:]


@built
@pytest.mark.parametrize("size", [10_000, 100_000])
def test_large_records_are_all_looked_at(tmp_path, size):
    """Records of more than 64 KiB are all checked, so one batch of 64 makes a small file of them warm."""
    with hfrecord.FileWriter(tmp_path / "a.hfr") as writer:
        for _ in range(64):
            writer.write(bytes(size))
    found = hfrecord.FileReader(tmp_path / "a.hfr")
    found.read(range(64))  # brings all into memory, and checks none
    assert not found._looks.warm
    found.advise(range(64))
    assert found._looks.warm == (size > 64 << 10)


@pytest.mark.parametrize("opened", ["native", "python"], indirect=True)
def test_records_are_all_in_memory_after_advice(tmp_path, opened):
    path = tmp_path / "a.hfr"
    with hfrecord.FileWriter(path) as writer:
        for size in (24 << 20, *[1 << 20] * 15):
            writer.write(bytes(size))
    with open(path, "rb") as file:
        os.fsync(file.fileno())  # pages not written yet would stay
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        found, size = opened(path), 39 << 20
        one = found._file(0)
        entries = one.table.entries(np.arange(16))
        if _cached(file, size)[(entries["offset"] + entries["length"] // 2) // mmap.PAGESIZE].mean() > 0.5:
            pytest.skip("this file system keeps what it is given")
        # A page that is asked for is fetched too: a fast disk may have it by then, but not each time.
        assert not all(one.cached(np.array([k])) for k in range(16))
        end, complete = time.monotonic() + 60, False
        while not complete and time.monotonic() < end:
            found.advise(range(16))  # once is enough, unless something else needs the memory
            time.sleep(0.02)
            complete = _cached(file, size).all() and all(one.cached(np.array([k])) for k in range(16))
        assert complete


def _cached(file, size: int) -> np.ndarray:
    """Which pages of the first `size` bytes are in memory. A non-blocking read would itself start to fetch them."""
    found = np.zeros(size // mmap.PAGESIZE, np.uint8)
    with mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as view:
        begin = np.frombuffer(view, np.uint8)
        address = (ctypes.c_void_p(begin.ctypes.data), ctypes.c_size_t(size), ctypes.c_void_p(found.ctypes.data))
        assert ctypes.CDLL(None).mincore(*address) == 0
        del begin
    return (found & 1).astype(bool)


@built
def test_what_does_not_fit_is_refused(tmp_path):
    """By the extension itself, without Python's checks."""
    with hfrecord.FileWriter(tmp_path / "a.hfr") as writer:
        writer.write(b"abc")
    file, looks = hfrecord.FileReader(tmp_path / "a.hfr")._file(0), native.extension.Looks()
    zero, read = np.zeros(1, np.int64), native.extension.read
    assert read(looks, [file.native], zero, zero, True) == ([b"abc"], [])
    for which, numbers, error in (
        (bytes(7), bytes(8), ValueError), (bytes(8), bytes(16), ValueError), (zero + 1, zero, IndexError),
        (zero - 1, zero, IndexError), (zero, [0], TypeError),
    ):  # fmt: skip
        with pytest.raises(error):
            read(looks, [file.native], which, numbers, True)
    for number in (1, -1, 1 << 62):
        assert read(looks, [file.native], zero, zero + number, True) == ([], [])
        assert not native.extension.advise(looks, [file.native], zero, zero + number)
    far = np.array([(1 << 63, 1 << 63, 0, 0)], format.INDEX)
    for own in (True, False):
        hostile = native.extension.File(file.fd, file.end, own, far, 1)
        assert read(looks, [hostile], zero, zero, True) == ([], [])
        with pytest.raises(ValueError, match="too short"):
            native.extension.File(file.fd, file.end, own, far, 3)


def sanitized(folder, change=lambda text: text):
    """Builds the extension with AddressSanitizer. change: edits the text of bindings.cpp."""
    pybind11 = pytest.importorskip("pybind11")
    bindings, module = folder / "bindings.cpp", folder / "_C.so"
    bindings.write_text(change((CSRC / "bindings.cpp").read_text()))
    flags = ("-std=c++17", "-O1", "-g1", "-fPIC", "-shared", "-fsanitize=address", "-fno-omit-frame-pointer")
    headers = [f"-I{path}" for path in (CSRC, pybind11.get_include(), sysconfig.get_path("include"))]
    compiler.run(*flags, *headers, bindings, CSRC / "crc32.cpp", CSRC / "file.cpp", "-o", module)
    return module


def under_sanitizer(module, folder, first, last):
    libraries = [
        subprocess.run([compiler.COMPILER, f"-print-file-name={name}"], capture_output=True, text=True, check=True)
        for name in ("libasan.so", "libstdc++.so")
    ]
    options = {
        "LD_PRELOAD": " ".join(found.stdout.strip() for found in libraries),
        # Limits an allocation to 64 MB; PYTHONMALLOC includes Python's own.
        "ASAN_OPTIONS": "detect_leaks=0:max_allocation_size_mb=64:allocator_may_return_null=1",
        "PYTHONMALLOC": "malloc",
        "HFRECORD_EXTENSION": str(module),
    }  # fmt: skip
    command = [sys.executable, WORKER, "mutations", folder, str(first), str(last)]
    return subprocess.run(command, env={**os.environ, **options}, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.rest
@pytest.mark.timeout(2400)
@pytest.mark.skipif(compiler.COMPILER is None, reason="no C++ compiler")
def test_ten_thousand_damaged_files_under_address_sanitizer(tmp_path):
    found = under_sanitizer(sanitized(tmp_path), tmp_path, 20_000, 30_000)
    assert found.returncode == 0, found.stderr[-6000:]
    counts = json.loads(found.stdout)
    assert counts["told"] > 3 * counts["right"] > 0


@pytest.mark.slow
@pytest.mark.rest
@pytest.mark.skipif(compiler.COMPILER is None, reason="no C++ compiler")
def test_a_record_that_gets_too_little_memory_is_seen(tmp_path):
    size = "static_cast<Py_ssize_t>(length"
    module = sanitized(tmp_path, lambda text: text.replace(f"{size})", f"{size} / 2)"))
    found = under_sanitizer(module, tmp_path, 0, 10)
    assert found.returncode != 0 and "heap-buffer-overflow" in found.stderr
