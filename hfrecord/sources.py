"""What can be converted: folders, folders of images by class, tar (webdataset), parquet, jsonl, numpy, text as tokens.

A source has units (files, rows, documents) in a fixed order, with random access.
"""

import functools
import itertools
import json
import lzma
import os
import tarfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hfrecord.reader import FileReader
from hfrecord.schema import optional

# What a reader raises for damaged data, or for data of another kind than the format's.
DAMAGE = (
    ValueError,
    TypeError,
    LookupError,
    OSError,
    EOFError,
    RecursionError,
    tarfile.TarError,
    zlib.error,
    lzma.LZMAError,
)
IMAGES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")  # names of torchvision's images


@dataclass
class Source:
    """`read(begin, end)`: the records of these units. where(unit): its place, for errors: a file, and a line or record.

    schema: of the records. chunk: number of units read at once. encoded: whether they are bytes already, as the schema
    encodes them. left_out: what of the source is no unit, and why. origin: what tells this source from others, for the
    manifest of its records. It is pickled to other processes, including `read` and `where`.
    """

    schema: dict | None
    units: int
    read: Callable[[int, int], Iterator]
    where: Callable[[int], str]
    chunk: int = 32
    encoded: bool = False
    left_out: tuple[str, ...] = ()
    origin: dict | None = None


def _walk(folder: Path, above: tuple[tuple[int, int], ...] = ()) -> Iterator[tuple[Path, str]]:
    """(path, "") of each file below the folder, through links; (path, reason) of what is left out."""
    status = folder.stat()
    above = (*above, (status.st_dev, status.st_ino))
    for path in sorted(folder.iterdir()):
        try:
            there = path.stat()
        except OSError as error:  # a link to nothing, or to itself; a folder that may not be searched
            yield path, f"a broken link to {os.readlink(path)}" if path.is_symlink() else str(error.strerror)
            continue
        if path.is_file():
            yield path, ""
        elif not path.is_dir():
            yield path, "neither a file nor a folder"
        elif (there.st_dev, there.st_ino) in above:
            yield path, "a link to a folder that it is in"
        else:
            yield from _walk(path, above)


def _files(folder: Path) -> tuple[list[Path], tuple[str, ...]]:
    """The files below a folder, in the order of their names, and what is left out."""
    found = list(_walk(folder))
    return sorted(path for path, why in found if not why), tuple(f"{path}: {why}" for path, why in found if why)


def _folder(path: Path) -> Source:
    """Each file, by its name in the folder."""
    files, left_out = _files(path)
    names = [file.relative_to(path).as_posix() for file in files]
    read, where = functools.partial(_read_folder, path, names), functools.partial(_named, files)
    return Source({"name": "text", "data": "bytes"}, len(names), read, where, left_out=left_out)


def _read_folder(path, names, begin, end):
    return ({"name": name, "data": (path / name).read_bytes()} for name in names[begin:end])


def _named(files, unit: int) -> str:
    return os.fsencode(files[unit]).decode(errors="backslashreplace")


def _numbered(path, what: str, unit: int) -> str:
    return f"{path}, {what} {unit}"


def _images(path: Path) -> Source:
    """As torchvision's ImageFolder: classes are the folders, in the order of their names; other files are left out."""
    classes = sorted(entry.name for entry in path.iterdir() if entry.is_dir())
    if not classes:
        raise ValueError(f"{path}: no folder of a class")
    files, labels, left_out = [], [], []
    for label, name in enumerate(classes):
        found, others = _files(path / name)
        images = [file for file in found if _is_image(file)]
        if not images:
            raise ValueError(f"{path}: no image in the folder of a class, {name}: remove it")
        # The order of torchvision: folder by folder, the files of a folder by their names.
        files += sorted(images, key=lambda file: (str(file.parent), file.name))
        labels += [label] * len(images)
        left_out += [*others, *(f"{file}: not the name of an image" for file in found if not _is_image(file))]
    read, where = functools.partial(_read_images, files, labels), functools.partial(_named, files)
    return Source({"image": "image", "label": "int64"}, len(files), read, where, left_out=tuple(left_out))


def _is_image(file: Path) -> bool:
    return file.name.lower().endswith(IMAGES)


def _read_images(files, labels, begin, end):
    return ({"image": files[unit].read_bytes(), "label": labels[unit]} for unit in range(begin, end))


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
        # tarfile takes a header that is cut off or damaged for the end of the archive.
        archive.fileobj.seek(archive.offset)
        if archive.fileobj.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
            raise ValueError(f"{path}: cut off or damaged after {len(samples)} samples: no end of an archive is there")
    schema = {"key": "text"} | dict.fromkeys(fields or (), "bytes")
    read, where = functools.partial(_read_tar, path, samples), functools.partial(_sample, path, samples)
    return Source(schema, len(samples), read, where)


def _sample(path, samples, unit: int) -> str:
    return f"{path}, sample {samples[unit][0]}"


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
    read, where = functools.partial(_read_jsonl, path, lines), functools.partial(_line, path, lines)
    return Source({"json": "json"}, len(lines), read, where)


def _line(path, lines, unit: int) -> str:
    with path.open("rb") as file:
        number = 1
        while file.tell() < lines[unit]:
            file.readline()
            number += 1
    return f"{path}, line {number}"


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
    read, where = functools.partial(_read_parquet, path, starts), functools.partial(_numbered, path, "row")
    return Source({"json": "json"}, sum(rows), read, where, chunk=1024)


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
    read, where = functools.partial(_read_numpy, path), functools.partial(_numbered, path, "row")
    return Source({"x": kind}, len(rows), read, where)


def _read_numpy(path, begin, end):
    return ({"x": row} for row in np.load(path, mmap_mode="r", allow_pickle=False)[begin:end])


def _tokens(path: Path, length: int) -> Source:
    """The bytes of a text file, or of all files of a folder, in records of `length` bytes, as input_ids.

    The remainder at the end is left out. A token is a byte: the vocabulary has 256 entries.
    """
    files, left_out = _files(path) if path.is_dir() else ([path], ())
    ends = np.cumsum([0] + [file.stat().st_size for file in files])
    read, where = functools.partial(_read_tokens, files, ends, length), functools.partial(_numbered, path, "record")
    units = int(ends[-1]) // length
    if rest := int(ends[-1]) - units * length:
        left_out += (f"{path}: the last {rest} bytes, which do not fill a record",)
    return Source({"input_ids": f"uint8[{length}]"}, units, read, where, left_out=left_out)


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
    if path.is_dir():
        places, left_out = _files(path)
        where = functools.partial(_named, places)
    else:
        places, left_out = _lines(path), ()
        where = functools.partial(_line, path, places)
    read = functools.partial(_read_documents, path, places, length, tokenizer)
    return Source({"input_ids": "int32[?]"}, len(places), read, where, left_out=left_out)


def _read_documents(path, places, length, tokenizer, begin, end):
    if path.is_dir():
        texts = (file.read_bytes().decode() for file in places[begin:end])
    else:
        texts = (_text(line["json"]) for line in _read_jsonl(path, places, begin, end))
    for text in texts:
        ids = list(text.encode()) if tokenizer is None else _tokenizer(tokenizer)(text)["input_ids"]
        for at in range(0, len(ids), length):
            yield {"input_ids": np.array(ids[at : at + length], np.int32)}


def _text(line) -> str:
    if not isinstance(line, dict) or not isinstance(line.get("text"), str):
        raise ValueError('no object with a string "text"')
    return line["text"]


@functools.lru_cache(maxsize=1)
def _tokenizer(name: str):
    return optional("transformers").AutoTokenizer.from_pretrained(name, model_max_length=1 << 60)


def _records(path: Path) -> Source:
    """Record files, including FFRecord's."""
    reader = FileReader(path)
    schema = reader.schema and reader.schema.fields
    read, where = functools.partial(_read_records, reader), functools.partial(_numbered, path, "record")
    return Source(schema, len(reader), read, where, encoded=True)


def _read_records(reader, begin, end):
    return reader.read(range(begin, end))


FORMATS: dict[str, Callable] = {
    "folder": _folder, "images": _images, "tar": _tar, "jsonl": _jsonl, "parquet": _parquet, "npy": _numpy,
    "hfr": _records, "ffr": _records, "tokens": _tokens, "documents": _documents,
}  # fmt: skip


def source(path, format: str | None = None, length: int = 1024, tokenizer: str | None = None) -> Source:
    """A source; format: one of FORMATS, by default from the path's name.

    length: of records of tokens. tokenizer: of documents. Raises ValueError for an unknown format or a damaged file,
    FileNotFoundError if there is none.
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
    try:
        found = FORMATS[format](path, **options)
    except DAMAGE as error:
        raise located(path, error) from error
    size = sum(file.stat().st_size for file in (_files(path)[0] if path.is_dir() else [path]))
    found.origin = {"path": str(path.resolve()), "format": format, "units": found.units, "bytes": size, **options}
    return found


def located(where, error: Exception) -> ValueError:
    """The error as one line that begins with the place."""
    text = " ".join(str(error).split()) or type(error).__name__
    return ValueError(text if str(where) in text else f"{where}: {text}")
