"""hfrecord's DataLoader beside torch's; torchdata's StatefulDataLoader, and Grain with its RandomAccessDataSource."""

import concurrent.futures
import itertools
import pickle

import numpy as np
import pytest
import torch

import hfrecord

N = 100


@pytest.fixture
def dataset(tmp_path):
    with hfrecord.DatasetWriter(tmp_path / "set", {"n": "int64"}, part_bytes=6000) as writer:
        for number in range(N):
            writer.write({"n": number})
    return hfrecord.Dataset(tmp_path / "set")


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata calls it
def test_a_stateful_dataloader_goes_on_after_every_step(dataset, workers):
    """By torchdata's states, which count what the loop received, whatever workers have prefetched."""
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")

    def loader():
        sampler = hfrecord.ElasticSampler(dataset, 8, seed=1)
        return torchdata.StatefulDataLoader(dataset, batch_sampler=sampler, num_workers=workers)

    first = loader()
    whole = [batch["n"].tolist() for batch in first]
    assert sorted(itertools.chain(*whole)) == list(range(N))
    assert [batch["n"].tolist() for batch in first] != whole  # the next epoch
    for stop in range(0, len(whole), 1 if workers == 0 else 5):
        begun = loader()
        items = iter(begun)
        found = [next(items)["n"].tolist() for _ in range(stop)]
        state = pickle.loads(pickle.dumps(begun.state_dict()))
        other = loader()
        other.load_state_dict(state)
        assert found + [batch["n"].tolist() for batch in other] == whole, f"after {stop} batches"


def test_a_random_access_data_source(dataset):
    """What Grain requires: a length, items by Python's and numpy's integers, from threads, in other processes."""
    for source in (dataset, hfrecord.FileReader(dataset.reader._given)):
        copy = pickle.loads(pickle.dumps(source))
        assert len(copy) == N and [copy[i]["n"] for i in (0, np.int64(99), 5)] == [0, 99, 5]
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            assert [record["n"] for record in pool.map(copy.__getitem__, range(N))] == list(range(N))
        assert [record["n"] for record in copy.__getitems__([7, 3, 7])] == [7, 3, 7]


@pytest.mark.filterwarnings("ignore")  # Grain's imports
@pytest.mark.parametrize("workers", [0, 2])
def test_grain_takes_it(dataset, workers):
    grain = pytest.importorskip("grain")
    assert isinstance(dataset, grain.sources.RandomAccessDataSource)
    source = grain.MapDataset.source(dataset).shuffle(seed=0).map(_number).batch(10)
    made = source.to_iter_dataset()
    if workers:
        made = made.mp_prefetch(grain.MultiprocessingOptions(num_workers=workers))
    items = iter(made)
    found = [next(items).tolist() for _ in range(4)]
    state = items.get_state()
    rest = [batch.tolist() for batch in items]
    assert sorted(itertools.chain(*found, *rest)) == list(range(N))
    items.set_state(state)
    assert [batch.tolist() for batch in items] == rest


def _number(record):
    return record["n"]


def _refuses_some(record):
    if record["n"] in (3, 50, 51, 99):
        raise ValueError("refused")
    return record["n"]


def drained(items):
    """What an iterator gives, errors included."""
    found = []
    while True:
        try:
            found.append(next(items).tolist())
        except ValueError as error:
            found.append(type(error).__name__)
        except StopIteration:
            return found


@pytest.mark.parametrize("workers", [0, 2])
def test_errors_and_random_numbers_are_those_of_torchs_loader(dataset, workers):
    dataset.transform = _refuses_some
    stock = torch.utils.data.DataLoader(dataset, 7, num_workers=workers)
    ours = hfrecord.DataLoader(dataset, 7, num_workers=workers, shuffle=False)
    results = []
    for loader in (stock, ours):
        torch.manual_seed(0)
        items = iter(loader)
        drawn = torch.rand(1)
        results.append((drained(items), next(items, "ended"), len(items), len(loader), drawn, torch.rand(1)))
    assert results[0] == results[1] and results[0][0].count("ValueError") == 3
    assert ours.state_dict() == {"seed": 0, "epoch": 1, "consumed": 0, "records": N}


@pytest.mark.parametrize("workers", [0, 1])
def test_a_batch_that_raises_counts_when_the_loop_goes_on(dataset, workers):
    dataset.transform = _refuses_some
    items = iter(loader := hfrecord.DataLoader(dataset, 2, num_workers=workers, shuffle=False))
    next(items)
    with pytest.raises(ValueError, match="refused"):
        next(items)
    assert loader.state_dict()["consumed"] == 2  # a run that ends here reads it again
    assert next(items).tolist() == [4, 5] and loader.state_dict()["consumed"] == 6


@pytest.mark.parametrize("workers", [0, 1])
def test_after_a_break_the_next_loop_begins_where_that_one_began(dataset, workers):
    """Also if a worker has prefetched the rest of the epoch."""
    more = {"prefetch_factor": 30, "num_workers": 1} if workers else {}
    loader = hfrecord.DataLoader(dataset, 10, **more)

    def first(count):
        return [batch["n"].tolist() for batch in itertools.islice(loader, count)]

    part = first(4)
    state = loader.state_dict()
    assert state == {"seed": 0, "epoch": 0, "consumed": 40, "records": N} and len(loader) == 10
    whole = first(None)
    assert whole[:4] == part and loader.state_dict()["epoch"] == 1
    loader.load_state_dict(state)
    assert first(2) == whole[4:6] == first(2) and len(loader) == 6
    assert loader.state_dict()["consumed"] == 60
    assert first(None) == whole[4:] and len(loader) == 10
    second = first(None)
    assert second != whole
    loader.batch_sampler.set_epoch(1)  # as Lightning does
    assert loader.state_dict()["epoch"] == 1 and first(None) == second


def test_a_state_after_set_epoch_is_that_of_the_next_loops_start(dataset):
    loader = hfrecord.DataLoader(dataset, 30)
    for epoch in (0, 1, 2, 5):
        for setter in (loader.set_epoch, loader.batch_sampler.set_epoch):
            setter(epoch)
            assert loader.state_dict() == {"seed": 0, "epoch": epoch, "consumed": 0, "records": N}
        list(loader)
        iter(loader)
        assert loader.state_dict()["epoch"] == epoch + 1


def test_another_iterator_meanwhile_changes_no_state(dataset):
    loader = hfrecord.DataLoader(dataset, 10)
    items = iter(loader)
    for number in range(1, 11):
        next(items)
        if number == 5:
            assert loader.state_dict()["consumed"] == 50 and next(iter(loader)) is not None
        elif number < 10:
            assert loader.state_dict()["consumed"] == 10 * number
    assert next(items, None) is None and loader.batch_sampler.epoch == 1
