"""Counting what autograd keeps."""

import torch

import hfnn


def test_unique_storages_by_op():
    x = torch.randn(4, 8, requires_grad=True)
    weight = torch.nn.Parameter(torch.randn(8, 8))
    # Both products keep x's one storage; the weight is a parameter; exp keeps its own output.
    saved = hfnn.memory.saved_bytes(lambda: ((x @ weight) + (x.view(4, 8) @ weight)).exp())
    assert saved.total == 2 * 4 * 8 * 4
    assert saved.by_op == {"Exp": 4 * 8 * 4, "Mm": 4 * 8 * 4}
    assert str(saved).splitlines()[0].split() == ["256", "bytes", "kept", "for", "backward"]


def test_views_pin_their_whole_storage():
    x = torch.randn(4, 8, requires_grad=True)
    assert hfnn.memory.saved_bytes(lambda: (x * 2)[:, :4].exp().log()).total == 4 * 4 * 4
    assert hfnn.memory.saved_bytes(lambda: [(x * 2).chunk(2, 1)[0].sin()]).total == 4 * 8 * 4


def test_nothing_without_grad():
    assert hfnn.memory.saved_bytes(lambda: torch.randn(3).exp()).total == 0


def test_custom_functions_are_seen():
    x = torch.randn(64, 32, requires_grad=True)
    saved = hfnn.memory.saved_bytes(lambda: {"y": hfnn.functional.layer_norm(x, (32,), prefer="memory")})
    assert saved.by_op == {"LayerNorm": 64 * 32 * 4 + 2 * 64 * 4}
