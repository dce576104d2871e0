"""What an algorithm costs, counted from its own steps and bytes: those that csrc/hfreduce/collectives tells.

N is the size of the whole message (the blocks of all ranks, where it is made of blocks), n the ranks of a host, h the
hosts. Nothing here is measured: time comes from a `Link` that the caller has measured.
"""

import math
from dataclasses import dataclass

PIECE = 128 << 10  # bytes that between.h adds up and sends on at a time
LEAST_SLICE, MOST_SLICE, CHUNKS = 256 << 10, 4 << 20, 8  # chunks.h: how a message of several hosts is cut


@dataclass(frozen=True)
class Inside:
    """Of one rank, through the shared memory of its host."""

    steps: int
    written: float  # bytes into slots
    read: float  # bytes out of slots


@dataclass(frozen=True)
class Between:
    """Of one host, over its links to the others."""

    hops: int  # one behind the other, from the first rank that sends to the last that has the result
    messages: int  # that the busiest host sends
    sent: float  # bytes by the busiest host


@dataclass(frozen=True)
class Link:
    """Of a host to the others, full duplex."""

    latency: float  # seconds, from a send to the wake-up of who receives
    bandwidth: float  # bytes a second, each way
    overhead: float = 3e-6  # seconds of processor time for each message
    memory: float = 1e10  # bytes a second that all ranks of a host together write to and read from shared memory


def inside(kind: str, algorithm: str, nbytes: int, n: int, chunk: int, slot: int) -> Inside:
    """Steps and bytes of a collective inside a host; the busiest rank's, where the root has more to do."""
    if n == 1:
        return Inside(0, 0, 0)
    block, others = nbytes / n, (n - 1) / n * nbytes
    # Steps that take a slot of the whole message, or of a block.
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
    """Bytes that the busiest GPU of n on one host sends, by the path of csrc/hfreduce/cuda/paths.h; packets are half
    numbers. Between hosts it is what it sends to its own."""
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
    halves = 2 if kind in ("all_reduce", "barrier") else 1  # the sums are made, and then handed out
    if kind == "barrier":
        others = nbytes = 0
    if algorithm == "ring":
        return Between(halves * (h - 1), halves * (h - 1), halves * others)
    if algorithm == "direct":
        return Between(halves, halves * (h - 1), halves * others)
    # A host has N / 2 of each tree to send up, and where it is an inner node, twice that to send down. A root of its
    # own stands a level above the others.
    depth = math.floor(math.log2(h)) if halves == 2 else 1 + math.floor(math.log2(max(1, h - 1)))
    return Between(halves * depth, 2 * halves, (2 if h > 2 else 1) * nbytes if halves == 2 else nbytes)


def chunks(nbytes: int, local_size: int) -> int:
    """Into how many chunks a message of several hosts is cut, which are added up, travel and are handed out in turn."""
    if local_size == 1:
        return 1  # nothing to overlap with
    slice_ = min(max(nbytes // local_size // CHUNKS, LEAST_SLICE), MOST_SLICE)
    return max(1, math.ceil(nbytes / (slice_ * local_size)))


def seconds(kind: str, algorithm: str, nbytes: int, hosts: int, local_size: int, link: Link) -> float:
    """A prediction of the time of a collective over hosts: while one chunk travels, the next is added up inside."""
    count = chunks(nbytes, local_size)
    part = nbytes / count
    shared = inside(kind, "two_shot", int(part), local_size, PIECE, PIECE)
    near = local_size * (shared.written + shared.read) / link.memory
    far = travel(kind, algorithm, part, hosts, link)
    return near + far + (count - 1) * max(near, far)


def travel(kind: str, algorithm: str, nbytes: float, hosts: int, link: Link) -> float:
    """Of one chunk, between hosts. A hop costs the link's latency. Steps of a ring overlap as long as a slice takes
    longer than a hop."""
    cost = between(kind, algorithm, nbytes, hosts)
    if not cost.hops:
        return 0.0
    if algorithm == "ring":
        part = nbytes / hosts
        hop = link.latency + link.overhead + min(PIECE, part) / link.bandwidth
        return cost.hops * max(part / link.bandwidth, hop)
    busy = cost.sent / link.bandwidth
    if algorithm == "tree":  # the first piece goes from hop to hop, the others follow it
        pieces = max(1.0, nbytes / 2 / PIECE)
        busy = cost.hops * min(PIECE, nbytes / 2) / link.bandwidth + (1 - 1 / pieces) * busy
    return cost.hops * link.latency + cost.messages * link.overhead + busy
