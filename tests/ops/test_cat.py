"""torch.cat whose result is built again from its parts: values, gradients, layouts; what is kept, and by whom."""

import functools
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hfnn
from hfnn.core import native
from hfnn.core import node as recipe
from hfnn.memory import saved_bytes

if native.extension is None:
    pytest.skip(native.why, allow_module_level=True)

O, F = hfnn.functional, nn.functional
LAST = torch.channels_last


def drawn(device, channels=4, dtype=torch.float32):
    return torch.randn(2, channels, 5, 6, dtype=dtype).to(device).requires_grad_()


def norm(x):
    return O.batch_norm(x, None, None, None, None, True, prefer="memory")


def conv(x, weight):
    return O.conv2d(x, weight, prefer="memory")


def dense(x, layers, cat, own=norm):
    """A block in which each layer reads all features before it."""
    features, weights = x, []
    for i in range(layers):
        weights.append(torch.full((2, features.shape[1], 1, 1), 0.1 + 0.01 * i, device=x.device, dtype=x.dtype))
        weights[-1].requires_grad_()
        new = conv(own(features), weights[-1])
        features = cat([new, features], 1)
    return own(features), weights


def grads(y, leaves, **how):
    return torch.autograd.grad(y.square().sum(), leaves, **how)


def cats(tensors, dim):
    return O.cat(tensors, dim, prefer="memory")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("last", [False, True])
def test_gradients_are_torchs_bit_for_bit(device, dtype, last):
    x = drawn(device, dtype=dtype).detach().contiguous(memory_format=LAST if last else torch.contiguous_format)
    x.requires_grad_()
    recipe.counter.reset()
    y, weights = dense(x, 4, cats)
    found = [y, *grads(y, [x, *weights])]
    assert recipe.counter.rebuilt > 0
    y, weights = dense(x, 4, torch.cat)
    wanted = [y, *grads(y, [x, *weights])]
    assert all(a.stride() == b.stride() and torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_a_dense_block_keeps_each_feature_once(device):
    x, layers = drawn(device), 6
    unit = x.nbytes // 4  # of a channel
    weights = dense(x, layers, cats)[1]
    kept = saved_bytes(lambda: dense(x, layers, cats)[0]).total - sum(w.nbytes for w in weights)
    # x, and the first whole, which nothing says is worth it; then two channels a layer.
    channels = 4 + 2 * layers
    assert channels * unit <= kept <= 1.03 * (channels + 6) * unit
    stock = saved_bytes(lambda: dense(x, layers, torch.cat)[0]).total
    assert stock >= sum(4 + 2 * i for i in range(layers + 1)) * unit


def test_second_derivatives(device):
    found = []
    for cat in (cats, torch.cat):
        torch.manual_seed(0)
        x = drawn(device, dtype=torch.float64)
        y, weights = dense(x, 3, cat)
        (dx,) = grads(y, [x], create_graph=True)
        found.append(grads(dx, [x, *weights]))
    assert all(map(torch.allclose, *found))


def parts(device):
    """A part that can be built again, one that cannot, and the weight of a convolution of both."""
    x, y = drawn(device), drawn(device) * 1
    return norm(x), y, torch.randn(3, 8, 1, 1, device=device, requires_grad=True)


def test_what_a_reader_of_torchs_keeps_is_all_that_is_kept(device):
    """The parts are let go at the next call of a node that reads something else."""
    a, b, weight = parts(device)
    whole = cats([a, b], 1)
    assert "_Cat" in whole.grad_fn.name() and recipe.carries(whole)
    last, seen = weakref.ref(b), whole.sin()  # keeps the whole
    del b
    assert last() is not None
    norm(drawn(device))
    gc.collect()
    assert last() is None and not recipe.carries(whole)
    seen.sum().backward()
    conv(whole, weight)  # kept as by torch


UNREAD = {
    "one of several": lambda a, b: [cats([a, b], 1).sin(), cats([a, a], 1)],
    "a whole of a whole": lambda a, b: cats([cats([a, b], 1), a], 1).sin(),
    "a whole of a whole, along another dimension": lambda a, b: cats([cats([a, b], 1), cats([a, b], 1)], 2).sin(),
    "one of long chains": lambda a, b: cats([b, *[functools.reduce(lambda y, _: norm(y), range(9), a)] * 2], 1),
}


@pytest.mark.parametrize("case", UNREAD)
def test_wholes_that_no_node_reads_keep_no_parts(device, case):
    """Also where torch's ops read it."""
    a, b, _ = parts(device)
    seen, last = UNREAD[case](a, b), weakref.ref(b)
    norm(drawn(device))
    del b
    gc.collect()
    assert seen is not None and last() is None


@pytest.mark.parametrize("hooked", [False, True])
def test_parts_are_kept_for_the_first_reader(device, hooked):
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x) if hooked else recipe.drawing():
        a, b, weight = parts(device)
        whole = cats([a, b], 1)
        y = conv(whole, weight)
        norm(drawn(device))
        assert recipe.carries(whole)
        gone = weakref.ref(whole)
        del whole, a, b
        assert gone() is None
        y.square().sum().backward()


def test_writes_to_parts(device):
    a, b, weight = parts(device)
    whole = cats([a, b], 1)
    with torch.no_grad():
        b.zero_()
    conv(whole, weight).sum().backward()  # the whole was kept
    a, b, weight = parts(device)
    y = conv(cats([a, b], 1), weight)
    with torch.no_grad():
        b.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints(device, reentrant):
    a, b, weight = parts(device)
    whole = lambda a, b: conv(cats([a, b], 1), weight)  # noqa: E731
    y = checkpoint(whole, a, b, use_reentrant=reentrant)
    wanted = grads(whole(a, b), [weight], retain_graph=True)
    y.square().sum().backward()
    assert torch.equal(weight.grad, wanted[0])


REFUSED = {
    "one tensor": lambda a, b: ([a], 1),
    "two dtypes": lambda a, b: ([a, b.double()], 1),
    "data": lambda a, b: ([a, torch.ones_like(a)], 1),
    "a view of more memory": lambda a, b: ([a, torch.stack([b, b, b])[0]], 1),
    "no gradient": lambda a, b: ([a.detach(), b.detach()], 1),
    "parts that nothing keeps": lambda a, b: ([a.detach().requires_grad_() * 1, b * 1], 1),
    "an empty one, of torch's past": lambda a, b: ([a, torch.empty(0, device=a.device)], 1),
}


@pytest.mark.parametrize("case", REFUSED)
def test_others_are_torchs(device, case):
    tensors, dim = REFUSED[case](*parts(device)[:2])
    y = cats(tensors, dim)
    assert torch.equal(y, torch.cat(tensors, dim)) and (y.grad_fn is None or y.grad_fn.name() == "CatBackward0")


WRONG = (
    ([], 0),
    ((torch.ones(1), None), 0),
    ([None] * 2, 0),
    ((torch.ones(1, 2), torch.ones(2, 3)), 0),
    ((torch.ones(1),) * 2, 3),
    (3, 0),
)


@pytest.mark.parametrize("arguments", WRONG)
def test_errors_are_torchs(arguments):
    with pytest.raises((RuntimeError, TypeError, IndexError, ValueError)) as wanted:
        torch.cat(*arguments)
    with pytest.raises(wanted.type) as found:
        cats(*arguments)
    assert str(found.value) == str(wanted.value)


def test_a_whole_as_a_part(device):
    """It stands for its parts, in any place, and whatever was read before."""
    for order in ([0, 1], [1, 0], [0, 1, 0]):
        a, b, weight = parts(device)
        inner, read = (whole := cats([a, b], 1)), conv(whole, weight)
        other = cats([b, a], 1)
        assert recipe.carries(inner) and read.requires_grad
        given = [(inner, other, a)[i] for i in order]
        weight = torch.ones(3, sum(x.shape[1] for x in given), 1, 1, device=device, requires_grad=True)
        found, wanted = (
            grads(conv(cat(given, 1), weight), [weight, b], retain_graph=True) for cat in (cats, torch.cat)
        )
        assert all(map(torch.equal, found, wanted))


def test_several_backwards(device):
    a, b, weight = parts(device)
    y = conv(cats([b, a, b], -3), torch.cat([weight, weight[:, :4]], 1))
    first = grads(y, [weight, b], retain_graph=True)
    assert all(map(torch.equal, first, grads(y, [weight, b])))


def test_gradients_of_parts_are_views_as_torchs(device):
    """So nothing is added to them in place, which would leave them the whole's strides in dimensions of size 1."""
    found = []
    for cat in (cats, torch.cat):
        x = torch.ones(1, 4, 5, 6, device=device, requires_grad=True)
        a = x * 1
        y = cat([norm(a), a], 1)
        y.register_hook(lambda dy: found.append(dy))
        a.register_hook(lambda dy: found.append(dy.stride()))
        y.sin().sum().backward()
        found.append(x.grad.stride())
    assert found[1:3] == found[4:] and found[0].stride() == found[3].stride()
