"""Random batches of records: one `pread` per record, and `posix_fadvise` for the next batch.

`advise(indices)` tells the kernel which records will be read. On every Linux file system it starts their reads and
returns. So a batch that was advised one batch ahead is in the page cache when it is read, and the disk has many reads
at once. All processes share the page cache, so one process may advise what others will read.
"""

import base64
import contextlib
import mmap
import operator
import os
import threading
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from hfrecord import ffr, format, native
from hfrecord.format import RecordError
from hfrecord.manifest import Manifest
from hfrecord.schema import Schema, optional

try:
    import resource

    OPEN = max(16, min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], 1 << 20) // 4)  # files, with two descriptors each
except ImportError:
    OPEN = 128
LARGEST_RATIO, SMALL = 64, 16 << 20  # a record may expand to at most 64 times its stored length, or to 16 MiB
PIECE = 128 << 10  # Linux limits advice to its read-ahead, which is at least this by default
STARTED = 1024  # number of records of a read that are advised before the first is read
_advise = getattr(os, "posix_fadvise", None)


class File:
    """One open file of either format, which threads and forked processes may share: `records`, `meta`, `size`, `end`.

    records: the number of records for the reader, if a manifest has fewer. check: whether checksums are compared.
    Raises RecordError for a damaged file, OSError for a missing one.
    """

    def __init__(self, path, check: bool = True, records: int | None = None):
        self.path, self.check = os.fspath(path), check
        self.fd = -1
        self.fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        self.size = os.fstat(self.fd).st_size
        if _advise:
            _advise(self.fd, 0, 0, os.POSIX_FADV_RANDOM)  # a read fetches only what it requests, without read-ahead
        own = not self.path.endswith(".ffr")
        if not own:
            self.table = ffr.Table(self.path, self.fd, self.size, self._mapped, check)
            self._seed, self.end = self.table.seed, self.size
        else:
            self.table = _Table(self.path, self.fd, self.size, self._mapped)
            self._seed, self.end = format.seed, self.table.end
        self.records, self.meta = self.table.records, self.table.meta
        if records is not None and records > self.records:
            raise RecordError(self.path, f"{self.records} records, the manifest says {records}: it was cut off")
        self.records = self.records if records is None else records
        self.native = None
        if native.extension is not None:
            self.native = native.extension.File(self.fd, self.end, own, self.table.view, self.table.records)
        self._local = threading.local()  # a zstandard decompressor serves one thread at a time

    def __del__(self):
        if self.fd >= 0:
            os.close(self.fd)

    def _mapped(self, offset: int, length: int) -> memoryview:
        """Bytes of the file without own memory: accessed pages belong to the page cache."""
        if not length:
            return memoryview(b"")
        begin = offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        found = mmap.mmap(self.fd, offset + length - begin, access=mmap.ACCESS_READ, offset=begin)
        return memoryview(found)[offset - begin :]

    def entries(self, numbers: np.ndarray) -> np.ndarray:
        """The index at `numbers`, int64 (k,), in range: format.INDEX (k,), each of a record inside the file."""
        if os.fstat(self.fd).st_size < self.end:  # access to mapped data that is gone would end the process
            raise RecordError(
                self.path, f"fewer than {self.end} bytes: it was cut off while it was open", None, self.end
            )
        found = self.table.entries(numbers)
        beyond = (found["offset"] > self.size) | (found["length"] > self.size - found["offset"])
        if beyond.any():
            at = int(beyond.argmax())
            offset, length = int(found["offset"][at]), int(found["length"][at])
            what = f"{length} bytes there, in a file of {self.size}: the index is damaged, or the file was cut off"
            raise RecordError(self.path, what, int(numbers[at]), offset)
        return found

    def read(self, numbers: np.ndarray) -> list[bytes]:
        """The records with these numbers, int64 (k,), in range. Raises RecordError for a damaged one."""
        entries = self.entries(numbers)
        found = self._read(numbers, entries)
        if entries["codec"].any():
            places = zip(numbers.tolist(), entries["codec"].tolist(), entries["offset"].tolist(), strict=True)
            for k, (number, codec, offset) in enumerate(places):
                if codec:
                    found[k] = self.decompressed(found[k], codec, number, offset)
        return found

    def _read(self, numbers: np.ndarray, entries: np.ndarray) -> list[bytes]:
        found, fd, check, seed, crc32 = [], self.fd, self.check, self._seed, zlib.crc32
        for number, (offset, length, crc, codec) in zip(numbers.tolist(), entries.tolist(), strict=True):
            try:
                data = os.pread(fd, length, offset)
                if len(data) != length:
                    data += format.read_at(fd, length - len(data), offset + len(data))
            except OSError as error:
                raise RecordError(self.path, f"cannot be read: {error.strerror}", number, offset) from error
            if len(data) != length:
                raise RecordError(self.path, f"{len(data)} bytes of {length}: it was cut off", number, offset)
            if check and crc32(data, seed(number, offset, length, codec)) != crc:
                raise RecordError(self.path, "the checksum does not match", number, offset)
            found.append(data)
        return found

    def advise(self, numbers: np.ndarray) -> None:
        """Starts to read the records with these numbers, int64 (k,), in range, and returns."""
        if _advise:
            entries = self.entries(numbers)
            for offset, length in zip(entries["offset"].tolist(), entries["length"].tolist(), strict=True):
                end = offset + length
                begin = offset // mmap.PAGESIZE * mmap.PAGESIZE if length else end
                for at in range(begin, end, PIECE):
                    _advise(self.fd, at, min(PIECE, end - at), os.POSIX_FADV_WILLNEED)

    def cached(self, number: np.ndarray) -> bool:
        """Whether a record, int64 (1,), in range, is in memory: checks its middle, because its ends may share pages."""
        offset, length = self.entries(number)[["offset", "length"]][0].item()
        try:
            return not length or os.preadv(self.fd, [bytearray(1)], offset + length // 2, os.RWF_NOWAIT) == 1
        except (OSError, AttributeError):  # not in memory, or the system cannot tell
            return False

    def decompressed(self, data: bytes, codec: int, number: int, offset: int) -> bytes:
        """A decompressed record; number, offset: for error messages."""
        if codec != format.ZSTD:
            raise RecordError(self.path, f"codec {codec}, this hfrecord knows 0 and 1", number, offset)
        zstandard = optional("zstandard")
        try:
            size = zstandard.get_frame_parameters(data).content_size
            if size > max(SMALL, LARGEST_RATIO * len(data)):
                raise RecordError(self.path, f"{len(data)} bytes that say they are {size}", number, offset)
            if not hasattr(self._local, "decompressor"):
                self._local.decompressor = zstandard.ZstdDecompressor(dict_data=dictionary(self.path, self.meta))
            return self._local.decompressor.decompress(data)
        except zstandard.ZstdError as error:
            raise RecordError(self.path, f"zstd: {error}", number, offset) from None

    def verify(self) -> None:
        """Reads the index and all records. Raises RecordError for the first damaged one."""
        self.table.verify()
        for begin in range(0, self.records, 64):
            self.read(np.arange(begin, min(begin + 64, self.records)))


def dictionary(path: str, meta: dict):
    """The dictionary of a file's records for zstandard, or None. Raises RecordError if it is invalid."""
    packed = meta.get("dictionary")
    if packed is None:
        return None
    try:
        return optional("zstandard").ZstdCompressionDict(base64.b64decode(packed))
    except (ValueError, TypeError) as error:
        raise RecordError(path, f"the dictionary: {error}", None, format.META) from None


class _Table(format.Head):
    """The memory-mapped index of a file of hfrecord's own format."""

    def __init__(self, path, fd, size, mapped):
        super().__init__(path, fd, size)
        self.path, self.view = path, mapped(self.index, self.records * format.INDEX.itemsize)
        self._entries = np.frombuffer(self.view, format.INDEX) if self.records else np.empty(0, format.INDEX)

    def entries(self, numbers: np.ndarray) -> np.ndarray:
        return self._entries[numbers]

    def verify(self) -> None:
        if native.crc32(self.view) != self.crc:
            raise RecordError(self.path, "the checksum of the index does not match", None, self.index)


class FileReader:
    """The records of files, as a sequence: `len(reader)`, `reader[-1]`, `reader[2:9]`, and `reader[[5, 2, 5]]`.

    paths: a file (.hfr or .ffr), a folder (with the files of its manifest; without a manifest all its .hfr and .ffr
    files in the order of their names), or a list of these. check: whether checksums are compared. Threads and forked,
    spawned or unpickled copies may all read at once. Files are opened when they are read; at most a quarter of the
    process's descriptor limit stay open.

    A record is bytes, or a dict if the files have a schema (schema.py). `read` always returns bytes. Raises IndexError
    and TypeError like a list, and RecordError for a damaged file, with its path, record and offset.
    """

    def __init__(self, paths, check: bool = True):
        many = isinstance(paths, (list, tuple))
        self._given = [os.fspath(path) for path in paths] if many else os.fspath(paths)
        self._check, self._open = check, {}
        self._looks = native.extension and native.extension.Looks()
        sources = [_source(path) for path in (self._given if many else [self._given])]
        self._paths = sources[0] if len(sources) == 1 else [path for source in sources for path in source]
        counts = [source.counts if isinstance(source, Manifest) else self._count(source) for source in sources]
        self._starts = np.concatenate([[0], np.cumsum(np.concatenate(counts))]).astype(np.int64)  # last: the total
        self._known = np.diff(self._starts)
        self.schema = self._schema()

    def _count(self, paths: list[str]) -> np.ndarray:
        return np.array([File(path, self._check).records for path in paths], np.int64)

    def _schema(self) -> Schema | None:
        if not len(self._known):
            return None
        first = self._file(0)
        try:
            return Schema(first.meta["schema"]) if first.meta.get("schema") is not None else None
        except ValueError as error:
            raise RecordError(first.path, f"the schema: {error}", None, format.META) from None

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index):
        if isinstance(index, slice):
            return self._slice(range(len(self))[index])
        if isinstance(index, (Sequence, np.ndarray)) or getattr(index, "ndim", 0):
            return self.__getitems__(index)
        try:
            number = operator.index(index)
        except TypeError:
            kinds = "an integer, a slice, or a sequence of integers"
            raise TypeError(f"an index is {kinds}, got {type(index).__name__}") from None
        return self.__getitems__([number])[0]

    def _slice(self, places: range) -> list:
        if not places:
            return []
        # First check that the files have the records of the manifest, then allocate memory.
        first, last = np.searchsorted(self._starts, sorted((places[0], places[-1])), side="right") - 1
        for file in range(first, last + 1):
            self._file(file)
        return self.__getitems__(places)

    def __getitems__(self, indices) -> list:
        """The records at `indices`, a sequence of integers, in this order; DataLoader fetches batches with it."""
        places = self._places(indices)
        self._start(places)
        return self._decoded(self._read(places), places)

    def read(self, indices, ahead=None) -> list[bytes]:
        """The bytes of the records at `indices`, in this order. ahead: indices that are advised before."""
        places = self._places(indices)
        self._start(places)  # before `ahead`, because these are waited for
        if ahead is not None:
            self.advise(ahead)
        return self._read(places)

    def advise(self, indices) -> None:
        """Starts to read the records at `indices`, and returns as soon as they fit into the disk's queue."""
        self._advise(self._places(indices), self._looks)

    def _start(self, places: np.ndarray) -> None:
        """Advises the records of this read, so that the disk has many reads at once, unless the first is in memory."""
        if len(places) < 2 or (self._looks and self._looks.warm):
            return
        file, number, _ = next(self._groups(places[:1]))
        if not file.cached(number):
            # Separate checks: records advised a moment ago are no evidence about the files.
            self._advise(places[:STARTED], self._looks and native.extension.Looks())

    def _advise(self, places: np.ndarray, looks) -> None:
        if looks is not None and native.extension.advise(looks, *self._located(places)[1:]):
            return
        for file, numbers, _ in self._groups(places):
            file.advise(numbers)

    def sizes(self) -> np.ndarray:
        """Stored bytes of all records, int64 (n,): for uncompressed records, their length."""
        found = [file.entries(np.arange(file.records))["length"] for file in self.files()]
        return np.concatenate([np.empty(0, np.int64), *found]).astype(np.int64)

    def _read(self, places: np.ndarray) -> list[bytes]:
        if self._looks is not None:
            return self._read_native(places)
        if len(self._known) == 1:
            return self._file(0).read(places)
        found = [b""] * len(places)
        for file, numbers, at in self._groups(places):
            for k, data in zip(at, file.read(numbers), strict=True):
                found[k] = data
        return found

    def _read_native(self, places: np.ndarray) -> list[bytes]:
        files, opened, which, numbers = self._located(places)
        found = []
        while len(found) < len(places):
            begin = len(found)
            part, packed = native.extension.read(self._looks, opened, which[begin:], numbers[begin:], self._check)
            for k, codec, offset in packed:
                file = files[which[begin + k]]
                part[k] = file.decompressed(part[k], codec, int(numbers[begin + k]), offset)
            found += part
            if len(found) < len(places):  # Python raises the error for a damaged one
                at = len(found)
                found += files[which[at]].read(numbers[at : at + 1])
        return found

    def _located(self, places: np.ndarray) -> tuple[list[File], list, np.ndarray, np.ndarray]:
        """The files of these records, the extension's data for them, and for each record its file and number."""
        if len(self._known) == 1:
            file = self._file(0)
            return [file], [file.native], np.zeros(len(places), np.int64), places
        numbers = np.searchsorted(self._starts, places, side="right") - 1
        known, which = np.unique(numbers, return_inverse=True)
        files = [self._file(number) for number in known.tolist()]
        return files, [file.native for file in files], which.astype(np.int64), places - self._starts[numbers]

    def _decoded(self, records: list[bytes], places: np.ndarray) -> list:
        if self.schema is None:
            return records
        try:
            return [self.schema.decode(data) for data in records]
        except ValueError:
            for data, place in zip(records, places, strict=True):
                self._decode_one(data, place)
            raise

    def _decode_one(self, data: bytes, place: int) -> None:
        try:
            self.schema.decode(data)
        except ValueError as error:
            file, numbers, _ = next(self._groups(np.array([place])))
            offset = int(file.entries(numbers)["offset"][0])
            raise RecordError(file.path, str(error), int(numbers[0]), offset) from None

    def _places(self, indices) -> np.ndarray:
        """The record numbers, int64 (k,), from 0. Raises IndexError, TypeError."""
        given = np.asarray(indices)
        if given.ndim != 1:
            raise TypeError(f"indices of shape {given.shape}: give a sequence of integers")
        if not given.size:
            return np.empty(0, np.int64)
        if given.dtype.kind not in "iub":
            with contextlib.suppress(TypeError):
                given = np.array([max(-(1 << 62), min(operator.index(i), 1 << 62)) for i in indices], np.int64)
        if given.dtype.kind not in "iu":
            raise TypeError(f"indices of {given.dtype}: give integers")
        n = len(self)
        if given.dtype == np.int64 and given.view(np.uint64).max() < n:  # negative ones are large as unsigned
            return np.ascontiguousarray(given)
        outside = (given >= n) | (given < -n) if given.dtype.kind == "i" else given >= n
        if outside.any():
            raise IndexError(f"index {indices[int(outside.argmax())]} of {n} records")
        places = given.astype(np.int64)
        return np.where(places < 0, places + n, places)

    def _groups(self, places: np.ndarray) -> Iterator[tuple[File, np.ndarray, list[int]]]:
        """For each file: the file, the numbers in it, and their positions in `places`."""
        if len(self._known) == 1:
            yield self._file(0), places, range(len(places))
            return
        files = np.searchsorted(self._starts, places, side="right") - 1
        for file in np.unique(files).tolist():
            at = np.flatnonzero(files == file)
            yield self._file(file), places[at] - self._starts[file], at.tolist()

    def _file(self, number: int) -> File:
        """Opens a file, unless another thread has; opening it twice is harmless. A dropped file is closed after its
        last read."""
        file = self._open.get(number)
        if file is None:
            file = self._open[number] = File(self._paths[number], self._check, int(self._known[number]))
            while len(self._open) > OPEN:
                with contextlib.suppress(StopIteration, RuntimeError):  # another thread has done it
                    self._open.pop(next(iter(self._open)), None)
        return file

    def files(self) -> Iterator[File]:
        """All files, one after another; opening or checking raises for the first damaged one."""
        return map(self._file, range(len(self._known)))

    def close(self) -> None:
        """Closes the files as soon as no thread reads them; another read opens them again."""
        self._open.clear()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()

    def __reduce__(self):
        return FileReader, (self._given, self._check)


def _source(path: str) -> Manifest | list[str]:
    if not os.path.isdir(path):
        return [path]
    if Manifest.path(path).exists():
        return Manifest.load(path)
    found = sorted(str(p) for p in Path(path).iterdir() if p.suffix in (".hfr", ".ffr"))
    if not found:
        raise FileNotFoundError(f"{path}: no .hfr or .ffr file in this folder")
    return found
