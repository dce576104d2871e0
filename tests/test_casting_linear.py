"""Subclasses of nn.Linear that cast their weight to the input's dtype at each call."""

import copy

import pytest
import torch
from torch import nn

import hfnn

LINEAR = nn.functional.linear


class Casting(nn.Linear):
    def forward(self, x):
        return LINEAR(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))


class OnlyTheWeight(nn.Linear):
    def forward(self, x):
        return LINEAR(x, self.weight.type_as(x), self.bias)


class Wide(nn.Linear):
    """Multiplies in float32, which no cast of the weight does."""

    def forward(self, x):
        return LINEAR(x.float(), self.weight.float(), None if self.bias is None else self.bias.float()).to(x.dtype)


class Turned(nn.Linear):
    """Casts the weight in two steps."""

    def forward(self, x):
        return LINEAR(x, self.weight.half().to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))


def network(first, second, dtype, bias=True):
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(32), first(32, 64, bias=bias), nn.GELU(), second(64, 32, bias=bias))
    model[0].to(dtype)
    return model


def kept(model, x):
    """Bytes kept for backward, without parameters and the input."""
    known, sizes = {p.untyped_storage().data_ptr() for p in (*model.parameters(), x)}, {}

    def pack(t):
        if t.untyped_storage().data_ptr() not in known:
            sizes[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = model(x)
    del y
    return sum(sizes.values())


def step(model, x):
    x = x.clone().requires_grad_()
    y = model(x)
    return y, *torch.autograd.grad(y.float().square().sum(), [x, *model.parameters()])


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_it_takes_recipes_and_keeps_no_cast(dtype, bias):
    stock = network(Casting, Casting, dtype, bias)
    model, x = hfnn.convert(copy.deepcopy(stock), prefer="memory"), torch.randn(16, 32, dtype=dtype)
    taken = hfnn.recipe.counter.taken
    results = step(model, x)
    assert hfnn.recipe.counter.taken == taken + 2
    for got, want in zip(results, step(stock, x), strict=True):
        assert got.dtype is want.dtype and got.stride() == want.stride()
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
    plain = hfnn.convert(network(nn.Linear, nn.Linear, dtype, bias).to(dtype), prefer="memory")
    assert kept(model, x) == kept(plain, x) < kept(stock, x)


def test_gradients_are_those_of_the_casts_bit_for_bit():
    """With kernels that give the same bits, that is without the norm and the activation."""
    torch.manual_seed(0)
    stock = nn.Sequential(nn.ReLU(), Casting(32, 64), nn.ReLU(), Casting(64, 32))
    model, x = hfnn.convert(copy.deepcopy(stock), prefer="memory"), torch.randn(16, 32).bfloat16()
    assert model(x).grad_fn.name().startswith("_Linear")
    assert all(map(torch.equal, step(model, x), step(stock, x)))


@pytest.mark.parametrize("cls, bias", [(Wide, True), (Turned, True), (OnlyTheWeight, True)])
def test_what_casts_in_another_way_runs_its_own_code(cls, bias):
    stock = network(cls, cls, torch.bfloat16, bias)
    model, x = hfnn.convert(copy.deepcopy(stock), prefer="memory"), torch.randn(16, 32, dtype=torch.bfloat16)
    try:
        wanted = step(stock, x)
    except RuntimeError as error:
        with pytest.raises(RuntimeError, match=str(error)[:20]):
            step(model, x)
        return
    taken = hfnn.recipe.counter.taken
    for got, want in zip(step(model, x), wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
    assert hfnn.recipe.counter.taken == taken


def test_under_autocast():
    stock = network(Casting, Casting, torch.float32)
    model, x = hfnn.convert(copy.deepcopy(stock), prefer="memory"), torch.randn(16, 32)
    taken, results = hfnn.recipe.counter.taken, []
    for each in (stock, model):
        with torch.autocast("cpu", torch.bfloat16):
            results.append(step(each, x))
    assert hfnn.recipe.counter.taken == taken + 2
    for want, got in zip(*results, strict=True):
        assert got.dtype is want.dtype
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)


def test_a_write_to_the_weight_is_an_error():
    """The weight is cast again in backward, so it must be what it was."""
    model = hfnn.convert(network(Casting, Casting, torch.bfloat16), prefer="memory")
    y = model(torch.randn(16, 32, dtype=torch.bfloat16))
    with torch.no_grad():
        model[3].weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_the_report_says_how_many_recipes_are_taken():
    x = torch.randn(16, 32, dtype=torch.bfloat16, requires_grad=True)
    model = hfnn.convert(network(Casting, Casting, torch.bfloat16), prefer="memory")
    assert "recipes taken: 2 of 2" in str(hfnn.report(model, x))
    assert "recipes taken: 1 of 2" in str(hfnn.report(model, x.detach()))  # what an input makes has no recipe
    report = hfnn.report(hfnn.convert(nn.Sequential(Casting(32, 32), Casting(32, 32))), x)
    assert "recipes taken: 0 of 2" in str(report) and "which has no recipe" in report.rows[-1].why
    assert "recipes taken" not in str(hfnn.report(model))  # what it does is not known without inputs
