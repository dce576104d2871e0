"""Layer normalisation; csrc/layer_norm.h has the contract, rows.py the kernels."""

from . import add_norm, rows

MAX_COLS = rows.MAX_COLS
partials = rows.partials


def forward(x, weight, bias, y, mean, rstd, eps, queue):
    rows.forward(x, weight, bias, y, mean, rstd, eps, 0.0, True)


def rebuild(x, weight, bias, mean, rstd, y, queue):
    rows.rebuild(x, weight, bias, mean, rstd, y, 0.0, True)


def backward(dy, x, weight, mean, rstd, dx, dweight, dbias, partials, queue):
    rows.backward(dy, x, weight, mean, rstd, dx, dweight, dbias, partials, 0.0, True)


def add(x, residual, sum, weight, bias, y, mean, rstd, eps, threshold, scale, seed, offset, pair, queue):
    """The norm of a sum with dropout: csrc/add_norm.h."""
    drop = threshold, scale, seed, offset, pair
    add_norm.add(x, residual, sum, weight, bias, y, mean, rstd, eps, 0.0, True, *drop)
