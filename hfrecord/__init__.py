"""Record files for training with random batches: written once, read at the speed of the disk.

    with hfrecord.FileWriter("train.hfr") as writer:
        writer.write(b"a record")

    reader = hfrecord.FileReader("train.hfr")  # or a folder, or a list, also of FFRecord's .ffr files
    reader[-1], reader[[5, 2, 5]], len(reader)

Needs numpy; torch, zstandard, pyarrow and Pillow only where they are used.
"""

from hfrecord.ffr import FfrWriter
from hfrecord.format import RecordError
from hfrecord.reader import FileReader
from hfrecord.sampler import ElasticSampler, Permutation
from hfrecord.schema import Schema
from hfrecord.writer import DatasetWriter, FileWriter, train_dictionary

__all__ = [
    "DataLoader", "Dataset", "DatasetWriter", "ElasticSampler", "FfrWriter", "FileReader", "FileWriter", "Permutation",
    "RecordError", "Schema", "train_dictionary",
]  # fmt: skip


def __getattr__(name: str):
    if name in ("DataLoader", "Dataset"):  # torch is imported with them
        from hfrecord import data

        return getattr(data, name)
    raise AttributeError(f"module 'hfrecord' has no attribute {name!r}")
