"""Record files: make them from other data, inspect them, verify them.

hfrecord convert images out --format images     # a folder per class
hfrecord verify out                             # reads everything
"""

import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from haiprof.command import Parser, run
from hfrecord import convert, native, sources
from hfrecord.format import RecordError
from hfrecord.manifest import Manifest
from hfrecord.reader import FileReader
from hfrecord.sampler import Permutation

SHOWN = 20  # lines of what is left out


def bar(what: str) -> Progress:
    """A progress bar, shown only in a terminal."""
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, disable=not sys.stderr.isatty())


def tracked(items: Iterator, total: int, what: str) -> Iterator:
    """The items, with a progress bar."""
    with bar(what) as progress:
        yield from progress.track(items, total)


def incomplete(path, records: int) -> int:
    """The exit status: 1, with a message, if the writer of a data set was not closed. Prints what was skipped."""
    if not os.path.isdir(path) or not Manifest.path(path).exists():
        return 0
    manifest = Manifest.load(path)
    for text in manifest.skipped:
        print(f"  skipped: {text}")
    if manifest.complete:
        return 0
    again = "" if manifest.source is None else ": run the conversion again, and it continues"
    print(f"{path}: incomplete: {records} records are whole, but their writer was not closed{again}")
    return 1


def info(args) -> int:
    reader = FileReader(args.path)
    print(f"{args.path}: {len(reader)} records in {len(reader._known)} files")
    for name, kind in (reader.schema.fields if reader.schema else {}).items():
        print(f"  {name}: {kind}")
    for file in reader.files():
        notes = "".join(f", {name}" for name in ("compression", "dictionary") if name in file.meta)
        print(f"  {file.path}: {file.records} records, {file.size} bytes{notes}")
    return incomplete(args.path, len(reader))


def verify(args) -> int:
    reader = FileReader(args.path)
    for file in tracked(reader.files(), len(reader._known), "files"):
        file.verify()
    if incomplete(args.path, len(reader)):
        return 1
    print(f"{args.path}: {len(reader)} records are whole")
    return 0


def unpack(args) -> None:
    """Restores a packed folder, or writes one file per record."""
    reader = FileReader(args.path)
    for number in tracked(iter(range(len(reader))), len(reader), "records"):
        record = reader[number]
        packed = reader.schema is not None and {"name", "data"} <= reader.schema.fields.keys()
        name = Path(record["name"] if packed else f"{number:09d}")
        if name.is_absolute() or ".." in name.parts:
            raise ValueError(f"record {number} is named {str(name)!r}: outside of the folder")
        target = Path(args.out) / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(record["data"] if packed else reader.read([number])[0])


def write(args) -> None:
    source = sources.source(args.source, args.format, args.length, args.tokenizer)
    with bar(args.format or "units") as progress:
        task = progress.add_task("", total=source.units)
        show = lambda units: progress.update(task, completed=units)  # noqa: E731
        options = {"skip_bad": args.skip_bad, "allow_empty": args.allow_empty}
        count = convert.write(args.out, source, args.part_bytes, args.compression, args.jobs, show, **options)
    said = f"{args.out}: {count} records"
    for title, texts in (("left out", source.left_out), ("skipped", Manifest.load(args.out).skipped)):
        for text in texts[:SHOWN]:
            print(f"  {title}: {text}")
        if len(texts) > SHOWN:
            print(f"  {title}: {len(texts) - SHOWN} more")
        said += f", {len(texts)} {title}" if texts else ""
    print(said)


def bench(args) -> None:
    """Times the random batches of one pass: outside the page cache and in it, with and without prefetching."""
    records = len(FileReader(args.path))
    order = Permutation(records, args.seed)(np.arange(records))
    order = [order[at : at + args.batch] for at in range(0, len(order), args.batch)][: args.batches]
    table = Table("pages", "next batch", "records a second", "MB/s")
    for cold in (True, False):
        for ahead in (False, True):
            reader = FileReader(args.path)
            if cold:
                for file in reader.files():
                    os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_DONTNEED)
            begin, records, nbytes = time.perf_counter(), 0, 0
            for k, batch in enumerate(order):
                following = order[k + 1] if ahead and k + 1 < len(order) else None
                found = reader.read(batch, following)
                records, nbytes = records + len(found), nbytes + sum(map(len, found))
            seconds = time.perf_counter() - begin
            pages, following = "dropped before" if cold else "in memory", "advised" if ahead else "not advised"
            table.add_row(pages, following, f"{records / seconds:,.0f}", f"{nbytes / seconds / 1e6:,.1f}")
    print(f"{args.path}: {len(order)} random batches of {args.batch}, {'C++' if native.extension else 'Python'}")
    Console().print(table)


def parser() -> Parser:
    found = Parser(prog="hfrecord", description=__doc__)
    commands = found.add_subparsers(metavar="COMMAND", required=True)
    calls = {"info": info, "verify": verify, "bench": bench, "unpack": unpack}
    does = {
        "info": "show the content of the files",
        "verify": "read everything, and report the first damaged record",
        "bench": "time random batches, outside the page cache and in it",
        "unpack": "write each record as a file",
        "pack": "pack the files of a folder, by name",
        "convert": "convert images, tar (webdataset), parquet, jsonl, npy, text or other record files",
    }
    subs = {name: commands.add_parser(name, help=does[name]) for name in calls}
    for name, sub in subs.items():
        sub.add_argument("path", help="a .hfr or .ffr file, or a folder of them")
        sub.set_defaults(call=calls[name])
    subs["unpack"].add_argument("out", help="folder for the files")
    subs["bench"].add_argument("--batch", type=int, default=64, help="records per batch")
    subs["bench"].add_argument("--batches", type=int, default=1000, help="number of batches, at most")
    subs["bench"].add_argument("--seed", type=int, default=0)
    for name in ("pack", "convert"):
        sub = commands.add_parser(name, help=does[name])
        sub.add_argument("source", help="a folder" if name == "pack" else "the data to convert")
        sub.add_argument("out", help="folder of the records; continues a run that was killed")
        sub.add_argument("--part-bytes", type=int, default=1 << 30)
        sub.add_argument("--compression", choices=("zstd",))
        sub.add_argument("--jobs", type=int, default=1, help="processes that read and encode")
        sub.add_argument(
            "--skip-bad", type=int, default=0, metavar="N", help="go on after up to N damaged units, and list them"
        )
        sub.add_argument("--allow-empty", action="store_true", help="no record at all is no error")
        sub.set_defaults(call=write, format="folder", length=1, tokenizer=None)
    sub.set_defaults(format=None)
    sub.add_argument("--format", choices=sources.FORMATS, help="default: from the source's name")
    sub.add_argument("--length", type=int, default=1024, help="tokens per record (documents: at most)")
    sub.add_argument("--tokenizer", help="for documents, by transformers' AutoTokenizer (default: bytes)")
    return found


def main(argv=None) -> int:
    args = parser().parse_args(argv)
    return run("hfrecord", lambda: args.call(args), (RecordError, BrokenProcessPool))


if __name__ == "__main__":
    sys.exit(main())
