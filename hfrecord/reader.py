"""Random batches of records: one `pread` per record, and `posix_fadvise` for the next batch.

`advise(indices)` tells the kernel which records will be read. On every Linux file system it starts their reads and
returns. So a batch that was advised one batch ahead is in the page cache when it is read, and the disk has many reads
at once. All processes share the page cache, so one process may advise what others will read.
"""

import contextlib
import operator
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from hfrecord import format, native
from hfrecord.file import File
from hfrecord.format import RecordError
from hfrecord.manifest import Manifest
from hfrecord.schema import Schema

try:
    import resource

    OPEN = max(16, min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], 1 << 20) // 4)  # files, with two descriptors each
except ImportError:
    OPEN = 128
STARTED = 1024  # number of records of a read that are advised before the first is read
Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
Indices = Sequence[int] | NDArray[np.integer[Any]]


class FileReader:
    """The records of files, as a sequence: `len(reader)`, `reader[-1]`, `reader[2:9]`, and `reader[[5, 2, 5]]`.

    A record is bytes, or a dict if the files have a schema. Threads, and forked, spawned or unpickled copies may all
    read at once. Files are opened when they are read; at most a quarter of the process's descriptor limit stay open.

    Args:
        paths: A file (.hfr or .ffr), a folder, or a list of these. Of a folder, the files of its manifest are read;
            without a manifest all its .hfr and .ffr files, in the order of their names.
        check: Whether checksums are compared.

    Raises:
        RecordError: A file is damaged, with its path, record and offset.
        IndexError: There is no record with this number.
        TypeError: An index is no integer, slice or sequence of integers.
    """

    schema: Schema | None

    def __init__(self, paths: Paths, check: bool = True):
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

    def __getitem__(self, index: SupportsIndex | slice | Indices) -> Any:
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

    def __getitems__(self, indices: Indices) -> list[Any]:
        """The records at `indices`, a sequence of integers, in this order; DataLoader fetches batches with it."""
        places = self._places(indices)
        self._start(places)
        return self._decoded(self._read(places), places)

    def read(self, indices: Indices, ahead: Indices | None = None) -> list[bytes]:
        """The records as bytes, also if they have a schema.

        Args:
            indices: Numbers of records. The result is in this order.
            ahead: Numbers of records that are advised meanwhile.
        """
        places = self._places(indices)
        self._start(places)  # before `ahead`, because these are waited for
        if ahead is not None:
            self.advise(ahead)
        return self._read(places)

    def advise(self, indices: Indices) -> None:
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

    def sizes(self) -> NDArray[np.int64]:
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

    def __enter__(self) -> "FileReader":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
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
