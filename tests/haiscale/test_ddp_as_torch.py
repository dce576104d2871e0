"""What scripts do around torch's DDP gives the same with haiscale's, and with the one that haiscale.auto makes.

The programs are in tests/workers/ddp_as_torch.py; all run in one set of processes.
"""

import subprocess
import sys
from pathlib import Path

import pytest
import ranks

WORKER = Path(__file__).parents[1] / "workers" / "ddp_as_torch.py"
ATTRIBUTES = Path(__file__).parent / "wrapper_attributes.py"
CASES = (
    "plain_module", "hooks_after_wrapping", "buffers", "comm_hook", "create_graph", "no_sync_between", "lifetime",
    "saved_output", "unused_with_old_gradient", "attributes", "plain_module_on_one_rank",
)  # fmt: skip


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return ranks.run(WORKER, "run", 2, tmp_path_factory.mktemp("ranks"), timeout=ranks.soon(60))


@pytest.mark.parametrize("kind", ["haiscale", "auto"])
@pytest.mark.parametrize("name", CASES)
def test_same(found, name, kind):
    theirs, ours = ([of_rank[name][which] for of_rank in found] for which in ("torch", kind))
    assert not any("error" in result for result in (*theirs, *ours) if isinstance(result, dict)), f"{theirs}\n{ours}"
    assert ours == theirs


def test_backward_repeated_after_an_error(found):
    """torch's raises."""
    for of_rank in found:
        assert of_rank["repeated_after_error"]["torch"] == ["raised"] * 2
        for kind in ("haiscale", "auto"):
            assert of_rank["repeated_after_error"][kind] == ["raised", "averaged"]


def test_dtypes_of_gradients(found):
    """torch's raises."""
    for of_rank in found:
        for kind in ("haiscale", "auto"):
            assert of_rank["gradient_dtype"][kind] == [True] * 24


@pytest.mark.slow
def test_list_of_attributes_is_complete():
    """That the wrapper has them is compared in `attributes`, above."""
    pytest.importorskip("lightning")
    listed = ATTRIBUTES.with_suffix(".txt").read_text().splitlines()
    done = subprocess.run([sys.executable, ATTRIBUTES], capture_output=True, text=True, check=True)
    found = done.stdout.splitlines()
    assert {row.partition(":")[0] for row in found} <= {row.partition(":")[0] for row in listed}, found
