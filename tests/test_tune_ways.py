"""hfnn.tune with captured models, using the stand-in for CUDA graphs, and with a compiled container of torch's."""

import pytest
import torch
from played_graphs import played
from torch import nn

import hfnn
from hfnn.tuning.candidates import Candidate

CAPTURED = Candidate("captured", convert=True, capture=True)


def built():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 4))


def tune(model, sizes, **how):
    given = [torch.randn(n, 16) for n in sizes]
    how = {"loss": lambda m, x: m(x).square().mean(), "budget": 100, "cache": False, "show": False, **how}
    return hfnn.tune(model, given, steps=10, among=[CAPTURED], **how)


def test_it_is_replayed_and_agrees(monkeypatch):
    monkeypatch.setattr("hfnn.tuning.run.best", lambda rows, steps: "captured")
    with played():
        model = built()
        found = tune(model, [8] * 5)
        assert found.rows[1].why == "" and found.rows[1].ms
        assert "captured" in hfnn.report(model).tuned
        for _ in range(5):
            model(torch.randn(8, 16)).sum().backward()
        assert "2 replays" in hfnn.report(model).captured


def test_what_is_not_replayed_is_dropped():
    with played():
        model = built()
        model[0].register_forward_hook(lambda module, args, y: y)
        found = tune(model, [8] * 5)
    assert "captured: 0 kinds of calls, 0 replays" in found.rows[1].why and found.choice == "stock"


@pytest.mark.filterwarnings("default")
def test_without_graphs_it_is_dropped():
    found = tune(built(), [8] * 5)
    assert "no parameters on a GPU" in found.rows[1].why


def test_torchs_own_container_compiles():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    given = [torch.randn(3, 4) for _ in range(3)]
    found = hfnn.tune(
        model,
        given,
        steps=1,
        loss=lambda m, x: m(x).square().mean(),
        among=["compiled"],
        budget=100,
        backend="eager",
        cache=False,
    )
    assert found.rows[1].why == ""
