"""Normal use of hfrecord's files: writing, appending, reading by all kinds of indices, schemas, processes.

tests/fuzz/records.py has random programs, test_damage.py damage, test_locks.py locks, test_ffr.py FFRecord's files.
"""

import concurrent.futures
import errno
import mmap
import multiprocessing
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import hfrecord
from hfrecord import format, native, reader

RECORDS = [bytes([i]) * (i * 37 % 300) for i in range(100)]


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "a.hfr"
    with hfrecord.FileWriter(path) as writer:
        for record in RECORDS:
            writer.write(record)
    return path


def test_indices_are_those_of_a_list(path):
    found = hfrecord.FileReader(path)
    assert len(found) == 100 and found[:] == RECORDS == list(found)
    assert found[7] == found[np.int64(7)] == found[-93] == RECORDS[7]
    assert found[[5, -1, 5, 0]] == [RECORDS[i] for i in (5, -1, 5, 0)] == found.read(np.array([5, -1, 5, 0]))
    assert found[80:20:-7] == RECORDS[80:20:-7] and found[200:] == [] == found[[]] == found.read(np.empty(0))
    assert found[np.array([3, 4], np.uint8)] == RECORDS[3:5] and found[(1, 2)] == RECORDS[1:3]


@pytest.mark.parametrize("index", [100, -101, 1 << 70, [0, 100], np.array([1 << 63], np.uint64), [1 << 70]])
def test_an_index_beyond_is_an_error(path, index):
    with pytest.raises(IndexError, match="of 100 records"):
        hfrecord.FileReader(path)[index]


@pytest.mark.parametrize("index", [1.0, "1", None, [1.5], [[1]], np.array([True]), {1}])
def test_what_is_no_index_is_a_type_error(path, index):
    with pytest.raises(TypeError, match="integer"):
        hfrecord.FileReader(path)[index]


def test_many_files_are_one_sequence(path, tmp_path):
    with hfrecord.DatasetWriter(tmp_path / "set", part_bytes=5000) as writer:
        for record in RECORDS:
            writer.write(record)
    assert len(list((tmp_path / "set").glob("part-*.hfr"))) > 5
    both = hfrecord.FileReader([tmp_path / "set", path])
    order = np.random.default_rng(0).permutation(200)
    assert both[order] == [(RECORDS + RECORDS)[i] for i in order]
    (tmp_path / "set" / "manifest.json").unlink()
    assert hfrecord.FileReader(tmp_path / "set")[:] == RECORDS


def test_files_beyond_the_limit_are_closed(tmp_path, monkeypatch):
    with hfrecord.DatasetWriter(tmp_path / "set", part_bytes=4200) as writer:
        for record in RECORDS:
            writer.write(record)
    monkeypatch.setattr(reader, "OPEN", 3)
    found = hfrecord.FileReader(tmp_path / "set")
    before = len(os.listdir("/proc/self/fd"))
    assert found[:] == RECORDS and len(found._open) == 3
    assert len(os.listdir("/proc/self/fd")) <= before + 6
    found.close()
    assert len(os.listdir("/proc/self/fd")) <= before and found[3] == RECORDS[3]


def test_appending(path):
    old = hfrecord.FileReader(path)
    with hfrecord.FileWriter(path, append=True) as writer:
        writer.write(bytearray(b"more"))
        assert len(writer) == 101
        writer.commit()
        writer.write(np.arange(3, dtype=np.int16))
        assert len(hfrecord.FileReader(path)) == 101
    assert hfrecord.FileReader(path)[-2:] == [b"more", b"\0\0\1\0\2\0"]
    assert len(old) == 100 and old[:] == RECORDS  # a reader sees what existed when it was made


def test_a_block_that_raises_leaves_what_was_committed(path):
    with pytest.raises(ZeroDivisionError), hfrecord.FileWriter(path, append=True) as writer:
        writer.write(b"a")
        writer.commit()
        writer.write(b"b" * (3 << 20))  # more than a buffer
        raise ZeroDivisionError
    assert hfrecord.FileReader(path)[100:] == [b"a"]


def test_one_writer_at_a_time(path):
    with hfrecord.FileWriter(path, append=True) as writer:
        with pytest.raises(hfrecord.RecordError, match="another writer"):
            hfrecord.FileWriter(path, append=True)
        writer.write(b"x")
    with pytest.raises(ValueError, match="is closed"):
        writer.write(b"x")


def test_a_full_disk_loses_nothing(path, monkeypatch):
    """Data that could not be written is kept for a later write; refused records are not."""
    writer = hfrecord.FileWriter(path, append=True)
    writer.write(b"before")
    pwrite, room = os.pwrite, [1000]

    def full(fd, data, offset):
        done = pwrite(fd, data[: room[0]], offset) if room[0] else 0
        room[0] -= done
        if not done:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return done

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        writer.write(b"x" * (2 << 20))
        for call in (lambda: writer.write(b"not taken"), writer.commit):
            with pytest.raises(OSError, match="No space left"):
                call()
    assert len(hfrecord.FileReader(path)) == 100
    writer.close()
    assert hfrecord.FileReader(path)[99:] == [RECORDS[99], b"before", b"x" * (2 << 20)]


def test_new_files_and_old_ones_are_not_mixed_up(path, tmp_path):
    with pytest.raises(FileExistsError, match="append=True"):
        hfrecord.FileWriter(path)
    with pytest.raises(ValueError, match="has schema None"):
        hfrecord.FileWriter(path, {"a": "text"}, append=True)
    with pytest.raises(FileExistsError, match="append=True"):
        hfrecord.DatasetWriter(path.with_name("set"), append=True).close()
        hfrecord.DatasetWriter(path.with_name("set"))
    path.rename(path.with_name("part-000000.hfr"))
    with pytest.raises(FileExistsError, match="has record files"):
        hfrecord.DatasetWriter(tmp_path, append=True)
    with pytest.raises(FileNotFoundError):
        hfrecord.FileReader(tmp_path / "none.hfr")
    with pytest.raises(FileNotFoundError, match=r"no \.hfr or \.ffr"):
        hfrecord.FileReader((tmp_path / "empty").mkdir() or tmp_path / "empty")
    with pytest.raises(ValueError, match="None or 'zstd'"):
        hfrecord.FileWriter(tmp_path / "b.hfr", compression="lz4")
    with pytest.raises(ValueError, match="zstd's"):
        hfrecord.FileWriter(tmp_path / "b.hfr", dictionary=b"x")


def test_compression(tmp_path):
    rng = np.random.default_rng(0)
    words = [rng.bytes(12) for _ in range(50)]
    records = [b"".join(words[i] for i in rng.integers(50, size=20)) for _ in range(500)] + [b"", bytes(17 << 20)]
    sizes = {}
    for name, options in {
        "plain": {},
        "zstd": {"compression": "zstd"},
        "shared": {"compression": "zstd", "dictionary": hfrecord.train_dictionary(records[:400], 4096)},
    }.items():
        with hfrecord.FileWriter(tmp_path / f"{name}.hfr", **options) as writer:
            for record in records[:-1]:
                writer.write(record)
        sizes[name] = (tmp_path / f"{name}.hfr").stat().st_size
        assert hfrecord.FileReader(tmp_path / f"{name}.hfr")[:] == records[:-1]
    assert sizes["shared"] < 0.7 * sizes["zstd"] < 0.7 * sizes["plain"]
    # Data beyond 16 MiB that would expand more than 64 times is stored uncompressed, so a reader can reject larger
    # claims.
    with hfrecord.FileWriter(tmp_path / "zstd.hfr", append=True) as writer:
        writer.write(records[-1])
    assert hfrecord.FileReader(tmp_path / "zstd.hfr")[-1] == records[-1]
    assert (tmp_path / "zstd.hfr").stat().st_size > 17 << 20


def test_schema(tmp_path):
    fields = {"x": "float32[?,2]", "n": "uint8", "flag": "bool", "text": "text", "raw": "bytes", "more": "json"}
    record = {"x": np.ones((3, 2)), "n": 255, "flag": True, "text": "\u00e9", "raw": b"\0", "more": {"a": [1, None]}}
    with hfrecord.FileWriter(tmp_path / "a.hfr", fields) as writer:
        writer.write(record)
        writer.write({**record, "x": np.empty((0, 2))})
    found, empty = hfrecord.FileReader(tmp_path / "a.hfr")
    assert found["x"].dtype == np.float32 and found["x"].flags.writeable and empty["x"].shape == (0, 2)
    assert found | {"x": found["x"].tolist()} == record | {"x": [[1, 1]] * 3}
    assert type(found["n"]) is int and type(found["flag"]) is bool
    schema = hfrecord.Schema(fields)
    for wrong, why in (
        ({"x": np.ones((3, 3))}, r"takes float32\[\?,2\], got float64\[3, 3\]"),
        ({"n": 256}, "values beyond it"),
        ({"n": 1.5}, "takes uint8"),
        ({"flag": 1}, "takes bool"),
        ({"other": 1}, "give x, n, flag"),
    ):
        with pytest.raises(ValueError, match=why):
            schema.encode(record | wrong)


@pytest.mark.parametrize("kind", ["float16", "float32", "complex64"])
def test_numbers_beyond_a_float_are_an_error(kind):
    schema, largest = hfrecord.Schema({"x": f"{kind}[?]"}), float(np.finfo(kind).max)
    for values in ([1.0, largest], [np.inf, -np.inf, np.nan], [65504]):
        found = schema.decode(schema.encode({"x": np.array(values)}))["x"]
        assert np.array_equal(found, np.array(values, kind), equal_nan=True)
    for values in ([0.0, 2 * largest], [-1e300, np.nan], *([[70000]] if kind == "float16" else [])):
        with pytest.raises(ValueError, match=f"'x' takes {kind}, got values beyond it"):
            schema.encode({"x": values})


@pytest.mark.parametrize("kind", ["object", "float33", "int8[", "int8[a]", "O", 5, None, "U10", "int8[?"])
def test_a_kind_that_there_is_not_is_an_error(kind):
    with pytest.raises(ValueError, match="field 'a' is"):
        hfrecord.Schema({"a": kind})


def test_images(tmp_path):
    image = pytest.importorskip("PIL.Image")
    pixels = np.arange(60, dtype=np.uint8).reshape(4, 5, 3)
    with hfrecord.FileWriter(tmp_path / "a.hfr", {"image": "image"}) as writer:
        writer.write({"image": pixels})
        writer.write({"image": image.fromarray(pixels)})
        writer.write({"image": b"no image"})
    found = hfrecord.FileReader(tmp_path / "a.hfr")
    assert all(np.array_equal(np.asarray(record["image"]), pixels) for record in found[:2])
    with pytest.raises(hfrecord.RecordError, match=r"record 2, byte .*field 'image': no image"):
        found[[0, 2]]


def test_without_an_optional_package_an_error_says_what_to_install(tmp_path):
    code = """
import sys
sys.modules["zstandard"] = sys.modules["PIL"] = sys.modules["torch"] = None
import hfrecord
for call in (lambda: hfrecord.FileWriter(sys.argv[1], compression="zstd"), lambda: hfrecord.train_dictionary([b"a"]),
             lambda: hfrecord.Schema({"i": "image"}).encode({"i": 5})):
    try:
        call()
    except ImportError as error:
        print(error)
assert list(hfrecord.ElasticSampler(range(4), 2, shuffle=False)) == [[0, 1], [2, 3]]
"""
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "a.hfr"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("pip install zstandard") == 2 and "pip install Pillow" in done.stdout


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_processes_share_a_reader(path, method):
    found, indices = hfrecord.FileReader(path), [3, -1, 50]
    found[0]
    context = multiprocessing.get_context(method)
    with concurrent.futures.ProcessPoolExecutor(2, mp_context=context) as pool:
        results = list(pool.map(hfrecord.FileReader.read, [found] * 4, [indices] * 4))
    assert results == [[RECORDS[i] for i in indices]] * 4


def test_threads_share_a_reader(tmp_path):
    with hfrecord.DatasetWriter(tmp_path / "set", part_bytes=5000, compression="zstd") as writer:
        for record in RECORDS:
            writer.write(record)
    found = hfrecord.FileReader(tmp_path / "set")
    orders = [np.random.default_rng(k).permutation(100) for k in range(16)]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        results = list(pool.map(found.__getitem__, orders))
    assert results == [[RECORDS[i] for i in order] for order in orders]


def test_a_pickled_reader_checks_as_before(path):
    for check in (True, False):
        assert pickle.loads(pickle.dumps(hfrecord.FileReader([path], check)))._check is check


def test_advice_is_given_in_pieces_that_linux_does_not_cut_off(tmp_path, monkeypatch):
    path, calls = tmp_path / "a.hfr", []
    monkeypatch.setattr(native, "extension", None)
    with hfrecord.FileWriter(path) as writer:
        for size in (5, 1_000_000, 0, 100_000):
            writer.write(bytes(size))
    found = hfrecord.FileReader(path)
    entries = found._file(0).table.entries(np.arange(4))
    monkeypatch.setattr("hfrecord.file._advise", lambda fd, offset, length, kind: calls.append((offset, length)))
    for number, (offset, length) in enumerate(entries[["offset", "length"]].tolist()):
        calls.clear()
        found.advise([number])
        page, covered = mmap.PAGESIZE, set()
        for begin, size in calls:
            pages = range(begin // page, (begin + size - 1) // page + 1)
            assert size > 0 and len(pages) * page <= 128 << 10  # 0 would mean the whole file
            covered |= set(pages)
        assert covered == (set(range(offset // page, (offset + length - 1) // page + 1)) if length else set())


def test_a_batch_that_is_not_in_memory_is_advised_before_it_is_read(path, monkeypatch):
    """And before the next batch; not if the batch's first record is in memory."""
    found, advised = hfrecord.FileReader(path), []
    monkeypatch.setattr(hfrecord.FileReader, "_advise", lambda self, places, looks: advised.append(places.tolist()))
    for cached, own in ((False, [[3, 1, 2]]), (True, [])):
        monkeypatch.setattr("hfrecord.reader.File.cached", lambda self, number, cached=cached: cached)
        for call, more in (
            (lambda: found.read([3, 1, 2], ahead=[5, 4]), [[5, 4]]),
            (lambda: found.read([3, 1, 2]), []),
            (lambda: found[[3, 1, 2]], []),
        ):
            advised.clear()
            assert call() == [RECORDS[i] for i in (3, 1, 2)]
            assert advised == own + more
        advised.clear()
        assert found[3] == RECORDS[3] and not advised  # for a single record a read is as fast


def test_an_index_takes_no_memory_of_the_process(tmp_path):
    """For a manifest of a million files, and for a million records in one file."""
    from hfrecord.manifest import Manifest

    Manifest(tmp_path, [1000] * 1_000_000).save()
    hfrecord.FileWriter(tmp_path / "part-000000.hfr").close()
    with hfrecord.FileWriter(tmp_path / "b.hfr") as writer:
        writer._index = bytearray(np.zeros(1_000_000, format.INDEX).tobytes())
        writer._records = 1_000_000
    code = f"""
import hfrecord
def anonymous():
    with open("/proc/self/status") as file:
        return int(next(line for line in file if line.startswith("RssAnon")).split()[1])
hfrecord.FileReader({str(tmp_path / "b.hfr")!r})
before = anonymous()
one = hfrecord.FileReader({str(tmp_path / "b.hfr")!r}, check=False)
one[::1000]
print(anonymous() - before)
try:
    many = hfrecord.FileReader({str(tmp_path)!r})
except hfrecord.RecordError as error:
    assert "0 records, the manifest says 1000" in str(error)
from hfrecord.manifest import Manifest
many = Manifest.load({str(tmp_path)!r})
assert len(many) == 1_000_000 and many[999_999].endswith("part-999999.hfr")
print(anonymous() - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    of_records, of_files = map(int, done.stdout.split())
    assert of_records < 4_000 and of_files < 64_000, "kB"
