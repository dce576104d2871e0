"""Converted look-alikes in calls of every kind: by name, in float64, under autocast, under torch's modes."""

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import hfnn

from .test_lookalike import BareNorm, GemmaNorm, LlamaNorm, SlowGELU, T5Norm


def test_called_in_another_way():
    m, x = hfnn.convert(BareNorm(), prefer="memory"), torch.randn(3, 32, requires_grad=True)
    y = m(x)
    assert hfnn.recipe.take(y) is not None
    assert hfnn.recipe.take(m(hidden_states=x)) is None
    torch.testing.assert_close(m(hidden_states=x), y)
    torch.testing.assert_close(m(x, 2.0), 2 * y)


def test_eps_is_read_when_called():
    m, x = hfnn.convert(LlamaNorm(), prefer="memory"), torch.randn(3, 32) * 1e-3
    before = m(x)
    m.eps = 1.0
    assert m(x).norm() < before.norm() / 100


def test_in_float64_the_authors_own_code_runs():
    """Most round to float32 on the way, which float64 shows."""
    m, x = LlamaNorm().double(), torch.randn(3, 32, dtype=torch.float64)
    theirs = m(x)
    assert torch.equal(hfnn.convert(m, prefer="memory")(x), theirs)


def test_autocast():
    """Under autocast, too, the dtype is the author's; the author's code is queried."""
    for make in (LlamaNorm, T5Norm, GemmaNorm, SlowGELU):
        m = make()
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.randn(3, 32, dtype=dtype, requires_grad=True)
            with torch.autocast("cpu", torch.bfloat16):
                wanted = hfnn.revert(m)(x).dtype
                assert hfnn.convert(m, prefer="memory")(x).dtype is wanted


def test_wider_gelu():
    """A GELU that returns float32 for bfloat16 keeps the bfloat16. CUDA's autocast of `pow` makes such GELUs."""

    class WideGELU(nn.Module):
        def forward(self, x):
            return nn.functional.gelu(x.float())

    x = torch.randn(4, 32, dtype=torch.bfloat16, requires_grad=True)
    m = WideGELU()
    wanted = m(x)
    (dx,) = torch.autograd.grad(wanted.sum(), x)
    saved, model = [], hfnn.convert(m, prefer="memory")
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.data_ptr()) or t, lambda t: t):
        y = model(x)
        assert hfnn.recipe.take(y) is not None
    assert y.dtype is torch.float32 and saved == [x.data_ptr()]
    torch.testing.assert_close(y, wanted)
    (found,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(found, dx)


def test_modes_around_the_call():
    m, x = hfnn.convert(LlamaNorm(), prefer="memory"), torch.randn(3, 32)
    wanted = m(x)
    torch.testing.assert_close(torch.vmap(m)(x), wanted)
    tangent = torch.func.jvp(m, (x,), (x,))[1]
    assert tangent.shape == x.shape
    compiled = torch.compile(m, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), wanted)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert hfnn.convert(LlamaNorm(), prefer="memory")(torch.randn(3, 32)).shape == (3, 32)
