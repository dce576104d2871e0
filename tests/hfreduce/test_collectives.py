"""Every collective on one host, against its definition: world sizes, dtypes, sizes, addresses, all paths."""

import itertools

import pytest
import torch
from definitions import DTYPES, OPS, SLOT, call, check_all_to_all, check_moving, filled, pairs, reduced, wide
from threads import group, run

from hfreduce import _C

SIZES = [0, 1, 3, 64, 1000, 2 * SLOT + 5]
WORLDS = [1, 2, 3, 4, 8]
ONE_SHOT, TWO_SHOT = [[(1, 1 << 62, i, 1, 1024, 1)] for i in range(2)]


def test_supported_pairs():
    """All reductions of torch's process groups: sums for all dtypes, averages and factors for floats, bit operations
    for integers."""
    for dtype in DTYPES:
        ops = {o for d, o in pairs() if d is dtype}
        assert {"sum", "prod", "min", "max"} <= ops
        assert ("premul_sum" in ops) == dtype.is_floating_point
        assert ({"band", "bor", "bxor"} <= ops) != dtype.is_floating_point


@pytest.mark.parametrize("plan", [ONE_SHOT, TWO_SHOT], ids=["one_shot", "two_shot"])
@pytest.mark.parametrize("world", WORLDS)
def test_all_reduce(world, plan):
    with group(world, slot_bytes=SLOT, plan=list(itertools.repeat(plan, world))) as ranks:
        for number, ((dtype, op), count) in enumerate(itertools.product(pairs(), SIZES)):
            in_place = (
                number // len(SIZES) % 2 == number % 2
            )  # three sizes of each pair, and half the pairs of each size
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
    with group(world, slot_bytes=SLOT) as ranks:
        check_moving(ranks, itertools.product((torch.uint8, torch.bfloat16, torch.float64), SIZES))


@pytest.mark.parametrize("world", WORLDS)
def test_all_to_all_of_any_sizes(world):
    with group(world, slot_bytes=SLOT) as ranks:
        check_all_to_all(ranks, 900)


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
