"""Writes the units of a source (sources.py) as records.

Processes share the work, and a conversion that was killed continues after the units of its last commit. The output does
not depend on the number of processes.
"""

import collections
import concurrent.futures
import multiprocessing
import os
import threading
from collections.abc import Iterator

from hfrecord.sources import DAMAGE, Source, located
from hfrecord.writer import DatasetWriter, Packer

COMMIT = 256 << 20  # bytes of records between two commits


def write(
    out,
    source: Source,
    part_bytes=1 << 30,
    compression=None,
    jobs=1,
    progress=lambda units: None,
    skip_bad=0,
    allow_empty=False,
) -> int:
    """Appends the missing part of a source to the data set `out`; returns its number of records.

    jobs: processes that read and encode. progress: called with the number of written units. skip_bad: how many units
    may be damaged; the manifest lists those that are left out. Raises ValueError with the place of a further one; if
    `out` has records of another source, or of this one before it changed; and if there is no record, unless
    allow_empty.
    """
    if not source.units and not allow_empty:
        raise ValueError(f"{(source.origin or {}).get('path', 'the source')}: nothing to convert, no record")
    options = {"part_bytes": part_bytes, "compression": compression, "append": True}
    with DatasetWriter(os.fspath(out), source.schema, **options) as writer:
        done, since = _done(out, writer, source), 0
        progress(done)
        for end, records, bad in _chunks(source, writer.packer, done, jobs, skip_bad):
            writer.skipped += bad
            if len(writer.skipped) > skip_bad:
                raise ValueError(bad[-1] + (f" (more than {skip_bad} are bad)" if skip_bad else ""))
            for data, codec in records:
                writer.append(data, codec)
                since += len(data)
            done = end
            progress(done)
            if since > COMMIT:
                writer.commit(done)
                since = 0
        writer.commit(done)
        if not len(writer) and not allow_empty:
            raise ValueError(f"{out}: none of {source.units} units has a record")
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


def _chunks(source: Source, packer: Packer, begin: int, jobs: int, skip_bad: int) -> Iterator[tuple[int, list, list]]:
    """(end of a chunk, its records as stored, what is wrong with its damaged units), in order."""
    spans = ((at, min(at + source.chunk, source.units)) for at in range(begin, source.units, source.chunk))
    if jobs == 1:
        yield from ((end, *_packed(source, packer, skip_bad, at, end)) for at, end in spans)
        return
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(jobs, context, _begin, (source, packer, skip_bad)) as pool:
        waiting = collections.deque()
        try:
            for at, end in spans:
                waiting.append((end, pool.submit(_run, at, end)))
                if len(waiting) > 2 * jobs:
                    end, chunk = waiting.popleft()
                    yield end, *chunk.result()
            while waiting:
                end, chunk = waiting.popleft()
                yield end, *chunk.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _packed(source: Source, packer: Packer, skip_bad: int, begin: int, end: int) -> tuple[list, list[str]]:
    """The records of a chunk as stored, and an error for each unit that has none: at most one more than `skip_bad`."""
    pack = packer.compressed if source.encoded else packer
    try:
        return [pack(record) for record in source.read(begin, end)], []
    except DAMAGE:
        records, bad = [], []
    for unit in range(begin, end):  # one by one, to find which
        try:
            records += [pack(record) for record in source.read(unit, unit + 1)]
        except DAMAGE as error:
            bad.append(str(located(source.where(unit), error)))
            if len(bad) > skip_bad:
                break
    return records, bad


_work: tuple = ()  # of a process that converts: source, packer, and how many units may be damaged


def _run(begin: int, end: int) -> tuple[list, list[str]]:
    return _packed(*_work, begin, end)


def _begin(source: Source, packer: Packer, skip_bad: int) -> None:
    """Initialises a converting process: its source, and that it ends if its parent is killed."""
    global _work
    _work = source, packer, skip_bad

    def watch():
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
