"""A part of the fuzzer of `hfnn.convert`, with fixed seeds. `run.py convert` runs more of it."""

from pathlib import Path

import pytest
from convert import FUZZER
from engine import first_found, rarely_drawn

PROGRAMS = 300


def test_converted_models_do_what_stock_does(summary):
    assert not summary.found, f"python tests/fuzz/run.py convert --only SEED shows and shrinks: {summary.found}"


def test_recipes_are_taken_in_half_of_the_programs(summary):
    assert summary.features["recipes taken"] >= PROGRAMS / 2


def test_bytes_are_counted_in_half_of_the_programs(summary):
    assert summary.features["bytes counted"] >= PROGRAMS / 2


def test_every_feature_stands_in_two_percent_of_programs():
    assert not rarely_drawn(FUZZER)


def test_limits_are_few_and_documented():
    limits = (Path(__file__).parents[2] / "docs" / "design.md").read_text().split("## 8. Limits")[1].lower()
    assert len(FUZZER.known) <= 10
    assert all(f"* *{known.name.lower()}*:" in limits for known in FUZZER.known)
    assert limits.count("\n* *") == len(FUZZER.known)


QUICK = (
    "rebuilt a little wrong",
    "a chain's first source for its tensor",
    "what nodes save kept for ever",
    "a converted module kept by its last call",
    "state of a retained graph cleared",
    "the gradient of the wrong input",
)


@pytest.mark.parametrize("fault", QUICK)
def test_planted_faults_are_found(fault):
    """`run.py convert --faults` looks for all of them."""
    assert first_found(FUZZER, fault, range(60)) is not None
