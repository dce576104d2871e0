"""The files of a data set and their numbers of records: `manifest.json` in their folder.

It is written after the files, by rename. Files are `part-000000.hfr` and so on, so a manifest of a million files only
has numbers. If a writer was killed between the two, a file may have more records than the manifest. These do not belong
to the data set, and the next writer overwrites them.
"""

import json
import os
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from hfrecord.format import RecordError, parsed, replace

NAME = "manifest.json"
MOST = 1 << 48  # maximum number of records of a file


class Manifest(Sequence):
    """The paths of a folder's files, with `counts`, int64 (files,): the records of each.

    source: how much of the source is in the records, if their writer has recorded it. origin: which source it is.
    skipped: an error for each damaged unit of the source that has no record. complete: whether their writer was closed.
    """

    def __init__(
        self,
        folder,
        counts,
        suffix: str = ".hfr",
        source: int | None = None,
        origin: dict | None = None,
        skipped: Sequence[str] = (),
        complete: bool = True,
    ):
        self.folder, self.suffix, self.source, self.origin = os.fspath(folder), suffix, source, origin
        self.counts, self.skipped, self.complete = np.asarray(counts, np.int64), list(skipped), complete

    @staticmethod
    def path(folder) -> Path:
        return Path(folder) / NAME

    def __len__(self) -> int:
        return len(self.counts)

    def __getitem__(self, number: int) -> str:
        return os.path.join(self.folder, part(range(len(self))[number], self.suffix))

    def save(self) -> None:
        body = {"version": 1, "suffix": self.suffix, "records": self.counts.tolist()}
        body |= {} if self.source is None else {"source": self.source}
        body |= {} if self.origin is None else {"origin": self.origin}
        body |= {"skipped": self.skipped} if self.skipped else {}
        body |= {} if self.complete else {"complete": False}
        text = json.dumps({**body, "crc32": _crc(body)}, separators=(",", ":"))
        replace(self.path(self.folder), text.encode())

    @classmethod
    def load(cls, folder) -> "Manifest":
        path = cls.path(folder)
        body = parsed(path, path.read_bytes(), 0)
        crc = body.pop("crc32", None)
        if crc != _crc(body):
            raise RecordError(path, "the checksum does not match")
        if body.get("version") != 1:
            raise RecordError(path, f"version {body.get('version')!r}, this hfrecord reads 1: install a newer one")
        counts, suffix = body.get("records"), body.get("suffix")
        numbers = isinstance(counts, list) and all(type(count) is int and 0 <= count <= MOST for count in counts)
        if not numbers or suffix not in (".hfr", ".ffr") or sum(counts) > MOST:
            raise RecordError(path, "not the counts of records of .hfr or .ffr files")
        source = body.get("source")
        if source is not None and not (type(source) is int and 0 <= source <= MOST):
            raise RecordError(path, f"source {source!r}: not a number")
        origin = body.get("origin")
        if origin is not None and not isinstance(origin, dict):
            raise RecordError(path, f"origin {origin!r}: not a JSON object")
        skipped, complete = body.get("skipped", []), body.get("complete", True)
        if not isinstance(skipped, list) or not all(isinstance(text, str) for text in skipped):
            raise RecordError(path, f"skipped {skipped!r}: not a list of texts")
        return cls(folder, counts, suffix, source, origin, skipped, complete is not False)


def part(number: int, suffix: str = ".hfr") -> str:
    """The name of a file of a data set."""
    return f"part-{number:06d}{suffix}"


def _crc(body: dict) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())
