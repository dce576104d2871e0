"""Rewritten forwards where sizes, layouts or ranges decide: results, errors and strides are stock's."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hfnn

D = 16


def turned(x):
    """The same values, with the first two dimensions the other way round in memory."""
    return x.transpose(0, 1).contiguous().transpose(0, 1)


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last, self.drop = nn.Linear(D, D), nn.Linear(D, D), nn.Dropout(0.0)


class AsksRank(Base):
    def forward(self, x):
        x = x.unsqueeze(0) if x.dim() == 1 else x
        return self.last(F.silu(self.first(x)) * self.first(x))


class AsksSize(Base):
    def forward(self, x):
        h = self.first(x) * (2 if x.shape[0] * 2 == 14 else 1)
        return self.last(h * torch.sigmoid(h))


class AsksLength(Base):
    def forward(self, x):
        h = self.first(x) * (2 if len(x.shape) == 5 else 1)
        return self.last(h * torch.sigmoid(h))


class LooksUpSize(Base):
    def forward(self, x):
        h = self.first(x) * {7: 2}.get(x.shape[0], 1)
        return self.last(h * torch.sigmoid(h))


class UsesSize(Base):
    def forward(self, x, r):
        return self.drop(self.first(x)) + r / r.shape[-1]


class AsksRankBeforeNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.act = nn.BatchNorm1d(D), nn.ReLU()

    def forward(self, x):
        return self.act(self.norm(x.unsqueeze(-1) if x.dim() == 2 else x))


class ResidualFirst(Base):
    def forward(self, x, r):
        return r + self.drop(self.first(x))


class ImageFirst(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.act = nn.Conv2d(D, D, 1, bias=False), nn.BatchNorm2d(D), nn.ReLU()

    def forward(self, x, r):
        return self.act(r + self.norm(self.conv(x)))


class FactorFirst(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(8, D)

    def forward(self, x, c):
        return (1 + self.embed(c).unsqueeze(1)) * F.normalize(x, dim=-1)


class UnitWithoutLimit(nn.Module):
    def __init__(self):
        super().__init__()
        self.g = nn.Parameter(torch.randn(D))

    def forward(self, x):
        return F.normalize(x, dim=-1, eps=0.0) * self.g


class Exp(Base):
    def forward(self, x):
        h = F.layer_norm(x, (D,), self.first.bias * 1, None)
        return self.last(h / (1 + torch.exp(-h)))


class LayerScale(Base):
    def __init__(self):
        super().__init__()
        self.gamma = nn.Parameter(torch.full((D,), 1e-6))

    def forward(self, x):
        return self.gamma * self.last(torch.relu(self.first(x)))


R = torch.randn
IMAGES = R(4, D, 5, 6), R(4, D, 5, 6).to(memory_format=torch.channels_last)
CASES = {
    AsksRank: [(R(D),), (R(3, D),), (R(2, 3, D),)],
    AsksSize: [(R(7, D),), (R(6, D),)],
    AsksLength: [(R(1, 2, 3, 4, D),), (R(6, D),)],
    LooksUpSize: [(R(7, D),), (R(6, D),)],
    UsesSize: [(R(3, D), R(3, D)), (R(3, D), R(3, 1)), (R(3, D), R(1))],
    AsksRankBeforeNorm: [(R(5, D, 4),), (R(5, D),)],
    ResidualFirst: [(R(3, 5, D), turned(R(3, 5, D))), (R(3, 5, D), R(3, 1, D)), (R(3, 5, D), R(3, 4, D))],
    ImageFirst: [IMAGES, IMAGES[::-1], (IMAGES[0], R(4, D, 5, 5))],
    FactorFirst: [(turned(R(6, 5, D)), R(6, 8)), (turned(R(6, 5, D)), R(1, 8)), (R(6, 5, D), R(3, 8))],
    UnitWithoutLimit: [(torch.cat([torch.zeros(1, D), R(5, D)]),), (torch.cat([torch.zeros(1, D), R(5, D)]).half(),)],
    Exp: [(R(5, D),)],
    LayerScale: [(R(99, D).half(),)],
}
FACTORS = {Exp: 500.0}  # of the parameters


def results(module, inputs):
    leaves = [x.detach().requires_grad_() for x in inputs]
    try:
        y = module(*leaves)
    except RuntimeError as error:
        return str(error)
    dy = torch.ones_like(y) * torch.arange(y.shape[-1]).to(y)
    return [y, *torch.autograd.grad(y, [*leaves, *module.parameters()], dy, allow_unused=True)]


@pytest.mark.parametrize("make", CASES)
def test_results_are_stocks(make):
    torch.manual_seed(0)
    stock = make()
    ours = hfnn.convert(copy.deepcopy(stock), prefer="memory")
    for module in (stock, ours):
        [p.data.mul_(FACTORS.get(make, 1.0)) for p in module.parameters()]
    for inputs in CASES[make]:
        for module in (stock, ours) if make is LayerScale else ():
            module.half()
        want, got = results(stock, inputs), results(ours, inputs)
        assert isinstance(want, str) == isinstance(got, str)
        if isinstance(want, str):
            assert got == want
            continue
        for a, b in zip(got, want, strict=True):
            if b is None:
                assert a is None
                continue
            assert a.shape == b.shape and a.stride() == b.stride()
            within = 1e-5 if b.dtype is torch.float32 else 1e-2
            torch.testing.assert_close(
                a, b, rtol=within, atol=within * float(b.detach().nan_to_num().abs().max()), equal_nan=True
            )


def test_a_frozen_map_is_not_multiplied_by_its_scale():
    """The gradient of the scale alone needs no product of matrices."""
    module = LayerScale()
    ours = hfnn.convert(module, prefer="memory")
    ours.last.weight.requires_grad_(False)
    y = ours(R(99, D))
    assert "Linear" not in type(y.grad_fn).__name__ and "Addmm" not in type(y.grad_fn).__name__
