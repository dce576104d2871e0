"""Programs of tests/hfrecord for processes that are killed or have little memory: records.py FUNCTION ARGUMENTS"""

import json
import os
import resource
import struct
import sys
import threading
import warnings
import zlib
from pathlib import Path

if "HFRECORD_EXTENSION" in os.environ:  # another build of hfrecord._C, at this path
    import importlib.util

    _spec = importlib.util.spec_from_file_location("hfrecord._C", os.environ["HFRECORD_EXTENSION"])
    sys.modules["hfrecord._C"] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules["hfrecord._C"])

import numpy as np

import hfrecord
from hfrecord import format

sys.path.insert(0, str(Path(__file__).parents[1] / "fuzz"))


def record(number: int) -> bytes:
    """Up to 3000 bytes, occasionally more than a buffer; determined by its number."""
    size = (1 << 20) + 1 if number % 500 == 499 else number * 2654435761 % 3000
    return (number.to_bytes(8, "little") * (size // 8 + 1))[:size]


def writes(kind: str, path: str) -> None:
    """Appends for ever, and prints the number of records after each commit."""
    if kind == "dataset":
        writer = hfrecord.DatasetWriter(path, part_bytes=200_000, append=True)
    else:
        writer = hfrecord.FileWriter(path, append=True, compression="zstd" if kind == "zstd" else None)
    while True:
        for _ in range(1 + len(writer) % 37):
            writer.write(record(len(writer)))
        writer.commit()
        print(len(writer), flush=True)


def reads(path: str) -> None:
    """Reads for ever, in threads and in a forked process, and prints when it has started."""
    reader = hfrecord.FileReader(path)
    pid = os.fork()
    rng = np.random.default_rng(pid)

    def loop():
        while True:
            indices = rng.integers(len(reader), size=64)
            reader.advise(indices)
            assert reader[indices] == [record(int(i)) for i in indices]
            os.write(1, b"%d\n" % pid)  # in one write, because others write, too

    for _ in range(3):
        threading.Thread(target=loop).start()


def warmed(reader):
    """Makes the reader find all records in memory often enough."""
    for _ in range(40):
        reader.advise(range(len(reader)))
    return reader


def mutations(folder: str, first: str, last: str) -> None:
    """Damaged files of alternating kinds: {outcome: count}. A wrong record raises an error."""
    import random

    from records_session import DAMAGE, damaged

    sets, counts = damageable(Path(folder)), {"told": 0, "right": 0}
    if "ASAN_OPTIONS" not in os.environ:  # which limit memory, too; ASan keeps freed memory
        bound_memory(64 << 20)
    for seed in range(int(first), int(last)):
        rng = random.Random(seed)
        path, files, records = sets[seed % len(sets)]
        file = rng.choice(files)
        whole = file.read_bytes()
        if rng.random() < 0.3:
            changed, any_data = hostile(bytearray(whole), rng, file.suffix), True
        else:
            changed, any_data = (
                damaged(bytearray(whole), rng.choice(DAMAGE), rng.random(), rng.randrange(1, 256)),
                False,
            )
        file.write_bytes(changed)
        try:
            reader = hfrecord.FileReader(path)
            found = shown((warmed(reader) if seed % 3 == 0 else reader)[:])
            assert any_data or found == records, f"seed {seed}: wrong records in {file}"
            counts["right"] += 1
        except (hfrecord.RecordError, FileNotFoundError) as error:
            assert str(Path(folder)) in str(error), f"seed {seed}: names no file: {error}"
            counts["told"] += 1
        file.write_bytes(whole)
    print(json.dumps(counts))


def shown(records: list) -> list:
    return [
        {k: v.tolist() if hasattr(v, "tolist") else v for k, v in r.items()} if isinstance(r, dict) else r
        for r in records
    ]


def damageable(folder: Path) -> list[tuple]:
    """Small files of each kind: (what is opened, its files, the records)."""
    plain = [record(i) for i in range(40)]
    fields = {"x": "float32[?,3]", "label": "int64", "text": "text", "json": "json", "raw": "bytes"}
    rich = [{"x": np.ones((i % 5, 3)), "label": i, "text": "a" * i, "json": [i], "raw": b"1"} for i in range(40)]
    made = []
    for name, records, options in (
        ("plain.hfr", plain, {}),
        ("zstd.hfr", plain, {"compression": "zstd", "dictionary": bytes(range(256))}),
        ("schema.hfr", rich, {"schema": fields}),
    ):
        with hfrecord.FileWriter(folder / name, **options) as writer:
            for number, data in enumerate(records):
                writer.write(data)
                if number in (10, 30):
                    writer.commit()
        made.append((folder / name, [folder / name], records))
    with hfrecord.FfrWriter(folder / "a.ffr") as writer:
        for data in plain:
            writer.write(data)
    made.append((folder / "a.ffr", [folder / "a.ffr"], plain))
    with hfrecord.DatasetWriter(folder / "set", part_bytes=20_000) as writer:
        for data in plain:
            writer.write(data)
    made.append((folder / "set", sorted((folder / "set").iterdir()), plain))
    return [(path, files, shown(hfrecord.FileReader(path)[:])) for path, files, _ in made]


HUGE = (0, 1, 2, 255, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)
METAS = (
    b"[]", b"{", b"7", b'{"schema": 5}', b'{"schema": {"a": "float32[99999999999999999999,?]"}}', b"[" * 5000,
    b'{"schema": {"a": "float64[4294967296,4294967296]"}}', b'{"dictionary": 5}', b'{"dictionary": "!"}',
    b'{"schema": {}}', b'{"schema": {"a": "json"}}', b'{"compression": 5}', b'{"schema": {"a": "image"}}',
    b'{"schema": {"a": "int64[?,?,?,?]"}}', b'{"schema": {"a": "text", "b": "bytes"}}',
)  # fmt: skip


def hostile(data: bytearray, rng, suffix: str) -> bytes:
    """A file with a forged field, and matching checksums."""
    value, start = rng.choice(HUGE), format.META
    if suffix == ".json":
        body = {"version": 1, "suffix": ".hfr", "records": rng.choice(([value], [value] * 3, [1, -1], "a", [1.5], {}))}
        crc = zlib.crc32(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())
        return json.dumps(body | {"crc32": crc}).encode()
    if suffix == ".ffr":
        (n,) = struct.unpack_from("<Q", data, 4)
        at = rng.choice((4, 12 + 4 * n, 12 + 4 * n + 8 * rng.randrange(n)))
        struct.pack_into("<Q", data, at, value)
        (n,) = struct.unpack_from("<Q", data, 4)
        struct.pack_into("<I", data, 0, zlib.crc32(data[4 : 12 + 12 * min(n, len(data))]))
        return bytes(data)
    how = rng.choice(("meta", "meta length", "records", "index", "entry", "record"))
    slot = max(format.COMMITS, key=lambda place: format.COMMIT.unpack_from(data, place)[0])
    sequence, records, index, _, _ = format.COMMIT.unpack_from(data, slot)
    if how in ("meta", "meta length"):
        magic, version, crc, length, _ = format.HEAD.unpack_from(data)
        if how == "meta":
            meta = rng.choice(METAS)[:length]
            data[start : start + length] = meta + b" " * (length - len(meta))
            crc = zlib.crc32(data[start : start + length])
        else:
            length = value
        page = format.HEAD.pack(magic, version, crc, length, 0)[:-4]
        data[: format.HEAD.size] = page + struct.pack("<I", zlib.crc32(page))
        return bytes(data)
    number = rng.randrange(records) if records else 0
    at = index + format.ENTRY.size * number
    if how in ("entry", "record") and records:
        offset, length, _, codec = format.ENTRY.unpack_from(data, at)
        if how == "entry":
            offset, length, codec = rng.choice(((value, length, codec), (offset, value, codec), (offset, length, 1)))
        else:
            begin = offset + rng.randrange(max(1, length))
            data[begin : begin + 8] = struct.pack("<Q", value)[: len(data[begin : begin + 8])]
        length = min(length, (1 << 64) - 1)
        crc = zlib.crc32(data[offset : offset + length], format.seed(number, offset, length, codec))
        format.ENTRY.pack_into(data, at, offset, length, crc, codec)
    records, index = (value, index) if how == "records" else (records, value) if how == "index" else (records, index)
    crc = zlib.crc32(data[index : index + 24 * min(records, 1000)])
    data[slot : slot + format.COMMIT.size] = format.commit(sequence, records, index, crc)
    return bytes(data)


def bound_memory(more: int) -> None:
    """From here on the process may take `more` bytes; an allocation beyond that raises MemoryError."""
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + more, now + more))


if __name__ == "__main__":
    warnings.simplefilter("error")
    globals()[sys.argv[1]](*sys.argv[2:])
