"""Cases for outputs of units and models, and checkpoints around them, against the unwrapped model: see fsdp.py."""

import copy
import re

import pytest
import torch
from fsdp_models import WIDTH, Block, check_gradients
from torch import nn
from torch.utils.checkpoint import checkpoint

from haiscale.fsdp import FSDP

BOTH = (False, True)  # use_reentrant


class Stack(nn.Module):
    """Blocks, each taking the previous one's result; `give` makes the output from their results."""

    def __init__(self, depth=4, give=lambda x, found: found[-1], around=None):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.give, self.around = give, around

    def forward(self, x):
        first, found = x, []
        for block in self.blocks:
            x = block(x) if self.around is None else checkpoint(block, x, use_reentrant=self.around)
            found.append(x)
        return self.give(first, found)


class Halves(nn.Sequential):
    """Checkpoints around its parts, each of several units."""

    def __init__(self, reentrant, *parts):
        super().__init__(*parts)
        self.reentrant = reentrant

    def forward(self, x):
        for part in self:
            x = checkpoint(part, x, use_reentrant=self.reentrant)
        return x


class Handing(nn.Module):
    """Returns its input besides its result: unchanged, a part of it, or changed in place."""

    def __init__(self, how):
        super().__init__()
        self.block, self.how = Block(), how

    def forward(self, x, aside=None):
        y = self.block(x)
        if self.how == "part":
            return y, x[:, :3]
        if self.how == "changed":
            aside = x * 1
            y = y + aside.mul_(2)
            return y, aside
        return y, x if aside is None else aside


class Carry(nn.Module):
    """Handing units in sequence, inside a unit."""

    def __init__(self, how):
        super().__init__()
        self.units = nn.ModuleList(Handing(how) for _ in range(3))

    def forward(self, x):
        y, aside = x, None
        for unit in self.units:
            y, handed = unit(y, aside)
            aside = handed if self.units[0].how == "same" else None
        return {"y": y, "handed": handed}


class Viewing(nn.Module):
    """Returns a view of its result."""

    def __init__(self):
        super().__init__()
        self.block = Block()

    def forward(self, x):
        return self.block(x).unsqueeze(1)[:, 0]


class Written(nn.Module):
    """Writes to a view that a unit returned, before another one passes it on; it then has a node only when asked."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = Viewing(), Handing("same"), Viewing()

    def forward(self, x):
        y, handed = self.second(self.first(x).mul_(2))
        return self.last(y).mul_(3) + handed


def total(output):
    if isinstance(output, torch.Tensor):
        return output.square().mean()
    parts = output.values() if isinstance(output, dict) else output
    return sum(part.sin().mean() for part in parts)


def beside(made, units, run=lambda model, x: model(x), steps=3, train=True, **options):
    """Gradients are bitwise those of the unwrapped model: ranks have the same inputs, so the average equals each."""
    alone = copy.deepcopy(made)
    model = FSDP(made, units=units, **options)
    for step in range(steps):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step)).requires_grad_(train)
        for m in (model, alone):
            m.zero_grad()
            total(run(m, x)).backward()
        check_gradients(model, alone)
    return model


def outputs(rank, size):
    """The root's output is the last unit's, or several units' unchanged, or views of them."""
    torch.manual_seed(0)
    for give in (
        lambda x, found: found[-1],
        lambda x, found: found,
        lambda x, found: (found[0], found[2]),
        lambda x, found: {"last": found[-1].view(2, 2, WIDTH), "first": found[0][1:]},
        lambda x, found: (x, found[1]),
    ):
        for zero in (1, 2, 3):
            beside(Stack(give=give), Block, zero=zero)
    beside(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3))), nn.Linear, train=False)
    beside(nn.Linear(WIDTH, WIDTH), None)


def handed_on(rank, size):
    """Units return tensors that they did not make; nested units return the inner one's result."""
    torch.manual_seed(0)
    for how in ("same", "part", "changed"):
        beside(nn.Sequential(Carry(how)), [Carry, Handing])
        beside(Carry(how), Handing)
    nested = nn.Sequential(nn.Sequential(nn.Sequential(Block()), Block()), nn.Sequential(Block()))
    beside(nested, [nn.Sequential, Block])


def written_to(rank, size):
    """Views that units return are written to afterwards."""
    torch.manual_seed(0)
    for zero in (2, 3):
        beside(nn.Sequential(Viewing(), nn.ReLU(inplace=True), Viewing(), nn.ReLU(inplace=True)), Viewing, zero=zero)
        beside(Written(), [Viewing, Handing], zero=zero)


def around(rank, size):
    """Checkpoints around units, around several, and around the whole model, which two losses use."""
    torch.manual_seed(0)
    for reentrant in BOTH:
        for buffers in (1, 2):
            beside(Stack(around=reentrant), Block, buffers=buffers)
            beside(Stack(), Block, lambda m, x, r=reentrant: checkpoint(m, x, use_reentrant=r), buffers=buffers)
            beside(Halves(reentrant, Stack(), Stack(3)), Block, buffers=buffers)
            beside(Halves(reentrant, Stack(around=reentrant), Stack(3)), [Stack, Block], buffers=buffers)


def shared_inside_and_outside(rank, size):
    """A unit that runs by itself and inside another one, which has another slot."""

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.shared, self.others = Block(), nn.ModuleList(Block() for _ in range(2))
            self.outer = nn.Sequential(Block(), self.shared, Block())

        def forward(self, x):
            x = self.shared(x)
            for other in self.others:
                x = other(x)
            return self.outer(x)

    torch.manual_seed(0)
    made = Both()
    beside(made, ["shared", "others.0", "others.1", "outer"])


def read_too_late(rank, size):
    """A backward that would read freed parameters fails: a second derivative, and a hidden gradient."""
    torch.manual_seed(0)
    x = torch.randn(4, WIDTH, requires_grad=True)
    first_of = lambda model: torch.autograd.grad(total(model(x)), x, create_graph=True)[0].square().sum()  # noqa: E731
    gone = re.escape("is at version 2147483648")
    with pytest.raises(RuntimeError, match=gone):
        first_of(FSDP(Stack(6), units=Block)).backward()
    made = Stack(6)
    alone = copy.deepcopy(made)
    model = FSDP(made, units=Block, zero=2)
    for m in (model, alone):
        first_of(m).backward()
    check_gradients(model, alone)


def missed(rank, size):
    """A loss that does not depend on the model's outputs is reported at the next forward, and then forgotten."""
    torch.manual_seed(0)
    model = FSDP(Stack(1), units=Block)
    x, kept = torch.randn(4, WIDTH), []
    handle = model.module.blocks[0].up.register_forward_hook(lambda _, __, y: kept.append(y))
    model(x)
    handle.remove()
    kept[0].sum().backward()
    with pytest.raises(RuntimeError, match=r"blocks.0.norm.weight of blocks.0 \(Block\) got a gradient, but not"):
        model(x)
    total(model(x)).backward()
