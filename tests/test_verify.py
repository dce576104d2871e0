"""hfnn.verify: what it compares, what it finds, and what it refuses."""

import importlib
import itertools
import math

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

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
    monkeypatch.setattr(hfnn.GELU, "forward", lambda self, x: nn.functional.gelu(x))  # the wrong form
    m = hfnn.convert(model(), prefer="memory")
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
        runs = itertools.cycle((off_by(largest), torchs, exact))
        monkeypatch.setattr(importlib.import_module("hfnn.verify"), "_run", lambda *_, runs=runs: next(runs))
        assert hfnn.verify(nn.Linear(8, 8)).ok is ok


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_verify_takes_a_tenth_for_noise_in_float32_alone(dtype, monkeypatch):
    """Where torch is off by a fifth, ours may be off by far more, but only in float32."""
    results = ({"a": torch.full((4096,), by, dtype=dtype)} for by in (1.8, 1.2))
    runs = itertools.cycle((*results, {"a": torch.ones(4096, dtype=torch.float64)}))
    monkeypatch.setattr(importlib.import_module("hfnn.verify"), "_run", lambda *_: next(runs))
    assert hfnn.verify(nn.Linear(8, 8)).ok is (dtype is torch.float32)


def test_verify_refuses_active_dropout():
    m = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    with pytest.raises(ValueError, match=r"dropout '1' is active \(p=0.5\); call model.eval\(\)"):
        hfnn.verify(m, torch.randn(2, 4))
    assert hfnn.verify(m.eval(), torch.randn(2, 4)).ok


VERIFY = importlib.import_module("hfnn.verify")


class Pool(nn.Module):
    """A weighted mean with weights in float32; where all are masked, float64's mask value becomes -inf there."""

    def __init__(self):
        super().__init__()
        self.norm, self.value = nn.LayerNorm(32), nn.Linear(32, 32)

    def forward(self, x, mask):
        scores = x.sum(-1).masked_fill(mask == 0, torch.finfo(x.dtype).min)
        weights = scores.softmax(-1, dtype=torch.float32).to(x.dtype)
        return (weights[..., None] * self.value(self.norm(x))).sum(1)


def masks():
    usual, padded = torch.ones(4, 6), torch.ones(4, 6)
    padded[1] = 0
    return usual, padded


@pytest.mark.parametrize("factor", [1, 3])
def test_a_reference_that_is_not_finite_is_none(factor):
    class Wrong(Pool):
        def forward(self, x, mask):
            return super().forward(x, mask) * (factor if hfnn.is_converted(self.norm) else 1)

    for mask, reference in zip(
        masks(),
        (
            "float64",
            "float32, its original classes, because in float64 the model returns numbers that are NaN or infinite",
        ),
        strict=True,
    ):
        found = hfnn.verify(Wrong(), torch.randn(4, 6, 32), mask)
        assert found.ok == (factor == 1) and found.reference == reference, str(found)


def test_what_is_not_finite_is_not_comparable():
    x = torch.randn(4, 6, 32)
    x[0, 0, 0] = math.nan
    found = hfnn.verify(Pool(), x, masks()[0])
    assert not found.ok and {row.verdict for row in found.rows} == {"not comparable"}
    assert found.not_comparable == found.rows and str(found).count("not comparable") == 1 + len(found.rows)
    assert "32 of 128 numbers of the reference are NaN or infinite" in found.rows[0].why


@pytest.mark.parametrize("value", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize("where", ["reference", "original"])
def test_one_number_that_is_not_finite(where, value, monkeypatch):
    """Also if both versions have it, as a comparison of it says nothing."""
    results = [{"a": torch.ones(100), "b": torch.ones(100)} for _ in range(3)]  # converted, original, reference
    for result in results[0 if where == "reference" else 1 :]:
        result["a"][7] = value
    if where == "original":
        results[2]["a"][7] = 1.0
    runs = itertools.cycle(results)
    monkeypatch.setattr(VERIFY, "_run", lambda *_: next(runs))
    found = hfnn.verify(nn.Linear(8, 8))
    assert not found.ok and [row.verdict for row in found.rows] == ["not comparable", "ok"]
    assert f"1 of 100 numbers of the {where}" in found.rows[0].why and "a: 1 of 100" in str(found)


def test_only_ours_is_not_finite(monkeypatch):
    results = {"a": torch.full((100,), math.nan)}, {"a": torch.ones(100)}, {"a": torch.ones(100)}
    runs = itertools.cycle(results)
    monkeypatch.setattr(VERIFY, "_run", lambda *_: next(runs))
    assert [row.verdict for row in hfnn.verify(nn.Linear(8, 8)).rows] == ["NO"]


class Denoiser(nn.Module):
    """Makes its timestep embedding in float32, which a product in another dtype refuses."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 16))
        self.norm, self.out, self.dtype = nn.LayerNorm(16), nn.Linear(16, 16), dtype
        self.to(dtype)

    def forward(self, x, t):
        angles = t[:, None].float() * torch.exp(torch.arange(16, dtype=torch.float32) * (-math.log(1e4) / 16))
        embedded = torch.cat([angles.cos(), angles.sin()], 1)
        narrow = self.dtype if self.out.weight.dtype is self.dtype else torch.float32
        return self.out(self.norm(x + self.time(embedded.to(narrow))))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_float32_tensors_of_the_model(dtype, monkeypatch):
    given = torch.randn(8, 16).to(dtype), torch.randint(0, 1000, (8,))
    found = hfnn.verify(Denoiser(dtype), *given)
    how = "float32, its original classes, because" if dtype is torch.float32 else "float32, because"
    assert found.ok and found.reference.startswith(f"{how} in float64 the model raises RuntimeError: "), found.reference
    assert "reference: float32" in str(found)
    monkeypatch.setattr(hfnn.SiLU, "forward", lambda self, x: nn.functional.silu(x) * 1.1)
    assert not hfnn.verify(Denoiser(dtype), *given).ok


def test_a_no_is_a_no_in_every_draw(monkeypatch):
    exact = {"a": torch.ones(4096, dtype=torch.float64)}
    for agreeing, ok, count in ((0, True, 1), (2, True, 3), (4, True, 5), (5, False, 5)):
        draws = []

        def run(model, inputs, kwargs, draw=0, draws=draws, agreeing=agreeing):
            draws.append(draw)
            by = (1e-2 if draw != agreeing else 1e-6, 1e-6, 0.0)[(len(draws) - 1) % 3]
            return {"a": (exact["a"] + by).float() if by else exact["a"]}

        monkeypatch.setattr(VERIFY, "_run", run)
        assert hfnn.verify(nn.Linear(8, 8)).ok is ok and draws == [n for n in range(count) for _ in range(3)]


def test_reentrant_checkpoints():
    class Checkpointed(nn.Sequential):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=True)

    found = hfnn.verify(Checkpointed(nn.LayerNorm(8), nn.Linear(8, 8)), torch.randn(4, 8, requires_grad=True))
    assert found.ok and "grad 1.bias" in [row.name for row in found.rows]


def test_nothing_to_compare():
    with pytest.raises(ValueError, match="no floating-point tensor"):
        hfnn.verify(nn.Flatten(), torch.arange(6).view(2, 3))
    with pytest.raises(ValueError, match="no floating-point tensor"):
        hfnn.verify(nn.ReLU(), torch.ones(0, 3))
