"""More defects of `convert_faults.py`: of attention whose queries see no key, or that a module writes out."""

import torch
from convert_faults import FAULTS as FAULTS
from convert_faults import _plant

from hfnn.adapters import masks
from hfnn.deferred import scored, scores
from hfnn.ops.attention import sdpa


def _with_backward(change):
    """Attention's backward with other arguments, of which 4 are the sums of rows and 8 the numbers."""
    return lambda backward: lambda *given: backward(*change(list(given)))


def _unseen(given):
    given[8] = given[8]._replace(uniform=False)
    return given


def _summed(given):
    given[4] = None if given[4] is None else torch.ones_like(given[4])
    return given


_plant("queries without keys give 0", masks.Mask, "arguments", lambda _: lambda self, hidden=None: dict(self._given))
_plant("no gradient of queries without keys", sdpa, "_gradients", _with_backward(_unseen))
_plant("an additive mask's sums forgotten", sdpa, "_gradients", _with_backward(_summed))
_plant("any dtype's smallest number absorbs scores", masks, "absorbs", lambda _: lambda dtype: True)
_plant(
    "queries before the first key see it",
    masks,
    "_visible",
    lambda visible: lambda padding, keys, offset, begin, end: visible(padding, keys, offset, begin, keys),
)
_plant("scores written through a view", scores.Scores, "is_shared", lambda _: lambda scores: False)
_plant("scores recorded in any state", scores.Node, "same_state", lambda _: lambda node: True)
_plant(
    "masks of the scores of another window",
    scored,
    "_split_one",
    lambda split: lambda mask, *others: split(mask.roll(1, -3), *others),
)
