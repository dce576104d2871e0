"""A part of the fuzzer of `hfrecord`, with fixed seeds. `run.py records` runs more of it."""

import pytest
from engine import first_found, rarely_drawn
from records import FUZZER

PROGRAMS = 300


def test_files_are_what_lists_are(summary):
    assert not summary.found, f"python tests/fuzz/run.py records --only SEED shows and shrinks: {summary.found}"


def test_damage_is_told_and_harmless_damage_is_not(summary):
    assert summary.features["damage is told"] >= PROGRAMS / 20
    assert summary.features["damage does no harm"] >= PROGRAMS / 100


def test_every_feature_stands_in_two_percent_of_programs():
    assert not rarely_drawn(FUZZER)


@pytest.mark.parametrize("fault", FUZZER.faults)
def test_a_planted_fault_is_found(fault):
    assert first_found(FUZZER, fault, range(300)) is not None
