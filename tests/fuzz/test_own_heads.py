"""A part of the fuzzer of output layers, with fixed seeds. `run.py own_heads` runs more of it."""

import pytest
from engine import first_found
from own_heads import FUZZER

PROGRAMS = 150


def test_programs_with_a_head_of_their_own_do_what_stock_does(summary):
    assert not summary.found, f"python tests/fuzz/run.py own_heads --only SEED shows and shrinks: {summary.found}"
    assert not summary.rare(FUZZER)


@pytest.mark.parametrize("fault", FUZZER.faults)
def test_a_planted_fault_is_found(fault):
    assert first_found(FUZZER, fault, range(300)) is not None
