"""The record file of hfrecord, version 1: its layout, and its commit rule.

All numbers are little-endian, all checksums CRC-32 (zlib's). A file is

    byte 0       head: magic "HFRECORD", version u32, crc of meta u32, length of meta u64, crc of these 24 bytes u32
    byte 512     commit: sequence u64, records u64, offset of the index u64, crc of the index u32, crc of these 28 u32
    byte 1024    another commit; of the two, the one with the larger sequence counts
    byte 4096    meta: JSON with the schema, the compression and its dictionary
    after it     records and indices, in the order in which they were written

An index has an entry for every record: offset u64, length u64, crc u32, codec u32 (0 uncompressed, 1 zstd). The crc
covers number, offset, length and codec, and then the stored record. So neither an entry nor a record can be mistaken
for another.

The commit rule: records and an index of all of them are written and flushed, then the older commit is overwritten, in
one sector. A writer killed before that leaves the newer commit intact, and after its data some bytes that the next
writer overwrites. A new file has two commits without records before it gets its name, so both are always complete. An
incomplete commit is damage, and is never treated as an older state.
"""

import json
import os
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np

MAGIC, VERSION = b"HFRECORD", 1
HEAD, COMMIT, NUMBER = struct.Struct("<8sIIQI"), struct.Struct("<QQQII"), struct.Struct("<QQQI")
COMMITS, META = (512, 1024), 4096  # bytes
LARGEST_META = 16 << 20
INDEX = np.dtype([("offset", "<u8"), ("length", "<u8"), ("crc", "<u4"), ("codec", "<u4")])
ENTRY = struct.Struct("<QQII")
PLAIN, ZSTD = 0, 1


class RecordError(ValueError):
    """A record file is damaged or misused. The arguments are its attributes.

    Args:
        path: The file; the whole message if it is the only argument, so a DataLoader can re-raise a worker's error.
        what: What is wrong.
        record: The number of the record in the file.
        offset: The place in the file, in bytes.
    """

    path: str

    def __init__(
        self,
        path: str | os.PathLike[str],
        what: str | None = None,
        record: int | None = None,
        offset: int | None = None,
    ):
        self.path, self.what, self.record, self.offset = os.fspath(path), what, record, offset
        where = [self.path]
        where += [f"record {record}"] if record is not None else []
        where += [f"byte {offset}"] if offset is not None else []
        super().__init__(f"{', '.join(where)}: {what}" if what is not None else self.path)

    def __reduce__(self) -> tuple[Any, ...]:
        return RecordError, (self.path, self.what, self.record, self.offset)


def seed(number: int, offset: int, length: int, codec: int) -> int:
    """The first part of a record's checksum."""
    return zlib.crc32(NUMBER.pack(number, offset, length, codec))


def head(meta: bytes) -> bytes:
    """The first `META` bytes of a new file, with two commits of no records. meta: has an aligned length."""
    start = HEAD.pack(MAGIC, VERSION, zlib.crc32(meta), len(meta), 0)[:-4]
    page = bytearray(META)
    page[: HEAD.size] = start + struct.pack("<I", zlib.crc32(start))
    for sequence in (0, 1):
        place = COMMITS[sequence]
        page[place : place + COMMIT.size] = commit(sequence, 0, META + len(meta), 0)
    return bytes(page)


def commit(sequence: int, records: int, index: int, crc: int) -> bytes:
    body = COMMIT.pack(sequence, records, index, crc, 0)[:-4]
    return body + struct.pack("<I", zlib.crc32(body))


def aligned(offset: int) -> int:
    """The first valid position of an index at or after `offset`."""
    return -(-offset // 8) * 8


class Head:
    """The head of a file: `meta` (dict), and `sequence`, `records`, `index` and `crc` of its last commit.

    fd: a file descriptor. size: bytes of the file. Raises RecordError if a part is damaged or beyond the end.
    """

    def __init__(self, path, fd: int, size: int):
        page = read_at(fd, META, 0)
        if len(page) < META or page[:8] != MAGIC:
            raise RecordError(path, f"not a record file: {len(page)} bytes, the first ones are {page[:8]!r}", None, 0)
        _, version, meta_crc, length, crc = HEAD.unpack_from(page)
        if zlib.crc32(page[: HEAD.size - 4]) != crc:
            raise RecordError(path, "the head's checksum does not match", None, 0)
        if version != VERSION:
            raise RecordError(path, f"version {version}, this hfrecord reads {VERSION}: install a newer one", None, 8)
        if length > min(size - META, LARGEST_META):
            raise RecordError(path, f"meta of {length} bytes, in a file of {size}: it was cut off", None, META)
        meta = read_at(fd, length, META)
        if zlib.crc32(meta) != meta_crc:
            raise RecordError(path, "the checksum of meta does not match", None, META)
        self.meta = parsed(path, meta, META)
        self.sequence, self.records, self.index, self.crc = max(self._commits(path, page))
        self.end = self.index + self.records * INDEX.itemsize
        if self.index % 8 or self.index < META + length or self.end > size:
            what = f"{self.records} records with an index at {self.index}, in a file of {size} bytes: it was cut off"
            raise RecordError(path, what, None, self.index)

    @staticmethod
    def _commits(path, page):
        found = []
        for slot, place in enumerate(COMMITS):
            *values, crc = COMMIT.unpack_from(page, place)
            whole = zlib.crc32(page[place : place + COMMIT.size - 4]) == crc and values[0] % 2 == slot
            if not whole:
                raise RecordError(path, "the commit's checksum does not match", None, place)
            found.append(values)
        if abs(found[0][0] - found[1][0]) != 1:
            raise RecordError(path, f"commits {found[0][0]} and {found[1][0]} do not follow each other", None, 512)
        return found


def parsed(path, text: bytes, offset: int) -> dict:
    """A JSON object; raises RecordError otherwise."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RecordError(path, f"no JSON: {error}", None, offset) from None
    if not isinstance(found, dict):
        raise RecordError(path, f"a JSON object is expected, found {type(found).__name__}", None, offset)
    return found


def read_at(fd: int, length: int, offset: int) -> bytes:
    """Up to `length` bytes at `offset`; fewer only at the end of the file. A single read ends at 2 GiB."""
    found = os.pread(fd, length, offset)
    if len(found) == length or not found:
        return found
    parts, done = [found], len(found)
    while done < length and (more := os.pread(fd, length - done, offset + done)):
        parts.append(more)
        done += len(more)
    return b"".join(parts)


def replace(path, content: bytes) -> None:
    """Writes a whole file or nothing; it is on disk when this returns."""
    path = Path(path)
    temporary = path.with_name(f"{path.name}.tmp")
    with open(temporary, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    rename(temporary, path)


def rename(temporary, path) -> None:
    """Gives a finished file its name; it is on disk when this returns."""
    os.replace(temporary, path)
    folder = os.open(Path(path).parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
