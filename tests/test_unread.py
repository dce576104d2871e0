"""Logits that nobody has read still have a graph, and have the values of their forward whenever they are read."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hfnn
from hfnn.deferred.graph import Gradient
from hfnn.deferred.logits import Deferred, defer

F = nn.functional
ROWS, SEQ, HIDDEN, VOCABULARY = 2, 7, 8, 11


@pytest.fixture(autouse=True)
def given():
    torch.manual_seed(0)
    hidden = torch.randn(ROWS, SEQ, HIDDEN, requires_grad=True)
    return hidden, torch.randn(VOCABULARY, HIDDEN, requires_grad=True), torch.randn(VOCABULARY, requires_grad=True)


def loss_of(x, **options):
    classes = torch.arange(x.shape[:-1].numel()) % VOCABULARY
    return F.cross_entropy(x.reshape(-1, VOCABULARY), classes, **options)


def shifted(x):
    return x[..., :-1, :].contiguous()


def same(given, function):
    """function(logits, seen) on torch's logits and on unread ones: what was seen, and the gradients of the leaves."""
    results = []
    for make in (F.linear, defer):
        for t in given:
            t.grad = None
        seen = []
        function(make(*given), seen)
        results.append((seen, [t.grad for t in given]))
    torch.testing.assert_close(*reversed(results))
    return results[1]


HOOKED = {
    "before the loss": lambda x, hook: (x.register_hook(hook), loss_of(x))[1].backward(),
    "after the loss": lambda x, hook: (loss := loss_of(x), x.register_hook(hook), loss.backward()),
    "of shifted ones": lambda x, hook: (loss := loss_of(shifted(x)), x.register_hook(hook), loss.backward()),
    "of capped ones": lambda x, hook: (loss := loss_of((x / 3).tanh() * 3), x.register_hook(hook), loss.backward()),
    "of chosen ones": lambda x, hook: (
        loss := loss_of(x[torch.arange(ROWS * SEQ).view(ROWS, SEQ) % 3 > 0]), x.register_hook(hook), loss.backward()
    ),
    "in other numbers": lambda x, hook: (
        loss := loss_of(2 * x.bfloat16().float()), x.register_hook(hook), loss.backward()
    ),
    "of two losses": lambda x, hook: (
        loss := loss_of(x) + loss_of(shifted(x), label_smoothing=0.1), x.register_hook(hook), loss.backward()
    ),
    "read, too": lambda x, hook: (loss := loss_of(x) + x.square().mean(), x.register_hook(hook), loss.backward()),
    "hooked, then read": lambda x, hook: (x.register_hook(hook), (loss_of(x) + x.square().mean()).backward()),
    "read alone": lambda x, hook: (x.register_hook(hook), x.exp().mean().backward()),
    "read, then hooked": lambda x, hook: (y := x.exp().mean(), x.register_hook(hook), y.backward()),
    "written to": lambda x, hook: (x.mul_(2), x.register_hook(hook), loss_of(x).backward()),
    "below": lambda x, hook: (y := shifted(x), y.register_hook(hook), loss_of(y).backward()),
    "below, read": lambda x, hook: (y := shifted(x), y.register_hook(hook), y.square().sum().backward()),
    "a view, read": lambda x, hook: (y := x.view(-1, VOCABULARY), y.register_hook(hook), y.square().sum().backward()),
}  # fmt: skip


@pytest.mark.parametrize("changes", [False, True])
@pytest.mark.parametrize("way", HOOKED)
def test_hooks(given, way, changes):
    """They run once, with the whole gradient, and what they return is used."""

    def hooked(x, seen):
        def hook(grad):
            seen.append(grad + 0)
            return grad * 3 if changes else None

        HOOKED[way](x, hook)

    seen, _ = same(given, hooked)
    assert len(seen) == 1 and type(seen[0]) is torch.Tensor


def test_hooks_that_do_not_look(given):
    """Like fully_shard's, on every output: the logits' gradient is never computed, and the fused loss runs."""
    x, seen = defer(*given), []
    x.register_hook(lambda grad: seen.append((type(grad), grad.shape, grad._value)))
    removed = x.register_hook(lambda grad: seen.append("removed"))
    removed.remove()
    loss_of(shifted(x)).backward()
    assert seen == [(Gradient, (ROWS, SEQ, VOCABULARY), None)] and x._value is None


@pytest.mark.parametrize("way", HOOKED)
def test_retained(given, way):
    def retained(x, seen):
        targets = []

        class Target:
            def register_hook(self, hook):
                raise AssertionError

        def keep(t):
            t.retain_grad()
            targets.append(t)

        original = torch.Tensor.register_hook
        torch.Tensor.register_hook = lambda t, hook: keep(t)
        try:
            HOOKED[way](x, None)
        finally:
            torch.Tensor.register_hook = original
        seen += [t.grad for t in targets]
        targets[0].grad = None
        seen.append(targets[0].grad)

    same(given, retained)


@pytest.mark.parametrize("create_graph", [False, True])
def test_gradient_of_logits(given, create_graph):
    def graded(x, seen):
        y = shifted(x)
        loss = loss_of(y) + loss_of(x, reduction="sum", weight=torch.linspace(0.5, 1, VOCABULARY))
        seen += torch.autograd.grad(loss, x, retain_graph=True)
        seen += torch.autograd.grad(loss, [given[1], x, y, given[0]], create_graph=create_graph, retain_graph=True)
        if create_graph:
            sum(g.square().sum() for g in seen).backward(retain_graph=True)
        seen.append(torch.autograd.grad(loss, given[1], retain_graph=True)[0])
        loss.backward()

    seen, _ = same(given, graded)
    assert all(type(g) is torch.Tensor for g in seen)


def test_inputs_of_backward(given):
    """The second backward gets its gradient from the same, retained graph. A third raises torch's error."""

    def backwards(x, seen):
        loss = loss_of(shifted(x))
        loss.backward(inputs=[x, given[1]], retain_graph=True)
        seen += [x.grad + 0, given[1].grad + 0]
        loss.backward()
        seen.append(x.grad)
        with pytest.raises(RuntimeError, match="Trying to backward through the graph a second time"):
            loss.backward()

    same(given, backwards)


@pytest.mark.parametrize("read", [False, True])
def test_detached_as_a_leaf(given, read):
    """As a reentrant checkpoint does."""

    def leaf(x, seen):
        y = x.detach()
        if read:
            seen.append(y + 1)
        y.requires_grad_().register_hook(lambda grad: seen.append(grad + 0))
        seen.append(torch.autograd.grad(loss_of(y * 2), y)[0])
        y.exp().mean().backward()
        y.retain_grad()
        seen.append(y.grad)
        x.backward(y.grad)

    seen, _ = same(given, leaf)
    assert len(seen) == 4 + read


def test_unused(given):
    x, z = defer(*given), defer(*given)
    with pytest.raises(RuntimeError, match="not have been used in the graph"):
        torch.autograd.grad(loss_of(x), z)
    assert torch.autograd.grad(loss_of(x), z, allow_unused=True) == (None,)
    assert torch.autograd.grad(loss_of(x), z, materialize_grads=True)[0].eq(0).all()
    x.sum(), z.sum()
    y, w = x[0], z.view(-1, VOCABULARY)
    assert torch.autograd.grad(loss_of(y), w, allow_unused=True) == (None,)


OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.5),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.5),
    "ours": lambda params: hfnn.optim.AdamW(params, lr=0.5),
    "lbfgs": lambda params: torch.optim.LBFGS(params, lr=0.5),
}


@pytest.mark.parametrize("tokens", [ROWS * SEQ, HIDDEN // 2])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_read_after_a_step(given, name, tokens):
    """Logits returned before a step, and those of its closure, use the weights of their forward."""
    results = []
    for make in (F.linear, defer):
        weight, bias = (nn.Parameter(t.detach().clone()) for t in given[1:])
        hidden = given[0].view(-1, HIDDEN)[:tokens]
        optimizer, outputs = OPTIMIZERS[name]([weight, bias]), []

        def closure():
            outputs.append(make(hidden, weight, bias))  # noqa: B023
            loss = loss_of(outputs[-1])  # noqa: B023
            optimizer.zero_grad()  # noqa: B023
            loss.backward()
            return loss

        for _ in range(3):
            closure()
            outputs.append(outputs[-1].float().detach()[1:])
            optimizer.step(closure)
        results.append([x + 0 for x in outputs])
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("what", ["weight", "bias"])
@pytest.mark.parametrize("scale", [1.5, 1.0])
def test_written_to_as_data(given, what, transposed, scale):
    """A write to `.data` raises no version: an average of weights for evaluation, or a step by hand."""
    hidden, weight, bias = given
    if transposed:
        weight = weight.detach().t().contiguous().t().requires_grad_()
    weight.data[0, 0] = bias.data[0] = float("nan")  # NaN is no change
    x = defer(hidden, weight, bias)
    {"weight": weight, "bias": bias}[what].data.mul_(scale)
    if scale == 1:
        assert x.argmax(-1).shape == (ROWS, SEQ)
        return
    with pytest.raises(RuntimeError, match="the weights have changed since"):
        x.argmax(-1)
    with pytest.raises(RuntimeError, match="the weights have changed since"):
        x.numpy(force=True)


def test_in_backward(given):
    weight = nn.Parameter(given[1].detach().clone())
    optimizer = hfnn.optim.SGD([weight], lr=1.0)
    hfnn.optim.step_in_backward(optimizer)
    x, wanted = defer(given[0], weight, None), F.linear(given[0], weight)
    loss_of(x).backward()
    assert not weight.equal(given[1])
    torch.testing.assert_close(x + 0, wanted)


def test_what_is_kept_for_a_step(given):
    """One copy of a weight for all that may still be read; none if nothing may be read or logits are smaller."""
    weight = nn.Parameter(given[1].detach())
    weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    x, y, gone, small = (defer(h, weight, None) for h in (given[0], given[0] + 1, given[0], given[0][:1, :4]))
    products = [t._plan.product for t in (x, y, gone, small)]
    loss = loss_of(gone)
    del gone
    optimizer.step()
    kept = [list(product._kept.values()) for product in products]
    assert len(kept[0]) == 1 and kept[0][0] is kept[1][0] and not kept[2] and not kept[3]
    assert small._value is not None and x._value is None
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        x.sum().backward()
    copy = weakref.ref(kept[0][0])
    del x, y, products, kept
    gc.collect()
    assert copy() is None


def test_an_unread_gradient_after_a_step(given):
    """A hook may keep its argument until the weights have changed."""

    def late(x, seen):
        x.register_hook(seen.append)
        loss_of(x).backward()

    results = []
    for make in (F.linear, defer):
        weight, seen = nn.Parameter(given[1].detach().clone()), []
        optimizer = torch.optim.SGD([weight], lr=1.0)
        late(make(given[0], weight, None), seen)
        optimizer.step()
        results.append(seen[0] + 0)
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("read", [False, True])
def test_released(given, read):
    """After backward, a held loss holds no more than in torch: no hidden states, no logits."""
    hidden = given[0].detach() * 1
    x = defer(hidden, *given[1:])
    loss = loss_of(x) + (x.square().sum() if read else 0)
    refs = [weakref.ref(t) for t in (hidden, x, x._plan.product)]
    storage = hidden.untyped_storage()._weak_ref()
    del x, hidden
    loss.backward()
    gc.collect()
    assert not any(ref() for ref in refs)
    assert torch.UntypedStorage._expired(storage)
    torch.UntypedStorage._free_weak_ref(storage)


def capped(x):
    return (x / 3).tanh() * 3


CHECKPOINTED = {
    "read": lambda x: x.float().logsumexp(-1).square().mean(),
    "loss": loss_of,
    "capped": lambda x: loss_of(capped(shifted(x))),
    "chosen": lambda x: loss_of(x[torch.arange(x.shape[:-1].numel()).view(x.shape[:-1]) % 3 > 0]),
    "both": lambda x: capped(x).exp().mean() + loss_of(x),
}


@pytest.mark.parametrize("read", ["never", "before", "after"])
@pytest.mark.parametrize("first", [shifted, capped])
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", CHECKPOINTED)
def test_checkpoint_of_logits(given, name, reentrant, first, read):
    def checkpointed(x, seen):
        y = first(x)
        if read == "before":
            seen.append(x.argmax(-1))
        loss = checkpoint(CHECKPOINTED[name], y, use_reentrant=reentrant)
        if read == "after":
            seen.append(y.argmax(-1))
        seen.append(loss.detach())
        loss.backward()

    same(given, checkpointed)


def test_checkpoint_around_logits(given):
    """A product inside the region is not read there, as without a checkpoint."""
    found = []

    def region(*given):
        found.append(defer(*given))
        return loss_of(shifted(found[-1]))

    checkpoint(region, *given, use_reentrant=False).backward()
    assert len(found) == 2 and all(x._value is None for x in found)


COMPILED = {
    **{name: CHECKPOINTED[name] for name in ("read", "loss", "both")},
    "written to": lambda x: x.mul_(2).square().mean(),
    "a view": lambda x: x.view(-1, VOCABULARY)[1:].square().sum(),
}


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_code_that_reads(given, name, recwarn):
    """Dynamo compiles the user's code, not ours."""

    def compiled(x, seen):
        torch._dynamo.reset()
        loss = torch.compile(COMPILED[name], backend="eager")(x)
        seen += [loss.detach(), x.detach() + 0]
        loss.backward()

    same(given, compiled)
    assert not [w for w in recwarn if "Dynamo" in str(w.message)]


def test_type(given):
    assert type(defer(*given)) is Deferred


def test_a_weight_that_is_a_view(given):
    """The weight is a view of a parameter with more rows, which the optimizer writes to."""
    results = []
    for make in (F.linear, defer):
        padded = nn.Parameter(torch.cat([given[1].detach()] * 2))
        padded.grad = torch.ones_like(padded)
        x = make(given[0], padded[:VOCABULARY], None)
        torch.optim.SGD([padded], lr=0.5).step()
        results.append(x + 0)
    torch.testing.assert_close(*results)


def test_a_gradient_that_is_held_holds_no_graph_of_the_loss(given):
    x, seen = defer(*given), []
    x.register_hook(seen.append)
    loss_of(x).backward()
    (gradient,) = seen
    assert type(gradient) is Gradient and all(part.loss is part.given is None for part, _ in gradient.parts)
