"""Random batches of 64 records, cold and warm, by hfrecord and by others' formats in the same process.

    bench/records.py                                   # rows in bench/results/<cpu>-records.csv, and a table
    bench/records.py --size 2K-20K --mode hfrecord lmdb --megabytes 100
    bench/records.py --tiny                            # whether it runs at all

`pread` is a loop over a flat file, as FFRecord reads where its private file system is not; `advised` is the same with
a batch advised ahead, and nothing checked. `disk` is what the disk itself gives at random at this size, in whole pages
past the page cache, with one to two batches of reads at once. Cold: files are dropped from the page cache and opened
anew, which counts; whose stay there has no such row. Warm: the third pass over the files. `CPU us` is the time of the
process on all cores for a record, which other work on the machine does not change much. Who is not installed is said
so. What is read is compared with what was written.

--share 0.1 reads a tenth of the records, as of files that are larger than memory: what a reader fetches besides is
then of no use to it. `disk bytes` is what came from the disk for each byte of a record.

Some have an order of their own: webdataset shuffles within 1000 records, and `ffcv_like` within pages of 8 MiB, 8 at
once, each read as a whole by a thread: FFCV's quasi-random order (Leclerc et al., "FFCV: Accelerating training by
removing data bottlenecks", 2023), written anew here, for its package is built with OpenCV. `hfrecord-window` is
hfrecord in an order like these, the sampler's window=1024. datasets maps its file and has all of it fetched when it is
opened; `hfrecord-all` does the same by advice.
"""

import concurrent.futures
import ctypes
import gc
import importlib
import io
import mmap
import os
import platform
import random
import shutil
import tarfile
import tempfile
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import cli
import numpy as np
import report

import hfrecord
from hfrecord import native

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

    def epoch(self, order):
        """Batches: (numbers of records, the records). order: (batches, BATCH) numbers."""
        for k, batch in enumerate(order):
            yield batch.tolist(), self.read(batch, order[k + 1] if k + 1 < len(order) else None)


class Advised(Pread):
    ahead = True


class Disk(Pread):
    """Past the page cache, by the kernel's asynchronous reads: a batch is begun before that before it is waited for."""

    PAGE = 4096
    REQUEST = np.dtype([
        ("data", "u8"), ("key", "u4"), ("rw_flags", "u4"), ("opcode", "u2"), ("priority", "u2"), ("fd", "u4"),
        ("buffer", "u8"), ("nbytes", "u8"), ("offset", "u8"), ("reserved", "u8"), ("flags", "u4"), ("event_fd", "u4"),
    ])  # fmt: skip  # struct iocb, whose opcode 0 is a read
    EVENT = np.dtype([("data", "u8"), ("request", "u8"), ("read", "i8"), ("read_2", "i8")])
    SETUP, DESTROY, GETEVENTS, SUBMIT = (206, 207, 208, 209) if platform.machine() == "x86_64" else (0, 1, 4, 2)

    def open(self):
        self.fd = os.open(self.path, os.O_RDONLY | os.O_DIRECT)

    def epoch(self, order):
        begins = self.places[:, 0] // self.PAGE * self.PAGE
        sizes = -(-(self.places.sum(1) - begins) // self.PAGE) * self.PAGE
        room = int(sizes.max())
        buffer = mmap.mmap(-1, 2 * BATCH * room)  # aligned, as the flag asks
        address = np.frombuffer(buffer, np.uint8).ctypes.data
        context, requests = ctypes.c_ulong(), np.zeros((2, BATCH), self.REQUEST)
        self._call(self.SETUP, 2 * BATCH, ctypes.byref(context))
        requests["fd"] = self.fd
        requests["buffer"] = address + room * np.arange(2 * BATCH).reshape(2, BATCH)
        requests["data"] = np.arange(2)[:, None]  # which of the two a request is of, as its event says
        pointers = requests.ctypes.data + self.REQUEST.itemsize * np.arange(2 * BATCH, dtype=np.uint64)
        under_way = np.zeros(2, np.int64)

        def submit(k):
            mine = requests[k % 2]
            mine["offset"], mine["nbytes"] = begins[order[k]], sizes[order[k]]
            under_way[k % 2] = BATCH
            place, left = pointers[k % 2 * BATCH :].ctypes.data, BATCH
            while left:
                done = self._call(self.SUBMIT, context, left, ctypes.c_void_p(place))
                place, left = place + 8 * done, left - done

        def wait(k):
            events = np.zeros(2 * BATCH, self.EVENT)
            while under_way[k % 2]:
                count = self._call(self.GETEVENTS, context, 1, 2 * BATCH, ctypes.c_void_p(events.ctypes.data), None)
                assert (events["read"][:count] > 0).all(), "a read failed"
                np.subtract.at(under_way, events["data"][:count].astype(np.int64), 1)

        submit(0)
        for k in range(1, len(order)):
            submit(k)
            wait(k - 1)
        wait(len(order) - 1)
        self._call(self.DESTROY, context)
        at = (len(order) - 1) % 2 * BATCH * room + room * np.arange(BATCH) + (self.places[:, 0] - begins)[order[-1]]
        lengths = self.places[order[-1], 1]
        yield (
            order[-1].tolist(),
            [buffer[begin : begin + length] for begin, length in zip(at.tolist(), lengths.tolist(), strict=True)],
        )

    @staticmethod
    def _call(number, *arguments):
        found = ctypes.CDLL(None, use_errno=True).syscall(number, *arguments)
        if found < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return found


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


class Python(Hfrecord):
    """Without the extension in C++."""

    def open(self):
        extension, native.extension = native.extension, None
        super().open()
        self.reader.files().__next__()
        native.extension = extension


class All(Hfrecord):
    """For files that fit into memory: all of it is advised at once."""

    def open(self):
        super().open()
        self.reader.advise(range(len(self.reader)))


class Window(Hfrecord):
    def epoch(self, order):
        sampler = hfrecord.ElasticSampler(self.reader, BATCH, window=1024, seed=random.randrange(1 << 30))
        for batch in sampler:
            yield batch, self.reader.read(batch)


class FfcvLike(Pread):
    PAGE, AT_ONCE = 8 << 20, 8

    def write(self, records) -> None:
        super().write(records)
        self.pages = self.ends // self.PAGE  # a record belongs to the page that it ends in

    def epoch(self, order):
        pages = np.random.permutation(int(self.pages[-1]) + 1)
        groups = [pages[at : at + self.AT_ONCE] for at in range(0, len(pages), self.AT_ONCE)]
        left = []
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(self._load, groups[0])
            for number in range(len(groups)):
                held = waiting.result()
                if number + 1 < len(groups):
                    waiting = pool.submit(self._load, groups[number + 1])
                found = np.concatenate([np.arange(first, last) for first, last, _, _ in held])
                left += np.random.permutation(found).tolist()
                whole = len(left) // BATCH * BATCH if number + 1 < len(groups) else len(left)
                by_page = {int(self.pages[first]): (begin, data) for first, last, begin, data in held if last > first}
                for at in range(0, whole, BATCH):
                    batch = left[at : at + BATCH]
                    yield batch, [self._record(by_page, n) for n in batch]
                # What does not fill a batch is read on its own, that its page need not be held.
                for n in left[whole:]:
                    yield [n], [os.pread(self.fd, int(self.places[n, 1]), int(self.places[n, 0]))]
                left = []

    def _load(self, pages):
        held = []
        for page in pages.tolist():
            first, last = np.searchsorted(self.pages, [page, page + 1]).tolist()
            begin = int(self.places[first, 0]) if last > first else 0
            end = int(self.ends[last - 1]) if last > first else 0
            held.append((first, last, begin, os.pread(self.fd, end - begin, begin)))
        return held

    def _record(self, by_page, n):
        begin, data = by_page[int(self.pages[n])]
        offset, length = self.places[n].tolist()
        return data[offset - begin : offset - begin + length]


class Webdataset(Hfrecord):
    def __init__(self, folder: Path):
        self.path, self.module = folder / "a.tar", importlib.import_module("webdataset")

    def write(self, records) -> None:
        with tarfile.open(self.path, "w") as archive:
            for number, data in enumerate(records):
                member = tarfile.TarInfo(f"{number:08d}.bin")
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))

    def open(self):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.reader = self.module.WebDataset(str(self.path), shardshuffle=False).shuffle(1000)

    def epoch(self, order):
        numbers, records = [], []
        for sample in self.reader:
            numbers.append(int(sample["__key__"]))
            records.append(sample["bin"])
            if len(records) == BATCH:
                yield numbers, records
                numbers, records = [], []
        if records:
            yield numbers, records


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
    "hfrecord": Hfrecord, "hfrecord-unchecked": Unchecked, "hfrecord-python": Python, "pread": Pread,
    "advised": Advised, "disk": Disk, "ffrecord": Ffrecord, "lmdb": Lmdb, "array_record": ArrayRecord,
    "hfrecord-all": All, "datasets": Arrow, "hfrecord-window": Window, "ffcv_like": FfcvLike,
    "webdataset": Webdataset,
}  # fmt: skip
ORDERED = {"hfrecord-window", "ffcv_like", "webdataset"}  # in an order of their own, of all records


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

    order = rng.permutation(count)[: max(2, round(options.share * count / BATCH)) * BATCH].reshape(-1, BATCH)
    folder, made, timed = Path(tempfile.mkdtemp(dir=options.folder)), {}, {}
    try:
        for mode in options.mode:
            if mode in ORDERED and options.share < 1:
                continue
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
                for name in ("cold" if cold else "not cold", "second", "warm"):
                    before, begin, cpu, read = from_disk(), time.perf_counter(), time.process_time(), 0
                    if name not in ("second", "warm"):
                        given.open()  # which may fetch much
                    for batch in given.epoch(order):
                        read += len(batch[0])
                    seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
                    timed.setdefault((mode, name), []).append((seconds, cpu, from_disk() - before))
                    right = all(bytes(a) == record(n) for n, a in zip(*batch, strict=True))
                    assert right and (mode == "disk" or read == order.size), f"{mode}: wrong records"
                given.close()
    finally:
        shutil.rmtree(folder)
    nbytes = int(lengths[order].sum())
    return [
        row(size, mode, name, found, order.size, nbytes, options.share)
        for (mode, name), found in timed.items()
        if name in ("cold", "warm") and (mode, name) != ("disk", "warm")
    ]


def from_disk() -> int:
    """Bytes that this process has had read from disks, by itself or by advice."""
    with open("/proc/self/io") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("read_bytes"))


def row(size: str, mode: str, name: str, found: list[tuple], count: int, nbytes: int, share: float) -> dict:
    times, cpu, fetched = zip(*found, strict=True)
    middle = float(np.median(times))
    spread = 100 * (max(times) - min(times)) / middle
    clock = SimpleNamespace(device_us=1e6 * middle / (count / BATCH), host_us=None, spread_pct=spread)
    more = {"gbps": nbytes / middle / 1e9, "records_per_s": count / middle, "records": count, "bytes": nbytes}
    more |= {"best_records_per_s": count / min(times), "cpu_us_per_record": 1e6 * float(np.median(cpu)) / count}
    more |= {"disk_bytes_per_byte": float(np.median(fetched)) / nbytes}
    shape = (size, BATCH) if share == 1 else (size, BATCH, share)
    return report.row("records", shape, "bytes", mode, name, clock, None, more)


def table(rows: list[dict], title: str) -> None:
    found = report.grid(
        title, ("size", "pass", "reader"), ("records a second", "best", "GB/s", "CPU us", "disk bytes", "spread")
    )
    for r in sorted(rows, key=lambda r: (r["case"], r["pass"])):
        rate, best = (f"{float(r[name]):,.0f}" for name in ("records_per_s", "best_records_per_s"))
        cpu, fetched = float(r["cpu_us_per_record"]), float(r["disk_bytes_per_byte"])
        shown = (rate, best, f"{float(r['gbps']):.2f}", f"{cpu:.2f}", f"{fetched:.1f}", f"{r['spread_pct']}%")
        found.add_row(r["case"], r["pass"], r["provider"], *shown)
    report.put(found)


def main(argv=None) -> int:
    parser = cli.parser(__doc__, seconds="not used", tiny="next to no data")
    parser.add_argument("--size", nargs="*", default=list(SIZES), choices=SIZES)
    parser.add_argument("--mode", nargs="*", default=list(MODES), choices=MODES)
    parser.add_argument("--megabytes", type=int, default=300, help="of records, for each size and reader")
    parser.add_argument("--share", type=float, default=1, help="of the records that are read")
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
