"""Limits of recipes: at a checkpoint, at hooks of saved tensors, at a buffer, and at the producer's backward."""

import contextlib
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hfnn
from hfnn.core import node as recipe
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
    """The norm's input is freed with the checkpointed region, although the region's result lives on."""
    inner, outer = build(linear, norm), build(linear)
    sources = []
    inner[0].register_forward_hook(lambda module, args, y: sources.append(weakref.ref(y.untyped_storage())))
    y = again(inner, torch.randn(ROWS, WIDTH, requires_grad=True))
    z = again(outer, y)
    assert sources[0]() is None and y.requires_grad
    z.sum().backward()


def test_a_checkpointed_result_keeps_no_argument_after_backward():
    """Nor do the region's hooks, which hold the arguments for recomputation."""
    first, region = build(linear), build(norm)
    h = first(torch.randn(ROWS, WIDTH))
    argument = weakref.ref(h.untyped_storage())
    y = again(region, h)
    del h
    assert argument() is not None
    y.sum().backward()
    assert argument() is None and y.requires_grad


def test_what_was_rebuilt_for_a_checkpoint_is_gone_with_it(rebuilt):
    """The norm outside, its consumer inside: no further consumer is waited for."""
    outer, inner = build(norm), build(linear, nn.GELU, linear)
    x = torch.randn(ROWS, WIDTH, requires_grad=True) * 1
    alive = []
    x.register_hook(lambda dx: alive.append(sum(ref() is not None for ref in rebuilt)))
    (x + again(inner, outer(x))).sum().backward()
    assert alive == [0] and rebuilt


@pytest.mark.parametrize("modules", [(linear, nn.GELU), (linear, norm), (norm, nn.Dropout), (nn.GELU, nn.GLU)])
def test_a_result_that_is_kept_keeps_no_source_after_backward(modules):
    model, sources = build(*modules), []
    for module in model:
        module.register_forward_hook(lambda module, args, y: sources.append(weakref.ref(args[0].untyped_storage())))
    y = model(torch.randn(ROWS, WIDTH, requires_grad=True) * 1)
    y.sum().backward(retain_graph=True)
    assert recipe.take(y) is not None or modules == (nn.GELU, nn.GLU)  # a later consumer may still take it
    y.sum().backward()
    gc.collect()
    assert not any(ref() for ref in sources) and y.requires_grad


def test_a_turned_head_that_is_kept_keeps_no_source_after_backward():
    (query, key, cos, sin), _ = rope.sample((2, 3, 2, 2, 16, 16, False), torch.float32, "cpu")
    x = query.requires_grad_() * 1
    source = weakref.ref(x.untyped_storage())
    with hfnn.use("cpp"):
        q, _ = hfnn.functional.rope(hfnn.functional.silu(x), key, cos, sin)
    assert recipe.take(q) is not None
    q.sum().backward()
    del x
    gc.collect()
    assert source() is None


def test_what_a_backward_rebuilt_that_failed_is_not_anothers(rebuilt):
    """The next backward rebuilds it, because anything may have happened since."""
    model, (first, second) = build(linear, nn.GELU), (build(linear), build(linear))
    y = model(torch.randn(ROWS, WIDTH))
    z = first(y)
    fails = z.register_hook(lambda dz: 1 / 0)
    loss = second(y).sum() + z.sum()
    for times in 1, 2:
        with contextlib.suppress(ZeroDivisionError):
            loss.backward(retain_graph=True)
        fails.remove()
        assert len(rebuilt) == times, "two consumers share what this backward rebuilt, and nothing else"


@pytest.mark.parametrize("refill", [torch.Tensor.copy_, lambda x, new: x.numpy().__setitem__(..., new.numpy())])
@pytest.mark.parametrize("modules", [(nn.GELU, linear), (nn.SiLU, linear), (norm, linear)])
def test_an_input_buffer_may_be_filled_anew(modules, refill):
    """One buffer for all micro-batches, one backward: a tensor outside the graph is no source."""

    def step(converted):
        model, x = build(*modules, converted=converted), torch.zeros(ROWS, WIDTH)
        model[0].requires_grad_(refill is not torch.Tensor.copy_)  # torch's norm keeps x for its weight's gradient
        losses = []
        for i in range(3):
            refill(x, torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(i)))
            losses.append(model(x).square().sum())
        return torch.autograd.grad(sum(losses), model[1].weight)[0]

    torch.testing.assert_close(step(True), step(False))


def test_consumers_in_two_dtypes_share_nothing_wrong():
    """A Linear under autocast and a norm: each gets the tensor in its own dtype."""
    model = build(norm, linear, norm)

    def run(x):
        with torch.autocast("cpu", torch.bfloat16):
            h = model[0](x)
            return model[2](h) + model[1](h)

    on = gradients(run, model)
    with recipe.disabled():
        assert same(on, gradients(run, model))


@pytest.mark.parametrize("module", [norm, nn.GELU, nn.SiLU])
def test_one_half_is_consumed_as_the_other(module):
    """A producer in float16, its consumer under bfloat16 autocast."""
    model = build(module, linear)

    def run(x):
        with torch.autocast("cpu", torch.bfloat16):
            return model[1](model[0](x.half() * 1)).float()

    model[0].half()
    on = gradients(run, model)
    with recipe.disabled():
        assert same(on, gradients(run, model))


@pytest.mark.parametrize("modules", [(norm, linear), (linear, nn.GELU, linear), (norm, nn.Dropout, linear)])
def test_hooks_see_each_source_once(modules):
    """At the producer, where each is unpacked once per backward. Hooks never see what the consumer rebuilds."""
    model, packed, unpacked = build(*modules), [], []
    outputs = []
    for module in list(model)[:-1]:
        module.register_forward_hook(lambda module, args, y: outputs.append(y.data_ptr()))

    def pack(t):
        packed.append(t.data_ptr())
        return len(packed) - 1, t

    def unpack(found):
        unpacked.append(found[0])
        return found[1]

    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        y = model(x)
    assert outputs[-1] not in packed and packed.count(x.data_ptr()) == 1
    y.sum().backward()
    assert recipe.counter.rebuilt and sorted(unpacked) == list(range(len(packed)))


@pytest.mark.parametrize("amp", [False, True])
def test_a_second_loss_after_the_producers_backward(amp):
    """As in torch, the other consumer's weights get gradients, and the first graph cannot be passed again."""

    def run(recipes):
        model, first, second = build(linear, nn.GELU), build(linear), build(linear)
        x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
        only = contextlib.nullcontext() if recipes else recipe.disabled()
        with torch.autocast("cpu", torch.bfloat16, enabled=amp), only:
            h = model(x)
            a, b = first(h), second(h)
        a.float().square().sum().backward()
        wanted = [*second.parameters()]
        found = torch.autograd.grad(b.float().square().sum(), wanted, retain_graph=True)
        again = torch.autograd.grad(b.float().square().sum(), wanted, create_graph=True)
        with pytest.raises(RuntimeError, match="a second time"):
            sum(g.square().sum() for g in again).backward()
        assert not recipe.carries(h)
        return *found, *again, model[0].weight.grad

    assert same(run(True), run(False))


def test_what_is_left_goes_with_its_last_consumer(rebuilt):
    model, first, second = build(linear, nn.GELU), build(linear), build(linear)
    h = model(torch.randn(ROWS, WIDTH))
    a, b = first(h).sum(), second(h).sum()
    a.backward()
    assert [y() is not None for y in rebuilt] == [False, True]
    torch.autograd.grad(b, second[0].weight)
    assert [y() for y in rebuilt] == [None, None] and b.requires_grad


def test_without_its_consumer_nothing_is_left(rebuilt):
    model, first, second = build(linear, nn.GELU), build(linear), build(linear)
    h = model(torch.randn(ROWS, WIDTH))
    second(h)
    first(h).sum().backward()
    assert len(rebuilt) == 1


@pytest.mark.parametrize("modules", [(norm, linear), (nn.GELU, linear), (norm, nn.Dropout, linear, nn.SiLU, linear)])
@pytest.mark.parametrize("retain", [True, False])
def test_weight_gradients_later(retain, modules):
    """First the inputs' gradients, then the weights'. The producer runs in both passes, or is freed in the second."""
    model = build(*modules)

    def run(recipes):
        torch.manual_seed(2)
        x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_()
        with contextlib.nullcontext() if recipes else recipe.disabled():
            y = model(x)
        dy = torch.ones_like(y)
        weights = list((model if retain else model[-1]).parameters())
        dx = torch.autograd.grad(y, x, dy, retain_graph=True)
        return *dx, *torch.autograd.grad(y, weights, dy, retain_graph=retain), x.detach()

    assert same(run(True), run(False))


@pytest.mark.parametrize("modules", [(norm, linear), (nn.GELU, linear), (nn.GELU, norm), (nn.GELU, nn.SiLU)])
def test_a_kept_output_keeps_nothing(modules):
    """Neither what its producer saved, nor the sources of its recipe."""
    model = build(linear, *modules)
    x = torch.randn(ROWS, WIDTH, requires_grad=True) * 1
    outputs = []
    for module in model:
        module.register_forward_hook(lambda module, args, y: outputs.append(weakref.ref(y.untyped_storage())))
    y = model(x)
    assert recipe.counter.taken
    y.square().sum().backward()
    gc.collect()
    assert [storage() is not None for storage in outputs] == [False, False, True] and y.requires_grad


CHANGES = {
    "written to": lambda y: y.detach().zero_(),
    "in the graph": lambda y: y.mul_(2),
    "other memory": lambda y: setattr(y, "data", y.data.clone()),
    "other strides": lambda y: setattr(y, "data", y.data.view(WIDTH, ROWS).t()),
    "other sizes": lambda y: setattr(y, "data", y.data[: ROWS // 2]),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("module", [norm, nn.GELU])
def test_an_output_that_changed_is_not_taken(module, change):
    y = build(module)(torch.randn(ROWS, WIDTH, requires_grad=True))
    assert recipe.take(y) is not None and recipe.take(y.view(-1)) is not None and recipe.take(y.detach()) is None
    view = y.view(-1)
    CHANGES[change](y)
    assert recipe.take(y) is None and recipe.take(view) is None


@pytest.mark.parametrize("modules", [(norm, linear), (nn.GELU, linear), (nn.GELU, norm), (norm, nn.SiLU)])
def test_an_output_written_to_after_it_was_taken_is_an_error(modules):
    def run(converted):
        model = build(*modules, converted=converted)
        h = model[0](torch.randn(ROWS, WIDTH, requires_grad=True))
        y = model[1](h)
        with torch.no_grad():
            h.mul_(2)
        with pytest.raises(RuntimeError, match=r"by an inplace operation.* is at version 1; expected version 0"):
            y.sum().backward()

    run(True)
    run(False)


@pytest.mark.parametrize("modules, amp", [((norm, linear), True), ((nn.GELU, nn.Dropout), False)])
def test_where_torch_keeps_no_output_it_may_be_written_to(modules, amp):
    """Only a cast, or a mask, is kept."""

    def run(write):
        model = build(*modules)
        x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=amp):
            h = model[0](x)
            torch.manual_seed(2)
            y = model[1](h).float()
        if write:
            with torch.no_grad():
                h.zero_()
        return torch.autograd.grad(y.square().sum(), [x, *model.parameters()])

    recipe.counter.reset()
    assert same(run(True), run(False)) and recipe.counter.taken == 2


def test_batched_gradients_end_what_is_kept_after_the_last():
    model = build(linear, nn.GELU, linear)
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    kept = []
    with model[0].register_forward_hook(lambda module, args, h: kept.append(weakref.ref(h))):
        y = model(x)
    wanted = [x, *model.parameters()]
    dy = torch.randn(3, *y.shape)
    one_by_one = [torch.autograd.grad(y, wanted, d, retain_graph=True) for d in dy]
    batched = torch.autograd.grad(y, wanted, dy, is_grads_batched=True)
    for i, found in enumerate(one_by_one):
        assert same(found, [g[i] for g in batched])
    assert kept[0]() is None and y.grad_fn is not None
