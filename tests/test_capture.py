"""`hfnn.convert(model, capture=True)`, with graphs that are played on the CPU; tests/fuzz/capture.py draws more."""

import copy
import inspect
import pickle
import sys
from pathlib import Path

import pytest
import torch
from played_graphs import played
from torch import nn

import hfnn
from hfnn.capture import captured

sys.path.append(str(Path(__file__).parent))
import test_families as families


@pytest.fixture
def graphs():
    with played():
        yield


def small():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Dropout(0.3), nn.Linear(16, 4))


def steps(model, count, optimizer=None):
    optimizer, losses = optimizer or torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), []
    for i in range(count):
        torch.manual_seed(i)
        optimizer.zero_grad()
        loss = model(torch.randn(6, 8)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def test_losses_and_state_are_those_of_the_model(graphs):
    plain = hfnn.convert(small())
    ours = hfnn.convert(small(), capture=True)
    assert torch.equal(steps(plain, 20), steps(ours, 20))
    for a, b in zip(plain.state_dict().values(), ours.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    assert vars(ours)["_hfnn_capture"].counts == {"before recording": 3, "replayed": 17}
    assert "captured: 1 kinds of calls, 17 replays" in " ".join(str(hfnn.report(ours)).split())


def test_on_the_cpu_it_does_nothing_and_says_so(caplog):
    model = hfnn.convert(small(), capture=True)
    assert "the CPU has no graphs" in caplog.text
    assert torch.equal(steps(hfnn.convert(small()), 6), steps(model, 6))
    assert vars(model)["_hfnn_capture"].counts == {"it has no parameters on a GPU": 6}


def test_revert_and_converting_again_end_it(graphs):
    plain = small()
    model = hfnn.convert(small(), capture=True)
    steps(model, 5)
    hfnn.revert(model)
    assert type(model) is nn.Sequential and vars(model).keys() == vars(plain).keys()
    hfnn.convert(model, capture=True)
    assert isinstance(model, captured.Captured)
    hfnn.convert(model)
    assert not isinstance(model, captured.Captured)


def test_copies_are_captured_on_their_own(graphs):
    model = hfnn.convert(small(), capture=True)
    steps(model, 5)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(other) is type(model) and vars(other)["_hfnn_capture"] is not vars(model)["_hfnn_capture"]
        assert torch.equal(steps(copy.deepcopy(hfnn.convert(copy.deepcopy(other))), 8), steps(other, 8))
        assert vars(other)["_hfnn_capture"].counts["replayed"] == 5
    shallow = copy.copy(model)
    steps(shallow, 2)
    assert vars(model)["_hfnn_capture"].counts["this is a copy of the model that was captured"] == 2


def test_the_signature_is_the_models_own(graphs):
    model = hfnn.convert(small(), capture=True)
    assert inspect.signature(model.forward) == inspect.signature(nn.Sequential().forward)
    assert isinstance(model, nn.Sequential) and type(model).__name__ == "Sequential"


def test_shapes_beyond_the_bound_run_as_they_are(graphs):
    model = hfnn.convert(small(), capture=True)
    knows = vars(model)["_hfnn_capture"]
    for _ in range(5):
        for rows in range(2, captured.SHAPES + 4):
            model(torch.randn(rows, 8)).sum().backward()
    assert sum(kind.pair is not None for kind in knows._kinds.values()) == captured.SHAPES
    assert knows.counts[f"there are {captured.SHAPES} kinds of calls already"] == 10
    for _ in range(captured.IDLE * captured.SHAPES + 5):  # what is not called any more makes room
        model(torch.randn(30, 8)).sum().backward()
    assert any(kind.pair is not None and kind.last == knows._calls for kind in knows._kinds.values())


def test_gradients_are_not_copied_while_nobody_holds_them(graphs):
    model = hfnn.convert(small(), capture=True)
    steps(model, 5)
    (pair,) = (kind.pair for kind in vars(model)["_hfnn_capture"]._kinds.values())
    addresses = {g.data_ptr() for g in pair._grads}
    assert {p.grad.data_ptr() for p in model.parameters()} == addresses
    model(torch.randn(6, 8)).sum().backward()  # accumulates into what the graph writes to
    assert {p.grad.data_ptr() for p in model.parameters()} == addresses


def test_what_cannot_be_recorded_runs_and_is_told(graphs, caplog):
    class Waits(nn.Linear):
        def forward(self, x):
            if torch.is_grad_enabled() and not self.weight.grad_fn and recording:
                raise RuntimeError("operation not permitted when stream is capturing\nand more")
            return super().forward(x)

    recording = []
    model = hfnn.convert(nn.Sequential(Waits(8, 8)), capture=True)
    for call in range(6):
        recording[:] = [True] if call == 3 else []
        with pytest.raises(RuntimeError) if call == 3 else torch.enable_grad():
            model(torch.randn(2, 8)).sum().backward()
    why = "it could not be recorded: operation not permitted when stream is capturing"
    assert vars(model)["_hfnn_capture"].counts[why] == 3 and caplog.text.count("is not captured") == 1


@pytest.mark.parametrize("family", families.FAMILIES)
def test_models_of_transformers(graphs, family):
    """Losses, gradients and the logits that are read afterwards, over more calls than are needed to record."""
    results, batch = [], families.inputs(family)
    for capture in (False, True):
        model, seen = hfnn.convert(families.build(family).train(), prefer="memory", capture=capture), []
        for call in range(7):
            torch.manual_seed(call)
            out = model(**batch)
            model.zero_grad()
            out.loss.backward()
            seen += [out.loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
            if getattr(out, "logits", None) is not None:
                seen.append(out.logits.detach() + 0)
        results.append(seen)
    assert vars(model)["_hfnn_capture"].counts["replayed"] == 4, vars(model)["_hfnn_capture"].counts
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
