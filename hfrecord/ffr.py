"""Files of FFRecord (https://github.com/HFAiLab/ffrecord, README.md and fileio.h there): `.ffr`, read and written.

Little-endian: crc of the following bytes up to the samples u32 (0 in old files, which have none), n i64, crc of each
sample u32 (n), offset of each sample i64 (n), samples. A sample ends where the next one begins, the last at the end of
the file. There is no commit: an incomplete file is damaged, so a file gets its name only when it is complete.
"""

import os
import struct
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hfrecord import format, native

START = struct.Struct("<IQ")


class Table:
    """The memory-mapped index of an .ffr file: `records`, and `entries(numbers)` as for hfrecord's own format.

    fd: a file descriptor. size: bytes of the file. mapped(offset, length): a view of bytes of the file. check: whether
    the checksum of the index is compared. Raises RecordError if the head does not fit the file.
    """

    meta: dict = {}

    def __init__(self, path, fd: int, size: int, mapped, check: bool):
        start = format.read_at(fd, START.size, 0)
        if len(start) < START.size:
            raise format.RecordError(path, f"not an .ffr file: {size} bytes", None, 0)
        crc, self.records = START.unpack(start)
        self.path, self.size, self.begin = path, size, START.size + 12 * self.records
        if self.begin > size:
            what = f"{self.records} samples need {self.begin} bytes of index, the file has {size}: it was cut off"
            raise format.RecordError(path, what, None, 4)
        self.view = view = mapped(START.size, 12 * self.records)  # of the index: checksums, then offsets
        if check and crc and native.crc32(view, native.crc32(start[4:])) != crc:
            raise format.RecordError(path, "the checksum of the index does not match", None, 0)
        self._crcs = np.frombuffer(view, "<u4", self.records)
        self._offsets = np.frombuffer(view, "<u8", self.records, 4 * self.records)
        first = int(self._offsets[0]) if self.records else size
        if first != self.begin:  # also checked for old files, which have no checksum
            raise format.RecordError(path, f"the first sample at {first}, behind the index is {self.begin}", None, 4)

    def entries(self, numbers: np.ndarray) -> np.ndarray:
        """An array of format.INDEX for records of these numbers, int64 (k,); lengths may be beyond the file."""
        found = np.zeros(len(numbers), format.INDEX)
        found["offset"], found["crc"] = self._offsets[numbers], self._crcs[numbers]
        ends = np.full(len(numbers), self.size, np.uint64)
        inner = numbers + 1 < self.records
        ends[inner] = self._offsets[numbers[inner] + 1]
        found["length"] = ends - found["offset"]  # for a record that ends before it begins: larger than the file
        return found

    @staticmethod
    def seed(number: int, offset: int, length: int, codec: int) -> int:
        return 0


class FfrWriter:
    """Writes a file of FFRecord's format, for programs that read it.

    The index comes before the samples and contains their number, so samples are kept in an unnamed file until `close`.
    A `with` block that raises leaves nothing behind.

    Args:
        path: The file. It gets this name in `close`, and replaces one that has it.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path, self._crcs, self._ends = os.fspath(path), [], [0]
        self._temporary = f"{self.path}.tmp"
        self._data = os.fdopen(os.open(self._temporary, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666), "w+b", 1 << 20)
        os.unlink(self._temporary)

    def __len__(self) -> int:
        return len(self._crcs)

    def write(self, data: bytes | bytearray | memoryview | NDArray[Any]) -> None:
        """Appends a sample: bytes, or anything else with a contiguous buffer."""
        data = memoryview(data).cast("B")
        self._data.write(data)
        self._crcs.append(native.crc32(data))
        self._ends.append(self._ends[-1] + len(data))

    def close(self) -> None:
        """Writes the file. It is on the disk when this returns."""
        if self._data is None:
            return
        n, self._data, data = len(self), None, self._data
        offsets = np.array(self._ends[:-1], "<i8") + START.size + 12 * n
        index = np.array(self._crcs, "<u4").tobytes() + offsets.tobytes()
        number = struct.pack("<Q", n)
        with open(self._temporary, "wb") as file:
            file.write(struct.pack("<I", zlib.crc32(index, zlib.crc32(number))) + number + index)
            data.seek(0)
            while part := data.read(1 << 20):
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        data.close()
        format.rename(self._temporary, self.path)

    def __enter__(self) -> "FfrWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:
            self.close()
        elif self._data is not None:
            self._data.close()
            self._data = None
