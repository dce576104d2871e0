"""Gated feed-forward networks.

The unit is a tensor (rows, INNER). Stock keeps x (half a unit), gate, act(gate), up and their product; the target is
x, gate and up, from which backward computes the others.
"""

import torch
from program import Program
from torch import nn
from torch.nn import functional as F

ROWS, WIDTH, INNER = (4, 256), 256, 512
UNIT = 4 * 4 * 256 * INNER


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w2, self.w3 = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH), nn.Linear(WIDTH, INNER)


class Llama(Gated):
    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Formula(Gated):
    def forward(self, x):
        gate, up = self.w1(x), self.w3(x)
        return self.w2(up * gate * torch.sigmoid(gate))


class Halves(nn.Module):
    def __init__(self):
        super().__init__()
        self.both, self.last = nn.Linear(WIDTH, 2 * INNER, bias=False), nn.Linear(INNER, WIDTH)

    def forward(self, x):
        up, gate = self.both(x).chunk(2, dim=-1)
        return self.last(up.mul(F.silu(gate)))


class Scaled(Gated):
    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x) * (2 if len(x) > 3 else 1))


def program(of, target=2.5, stock=4.5):
    target = target and target * UNIT
    inputs = lambda: (torch.randn(*ROWS, WIDTH),)  # noqa: E731
    return Program(name=of.__name__, build=of, inputs=inputs, op="swiglu", stock=stock * UNIT, target=target)


PROGRAMS = [program(Llama), program(Formula, stock=5.5), program(Halves), program(Scaled, None)]
