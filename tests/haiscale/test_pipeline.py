"""Pipelines give what the model gives without one: tests/workers/pipeline.py says what each case does."""

import re
import signal
import time
from pathlib import Path

import pytest
import ranks
import torch

WORKER = Path(__file__).parents[1] / "workers" / "pipeline.py"


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return ranks.run(WORKER, "run", 4, tmp_path_factory.mktemp("pipeline"), timeout=120)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_cases(results, size):
    """One line for each rank and case where something is wrong, and none."""
    check(results, size, 35)


def check(results, size, least):
    here = [
        (f"rank {rank}, {name}", wrong)
        for rank, found in enumerate(results)
        for name, (wrong, _) in found.items()
        if name.startswith(f"{size} ranks")
    ]
    assert len(here) >= size * least
    wrong = [f"{name}: {what}" for name, what in here if what]
    assert not wrong, "\n".join(wrong)


def test_on_gloo(tmp_path):
    check(ranks.run(WORKER, "on_devices", 2, tmp_path, backend="gloo", few=True), 2, 14)


GPUS = min(torch.cuda.device_count(), 4) & ~1  # 4 or 2


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
@pytest.mark.parametrize("backend", ["nccl", "hfreduce", "hfreduce from GPU to GPU"])
def test_on_gpus(backend, tmp_path):
    """All schedules on all GPUs, up to four, and on two of them: what they give without a pipeline but for rounding."""
    backend, _, direct = backend.partition(" ")

    def environment(rank):
        return {"PIPELINE_DEVICE": f"cuda:{rank}", "HFREDUCE_DEVICE_MESSAGES": "1" if direct else "0"}

    found = ranks.run(WORKER, "on_devices", GPUS, tmp_path, timeout=120, env=environment, backend=backend)
    for size in {2, GPUS}:
        check(found, size, 40)


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
