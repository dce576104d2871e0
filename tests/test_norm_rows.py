"""Rewritten forwards with norms, factors and formulas compute what the class computes, whatever is different later."""

import copy
import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hfnn
from hfnn.core.holder import holder_of
from hfnn.patterns.subclass import is_converted, title

WIDTH = 32


class Modulated(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.map, self.scale = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16), nn.Linear(8, WIDTH)
        self.gain = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x, c):
        h = self.norm(x) * (1 + self.scale(c).unsqueeze(1)) + self.gain
        return self.map(h * torch.sigmoid(h))


class Wide(nn.LayerNorm):
    def __init__(self):
        super().__init__(WIDTH)

    def forward(self, x, factor=1):
        return super().forward(x.float()).to(x.dtype) * factor


class Unit(nn.Module):
    def __init__(self):
        super().__init__()
        self.g = nn.Parameter(torch.randn(1, WIDTH, 1, 1))

    def forward(self, x):
        return F.normalize(x, dim=1) * self.g * x.shape[1] ** 0.5


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last, self.gamma = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH), nn.Parameter(torch.randn(WIDTH))

    def forward(self, x):
        return x + self.gamma * self.last(torch.relu(self.first(x)).square())


INPUTS = {
    Modulated: lambda: (torch.randn(6, 20, WIDTH), torch.randn(6, 8)),
    Wide: lambda: (torch.randn(6, 20, WIDTH),),
    Unit: lambda: (torch.randn(4, WIDTH, 6, 6),),
    Scaled: lambda: (torch.randn(20, 20, WIDTH),),
}  # fmt: skip
NAMES = {
    Modulated: "hfnn affine of norm; silu of a formula", Wide: "hfnn layer_norm of a formula",
    Unit: "hfnn normalize of a formula; affine of a formula", Scaled: "hfnn relu_squared of first; linear of last",
}  # fmt: skip


def pair(make):
    torch.manual_seed(0)
    stock = make()
    return stock, hfnn.convert(copy.deepcopy(stock), prefer="memory")


def compare(stock, ours, inputs, exact=False):
    of = []
    for module in (stock, ours):
        leaves = [x.detach().requires_grad_() for x in inputs]
        torch.manual_seed(1)
        y = module(*leaves)
        dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(0)).to(y)
        of.append([y, *torch.autograd.grad(y, [*leaves, *module.parameters()], dy, allow_unused=True)])
    for want, got in zip(*of, strict=True):
        assert (want is None) == (got is None)
        if want is not None:
            assert want.dtype is got.dtype and want.stride() == got.stride()
            torch.testing.assert_close(got, want, **({"rtol": 0, "atol": 0} if exact else {}))


@pytest.mark.parametrize("make", INPUTS)
def test_results(make):
    stock, ours = pair(make)
    assert title(ours) == NAMES[make]
    compare(stock, ours, INPUTS[make]())
    compare(stock, copy.deepcopy(ours), INPUTS[make]())
    compare(stock, hfnn.revert(ours), INPUTS[make](), exact=True)
    assert not is_converted(ours)


@pytest.mark.parametrize("make", INPUTS)
@pytest.mark.parametrize("mode", ["autocast", "double", "half", "no_grad", "functional", "checkpoint"])
def test_modes(make, mode):
    stock, ours = pair(make)
    inputs = INPUTS[make]()
    if mode == "autocast":
        with torch.autocast("cpu", torch.bfloat16):
            a, b = stock(*inputs), ours(*inputs)
        assert a.dtype is b.dtype
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
    elif mode == "double" and make is not Wide:  # whose float32 does not fit
        compare(stock.double(), ours.double(), [x.double() for x in inputs])
    elif mode == "half":
        if make is not Wide:
            stock, ours = stock.bfloat16(), ours.bfloat16()
        inputs = [x.bfloat16() for x in inputs]
        torch.testing.assert_close(stock(*inputs), ours(*inputs), rtol=3e-2, atol=3e-2)
        assert stock(*inputs).dtype is ours(*inputs).dtype
    elif mode == "no_grad":
        with torch.no_grad():
            torch.testing.assert_close(stock(*inputs), ours(*inputs))
    elif mode == "functional":
        a, b = (torch.func.grad(lambda x, m=m: m(x, *inputs[1:]).sum())(inputs[0]) for m in (stock, ours))
        assert torch.equal(a, b)
    elif mode == "checkpoint":
        again = lambda *x: torch.utils.checkpoint.checkpoint(ours, *x, use_reentrant=False)  # noqa: E731
        again.parameters = ours.parameters
        compare(stock, again, inputs)


def test_other_calls_run_the_forward_itself():
    """Other ranks, a length that is broadcast, dtypes that differ, further arguments: torch's errors, too."""
    stock, ours = pair(Unit)
    for shape in ((4, WIDTH, 6), (2, 1, 6, 6), (WIDTH, 6, 6), (2, 4, WIDTH, 6, 6)):
        try:
            want = stock(torch.ones(shape))
        except RuntimeError as error:
            with pytest.raises(RuntimeError, match=re.escape(str(error))):
                ours(torch.ones(shape))
        else:
            assert torch.equal(ours(torch.ones(shape)), want)
    stock, ours = pair(Wide)
    x = torch.randn(6, 20, WIDTH)
    assert torch.equal(ours(x, 2), stock(x, 2)) and torch.equal(ours(x, factor=3), stock(x, factor=3))
    for dtypes in ((torch.float64, torch.float32), (torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16)):
        stock, ours = stock.to(dtypes[1]), ours.to(dtypes[1])
        try:
            want = stock(x.to(dtypes[0]))
        except RuntimeError as error:
            with pytest.raises(RuntimeError, match=re.escape(str(error))):
                ours(x.to(dtypes[0]))
        else:
            torch.testing.assert_close(ours(x.to(dtypes[0])), want)


def test_what_changes_later():
    stock, ours = pair(Modulated)
    inputs, seen = INPUTS[Modulated](), []
    for part in (ours.norm, ours.map, ours.scale):
        handle = part.register_forward_hook(lambda *args: seen.append(args[0]))
        compare(stock, ours, inputs)
        handle.remove()
    assert seen == [ours.norm, ours.map, ours.scale]
    for module in (stock, ours):
        module.norm = nn.Identity()
    compare(stock, ours, inputs)
    stock, ours = pair(Scaled)
    for module in (stock, ours):
        torch.manual_seed(2)
        module.gamma = nn.Parameter(torch.randn(1))
    compare(stock, ours, INPUTS[Scaled]())
    stock, ours = pair(Scaled)
    ours.last.register_forward_hook(lambda *args: seen.append("last"))
    compare(stock, ours, INPUTS[Scaled]())
    assert seen[-1] == "last"


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.linear(x), None


class AsksForTuples(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attn, self.gain = nn.LayerNorm(WIDTH), Pair(), nn.Parameter(torch.randn(WIDTH))

    def forward(self, x):
        y = self.attn(self.norm(x) * self.gain)
        return x + (y[0] if isinstance(y, tuple) else y)


class TakesTheFirst(AsksForTuples):
    def forward(self, x):
        return self.attn(self.norm(x) * self.gain)[0].flatten(1)


def test_a_part_that_returns_a_tuple():
    for make in (AsksForTuples, TakesTheFirst):
        stock, ours = pair(make)
        compare(stock, ours, [torch.randn(6, 20, WIDTH)])


class Rounds(nn.Module):
    """Its dtype is that of its parameter."""

    def __init__(self):
        super().__init__()
        self.norm, self.gain = nn.LayerNorm(WIDTH, elementwise_affine=False), nn.Parameter(torch.randn(WIDTH))

    def forward(self, x):
        return self.norm(x.to(self.gain.dtype)) * self.gain


def test_a_cast_to_a_parameters_dtype():
    stock, ours = pair(Rounds)
    for dtypes in ((torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)):
        x, s, o = torch.randn(6, 20, WIDTH).to(dtypes[0]), stock.to(dtypes[1]), ours.to(dtypes[1])
        assert s(x).dtype is o(x).dtype
        torch.testing.assert_close(o(x), s(x), rtol=2e-2, atol=2e-2)


def test_small_calls_and_eval_keep_nothing_more():
    for make, draw in INPUTS.items():
        torch.manual_seed(0)
        stock = make()
        ours = hfnn.convert(copy.deepcopy(stock))
        for x in (draw(), [t[:1] for t in draw()]):
            x = [t.detach().requires_grad_() for t in x]
            kept = [hfnn.memory.saved_bytes(lambda m=m, x=x: m(*x)).total for m in (stock, ours)]
            assert kept[1] <= kept[0], make
        assert holder_of(ours) is not None
