"""Every collective over several hosts, against its definition: layouts, algorithms between hosts, dtypes, sizes.

Hosts are distinguished by each rank's `host_id`: "aab" is two ranks on host a and one on b. They use TCP, on the
loopback interface.
"""

import itertools
import statistics
import time
from pathlib import Path

import pytest
import ranks as processes
import torch
from definitions import DTYPES, OPS, SLOT, call, check_all_to_all, check_moving, filled, pairs, reduced, wide
from hosts import hosts as networks
from threads import group, run

from hfreduce import _C

LAYOUTS = ["aabb", "abc", "aab", "abcd", "abab", "abbba"]
BETWEEN = ["direct", "ring", "tree"]
SIZES = [0, 1, 1001, 2 * SLOT + 5]
CHUNKED = 1_300_001  # float32 elements: several chunks, the last one ragged


# The order of hosts of the groups that `hosts` makes.
ORDER: list[int] = []


def hosts(layout, between="ring", streams=2, **config):
    rows = [(kind, 1 << 62, 1, BETWEEN.index(between), 1024, streams) for kind in range(9)]
    config.setdefault("sorted", lambda names, order=[*ORDER]: (order, "a test" if order else ""))
    return group(len(layout), **{"host_id": list(layout), "plan": [rows] * len(layout), "slot_bytes": SLOT, **config})


def exact(count, dtype, op, seed):
    """Values whose reductions over six ranks are exact in any order, except for one division at the end."""
    narrow = dtype.itemsize == 1 and dtype.is_floating_point
    return filled(count, dtype, seed, spread=1 if narrow or op == "prod" else 4)


@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_reductions(layout, between):
    """Each algorithm tests a third of the dtypes and operations; with each layout another third."""
    world, part = len(layout), LAYOUTS.index(layout) + BETWEEN.index(between)
    with hosts(layout, between) as ranks:
        for (dtype, op), count in itertools.product(pairs()[part % 3 :: 3], SIZES):
            blocks = [exact(count * world, dtype, op, r) for r in range(world)]
            factors = [(1.0, 0.5)[r % 2] for r in range(world)]
            want = reduced(blocks, op, factors)
            root = count % world

            def reduce(rank, blocks, factor, dtype=dtype, op=op, count=count, root=root):
                code, how = DTYPES[dtype], {"op": OPS[op], "factor": factor}
                everywhere, rooted, piece = blocks.clone(), torch.zeros_like(blocks), blocks[:count].clone()
                call(rank.all_reduce, (everywhere, everywhere), count * len(layout), code, **how)
                call(rank.reduce, (blocks, rooted), count * len(layout), code, root, **how)
                call(rank.reduce_scatter, (blocks, piece), count, code, **how)
                return everywhere, rooted, piece

            results = run(reduce, ranks, blocks, factors)
            for r, (everywhere, rooted, piece) in enumerate(results):
                case = (dtype, op, count, r)
                assert torch.equal(wide(everywhere), wide(want)), case
                assert torch.equal(wide(rooted), wide(want if r == root else torch.zeros_like(want))), case
                assert torch.equal(wide(piece), wide(want[r * count : (r + 1) * count])), case


@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_moving(layout, between):
    """Also with several chunks."""
    with hosts(layout, between) as ranks:
        check_moving(ranks, [*itertools.product((torch.uint8, torch.float64), SIZES), (torch.uint8, CHUNKED)])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_to_all_of_any_sizes(layout):
    with hosts(layout) as ranks:
        check_all_to_all(ranks, 90_000)


@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_same_bits_on_all_ranks_and_in_all_runs(layout, between):
    """Sums that round, in several chunks; as close to the true sum as sequential additions."""
    world = len(layout)
    for dtype, ulp in ((torch.float32, 2**-24), (torch.bfloat16, 2**-8)):
        generator = torch.Generator().manual_seed(7)
        inputs = [torch.randn(CHUNKED, generator=generator).to(dtype) for _ in range(world)]
        results = []
        for _ in range(2):
            outputs = [torch.empty_like(x) for x in inputs]
            with hosts(layout, between) as ranks:
                for x in (inputs, inputs):
                    run(lambda r, x, y, d=dtype: call(r.all_reduce, (x, y), CHUNKED, DTYPES[d]), ranks, x, outputs)
                    results += [y.clone() for y in outputs]
        assert all(torch.equal(results[0], y) for y in results)
        doubles = torch.stack([x.double() for x in inputs])
        error = (results[0].double() - doubles.sum(0)).abs()
        assert (error <= ulp * world * doubles.abs().sum(0)).all()


ORDERS = {"aabb": [1, 0], "abc": [1, 0, 2], "abcd": [2, 0, 3, 1], "abab": [1, 0], "abbba": [1, 0]}


@pytest.fixture
def ordered(monkeypatch, request):
    monkeypatch.setattr(f"{__name__}.ORDER", ORDERS[request.getfixturevalue("layout")])


@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("layout", ORDERS)
@pytest.mark.usefixtures("ordered")
def test_hosts_in_the_order_of_a_fabric(layout, between):
    """Ranks, their blocks and roots keep their numbers."""
    test_reductions(layout, between)
    test_moving(layout, between)
    test_all_to_all_of_any_sizes(layout)
    test_the_same_bits_on_all_ranks_and_in_all_runs(layout, between)


@pytest.mark.parametrize("order", [[], [2, 0, 3, 1]])
@pytest.mark.parametrize("between", ["ring", "direct"])
def test_sums_follow_the_ring_of_neighbours(between, order, monkeypatch):
    """A ring rounds at each hop, from the host after a slice's own on; direct adds in the order of ranks."""
    monkeypatch.setattr(f"{__name__}.ORDER", order)
    inputs = [torch.randn(4000, generator=torch.Generator().manual_seed(r)) for r in range(4)]
    outputs = [torch.empty(4000) for _ in range(4)]
    with hosts("abcd", between) as ranks:
        run(lambda r, x, y: call(r.all_reduce, (x, y), 4000, DTYPES[torch.float32]), ranks, inputs, outputs)
        assert ("hosts in the order of a test: " in ranks[3].describe()) == bool(order)
    around = order or [0, 1, 2, 3]
    for host in range(4):
        mine, place = slice(host * 1000, host * 1000 + 1000), around.index(host)
        path = [around[(place + k) % 4] for k in range(1, 5)] if between == "ring" else range(4)
        total = torch.zeros(1000)
        for other in path:
            total = total + inputs[other][mine]
        assert all(torch.equal(y[mine], total) for y in outputs)


def test_rank_0_decides_the_order():
    """Other ranks are not asked. An order that is none is refused."""
    asked = []

    def sorted_by(rank):
        return lambda names: asked.append((rank, names)) or ([1, 2, 0], "a test")

    with hosts("abca", sorted=[sorted_by(rank) for rank in range(4)]) as ranks:
        assert all("in the order of a test" in rank.describe() for rank in ranks)
    ((rank, names),) = asked
    assert rank == 0 and len(names) == 3 and all(len(each) == 2 for each in names)
    for wrong in ([0, 0], [0, 2], [-1, 0], [0]):
        with (
            pytest.raises(ValueError, match="each of the 2 hosts once"),
            hosts("ab", sorted=lambda names, w=wrong: (w, ""), timeout=1),
        ):
            pass


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16])
def test_direct_rounds_once(dtype):
    """One rank per host: all inputs of a sum meet in one place. 8-bit floats always take this path."""
    inputs = [torch.randn(5001, generator=torch.Generator().manual_seed(r)).to(dtype) for r in range(4)]
    outputs = [torch.empty_like(x) for x in inputs]
    between = "direct" if dtype is torch.bfloat16 else "ring"
    with hosts("abcd", between) as ranks:
        for op in ("sum", "avg"):
            run(
                lambda r, x, y, op=op: call(r.all_reduce, (x, y), 5001, DTYPES[dtype], op=OPS[op]),
                ranks,
                inputs,
                outputs,
            )
            want = reduced(inputs, op, [1.0] * 4)
            assert all(torch.equal(wide(y), wide(want)) for y in outputs)


MISMATCHES = {
    "count": lambda rank, x: call(rank.all_reduce, (x, x), 5, DTYPES[torch.float32]),
    "size": lambda rank, x: call(rank.all_reduce, (x, x), x.numel(), DTYPES[torch.float32]),
    "dtype": lambda rank, x: call(rank.all_reduce, (x, x), 4, DTYPES[torch.int32]),
    "barrier": lambda rank, x: rank.barrier(),
    "broadcast": lambda rank, x: call(rank.broadcast, (x,), 4, DTYPES[torch.float32], 0),
    "gather": lambda rank, x: call(rank.gather, (x, x), 1, DTYPES[torch.float32], rank.size - 1),
}


@pytest.mark.parametrize("other", MISMATCHES)
@pytest.mark.parametrize("layout", ["aabb", "abc", "aab"])
def test_a_mismatch_between_hosts_names_both_sides(layout, other):
    """The ranks of the last host make another call, for which the default plan selects other algorithms."""
    strangers = {r for r, host in enumerate(layout) if host == layout[-1]}

    def reduce(rank):
        x = torch.ones(1 << 20)
        with pytest.raises(_C.Fault) as error:
            if rank.rank in strangers:
                MISMATCHES[other](rank, x)
            else:
                call(rank.all_reduce, (x, x), 4, DTYPES[torch.float32])
            rank.barrier()
        return str(error.value), error.value.cause

    began = time.monotonic()
    with hosts(layout, plan=[[]] * len(layout)) as ranks:
        results = run(reduce, ranks)
    assert time.monotonic() - began < 10, "found by the timeout only"
    for message, cause in results:
        assert cause == "mismatch", message
        assert "all_reduce number 1 of 4 float32, sum" in message, message


@pytest.mark.parametrize("layout", ["aab", "abab"])
def test_an_abort_ends_a_message_of_many_chunks(layout):
    """Also a transfer in progress on its own thread. The communicator can then be closed."""
    x = [torch.ones(32 << 20) for _ in layout]

    def reduce(rank, x):
        if rank.rank == len(layout) - 1:
            time.sleep(0.3)  # the others are in the middle of their first chunks
            return rank.abort("enough")
        with pytest.raises(_C.Fault, match="enough") as error:
            call(rank.all_reduce, (x, x), x.numel(), DTYPES[torch.float32])
        return error.value.cause

    with hosts(layout, slot_bytes=1 << 20) as ranks:
        began = time.monotonic()
        assert run(reduce, ranks, x)[:-1] == ["aborted"] * (len(layout) - 1)
        assert time.monotonic() - began < 3


@pytest.mark.parametrize("mib", [1 / 16, 16])
@pytest.mark.rest
def test_faster_than_gloo_between_hosts(mib, tmp_path):
    """Two hosts of two ranks, on links of 1 Gbit/s: for N bytes, the host's link carries N; in gloo's ring 3/2 N.

    So a large message takes at best 2/3 of gloo's time; a small one less, because it has two steps instead of six.
    """
    with networks(2, rate=1e9) as h:
        results = processes.run(
            Path(__file__).parent / "shaped.py", "all_reduces", 4, tmp_path,
            prefix=lambda rank: h.prefix(rank // 2), count=int(mib * 2**18), rounds=5,
        )  # fmt: skip
    assert all(result["right"] for result in results)
    ours, gloos = (statistics.median(results[0]["seconds"][name]) for name in ("hfreduce", "gloo"))
    print(f"{mib} MiB: {ours * 1e3:.2f} ms, gloo {gloos * 1e3:.2f} ms: {gloos / ours:.2f} times as fast")
    assert ours < gloos / 1.2
