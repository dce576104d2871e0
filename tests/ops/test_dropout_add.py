"""dropout_add alone: its mask, and gradients of two dtypes."""

import pytest
import torch

import hfnn

F = hfnn.functional
F32, BF16 = torch.float32, torch.bfloat16


def test_mixed_gradients_keep_the_mask(device):
    """A low-precision input with a float32 residual: its gradient is in low precision, and masked."""
    x = torch.ones(64, 1024, dtype=BF16, device=device, requires_grad=True)
    residual = torch.zeros(64, 1024, device=device, requires_grad=True)
    y = F.dropout_add(x, residual, 0.25, prefer="memory")
    dy = torch.randn_like(y)
    dx, dresidual = torch.autograd.grad(y, (x, residual), dy)
    assert dx.dtype is BF16 and dresidual.dtype is F32 and torch.equal(dresidual, dy)
    assert torch.equal(dx, torch.where(y != 0, dy * torch.tensor(1 / 0.75), 0).to(BF16))
    (dx,) = torch.autograd.grad(F.dropout_add(x, residual, 0.25, prefer="memory"), x, dy, create_graph=True)
    assert dx.requires_grad is False and dx.dtype is BF16  # linear in x: nothing to differentiate again


@pytest.mark.parametrize("create_graph", [False, True])
def test_the_mask_goes_by_the_result_not_by_its_gradient(create_graph, device):
    x, residual = (torch.randn(64, 96, device=device, requires_grad=True) for _ in range(2))
    y = F.dropout_add(x, residual, 0.5, prefer="memory")
    dy = torch.randn(96, 64, device=device).t()
    (dx,) = torch.autograd.grad(y, x, dy, create_graph=create_graph)
    assert torch.equal(dx, torch.where(y != residual, 2 * dy, 0))
