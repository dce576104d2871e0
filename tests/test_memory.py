"""Counting what autograd keeps, and what a step needs at most."""

import pytest
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


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]


@pytest.mark.parametrize("device", DEVICES)
def test_the_peak_is_what_lives_at_once(device):
    x, size = torch.randn(1 << 16, device=device), 4 << 16

    def freed_in_between():
        y = x * 2  # with the next two, three are alive
        z = y + 1
        z = z.exp()
        del y
        z.add_(x)
        return z.view(2, -1).sum()  # and a scalar, when two are gone

    assert hfnn.memory.peak_bytes(freed_in_between, device) == 3 * size
    assert hfnn.memory.peak_bytes(lambda: [x.view(2, -1), x.add_(1)], device) == 0, "nothing of one's own"
    assert hfnn.memory.peak_bytes(lambda: (x.exp(), {"y": x.sin()}), device) == 2 * size, "the result counts"


@pytest.mark.parametrize("device", DEVICES)
def test_the_peak_sees_graphs_and_backward(device):
    x, size = torch.randn(1 << 16, device=device, requires_grad=True), 4 << 16

    def step():
        y = x.exp().sin().sum()  # keeps exp's output, which both nodes saved
        return torch.autograd.grad(y, x)

    peak = hfnn.memory.peak_bytes(step, device)
    assert 3 * size <= peak <= 4 * size + 4096
    assert hfnn.memory.peak_bytes(step, device) == peak, "a second time the same"


def test_an_error_leaves_no_count_behind():
    with pytest.raises(ZeroDivisionError):
        hfnn.memory.peak_bytes(lambda: torch.ones(3) / (1 // 0))
    assert hfnn.memory.peak_bytes(lambda: torch.ones(4)) == 16
