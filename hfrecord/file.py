"""One record file: its index, its records, and advice to the kernel about what will be read."""

import base64
import mmap
import os
import threading
import zlib

import numpy as np

from hfrecord import ffr, format, native
from hfrecord.format import RecordError
from hfrecord.schema import optional

LARGEST_RATIO, SMALL = 64, 16 << 20  # a record may expand to at most 64 times its stored length, or to 16 MiB
PIECE = 128 << 10  # Linux limits advice to its read-ahead, which is at least this by default
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
