"""The fuzzer of wrappers in the suite: 40 programs without a difference, and a planted fault that is found."""

import engine
import pytest
import wrappers


def test_programs_do_not_differ():
    summary = engine.check(wrappers.FUZZER, range(40))
    assert not summary.found, summary.found


def test_features_are_not_rare():
    """Of what is drawn, without running it."""
    summary = engine.Summary()
    for seed in range(2000):
        summary.add(seed, wrappers.features(wrappers.FUZZER.program(seed)), None, None)
    assert not summary.rare(wrappers.FUZZER)


@pytest.mark.parametrize("fault", ["fsdp: a gradient not reduced", "fsdp: a stale parameter"])
def test_a_fault_is_found(fault):
    assert engine.first_found(wrappers.FUZZER, fault, range(40)) is not None
