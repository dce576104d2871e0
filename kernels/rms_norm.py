"""Root-mean-square normalisation; csrc/rms_norm.h has the contract, rows.py the kernels."""

from . import add_norm, rows

MAX_COLS = rows.MAX_COLS
partials = rows.partials


def forward(x, weight, y, rstd, eps, offset, queue):
    rows.forward(x, weight, None, y, None, rstd, eps, offset, False)


def rebuild(x, weight, rstd, y, offset, queue):
    rows.rebuild(x, weight, None, None, rstd, y, offset, False)


def backward(dy, x, weight, rstd, dx, dweight, partials, offset, queue):
    rows.backward(dy, x, weight, None, rstd, dx, dweight, None, partials, offset, False)


def add(x, residual, sum, weight, y, rstd, eps, weight_offset, threshold, scale, seed, offset, pair, queue):
    """The norm of a sum with dropout: csrc/add_norm.h."""
    drop = threshold, scale, seed, offset, pair
    add_norm.add(x, residual, sum, weight, None, y, None, rstd, eps, weight_offset, False, *drop)
