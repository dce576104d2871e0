"""The content of a record: fields with names and kinds, converted to bytes and back.

    schema = Schema({"image": "image", "label": "int64", "boxes": "float32[?,4]", "caption": "text"})

A kind is "bytes", "text" (UTF-8), "json", "image" (in a format that Pillow knows), or a numpy dtype with a shape, in
which "?" is a length that varies between records. A record is the concatenation of its fields. Arrays are little-endian
in C order, preceded by the lengths of their "?", u64 each. Other kinds are preceded by their length in bytes, u64.
"""

import io
import json
import math
import re
import struct
from typing import Any

import numpy as np

LENGTH = struct.Struct("<Q")
DTYPES = re.compile(r"bool|u?int(8|16|32|64)|float(16|32|64)|complex(64|128)")
ARRAY = re.compile(r"(\w+?)(?:\[((?:\d+|\?)(?:,(?:\d+|\?))*)?\])?")


def optional(name: str):
    """An optional package; ImportError says how to install it."""
    try:
        return __import__(name)
    except ImportError as error:
        package = {"PIL": "Pillow"}.get(name, name)
        raise ImportError(f"{package} is needed here and cannot be imported: pip install {package}") from error


class Schema:
    """The fields of a record, by name.

    Args:
        fields: A kind for each name, in the order in which they are stored: "bytes", "text", "json", "image", or a
            dtype with a shape, such as "int64", "float32[3,4]" or "uint8[?,80]", where "?" may be any length.

    Raises:
        ValueError: A kind is unknown.

    >>> schema = hfrecord.Schema({"label": "int64", "text": "text"})
    >>> schema.decode(schema.encode({"label": 3, "text": "hi"}))
    {'label': 3, 'text': 'hi'}
    """

    fields: dict[str, str]

    def __init__(self, fields: dict[str, str]):
        if not isinstance(fields, dict) or not fields:
            raise ValueError(f"a schema is a dict of names and kinds, got {fields!r}")
        self.fields = fields
        self._codecs = {name: _codec(name, kind) for name, kind in fields.items()}

    def encode(self, record: dict[str, Any]) -> bytes:
        """The bytes of a record.

        Args:
            record: A value for each field. bytes: bytes; text: str; json: values for json.dumps; image: the bytes of an
                image file, or a PIL image or uint8 array (h, w[, 3]), which becomes a PNG; arrays: values for
                np.asarray.

        Raises:
            ValueError: A field is missing or unknown, or a value does not fit its kind.
        """
        if record.keys() != self._codecs.keys():
            raise ValueError(f"a record with {', '.join(record) or 'nothing'}: give {', '.join(self._codecs)}")
        return b"".join(codec.encode(record[name]) for name, codec in self._codecs.items())

    def decode(self, data: bytes) -> dict[str, Any]:
        """The values of a record by name. Arrays belong to the caller; those of shape () are Python numbers.

        Raises:
            ValueError: The bytes are no record with these fields.
        """
        view, at, found = memoryview(data), 0, {}
        for name, codec in self._codecs.items():
            found[name], at = codec.decode(view, at)
        if at != len(data):
            raise ValueError(f"{len(data)} bytes, of which the schema takes {at}")
        return found


def _codec(name: str, kind: str):
    if kind in BLOBS:
        return _Blob(name, kind)
    match = ARRAY.fullmatch(kind) if isinstance(kind, str) else None
    if not match or not DTYPES.fullmatch(match[1]):
        kinds = ", ".join(BLOBS)
        raise ValueError(f"field {name!r} is {kind!r}: give {kinds}, or a dtype with a shape, as 'float32[?,80]'")
    shape = tuple(None if size == "?" else int(size) for size in match[2].split(",")) if match[2] else ()
    return _Array(name, np.dtype(match[1]).newbyteorder("<"), shape)


def _image_bytes(value) -> bytes:
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    optional("PIL")
    from PIL import Image

    buffer = io.BytesIO()
    (value if isinstance(value, Image.Image) else Image.fromarray(np.asarray(value))).save(buffer, "PNG")
    return buffer.getvalue()


def _image(data: bytes):
    optional("PIL")
    from PIL import Image

    try:
        return Image.open(io.BytesIO(data))
    except OSError as error:
        raise ValueError(f"no image: {error}") from None


BLOBS = {  # kind: to bytes, from bytes
    "bytes": (bytes, bytes),
    "text": (lambda value: value.encode(), lambda data: data.decode()),
    "json": (lambda value: json.dumps(value, separators=(",", ":")).encode(), json.loads),
    "image": (_image_bytes, _image),
}


class _Blob:
    def __init__(self, name: str, kind: str):
        self.name, (self._to, self._from) = name, BLOBS[kind]

    def encode(self, value) -> bytes:
        data = self._to(value)
        return LENGTH.pack(len(data)) + data

    def decode(self, view: memoryview, at: int):
        (size,), at = _numbers(self.name, view, at, 1)
        data = bytes(_part(self.name, view, at, size))
        try:
            return self._from(data), at + size
        except (ValueError, RecursionError) as error:
            raise ValueError(f"field {self.name!r}: {error}") from None


class _Array:
    def __init__(self, name: str, dtype: np.dtype, shape: tuple):
        self.name, self.dtype, self.shape, self._free = name, dtype, shape, shape.count(None)

    def encode(self, value) -> bytes:
        given = np.asarray(value)
        fits = given.ndim == len(self.shape) and all(map(lambda a, b: a in (None, b), self.shape, given.shape))
        whole = given.dtype.kind in "iu" and self.dtype.kind in "iu"
        if not fits or not (whole or np.can_cast(given.dtype, self.dtype, "same_kind")):
            shape = ",".join("?" if size is None else str(size) for size in self.shape)
            given = f"{given.dtype}{list(given.shape)}"
            raise ValueError(f"field {self.name!r} takes {self.dtype.name}[{shape}], got {given}")
        with np.errstate(over="ignore"):
            cast = given.astype(self.dtype, order="C", copy=False)
        if whole:
            beyond = given.dtype != self.dtype and not np.array_equal(cast, given)
        else:  # infinity itself is a value
            beyond = not np.can_cast(given.dtype, self.dtype) and (np.isfinite(given) & ~np.isfinite(cast)).any()
        if beyond:
            raise ValueError(f"field {self.name!r} takes {self.dtype.name}, got values beyond it")
        sizes = [size for size, known in zip(given.shape, self.shape, strict=True) if known is None]
        return struct.pack(f"<{self._free}Q", *sizes) + cast.tobytes()

    def decode(self, view: memoryview, at: int):
        sizes, at = _numbers(self.name, view, at, self._free)
        free = iter(sizes)
        shape = tuple(next(free) if size is None else size for size in self.shape)
        nbytes = math.prod(shape) * self.dtype.itemsize
        part = _part(self.name, view, at, nbytes)
        try:
            array = np.frombuffer(part, self.dtype).reshape(shape)
        except (ValueError, OverflowError) as error:  # an empty array with lengths too large for numpy
            raise ValueError(f"field {self.name!r}: {error}") from None
        return (array.copy() if shape else array.item()), at + nbytes


def _numbers(name: str, view: memoryview, at: int, count: int) -> tuple[tuple[int, ...], int]:
    end = at + LENGTH.size * count
    return struct.unpack(f"<{count}Q", _part(name, view, at, end - at)), end


def _part(name: str, view: memoryview, at: int, size: int) -> memoryview:
    if size > len(view) - at:
        raise ValueError(f"field {name!r} takes {size} bytes, the record has {len(view) - at} left")
    return view[at : at + size]
