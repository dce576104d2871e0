"""Pipelines give the same results as the model without one. tests/workers/pipeline.py describes the cases."""

import re
from pathlib import Path

import pytest
import ranks
import torch
from torch.utils._pytree import tree_leaves

from haiscale.pipeline import batch

WORKER = Path(__file__).parents[1] / "workers" / "pipeline.py"
FAULTS = WORKER.with_name("pipeline_faults.py")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return ranks.run(WORKER, "run", 4, tmp_path_factory.mktemp("pipeline"), timeout=270)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.slow
def test_cases(results, size):
    """One line per rank and case with an error, and none expected."""
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


def test_outputs_have_no_graph():
    """Nor do those in tuples, lists and dicts; the model's own containers are left alone."""
    y = torch.ones(2, requires_grad=True) * 2
    given = {"y": y, "all": [y, (y, 3, None)], "named": torch.return_types.max((y, y))}
    found = batch.detached(given)
    assert not any(leaf.requires_grad for leaf in tree_leaves(found) if isinstance(leaf, torch.Tensor))
    assert [*map(type, tree_leaves(found))] == [*map(type, tree_leaves(given))]
    assert given["y"] is y and given["all"][0] is y and found["all"][1][1:] == (3, None)


@pytest.mark.rest
def test_on_gloo(tmp_path):
    check(ranks.run(WORKER, "on_devices", 2, tmp_path, backend="gloo", few=True), 2, 14)


GPUS = min(torch.cuda.device_count(), 4) & ~1  # 4 or 2


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
@pytest.mark.parametrize("backend", ["nccl", "hfreduce", "hfreduce from GPU to GPU"])
def test_on_gpus(backend, tmp_path):
    """All schedules on all GPUs, up to four, and on two of them: the results without a pipeline, within rounding."""
    backend, _, direct = backend.partition(" ")

    def environment(rank):
        return {"PIPELINE_DEVICE": f"cuda:{rank}", "HFREDUCE_DEVICE_MESSAGES": "1" if direct else "0"}

    found = ranks.run(WORKER, "on_devices", GPUS, tmp_path, timeout=120, gpus=True, env=environment, backend=backend)
    for size in {2, GPUS}:
        check(found, size, 40)


@pytest.mark.rest
@pytest.mark.parametrize("half", [0, 1])
def test_a_stage_that_is_gone_is_named_and_training_goes_on_from_what_was_saved(tmp_path, half):
    """In five places, on each of three stages, killed or stopped: half of the cases in one launch, half in another."""
    faults = ranks.run(FAULTS, "scenarios", 3, tmp_path, timeout=150, half=half)
    assert len(faults[0]) == 5 * 3
    for name in faults[0]:
        victim, sign = re.fullmatch(r"\w+, rank (\d), (\w+)", name).groups()
        check_scenario([found[name] for found in faults], int(victim), sign)


def check_scenario(told, victim, sign):
    gone = told[victim]
    assert not any("raised" in story for story in told), told
    assert gone.get("left", False) is False  # the message was still on its way
    for story in told[:victim] + told[victim + 1 :]:
        if sign == "SIGKILL":
            assert story["text"].startswith(f"rank {victim} (") and "has died" in story["text"], story
        else:
            table = re.search(rf"^ +{victim} .* does not answer \(stopped", story["text"], re.MULTILINE)
            first = story["text"].partition("\n")[0]  # a rank that waits for another waiting rank names that one, too
            assert table and first.startswith("Timed out after 2.0 s") and f"rank {victim} (" in first, story
        assert story["at"] - gone["at"] < (2 if sign == "SIGKILL" else 6), story
        # It stays broken, and says so at once.
        assert story["again"] == story["text"] and story["later"] < 0.5, story
    for story in told:
        step, count, other = story["resumed"]
        assert step == 2 and count == 4 and other == [], story
