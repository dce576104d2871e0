"""hfnn.verify on random small networks: healthy ones pass, and a small fault in one gradient is found."""

import importlib
import random

import torch
from torch import nn

import hfnn

NETWORKS = 50


class Residual(nn.Module):
    def __init__(self, *parts):
        super().__init__()
        self.body = nn.Sequential(*parts)

    def forward(self, x):
        return x + self.body(x)


def image_network(rng):
    D = rng.choice((8, 12))

    def act():
        return rng.choice((nn.ReLU, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.Hardswish))()

    def block():
        groups = rng.choice((1, D))
        parts = [nn.Conv2d(D, D, 3, 1, 1, groups=groups, bias=rng.random() < 0.5), nn.BatchNorm2d(D), act()]
        if rng.random() < 0.5:
            return Residual(*parts)
        return nn.Sequential(*parts, *[nn.MaxPool2d(3, 1, 1)] * rng.randrange(2))

    blocks = [block() for _ in range(rng.randrange(1, 6))]
    ends = [nn.AdaptiveMaxPool2d(1) if rng.random() < 0.3 else nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(D, 10)]
    return nn.Sequential(nn.Conv2d(3, D, 3, 2, 1), nn.BatchNorm2d(D), act(), *blocks, *ends), torch.randn(4, 3, 16, 16)


def row_network(rng):
    D = rng.choice((16, 24))
    norms, acts = (nn.LayerNorm, nn.RMSNorm, nn.BatchNorm1d), (nn.GELU, nn.ReLU, nn.SiLU, nn.ELU, nn.Tanh, nn.Softplus)

    def block():
        return Residual(rng.choice(norms)(D), nn.Linear(D, 3 * D), rng.choice(acts)(), nn.Linear(3 * D, D))

    blocks = [block() for _ in range(rng.randrange(1, 5))]
    return nn.Sequential(nn.Linear(8, D), *blocks, nn.LayerNorm(D), nn.Linear(D, 5)), torch.randn(12, 8)


def drawn(seed):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    model, x = (image_network if seed % 2 else row_network)(rng)
    return hfnn.convert(model, prefer="memory"), x


def test_healthy_networks_pass():
    found = {seed: hfnn.verify(*drawn(seed)) for seed in range(NETWORKS)}
    assert all(one.ok for one in found.values()), [str(one) for one in found.values() if not one.ok]


def test_a_factor_of_1_1_in_one_bias_gradient_is_found(monkeypatch):
    """In the gradient of the last bias, which is a few numbers. (A bias before a batch norm has no gradient at all.)"""
    verify = importlib.import_module("hfnn.verify")
    run, calls, name = verify._run, [], ""

    def planted(*given):
        found = run(*given)
        calls.append(1)
        return {**found, name: found[name] * 1.1} if len(calls) % 3 == 1 else found  # only the converted version

    monkeypatch.setattr(verify, "_run", planted)
    for seed in range(0, NETWORKS, 10):
        model, x = drawn(seed)
        calls.clear()
        name = f"grad {[n for n, _ in model.named_parameters()][-1]}"
        found = hfnn.verify(model, x)
        assert [row.name for row in found.rows if not row.ok] == [name], str(found)
