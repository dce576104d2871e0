"""Every collective on one host, against its definition: worlds, dtypes, sizes, addresses, all paths."""

import itertools

import pytest
import torch
from threads import group, run

from hfreduce import _C

DTYPES = {
    torch.uint8: 0, torch.int8: 1, torch.int16: 2, torch.int32: 3, torch.int64: 4, torch.bool: 5, torch.float16: 6,
    torch.bfloat16: 7, torch.float32: 8, torch.float64: 9, torch.float8_e4m3fn: 10, torch.float8_e5m2: 11,
}  # fmt: skip
OPS = {name: i for i, name in enumerate(["sum", "avg", "prod", "min", "max", "band", "bor", "bxor", "premul_sum"])}
SLOT = 4096  # bytes: small, so that few elements are many steps
SIZES = [0, 1, 3, 64, 1000, 2 * SLOT + 5]
WORLDS = [1, 2, 3, 4, 8]
ONE_SHOT, TWO_SHOT = [[(1, 1 << 62, i, 1, 1024, 1)] for i in range(2)]


def filled(count, dtype, seed, spread=4):
    """Small whole numbers, at an address that no vector likes."""
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


def test_supported_pairs():
    """All that torch's process groups reduce: sums of everything, averages and factors of floats, bits of integers."""
    for dtype in DTYPES:
        ops = {o for d, o in pairs() if d is dtype}
        assert {"sum", "prod", "min", "max"} <= ops
        assert ("premul_sum" in ops) == dtype.is_floating_point
        assert ({"band", "bor", "bxor"} <= ops) != dtype.is_floating_point


@pytest.mark.parametrize("plan", [ONE_SHOT, TWO_SHOT], ids=["one_shot", "two_shot"])
@pytest.mark.parametrize("world", WORLDS)
def test_all_reduce(world, plan):
    with group(world, slot_bytes=SLOT, plan=list(itertools.repeat(plan, world))) as ranks:
        for (dtype, op), count, in_place in itertools.product(pairs(), SIZES, (False, True)):
            inputs = [filled(count, dtype, r) for r in range(world)]
            factors = [0.5 * (r + 1) for r in range(world)]
            want = reduced(inputs, op, factors)
            outputs = inputs if in_place else [torch.empty_like(x) for x in inputs]

            def reduce(rank, x, y, factor, dtype=dtype, op=op, count=count):
                call(rank.all_reduce, (x, y), count, DTYPES[dtype], op=OPS[op], factor=factor)

            run(reduce, ranks, inputs, outputs, factors)
            for y in outputs:
                assert torch.equal(wide(y), wide(want)), (dtype, op, count, in_place)


@pytest.mark.parametrize("world", WORLDS)
def test_reduce_and_reduce_scatter(world):
    with group(world, slot_bytes=SLOT) as ranks:
        for (dtype, op), count in itertools.product(pairs(), SIZES):
            inputs = [filled(count * world, dtype, r) for r in range(world)]
            factors = [0.5 * (r + 1) for r in range(world)]
            want = reduced(inputs, op, factors)
            outputs = [torch.empty_like(x) for x in inputs]
            pieces = [torch.empty_like(x[:count]) for x in inputs]
            root = count % world

            def reduce(rank, x, y, z, factor, dtype=dtype, op=op, count=count, root=root):
                call(rank.reduce, (x, y), x.numel(), DTYPES[dtype], root, op=OPS[op], factor=factor)
                call(rank.reduce_scatter, (x, z), count, DTYPES[dtype], op=OPS[op], factor=factor)

            run(reduce, ranks, inputs, outputs, pieces, factors)
            assert torch.equal(wide(outputs[root]), wide(want)), (dtype, op, count)
            assert torch.equal(wide(torch.cat([wide(z) for z in pieces])), wide(want)), (dtype, op, count)


@pytest.mark.parametrize("world", WORLDS)
def test_moving(world):
    """all_gather, broadcast, gather, scatter and all_to_all carry bits, whatever they mean."""
    with group(world, slot_bytes=SLOT) as ranks:
        for dtype, count in itertools.product((torch.uint8, torch.bfloat16, torch.float64), SIZES):
            root, code = count % world, DTYPES[dtype]
            inputs = [filled(count, dtype, r) for r in range(world)]
            whole = torch.cat(inputs)

            def move(rank, x, count=count, root=root, code=code, dtype=dtype, whole=whole):
                me = rank.rank
                gathered = torch.zeros(count * world, dtype=dtype)
                call(rank.all_gather, (x, gathered), count, code)
                own = gathered.clone()  # in place: the input is its part of the output
                own[: me * count], own[(me + 1) * count :] = 0, 0
                call(rank.all_gather, (own[me * count :], own), count, code)
                sent = x.clone()
                call(rank.broadcast, (sent,), count, code, root)
                at_root = torch.zeros(count * world, dtype=dtype)
                call(rank.gather, (x, at_root), count, code, root)
                piece = torch.zeros(count, dtype=dtype)
                call(rank.scatter, (whole, piece), count, code, root)
                return gathered, own, sent, at_root, piece

            for r, (gathered, own, sent, at_root, piece) in enumerate(run(move, ranks, inputs)):
                assert torch.equal(gathered, whole) and torch.equal(own, whole)
                assert torch.equal(sent, inputs[root]) and torch.equal(piece, inputs[r])
                assert torch.equal(at_root, whole if r == root else torch.zeros_like(whole))


@pytest.mark.parametrize("world", WORLDS)
def test_all_to_all_of_any_sizes(world):
    counts = [[(37 * i + 11 * j) % 5 * (900 if (i + j) % 3 == 0 else 1) for j in range(world)] for i in range(world)]
    blocks = [[filled(counts[i][j], torch.int32, 100 * i + j) for j in range(world)] for i in range(world)]

    def exchange(rank):
        i = rank.rank
        x, given = torch.cat(blocks[i]), [counts[j][i] for j in range(world)]
        y = torch.zeros(sum(given), dtype=torch.int32)
        starts = [list(itertools.accumulate([0, *sizes]))[:-1] for sizes in (counts[i], given)]
        rank.all_to_all(x.data_ptr(), starts[0], counts[i], y.data_ptr(), starts[1], given, DTYPES[torch.int32])
        return y

    with group(world, slot_bytes=SLOT) as ranks:
        for i, y in enumerate(run(exchange, ranks)):
            assert torch.equal(y, torch.cat([blocks[j][i] for j in range(world)]))


def test_more_than_two_gibibytes():
    count = (1 << 31) + 77
    with group(2) as ranks:
        x = [torch.full((count,), r + 1, dtype=torch.uint8) for r in range(2)]
        x[1][-1] = 9
        run(lambda rank, t: call(rank.all_reduce, (t, t), count, DTYPES[torch.uint8]), ranks, x)
        for t in x:
            assert t[-1] == 10 and int(t[:: 1 << 20].sum()) == 3 * len(t[:: 1 << 20]) and t[-2] == 3
        run(lambda rank, t: call(rank.broadcast, (t,), count, DTYPES[torch.uint8], 1), ranks, x)


def test_arguments_are_checked_before_anything_is_sent():
    with group(2) as ranks:
        x = torch.ones(4)
        for wrong in (
            lambda: ranks[0].broadcast(x.data_ptr(), 4, DTYPES[torch.float32], 2),
            lambda: ranks[0].all_reduce(x.data_ptr(), x.data_ptr(), 4, DTYPES[torch.float32], op=OPS["band"]),
            lambda: ranks[0].all_to_all(x.data_ptr(), [0], [4], x.data_ptr(), [0], [4], DTYPES[torch.float32]),
            lambda: ranks[0].send(x.data_ptr(), 4, DTYPES[torch.float32], -1),
        ):
            with pytest.raises(ValueError):
                wrong()
        run(lambda rank: rank.barrier(), ranks)
        assert all(rank.operations == 1 for rank in ranks)


ALL_REDUCE = {"count": 4, "dtype": torch.float32, "op": "sum", "kind": "all_reduce"}


@pytest.mark.parametrize("change", [{"count": 5}, {"dtype": torch.float64}, {"op": "max"}, {"kind": "broadcast"}])
def test_a_mismatch_is_the_same_error_on_every_rank(change):
    def reduce(rank):
        x = torch.ones(8, dtype=torch.float64)
        mine = {"count": 4, "dtype": torch.float32, "op": "sum", "kind": "all_reduce"} | (
            change if rank.rank == 1 else {}
        )
        with pytest.raises(_C.Fault) as error:
            if mine["kind"] == "broadcast":
                rank.broadcast(x.data_ptr(), 4, DTYPES[torch.float32], 0)
            else:
                call(rank.all_reduce, (x, x), mine["count"], DTYPES[mine["dtype"]], op=OPS[mine["op"]])
        with pytest.raises(_C.Fault):
            rank.barrier()
        return str(error.value), error.value.cause, error.value.ranks

    with group(3) as ranks:
        results = run(reduce, ranks)
    assert len({message for message, _, _ in results}) == 1
    message, cause, culprits = results[0]
    assert cause == "mismatch" and culprits == [1]
    assert "all_reduce number 1 of 4 float32, sum" in message and "rank 0" in message and "rank 1" in message


def test_all_to_all_of_sizes_that_do_not_fit():
    def exchange(rank):
        x = torch.ones(10, dtype=torch.int32)
        wanted = 3 if rank.rank == 1 else 2
        with pytest.raises(_C.Fault) as error:
            rank.all_to_all(x.data_ptr(), [0, 2], [2, 2], x.data_ptr() + 20, [0, 2], [wanted, 2], 3)
        return str(error.value)

    with group(2) as ranks:
        messages = run(exchange, ranks)
    assert messages[0] == messages[1] and "sends 8 bytes" in messages[0] and "expects 12" in messages[0]


def test_slots_must_be_of_one_size():
    with pytest.raises(ValueError, match="slot_bytes must be the same on all ranks"), group(2, slot_bytes=[4096, 8192]):
        pass
