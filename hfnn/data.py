"""Packed sequences instead of padded ones: batches without wasted tokens.

    sampler = hfnn.data.PackedBatchSampler(lengths, max_tokens=8192, seed=0)
    loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=hfnn.data.PackedCollator())

A batch is one row of tokens. Two values keep sequences from attending to each other: `position_ids`, which begin at 0
in each sequence (transformers makes a mask from them), and `cu_seqlens`, the starts of the sequences.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import distributed
from torch.utils.data import Sampler

__all__ = ["PackedBatchSampler", "PackedCollator", "pack"]


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Bins of indices into `lengths`, each with a total of at most `capacity`: best fit, the longest first.

    A sequence goes into the bin where it leaves the least space; if it fits into none, it opens a new bin. At most 11/9
    of the minimum number of bins, plus 6/9, in O(n log n) steps. The bins are the same every time; their number and
    sizes do not depend on the order of lengths. Johnson et al., "Worst-case performance bounds for simple
    one-dimensional packing algorithms", 1974.

    Args:
        lengths: Of the sequences, in tokens.
        capacity: Of a bin, in tokens.

    Raises:
        ValueError: A length is negative or longer than capacity.

    >>> hfnn.data.pack([5, 3, 4, 2], 7)
    [[0, 3], [2, 1]]
    """
    if capacity < 1:
        raise ValueError(f"capacity={capacity}: give the number of tokens of a batch, 1 or more")
    lengths = [int(length) for length in lengths]
    for index, length in enumerate(lengths):
        if not 0 <= length <= capacity:
            raise ValueError(
                f"sequence {index} has {length} tokens, a batch takes 0 to {capacity}: cut or leave out what is "
                "longer, or give a larger capacity"
            )
    bins: list[list[int]] = []
    rooms: list[int] = []  # the distinct free sizes of bins, ascending
    having: dict[int, list[int]] = {}  # room -> the bins that have it
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        at = bisect_left(rooms, lengths[index])
        if at == len(rooms):
            chosen, room = len(bins), capacity
            bins.append([])
        else:
            room = rooms[at]
            chosen = having[room].pop()
            if not having[room]:
                del having[room], rooms[at]
        bins[chosen].append(index)
        left = room - lengths[index]
        if left not in having:
            having[left] = []
            rooms.insert(bisect_left(rooms, left), left)
        having[left].append(chosen)
    return bins


class PackedCollator:
    """A `collate_fn` for DataLoader and transformers' Trainer: concatenates the sequences of a batch.

    A feature is a dict of lists or 1-D tensors of one length: input_ids, optionally labels (input_ids otherwise), and
    any others. The batch has these entries of shape (1, tokens): those of the features; labels, with `label_ignore` for
    the first token of each sequence, because the last token of the previous sequence would have to predict it;
    position_ids, from 0 in each sequence. It also has cu_seqlens (sequences + 1,) int32: the starts of the sequences
    and the end of the last one. cu_seq_lens_q and cu_seq_lens_k are the same; max_length_q and max_length_k are the
    longest length, with the names of transformers' DataCollatorWithFlattening. There is no attention_mask, because
    nothing is padded. Sequences without tokens are left out.

    transformers' own sdpa and eager attention read position_ids only if no cache is made. So use `use_cache=False`, as
    the Trainer does; otherwise sequences attend to each other.

    Args:
        max_tokens: Of a batch; None: any.
        pad_to_multiple_of: Tokens after the last sequence, up to such a length, form a sequence of their own without
            labels; other values are padded with 0.
        pad_token: Their id.
        label_ignore: The label that does not count.
        return_position_ids: Whether there are position_ids.
        return_cu_seqlens: Whether there are cu_seqlens and what is derived from them.

    Raises:
        ValueError: Features lack input_ids, have different keys or lengths, or padding; a batch has no tokens, or more
            than max_tokens.

    >>> batch = hfnn.data.PackedCollator()([{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}])
    >>> batch["labels"], batch["position_ids"]
    (tensor([[-100,    2,    3, -100,    5]]), tensor([[0, 1, 2, 0, 1]]))
    """

    def __init__(
        self,
        max_tokens: int | None = None,
        *,
        pad_to_multiple_of: int | None = None,
        pad_token: int = 0,
        label_ignore: int = -100,
        return_position_ids: bool = True,
        return_cu_seqlens: bool = True,
    ):
        for name, value in (("max_tokens", max_tokens), ("pad_to_multiple_of", pad_to_multiple_of)):
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}: give a number of tokens, 1 or more, or None")
        self.max_tokens, self.pad_to_multiple_of, self.pad_token = max_tokens, pad_to_multiple_of, pad_token
        self.label_ignore = label_ignore
        self.return_position_ids, self.return_cu_seqlens = return_position_ids, return_cu_seqlens

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        sequences = [sequence for sequence in map(_sequence, features) if len(sequence["input_ids"])]
        lengths = [len(sequence["input_ids"]) for sequence in sequences]
        total = sum(lengths)
        if total == 0:
            raise ValueError(f"a batch of {len(features)} features without a token: give at least one input id")
        if self.max_tokens is not None and total > self.max_tokens:
            raise ValueError(
                f"a batch of {total} tokens, and max_tokens={self.max_tokens}: make batches with hfnn.data.pack or "
                "hfnn.data.PackedBatchSampler"
            )
        _check_keys(sequences)
        for sequence in sequences:
            labels = sequence.get("labels", sequence["input_ids"]).clone()
            labels[0] = self.label_ignore
            sequence["labels"] = labels
        batch = {key: torch.cat([sequence[key] for sequence in sequences]) for key in sequences[0]}
        padding = -total % (self.pad_to_multiple_of or 1)
        if padding:
            lengths.append(padding)
            fill = {"input_ids": self.pad_token, "labels": self.label_ignore}
            batch = {k: torch.cat([v, v.new_full((padding,), fill.get(k, 0))]) for k, v in batch.items()}
        if self.return_position_ids:
            batch["position_ids"] = torch.cat([torch.arange(length) for length in lengths])
        batch = {key: value[None] for key, value in batch.items()}
        if self.return_cu_seqlens:
            starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
            batch |= {"cu_seqlens": starts, "cu_seq_lens_q": starts, "cu_seq_lens_k": starts}
            batch |= {"max_length_q": max(lengths), "max_length_k": max(lengths)}
        return batch


def _sequence(feature) -> dict[str, torch.Tensor]:
    """A feature's tensors with one value per token, without its attention_mask, which must be all ones."""
    if "input_ids" not in feature:
        raise ValueError(f"a feature with {', '.join(map(repr, feature)) or 'nothing'}: give input_ids")
    found = {key: torch.as_tensor(value) for key, value in feature.items() if value is not None}
    shape = found["input_ids"].shape
    for key, value in found.items():
        if value.dim() != 1 or value.shape != shape:
            raise ValueError(
                f"{key} has shape {tuple(value.shape)}, input_ids {tuple(shape)}: give one value a token in each, in a "
                "list or a tensor of one dimension, and leave out other columns"
            )
    if not found.pop("attention_mask", torch.ones(1)).all():
        raise ValueError("a feature's attention_mask has zeros: give sequences without padding")
    return {key: value if value.is_floating_point() else value.long() for key, value in found.items()}


def _check_keys(sequences):
    for sequence in sequences:
        if sequence.keys() != sequences[0].keys():
            both = (", ".join(sorted(s)) for s in (sequences[0], sequence))
            raise ValueError("features with {} and with {}: give all features the same keys".format(*both))


class PackedBatchSampler(Sampler[list[int]]):
    """A `batch_sampler` for DataLoader: each batch is a bin of `pack(lengths, max_tokens)`.

    All ranks have the same number of batches, len(sampler), in all epochs.

    Args:
        lengths: The number of tokens of each element of the dataset.
        max_tokens: Of a batch.
        shuffle: Whether, in each epoch (`set_epoch`), sequences of equal length change places and the batches get
            another order.
        seed: Of the order.
        rank: This process's share; None: from torch.distributed if it is initialised. Pass 0 and 1 if something else
            distributes batches, as accelerate does.
        world_size: The number of shares; None: likewise.
        drop_last: Whether batches that do not divide evenly are left out. Otherwise some batches are used twice.

    Raises:
        ValueError: A sequence has more than max_tokens, or the rank is outside the world.

    >>> list(hfnn.data.PackedBatchSampler([5, 3, 4, 2], 7, shuffle=False))
    [[0, 3], [2, 1]]
    """

    def __init__(
        self,
        lengths: Iterable[int],
        max_tokens: int,
        shuffle: bool = True,
        seed: int = 0,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        drop_last: bool = False,
    ):
        alone = not (distributed.is_available() and distributed.is_initialized())
        self.world_size = (1 if alone else distributed.get_world_size()) if world_size is None else world_size
        self.rank = (0 if alone else distributed.get_rank()) if rank is None else rank
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank={self.rank} of world_size={self.world_size}: give a rank from 0 to world_size - 1")
        self.lengths, self.max_tokens = [int(length) for length in lengths], max_tokens
        self.shuffle, self.seed, self.drop_last, self.epoch = shuffle, seed, drop_last, 0
        self._bins = pack(self.lengths, max_tokens)
        whole, rest = divmod(len(self._bins), self.world_size)
        self._batches = whole + (rest > 0 and not drop_last)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch whose order the next iteration uses."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self._batches

    def __iter__(self) -> Iterator[list[int]]:
        bins = self._shuffled() if self.shuffle else self._bins
        for batch in range(self.rank, self._batches * self.world_size, self.world_size):
            yield list(bins[batch % len(bins)])

    def _shuffled(self):
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(len(self.lengths), generator=generator).tolist()
        bins = pack([self.lengths[i] for i in order], self.max_tokens)
        return [[order[i] for i in bins[at]] for at in torch.randperm(len(bins), generator=generator).tolist()]
