"""Other data as records: folders, folders of images by class, tar (webdataset), parquet, jsonl, numpy, text as tokens.

A source has units (files, rows, documents) in a fixed order, with random access. So processes share the work, and a
conversion that was killed continues after the units of its last commit. The output does not depend on the number of
processes.
"""

import collections
import concurrent.futures
import functools
import itertools
import json
import multiprocessing
import os
import tarfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hfrecord.reader import FileReader
from hfrecord.schema import optional
from hfrecord.writer import DatasetWriter, Packer

COMMIT = 256 << 20  # bytes of records between two commits
IMAGES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")  # names of torchvision's images


@dataclass
class Source:
    """`read(begin, end)`: the records of these units. schema: of the records. chunk: number of units read at once.
    encoded: whether they are bytes already, as the schema encodes them. origin: what tells this source from others, for
    the manifest of its records.

    It is pickled to other processes, including `read`.
    """

    schema: dict | None
    units: int
    read: Callable[[int, int], Iterator]
    chunk: int = 32
    encoded: bool = False
    origin: dict | None = None


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _folder(path: Path) -> Source:
    """Each file, by its name in the folder."""
    names = [file.relative_to(path).as_posix() for file in _files(path)]
    return Source({"name": "text", "data": "bytes"}, len(names), functools.partial(_read_folder, path, names))


def _read_folder(path, names, begin, end):
    return ({"name": name, "data": (path / name).read_bytes()} for name in names[begin:end])


def _images(path: Path) -> Source:
    """As torchvision's ImageFolder: classes are the folders, in the order of their names; other files are left out."""
    classes = sorted(entry.name for entry in path.iterdir() if entry.is_dir())
    if not classes:
        raise ValueError(f"{path}: no folder of a class")
    files = []
    for label, name in enumerate(classes):
        folders = sorted(os.walk(path / name, followlinks=True))
        found = [os.path.join(at, file) for at, _, names in folders for file in sorted(names)]
        found = [file for file in found if file.lower().endswith(IMAGES)]
        if not found:
            raise ValueError(f"{path}: no image in the folder of a class, {name}: remove it")
        files += [(file, label) for file in found]
    return Source({"image": "image", "label": "int64"}, len(files), functools.partial(_read_images, files))


def _read_images(files, begin, end):
    return ({"image": Path(file).read_bytes(), "label": label} for file, label in files[begin:end])


def _tar(path: Path) -> Source:
    """Samples of webdataset: files with the same name up to the first dot after the last slash; the rest names the
    field."""
    samples, fields = [], None
    with tarfile.open(path) as archive:
        named = ((member, *_key(member.name)) for member in archive if member.isfile())
        for key, parts in itertools.groupby(named, lambda part: part[1]):
            places = {}
            for member, _, field in parts:
                if member.issparse():
                    raise ValueError(f"{path}: {member.name} is a sparse file: pack it as a whole one")
                if field in places:
                    raise ValueError(f"{path}: {member.name} is there twice")
                places[field] = member.offset_data, member.size
            samples.append((key, places))
            fields = fields or places.keys()
            if places.keys() != fields:
                raise ValueError(f"{path}: {key} has {', '.join(places)}, the first sample {', '.join(fields)}")
    schema = {"key": "text"} | dict.fromkeys(fields or (), "bytes")
    return Source(schema, len(samples), functools.partial(_read_tar, path, samples))


def _key(name: str) -> tuple[str, str]:
    folder, slash, file = name.rpartition("/")
    stem, _, field = file.partition(".")
    return folder + slash + stem, field


def _read_tar(path, samples, begin, end):
    with tarfile.open(path) as archive:  # its file has plain bytes, even if the archive is compressed
        for key, places in samples[begin:end]:
            record = {"key": key}
            for field, (offset, size) in places.items():
                archive.fileobj.seek(offset)
                record[field] = archive.fileobj.read(size)
            yield record


def _jsonl(path: Path) -> Source:
    """Each line."""
    lines = _lines(path)
    return Source({"json": "json"}, len(lines), functools.partial(_read_jsonl, path, lines))


def _lines(path: Path) -> np.ndarray:
    """The starts of non-empty lines, int64."""
    places, at = [], 0
    with path.open("rb") as file:
        for line in file:
            if line.strip():
                places.append(at)
            at += len(line)
    return np.array(places, np.int64)


def _read_jsonl(path, lines, begin, end):
    with path.open("rb") as file:
        for place in lines[begin:end].tolist():
            file.seek(place)
            yield {"json": json.loads(file.readline())}


def _parquet(path: Path) -> Source:
    """Each row, as JSON; values that JSON cannot represent are an error."""
    optional("pyarrow")
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as file:
        rows = [file.metadata.row_group(group).num_rows for group in range(file.metadata.num_row_groups)]
    starts = np.concatenate([[0], np.cumsum(rows)]).astype(np.int64)
    return Source({"json": "json"}, sum(rows), functools.partial(_read_parquet, path, starts), chunk=1024)


def _read_parquet(path, starts, begin, end):
    while begin < end:
        group = int(np.searchsorted(starts, begin, side="right")) - 1
        first, last = int(starts[group]), min(end, int(starts[group + 1]))
        yield from ({"json": row} for row in _row_group(path, group).slice(begin - first, last - begin).to_pylist())
        begin = last


@functools.lru_cache(maxsize=1)  # consecutive chunks come from one
def _row_group(path, group):
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as file:
        return file.read_row_group(group)


def _numpy(path: Path) -> Source:
    """Each row of a memory-mapped array."""
    rows = np.load(path, mmap_mode="r", allow_pickle=False)
    if rows.ndim == 0:
        raise ValueError(f"{path} is a single number: give an array with a row for each record")
    kind = rows.dtype.name + (f"[{','.join(map(str, rows.shape[1:]))}]" if rows.ndim > 1 else "")
    return Source({"x": kind}, len(rows), functools.partial(_read_numpy, path))


def _read_numpy(path, begin, end):
    return ({"x": row} for row in np.load(path, mmap_mode="r", allow_pickle=False)[begin:end])


def _tokens(path: Path, length: int) -> Source:
    """The bytes of a text file, or of all files of a folder, in records of `length` bytes, as input_ids.

    The remainder at the end is left out. A token is a byte: the vocabulary has 256 entries.
    """
    files = _files(path) if path.is_dir() else [path]
    ends = np.cumsum([0] + [file.stat().st_size for file in files])
    read = functools.partial(_read_tokens, files, ends, length)
    return Source({"input_ids": f"uint8[{length}]"}, int(ends[-1]) // length, read)


def _read_tokens(files, ends, length, begin, end):
    at, stop, found = begin * length, end * length, []
    while at < stop:
        number = int(np.searchsorted(ends, at, side="right")) - 1
        with files[number].open("rb") as file:
            file.seek(at - int(ends[number]))
            found.append(file.read(stop - at))
        if not found[-1]:
            raise ValueError(f"{files[number]} has become shorter")
        at += len(found[-1])
    text = np.frombuffer(b"".join(found), np.uint8)
    return ({"input_ids": row} for row in text.reshape(-1, length))


def _documents(path: Path, length: int, tokenizer: str | None) -> Source:
    """Documents in records of up to `length` tokens, as input_ids, for batches by hfnn.data.PackedCollator.

    They are the files of a folder, or the "text" of each line of a .jsonl file; a long document becomes several
    records. tokenizer: a folder or a name for transformers' AutoTokenizer; without one a token is a byte of UTF-8.
    """
    if tokenizer is not None:
        _tokenizer(tokenizer)
    places = _files(path) if path.is_dir() else _lines(path)
    read = functools.partial(_read_documents, path, places, length, tokenizer)
    return Source({"input_ids": "int32[?]"}, len(places), read)


def _read_documents(path, places, length, tokenizer, begin, end):
    if path.is_dir():
        texts = (file.read_bytes().decode() for file in places[begin:end])
    else:
        texts = (line["json"]["text"] for line in _read_jsonl(path, places, begin, end))
    for text in texts:
        ids = list(text.encode()) if tokenizer is None else _tokenizer(tokenizer)(text)["input_ids"]
        for at in range(0, len(ids), length):
            yield {"input_ids": np.array(ids[at : at + length], np.int32)}


@functools.lru_cache(maxsize=1)
def _tokenizer(name: str):
    return optional("transformers").AutoTokenizer.from_pretrained(name, model_max_length=1 << 60)


def _records(path: Path) -> Source:
    """Record files, including FFRecord's."""
    reader = FileReader(path)
    schema = reader.schema and reader.schema.fields
    return Source(schema, len(reader), functools.partial(_read_records, reader), encoded=True)


def _read_records(reader, begin, end):
    return reader.read(range(begin, end))


FORMATS: dict[str, Callable] = {
    "folder": _folder, "images": _images, "tar": _tar, "jsonl": _jsonl, "parquet": _parquet, "npy": _numpy,
    "hfr": _records, "ffr": _records, "tokens": _tokens, "documents": _documents,
}  # fmt: skip


def source(path, format: str | None = None, length: int = 1024, tokenizer: str | None = None) -> Source:
    """A source; format: one of FORMATS, by default from the path's name.

    length: of records of tokens. tokenizer: of documents. Raises ValueError for an unknown format, OSError if the
    source cannot be read.
    """
    path = Path(path)
    format = format or ("folder" if path.is_dir() else path.suffix[1:])
    if format not in FORMATS:
        raise ValueError(f"{path}: of no format that is known, {', '.join(FORMATS)}")
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file")
    if length < 1:
        raise ValueError(f"a length of {length}: give 1 or more tokens")
    options = {"tokens": {"length": length}, "documents": {"length": length, "tokenizer": tokenizer}}.get(format, {})
    found = FORMATS[format](path, **options)
    size = sum(file.stat().st_size for file in (_files(path) if path.is_dir() else [path]))
    found.origin = {"path": str(path.resolve()), "format": format, "units": found.units, "bytes": size, **options}
    return found


def write(out, source: Source, part_bytes=1 << 30, compression=None, jobs=1, progress=lambda units: None) -> int:
    """Appends the missing part of a source to the data set `out`; returns its number of records.

    jobs: processes that read and encode. progress: called with the number of written units. Raises ValueError if `out`
    has records of another source, or of this one before it changed.
    """
    options = {"part_bytes": part_bytes, "compression": compression, "append": True}
    with DatasetWriter(os.fspath(out), source.schema, **options) as writer:
        done, since = _done(out, writer, source), 0
        progress(done)
        for end, records in _chunks(source, writer.packer, done, jobs):
            for data, codec in records:
                writer.append(data, codec)
                since += len(data)
            done = end
            progress(done)
            if since > COMMIT:
                writer.commit(done)
                since = 0
        writer.commit(done)
        return len(writer)


def _done(out, writer: DatasetWriter, source: Source) -> int:
    """How many units of this source are in the records of `out`."""
    if not len(writer) and not writer.source:
        writer.origin = source.origin
        return 0
    if writer.source is None:
        raise ValueError(f"{out} has records of no conversion: give another folder")
    was, now = writer.origin, source.origin
    if was and now and was != now:  # earlier versions kept none
        names = [name for name in {**was, **now} if was.get(name) != now.get(name)]
        changes = "; ".join(f"{name} {was.get(name)}, now {now.get(name)}" for name in names)
        raise ValueError(f"{out} holds records of another source ({changes}): give another folder")
    return writer.source


def _chunks(source: Source, packer: Packer, begin: int, jobs: int) -> Iterator[tuple[int, list]]:
    """(end of a chunk, its records as stored), in order."""
    spans = ((at, min(at + source.chunk, source.units)) for at in range(begin, source.units, source.chunk))
    if jobs == 1:
        yield from ((end, _packed(source, packer, at, end)) for at, end in spans)
        return
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(jobs, context, _begin, (source, packer)) as pool:
        waiting = collections.deque()
        try:
            for at, end in spans:
                waiting.append((end, pool.submit(_run, at, end)))
                if len(waiting) > 2 * jobs:
                    end, chunk = waiting.popleft()
                    yield end, chunk.result()
            while waiting:
                end, chunk = waiting.popleft()
                yield end, chunk.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _packed(source: Source, packer: Packer, begin: int, end: int) -> list[tuple[bytes, int]]:
    pack = packer.compressed if source.encoded else packer
    return [pack(record) for record in source.read(begin, end)]


_work: tuple = ()  # of a process that converts: source and packer


def _run(begin: int, end: int) -> list[tuple[bytes, int]]:
    return _packed(*_work, begin, end)


def _begin(source: Source, packer: Packer) -> None:
    """Initialises a converting process: its source, and that it ends if its parent is killed."""
    global _work
    _work = source, packer

    def watch():
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
