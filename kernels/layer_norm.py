"""Layer normalisation; csrc/layer_norm.h holds the contract, rows.py the kernels."""

from . import rows

MAX_COLS = rows.MAX_COLS
partials = rows.partials


def forward(x, weight, bias, y, mean, rstd, eps, queue):
    rows.forward(x, weight, bias, y, mean, rstd, eps, 0.0, True)


def rebuild(x, weight, bias, mean, rstd, y, queue):
    rows.rebuild(x, weight, bias, mean, rstd, y, 0.0, True)


def backward(dy, x, weight, mean, rstd, dx, dweight, dbias, partials, queue):
    rows.backward(dy, x, weight, mean, rstd, dx, dweight, dbias, partials, 0.0, True)
