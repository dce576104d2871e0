"""Activations written as formulas, between two maps.

The unit is a tensor (rows, INNER). Stock keeps x (a quarter), what each operation of the formula needs, and the result,
which the second map keeps. The target is x and the first map's result.
"""

import math

import torch
from program import Program
from torch import nn
from torch.nn import functional as F

ROWS, WIDTH, INNER = (4, 256), 256, 1024
UNIT = 4 * 4 * 256 * INNER


class Network(nn.Module):
    def __init__(self, bias=True):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(WIDTH, INNER, bias), nn.Linear(INNER, WIDTH, bias)
        self.drop = nn.Dropout(0.0)  # in training, of another mask on a GPU


def swish(x):
    return x * torch.sigmoid(x)


def new_gelu(x):
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


class Swish(Network):
    def forward(self, x):
        return self.fc2(swish(self.fc1(x)))


class SwishMethods(Network):
    def forward(self, x):
        hidden = self.fc1(x)
        hidden = hidden.sigmoid().mul(hidden)
        return self.fc2(hidden) + x


class SwishDropped(Network):
    def forward(self, x):
        return self.fc2(self.drop(swish(self.fc1(x))))


class SwishRows(Network):
    """In rows, without biases."""

    def __init__(self):
        super().__init__(bias=False)

    def forward(self, x):
        h = self.fc1(x.flatten(0, 1))
        return self.fc2(torch.sigmoid(h) * h)


class Gelu(Network):
    def forward(self, x):
        x = self.fc1(x)
        return self.fc2(x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0))))


class GeluHalves(Network):
    def forward(self, inputs):
        h = self.fc1(inputs)
        cdf = (torch.erf(h * 2**-0.5) + 1) / 2
        return self.fc2(cdf * h)


class GeluTanh(Network):
    def forward(self, x):
        return self.fc2(new_gelu(self.fc1(x)))


class GeluTanhMethod(Network):
    """As a method, with another order of operations."""

    def act(self, t):
        inner = 0.7978845608028654 * t * (1 + 0.044715 * t * t)
        return t * (inner.tanh() + 1) * 0.5

    def forward(self, x):
        return self.fc2(self.act(self.fc1(x)))


class QuickGelu(Network):
    def forward(self, x):
        x = self.fc1(x)
        return self.fc2(x * torch.sigmoid(1.702 * x))


class Squared(Network):
    def forward(self, x):
        return self.fc2(F.relu(self.fc1(x)).square())


class SquaredPower(Network):
    def forward(self, x):
        return self.fc2(torch.relu(self.fc1(x)) ** 2)


class SquaredProduct(Network):
    def forward(self, x):
        k = self.fc1(x).relu()
        return self.fc2(k * k)


class OtherScale(Network):
    def forward(self, x):
        x = self.fc1(x)
        return self.fc2(x * torch.sigmoid(1.5 * x))


class Cubed(Network):
    def forward(self, x):
        return self.fc2(self.fc1(x).relu() ** 3)


class OtherArgument(Network):
    def forward(self, x):
        x = self.fc1(x)
        return self.fc2(x * 0.5 * (1.0 + torch.erf(x)))


class Shifted(Network):
    def forward(self, x):
        x = self.fc1(x)
        return self.fc2(x * torch.sigmoid(x + 1e-3))


class Overflowing(Network):
    """Its gradient is NaN where exp(-x) overflows, which that of silu is not."""

    def forward(self, x):
        x = self.fc1(x)
        return self.fc2(x / (1 + torch.exp(-x)))


# (the activation, stock's units)
FOUND = {
    Swish: ("silu", 3.25), SwishMethods: ("silu", 3.25), SwishDropped: ("silu", 3.25), SwishRows: ("silu", 3.25),
    Gelu: ("gelu", 4.25), GeluHalves: ("gelu", 4.25), GeluTanh: ("gelu", 5.25), GeluTanhMethod: ("gelu", 7.25),
    QuickGelu: ("quick_gelu", 3.25), Squared: ("relu_squared", 2.25), SquaredPower: ("relu_squared", 2.25),
    SquaredProduct: ("relu_squared", 2.25),
}  # fmt: skip
MISSES = {
    OtherScale: ("silu", 3.25), Cubed: ("relu_squared", 2.25), OtherArgument: ("gelu", 4.25), Shifted: ("silu", 3.25),
    Overflowing: ("silu", 4.25),
}  # fmt: skip


def draw():
    return (torch.randn(*ROWS, WIDTH),)


PROGRAMS = [
    Program(
        name=of.__name__, op=op, build=of, inputs=draw, stock=stock * UNIT, target=1.25 * UNIT if of in FOUND else None
    )
    for of, (op, stock) in {**FOUND, **MISSES}.items()
]  # fmt: skip
