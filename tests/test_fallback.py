"""Rooms in Python, which run where hfnn._autograd is missing or was built for another torch."""

import os
import pathlib
import subprocess
import sys

import pytest
import torch
from torch.overrides import TorchFunctionMode

import hfnn
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


CONTEXTS = {
    "a default device": lambda: torch.device("cpu"),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "anomalies": torch.autograd.detect_anomaly,
    "a profiler": torch.profiler.profile,
    "saved tensors elsewhere": torch.autograd.graph.save_on_cpu,
    "no operators for subclasses": torch._C.DisableTorchFunctionSubclass,
}


@pytest.mark.skipif(native.extension is None, reason="all rooms run in Python")
@pytest.mark.filterwarnings("ignore:Anomaly Detection", "ignore:Warning. Profiler clears")
@pytest.mark.parametrize("name", CONTEXTS)
def test_what_trains_everywhere_runs_in_cpp(name):
    """In these contexts rooms in Python would take twice torch's time."""
    norm, linear, x = hfnn.LayerNorm(64), hfnn.Linear(64, 8), torch.randn(32, 64, requires_grad=True)
    norm.prefer = linear.prefer = "memory"
    with CONTEXTS[name]():
        y = norm(x)
        z = linear(y)
    assert native.extension.module(y.grad_fn) is not None and z.grad_fn.name() == "_LinearBackward"
    assert not isinstance(z.grad_fn, torch.autograd.function.BackwardCFunction)


def test_a_mode_that_sees_calls_sees_those_of_rooms():
    class Names(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    seen, norm, x = [], hfnn.LayerNorm(64), torch.randn(32, 64, requires_grad=True)
    norm.prefer = "memory"
    with Names():
        norm(x)
    assert torch.empty_like in seen or torch.nn.functional.layer_norm in seen
