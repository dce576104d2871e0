"""The error for a tensor that was written to, where torch keeps a copy and hfnn the tensor: where, and what to do."""

import pytest
import torch
from torch import nn

import hfnn


class Outer(nn.Module):
    def __init__(self, *parts):
        super().__init__()
        self.inner = nn.Sequential(*parts)

    def forward(self, x):
        return self.inner(x)


def _transposed(*shape):
    return (torch.randn(shape[1], shape[0], *shape[2:]).requires_grad_() * 1).transpose(0, 1)


# The last module's class -> (modules, their input). torch's group norm copies a strided input. A linear map takes its
# input from the norm, whose own gradients are not wanted.
CASES = {
    "GroupNorm": lambda: ((nn.Identity(), nn.GroupNorm(2, 8)), _transposed(4, 8, 6)),
    "Linear": lambda: ((nn.LayerNorm(8), nn.Linear(8, 8)), torch.randn(4, 8).requires_grad_() * 1),
}


def backward(parts, x, convert=True, **how):
    model = Outer(*parts)
    if convert:
        hfnn.convert(model, prefer="memory", **how)
    y = model(x)
    with torch.no_grad():
        x.add_(1)
    torch.autograd.grad(y.sum(), model.inner[-1].weight)


@pytest.mark.parametrize("name", CASES)
def test_names_the_module_and_a_way_out(name):
    backward(*CASES[name](), convert=False)
    with pytest.raises(RuntimeError, match="modified by an inplace operation") as raised:
        backward(*CASES[name]())
    text = str(raised.value)
    assert f"of module 'inner.1' ({name})" in text and "write to a clone of the tensor" in text
    assert "hfnn.convert(model, skip='inner.1')" in text and text.count("hfnn's") == 1
    backward(*CASES[name](), skip="inner.1")


def test_of_an_op_without_parameters():
    x = torch.randn(4, 8).requires_grad_() * 1
    loss = hfnn.functional.cross_entropy(x, torch.arange(4), prefer="memory")
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation(.|\n)*hfnn's CrossEntropy computes"):
        loss.backward()


def test_other_errors_stay():
    model = hfnn.convert(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)), prefer="memory")
    loss = model(torch.randn(2, 8)).sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time") as raised:
        loss.backward()
    assert "hfnn's" not in str(raised.value)


class Scaled(nn.Module):
    """An RMS norm of element-wise ops, of which torch keeps the weight for the gradient of x alone."""

    def __init__(self):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(8)), 1e-6

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


@pytest.mark.parametrize("needs", (False, True))
def test_weight_of_an_input_without_gradient(needs):
    x, found = torch.randn(4, 8), []
    for model in (Scaled(), hfnn.convert(nn.Sequential(Scaled()), prefer="memory")[0]):
        y = model(x.clone().requires_grad_(needs))
        with torch.no_grad():
            model.weight.mul_(2)
        try:
            y.square().sum().backward()
            found.append(model.weight.grad)
        except RuntimeError as error:
            assert "modified by an inplace operation" in str(error)
            found.append(None)
    stock, ours = found
    assert (stock is None) == (ours is None) == needs
    if not needs:
        torch.testing.assert_close(ours, stock)
