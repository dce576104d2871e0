"""Orders of records that are computed, not stored: a position in an epoch is enough to resume.

The order is a permutation in closed form: a Feistel network over the smallest power of two that holds all records,
iterated until the result is in range (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002). Its keys
depend on the seed and the epoch. It takes no memory, and any position can be computed directly. So ranks need no
communication, and a run only keeps (seed, epoch, consumed).
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

ROUNDS = 8
BLOCK = 4096  # positions computed at once


class Permutation:
    """A permutation of range(n): `permutation(places)` -> records, int64 arrays of one shape.

    With a window, the start of the first window changes with the epoch. So do the few records after the last whole
    group of windows, which are shuffled separately.

    Args:
        n: Number of records.
        seed: Another seed is another permutation.
        epoch: So is another epoch.
        window: Records that are neighbours in the files stay together in windows of this size, so a disk reads long
            ranges. None: every record moves on its own.
        mix: How many windows are shuffled with each other.

    Raises:
        ValueError: n is below 0, window or mix below 1.

    >>> hfrecord.Permutation(8, seed=1)(range(4)).tolist()
    [6, 2, 0, 4]
    """

    def __init__(self, n: int, seed: int = 0, epoch: int = 0, window: int | None = None, mix: int = 16):
        if n < 0 or mix < 1 or (window is not None and window < 1):
            raise ValueError(f"n={n}, window={window}, mix={mix}: give 0 or more records, and 1 or more of the others")
        self.n, self.window, self.group = n, window, (window or 0) * mix
        self._keys = _keys(seed, epoch)
        if window is not None:
            self._groups = n // self.group  # whole groups
            self._shift = int(self._keys[-1]) % max(n, 1)

    def __call__(self, places: int | Sequence[int] | NDArray[np.integer[Any]]) -> NDArray[np.int64]:
        places = np.asarray(places, np.int64)
        if self.window is None:
            return _permuted(places, self.n, self._keys)
        group, within = places // self.group, places % self.group
        last = group == self._groups
        found = np.empty_like(places)
        found[last] = self._groups * self.group + self._shuffled(within[last], group[last], self.n % self.group)
        inner = self._shuffled(within[~last], group[~last], self.group)
        # One permutation of all windows decides which windows a group has.
        mix = self.group // self.window
        windows = _permuted(group[~last] * mix + inner // self.window, self._groups * mix, self._keys)
        found[~last] = windows * self.window + inner % self.window
        return (found + self._shift) % max(self.n, 1)

    def _shuffled(self, within: np.ndarray, group: np.ndarray, size: int) -> np.ndarray:
        found = np.empty_like(within)
        for number in np.unique(group).tolist():
            mine = group == number
            found[mine] = _permuted(within[mine], size, _keys(int(self._keys[0]), number))
        return found


def _keys(seed: int, epoch: int) -> np.ndarray:
    return np.random.SeedSequence([seed % (1 << 64), epoch]).generate_state(ROUNDS + 1, np.uint64)


def _permuted(places: np.ndarray, n: int, keys: np.ndarray) -> np.ndarray:
    """Records for positions, int64, in range(n)."""
    found = places.astype(np.uint64)
    todo = np.arange(found.size)
    flat, bits = found.reshape(-1), max(2, (max(n, 1) - 1).bit_length())
    low = np.uint64(bits // 2)
    mask_low, mask_high = np.uint64((1 << bits // 2) - 1), np.uint64((1 << bits - bits // 2) - 1)
    while todo.size:
        x = flat[todo]
        left, right = x >> low, x & mask_low
        for a, b in zip(keys[0:ROUNDS:2], keys[1:ROUNDS:2], strict=True):
            left ^= _mixed(right ^ a) & mask_high
            right ^= _mixed(left ^ b) & mask_low
        x = left << low | right
        flat[todo] = x
        todo = todo[x >= np.uint64(n)]
    return found.astype(np.int64)


def _mixed(x: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class ElasticSampler:
    """Indices for torch's DataLoader that resume where another run stopped, on any number of ranks.

        sampler = ElasticSampler(dataset, batch_size=64, seed=0)
        loader = torch.utils.data.DataLoader(dataset, batch_sampler=sampler, num_workers=4)

    In step s, the ranks together take the positions from consumed + s * batch_size * world_size of the epoch's order;
    rank r takes those that are r modulo world_size. So the records of a step do not depend on the number of ranks that
    share them.

    An iteration begins at `consumed`, and the next epoch follows after its end. The state refers to the returned
    batches. Workers of a DataLoader prefetch, so pass `state_dict` the number of batches that were trained on, and call
    `set_epoch` after a loop that was left by `break`; or use hfrecord.DataLoader, which needs neither.

    Args:
        data: Anything with a length. If it has `advise` (FileReader, Dataset), each batch is advised one batch before
            it is returned.
        batch_size: Of this rank; it is then a batch_sampler. None: a sampler of single indices.
        seed: Of the order.
        shuffle: False: the order of the files.
        window: As in Permutation.
        mix: As in Permutation.
        rank: This rank. None: that of torch.distributed if it is initialised, otherwise 0.
        world_size: Number of ranks. None: that of torch.distributed if it is initialised, otherwise 1.
        tail: What happens to the last positions if ranks cannot share them evenly. "repeat": positions from the
            epoch's beginning fill up, so all ranks have equally many; "drop": positions of an incomplete step are left
            out; "keep": ranks get what is left, and some may have one batch less.

    Raises:
        ValueError: An argument is out of its range.

    >>> sampler = hfrecord.ElasticSampler(range(8), batch_size=2, shuffle=False, rank=0, world_size=1)
    >>> next(iter(sampler)), sampler.state_dict()["consumed"]
    ([0, 1], 2)
    """

    data: Any
    seed: int
    epoch: int
    consumed: int

    def __init__(
        self,
        data: Any,
        batch_size: int | None = None,
        *,
        seed: int = 0,
        shuffle: bool = True,
        window: int | None = None,
        mix: int = 16,
        rank: int | None = None,
        world_size: int | None = None,
        tail: str = "repeat",
    ):
        if batch_size is not None and batch_size < 1:
            raise ValueError(f"batch_size={batch_size}: give 1 or more, or None for single indices")
        if tail not in ("repeat", "drop", "keep"):
            raise ValueError(f"tail={tail!r}: give 'repeat', 'drop' or 'keep'")
        self.data, self.batch_size, self.seed, self.shuffle, self.tail = data, batch_size, seed, shuffle, tail
        self.window, self.mix, self.records = window, mix, len(data)
        known = rank is not None and world_size is not None
        own_rank, own_size = (0, 1) if known else _distributed()
        self.rank, self.world_size = own_rank if rank is None else rank, own_size if world_size is None else world_size
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank={self.rank} of world_size={self.world_size}: give a rank from 0 to world_size - 1")
        self.epoch = self.consumed = 0  # where the next iteration begins
        self._given, self._at = 0, (0, 0)  # batches of the last iteration, and its start
        self._counts = True  # whether an iteration counts its batches; False: hfrecord.DataLoader does
        Permutation(self.records, window=window, mix=mix)

    @property
    def _step(self) -> int:
        """Number of positions that all ranks together take at once."""
        return (self.batch_size or 1) * self.world_size

    def _own(self, begin: int) -> int:
        """Number of positions of this rank from `begin` to the end of the epoch."""
        left = self.records - begin
        if self.tail == "drop":
            return left // self._step * (self.batch_size or 1)
        return -(-left // self.world_size) if self.tail == "repeat" else (left - self.rank - 1) // self.world_size + 1

    def __len__(self) -> int:
        """Number of batches (or indices) of this rank in the next iteration."""
        return -(-self._own(self.consumed % max(self.records, 1)) // (self.batch_size or 1))

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the next iteration. Another epoch than the present one starts from its beginning."""
        if epoch != self.epoch:
            self.epoch, self.consumed = epoch, 0
        self._at, self._given = (self.epoch, self.consumed), 0

    def indices(self, epoch: int, places: int | Sequence[int] | NDArray[np.integer[Any]]) -> NDArray[np.int64]:
        """Records at these positions of an epoch's order, which wraps around."""
        places = np.asarray(places, np.int64) % max(self.records, 1)
        if not self.shuffle:
            return places
        return Permutation(self.records, self.seed, epoch, self.window, self.mix)(places)

    def __iter__(self) -> Iterator[Any]:
        at = self.epoch, self.consumed
        self._received(at, 0)
        items = self._ahead(self._items(*at))
        return self._counted(at, items) if self._counts else items

    def _counted(self, at: tuple[int, int], items: Iterator) -> Iterator:
        for number, item in enumerate(items, 1):
            self._received(at, number)
            yield item
        self._ended(at)

    def _received(self, at: tuple[int, int], batches: int) -> None:
        """The state is that after so many batches of the iteration that began `at` (epoch, consumed)."""
        self._at, self._given = at, batches

    def _ended(self, at: tuple[int, int]) -> None:
        self._received(at, self.records)  # all, also where other ranks have a batch more
        if (self.epoch, self.consumed) == at:  # nobody has set another one meanwhile
            self.epoch, self.consumed = at[0] + 1, 0

    def _items(self, epoch: int, begin: int) -> Iterator:
        own, size = self._own(begin), self.batch_size or 1
        for block in range(0, own, BLOCK * size):
            mine = np.arange(block, min(own, block + BLOCK * size))
            found = self.indices(epoch, begin + self.rank + mine * self.world_size).tolist()
            if self.batch_size is None:
                yield from found
            else:
                yield from (found[at : at + size] for at in range(0, len(found), size))

    def _ahead(self, items: Iterator) -> Iterator:
        """The same items, each advised when the previous one is returned."""
        advise = getattr(self.data, "advise", None)
        held = []
        for item in items:
            if advise is not None:
                advise([item] if self.batch_size is None else item)
            if held:
                yield held.pop()
            held.append(item)
        yield from held

    def state_dict(self, batches: int | None = None) -> dict[str, int]:
        """Everything that a run must keep.

        Args:
            batches: How many batches of the last iteration count; None: all that were returned.
        """
        epoch, begin = self._at
        consumed = begin + (self._given if batches is None else batches) * self._step
        left = self.records - consumed
        if left <= 0 or (self.tail == "drop" and left < self._step):
            epoch, consumed = epoch + 1, 0
        return {"seed": self.seed, "epoch": epoch, "consumed": consumed, "records": self.records}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Resumes from a state, on any number of ranks and with any batch size.

        Raises:
            ValueError: The state is of another number of records.
        """
        if state["records"] != self.records:
            raise ValueError(f"a state of {state['records']} records, these are {self.records}: give the same data")
        self.seed, self.epoch, self.consumed = state["seed"], state["epoch"], state["consumed"]
        self._at, self._given = (self.epoch, self.consumed), 0


def _distributed() -> tuple[int, int]:
    """Rank and size of torch.distributed, if this process has joined a group."""
    import sys

    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not (distributed.is_available() and distributed.is_initialized()):
        return 0, 1
    return distributed.get_rank(), distributed.get_world_size()
