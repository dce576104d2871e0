"""torch's caching allocator for CUDA, without memory: what a sequence of allocations makes it reserve.

The rules are those of c10/cuda/CUDACachingAllocator.cpp: sizes are rounded to 512 bytes; up to 1 MiB comes from
segments of 2 MiB, up to 10 MiB from segments of 20 MiB, more has a segment of its own, rounded to 2 MiB. The smallest
free block that is large enough is taken, that at the lowest address first, and split if enough is left. A freed block
is joined with free neighbours in its segment. Segments are not given back while memory is left.
"""

import bisect
from collections.abc import Iterable

ROUND, SMALL, LARGE = 512, 1 << 20, 10 << 20
SEGMENT, BUFFER, ROUND_LARGE = 2 << 20, 20 << 20, 2 << 20


class _Block:
    """size bytes at address; before and after: its neighbours in the segment."""

    __slots__ = "address", "after", "before", "free", "size"

    def __init__(self, address: int, size: int):
        self.address, self.size, self.free = address, size, True
        self.before: _Block | None = None
        self.after: _Block | None = None


class Allocator:
    """One stream's pools. reserved, allocated: bytes now; most: the most that was allocated; segments: how many."""

    def __init__(self):
        self.reserved = self.allocated = self.most = self.segments = 0
        self._pools: dict[bool, list[tuple[int, int, _Block]]] = {True: [], False: []}  # free blocks, by size
        self._end = 0

    def take(self, size: int) -> _Block:
        """A block of at least `size` bytes."""
        size = max(-(-size // ROUND), 1) * ROUND
        small = size <= SMALL
        pool = self._pools[small]
        at = bisect.bisect_left(pool, (size, -1))
        block = pool.pop(at)[2] if at < len(pool) else self._segment(size)
        rest = block.size - size
        if rest >= ROUND if small else rest > SMALL:
            other = _Block(block.address + size, rest)
            other.before, other.after, block.after, block.size = block, block.after, other, size
            if other.after is not None:
                other.after.before = other
            bisect.insort(pool, (other.size, other.address, other))
        block.free = False
        self.allocated += block.size
        self.most = max(self.most, self.allocated)
        return block

    def give(self, block: _Block, small: bool) -> None:
        """Frees a block. small: whether at most SMALL bytes of it were asked for."""
        self.allocated -= block.size
        pool = self._pools[small]
        for other in (block.before, block.after):
            if other is not None and other.free:
                del pool[bisect.bisect_left(pool, (other.size, other.address))]
                first, last = sorted((block, other), key=lambda b: b.address)
                first.size, first.after = first.size + last.size, last.after
                if last.after is not None:
                    last.after.before = first
                block = first
        block.free = True
        bisect.insort(pool, (block.size, block.address, block))

    def _segment(self, size: int) -> _Block:
        size = SEGMENT if size <= SMALL else BUFFER if size < LARGE else -(-size // ROUND_LARGE) * ROUND_LARGE
        block = _Block(self._end, size)
        self._end += size
        self.reserved += size
        self.segments += 1
        return block


def replay(events: Iterable[tuple[int, int]]) -> Allocator:
    """The allocator after allocations (number of a storage, its bytes), and (number, 0) where it is freed."""
    found, blocks = Allocator(), {}
    for number, size in events:
        if size:
            blocks[number] = found.take(size), size <= SMALL
        elif number in blocks:
            found.give(*blocks.pop(number))
    return found
