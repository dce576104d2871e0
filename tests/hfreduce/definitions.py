"""The results that collectives must give, for ranks in threads: reductions by torch's operators, and moved data."""

import itertools

import torch
from threads import run

from hfreduce import _C

DTYPES = {
    torch.uint8: 0, torch.int8: 1, torch.int16: 2, torch.int32: 3, torch.int64: 4, torch.bool: 5, torch.float16: 6,
    torch.bfloat16: 7, torch.float32: 8, torch.float64: 9, torch.float8_e4m3fn: 10, torch.float8_e5m2: 11,
}  # fmt: skip
OPS = {name: i for i, name in enumerate(["sum", "avg", "prod", "min", "max", "band", "bor", "bxor", "premul_sum"])}
SLOT = 4096  # bytes: small, so that few elements take many steps


def filled(count, dtype, seed, spread=4):
    """Small integers, at an unaligned address."""
    values = torch.randint(-spread, spread + 1, (count + 1,), generator=torch.Generator().manual_seed(seed))
    if dtype is torch.bool:
        return values.gt(0)[1:]
    if not dtype.is_signed:
        values = values.abs()
    return values.to(dtype)[1:]


def call(method, tensors, *arguments, **options):
    """method(addresses, elements of the last tensor, dtype, ...)"""
    return method(*(t.data_ptr() for t in tensors), *arguments, **options)


def wide(x):
    return x.float() if x.is_floating_point() and x.dtype is not torch.float64 else x


def reduced(inputs, op, factors):
    """The reduction in the order of ranks, in float32 for narrower floats, rounded once."""
    f = {
        "sum": torch.add, "avg": torch.add, "premul_sum": torch.add, "prod": torch.mul, "min": torch.minimum,
        "max": torch.maximum, "band": torch.bitwise_and, "bor": torch.bitwise_or, "bxor": torch.bitwise_xor,
    }[op]  # fmt: skip
    dtype = inputs[0].dtype
    if dtype is torch.bool:
        f = {"sum": torch.logical_or, "prod": torch.logical_and}.get(op, f)
    total = None
    for x, factor in zip(inputs, factors, strict=True):
        x = wide(x) * factor if op == "premul_sum" else wide(x)
        total = x if total is None else f(total, x)
    if op == "avg":
        n = len(inputs)
        total = total / n if dtype.is_floating_point else torch.div(total, n, rounding_mode="trunc")
    if dtype is torch.float8_e4m3fn:  # saturates, as torch's cast does from 2.13 on
        total = total.clamp(-448, 448)
    return total.to(dtype)


def pairs():
    return [(d, o) for d, o in itertools.product(DTYPES, OPS) if _C.supported(DTYPES[d], OPS[o])]


def check_moving(ranks, cases):
    """all_gather, broadcast, gather and scatter copy bits of any dtype. cases: (dtype, elements of a rank)."""
    world = len(ranks)
    for dtype, count in cases:
        root, code = count % world, DTYPES[dtype]
        inputs = [filled(count, dtype, r) for r in range(world)]
        whole = torch.cat(inputs)

        def move(rank, x, count=count, root=root, code=code, dtype=dtype, whole=whole):
            me = rank.rank
            gathered = torch.zeros(count * world, dtype=dtype)
            call(rank.all_gather, (x, gathered), count, code)
            own = torch.ones(count * world, dtype=dtype)  # in place: the input is its part of the output
            own[me * count : (me + 1) * count] = x
            call(rank.all_gather, (own[me * count :], own), count, code)
            sent = x.clone()
            call(rank.broadcast, (sent,), count, code, root)
            at_root = torch.zeros(count * world, dtype=dtype)
            call(rank.gather, (x, at_root), count, code, root)
            piece = torch.zeros(count, dtype=dtype)
            call(rank.scatter, (whole, piece), count, code, root)
            rank.barrier()
            return gathered, own, sent, at_root, piece

        for r, (gathered, own, sent, at_root, piece) in enumerate(run(move, ranks, inputs)):
            assert torch.equal(gathered, whole) and torch.equal(own, whole), (dtype, count)
            assert torch.equal(sent, inputs[root]) and torch.equal(piece, inputs[r]), (dtype, count)
            assert torch.equal(at_root, whole if r == root else torch.zeros_like(whole)), (dtype, count)


def check_all_to_all(ranks, scale):
    """Blocks of all sizes from 0 to 4 * scale elements, different for each pair."""
    world = len(ranks)
    counts = [[(37 * i + 11 * j) % 5 * (scale if (i + j) % 3 == 0 else 1) for j in range(world)] for i in range(world)]
    blocks = [[filled(counts[i][j], torch.int32, 100 * i + j) for j in range(world)] for i in range(world)]

    def exchange(rank):
        i = rank.rank
        x, given = torch.cat(blocks[i]), [counts[j][i] for j in range(world)]
        y = torch.zeros(sum(given), dtype=torch.int32)
        starts = [list(itertools.accumulate([0, *sizes]))[:-1] for sizes in (counts[i], given)]
        rank.all_to_all(x.data_ptr(), starts[0], counts[i], y.data_ptr(), starts[1], given, DTYPES[torch.int32])
        return y

    for i, y in enumerate(run(exchange, ranks)):
        assert torch.equal(y, torch.cat([blocks[j][i] for j in range(world)]))
