"""A part of the fuzzer of `hfnn.optim`, with fixed seeds. `run.py optimizers` runs more of it."""

from engine import rarely_drawn
from optimizers import FUZZER

PROGRAMS = 300


def test_optimizers_do_what_torchs_do(summary):
    assert not summary.found, f"python tests/fuzz/run.py optimizers --only SEED shows and shrinks: {summary.found}"


def test_kernels_run_in_half_of_the_programs(summary):
    assert summary.features["a kernel ran"] >= PROGRAMS / 2


def test_every_feature_stands_in_two_percent_of_programs():
    assert not rarely_drawn(FUZZER)
