"""Third-party loaders: torchdata's StatefulDataLoader, and Grain with its RandomAccessDataSource."""

import concurrent.futures
import itertools
import pickle

import numpy as np
import pytest

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
