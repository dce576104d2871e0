"""Other data as records: folders, folders of images by class, tar (webdataset), parquet, jsonl, numpy, record files.

A source is a schema, its records in an order that is the same each time, and their number. So what was committed of a
conversion that was killed is skipped by the next one.
"""

import itertools
import json
import os
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from hfrecord.reader import FileReader
from hfrecord.schema import optional
from hfrecord.writer import DatasetWriter

COMMIT = 256 << 20  # bytes of records between two commits


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _folder(path: Path):
    """Each file, by its name in the folder."""
    files = _files(path)
    records = ({"name": file.relative_to(path).as_posix(), "data": file.read_bytes()} for file in files)
    return {"name": "text", "data": "bytes"}, records, len(files)


def _images(path: Path):
    """As torchvision's ImageFolder: classes are the folders, in the order of their names."""
    classes = sorted(entry.name for entry in path.iterdir() if entry.is_dir())
    files = [(file, label) for label, name in enumerate(classes) for file in _files(path / name)]
    records = ({"image": file.read_bytes(), "label": label} for file, label in files)
    return {"image": "image", "label": "int64"}, records, len(files)


def _tar(path: Path):
    """Samples of webdataset: files of one name up to its first dot behind the last slash, fields by what follows."""

    def samples():
        with tarfile.open(path) as archive:
            named = ((member, *_key(member.name)) for member in archive if member.isfile())
            for key, parts in itertools.groupby(named, lambda part: part[1]):
                yield {"key": key, **{field: archive.extractfile(member).read() for member, _, field in parts}}

    fields, count = None, 0
    for sample in samples():
        count += 1
        fields = fields or sample.keys()
        if sample.keys() != fields:
            raise ValueError(f"{path}: {sample['key']} has {', '.join(sample)}, the first sample {', '.join(fields)}")
    return {name: "text" if name == "key" else "bytes" for name in fields or ("key",)}, samples(), count


def _key(name: str) -> tuple[str, str]:
    folder, slash, file = name.rpartition("/")
    stem, _, field = file.partition(".")
    return folder + slash + stem, field


def _jsonl(path: Path):
    """Each line."""

    def records():
        with path.open("rb") as file:
            for line in file:
                if line.strip():
                    yield {"json": json.loads(line)}

    with path.open("rb") as file:
        count = sum(1 for line in file if line.strip())
    return {"json": "json"}, records(), count


def _parquet(path: Path):
    """Each row, as JSON: what JSON has no word for is an error."""
    optional("pyarrow")
    import pyarrow.parquet

    file = pyarrow.parquet.ParquetFile(path)
    records = ({"json": row} for batch in file.iter_batches(1024) for row in batch.to_pylist())
    return {"json": "json"}, records, file.metadata.num_rows


def _numpy(path: Path):
    """Each row of an array, which is mapped."""
    rows = np.load(path, mmap_mode="r", allow_pickle=False)
    if rows.ndim == 0:
        raise ValueError(f"{path} is a single number: give an array with a row for each record")
    kind = rows.dtype.name + (f"[{','.join(map(str, rows.shape[1:]))}]" if rows.ndim > 1 else "")
    return {"x": kind}, ({"x": row} for row in rows), len(rows)


def _tokens(path: Path, length: int):
    """The bytes of a text file, or of a folder's one after the other, in records of `length` of them, as input_ids.

    What is left over at the end is left out. A token is a byte: the vocabulary is of 256.
    """
    files = _files(path) if path.is_dir() else [path]

    def records():
        rest = b""
        for file in files:
            rest += file.read_bytes()
            whole = len(rest) // length * length
            for at in range(0, whole, length):
                yield {"input_ids": np.frombuffer(rest, np.uint8, length, at)}
            rest = rest[whole:]

    total = sum(file.stat().st_size for file in files) // length
    return {"input_ids": f"uint8[{length}]"}, records(), total


def _records(path: Path):
    """Record files, FFRecord's too."""
    reader = FileReader(path)
    return reader.schema and reader.schema.fields, (reader[number] for number in range(len(reader))), len(reader)


FORMATS: dict[str, Callable] = {
    "folder": _folder, "images": _images, "tar": _tar, "jsonl": _jsonl, "parquet": _parquet, "npy": _numpy,
    "hfr": _records, "ffr": _records, "tokens": _tokens,
}  # fmt: skip


def source(path, format: str | None = None, length: int = 1024) -> tuple[dict | None, Iterator, int]:
    """(schema, records, their number) of a source; format: one of FORMATS, told by the path's name by default.

    length: of a record of tokens. Raises ValueError for a format that there is not, OSError for what cannot be read.
    """
    path = Path(path)
    format = format or ("folder" if path.is_dir() else path.suffix[1:])
    if format not in FORMATS:
        raise ValueError(f"{path}: of no format that is known, {', '.join(FORMATS)}")
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file")
    return FORMATS[format](path, length) if format == "tokens" else FORMATS[format](path)


def write(out, schema, records: Iterator, part_bytes: int, compression: str | None, track) -> int:
    """Appends to the data set `out` those records that it has not yet; how many it then has. track: shows them."""
    with DatasetWriter(os.fspath(out), schema, part_bytes=part_bytes, compression=compression, append=True) as writer:
        begin, since = len(writer), 0
        for record in track(itertools.islice(records, begin, None), begin):
            before = writer._writer.nbytes
            writer.write(record)
            since += max(writer._writer.nbytes - before, 0)
            if since > COMMIT:
                writer.commit()
                since = 0
        return len(writer)
