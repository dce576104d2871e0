"""The semantic contract of recipes: what they rebuild changes no bit."""

import contextlib
import math
import weakref

import pytest
import torch

import hfnn
from hfnn.core import native
from hfnn.core import node as recipe

from .test_contract import RAGGED, function, leaves, tensors

RECIPES = [p for p in RAGGED if p.values[0].recipe]
with_recipe = pytest.mark.parametrize("op, kernel, device, dtype, case", RECIPES)


def consumed(op, args, kwargs, weight, recipes=True, nodes=None):
    """y of the op, through two consumers that share its recipe; gradients of everything. nodes: collects what y's node
    keeps."""
    torch.manual_seed(7)
    weight = weight.detach().requires_grad_()
    with contextlib.nullcontext() if recipes else recipe.disabled():
        x = args[0] if not op.recipe_needs_recipe else hfnn.functional.gelu(args[0], prefer="memory")
        y = function(op)(x, *args[1:], **kwargs)
        z = hfnn.functional.linear(y, weight) + hfnn.functional.linear(y, weight * 2)
    if nodes is not None:
        nodes.append(weakref.ref(args[0]))  # alive while y's node is
    return torch.autograd.grad(z.square().mean(), [*tensors(args), weight])


@with_recipe
def test_recipes_change_no_bit(op, kernel, device, dtype, case):
    args, kwargs = op.sample(case, dtype, device)
    weight = torch.randn(8, args[0].shape[-1], dtype=dtype, device=device)
    with hfnn.use(kernel.name):
        recipe.counter.reset()
        nodes, inner = [], int(op.recipe_needs_recipe)  # the inner op takes a recipe, which is rebuilt, too
        on = consumed(op, leaves(args), kwargs, weight, nodes=nodes)
        taken = 2 + inner
        assert recipe.counter.taken == taken and recipe.counter.rebuilt == 1 + inner, "not used, or not shared"
        off = consumed(op, leaves(args), kwargs, weight, recipes=False)
        assert recipe.counter.taken == taken
    assert all(map(torch.equal, on, off))
    assert nodes[0]() is None, "a recipe outlived its tensor"


@with_recipe
def test_a_wrong_rebuild_is_noticed(op, kernel, device, dtype, case):
    """The test above would fail if one element of a rebuilt tensor were off by one ulp."""
    args, kwargs = op.sample(case, dtype, device)
    weight = torch.randn(8, args[0].shape[-1], dtype=dtype, device=device)

    def off_by_one_ulp(y):
        flat = y.view(-1)
        largest = flat.abs().argmax()
        flat[largest] = torch.nextafter(flat[largest].float(), torch.tensor(math.inf, device=device)).to(dtype)
        if dtype in (torch.bfloat16, torch.float16):  # nextafter in the tensor's own format
            flat[largest] = (flat[largest : largest + 1].view(torch.int16) + 1).view(dtype)[0]
        return y

    def spoil(y):  # a node has just built it
        with torch.no_grad():
            off_by_one_ulp(y)

    with hfnn.use(kernel.name):
        off = consumed(op, leaves(args), kwargs, weight, recipes=False)
        native.extension.watch(spoil)
        try:
            on = consumed(op, leaves(args), kwargs, weight)
        finally:
            native.extension.watch(None)
    assert not all(map(torch.equal, on, off))


@with_recipe
def test_changed_sources_are_not_trusted(op, kernel, device, dtype, case):
    """In-place changes between producer and consumer: the gradients are those of what the consumer read."""
    args, kwargs = op.sample(case, dtype, device)
    weight = torch.randn(8, args[0].shape[-1], dtype=dtype, device=device)
    for changed in range(len(tensors(args))):
        for change in (torch.Tensor.zero_, lambda t: t.data.copy_(t), lambda t: setattr(t, "data", t.data * 2)):
            with hfnn.use(kernel.name):
                torch.manual_seed(7)
                inputs = list(leaves(args))
                if op.recipe_needs_recipe:
                    inputs[0] = hfnn.functional.gelu(inputs[0], prefer="memory")
                y = function(op)(*inputs, **kwargs)
                assert recipe.take(y) is not None
                seen = y.detach().clone()
                with torch.no_grad():
                    change(tensors(inputs)[changed])
                w = weight.clone().requires_grad_()
                (got,) = torch.autograd.grad(hfnn.functional.linear(y, w).square().mean(), w)
            (want,) = torch.autograd.grad(torch.nn.functional.linear(seen, w).square().mean(), w)
            assert torch.equal(got, want)
