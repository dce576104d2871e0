"""Rooms in Python, which run where hfnn._autograd is missing or was built for another torch."""

import os
import pathlib
import subprocess
import sys

import pytest

from hfnn.core import native

TESTS = pathlib.Path(__file__).parent


@pytest.mark.skipif(native.extension is None, reason="all tests run without the extension")
@pytest.mark.timeout(600)
@pytest.mark.slow
def test_rooms_in_python():
    """Runs the tests of recipes and of ops that have C++ nodes without the extension."""
    files = [
        "test_recipe.py",
        "test_recipe_limits.py",
        "ops/test_linear.py",
        "ops/test_linear_gradients.py",
        "ops/test_contract.py",
        "ops/test_contract_gpu.py",
        "ops/test_contract_rebuilds.py",
    ]
    plugins = ["-p", "timeout", "-p", "hypothesispytest", "-p", "no:cacheprovider"]
    ops = "layer_norm or rms_norm or gelu or silu or swiglu or dropout or recipe or linear"
    chosen = f"({ops}) and not cross_entropy and not distillation and not matches_float64"
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *plugins, "-m", "not slow and not rest", "-k", chosen, *files],
        cwd=TESTS, env={**os.environ, "HFNN_AUTOGRAD": "0", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True, text=True, timeout=580,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    assert "native: no" in subprocess.run(
        [sys.executable, "-c", "from hfnn.core import native; print('native:', 'yes' if native.extension else 'no')"],
        env={**os.environ, "HFNN_AUTOGRAD": "0"}, capture_output=True, text=True,
    ).stdout  # fmt: skip
