"""Defects planted in `hfrecord`; the fuzzer of records finds each of them."""

import numpy as np
from engine import patched

from hfrecord import ffr, file, format, reader, sampler, schema
from hfrecord.reader import FileReader
from hfrecord.writer import FileWriter


def _negative(own):
    return lambda self, indices: np.where(np.asarray(indices, np.int64) < 0, len(self) - 1, own(self, indices))


def _unchecked(own):
    def places(self, indices):
        return np.asarray(indices, np.int64) % max(len(self), 1)

    return places


def _once(own):
    """A batch as a dict: duplicates are returned once."""

    def read(self, places):
        unique = list(dict.fromkeys(places.tolist()))
        return own(self, np.array(unique, np.int64)) + [b""] * (len(places) - len(unique))

    return read


def _sorted(own):
    return lambda self, places: own(self, np.sort(places))


def _first_of_next(own):
    def located(self, places):
        files, opened, which, numbers = own(self, places)
        last = np.array([max(file.records - 2, 0) for file in files], np.int64)
        return files, opened, which, np.minimum(numbers, last[which])

    return located


def _from_index(own):
    """Appends over the index that the last commit needs."""

    def open_(self, keep):
        own(self, keep)
        self._at = self._flushed = max(self._at - len(self._index), format.META)

    return open_


def _committed(own):
    """A commit is written before its records."""

    def commit(self):
        pending, self._pending, self._pending_bytes = self._pending, [], 0
        own(self)
        self._pending, self._pending_bytes = pending, 0

    return commit


def _keep_all(own):
    return lambda self, keep: own(self, None)


def _lost(own):
    def put(self, data):
        own(self, data if len(data) < 3000 else data[:2999] + b"\0")

    return put


def _no_shape(own):
    def decode(self, view, at):
        found, end = own(self, view, at)
        return (found.reshape(-1) if isinstance(found, np.ndarray) else found), end

    return decode


def _modulo(own):
    return lambda places, n, keys: own(places, 1 << max(2, (max(n, 1) - 1).bit_length()), keys) % max(n, 1)


def _rank_first(own):
    """Ranks get contiguous ranges instead of taking turns."""
    return lambda self, begin: own(self, begin) + (self.rank == 0 and self.world_size > 2)


def _own_count(own):
    def state_dict(self, batches=None):
        state = own(self, batches)
        return state | {"consumed": min(self.records, state["consumed"] + self.world_size - 1)}

    return state_dict


def _last_index(own):
    def entries(self, numbers):
        found = own(self, numbers)
        found["length"][numbers + 1 == self.records] -= np.uint64(1)
        return found

    return entries


def _no_check(own):
    return lambda self, path, check=True, records=None: own(self, path, False, records)


FAULTS = {
    "a negative index is the last record": patched(FileReader, "_places", _negative),
    "indices are not checked": patched(FileReader, "_places", _unchecked),
    "a record that is asked for twice comes once": patched(FileReader, "_read", _once),
    "a batch comes in the order of the file": patched(FileReader, "_read", _sorted),
    "the last record of a part is the one before it": patched(FileReader, "_located", _first_of_next),
    "an append overwrites the index": patched(FileWriter, "_open", _from_index),
    "a commit before its records": patched(FileWriter, "commit", _committed),
    "records that a manifest does not know stay": patched(FileWriter, "_open", _keep_all),
    "long records lose a byte": patched(FileWriter, "_put", _lost),
    "checksums leave the place out": patched(format, "seed", lambda own: lambda *place: 0),
    "checksums are not compared": patched(reader.File, "__init__", _no_check),
    "the older commit counts": patched(format.Head, "_commits", lambda own: lambda path, page: [min(own(path, page))]),
    "arrays lose their shape": patched(schema._Array, "decode", _no_shape),
    "no walk to a record of the file": patched(sampler, "_permuted", _modulo),
    "a rank takes one more": patched(sampler.ElasticSampler, "_own", _rank_first),
    "a state counts the ranks twice": patched(sampler.ElasticSampler, "state_dict", _own_count),
    "the last sample of an .ffr file is short": patched(ffr.Table, "entries", _last_index),
    "decompressed without the dictionary": patched(file, "dictionary", lambda own: lambda path, meta: None),
    "closing does not commit": patched(FileWriter, "close", lambda own: FileWriter.abandon),
}
