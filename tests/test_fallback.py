"""Where nodes in C++ do not take a call, or hfnn._autograd is missing, torch's own ops run."""

import os
import subprocess
import sys

import pytest
import torch
from torch.overrides import TorchFunctionMode

import hfnn
from hfnn.core import native

WITHOUT = """
import copy, logging, torch, hfnn
from torch import nn
from hfnn.core import native
logging.disable()
assert native.extension is None
torch.manual_seed(0)
stock = nn.Sequential(
    nn.Linear(32, 64), nn.GLU(), nn.LayerNorm(32), nn.Dropout(0.5), nn.Linear(32, 32), nn.GELU(), nn.RMSNorm(32),
    nn.BatchNorm1d(32), nn.SiLU(), nn.GroupNorm(4, 32), nn.Softplus(), nn.ELU(), nn.Softsign(), nn.Linear(32, 8),
)
found, x = [], torch.randn(16, 32)
for model in (stock, hfnn.convert(copy.deepcopy(stock), prefer="memory")):
    for autocast in (False, True):
        torch.manual_seed(1)
        names, kept, leaf = set(), [], x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.nbytes) or t, lambda t: t):
                y = model(leaf)
        left = [y.grad_fn]
        while left:
            node = left.pop()
            names |= {node.name()}
            left += [below for below, _ in node.next_functions if below is not None]
        y.float().square().sum().backward()
        found.append((names, kept, y.detach(), leaf.grad))
for theirs, ours in zip(found[:2], found[2:], strict=True):
    assert theirs[:2] == ours[:2], (theirs[:2], ours[:2])
    assert all(map(torch.equal, theirs[2:], ours[2:]))
try:
    with hfnn.use("cpp"):
        hfnn.functional.gelu(x)
except hfnn.NoKernel as error:
    assert "HFNN_AUTOGRAD=0" in str(error), error
else:
    raise AssertionError("a kernel was asked for")
"""


def test_without_the_extension_torchs_ops_run():
    """The same nodes, bytes and bits as stock, and an error where a kernel is asked for."""
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT], env={**os.environ, "HFNN_AUTOGRAD": "0"}, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr[-3000:]


CONTEXTS = {
    "a default device": lambda: torch.device("cpu"),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "anomalies": torch.autograd.detect_anomaly,
    "a profiler": torch.profiler.profile,
    "saved tensors elsewhere": torch.autograd.graph.save_on_cpu,
    "no operators for subclasses": torch._C.DisableTorchFunctionSubclass,
}


@pytest.mark.skipif(native.extension is None, reason="hfnn._autograd is not built")
@pytest.mark.filterwarnings("ignore:Anomaly Detection", "ignore:Warning. Profiler clears")
@pytest.mark.parametrize("name", CONTEXTS)
def test_what_trains_everywhere_runs_in_cpp(name):
    """In these contexts models train, so nodes run as usual."""
    norm, linear, x = hfnn.LayerNorm(64), hfnn.Linear(64, 8), torch.randn(32, 64, requires_grad=True)
    norm.prefer = linear.prefer = "memory"
    with CONTEXTS[name]():
        y = norm(x)
        z = linear(y)
    assert native.extension.module(y.grad_fn) is not None and z.grad_fn.name() == "_LinearBackward"
    assert not isinstance(z.grad_fn, torch.autograd.function.BackwardCFunction)


def test_a_mode_that_sees_calls_sees_torchs():
    class Names(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    seen, norm, x = [], hfnn.LayerNorm(64), torch.randn(32, 64, requires_grad=True)
    norm.prefer = "memory"
    with Names():
        norm(x)
    assert torch.layer_norm in seen
