"""Rows of one function: activations written out (`x * torch.sigmoid(x)`, `F.relu(x) ** 2`, gelu by its formula). Where
another row is found, also the functions that the forward calls."""

from hfnn.ops import OPS, dropout, group_norm, layer_norm, smooth
from hfnn.patterns.row import Row


def activation(x, act):
    return act(x)


def function(x, f):
    return f(x)


_FUNCTIONS = {name: getattr(smooth, name) for name in ("silu", "gelu", "sigmoid", "tanh", "quick_gelu", "relu_squared")}
_FUNCTIONS |= {
    "dropout": dropout.dropout, "layer_norm": layer_norm.layer_norm, "group_norm": group_norm.group_norm
}  # fmt: skip


def _called(prefer, x, f):
    name, *more = f
    if name == "gelu":
        return smooth.gelu(x, approximate=more[0], prefer=prefer)
    return _FUNCTIONS[name](x, *more, prefer=prefer)


_OPS = {name: OPS[name] for name in _FUNCTIONS}
ROWS = (
    Row(activation, {"act": "formula"}, _called, {**_OPS, "gelu_tanh": OPS["gelu"]}),
    # Alone, it is routed (routed.py).
    Row(function, {"f": "function"}, _called, _OPS, lambda site: () if site.f in _OPS else None, alone=False),
)
