"""A part of the fuzzer of captured models, with fixed seeds. `run.py capture` runs more of it."""

import pytest
from capture import FUZZER
from engine import first_found, rarely_drawn

PROGRAMS = 150


def test_captured_models_do_what_models_do(summary):
    assert not summary.found, f"python tests/fuzz/run.py capture --only SEED shows and shrinks: {summary.found}"


def test_graphs_are_replayed_in_a_third_of_the_programs(summary):
    assert summary.features["replayed"] >= PROGRAMS / 3


def test_every_feature_stands_in_two_percent_of_programs():
    assert not rarely_drawn(FUZZER)


@pytest.mark.parametrize("fault", FUZZER.faults)
def test_a_planted_fault_is_found(fault):
    assert first_found(FUZZER, fault, range(2000)) is not None
