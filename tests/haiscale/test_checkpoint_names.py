"""haiscale.checkpoint: names are those of the plain model, whatever wraps it or parts of it, in any order."""

from pathlib import Path

import pytest
import ranks

WORKER = Path(__file__).parents[1] / "workers" / "checkpoint_names.py"


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_names_are_those_of_the_plain_model(tmp_path, size):
    """The same names in every way of wrapping, and every way loads the plain model's file, and old ones with long
    names. On two ranks, also files of every third way."""
    options = {"target": str(tmp_path / "saved"), "several": size > 1}
    assert ranks.run(WORKER, "names", size, tmp_path, timeout=300, **options) == [{}] * size
