"""dropout's random draw."""

import math

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import hfnn
from hfnn.core.kernel import _interpreting

KERNELS = ("cuda", "triton") if torch.cuda.is_available() else ("cpp", "triton") if _interpreting() else ("cpp",)


def dropout(x, p=0.5, **kwargs):
    return hfnn.functional.dropout(x, p, prefer="memory", **kwargs)


@pytest.mark.parametrize("p", [0.1, 0.5, 1 / 3, 0.999])
def test_p_is_exact(p, device):
    """The kept share is within five standard deviations of 1 - p, and kept values are scaled by 1 / (1 - p)."""
    x = torch.ones(1 << 20, device=device)
    y = dropout(x, p)
    kept = (y != 0).double().mean().item()
    assert abs(kept - (1 - p)) < 5 * math.sqrt(p * (1 - p) / x.numel())
    assert torch.equal(y[y != 0], torch.full_like(y[y != 0], 1 / (1 - p)))


def test_draws_follow_torchs_generator(device):
    x = torch.ones(4096, device=device)
    torch.manual_seed(5)
    first, second = dropout(x), dropout(x)
    assert not torch.equal(first, second)
    torch.manual_seed(5)
    assert torch.equal(dropout(x), first) and torch.equal(dropout(x), second)


def test_neighbouring_draws_share_no_words(device):
    """Two draws of the same length agree only by chance."""
    x = torch.ones(1 << 16, device=device)
    a, b = dropout(x) != 0, dropout(x) != 0
    assert abs((a == b).double().mean().item() - 0.5) < 0.02
    assert abs((a[4:] == b[:-4]).double().mean().item() - 0.5) < 0.02


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_draw_the_same_mask(reentrant, device):
    x = torch.ones(4096, device=device, requires_grad=True)
    y = checkpoint(lambda x: dropout(x) * x, x, use_reentrant=reentrant)
    y.sum().backward()
    assert torch.equal(x.grad != 0, y != 0)


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_kernel_gives_the_same_mask(kernel, device):
    """One mask for each (seed, offset): 7 elements past a multiple of 4, seeds beyond 32 bits."""
    from hfnn.ops import dropout as room

    x = torch.ones(1031, device=device)
    masks = []
    for seed, offset in ((1 << 40 | 77, 12), (-5, 1 << 33)):
        for name in (kernel, "cpp"):
            found = next(k for k in room.OP.kernels if k.name == name)
            at = x.cpu() if name == "cpp" else x
            y = torch.empty_like(at)
            found.forward(at, y, round(0.3 * 2**32), 1 / 0.7, seed, offset, None, found.queue(at))
            masks.append(y.cpu() != 0)
    assert torch.equal(masks[0], masks[1]) and torch.equal(masks[2], masks[3]) and not torch.equal(masks[0], masks[2])


def test_eval_and_limits(device):
    x = torch.randn(64, device=device)
    assert dropout(x, training=False) is x or torch.equal(dropout(x, training=False), x)
    assert torch.equal(dropout(x, 0.0), x) and not dropout(x, 1.0).any()
    for p in (-0.1, 1.1):
        with pytest.raises(ValueError, match="dropout probability"):
            dropout(x, p)
    y = x.clone()
    assert dropout(y, inplace=True) is y and not torch.equal(x, y)


def test_p_may_be_a_tensor():
    x = torch.ones(64, 64)
    for function in (torch.nn.functional.dropout, hfnn.functional.dropout):
        options = {} if function is torch.nn.functional.dropout else {"prefer": "memory"}
        y = function(x.clone().requires_grad_(), torch.tensor(0.25), True, **options)
        assert set(y.unique().tolist()) == {0, torch.tensor(1 / 0.75).item()}
        assert torch.equal(torch.autograd.grad(y.sum(), y.grad_fn.next_functions[0][0].variable)[0], y)
