"""haiscale.checkpoint: whoever leaves while an asynchronous save is pending waits for it, or is given its error."""

from pathlib import Path

import pytest
import ranks

from haiscale import checkpoint

WORKER = Path(__file__).parents[1] / "workers" / "checkpoint_exit.py"
BACKENDS = ["hfreduce", pytest.param("gloo", marks=pytest.mark.rest)]


@pytest.fixture
def left(tmp_path):
    """left(function, backend): the ranks after they have ended, and their exit codes."""

    def run(function, backend):
        options = {"backend": backend, "target": str(tmp_path / "saved")}
        with ranks.start(WORKER, function, 2, tmp_path, **options) as group:
            return group, group.wait(60)

    return run


@pytest.mark.parametrize("backend", ["hfreduce", "gloo"])
def test_destruction_waits_for_a_pending_save(left, backend):
    group, codes = left("destroys", backend)
    assert codes == [0, 0] and group.results() == ["step-00000007"] * 2, group.output()


@pytest.mark.parametrize("backend", BACKENDS)
def test_destruction_by_an_exception_waits_as_well(left, backend):
    group, codes = left("caught_elsewhere", backend)
    assert codes == [0, 0] and group.results() == ["step-00000007"] * 2, group.output()


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_end_of_the_script_waits_for_a_pending_save(left, tmp_path, backend):
    group, codes = left("ends", backend)
    assert codes == [0, 0] and checkpoint.latest(tmp_path / "saved").name == "step-00000007", group.output()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_save_that_fails_at_the_end_of_the_script_changes_the_exit_status(left, tmp_path, backend):
    group, codes = left("fails", backend)
    assert codes == [1, 1], group.output()
    assert f"checkpoint {tmp_path / 'saved'} of step 7 was not written: rank 1: OSError: no room" in group.output()


@pytest.mark.parametrize("backend", BACKENDS)
def test_after_a_death_destruction_raises_at_once_and_names_the_folder(left, tmp_path, backend):
    group, codes = left("dies", backend)
    assert codes == [0, -9], group.output()
    text, seconds = group.results()[0]
    assert f"checkpoint {tmp_path / 'saved'} of step 7 was not written" in text and seconds < ranks.soon(5), text
