"""A part of the backend's fuzzer, with fixed seeds. `run.py backend` runs more of it."""

import backend
import pytest
from backend import FUZZER
from engine import check, first_found, rarely_drawn

PROGRAMS = 100


@pytest.fixture(autouse=True, scope="module")
def _ranks():
    yield
    backend.end()


def test_hfreduce_does_what_gloo_does():
    found = check(FUZZER, range(PROGRAMS)).found
    assert not found, f"python tests/fuzz/run.py backend --only SEED shows and shrinks: {found}"


def test_every_feature_stands_in_two_percent_of_programs():
    assert not rarely_drawn(FUZZER)


@pytest.mark.parametrize(
    "fault",
    [
        "tags_are_ignored",
        *(pytest.param(name, marks=pytest.mark.slow) for name in FUZZER.faults if name != "tags_are_ignored"),
    ],
)
def test_a_planted_fault_is_found(fault):
    assert first_found(FUZZER, fault, range(PROGRAMS, PROGRAMS + 500)) is not None
