"""torch's own tests of backends pass on hfreduce as they do on gloo: see torch_suite.py."""

import subprocess
import sys
from pathlib import Path

import pytest

SUITE = Path(__file__).with_name("torch_suite.py")


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("size", [2, 4, 8])
def test_torchs_tests_of_backends(size):
    done = subprocess.run([sys.executable, SUITE, "--ranks", str(size)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-10000:]
    assert int(done.stdout.rpartition(" tests on ")[0].split()[-1]) > 80, done.stdout  # and were not skipped
