"""nll_loss is bitwise torch's and keeps less."""

import itertools

import pytest
import torch

import hfnn
from hfnn.core.holder import target_of

F = torch.nn.functional


def example(shape, dtype=torch.float32):
    x = torch.randn(shape, dtype=dtype).log_softmax(min(1, len(shape) - 1))
    target = torch.randint(shape[min(1, len(shape) - 1)], shape[:1] + shape[2:] if len(shape) > 1 else ())
    if target.numel() > 1:
        target.view(-1)[0] = -100
    return x.requires_grad_(), target


@pytest.mark.parametrize("shape", [(7,), (5, 7), (3, 7, 2, 4), (2, 7, 3), (0, 7)], ids=str)
@pytest.mark.parametrize("reduction, weighted", list(itertools.product(["none", "mean", "sum"], [False, True])))
def test_bits_of_torch(shape, reduction, weighted):
    x, target = example(shape)
    weight = torch.rand(7) if weighted else None
    y = hfnn.functional.nll_loss(x, target, weight, reduction=reduction)
    want = F.nll_loss(x, target, weight, reduction=reduction)
    dy = torch.rand_like(y)
    torch.testing.assert_close(y, want, rtol=0, atol=0, equal_nan=True)
    for _ in range(2):  # a retained graph
        (got,) = torch.autograd.grad(y, x, dy, retain_graph=True)
        torch.testing.assert_close(got, torch.autograd.grad(want, x, dy, retain_graph=True)[0], rtol=0, atol=0)
    if len(shape) != 3 and x.numel():
        assert y.grad_fn.name().startswith("_NLLLoss"), "torch's own op ran"


def test_keeps_no_input():
    x, target = example((64, 100))
    ours = hfnn.memory.saved_bytes(lambda: hfnn.functional.nll_loss(x * 1, target))
    theirs = hfnn.memory.saved_bytes(lambda: F.nll_loss(x * 1, target))
    assert ours.total + x.nbytes == theirs.total


def test_module_autocast_and_second_derivative():
    x, target = example((5, 7), torch.float64)
    assert torch.autograd.gradcheck(lambda x: hfnn.functional.nll_loss(x, target), x)
    assert torch.autograd.gradgradcheck(lambda x: hfnn.functional.nll_loss(x, target), x)
    low = x.detach().bfloat16().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, want = hfnn.functional.nll_loss(low, target), F.nll_loss(low, target)
    assert y.dtype is want.dtype and torch.equal(y, want)
    module = hfnn.convert(torch.nn.NLLLoss(weight=torch.rand(7).double(), reduction="sum"))
    assert target_of(module) is hfnn.NLLLoss
    torch.testing.assert_close(module(x, target), F.nll_loss(x, target, module.weight, reduction="sum"))


@pytest.mark.parametrize("shape", [(7,), (5, 7), (0, 7), (3, 7, 2, 4), (0, 7, 2, 4), (3, 7, 0, 4)], ids=str)
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_strides_and_errors_of_torch(shape, reduction):
    """Also without elements, and for targets of other shapes and dtypes."""
    sizes = ((), (1,), (5,), (4,), (0,), (5, 1), (3, 2, 4), (3, 4, 2), (0, 2, 4), (3, 0, 4))
    for size, dtype in itertools.product(sizes, (torch.int64, torch.int32)):
        found = []
        for fn in (F.nll_loss, hfnn.functional.nll_loss):
            x = torch.zeros(shape, requires_grad=True)
            try:
                y = fn(x, torch.zeros(size, dtype=dtype), reduction=reduction)
                found.append((y.stride(), torch.autograd.grad(y.sum(), x)[0].stride()))
            except (RuntimeError, ValueError, IndexError) as error:
                found.append((type(error), str(error)))
        assert found[0] == found[1], (size, dtype)
