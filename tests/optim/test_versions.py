"""Autograd notices a step's writes: versions of parameters and states change as with torch's optimizers."""

import pytest
import torch
from torch import nn

import hfnn

CASES = (
    ("AdamW", {}), ("AdamW", {"amsgrad": True}), ("Adam", {}), ("SGD", {}), ("SGD", {"momentum": 0.9}),
    ("Adafactor", {}), ("AdamW", {"maximize": True}),
)  # fmt: skip


def versions(optimizer):
    return [
        (p._version, {name: x._version for name, x in optimizer.state[p].items() if name != "step" and x is not None})
        for p in optimizer.param_groups[0]["params"]
    ]


def moved(optimizer):
    before = versions(optimizer)
    optimizer.step()
    return [
        (p > q, {name: x > kept[name] for name, x in states.items()})
        for (q, kept), (p, states) in zip(before, versions(optimizer), strict=True)
    ]


@pytest.mark.parametrize(("name", "options"), CASES)
def test_versions_move(name, options):
    """Only versions of written tensors change; a parameter without a gradient is unchanged."""
    results = []
    for package in (torch.optim, hfnn.optim):
        params = [nn.Parameter(torch.ones(shape)) for shape in ((3, 4), (5,), ())]
        optimizer = getattr(package, name)(params, lr=0.1, **options)
        for last in (None, None, params[2]):
            for p in params:
                p.grad = None if p is last else torch.ones_like(p)
            if last is None:
                optimizer.step()
        results.append(moved(optimizer))
    assert results[0] == results[1] and results[1][0][0] and not results[1][2][0]


@pytest.mark.parametrize("options", [{}, {"state_dtype": "8bit"}, {"max_grad_norm": 1.0}, {"ema_decay": 0.5}])
@pytest.mark.parametrize("name", ["AdamW", "SGD", "Lion", "LAMB"])
def test_backward_of_before(name, options):
    """A graph from before the step: torch's error, instead of gradients with the new weights."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = getattr(hfnn.optim, name)(model.parameters(), lr=0.1, **options)
    x = torch.ones(2, 4)
    for _ in range(2):
        now, later = model(x).sum(), model(x).square().sum()
        now.backward()
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            later.backward()


def test_in_backward():
    model = nn.Linear(4, 1)
    optimizer = hfnn.optim.AdamW(model.parameters())
    hfnn.optim.step_in_backward(optimizer)
    before = model.weight._version
    model(torch.ones(2, 4)).sum().backward()
    assert model.weight._version > before


def test_a_step_that_is_left_out():
    """A step skipped for overflowing gradients, on the CPU, where the host knows."""
    p = nn.Parameter(torch.ones(3))
    optimizer, scaler = hfnn.optim.AdamW([p]), torch.amp.GradScaler("cpu")
    for value in (1.0, torch.inf, 1.0):
        p.grad, before = scaler.scale(torch.full_like(p, value)), versions(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert (versions(optimizer) == before) == (value == torch.inf)
