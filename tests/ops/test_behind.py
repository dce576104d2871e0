"""Activations of results that can be built again, also in place, and views of such results: nothing more is kept."""

import pytest
import torch
from torch import nn

import hfnn
from hfnn.core import native
from hfnn.core import node as recipe
from hfnn.memory import saved_bytes
from hfnn.ops.behind import BEHIND

if native.extension is None:
    pytest.skip(native.why, allow_module_level=True)

O, F = hfnn.functional, nn.functional
NUMBERS = {"leaky_relu": (0.2,), "hardtanh": (-0.5, 0.7)}
SHAPE = (4, 6, 5, 7)


def how(library):
    return {"prefer": "memory"} if library is O else {}


def norm(x, library=O):
    return library.batch_norm(x, None, None, None, None, True, **how(library))


def act(name, y, inplace, library=O):
    return getattr(library, name)(y, *NUMBERS.get(name, ()), inplace=inplace, **how(library))


def drawn(device, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(shape, generator=generator).to(device, dtype).requires_grad_() for shape in (SHAPE, (8, 6, 1, 1))
    ]


def of_both(step, device, dtype=torch.float64):
    """What `step(library, x, weight)` returns for hfnn's and for torch's functions, with the gradients of its sum."""
    found = []
    for library in (O, F):
        x, weight = drawn(device, dtype)
        y = step(library, x, weight)
        found.append([y.detach(), *torch.autograd.grad(y.square().sum(), [x, weight])])
    return found


def same(found):
    for a, b in zip(*found, strict=True):
        assert a.stride() == b.stride() and torch.allclose(a, b, rtol=1e-6, atol=1e-9)


def convolved(library, y, weight):
    return library.conv2d(y, weight, **how(library))


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("name", BEHIND)
def test_values_gradients_and_bytes(name, inplace, device):
    same(of_both(lambda lib, x, w: convolved(lib, act(name, norm(x, lib), inplace, lib), w), device))
    x, weight = drawn(device)
    kept = saved_bytes(lambda: convolved(O, act(name, norm(x), inplace), weight)).total
    assert kept <= x.nbytes + weight.nbytes + 2 * 4 * SHAPE[1]


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("name", BEHIND)
def test_gradients_do_not_depend_on_recipes(name, inplace, device):
    def gradients():
        x, weight = drawn(device)
        y = convolved(O, act(name, norm(x), inplace), weight)
        return torch.autograd.grad(y.square().sum(), [x, weight])

    recipe.counter.reset()
    found = gradients()
    assert recipe.counter.rebuilt == 2
    with recipe.disabled():
        assert all(map(torch.equal, found, gradients()))


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("name", BEHIND)
def test_second_derivatives(name, inplace, device):
    def second(library):
        x, weight = drawn(device, torch.float64)
        y = convolved(library, act(name, norm(x, library), inplace, library), weight)
        (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        return torch.autograd.grad(dx.square().sum(), [x, weight])

    same([second(O), second(F)])


def test_what_is_written_in_place_is_the_tensor_itself(device):
    """The same object, version, hooks and retained gradient as in torch."""
    seen = []
    for library in (O, F):
        x, weight = drawn(device, torch.float64)
        y = norm(x, library)
        y.register_hook(lambda dy: seen.append(dy.clone()))
        y.retain_grad()
        before = y._version
        z = act("relu", y, True, library)
        assert z is y and y._version == before + 1 and not y.is_leaf
        convolved(library, z, weight).square().sum().backward()
        seen.append(y.grad)
    assert len(seen) == 4 and all(torch.allclose(a, b) for a, b in zip(seen[:2], seen[2:], strict=True))


@pytest.mark.parametrize("when", ["between", "after"])
def test_later_writes_are_errors_as_in_torch(when, device):
    for library in (O, F):
        x, weight = drawn(device)
        y = norm(x, library)
        first = convolved(library, y, weight) if when == "between" else 0.0
        y = act("relu", y, True, library)
        total = (first + convolved(library, y, weight)).sum()
        if when == "after":
            y.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            total.backward()


def test_what_torch_refuses_or_runs_itself(device):
    x, _ = drawn(device)
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        act("relu", x, True)
    for y in (norm(x)[:, :3], x * 1):  # a view, and a result that cannot be built
        assert act("relu", y, True) is y and "_Behind" not in y.grad_fn.name()
    y = act("leaky_relu", norm(x), True)
    with pytest.raises(RuntimeError, match="negative slope"):
        O.leaky_relu(norm(x), -0.2, inplace=True, prefer="memory").sum().backward()
    with torch.no_grad():
        assert act("relu", y, True) is y


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prelu(device, dtype):
    def step(library, x, weight):
        slopes = torch.linspace(-0.2, 0.5, SHAPE[1], device=device, dtype=x.dtype)
        slopes = slopes + weight.sum() * 0.01
        return convolved(library, library.prelu(norm(x, library), slopes, **how(library)), weight)

    if dtype is torch.float32:
        same(of_both(step, device))
    x, weight = drawn(device, dtype)
    slopes = torch.full((1,), 0.25, device=device, dtype=dtype, requires_grad=True)
    kept = saved_bytes(lambda: convolved(O, O.prelu(norm(x), slopes, prefer="memory"), weight)).total
    assert kept <= x.nbytes + weight.nbytes + 2 * 4 * SHAPE[1] + slopes.nbytes


VIEWS = {
    "permuted": lambda y: y.permute(0, 2, 3, 1),
    "in rows": lambda y: y.flatten(1),
    "a part": lambda y: y[:, 1:5],
    "one of several": lambda y: y.chunk(2, 1)[1],
    "a view of a view": lambda y: y.transpose(1, 3).unsqueeze(0)[:, 1:],
    "expanded": lambda y: y.unsqueeze(0).expand(2, *y.shape),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("view", VIEWS)
def test_views(view, dtype, device):
    def gradients(create_graph=False):
        x = drawn(device, dtype)[0]
        y = VIEWS[view](norm(x))
        weight = torch.ones(3, y.shape[-1], device=device, dtype=dtype, requires_grad=True)
        z = O.linear(y, weight, prefer="memory")
        found = torch.autograd.grad(z.square().sum(), [x, weight], create_graph=create_graph)
        return (*found, *(torch.autograd.grad(found[1].sum(), x) if create_graph else ()))

    recipe.counter.reset()
    found, second = gradients(), gradients(create_graph=True)
    assert recipe.counter.taken == 2
    with recipe.disabled():
        for ours, stock in ((found, gradients()), (second, gradients(create_graph=True))):
            assert all(a.stride() == b.stride() and torch.equal(a, b) for a, b in zip(ours, stock, strict=True))


def test_views_that_are_kept(device):
    """A view of other numbers than the result's, and one whose result was written to."""
    x = drawn(device)[0]
    y = norm(x)
    assert recipe.take(y.view(torch.int32)) is None and recipe.take(y.detach().view(-1)) is None
    other = y.view(-1)
    assert recipe.take(other) is not None
    other.data = other.data * 2
    assert recipe.take(other) is None
    part = y[:, 1:]
    weight = torch.ones(3, part.shape[-1], device=device, requires_grad=True)
    z = O.linear(part, weight, prefer="memory")
    with torch.no_grad():
        y.zero_()
    assert recipe.take(part) is None
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()
