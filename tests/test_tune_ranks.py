"""hfnn.tune on several ranks, which must all choose the same."""

from pathlib import Path

import pytest
import ranks

WORKER = Path(__file__).parent / "workers" / "tuned.py"


@pytest.mark.slow
def test_ranks_take_the_same(tmp_path):
    """No rank takes a candidate that is wrong or hangs only on rank 1; a stock model that fails there ends the run."""
    wrong, hangs, fails = zip(*ranks.run(WORKER, "tuned", 2, tmp_path, timeout=120), strict=True)
    assert wrong[0] == wrong[1] and wrong[0][0] == "stock"
    assert wrong[0][1].startswith("loss after 1 batch is off by 0.001") and wrong[0][1].endswith("(rank 1)")
    assert hangs[0] == hangs[1] and hangs[0][0] == "stock"
    assert hangs[0][1].startswith("not done in the ") and hangs[0][1].endswith("of the budget (rank 1)")
    assert fails == ("stock fails on another rank: ZeroDivisionError('here') (rank 1)", "here")


@pytest.mark.slow
def test_ranks_keep_what_rank_0_chose(tmp_path):
    """Also if only rank 0 has the file."""
    assert ranks.run(WORKER, "kept", 2, tmp_path, timeout=120) == [["fast", False, "fast", True]] * 2
