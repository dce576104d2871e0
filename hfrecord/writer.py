"""Writes record files: a single one, or the parts of a data set with a manifest."""

import base64
import fcntl
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hfrecord import format, native
from hfrecord.file import LARGEST_RATIO, SMALL, File, dictionary
from hfrecord.format import PLAIN, ZSTD, RecordError
from hfrecord.manifest import Manifest, part
from hfrecord.schema import Schema, optional

LEVEL = 3  # of zstd
BUFFER = 1 << 20  # bytes
Record = bytes | bytearray | memoryview | NDArray[Any] | dict[str, Any]


class Packer:
    """Encodes records as a file with this meta stores them: `packer(record)` -> (bytes, codec). May be pickled."""

    schema: Schema | None

    def __init__(self, path: str | os.PathLike[str], meta: dict[str, Any]):
        self._path, self._meta, self._compressor = path, meta, None
        self.schema = Schema(meta["schema"]) if meta.get("schema") else None
        if meta.get("compression") is not None:
            packed = dictionary(path, meta)
            self._compressor = optional("zstandard").ZstdCompressor(level=LEVEL, dict_data=packed, write_checksum=False)

    def __call__(self, record: Record) -> tuple[bytes, int]:
        return self.compressed(
            bytes(memoryview(record).cast("B")) if self.schema is None else self.schema.encode(record)
        )

    def compressed(self, data: bytes) -> tuple[bytes, int]:
        """A record that is encoded already."""
        if self._compressor is not None:
            packed = self._compressor.compress(data)
            if len(packed) < len(data) <= max(SMALL, LARGEST_RATIO * len(packed)):
                return packed, ZSTD
        return data, PLAIN

    def __reduce__(self) -> tuple[Any, ...]:
        return Packer, (self._path, self._meta)


class _Lock:
    """A descriptor `fd` of a file or folder that no other writer has open; raises RecordError if one has."""

    def __init__(self, path, flags: int):
        self.fd, self._pid = -1, os.getpid()
        self.fd = os.open(path, flags | os.O_CLOEXEC)
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise RecordError(path, "another writer has it open: close that one") from None

    def close(self) -> None:
        if self.fd >= 0:
            if os.getpid() == self._pid:  # forked processes have the lock, too: they do not end it, nor keep it
                fcntl.flock(self.fd, fcntl.LOCK_UN)
            os.close(self.fd)
            self.fd = -1

    __del__ = close


class FileWriter:
    """Appends records to a file of hfrecord's own format.

    Committed records survive a later kill. Records written since the last commit are lost if the process is killed or a
    `with` block raises. A commit writes the index of all records, 24 bytes each, and waits for the disk.

    Args:
        path: The file.
        schema: Fields of the records, as in `Schema`; without them a record is bytes.
        compression: None or "zstd".
        dictionary: Bytes of `train_dictionary`, for zstd.
        append: Whether an existing file is continued. It keeps its schema, compression and dictionary.
        keep: How many records of an existing file stay; None: all.

    Raises:
        FileExistsError: The file exists, without append.
        ValueError: schema, compression or dictionary differ from those of the file.
        RecordError: The file is damaged, or another writer has it open.
    """

    path: str
    meta: dict[str, Any]
    packer: Packer

    def __init__(
        self,
        path: str | os.PathLike[str],
        schema: Schema | dict[str, str] | None = None,
        *,
        compression: str | None = None,
        dictionary: bytes | None = None,
        append: bool = False,
        keep: int | None = None,
    ):
        self.path, self._fd = os.fspath(path), -1
        given = _meta(schema, compression, dictionary)
        there = os.path.exists(self.path)
        if there and not append:
            raise FileExistsError(f"{self.path} is there: give another path, or append=True")
        if not there:
            text = json.dumps(given).encode()
            text += b" " * (format.aligned(len(text)) - len(text))
            if len(text) > format.LARGEST_META:
                raise ValueError(f"schema and dictionary take {len(text)} bytes: at most {format.LARGEST_META}")
            format.replace(self.path, format.head(text) + text)  # without records, and complete from the start
        self._open(keep)
        for name, value in given.items():
            if self.meta.get(name) != value:
                self.abandon()
                raise ValueError(f"{self.path} has {name} {self.meta.get(name)!r}, given was {value!r}: leave it out")

    def _open(self, keep: int | None) -> None:
        self._lock = _Lock(self.path, os.O_RDWR)
        self._fd = self._lock.fd
        try:
            old = File(self.path, records=keep)
        except BaseException:
            self.abandon()
            raise
        table = old.table
        self.meta, self._sequence = table.meta, table.sequence
        self.packer = Packer(self.path, self.meta)
        self._index = bytearray(old.entries(np.arange(old.records)).tobytes())
        self._records = old.records
        self._committed = table.records if keep is None else None  # None: a commit must record the drop
        self._at = self._flushed = table.end
        self._pending, self._pending_bytes = [], 0

    def __len__(self) -> int:
        """Number of records of the file, including uncommitted ones."""
        return self._records

    def __bool__(self) -> bool:
        """Whether it is open, even without records."""
        return self._fd >= 0

    def write(self, record: Record) -> None:
        """Appends a record: bytes or anything with a buffer; if the file has a schema, a dict.

        Raises:
            ValueError: The record does not fit the schema, or the file is closed.
        """
        self.append(*self.packer(record))

    def append(self, data: bytes, codec: int) -> None:
        """Writes a record encoded by a packer with this file's meta."""
        if self._fd < 0:
            raise ValueError(f"{self.path} is closed")
        offset, length = self._at, len(data)
        crc = native.crc32(data, format.seed(self._records, offset, length, codec))
        self._put(data)
        self._index += format.ENTRY.pack(offset, length, crc, codec)
        self._records += 1

    def _put(self, data: bytes) -> None:
        if self._pending_bytes >= BUFFER:
            self._flush()  # first: if this raises, the new bytes were not accepted
        self._pending.append(data)
        self._pending_bytes += len(data)
        self._at += len(data)

    def _flush(self) -> None:
        """After an OSError (no space left) the same bytes remain to be written, to the same place."""
        view, place = memoryview(b"".join(self._pending)), self._flushed
        while view:
            done = os.pwrite(self._fd, view, place)
            view, place = view[done:], place + done
        self._flushed = place
        self._pending, self._pending_bytes = [], 0

    @property
    def nbytes(self) -> int:
        """The size of the file after a flush."""
        return self._at

    def commit(self) -> None:
        """Makes everything written durable, and visible to readers that open the file from now on."""
        if self._records == self._committed:
            return
        index = format.aligned(self._at)
        self._put(bytes(index - self._at))
        self._put(bytes(self._index))
        self._flush()
        os.fsync(self._fd)
        self._sequence += 1
        slot = format.commit(self._sequence, self._records, index, native.crc32(self._index))
        os.pwrite(self._fd, slot, format.COMMITS[self._sequence % 2])
        os.fsync(self._fd)
        self._committed = self._records

    def close(self) -> None:
        """Commits and closes the file."""
        if self._fd >= 0:
            self.commit()
            os.ftruncate(self._fd, self._at)  # leftovers of a killed writer after the last commit
            self.abandon()

    def abandon(self) -> None:
        """Closes the file in the state of the last commit."""
        if self._fd >= 0:
            self._fd = -1
            self._lock.close()

    __del__ = abandon

    def __enter__(self) -> "FileWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self.abandon() if kind else self.close()


def _meta(schema, compression, dictionary) -> dict:
    """The meta of a new file."""
    if compression not in (None, "zstd"):
        raise ValueError(f"compression={compression!r}: give None or 'zstd'")
    if dictionary is not None and compression is None:
        raise ValueError("a dictionary is zstd's: give compression='zstd'")
    meta = {}
    if schema is not None:
        meta["schema"] = (schema if isinstance(schema, Schema) else Schema(schema)).fields
    if compression:
        meta["compression"] = compression
    if dictionary is not None:
        meta["dictionary"] = base64.b64encode(dictionary).decode()
    return meta


def train_dictionary(samples: list[bytes], size: int = 112640) -> bytes:
    """A dictionary for `FileWriter`, with which zstd compresses small records better.

    Args:
        samples: Some thousand records like those to be written.
        size: Of the dictionary, in bytes.
    """
    return optional("zstandard").train_dictionary(size, list(samples)).as_bytes()


class DatasetWriter:
    """Writes a data set: a folder of record files and their manifest.

    Committed records are durable: the manifest is replaced after the files. Until `close`, the manifest calls the data
    set incomplete. Attributes that a commit writes to the manifest: `source`, a number; `origin`, a dict for JSON that
    says where the records come from, or None; `skipped`, texts about what has no record.

    Args:
        folder: New or empty.
        schema: Fields of the records, as in `Schema`; without them a record is bytes.
        part_bytes: A file with this size is followed by another one.
        append: Whether an existing data set is continued.
        options: compression and dictionary, as in `FileWriter`.

    Raises:
        FileExistsError: The folder has record files, without append.
        RecordError: A file is damaged, or another writer has the folder open.
    """

    folder: Path
    part_bytes: int
    source: int | None
    origin: dict[str, Any] | None
    skipped: list[str]

    def __init__(
        self,
        folder: str | os.PathLike[str],
        schema: Schema | dict[str, str] | None = None,
        *,
        part_bytes: int = 1 << 30,
        append: bool = False,
        **options: Any,
    ):
        self.folder, self.part_bytes = Path(folder), part_bytes
        self._options = {"schema": schema, **options}
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = _Lock(self.folder, os.O_RDONLY)
        try:
            self._begin(append)
        except BaseException:
            self._lock.close()
            raise

    def _begin(self, append: bool) -> None:
        folder = self.folder
        there = Manifest.path(folder).exists()
        if (there and not append) or (not there and any(self.folder.glob("part-*.?fr"))):
            raise FileExistsError(f"{folder} has record files: give another folder, or append=True to a data set")
        manifest = Manifest.load(folder) if there else Manifest(folder, [])
        self._counts, self.source, self.origin = manifest.counts.tolist(), manifest.source, manifest.origin
        self.skipped = manifest.skipped
        if not there:
            manifest.complete = False
            manifest.save()  # from here on only the manifest decides which files count
        self._writer = self._next(self._counts.pop() if self._counts else None)
        if not there:
            self.commit()

    def _next(self, keep: int | None = None) -> FileWriter:
        """The writer of the last part, with `keep` records, or of a new part."""
        path = self.folder / part(len(self._counts))
        if keep is None:
            path.unlink(missing_ok=True)  # left by a writer that was killed before the manifest was updated
        return FileWriter(path, append=True, keep=keep, **self._options)

    def __len__(self) -> int:
        return sum(self._counts) + len(self._writer)

    def __bool__(self) -> bool:
        """Whether it is open, even without records."""
        return self._lock.fd >= 0

    @property
    def packer(self) -> Packer:
        """Encodes records as these files store them."""
        return self._writer.packer

    def write(self, record: Record) -> None:
        """Appends a record, as `FileWriter.write` does."""
        self.append(*self.packer(record))

    def append(self, data: bytes, codec: int) -> None:
        """Writes a record encoded by the packer of these files."""
        if self._writer.nbytes >= self.part_bytes and len(self._writer):
            self._writer.close()
            self._counts.append(len(self._writer))
            self._options = _options(self._writer.meta)
            self._writer = self._next()
        self._writer.append(data, codec)

    def commit(self, source: int | None = None) -> None:
        """Makes everything written durable, and visible to readers that open the folder from now on.

        Args:
            source: The attribute's new value, such as the number of documents in the records; None: as before.
        """
        self.source = self.source if source is None else source
        self._save(complete=False)

    def _save(self, complete: bool) -> None:
        self._writer.commit()
        counts = [*self._counts, len(self._writer)]
        about = {"source": self.source, "origin": self.origin, "skipped": self.skipped}
        Manifest(self.folder, counts, **about, complete=complete).save()

    def close(self) -> None:
        """Commits and closes the data set."""
        if self:
            self._save(complete=True)
            self._writer.close()
            self._lock.close()

    def abandon(self) -> None:
        """Closes the files in the state of the last commit."""
        self._writer.abandon()
        self._lock.close()

    def __enter__(self) -> "DatasetWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self.abandon() if kind else self.close()


def _options(meta: dict) -> dict:
    """The arguments of a FileWriter for another file with this meta."""
    packed = meta.get("dictionary")
    found = {"schema": meta.get("schema"), "compression": meta.get("compression")}
    return found | {"dictionary": None if packed is None else base64.b64decode(packed)}
