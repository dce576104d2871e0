"""Orders of epochs: permutations, and resuming in the middle on other numbers of ranks and workers."""

import itertools

import numpy as np
import pytest

import hfrecord

N = 103
# Four workers on two cores give this warning.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


@pytest.mark.parametrize("window", [None, 1, 7, 64])
@pytest.mark.parametrize("n", [0, 1, 2, 3, 31, 1000, 4097])
def test_a_permutation_has_every_record_once(n, window):
    found = hfrecord.Permutation(n, 3, 5, window, mix=3)(np.arange(n))
    assert sorted(found.tolist()) == list(range(n))
    assert np.array_equal(hfrecord.Permutation(n, 3, 5, window, mix=3)(np.arange(n)[::-1]), found[::-1])


def test_permutations_differ_by_seed_and_epoch_and_mix_well():
    n, orders = 1000, {}
    for seed, epoch in itertools.product(range(20), range(20)):
        orders[seed, epoch] = hfrecord.Permutation(n, seed, epoch)(np.arange(n))
    assert len({order.tobytes() for order in orders.values()}) == 400
    # Each position gets each tenth of the records as often as by chance: 400 orders, chi-squared with 9 degrees of
    # freedom.
    tenths = np.stack(list(orders.values())) // 100
    counts = np.stack([(tenths == k).sum(0) for k in range(10)])
    chi = ((counts - 40) ** 2 / 40).sum(0)
    assert 8 < chi.mean() < 10 and chi.max() < 45
    neighbours = np.stack([np.abs(np.diff(order)) for order in orders.values()])
    assert abs(neighbours.mean() - n / 3) < 3


def test_windows_stay_together():
    order = hfrecord.Permutation(10_000, 0, 0, window=100, mix=4)(np.arange(10_000))
    first = np.sort(order[:400])
    assert (np.diff(first) == 1).sum() >= 396 - 4  # four ranges of the file, one of which may wrap around its end
    other = hfrecord.Permutation(10_000, 0, 1, window=100, mix=4)(np.arange(10_000))
    assert not np.isin(np.sort(other[:400]), first).all()


def test_a_large_one_needs_no_memory_and_no_time():
    places = np.array([0, 5, 10**15 - 1])
    found = hfrecord.Permutation(10**15, 1)(places)
    assert ((found >= 0) & (found < 10**15)).all() and len(set(found.tolist())) == 3


def epoch_in_parts(path, batch: int, parts, workers, tail="keep"):
    """The records of each step of one epoch, in order of positions; the state is passed from part to part."""
    state, steps = None, []
    for (ranks, count), workers_now in zip(parts, workers, strict=True):
        loaders = []
        for rank in range(ranks):
            options = {"rank": rank, "world_size": ranks, "tail": tail, "seed": 7, "collate_fn": list}
            loader = hfrecord.DataLoader(path, batch, num_workers=workers_now, **options)
            if state is not None:
                loader.load_state_dict(state)
            loaders.append(loader)
        iterators = [iter(loader) for loader in loaders]
        batches = [True] * ranks
        for _ in range(count) if count is not None else itertools.count():
            batches = [next(iterator, None) for iterator in iterators]
            if not any(batches):
                break
            turns = itertools.zip_longest(*(b or () for b in batches))
            steps.append([int(x) for turn in turns for x in turn if x is not None])
        states = [loader.state_dict() for loader, b in zip(loaders, batches, strict=True) if b or count is None]
        assert all(s == states[0] for s in states)
        state = states[0]
    return steps, state


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("records") / "a.hfr"
    with hfrecord.FileWriter(path) as writer:
        for number in range(N):
            writer.write(str(number).encode())
    return path


def order() -> list[int]:
    return hfrecord.ElasticSampler(range(N), seed=7).indices(0, np.arange(N)).tolist()


@pytest.mark.parametrize("steps", range(0, 14))
def test_going_on_after_every_step_on_other_ranks(path, steps):
    """Ranks 1 -> 3 -> 2: a step's records are the next positions of the epoch; none is lost or repeated."""
    found, state = epoch_in_parts(path, 3, [(1, steps), (3, 3), (2, None)], [0, 0, 0])
    assert [x for step in found for x in step] == order()
    assert {len(step) for step in found[:steps]} <= {3}
    assert state == {"seed": 7, "epoch": 1, "consumed": 0, "records": N}


@pytest.mark.parametrize("steps", [1, 4])
def test_going_on_with_other_workers(path, steps):
    """Workers 0 -> 4 -> 1 prefetch, which the state ignores."""
    found, _ = epoch_in_parts(path, 5, [(1, steps), (1, steps), (1, None)], [0, 4, 1])
    assert [x for step in found for x in step] == order() and all(len(step) == 5 for step in found[:-1])


@pytest.mark.slow
def test_going_on_after_every_step_with_ranks_and_workers(path):
    for steps in range(0, 13):
        found, _ = epoch_in_parts(path, 3, [(1, steps), (3, 3), (2, None)], [0, 4, 1])
        assert [x for step in found for x in step] == order()


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("tail", ["repeat", "drop", "keep"])
def test_ranks_at_the_end_of_an_epoch(ranks, tail):
    samplers = [hfrecord.ElasticSampler(range(N), 4, rank=r, world_size=ranks, tail=tail) for r in range(ranks)]
    given = [list(sampler) for sampler in samplers]
    flat = [x for batches in given for batch in batches for x in batch]
    if tail == "repeat":
        assert len({len(batches) for batches in given}) == 1 and set(flat) == set(range(N))
        assert len(flat) == -(-N // ranks) * ranks
    elif tail == "drop":
        assert all(len(batch) == 4 for batches in given for batch in batches)
        assert len(set(flat)) == len(flat) == N // (4 * ranks) * 4 * ranks
    else:
        assert sorted(flat) == list(range(N))
    assert [s.state_dict(len(given[0]))["epoch"] for s in samplers] == [1] * ranks
    assert given != [list(sampler) for sampler in samplers]  # the next epoch has another order


def test_each_batch_is_advised_one_batch_before_it_is_given():
    events = []

    class Data:
        def __len__(self):
            return 20

        def advise(self, indices):
            events.append(("advise", list(indices)))

    for batch in hfrecord.ElasticSampler(Data(), 6, shuffle=False):
        events.append(("batch", batch))
    batches = [list(range(at, min(20, at + 6))) for at in range(0, 20, 6)]
    assert [batch for kind, batch in events if kind == "advise"] == batches
    assert [batch for kind, batch in events if kind == "batch"] == batches
    for k in range(3):
        assert events.index(("advise", batches[k + 1])) < events.index(("batch", batches[k]))


def test_set_epoch_and_states():
    sampler = hfrecord.ElasticSampler(range(10), 2, seed=1)
    first = list(sampler)
    sampler.set_epoch(0)
    assert list(sampler) == first and len(sampler) == 5
    sampler.load_state_dict({"seed": 1, "epoch": 0, "consumed": 4, "records": 10})
    sampler.set_epoch(0)  # the current epoch: a training loop calls this after resuming
    assert len(sampler) == 3 and list(sampler) == first[2:]
    with pytest.raises(ValueError, match="a state of 9 records"):
        sampler.load_state_dict({"seed": 1, "epoch": 0, "consumed": 4, "records": 9})
    for wrong in ({"batch_size": 0}, {"tail": "cut"}, {"rank": 2, "world_size": 2}, {"window": 0}):
        with pytest.raises(ValueError, match="give"):
            hfrecord.ElasticSampler(range(10), **wrong)
