"""bench/architectures.py on three architectures: what it finds, and that it finds planted faults."""

import sys
from pathlib import Path

import pytest
import torch

import hfnn

transformers = pytest.importorskip("transformers")
KINDS = ("gpt2", "t5", "vit")


@pytest.fixture(scope="module")
def tool():
    """bench/architectures.py, imported as when it is run from its folder."""
    bench = str(Path(__file__).parents[1] / "bench")
    sys.path.insert(0, bench)
    try:
        import architectures

        yield architectures
    finally:
        sys.path.remove(bench)


@pytest.fixture
def examined(tool):
    return lambda kind: tool.one(kind, *tool.architectures(f"^{kind}$")[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_found(kind, examined):
    result = examined(kind)
    assert (result.stage, result.error) == ("done", "")
    assert result.wrong == [] and result.reference == "float64"
    assert result.not_reverted == []
    assert 0.95 * result.modules <= result.converted <= result.modules
    assert max(result.floor, result.ours) < result.stock
    assert result.share > 0.8  # T5's attention, with a trainable bias, keeps less than stock ops could


def test_a_wrong_module(examined, tool, monkeypatch):
    forward = hfnn.LayerNorm.forward
    monkeypatch.setattr(hfnn.LayerNorm, "forward", lambda self, x: forward(self, x) * 1.0001)
    result = examined("gpt2")
    assert result.wrong and result.not_reverted == []
    page = tool.models_page.page([result], {"version": "1", "torch": "2"})
    assert "| no | yes |" in page and "1 differ from stock" in page


def test_a_wrong_revert(examined, tool, monkeypatch):
    def revert(model):
        hfnn.convert(model)
        model.transformer.left = 1

    monkeypatch.setattr(tool, "hfnn", type("Planted", (), {**vars(hfnn), "revert": staticmethod(revert)}))
    result = examined("gpt2")
    assert result.wrong == [] and "model.transformer.left" in result.not_reverted
    assert any(what.endswith(".forward") for what in result.not_reverted)


def test_what_fails_is_told(tool):
    result = tool.one("gpt2", "CAUSAL_LM", "NoSuchModel")
    assert result.stage == "build" and "NoSuchModel" in result.error
    assert "* gpt2 (NoSuchModel): AttributeError" in tool.models_page.page([result], {"version": "1", "torch": "2"})


def test_low_shares_have_their_reason(tool):
    result = tool.Result("x", "CAUSAL_LM", "X", "done", stock=1000, ours=900, floor=500, gaps=[(0.8, "Mixer", "exp")])
    assert "* **x** (20%): Mixer 80% (exp)" in tool.models_page.page([result], {"version": "1", "torch": "2"})


@pytest.mark.parametrize("kind, layers, ffn", [("gpt2", "n_layer", 4), ("llama", "num_hidden_layers", 2 * 2)])
def test_floor_of_a_layer(kind, layers, ffn, tool):
    """The floor that docs/notes/activation_memory.md counts by hand, measured as the difference between two depths."""
    cls, ids, found = getattr(transformers, tool.architectures(f"^{kind}$")[kind][1]), torch.randint(3, 99, (2, 32)), []
    for depth in (2, 3):
        config = tool.tiny.config_of(cls, None)
        setattr(config, layers, depth)
        task = tool.Task(cls(config))
        found.append(tool.floor.floor(task, lambda task=task: task(input_ids=ids, labels=ids).loss).total)
    tensors = 2 + 3 + 1 + ffn  # inputs of norms; q, k, v; attention's result; inputs of the activation
    assert found[1] - found[0] == ids.numel() * (tensors * 4 * tool.tiny.WIDTH + 4 * 4)  # log-sum-exp of 4 heads
