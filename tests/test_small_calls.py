"""Calls that are too small for hfnn's ops: the model's own code runs, with little else."""

import copy
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hfnn
from hfnn.patterns import routed

transformers = pytest.importorskip("transformers")

from hfnn.ops import attention as op  # noqa: E402

from .test_transformers_attention import build, inputs  # noqa: E402


def run(model, batch):
    """(loss, gradients), and the number of Python functions that were called."""
    model.zero_grad()
    count = 0

    def note(frame, event, argument):
        nonlocal count
        count += event == "call"

    sys.setprofile(note)
    try:
        loss = model(**batch).loss
        loss.backward()
    finally:
        sys.setprofile(None)
    return [loss, *(p.grad for p in model.parameters())], count


@pytest.mark.parametrize("name", ("t5", "gemma2", "whisper", "mistral"))
@pytest.mark.parametrize("kind", ("full", "left"))
def test_small_attention_is_the_models_own(monkeypatch, name, kind):
    """Also with rows that see nothing: losses and gradients are stock's bits."""
    stock = build(name).eval()
    ours = hfnn.convert(copy.deepcopy(stock))
    monkeypatch.setattr(op, "in_rows", lambda *args, **kwargs: pytest.fail("hfnn's attention ran"))
    batch = inputs(name, kind) if kind == "left" else inputs(name)
    batch |= {"labels": batch["decoder_input_ids" if name == "whisper" else "input_ids"], "use_cache": False}
    batch.pop("decoder_input_ids", None)
    for _ in range(2):
        (wanted, calls), (found, mine) = run(stock, batch), run(ours, batch)
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert mine < 1.45 * calls  # a converted module's forward is one call more than the class's


def test_large_or_wanted_attention_is_ours(monkeypatch):
    called, own = [], op.in_rows
    monkeypatch.setattr(op, "in_rows", lambda *args, **kwargs: called.append(1) or own(*args, **kwargs))
    batch = inputs("gemma2")
    hfnn.convert(build("gemma2"))(**batch)
    assert not called
    hfnn.convert(build("gemma2"), prefer="memory")(**batch)
    with hfnn.use("cpp"):
        hfnn.convert(build("gemma2"))(**batch)
    hfnn.convert(build("gemma2"))(batch["input_ids"][:1, :8].repeat(64, 32))
    assert len(called) == 6


class Layer(nn.Module):
    def forward(self, x, scale=1.0):
        return F.softplus(x * scale)


@pytest.mark.parametrize("name", (None, "x"))
def test_small_calls_are_not_routed(monkeypatch, name):
    entered = []
    monkeypatch.setattr(routed, "install", lambda places: entered.append(1))
    monkeypatch.setattr(routed, "uninstall", lambda places: None)
    model = hfnn.convert(Layer())
    for elements in (routed.SMALL - 1, routed.SMALL):
        x = torch.zeros(elements, requires_grad=True)
        model(**{name: x}) if name else model(x, 2.0)
    assert len(entered) == 1
    hfnn.convert(model, prefer="memory")(torch.zeros(1, requires_grad=True))
    assert len(entered) == 2
