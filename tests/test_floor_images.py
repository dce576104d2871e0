"""What converted convolutional models keep for backward, block by block: the exact floor without a second convolution.

Everything between two convolutions is cheap to recompute. For a batch norm and an activation the norm's input is kept.
A sum is kept where a convolution takes it, plus a bit per element for the activation after it.
"""

import copy

import pytest
import torch
from torch import nn

import hfnn
from hfnn.core import native
from hfnn.memory import saved_bytes

if native.extension is None:
    pytest.skip(native.why, allow_module_level=True)

WIDTH, N, SIDE = 16, 4, 16
ELEMENTS = N * WIDTH * SIDE * SIDE


class Basic(nn.Module):
    """Like torchvision's ResNets."""

    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(WIDTH, WIDTH, 3, 1, 1, bias=False), nn.BatchNorm2d(WIDTH)
        self.conv2, self.bn2 = nn.Conv2d(WIDTH, WIDTH, 3, 1, 1, bias=False), nn.BatchNorm2d(WIDTH)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        y += x
        return self.relu(y)


class Bottleneck(nn.Module):
    """Like torchvision's, with inner convolutions as wide as the outer ones."""

    def __init__(self):
        super().__init__()
        for i in (1, 2, 3):
            conv = nn.Conv2d(WIDTH, WIDTH, 3 if i == 2 else 1, padding=int(i == 2), bias=False)
            setattr(self, f"conv{i}", conv), setattr(self, f"bn{i}", nn.BatchNorm2d(WIDTH))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        y += x
        return self.relu(y)


def chain(act):
    return lambda: nn.Sequential(nn.Conv2d(WIDTH, WIDTH, 3, padding=1), nn.BatchNorm2d(WIDTH), act())


# Tensors that stock keeps, the floor, and the number of activations of sums.
BLOCKS = {
    "basic": (Basic, 4, 3, 1),
    "bottleneck": (Bottleneck, 6, 4, 1),
    "conv, norm, relu": (chain(lambda: nn.ReLU(inplace=True)), 2, 1, 0),
    "conv, norm, silu": (chain(nn.SiLU), 3, 1, 0),
    "conv, silu": (lambda: nn.Sequential(nn.Conv2d(WIDTH, WIDTH, 3, padding=1), nn.SiLU()), 2, 1, 0),
    "conv, gelu, dropout": (
        lambda: nn.Sequential(nn.Conv2d(WIDTH, WIDTH, 1), nn.GELU(), nn.Dropout(0.1)),
        2.25,  # the mask: a byte per element
        1,
        0,
    ),
}


def network(block, depth, device):
    model = nn.Sequential(nn.Conv2d(3, WIDTH, 3, padding=1), *(block() for _ in range(depth)), nn.Conv2d(WIDTH, 4, 1))
    return model.to(device, memory_format=torch.channels_last)


def of_a_block(build, x, autocast):
    """Bytes per element, as the difference between two depths."""

    def kept(depth):
        model = build(depth)
        with torch.autocast(x.device.type, torch.bfloat16, enabled=autocast):
            return saved_bytes(lambda: model(x)).total

    return (kept(3) - kept(2)) / ELEMENTS


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("last", [True, False], ids=["channels last", "planes"])
@pytest.mark.parametrize("autocast", [False, True])
def test_what_a_block_keeps(device, name, last, autocast):
    block, stock, floor, sums = BLOCKS[name]
    x = torch.randn(N, 3, SIDE, SIDE, device=device)
    x = x.contiguous(memory_format=torch.channels_last) if last else x
    plain = lambda depth: network(block, depth, device)  # noqa: E731
    ours = lambda depth: hfnn.convert(plain(depth), prefer="memory")  # noqa: E731
    each = 2 if autocast else 4
    statistics = 0.02 * each
    assert of_a_block(ours, x, autocast) <= floor * each + sums / 8 + statistics
    # Under autocast torch also keeps the weights' casts.
    wanted = stock * each if not (autocast and "dropout" in name) else 2 * each + 1
    assert of_a_block(plain, x, autocast) >= wanted - statistics


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("last", [True, False], ids=["channels last", "planes"])
def test_gradients_of_a_network_do_not_depend_on_recipes(device, autocast, last, rebuilt):
    torch.manual_seed(0)
    model = hfnn.convert(network(Bottleneck, 2, device), prefer="memory")
    x = torch.randn(N, 3, SIDE, SIDE, device=device)
    x = x.contiguous(memory_format=torch.channels_last) if last else x

    def gradients():
        own = copy.deepcopy(model)
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            y = own(x)
        return y, *torch.autograd.grad(y.float().square().sum(), list(own.parameters()))

    found = gradients()
    assert len(rebuilt) == 4
    with hfnn.recipe.disabled():
        wanted = gradients()
    assert len(rebuilt) == 4
    assert all(a.stride() == b.stride() and torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
