"""The cost of an algorithm, counted in its steps and bytes, as in csrc/hfreduce/collectives.

N is the size of the whole message (of all ranks' blocks, if it consists of blocks), n the number of ranks of a host, h
the number of hosts. Nothing is measured here: times come from a `Link` that the caller has measured.
"""

import math
from dataclasses import dataclass

PIECE = 128 << 10  # bytes that rail.h adds and forwards at a time
LEAST_SLICE, MOST_SLICE, CHUNKS = 256 << 10, 4 << 20, 8  # stages.h: how a message between hosts is split


@dataclass(frozen=True)
class Inside:
    """The cost for one rank, through the shared memory of its host."""

    steps: int
    written: float  # bytes, to slots
    read: float  # bytes, from slots


@dataclass(frozen=True)
class Between:
    """The cost for one host, over its links to the others."""

    hops: int  # sequential, from the first rank that sends to the last that has the result
    messages: int  # sent by the busiest host
    sent: float  # bytes, by the busiest host


@dataclass(frozen=True)
class Link:
    """The link of a host to the others, full duplex."""

    latency: float  # seconds, from a send to the wake-up of the receiver
    bandwidth: float  # bytes per second, each way
    overhead: float = 3e-6  # seconds of CPU time per message
    memory: float = 1e10  # bytes per second that all ranks of a host together write to and read from shared memory


def inside(kind: str, algorithm: str, nbytes: int, n: int, chunk: int, slot: int) -> Inside:
    """Steps and bytes of a collective inside a host, for the busiest rank if the root does more."""
    if n == 1:
        return Inside(0, 0, 0)
    block, others = nbytes / n, (n - 1) / n * nbytes
    # Steps with one slot each: of the whole message, or of a block.
    wholes, blocks = max(1, math.ceil(nbytes / slot)), max(1, math.ceil(block / slot))
    if kind == "all_reduce":
        chunks = max(1, math.ceil(nbytes / min(chunk, slot)))
        if algorithm == "two_shot":
            return Inside(2 * chunks, nbytes, others + nbytes)
        return Inside(chunks, nbytes, (n - 1) * nbytes)
    return {
        "barrier": Inside(1, 0, 0),
        "reduce": Inside(2 * wholes, nbytes, others + nbytes),
        "reduce_scatter": Inside(wholes, others, others),
        "all_gather": Inside(blocks, block, others),
        "broadcast": Inside(wholes, nbytes, nbytes),
        "gather": Inside(blocks, block, others),
        "scatter": Inside(wholes, others, block),
        "all_to_all": Inside(1 + wholes, others, others),
    }[kind]


def on_gpus(kind: str, path: str, nbytes: int, n: int) -> float:
    """Bytes that the busiest of n GPUs on one host sends by a path of csrc/hfreduce/cuda/paths.h. Half of a packet is
    payload. With several hosts: the bytes sent to its own host."""
    all_but_one = (n - 1) / n * nbytes
    if path == "assisted":
        return nbytes / n if kind == "all_gather" else nbytes
    each = {"packets": n - 1, "mapped": n - 1, "one_shot": n - 1, "packets_two_shot": 2 * (n - 1) / n}
    shots = each.get(path, 2 * (n - 1) / n) * nbytes
    root = (n - 1) * nbytes if path in ("packets", "mapped") else nbytes
    sent = {"all_reduce": shots, "broadcast": root}.get(kind, all_but_one)
    return sent * (2 if path in ("packets", "packets_two_shot", "mapped") else 1)


def between(kind: str, algorithm: str, nbytes: float, h: int) -> Between:
    """Hops and bytes of a collective between hosts."""
    if h == 1:
        return Between(0, 0, 0)
    others = (h - 1) / h * nbytes
    halves = 2 if kind in ("all_reduce", "barrier") else 1  # sums are computed, then distributed
    if kind == "barrier":
        others = nbytes = 0
    if algorithm == "ring":
        return Between(halves * (h - 1), halves * (h - 1), halves * others)
    if algorithm == "direct":
        return Between(halves, halves * (h - 1), halves * others)
    # A host sends N / 2 of each tree up; if it is an inner node, it sends twice that down. A separate root is one level
    # above the others.
    depth = math.floor(math.log2(h)) if halves == 2 else 1 + math.floor(math.log2(max(1, h - 1)))
    return Between(halves * depth, 2 * halves, (2 if h > 2 else 1) * nbytes if halves == 2 else nbytes)


def chunks(nbytes: int, local_size: int) -> int:
    """The number of chunks of a message between hosts. They are added, sent and distributed in turn."""
    if local_size == 1:
        return 1  # nothing to overlap
    slice_ = min(max(nbytes // local_size // CHUNKS, LEAST_SLICE), MOST_SLICE)
    return max(1, math.ceil(nbytes / (slice_ * local_size)))


def seconds(kind: str, algorithm: str, nbytes: int, hosts: int, local_size: int, link: Link) -> float:
    """Predicted seconds of a collective between hosts: while one chunk is sent, the next is added inside a host."""
    count = chunks(nbytes, local_size)
    part = nbytes / count
    shared = inside(kind, "two_shot", int(part), local_size, PIECE, PIECE)
    near = local_size * (shared.written + shared.read) / link.memory
    far = travel(kind, algorithm, part, hosts, link)
    return near + far + (count - 1) * max(near, far)


def travel(kind: str, algorithm: str, nbytes: float, hosts: int, link: Link) -> float:
    """Predicted seconds of one chunk between hosts. A hop costs the link's latency. Steps of a ring overlap as long as
    a slice takes longer than a hop."""
    cost = between(kind, algorithm, nbytes, hosts)
    if not cost.hops:
        return 0.0
    if algorithm == "ring":
        part = nbytes / hosts
        hop = link.latency + link.overhead + min(PIECE, part) / link.bandwidth
        return cost.hops * max(part / link.bandwidth, hop)
    busy = cost.sent / link.bandwidth
    if algorithm == "tree":  # pieces are pipelined: the first takes all hops, the others follow
        pieces = max(1.0, nbytes / 2 / PIECE)
        busy = cost.hops * min(PIECE, nbytes / 2) / link.bandwidth + (1 - 1 / pieces) * busy
    return cost.hops * link.latency + cost.messages * link.overhead + busy
