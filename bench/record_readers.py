"""The readers that bench/records.py compares, each with its own file; bench/records.py describes them."""

import concurrent.futures
import ctypes
import importlib
import io
import mmap
import os
import platform
import random
import tarfile
import warnings
from pathlib import Path

import numpy as np

import hfrecord
from hfrecord import native

BATCH = 64


class Pread:
    """Consecutive records in a file, with their positions in memory."""

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
    """Bypasses the page cache, with the kernel's asynchronous reads: a batch starts before the previous one is waited
    for."""

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
        requests["data"] = np.arange(2)[:, None]  # which of the two batches a request belongs to, returned in its event
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
    """For files that fit into memory: everything is advised at once."""

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
        self.pages = self.ends // self.PAGE  # a record belongs to the page in which it ends

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
                # An incomplete batch is read separately, so its page need not be held.
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
    """Hugging Face's datasets."""

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
ORDERED = {"hfrecord-window", "ffcv_like", "webdataset"}  # these use their own order of all records
