"""hfnn.verify: what it compares, what it finds, and what it refuses."""

import importlib

import pytest
import torch
from torch import nn

import hfnn

from .test_convert import model


def test_verify():
    m = hfnn.convert(model(), prefer="memory")
    m[0].down.weight.grad = torch.ones_like(m[0].down.weight)
    fired = []
    m[0].register_forward_hook(lambda *_: fired.append(1))
    x, state = torch.randn(4, 32, requires_grad=True), torch.get_rng_state()
    found = hfnn.verify(m, x)
    assert found.ok and "all within it" in str(found)
    assert [row.name for row in found.rows[:2]] == ["output", "grad input.0"]
    assert len(found.rows) == 2 + len(list(m.parameters()))
    assert any(row.difference > 0 for row in found.rows)  # the rooms ran: bit-equal everywhere would be suspicious
    assert not fired and x.grad is None and torch.equal(torch.get_rng_state(), state)
    assert m[0].down.weight.grad.eq(1).all() and m[0].up.weight.grad is None
    assert hfnn.verify(model(), x).ok  # not converted yet


def test_verify_finds_a_wrong_room(monkeypatch):
    m = hfnn.convert(model(), prefer="memory")
    monkeypatch.setattr(hfnn.GELU, "forward", lambda self, x: nn.functional.gelu(x))  # the wrong form
    found = hfnn.verify(m, torch.randn(4, 32))
    assert not found.ok and "NO" in str(found)


@pytest.mark.parametrize("size", [4096, 32])
def test_verify_is_moved_by_no_luck(size, monkeypatch):
    """Four tensors with similar errors. torch gets one element of the last right by chance, or all if there are few."""
    exact = {name: torch.ones(n, dtype=torch.float64) for name, n in zip("abcd", (4096, 4096, 4096, size), strict=True)}

    def off_by(largest):
        found = {name: x.float() + 1e-6 for name, x in exact.items()}
        for x in found.values():
            x[0] += largest
        return found

    for largest, ok in ((3e-6, True), (1e-3, False)):
        torchs = off_by(3e-6)
        torchs["d"] = torch.ones(size) if size == 32 else torch.ones(size) + 1e-6
        runs = iter((off_by(largest), torchs, exact))
        monkeypatch.setattr(importlib.import_module("hfnn.verify"), "_run", lambda *_, runs=runs: next(runs))
        assert hfnn.verify(nn.Linear(8, 8)).ok is ok


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_verify_takes_a_tenth_for_noise_in_float32_alone(dtype, monkeypatch):
    """Where torch is off by a fifth, ours may be off by far more, but only in float32."""
    results = ({"a": torch.full((4096,), by, dtype=dtype)} for by in (1.8, 1.2))
    runs = iter((*results, {"a": torch.ones(4096, dtype=torch.float64)}))
    monkeypatch.setattr(importlib.import_module("hfnn.verify"), "_run", lambda *_: next(runs))
    assert hfnn.verify(nn.Linear(8, 8)).ok is (dtype is torch.float32)


def test_verify_refuses_active_dropout():
    m = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    with pytest.raises(ValueError, match=r"dropout '1' is active \(p=0.5\); call model.eval\(\)"):
        hfnn.verify(m, torch.randn(2, 4))
    assert hfnn.verify(m.eval(), torch.randn(2, 4)).ok
