"""silu beyond the contract: both ends of its range, and the in-place call."""

import pytest
import torch

import hfnn
from hfnn.core.holder import target_of

from .kernels import KERNELS

HALF_ULP = {torch.bfloat16: 2**-8, torch.float16: 2**-11}  # relative to the value


def both(x, kernel):
    """(y, dx) of hfnn with one kernel, and of torch."""
    found = []
    for fn in (hfnn.functional.silu, torch.nn.functional.silu):
        x = x.detach().clone().requires_grad_()
        with hfnn.use(kernel):
            y = fn(x)
        found.append((y.detach(), *torch.autograd.grad(y.sum(), x)))
    return found


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_16_bit_number(dtype, kernel, device):
    """Element by element, tails included: nearest to the exact value, with NaN and infinity where torch has them."""
    x = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype).to(device)
    (y, dx), (y_torch, dx_torch) = both(x, kernel)
    for mine, torchs in ((y, y_torch), (dx, dx_torch)):
        assert torch.equal(mine.isnan(), torchs.isnan()) and torch.equal(mine.isinf(), torchs.isinf())
    exact = x.double() * torch.sigmoid(x.double())
    # Below -88.7 exp(-x) overflows, as in torch; subnormal numbers have fewer digits.
    normal = exact.isfinite() & (x > -88.7) & (exact.abs() >= torch.finfo(dtype).tiny)
    assert ((y.double() - exact).abs() <= 1.02 * HALF_ULP[dtype] * exact.abs())[normal].all()


@pytest.mark.parametrize("kernel", KERNELS)
def test_ends_in_float32(kernel, device):
    inf = float("inf")
    ends = torch.tensor([inf, -inf, float("nan"), 3e38, -3e38, 129.0, -129.0, 88.5, -88.5, 0.0, -0.0], device=device)
    for x in (ends, ends.repeat(512)):  # in a tail, and in whole vectors
        (y, dx), (y_torch, dx_torch) = both(x, kernel)
        torch.testing.assert_close(y, y_torch, rtol=2e-5, atol=0, equal_nan=True)
        torch.testing.assert_close(dx, dx_torch, rtol=2e-5, atol=0, equal_nan=True)


def test_in_place_is_torchs(device):
    """torch's own op runs, at any size: none of our kernels overwrites its input."""
    x = torch.randn(64, 64, device=device)
    want = torch.nn.functional.silu(x)
    leaf = x.clone().requires_grad_()
    inner = leaf * 1
    y = hfnn.functional.silu(inner, inplace=True, prefer="memory")
    assert y is inner and torch.equal(y, want) and y.grad_fn.name() == "SiluBackward0"
    m = hfnn.convert(torch.nn.SiLU(inplace=True), prefer="memory")
    assert target_of(m) is hfnn.SiLU and m(x) is x and torch.equal(x, want)
