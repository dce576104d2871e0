"""Where recipes end: at a checkpoint, at hooks of saved tensors, at a buffer, and with the producer's backward."""

import contextlib
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hfnn
from hfnn import recipe
from hfnn.ops import rope

ROWS, WIDTH = 64, 32


def build(*modules, converted=True):
    torch.manual_seed(0)
    model = nn.Sequential(*(make() for make in modules))
    return hfnn.convert(model, prefer="memory") if converted else model


def norm():
    return nn.LayerNorm(WIDTH)


def linear():
    return nn.Linear(WIDTH, WIDTH)


def gradients(run, model):
    """Gradients of a fixed input and of the parameters."""
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_()
    return torch.autograd.grad(run(x).square().sum(), [x, *model.parameters()])


def same(a, b):
    return all(map(torch.equal, a, b))


def again(function, *args):
    return checkpoint(function, *args, use_reentrant=False)


def one_by_one(model, x):
    for module in model:
        x = again(module, x)
    return x


WAYS = {
    "each": one_by_one,
    "each and all": lambda model, x: again(one_by_one, model, x),
    "all but the first": lambda model, x: again(model[1:], model[0](x)),
    "all but the first, twice": lambda model, x: again(lambda x: again(model[1:], model[0](x)), x),
    "a part in all": lambda model, x: again(lambda x: model[2:](again(model[:2], x)), x),
}
HOOKS = {
    "none": lambda: torch.enable_grad(),
    "identity": lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t),
    "offloaded": torch.autograd.graph.save_on_cpu,
}


@pytest.mark.parametrize("modules", [(nn.SiLU, norm), (nn.GELU, norm, nn.GELU, norm), (norm, linear, nn.GELU, linear)])
@pytest.mark.parametrize("hooks", HOOKS)
@pytest.mark.parametrize("way", WAYS)
def test_checkpoints_change_no_gradient(way, hooks, modules):
    model = build(*modules)

    def run(x):
        with HOOKS[hooks]():
            return WAYS[way](model, x)

    assert same(gradients(run, model), gradients(model, model))


def test_a_checkpointed_result_keeps_nothing_but_itself():
    """The norm's input goes with the region that made it, although its result lives on."""
    inner, outer = build(linear, norm), build(linear)
    sources = []
    inner[0].register_forward_hook(lambda module, args, y: sources.append(weakref.ref(y.untyped_storage())))
    y = again(inner, torch.randn(ROWS, WIDTH, requires_grad=True))
    z = again(outer, y)
    assert sources[0]() is None and y.requires_grad
    z.sum().backward()


def test_what_was_rebuilt_for_a_checkpoint_is_gone_with_it():
    """The norm outside, its consumer inside: nobody is left to wait for."""
    outer, inner, rebuilt = build(norm), build(linear, nn.GELU, linear), []
    make = recipe.Recipe._make

    def watch(self, *sources):
        y = make(self, *sources)
        rebuilt.append(weakref.ref(y))
        return y

    x = torch.randn(ROWS, WIDTH, requires_grad=True) * 1
    alive = []
    x.register_hook(lambda dx: alive.append(sum(ref() is not None for ref in rebuilt)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recipe.Recipe, "_make", watch)
        (x + again(inner, outer(x))).sum().backward()
    assert alive == [0] and rebuilt


@pytest.mark.parametrize("modules", [(linear, nn.GELU), (linear, norm), (norm, nn.Dropout), (nn.GELU, nn.GLU)])
def test_a_result_that_is_kept_keeps_no_source_after_backward(modules):
    model, sources = build(*modules), []
    for module in model:
        module.register_forward_hook(lambda module, args, y: sources.append(weakref.ref(args[0].untyped_storage())))
    y = model(torch.randn(ROWS, WIDTH, requires_grad=True) * 1)
    y.sum().backward(retain_graph=True)
    assert recipe.find(y) is not None or modules == (nn.GELU, nn.GLU)  # a later consumer may still take it
    y.sum().backward()
    gc.collect()
    assert not any(ref() for ref in sources) and y.requires_grad


def test_a_turned_head_that_is_kept_keeps_no_source_after_backward():
    (query, key, cos, sin), _ = rope.sample((2, 3, 2, 2, 16, 16, False), torch.float32, "cpu")
    x = query.requires_grad_() * 1
    source = weakref.ref(x.untyped_storage())
    with hfnn.use("cpp"):
        q, _ = hfnn.functional.rope(hfnn.functional.silu(x), key, cos, sin)
    assert recipe.find(q) is not None
    q.sum().backward()
    del x
    gc.collect()
    assert source() is None


def test_what_a_backward_rebuilt_that_failed_is_not_anothers(monkeypatch):
    """The next one rebuilds it: nobody knows what has happened since."""
    model, (first, second), rebuilt = build(linear, nn.GELU), (build(linear), build(linear)), []
    rebuild = recipe.Recipe.rebuild
    monkeypatch.setattr(recipe.Recipe, "rebuild", lambda *args: rebuilt[-1].append(rebuild(*args)) or rebuilt[-1][-1])
    y = model(torch.randn(ROWS, WIDTH))
    z = first(y)
    fails = z.register_hook(lambda dz: 1 / 0)
    loss = second(y).sum() + z.sum()
    for _ in range(2):
        rebuilt.append([])
        with contextlib.suppress(ZeroDivisionError):
            loss.backward(retain_graph=True)
        fails.remove()
    assert [len(found) for found in rebuilt] == [1, 2] and all(x is not rebuilt[0][0] for x in rebuilt[1])


@pytest.mark.parametrize("refill", [torch.Tensor.copy_, lambda x, new: x.numpy().__setitem__(..., new.numpy())])
@pytest.mark.parametrize("modules", [(nn.GELU, linear), (nn.SiLU, linear), (norm, linear)])
def test_an_input_buffer_may_be_filled_anew(modules, refill):
    """One buffer for all micro-batches, one backward: what is no part of the graph is no source."""

    def step(converted):
        model, x = build(*modules, converted=converted), torch.zeros(ROWS, WIDTH)
        model[0].requires_grad_(refill is not torch.Tensor.copy_)  # torch's norm keeps x for its weight's
        losses = []
        for i in range(3):
            refill(x, torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(i)))
            losses.append(model(x).square().sum())
        return torch.autograd.grad(sum(losses), model[1].weight)[0]

    torch.testing.assert_close(step(True), step(False))


def test_consumers_in_two_dtypes_share_nothing_wrong():
    """A Linear under autocast and a norm: each has the tensor in its own dtype."""
    model = build(norm, linear, norm)

    def run(x):
        with torch.autocast("cpu", torch.bfloat16):
            h = model[0](x)
            return model[2](h) + model[1](h)

    on = gradients(run, model)
    with recipe.disabled():
        assert same(on, gradients(run, model))


def test_a_cast_goes_when_the_next_tensor_is_cast():
    first, second, layer = build(norm), build(norm), build(linear)
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        h = first(x)
        layer(h)
        low = weakref.ref(recipe.tags[id(h)].cast(h, torch.bfloat16))
        assert low() is not None, "siblings share it"
        layer(second(x))
    assert low() is None and recipe.find(h) is not None


@pytest.mark.parametrize("module", [norm, nn.GELU, nn.SiLU])
def test_one_half_is_consumed_as_the_other(module):
    """A producer in float16, its consumer under an autocast of bfloat16."""
    model = build(module, linear)

    def run(x):
        with torch.autocast("cpu", torch.bfloat16):
            return model[1](model[0](x.half() * 1)).float()

    model[0].half()
    on = gradients(run, model)
    with recipe.disabled():
        assert same(on, gradients(run, model))
