"""Rows of residual connections: dropout, sum, layer norm and a learned scale behind a map."""

import torch

from hfnn.core.context import autocasting
from hfnn.ops import add_norm, dropout_add, linear
from hfnn.ops.layout import in_rows
from hfnn.patterns.row import Row, added, call, dropout


def residual_sum(x, residual, drop):
    return drop(x) + residual


def _residual_sum(prefer, x, residual, drop, first):
    if x.shape != residual.shape or not (in_rows(x) and in_rows(residual)):
        return added(call(drop, x), residual, first)
    return dropout_add.dropout_add(x, residual, *dropout(drop), prefer=prefer)


def residual_norm(x, residual, drop, norm):
    return norm(drop(x) + residual)


def _residual_norm(prefer, x, residual, drop, norm, first):
    if x.shape != residual.shape or not (in_rows(x) and in_rows(residual)):
        return call(norm, added(call(drop, x), residual, first))
    how = norm[1:] if isinstance(norm, tuple) else (norm.normalized_shape, norm.weight, norm.bias, norm.eps)
    p, training = dropout(drop)
    return add_norm.add_layer_norm(x, residual, *how, p=p, training=training, prefer=prefer)[0]


def _of_map(site):
    return (site.is_first("residual"),) if site.producer("x") else None


def scaled_map(x, scale, proj):
    return proj(x) * scale


def _of_columns(site):
    """The scale is a parameter of the module, with one number for each of the map's results."""
    node, proj = site.bound["scale"], site.inner[-1]
    fits = node.op == "get_attr" and node.meta["shape"] == (proj.meta["kind"].outputs,)
    return () if fits else None


def _scaled_map(prefer, x, scale, proj):
    """The map with a scaled weight, which keeps no result for the gradient of scale."""
    rows = x.numel() // x.shape[-1] if x.dim() and x.numel() else 0
    if (
        rows < MORE_ROWS * x.shape[-1] or prefer == "speed" or autocasting(x)
        or not x.dtype is proj.weight.dtype is scale.dtype or x.dtype is torch.float16  # whose range is too small
        or not (scale.requires_grad and proj.weight.requires_grad)
    ):  # fmt: skip
        return proj(x) * scale
    bias = None if proj.bias is None else proj.bias * scale
    return linear.linear(x, proj.weight * scale[:, None], bias, prefer=prefer)


MORE_ROWS = 4  # times as many rows as columns, so that the scaled weight is small
ROWS = (
    Row(scaled_map, {"proj": "map"}, _scaled_map, linear.OP, _of_columns),
    Row(residual_norm, {"drop": "dropout", "norm": "layer_norm"}, _residual_norm, add_norm.LAYER, _of_map),
    Row(residual_sum, {"drop": "dropout"}, _residual_sum, dropout_add.OP, _of_map),
)
