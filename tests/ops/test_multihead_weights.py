"""The weights that hfnn.MultiheadAttention returns are torch's."""

import copy

import pytest
import torch
from torch import nn

import hfnn
from hfnn.ops.attention import multihead

E, H, B, T = 24, 4, 3, 5


@pytest.fixture
def counted(monkeypatch):
    """Counts how often hfnn's own path was taken."""
    calls, attend = [], multihead._attend
    monkeypatch.setattr(multihead, "_attend", lambda *args: calls.append(1) or attend(*args))
    return calls


def pair(batch_first=True, dropout=0.0):
    theirs = nn.MultiheadAttention(E, H, dropout, batch_first=batch_first)
    return theirs, hfnn.convert(copy.deepcopy(theirs), prefer="memory")


def run(module, given, how):
    torch.manual_seed(5)
    return module(*given, **how)


@pytest.mark.parametrize("batch_first", [True, False, None])
@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_weights(batch_first, average, training, counted):
    """Bitwise equal. batch_first None: without a batch."""
    theirs, ours = (m.train(training) for m in pair(bool(batch_first), dropout=0.2))
    x = torch.randn({True: (B, T, E), False: (T, B, E), None: (T, E)}[batch_first])
    blocked = torch.rand(T, T).triu(1) > 0.4
    padded = torch.arange(T) >= torch.tensor([[T], [2], [3]])
    for mask, padding, hint in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (1, 1, 0), (1, 1, 1), (1, 0, 1)):
        how = {"average_attn_weights": average, "is_causal": bool(hint), "attn_mask": blocked if mask else None}
        how["key_padding_mask"] = (padded[1] if batch_first is None else padded) if padding else None
        want, got = (run(module, [x] * 3, how) for module in (theirs, ours))
        assert all(map(torch.equal, want, got))
    assert not counted
