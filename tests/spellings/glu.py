"""Gated linear units along the channels of convolutions.

The unit is a tensor (BATCH, WIDTH, LENGTH). Stock keeps x, the input of glu (two units) and its result; the target is x
and the input, from which backward computes the result.
"""

import torch
from program import Program
from torch import nn
from torch.nn import functional as F

BATCH, WIDTH, LENGTH = 16, 64, 512
UNIT = 4 * BATCH * WIDTH * LENGTH


class Layers(nn.Sequential):
    def __init__(self, dim=1):
        super().__init__(nn.Conv1d(WIDTH, 2 * WIDTH, 1), nn.GLU(dim), nn.Conv1d(WIDTH, WIDTH, 3, padding=1))


class FromTheEnd(Layers):
    def __init__(self):
        super().__init__(-2)


class Function(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv1d(WIDTH, 2 * WIDTH, 1), nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x):
        return self.second(F.glu(self.first(x), dim=1))


class Upwards(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Conv1d(WIDTH, 2 * WIDTH, 1), nn.GLU(1), nn.ConvTranspose1d(WIDTH, WIDTH // 2, 4, 2))


class Images(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Conv2d(WIDTH, 2 * WIDTH, 1), nn.GLU(1), nn.Conv2d(WIDTH, WIDTH, 3, padding=1))


def program(of, *shape):
    inputs = lambda: (torch.randn(BATCH, WIDTH, *(shape or (LENGTH,))),)  # noqa: E731
    op = "glu" if of is Function else "GLU"
    return Program(name=of.__name__, build=of, inputs=inputs, op=op, stock=4 * UNIT, target=3 * UNIT)


PROGRAMS = [program(of) for of in (Layers, FromTheEnd, Function, Upwards)] + [program(Images, 16, 32)]
