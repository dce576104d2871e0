"""The networks of the fuzzer of captured models: their layers, what they return, and what they do besides."""

import random

from played_graphs import DEVICE
from torch import nn

WIDTH = 8
LAYERS = ("linear", "norm", "batch norm", "gelu", "relu", "dropout", "in place", "spectral norm")
RESULTS = ("tensor", "tuple", "dict", "object", "several used", "views")
HABITS = ("counts", "keeps", "random", "container")


class Result:
    """Like a library's own class of outputs."""

    def __init__(self, loss, hidden):
        self.loss, self.hidden, self.name = loss, hidden, "result"


class Net(nn.Module):
    """A sequence of layers; `scale` is a number and `more` a tensor, or None."""

    def __init__(self, program):
        super().__init__()
        self.layers = nn.ModuleList(_layer(kind, program) for kind in program["layers"])
        self.last = nn.Linear(WIDTH, WIDTH)
        self.returns, self.habit, self.calls, self.seen = program["returns"], program["habit"], 0, []
        self.gain = 1.0

    def forward(self, x, scale=1.0, more=None):
        for layer in self.layers:
            x = layer(x)
        y = self.last(x) * scale * self.gain
        if more is not None:
            y = y + more
        if self.habit == "counts":
            self.calls += 1
            y = y * (1 + self.calls)
        elif self.habit == "keeps":
            self.kept = y.detach()
        elif self.habit == "random" and random.random() < 0.5:
            y = y * 2
        elif self.habit == "container":
            self.seen.append(len(self.seen))
        loss = y.square().mean()
        if self.returns == "tensor":
            return y
        if self.returns == "tuple":
            return loss, (y, x.detach() * 1, None)
        if self.returns == "views":
            return loss, (y, y.detach().view(-1), x)
        return {"loss": loss, "y": y} if self.returns == "dict" else Result(loss, y)


def _layer(kind, program) -> nn.Module:
    if kind == "dropout":
        # On a GPU, hfnn's dropout draws other numbers in a graph.
        return nn.Dropout(0.0 if DEVICE == "cuda" and program["converted"] else 0.3)
    if kind == "spectral norm":  # reads a buffer that it writes
        return nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
    if kind in ("linear", "in place"):
        return (
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True))
            if kind == "in place"
            else nn.Linear(WIDTH, WIDTH)
        )
    return {"norm": nn.LayerNorm(WIDTH), "batch norm": nn.BatchNorm1d(WIDTH), "gelu": nn.GELU(), "relu": nn.ReLU()}[
        kind
    ]
