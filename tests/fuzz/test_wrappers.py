"""The fuzzer of wrappers in the suite: 40 programs without a difference, and a planted fault that is found."""

import engine
import pytest
import wrappers


def test_programs_do_not_differ():
    summary = engine.check(wrappers.FUZZER, range(40))
    assert not summary.found, summary.found
    assert summary.features["runs to its end"] >= 30  # what raises on both sides shows nothing


def test_features_are_not_rare():
    assert not engine.rarely_drawn(wrappers.FUZZER)


@pytest.mark.parametrize("fault", ["fsdp: a gradient not reduced", "fsdp: a stale parameter"])
@pytest.mark.slow
def test_a_fault_is_found(fault):
    assert engine.first_found(wrappers.FUZZER, fault, range(40)) is not None
