"""Pipelines give what the model gives without one: tests/workers/pipeline.py says what each case does."""

import re
import signal
import time
from pathlib import Path

import pytest
import ranks

WORKER = Path(__file__).parents[1] / "workers" / "pipeline.py"


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return ranks.run(WORKER, "run", 4, tmp_path_factory.mktemp("pipeline"), timeout=120)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_cases(results, size):
    """One line for each rank and case where something is wrong, and none."""
    here = [
        (f"rank {rank}, {name}", wrong)
        for rank, found in enumerate(results)
        for name, (wrong, _) in found.items()
        if name.startswith(f"{size} ranks")
    ]
    assert len(here) >= size * 35
    wrong = [f"{name}: {what}" for name, what in here if what]
    assert not wrong, "\n".join(wrong)


@pytest.fixture(scope="module")
def faults(tmp_path_factory):
    """What the first ranks of two pipelines raise, in two steps, where the second rank is killed, or stopped."""
    with ranks.start(WORKER, "fault", 4, tmp_path_factory.mktemp("faults"), limit=2) as running:
        running.until("stuck", timeout=60, ranks=[1, 3])
        killed = time.monotonic()
        running.signal(1, signal.SIGKILL)
        running.signal(3, signal.SIGSTOP)
        running.until("raised", timeout=30, ranks=[0, 2])
        assert time.monotonic() - killed < 15, running.output()
        return running.results()


@pytest.mark.parametrize(("rank", "names"), [(0, "rank 1 .* died"), (2, "waiting for rank 3")])
def test_a_rank_that_is_lost_in_a_step_is_named_and_the_pipeline_stays_broken(faults, rank, names):
    (first, seconds), (again, at_once) = faults[rank]
    assert re.search(names, first), first
    assert again == first and at_once < 0.1 and seconds < 12
