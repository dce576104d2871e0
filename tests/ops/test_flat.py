"""Piecewise linear maps: second derivatives are 0, not None, where torch returns 0."""

import contextlib
import functools
import gc
import weakref

import pytest
import torch
from torch import nn

import hfnn

MODULES = (
    nn.ReLU, nn.LeakyReLU, nn.Hardtanh, nn.ReLU6, nn.Hardshrink, nn.Softshrink, lambda: nn.Threshold(0.1, 0.2),
    lambda: nn.MaxPool1d(2), lambda: nn.MaxPool2d(2), lambda: nn.MaxPool3d(2),
    lambda: nn.AvgPool1d(2), lambda: nn.AvgPool2d(2), lambda: nn.AvgPool3d(2), lambda: nn.AdaptiveAvgPool2d(2),
    lambda: nn.PReLU().requires_grad_(False), lambda: Abs(), lambda: NLL(),
)  # fmt: skip


class Abs(nn.Module):
    def forward(self, x):
        return torch.abs(x)


class NLL(nn.NLLLoss):
    def forward(self, x):
        return super().forward(x, torch.ones(4, 4, 4, dtype=torch.int64))


def hooks(kind):
    same = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
    return {"none": contextlib.nullcontext(), "identity": same, "save_on_cpu": torch.autograd.graph.save_on_cpu()}[kind]


@pytest.mark.parametrize("kind", ["none", "identity", "save_on_cpu"])
@pytest.mark.parametrize("make", MODULES)
def test_the_second_derivative_is_torchs(make, kind):
    def penalty(module):
        x = torch.arange(4.0 * 4 * 16).view(4, 4, 4, 4).sub(100).requires_grad_()
        with hooks(kind):
            y = module(x.flatten(2) if isinstance(module, (nn.MaxPool1d, nn.AvgPool1d)) else x)
        (dx,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return dx.requires_grad, dx, *torch.autograd.grad(dx.mul_(2).square().sum(), x)

    own = make()
    own.__class__ = {NLL: hfnn.NLLLoss}.get(type(own), type(own))
    if type(own) is hfnn.NLLLoss:
        own = functools.partial(own, target=torch.ones(4, 4, 4, dtype=torch.int64))
    elif type(own) is Abs:
        own = functools.partial(hfnn.functional.abs, prefer="memory")
    else:
        own = hfnn.convert(own, prefer="memory")
    ours, stock = penalty(own), penalty(make())
    assert ours[0] == stock[0] and all(map(torch.equal, ours[1:], stock[1:]))


def test_l1_loss():
    x, target = (torch.randn(5, 8, requires_grad=True) for _ in range(2))

    def second(**options):
        fn = hfnn.functional.l1_loss if options else nn.functional.l1_loss
        first = torch.autograd.grad(fn(x, target, **options), [x, target], create_graph=True)
        return *first, *torch.autograd.grad(sum(g.square().sum() for g in first), [x, target])

    for got, want in zip(second(prefer="memory"), second(), strict=True):
        assert got.requires_grad == want.requires_grad
        torch.testing.assert_close(got, want)


def test_clamp():
    """torch's gradient only selects from dy, and so does not depend on x."""
    x, scale = torch.randn(5, 8, requires_grad=True), torch.randn(5, 8, requires_grad=True)

    def second(clamp):
        (plain,) = torch.autograd.grad(clamp(x, -1.0, 1.0).sum(), x, create_graph=True)
        (dx,) = torch.autograd.grad((clamp(x, -1.0, 1.0) * scale).sum(), x, create_graph=True)
        return plain.requires_grad, torch.autograd.grad(dx.square().sum(), [x, scale], allow_unused=True)

    (requires, (ddx, dscale)), stock = (
        second(f) for f in (lambda *args: hfnn.functional.clamp(*args, prefer="memory"), torch.clamp)
    )
    assert requires is stock[0] and ddx is stock[1][0] and torch.equal(dscale, stock[1][1])


@pytest.mark.parametrize("kind", ["none", "identity", "save_on_cpu"])
def test_a_result_nobody_uses_is_freed(kind):
    """Also if hooks get the handle: what they return would otherwise hold the node and all tensors before it."""
    x = torch.randn(4, 16, requires_grad=True).exp()  # exp's node keeps x
    with hooks(kind):
        y = hfnn.functional.leaky_relu(x, prefer="memory")
    memory = weakref.ref(x.untyped_storage())
    del x, y
    gc.collect()
    assert memory() is None
