"""Rows of activations that are written out: `x * torch.sigmoid(x)`, `F.relu(x) ** 2`, gelu by its formula."""

from hfnn.ops import OPS, smooth
from hfnn.patterns.row import Row


def activation(x, act):
    return act(x)


def _activation(prefer, x, act):
    name, *more = act
    options = {"approximate": more[0]} if more else {}
    return getattr(smooth, name)(x, **options, prefer=prefer)


_OPS = {name: OPS[name] for name in ("silu", "gelu", "sigmoid", "quick_gelu", "relu_squared")}
ROWS = (Row(activation, {"act": "formula"}, _activation, {**_OPS, "gelu_tanh": OPS["gelu"]}),)
