"""Optimizers of sharded models, in real processes. The rank programs are in tests/workers/optimizer.py."""

from pathlib import Path

import pytest
import ranks

SCRIPT = Path(__file__).parents[1] / "workers" / "optimizer.py"


def run(way, world_size, folder):
    """Runs all ranks of one way to their end."""
    ranks.run(SCRIPT, "main", world_size, folder / "ranks", timeout=240, way=way, into=str(folder))


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.rest)])
@pytest.mark.parametrize("way", ["fsdp2", pytest.param("norm", marks=pytest.mark.slow), "lamb"])
def test_sharded(way, world_size, tmp_path):
    run(way, world_size, tmp_path)


@pytest.mark.parametrize(
    "way",
    [
        pytest.param("gradients", marks=pytest.mark.slow),
        pytest.param("in_backward", marks=pytest.mark.slow),
        "ddp",
        "adafactor",
    ],
)
def test_two_ranks(way, tmp_path):
    run(way, 2, tmp_path)


@pytest.mark.rest
def test_checkpoint_of_four_ranks_on_two_and_on_one(tmp_path):
    run("save", 4, tmp_path)
    run("load", 2, tmp_path)
    run("load", 1, tmp_path)


def test_checkpoint_of_one_rank_on_two(tmp_path):
    run("save", 1, tmp_path)
    run("load", 2, tmp_path)
