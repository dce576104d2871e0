"""Rows of residual connections: dropout, sum and layer norm behind a map."""

from hfnn.ops import add_norm, dropout_add
from hfnn.ops.layout import in_rows
from hfnn.patterns.row import Row, call, dropout


def residual_sum(x, residual, drop):
    return drop(x) + residual


def _residual_sum(prefer, x, residual, drop):
    if not (in_rows(x) and in_rows(residual)):  # otherwise the sum has the strides of x
        return call(drop, x) + residual
    return dropout_add.dropout_add(x, residual, *dropout(drop), prefer=prefer)


def residual_norm(x, residual, drop, norm):
    return norm(drop(x) + residual)


def _residual_norm(prefer, x, residual, drop, norm):
    if not (in_rows(x) and in_rows(residual)):
        return call(norm, call(drop, x) + residual)
    how = norm[1:] if isinstance(norm, tuple) else (norm.normalized_shape, norm.weight, norm.bias, norm.eps)
    p, training = dropout(drop)
    return add_norm.add_layer_norm(x, residual, *how, p=p, training=training, prefer=prefer)[0]


def _of_map(site):
    return () if site.producer("x") else None


ROWS = (
    Row(residual_norm, {"drop": "dropout", "norm": "layer_norm"}, _residual_norm, add_norm.LAYER, _of_map),
    Row(residual_sum, {"drop": "dropout"}, _residual_sum, dropout_add.OP, _of_map),
)
