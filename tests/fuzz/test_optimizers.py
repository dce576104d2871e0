"""A part of the fuzzer of `hfnn.optim`, with fixed seeds. `run.py optimizers` runs more of it."""

import pytest
import torch
from engine import Summary, check
from optimizers import FUZZER

PROGRAMS = 300


@pytest.fixture(scope="module")
def summary() -> Summary:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield check(FUZZER, range(PROGRAMS))
    torch.set_num_threads(threads)


def test_optimizers_do_what_torchs_do(summary):
    assert not summary.found, f"python tests/fuzz/run.py optimizers --only SEED shows and shrinks: {summary.found}"


def test_kernels_run_in_half_of_the_programs(summary):
    assert summary.features["a kernel ran"] >= PROGRAMS / 2


def test_every_feature_stands_in_two_percent_of_programs(summary):
    programs = Summary()
    for seed in range(2000):
        programs.add(seed, {*FUZZER.features(FUZZER.program(seed)), "a kernel ran"}, None, None)
    assert not programs.rare(FUZZER)
