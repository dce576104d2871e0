"""Records for torch: a Dataset for torch's own DataLoader, and a DataLoader that knows its position."""

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch.utils.data

from hfrecord.reader import FileReader, Paths
from hfrecord.sampler import ElasticSampler


class Dataset(torch.utils.data.Dataset[Any]):
    """A map-style dataset that reads whole batches at once; also a RandomAccessDataSource of Grain.

    Args:
        data: A FileReader, or paths for one.
        transform: A function of a sample. Spawned workers need one that can be pickled.
        fields: Names of fields of the schema. A sample is then a tuple of them, as in torchvision's ImageFolder with
            ("image", "label"); otherwise it is the record.

    Raises:
        ValueError: The records have no such field.
    """

    reader: FileReader

    def __init__(
        self,
        data: FileReader | Paths,
        transform: Callable[[Any], Any] | None = None,
        *,
        fields: Sequence[str] | None = None,
    ):
        self.reader = data if isinstance(data, FileReader) else FileReader(data)
        self.transform, self.fields = transform, fields
        known = self.reader.schema.fields if self.reader.schema else {}
        if fields is not None and (missing := [name for name in fields if name not in known]):
            raise ValueError(f"fields {missing}: the records have {', '.join(known) or 'no schema'}")

    def __len__(self) -> int:
        return len(self.reader)

    def __getitem__(self, index: int) -> Any:
        return self._sample(self.reader[index])

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        return [self._sample(record) for record in self.reader.__getitems__(indices)]

    def advise(self, indices: Sequence[int]) -> None:
        """Prefetches records that will be read."""
        self.reader.advise(indices)

    def _sample(self, record):
        if self.fields is not None:
            record = tuple(record[name] for name in self.fields)
        return record if self.transform is None else self.transform(record)


class DataLoader(torch.utils.data.DataLoader[Any]):
    """torch's DataLoader with an ElasticSampler, and with `state_dict` and `load_state_dict`.

        loader = hfrecord.DataLoader(dataset, batch_size=64, num_workers=4, seed=0)
        loader.load_state_dict(state)  # resumes in the middle of an epoch, on any number of ranks and workers

    The state counts the batches that the loop has received, not those that workers have prefetched. The epoch moves
    when a loop ends: after a `break` the next loop begins where that one began, unless `load_state_dict` or `set_epoch`
    says otherwise. A batch whose transform raises counts if the loop goes on.

    Args:
        dataset: A Dataset, or paths for one.
        batch_size: Records of a batch on this rank.
        num_workers: As in torch.
        options: seed, shuffle, window, mix, rank, world_size and tail, as in ElasticSampler; others as in torch.
    """

    def __init__(
        self,
        dataset: torch.utils.data.Dataset[Any] | Paths,
        batch_size: int = 1,
        *,
        num_workers: int = 0,
        **options: Any,
    ):
        paths = isinstance(dataset, (str, os.PathLike, list, tuple))
        dataset = Dataset(dataset) if paths else dataset
        names = ("seed", "shuffle", "window", "mix", "rank", "world_size", "tail")
        own = {name: options.pop(name) for name in names if name in options}
        sampler = ElasticSampler(dataset, batch_size, **own)
        super().__init__(dataset, batch_sampler=sampler, num_workers=num_workers, **options)

    def __iter__(self) -> Iterator[Any]:
        return _Iterator(self)

    def _prefetched(self) -> Iterator:
        """torch's iterator; the sampler counts none of its batches."""
        self.batch_sampler._counts = False
        try:
            return super().__iter__()
        finally:
            self.batch_sampler._counts = True

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the next loop. Another epoch than the present one starts from its beginning."""
        self.batch_sampler.set_epoch(epoch)

    def state_dict(self) -> dict[str, int]:
        """Everything that a run must keep: a dict of integers."""
        return self.batch_sampler.state_dict()

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Resumes after the batches of a state."""
        self.batch_sampler.load_state_dict(state)


class _Iterator:
    """torch's iterator of a DataLoader, which tells the sampler what the loop has received."""

    def __init__(self, loader: DataLoader):
        self._sampler, self._number = loader.batch_sampler, 0
        self._at = self._sampler.epoch, self._sampler.consumed
        self._batches = loader._prefetched()

    def __iter__(self):
        return self

    def __len__(self) -> int:
        return len(self._batches)

    def __next__(self):
        try:
            batch = next(self._batches)
        except StopIteration:
            self._sampler._ended(self._at)
            raise
        except Exception:
            self._number += 1  # the next one follows; until then a state says that it is to be read again
            raise
        self._number += 1
        self._sampler._received(self._at, self._number)
        return batch
