"""Random batches of 64 records, cold and warm, by hfrecord and by others' formats in the same process.

    bench/records.py                                   # rows in bench/results/<cpu>-records.csv, and a table
    bench/records.py --size 2K-20K --mode hfrecord lmdb --megabytes 100
    bench/records.py --tiny                            # whether it runs at all

`pread` is a loop over a flat file, as FFRecord reads where its private file system is not; `disk` is what the disk
itself gives at random: the same with a batch advised ahead, and nothing checked. Cold: files are dropped from the page
cache and opened anew; whose stay there has no such row. Who is not installed is said so. What is read is compared with
what was written.
"""

import gc
import importlib
import os
import shutil
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import cli
import numpy as np
import report

import hfrecord

BATCH = 64
SIZES = {"2K-20K": (2 << 10, 20 << 10), "100K": (100 << 10, 100 << 10), "1M": (1 << 20, 1 << 20)}


class Pread:
    """Records behind one another in a file, their places in memory."""

    ahead = False

    def __init__(self, folder: Path):
        self.path = folder / "flat"

    def write(self, records) -> None:
        lengths = []
        with open(self.path, "wb") as file:
            for data in records:
                file.write(data)
                lengths.append(len(data))
        self.ends = np.cumsum(lengths)
        self.places = np.stack([self.ends - lengths, lengths], 1)

    def open(self):
        fd = self.fd = os.open(self.path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)

    def read(self, batch, following):
        if self.ahead and following is not None:
            for offset, length in self.places[following].tolist():
                os.posix_fadvise(self.fd, offset, length, os.POSIX_FADV_WILLNEED)
        return [os.pread(self.fd, length, offset) for offset, length in self.places[batch].tolist()]

    def close(self):
        os.close(self.fd)


class Disk(Pread):
    ahead = True


class Hfrecord(Pread):
    check = True

    def __init__(self, folder: Path):
        self.path = folder / "a.hfr"

    def write(self, records) -> None:
        with hfrecord.FileWriter(self.path) as writer:
            for data in records:
                writer.write(data)

    def open(self):
        self.reader = hfrecord.FileReader(self.path, self.check)

    def read(self, batch, following):
        return self.reader.read(batch, following)

    def close(self):
        del self.reader


class Unchecked(Hfrecord):
    check = False


class Lmdb(Hfrecord):
    def __init__(self, folder: Path):
        self.path, self.lmdb = folder / "lmdb", importlib.import_module("lmdb")

    def write(self, records) -> None:
        with self.lmdb.open(str(self.path), map_size=1 << 34) as env, env.begin(write=True) as transaction:
            for number, data in enumerate(records):
                transaction.put(b"%08d" % number, data)

    def open(self):
        self.env = self.lmdb.open(str(self.path), readonly=True, lock=False, readahead=False)
        self.transaction = self.env.begin()

    def read(self, batch, following):
        return [self.transaction.get(b"%08d" % number) for number in batch.tolist()]

    def close(self):
        self.transaction.abort()
        self.env.close()


class ArrayRecord(Hfrecord):
    def __init__(self, folder: Path):
        self.path, self.module = folder / "a.array", importlib.import_module("array_record.python.array_record_module")

    def write(self, records) -> None:
        writer = self.module.ArrayRecordWriter(str(self.path), "group_size:1,uncompressed")
        for data in records:
            writer.write(data)
        writer.close()

    def open(self):
        options = "readahead_buffer_size:0,index_storage_option:in_memory"
        self.reader = self.module.ArrayRecordReader(str(self.path), options=options)

    def read(self, batch, following):
        return self.reader.read(batch.tolist())


class Arrow(Hfrecord):
    """datasets of Hugging Face."""

    def __init__(self, folder: Path):
        self.path, self.datasets = folder / "arrow", importlib.import_module("datasets")

    def write(self, records) -> None:
        self.datasets.Dataset.from_dict({"data": list(records)}).save_to_disk(str(self.path))

    def open(self):
        self.reader = self.datasets.load_from_disk(str(self.path))

    def read(self, batch, following):
        return self.reader[batch.tolist()]["data"]


class Ffrecord(Hfrecord):
    """FFRecord's own reader, on its own format."""

    def __init__(self, folder: Path):
        self.path, self.ffrecord = folder / "a.ffr", importlib.import_module("ffrecord")

    def write(self, records) -> None:
        with hfrecord.FfrWriter(self.path) as writer:
            for data in records:
                writer.write(data)

    def open(self):
        self.reader = self.ffrecord.FileReader(str(self.path), check_data=True)

    def read(self, batch, following):
        return self.reader.read(batch.tolist())

    def close(self):
        self.reader.close()


MODES = {
    "hfrecord": Hfrecord, "hfrecord-unchecked": Unchecked, "pread": Pread, "disk": Disk, "ffrecord": Ffrecord,
    "lmdb": Lmdb, "array_record": ArrayRecord, "datasets": Arrow,
}  # fmt: skip


def dropped(path: Path) -> bool:
    """Takes a file, or those of a folder, out of the page cache; whether they are: those that are mapped stay."""
    gc.collect()
    largest = max(path.rglob("*") if path.is_dir() else [path], key=lambda file: file.stat().st_size)
    fd = os.open(largest, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    try:
        os.preadv(fd, [bytearray(1)], os.fstat(fd).st_size // 2, os.RWF_NOWAIT)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(fd)


def measure(size: str, options) -> list[dict]:
    """Rows of one size: everybody's epochs, in turns."""
    low, high = SIZES[size]
    rng = np.random.default_rng(0)
    count = max(2 * BATCH, (options.megabytes << 20) * 2 // (low + high)) // BATCH * BATCH
    lengths = rng.integers(low, high + 1, count)
    blob = rng.bytes(high + count)

    def record(number):
        return blob[number : number + int(lengths[number])]

    order = rng.permutation(count).reshape(-1, BATCH)
    folder, made, seconds = Path(tempfile.mkdtemp(dir=options.folder)), {}, {}
    try:
        for mode in options.mode:
            try:
                (folder / mode).mkdir()
                made[mode] = MODES[mode](folder / mode)
            except ImportError as error:
                print(f"skipped: {mode}: {error}")
                continue
            made[mode].write(map(record, range(count)))
        for _ in range(options.rounds):
            for mode, given in made.items():
                cold = dropped(given.path)
                given.open()
                for name in ("cold" if cold else "not cold", "warm"):
                    begin = time.perf_counter()
                    for k, batch in enumerate(order):
                        found = given.read(batch, order[k + 1] if k + 1 < len(order) else None)
                    seconds.setdefault((mode, name), []).append(time.perf_counter() - begin)
                    right = all(bytes(a) == record(n) for a, n in zip(found, batch.tolist(), strict=True))
                    assert right, f"{mode}: wrong records"
                given.close()
    finally:
        shutil.rmtree(folder)
    timed = {key: times for key, times in seconds.items() if key[1] != "not cold"}
    return [row(size, mode, name, times, count, int(lengths.sum())) for (mode, name), times in timed.items()]


def row(size: str, mode: str, name: str, times: list[float], count: int, nbytes: int) -> dict:
    middle = float(np.median(times))
    spread = 100 * (max(times) - min(times)) / middle
    clock = SimpleNamespace(device_us=1e6 * middle / (count / BATCH), host_us=None, spread_pct=spread)
    more = {"gbps": nbytes / middle / 1e9, "records_per_s": count / middle, "records": count, "bytes": nbytes}
    return report.row("records", (size, BATCH), "bytes", mode, name, clock, None, more)


def table(rows: list[dict], title: str) -> None:
    found = report.grid(title, ("size", "pass", "reader"), ("records a second", "GB/s", "spread"))
    for r in sorted(rows, key=lambda r: (r["case"], r["pass"])):
        rate = f"{float(r['records_per_s']):,.0f}"
        found.add_row(r["case"], r["pass"], r["provider"], rate, f"{float(r['gbps']):.2f}", f"{r['spread_pct']}%")
    report.put(found)


def main(argv=None) -> int:
    parser = cli.parser(__doc__, seconds="not used", tiny="next to no data")
    parser.add_argument("--size", nargs="*", default=list(SIZES), choices=SIZES)
    parser.add_argument("--mode", nargs="*", default=list(MODES), choices=MODES)
    parser.add_argument("--megabytes", type=int, default=300, help="of records, for each size and reader")
    parser.add_argument("--folder", help="where the files are made: on the disk that is in question")
    options = parser.parse_args(argv)
    options.megabytes = 1 if options.tiny else options.megabytes
    path = report.path(options.results, "cpu", "-records")
    with report.shown(table, f"{path.stem}: random batches of {BATCH}") as rows:
        for size in options.size:
            rows += report.append(path, measure(size, options))
    return 0


if __name__ == "__main__":
    cli.run(main)
