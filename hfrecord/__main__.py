"""python -m hfrecord info|verify|unpack PATH, pack FOLDER OUT, convert SOURCE OUT: see docs/hfrecord.md."""

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from hfrecord import convert
from hfrecord.format import RecordError
from hfrecord.reader import FileReader


def tracked(items: Iterator, total: int, done: int = 0) -> Iterator:
    """The items, with a bar of them."""
    columns = (TextColumn("records"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("", total=total, completed=done)
        for item in items:
            yield item
            progress.advance(task)


def info(args) -> None:
    reader = FileReader(args.path)
    print(f"{args.path}: {len(reader)} records in {len(reader._known)} files")
    for name, kind in (reader.schema.fields if reader.schema else {}).items():
        print(f"  {name}: {kind}")
    for file in reader.files():
        notes = "".join(f", {name}" for name in ("compression", "dictionary") if name in file.meta)
        print(f"  {file.path}: {file.records} records, {file.size} bytes{notes}")


def verify(args) -> None:
    reader = FileReader(args.path)
    for file in tracked(reader.files(), len(reader._known)):
        file.verify()
    print(f"{args.path}: {len(reader)} records are whole")


def unpack(args) -> None:
    """A folder that was packed, or else a file for each record."""
    reader = FileReader(args.path)
    for number in tracked(iter(range(len(reader))), len(reader)):
        record = reader[number]
        packed = reader.schema is not None and {"name", "data"} <= reader.schema.fields.keys()
        name = Path(record["name"] if packed else f"{number:09d}")
        if name.is_absolute() or ".." in name.parts:
            raise ValueError(f"record {number} is named {str(name)!r}: outside of the folder")
        target = Path(args.out) / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(record["data"] if packed else reader.read([number])[0])


def write(args) -> None:
    schema, records, total = convert.source(args.source, args.format, args.length)
    track: Callable = lambda items, done: tracked(items, total, done)  # noqa: E731
    count = convert.write(args.out, schema, records, args.part_bytes, args.compression, track)
    print(f"{args.out}: {count} records")


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(prog="python -m hfrecord", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, call in (("info", info), ("verify", verify), ("unpack", unpack)):
        sub = commands.add_parser(name)
        sub.add_argument("path", help="a .hfr or .ffr file, or a folder of them")
        sub.set_defaults(call=call)
    sub.add_argument("out", help="folder for the files")
    for name in ("pack", "convert"):
        sub = commands.add_parser(name)
        sub.add_argument("source", help="a folder" if name == "pack" else "what is converted")
        sub.add_argument("out", help="folder of the records; what is there of a run that was killed is gone on with")
        sub.add_argument("--part-bytes", type=int, default=1 << 30)
        sub.add_argument("--compression", choices=("zstd",))
        sub.set_defaults(call=write, format="folder", length=1)
    sub.set_defaults(format=None)
    sub.add_argument("--format", choices=convert.FORMATS, help="told by the source's name by default")
    sub.add_argument("--length", type=int, default=1024, help="of a record, with --format tokens")
    args = parser.parse_args(argv)
    try:
        args.call(args)
    except (RecordError, ValueError, OSError) as error:
        print(f"hfrecord: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
