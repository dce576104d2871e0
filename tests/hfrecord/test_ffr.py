"""FFRecord's files: its own files are read byte for byte, ours are read by a reader made from its description.

The files in ffrecord/ were written by FFRecord 1.4.0 (commit 3f6380c, built with gcc 12), as

    writer = ffrecord.FileWriter(path, len(sizes))
    for i, size in enumerate(sizes):
        writer.write_one(record(i, size))
    writer.close()
"""

import itertools
import struct
import zlib
from pathlib import Path

import pytest

import hfrecord

THEIRS = Path(__file__).parent / "ffrecord"
SIZES = {"some": [5, 0, 1, 300, 0, 64, 17], "more": [3, 2000, 1], "none": []}


def record(i: int, size: int) -> bytes:
    return bytes((31 * i + 7 * k) % 256 for k in range(size))


def described(data: bytes) -> list[bytes]:
    """The samples of an .ffr file, by the table in FFRecord's README: checksum, N, checksums, offsets, samples."""
    (checksum,), (n,) = struct.unpack("<I", data[:4]), struct.unpack("<q", data[4:12])
    checksums = struct.unpack(f"<{n}I", data[12 : 12 + 4 * n])
    offsets = struct.unpack(f"<{n}q", data[12 + 4 * n : 12 + 12 * n])
    assert zlib.crc32(data[4 : 12 + 12 * n]) == checksum
    samples = [data[begin:end] for begin, end in itertools.pairwise([*offsets, len(data)])]
    assert [zlib.crc32(sample) for sample in samples] == list(checksums)
    return samples


@pytest.mark.parametrize("name", SIZES)
def test_theirs_are_read_and_ours_are_the_same_bytes(tmp_path, name):
    records = [record(i, size) for i, size in enumerate(SIZES[name])]
    theirs = THEIRS / f"{name}.ffr"
    assert hfrecord.FileReader(theirs)[:] == records == described(theirs.read_bytes())
    with hfrecord.FfrWriter(tmp_path / "ours.ffr") as writer:
        for data in records:
            writer.write(data)
    assert (tmp_path / "ours.ffr").read_bytes() == theirs.read_bytes()


def test_ours_are_read_by_the_description(tmp_path):
    records = [record(i, i * i % 997) for i in range(3000)]
    with hfrecord.FfrWriter(tmp_path / "a.ffr") as writer:
        for data in records:
            writer.write(data)
        assert len(writer) == 3000 and not (tmp_path / "a.ffr").exists()
    assert described((tmp_path / "a.ffr").read_bytes()) == records == hfrecord.FileReader(tmp_path / "a.ffr")[:]


def test_many_of_them_are_one_sequence():
    found = hfrecord.FileReader([THEIRS / "some.ffr", THEIRS / "none.ffr", THEIRS / "more.ffr"])
    assert found[[-1, 0, 8, 0]] == [record(2, 1), record(0, 5), record(1, 2000), record(0, 5)]
    assert len(hfrecord.FileReader(THEIRS)) == 10  # FFRecord, too, accepts a folder


def test_an_old_file_has_no_checksum_of_its_index(tmp_path):
    data = (THEIRS / "some.ffr").read_bytes()
    (tmp_path / "old.ffr").write_bytes(bytes(4) + data[4:])
    assert hfrecord.FileReader(tmp_path / "old.ffr")[:] == described(data)


def test_a_block_that_raises_leaves_no_file(tmp_path):
    with pytest.raises(ZeroDivisionError), hfrecord.FfrWriter(tmp_path / "a.ffr") as writer:
        writer.write(b"a")
        raise ZeroDivisionError
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("cut", [0, 4, 11, 12, 50, 95, 100, 482])
def test_a_file_that_was_cut_off_is_told(tmp_path, cut):
    path = tmp_path / "a.ffr"
    path.write_bytes((THEIRS / "some.ffr").read_bytes()[:cut])
    with pytest.raises(hfrecord.RecordError, match=f"{path}.* byte "):
        hfrecord.FileReader(path)[:]
