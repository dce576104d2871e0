"""Tensors without values: conversion, and the bytes of a step, under FakeTensorMode and on "meta"."""

import torch
from torch import nn
from torch._subclasses import FakeTensorMode

import hfnn


def own_classes():
    """A model of classes that no proof has seen yet."""

    class Norm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(64))

        def forward(self, x):
            return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6))

    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.up, self.down = nn.Linear(64, 128), nn.Linear(64, 128), nn.Linear(128, 64)

        def forward(self, x):
            return self.down(nn.functional.silu(self.gate(x)) * self.up(x))

    return nn.Sequential(Norm(), Gated())


# ---- conversion


def test_swaps_are_those_of_a_real_model():
    def swaps(model):
        return {row.name: row.to for row in hfnn.report(hfnn.convert(model, recompute="gemm")).rows}

    with FakeTensorMode():
        found = swaps(own_classes())
    assert found == swaps(own_classes()) and sum(to is not None for to in found.values()) >= 5
