"""layer_norm and rms_norm beyond the contract."""

import pytest
import torch
from torch.nn import functional as F

import hfnn
from hfnn import testing

FORMS = ["layer_norm", "rms_norm"]


def both(name, x, *args, **kwargs):
    """The results of hfnn (its room forced) and of torch for the same arguments."""
    mine = getattr(hfnn.functional, name)(x, *args, **kwargs, prefer="memory")
    return mine, getattr(F, name)(x, *args, **kwargs)


@pytest.mark.parametrize("name", FORMS)
def test_one_column(name, device):
    """A row of one element has no variance: the gradient of x is 0 within rounding, and nothing is NaN."""
    x = torch.randn(7, 1, device=device, requires_grad=True)
    mine, theirs = both(name, x, (1,), eps=1e-6)
    torch.testing.assert_close(mine, theirs)
    (dx,) = torch.autograd.grad(mine.sum(), x)
    assert dx.abs().max() < 1e-2


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("shape", [(4, 6), (3, 4, 6)])
def test_several_normalised_dimensions(name, shape, device):
    x = torch.randn(5, 3, 4, 6, device=device, requires_grad=True)
    weight = torch.randn(shape, device=device, requires_grad=True)
    mine, theirs = both(name, x, shape, weight)
    torch.testing.assert_close(mine, theirs)
    dy = torch.randn_like(mine)
    for a, b in zip(*(torch.autograd.grad(y, [x, weight], dy) for y in (mine, theirs)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", FORMS)
def test_no_affine(name, device):
    x = torch.randn(5, 64, device=device, requires_grad=True)
    mine, theirs = both(name, x, (64,))
    torch.testing.assert_close(mine, theirs)
    a, b = (torch.autograd.grad(y.square().sum() + y[0, 0], x)[0] for y in (mine, theirs))
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_bias_without_weight(device):
    x, bias = torch.randn(5, 64, device=device), torch.randn(64, device=device, requires_grad=True)
    mine, theirs = both("layer_norm", x, (64,), None, bias)
    torch.testing.assert_close(mine, theirs)
    mine.sum().backward()
    torch.testing.assert_close(bias.grad, torch.full_like(bias, 5))


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("eps", [0.0, 1e-12, 1.0])
def test_eps(name, eps, device):
    x = torch.randn(5, 64, device=device) * 1e-3
    mine, theirs = both(name, x, (64,), eps=eps)
    torch.testing.assert_close(mine, theirs)


def test_default_eps_of_rms_norm(device):
    """As in torch: the epsilon of the dtype it computes in, not of its input."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        mine, theirs = both("rms_norm", torch.full((2, 64), 1e-4, dtype=dtype, device=device), (64,))
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FORMS)
def test_low_precision_input_with_float32_parameters(name, low, device):
    x = torch.randn(9, 64, device=device).to(low).requires_grad_()
    parameters = [torch.randn(64, device=device, requires_grad=True) for _ in range(1 + (name == "layer_norm"))]
    y = getattr(hfnn.functional, name)(x, (64,), *parameters, eps=1e-5, prefer="memory")
    assert y.dtype is low and y.grad_fn.name().startswith("_")
    dy = torch.randn_like(y)
    grads = torch.autograd.grad(y, [x, *parameters], dy)
    assert [g.dtype for g in grads] == [low] + [torch.float32] * len(parameters)
    wide = [t.detach().double().requires_grad_() for t in (x, *parameters)]
    want = getattr(F, name)(wide[0], (64,), *wide[1:], eps=1e-5)
    for got, ref in zip((y, *grads), (want, *torch.autograd.grad(want, wide, dy.double())), strict=True):
        assert testing.error(got, ref).l2 <= torch.finfo(low).eps


@pytest.mark.parametrize("name", FORMS)
def test_statistics_are_float32(name, device):
    """Rows of 4096 far from zero: bfloat16 statistics would be wrong in the first digit."""
    x = (torch.randn(8, 4096, device=device) * 0.1 + 10).bfloat16()
    mine, _ = both(name, x, (4096,), eps=1e-6)
    want = getattr(F, name)(x.double(), (4096,), eps=1e-6)
    assert testing.error(mine, want).l2 <= torch.finfo(torch.bfloat16).eps / 2


@pytest.mark.parametrize("name", FORMS)
def test_not_a_number_stays_in_its_row(name, device):
    x = torch.randn(4, 64, device=device)
    x[1, 3], x[2, 5] = float("nan"), float("inf")
    mine, _ = both(name, x, (64,))
    assert mine[1].isnan().all() and mine[2].isnan().any() and mine[[0, 3]].isfinite().all()


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # torch's own
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("narrow", [torch.float32, torch.bfloat16], ids=str)
def test_float64_with_narrower_parameters(name, narrow, device):
    """As in torch: an error, or torch's dtype."""
    x, weight = torch.randn(5, 8, device=device).double(), torch.ones(8, device=device, dtype=narrow)
    results = []
    for fn in (getattr(hfnn.functional, name), getattr(F, name)):
        try:
            results.append(fn(x, (8,), weight, **({"prefer": "memory"} if fn.__module__[:4] == "hfnn" else {})).dtype)
        except RuntimeError as error:
            results.append(str(error))
    assert results[0] == results[1]


@pytest.mark.parametrize("name", FORMS)
def test_weights_frozen_after_forward(name, device):
    """Second derivatives are torch's, also if the weight no longer requires grad."""
    x, weight = (torch.randn(*shape, device=device, requires_grad=True) for shape in ((5, 64), (64,)))
    found = []
    for y in both(name, x, (64,), weight):
        weight.requires_grad_(False)
        (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        (ddx,) = torch.autograd.grad(dx.square().sum(), x)
        found.append((dx, ddx))
        weight.requires_grad_()
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


def test_a_transposed_weight_is_torchs():
    x, weight = torch.randn(4, 16, 8, requires_grad=True), torch.randn(8, 16).t().requires_grad_()
    ours = hfnn.functional.layer_norm(x, (16, 8), weight, prefer="memory")
    stock = torch.nn.functional.layer_norm(x, (16, 8), weight)
    assert torch.equal(ours, stock)
    for got, want in zip(*(torch.autograd.grad(y.square().sum(), (x, weight)) for y in (ours, stock)), strict=True):
        assert torch.equal(got, want) and got.stride() == want.stride()
