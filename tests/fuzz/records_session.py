"""Runs a program of the fuzzer of records: on files of hfrecord, or on a list, which defines the right results."""

import concurrent.futures
import contextlib
import itertools
import pickle
import random
import tempfile
from pathlib import Path
from unittest import mock

import numpy as np

import hfrecord
from hfrecord import manifest

KINDS = ("file", "dataset", "ffr")
DAMAGE = ("flip", "cut", "zeros", "swap", "grow", "insert", "flip index", "head")
SCHEMAS = {
    "label and bytes": {"label": "int64", "data": "bytes"},
    "arrays": {"x": "float32[?,3]", "y": "uint8[2]", "text": "text"},
    "json": {"json": "json", "half": "float16[?]"},
}


def value(schema: str | None, size: int, rng: random.Random):
    """A record of about `size` bytes, partly compressible."""
    data = rng.randbytes(size // 2) + bytes(size - size // 2)
    if schema is None:
        return data
    if schema == "label and bytes":
        return {"label": rng.randrange(-(1 << 40), 1 << 40), "data": data}
    if schema == "json":
        half = np.arange(size % 50, dtype=np.float16)
        return {"json": {"size": size, "list": [None, 1.5, "\u00e9"] * (size % 5)}, "half": half}
    x = np.array([[rng.random()] * 3] * (size // 12), np.float32).reshape(-1, 3)
    return {"x": x, "y": np.array([size % 256, 1], np.uint8), "text": "\u00fc" * (size % 7)}


def shown(record):
    """A record in a form that == compares."""
    if not isinstance(record, dict):
        return record
    return {k: (v.dtype.str, v.tolist()) if isinstance(v, np.ndarray) else v for k, v in record.items()}


class Session:
    """`committed` and `written` are the list's side; the other side writes files."""

    def __init__(self, program, ours: bool, log):
        self.program, self.ours, self.log = program, ours, log
        self.kind, self.schema = program["kind"], program["schema"]
        self.rng = random.Random(program["seed"])
        self.committed, self.written, self.writer, self.reader = [], [], None, None
        self.exists = False

    def __enter__(self):
        self.exit = contextlib.ExitStack()
        self.folder = Path(self.exit.enter_context(tempfile.TemporaryDirectory()))
        if self.program["seed"] % 3 == 0:  # as if hfrecord._C were not built
            self.exit.enter_context(mock.patch("hfrecord.native.extension", None))
        self.exit.enter_context(mock.patch("os.fsync"))  # slow, and durability on disk is not tested here
        self.path = self.folder / {"file": "a.hfr", "dataset": "set", "ffr": "a.ffr"}[self.kind]
        return self

    def __exit__(self, *error):
        self.writer = self.reader = None
        self.exit.close()

    def do(self, number: int, step: tuple) -> None:
        name, *arguments = step
        with self.log.attempt(f"{number} {name}"):
            getattr(self, name.replace(" ", "_"))(f"{number} {name}", *arguments)

    # Writing

    def write(self, label, sizes) -> None:
        self._begin()
        for size in sizes:
            record = value(self.schema, size, self.rng)
            self.written.append(record)
            if self.ours:
                self.writer.write(record)
        self.log.note(f"length {label}", len(self.writer) if self.ours else len(self.written))

    def _begin(self) -> None:
        """Opens a writer if there is none: for a new file, or to append."""
        if self.writer is not None:
            return
        self.written = [] if self.kind == "ffr" else list(self.committed)
        self.writer = self._make() if self.ours else "the list's"
        self.exists |= self.kind != "ffr"  # it gets its name when it is closed

    def _make(self):
        if self.kind == "ffr":
            return hfrecord.FfrWriter(self.path)
        options = {}
        if not self.exists or self.program["seed"] % 2:
            options = {"schema": SCHEMAS.get(self.schema)}
            if self.program["compression"]:
                options |= {"compression": "zstd"}
            if self.program["compression"] == "dictionary":
                options |= {"dictionary": DICTIONARY}
        if self.kind == "file":
            return hfrecord.FileWriter(self.path, append=self.exists, **options)
        part_bytes = self.program["part_bytes"]
        return hfrecord.DatasetWriter(self.path, append=self.exists, part_bytes=part_bytes, **options)

    def bad_write(self, label) -> None:
        """A refused write leaves nothing."""
        self._begin()
        if not self.ours:
            raise TypeError("refused") if self.schema is None else ValueError("refused")
        try:
            self.writer.write(7 if self.schema is None else {"no": 1})
        except (TypeError, ValueError) as error:
            raise type(error)("refused") from error

    def commit(self, label) -> None:
        self._begin()
        if self.ours:
            self.writer.commit()
        self.committed = list(self.written)

    def close(self, label) -> None:
        self._begin()
        if self.ours:
            self.writer.close()
        self.committed, self.writer, self.exists = list(self.written), None, True
        self.reader = None if self.kind == "ffr" else self.reader  # the old reader keeps reading the replaced file

    def die(self, label, how) -> None:
        """The writer ends as if killed, at some point before the data since the last commit counts."""
        self._begin()
        if self.ours and self.kind == "ffr":
            self.writer.__exit__(KeyboardInterrupt)
        elif self.ours:
            self._die(how)
        self.writer = None

    def _die(self, how) -> None:
        file = self.writer._writer if self.kind == "dataset" else self.writer
        save = mock.patch.object(manifest.Manifest, "save", side_effect=_Killed)
        commit = mock.patch("hfrecord.format.commit", side_effect=_Killed)
        if how == "before the manifest" and self.kind == "dataset":
            with save, contextlib.suppress(_Killed):
                self.writer.commit()
        elif how == "before the commit":
            with save, commit, contextlib.suppress(_Killed):
                self.writer.commit()
        elif how == "flushed":
            file._flush()
        self.writer.abandon()

    # Reading

    def read(self, label, which, how, given) -> None:
        if self.kind == "ffr" and self.writer is not None:
            return
        records = self._records(which)
        n = len(records)
        if how == "one":
            return self.log.note(f"value {label}", self._one(records, self._index(given, n)))
        if how == "slice":
            part = slice(*given)
            return self.log.note(f"value {label}", [shown(r) for r in records[part]])
        indices = list(range(n)) if how == "all" else [self._index(index, n) for index in given]
        if how == "threads" and self.ours:
            with concurrent.futures.ThreadPoolExecutor(4) as pool:
                parts = list(pool.map(lambda k: self._batch(records, indices[k::3], "batch"), range(3)))
        elif how == "threads":
            parts = [self._batch(records, indices[k::3], "batch") for k in range(3)]
        else:
            parts = self._batch(records, indices, how)
        self.log.note(f"value {label}", parts)

    def _index(self, given, n):
        kind, share = given
        at = int(share * n)
        return {"share": at, "negative": at - n, "beyond": n + at, "none": 1.5}[kind] if n or kind == "none" else 0

    def _records(self, which):
        if not self.ours:
            if not self.exists:
                raise FileNotFoundError("[Errno")
            return self.committed
        path = [self.path] if which == "list of paths" else self.path
        if which == "same" and self.reader is not None and len(self.reader) == len(self.committed):
            return self.reader
        self.reader = hfrecord.FileReader(path)
        return pickle.loads(pickle.dumps(self.reader)) if which == "pickled" else self.reader

    def _one(self, records, index):
        if self.ours:
            return shown(records[index])
        if type(index) is not int:
            raise TypeError("an")
        return self._stock(records, [index])[0]

    def _batch(self, records, indices, how):
        if not self.ours:
            found = self._stock(records, indices)
            return len(found) if how == "read" and self.schema else found
        if how == "read":
            for _ in range(1 + 40 * (len(indices) % 2)):  # often enough that records count as resident in memory
                records.advise(indices)
            found = records.read(np.array(indices, np.int64) if all(type(i) is int for i in indices) else indices)
            return len(found) if self.schema else found
        return [shown(record) for record in records[indices]]

    @staticmethod
    def _stock(records, indices):
        if any(type(index) is not int for index in indices):
            raise TypeError("indices")
        try:
            return [shown(records[index]) for index in indices]
        except IndexError:
            raise IndexError("index") from None

    # Damage

    def damage(self, label, how, share, byte) -> None:
        """Reads a damaged copy of the file: the results are right, or one of our errors is raised."""
        self.log.note(f"damage {label}", "right or refused")
        if not self.ours or not self.committed or self.writer is not None:
            return
        path = self.path
        if self.kind == "dataset":
            files = sorted(path.iterdir())
            path = files[int(share * 1000) % len(files)]
        data = bytearray(path.read_bytes())
        path.write_bytes(damaged(data, how, share, byte))
        try:
            reader = hfrecord.FileReader(self.path)
            found = [shown(record) for record in reader[:]]
        except (hfrecord.RecordError, FileNotFoundError) as error:
            self.log.features.add("damage is told")
            if "/" not in str(error):
                self.log.seen[f"damage {label}"] = f"names no file: {error}"
            return
        if found != [shown(record) for record in self.committed]:
            self.log.seen[f"damage {label}"] = "wrong records"
        self.log.features.add("damage does no harm")

    # Orders

    def epoch(self, label, seed, window, tail, parts) -> None:
        """An epoch in parts on several ranks: order and state of what all ranks together read at each step."""
        n = len(self.committed) or 17
        log, state = self.log, None
        everything = hfrecord.Permutation(n, seed, 0, window, 2)(np.arange(n)) if self.ours else range(n)
        log.note(f"records {label}", sorted(everything) == list(range(n)))
        for number, (ranks, batch, steps) in enumerate(parts):
            last = number == len(parts) - 1
            if self.ours:
                found, state = _ours(n, seed, window, tail, ranks, batch, None if last else steps, state)
            else:
                found, state = _stock_epoch(n, seed, window, tail, ranks, batch, None if last else steps, state)
            log.note(f"order {label} {number}", found)
            log.note(f"state {label} {number}", state)


class _Killed(BaseException):
    pass


def _ours(n, seed, window, tail, ranks, batch, steps, state):
    samplers = [
        hfrecord.ElasticSampler(range(n), batch, seed=seed, window=window, mix=2, rank=r, world_size=ranks, tail=tail)
        for r in range(ranks)
    ]
    for sampler in samplers:
        if state is not None:
            sampler.load_state_dict(state)
    lengths = [len(sampler) for sampler in samplers]
    given = [list(itertools.islice(sampler, steps)) for sampler in samplers]
    if steps is None and [len(batches) for batches in given] != lengths:
        return "lengths differ", None
    states = [sampler.state_dict(max(map(len, given))) for sampler in samplers]
    if any(other != states[0] for other in states):
        return "states differ", None
    return given, states[0]


def _stock_epoch(n, seed, window, tail, ranks, batch, steps, state):
    """The rule, position by position."""
    epoch, consumed = (state["epoch"], state["consumed"]) if state else (0, 0)
    order = hfrecord.Permutation(n, seed, epoch, window, 2)(np.arange(n)).tolist()
    mine = [[] for _ in range(ranks)]
    for place in range(consumed, n):
        mine[(place - consumed) % ranks].append(order[place])
    if tail == "repeat":
        filled = (index for index in itertools.cycle(order))
        for own in mine:
            if len(own) < len(mine[0]):
                own.append(next(filled))
    if tail == "drop":
        whole = (n - consumed) // (ranks * batch) * batch
        mine = [own[:whole] for own in mine]
    given = [[own[at : at + batch] for at in range(0, len(own), batch)][:steps] for own in mine]
    consumed += max(map(len, given)) * batch * ranks
    if n - consumed <= 0 or (tail == "drop" and n - consumed < batch * ranks):
        epoch, consumed = epoch + 1, 0
    return given, {"seed": seed, "epoch": epoch, "consumed": consumed, "records": n}


def damaged(data: bytearray, how: str, share: float, byte: int) -> bytes:
    """A file's bytes with one fault in them."""
    at = min(int(share * len(data)), len(data) - 1)
    if how == "flip":
        data[at] ^= byte
    elif how == "cut":
        del data[at:]
    elif how == "zeros":
        data[at : at + byte] = bytes(len(data[at : at + byte]))
    elif how == "grow":
        data += bytes([byte]) * byte
    elif how == "insert":
        data[at:at] = bytes([byte])
    elif how == "flip index":
        data[-1 - at % min(len(data), 200)] ^= byte
    elif how == "head":
        data[(0, 8, 12, 16, 24, 512, 520, 528, 536, 1024, 1040)[byte % 11] % len(data)] ^= 1 << byte % 8
    elif how == "swap" and len(data) > 4200:
        entry = len(data) - 48  # the last two entries of the index
        data[entry : entry + 48] = data[entry + 24 :] + data[entry : entry + 24]
    return bytes(data)


DICTIONARY = random.Random(0).randbytes(300) + bytes(300)  # zstd accepts any content
