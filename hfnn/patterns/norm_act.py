"""Rows of convolutional networks: a batch norm, a sum, an activation."""

import functools

import torch

from hfnn.core.context import is_bare, is_plain
from hfnn.ops import batch_norm, cat
from hfnn.ops.batch_norm import ACTIVATIONS, PIECEWISE
from hfnn.patterns.kinds import ACTIVATIONS_OF, BATCH_NORMS
from hfnn.patterns.row import Row, added, call


def norm_act(x, norm, act):
    return act(norm(x))


def norm_sum_act(x, residual, norm, act):
    return act(norm(x) + residual)


def norm_sum_in_place_act(x, residual, norm, act):
    y = norm(x)
    y += residual
    return act(y)


def _norm_act(prefer, x, norm, act):
    return _norm_sum_act(prefer, x, None, norm, act)


def _norm_sum_act(prefer, x, residual, norm, act, first=False, inplace=False):
    """act(norm(x) + residual), by one kernel if possible and nothing observes the parts."""
    own = isinstance(act, tuple)
    name = act[0] if own else ACTIVATIONS_OF.get(type(act))
    fits = residual is None or (
        residual.shape == x.shape and residual.dtype is x.dtype and name in ACTIVATIONS[: PIECEWISE + 1]
        and (not first or residual.stride() == x.stride())
    )  # fmt: skip
    if (
        fits and name is not None and type(norm) in BATCH_NORMS and is_bare(norm) and is_plain(x)
        and (own or is_bare(act))
    ):  # fmt: skip
        norm._check_input_dim(x)
        of_x = batch_norm.arguments(norm)  # also counts a batch
        slope = 0.01 if name != "leaky_relu" else act[1] if own else act.negative_slope
        y = batch_norm.fused(x, *of_x, residual, name, slope, prefer)
        if y is not None:
            return y
        y = batch_norm.batch_norm(x, *of_x, prefer=prefer)
    else:
        y = norm(x)
    if inplace:
        y += residual
    elif residual is not None:
        y = added(y, residual, first)
    return call(act, y)


def _piecewise(site):
    return () if site.f in ACTIVATIONS[: PIECEWISE + 1] else None


def _ordered(site):
    return None if _piecewise(site) is None else (site.is_first("residual"),)


_row = functools.partial(Row, parts={"norm": "batch_norm", "act": "act"}, op=batch_norm.ACT, whole=False)
_in_place = functools.partial(_norm_sum_act, inplace=True)
ROWS = (
    _row(norm_sum_act, compute=_norm_sum_act, more=_ordered),
    _row(norm_sum_in_place_act, compute=_in_place, more=_piecewise),
    _row(norm_act, compute=_norm_act),
)


class Cat:
    """torch.cat in a graph with batch norms, as a row of any number of values."""

    def compute(prefer, tensors, dim):
        return cat.cat(tensors, dim, prefer=prefer)

    def by_parts(prefer, tensors, dim):
        return torch.cat(tensors, dim)

    def stands(prefer, tensors, dim):
        """Stands for them in a source."""

    stands.__name__, stands.__module__ = "cat", "hfnn"
