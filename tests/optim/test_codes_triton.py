"""Codes of 8 and 4 bits as Triton's kernels choose and read them, against reference_step.py."""

import importlib
import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from . import reference_step as reference  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
F64 = torch.float64
formats = importlib.import_module("hfnn.kernels.optim_formats")


@triton.jit
def recode(x_N, code_N, scale_N, y_N, n, BITS: tl.constexpr, SIGNED: tl.constexpr):
    x = formats.load(x_N.to(tl.int64), 0, n, 0, 2, 0)
    formats.store_codes(x, code_N.to(tl.int64), scale_N.to(tl.int64), 0, n, BITS, SIGNED, 2, 0)
    tl.debug_barrier()
    y = formats.load_codes(code_N.to(tl.int64), scale_N.to(tl.int64), 0, n, BITS, SIGNED, 2, 0)
    formats.store(y, y_N.to(tl.int64), 0, n, 0, 2, 0)


def coded(x, bits, signed):
    """Code, scale and value of x (at most 512,), computed by the kernels."""
    n, x = x.numel(), x.to(DEVICE)
    code = torch.full((n if bits == 8 else -(-n // 2),), 99, dtype=torch.uint8, device=DEVICE)
    scale, y = torch.full((-(-n // 256),), 9.0, device=DEVICE), torch.full((n,), 9.0, device=DEVICE)
    recode[(1,)](x, code, scale, y, n, bits, signed)
    return code.cpu(), scale.cpu(), y.cpu()


CODES = [(8, True), (8, False), (4, True), (4, False)]


@pytest.mark.parametrize("bits, signed", CODES)
@pytest.mark.parametrize("scale", [1.0, -1.0, 3.7e10, -2.3e-20, 3.4e38, 1e-30, 1e-31])
def test_codes(bits, signed, scale):
    """Bitwise, for all values and for numbers between them."""
    for x in reference.code_samples(bits, signed, scale if signed else abs(scale)):
        code, most, y = coded(x, bits, signed)
        wanted, wanted_most = reference.encode(x, bits, signed)
        assert torch.equal(code, wanted) and torch.equal(most, wanted_most)
        assert torch.equal(y, reference.decode(wanted, wanted_most, x.numel(), bits, signed))


@pytest.mark.parametrize("bits, signed", CODES)
@pytest.mark.parametrize("power", range(-99, 128, 25))
def test_every_code_stays(bits, signed, power):
    """A code's value is encoded with the same code and scale again."""
    every = torch.arange(2**bits)
    for scale in (1.0 * 2.0**power, 1.999 * 2.0**power, *((-1.37 * 2.0**power,) if signed else ())):
        scale = torch.tensor(scale)
        x = reference.code_values(bits, signed).float() * scale
        code, most, y = coded(x, bits, signed)
        assert torch.equal(code.long(), every if bits == 8 else every[::2] | every[1::2] << 4)
        assert most == scale and torch.equal(x, y)


@pytest.mark.parametrize("bits, signed", CODES)
def test_the_largest(bits, signed):
    """The scale has the largest element's sign, positive if both signs occur; -1 then becomes the nearest code."""
    most = coded(torch.tensor([-3.0, 3.0, -1.0]).abs() if not signed else torch.tensor([-3.0, 3.0, -1.0]), bits, signed)
    assert most[1] == 3 and most[2][1] == 3
    if signed:
        assert most[2][0] == 3 * reference.code_values(bits, True)[0]
        _, scale, y = coded(torch.tensor([-3.0, 2.9999, -0.0]), bits, signed)
        assert scale == -3 and y[0] == -3 and y[1] == -3 * reference.code_values(bits, True)[0] and y[2] == 0


@pytest.mark.parametrize("bits, signed", CODES)
@pytest.mark.parametrize("n", [1, 2, 255, 257, 300, 512])
def test_blocks_of_codes(bits, signed, n):
    torch.manual_seed(n)
    x = torch.randn(n) if signed else torch.rand(n)
    x[n // 2 :] *= 1e-3
    code, scale, y = coded(x, bits, signed)
    wanted, most = reference.encode(x, bits, signed)
    assert torch.equal(code, wanted) and torch.equal(scale, most)
    assert torch.equal(y, reference.decode(wanted, most, n, bits, signed))


@pytest.mark.parametrize("bits, signed", CODES)
def test_blocks_of_zeros_and_of_what_is_not_finite(bits, signed):
    for bad in (torch.nan, torch.inf):
        x = torch.zeros(500)
        x[300] = bad
        _, scale, y = coded(x, bits, signed)
        assert scale[0] == 0 and not y[:256].any()
        assert scale[1].isnan() and y[256:].isnan().all()
