"""Long chains of cheap ops without a product between them: bounded recipes, so bounded stack, time and memory."""

import gc
import time

import pytest
import torch
from torch import nn

import hfnn
from hfnn.core import native
from hfnn.core import node as recipe
from hfnn.core.holder import target_of

torch_only = pytest.mark.skipif(native.extension is None, reason="needs the rooms in C++")
BODIES = {
    "C++": lambda: nn.Sequential(nn.LayerNorm(24), nn.GELU()),
    "described": lambda: nn.Sequential(nn.GroupNorm(4, 24), nn.Softsign()),
    "mixed": lambda: nn.Sequential(nn.GroupNorm(4, 24), nn.SiLU(), nn.Dropout(0.1)),
}


@pytest.fixture(params=BODIES)
def bodies(request):
    """The same body twice, of torch and converted."""
    torch.manual_seed(0)
    stock = BODIES[request.param]()
    ours = hfnn.convert(BODIES[request.param](), prefer="memory")
    ours.load_state_dict(stock.state_dict())
    return stock, ours


def run(body, length, backward=True):
    """(the result, the gradient of the input) of a chain of `length` calls."""
    torch.manual_seed(1)
    leaf = torch.randn(3, 24, requires_grad=True)
    y = leaf * 1
    for _ in range(length):
        y = body(y)
    if backward:
        y.square().sum().backward()
    return y.detach(), leaf.grad


def test_a_chain_deeper_than_the_stack(bodies):
    """As deep as a stack of 8 MiB allows: forward, backward, and freeing what is left."""
    stock, ours = (body.eval() for body in bodies)
    length = 6000 if target_of(ours[0]) is hfnn.LayerNorm else 400
    y, dx = run(ours, length)
    gc.collect()
    torch.testing.assert_close(y, run(stock, length, backward=False)[0], rtol=1e-3, atol=1e-4)
    assert dx.isfinite().all()


def test_no_bit_depends_on_the_bound(bodies):
    _, ours = bodies
    on = run(ours, 40)
    with recipe.disabled():
        off = run(ours, 40)
    assert all(map(torch.equal, on, off))


def test_second_derivatives(bodies):
    def second(body):
        torch.manual_seed(1)
        x = torch.randn(3, 24, dtype=torch.float64, requires_grad=True)
        y = x
        for _ in range(25):
            y = body(y)
        (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        return torch.autograd.grad(dx.square().sum(), x)[0]

    stock, ours = (body.double().eval() for body in bodies)
    torch.testing.assert_close(second(ours), second(stock), rtol=1e-6, atol=1e-9)


def test_a_chain_keeps_one_tensor_per_bound_and_never_more_than_stock(bodies):
    stock, ours = bodies

    def kept(body, length):
        return hfnn.memory.saved_bytes(lambda: chain(body, length)).total

    def chain(body, length):
        y = torch.randn(64, 24, requires_grad=True) * 1
        for _ in range(length):
            y = body(y)
        return y.sum()

    ops = len(ours) * 100
    tensors = kept(ours, 100) / (4 * 64 * 24)
    assert tensors > ops / native.extension.LONGEST / 2, "the bound does not act"
    assert kept(ours, 100) < kept(stock, 100) / 2


def test_time_grows_with_the_length_not_with_its_square(bodies):
    _, ours = bodies

    def seconds(length):
        start = time.process_time()
        run(ours, length, backward=False)
        return time.process_time() - start

    seconds(20)
    short, long = (min(seconds(length) for _ in range(2)) for length in (50, 400))
    assert long < 24 * short  # eight times the length


def test_a_long_chain_without_a_backward_is_freed_without_recursion(bodies):
    run(bodies[1], 1500, backward=False)
    gc.collect()


def test_hooks_of_saved_tensors(bodies):
    """Hooks see each tensor once; the chain is as long as without them."""
    _, ours = bodies
    packed = []
    plain = run(ours, 60)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: packed.append(1) or x, lambda x: x):
        hooked = run(ours, 60)
    assert packed and all(map(torch.equal, plain, hooked))


@torch_only
def test_rooms_of_both_kinds_count_alike():
    """A chain that alternates between nodes in C++ and described ones has the same bound."""
    body = hfnn.convert(nn.Sequential(nn.GELU(), nn.GroupNorm(4, 24)), prefer="memory")
    y, taken = torch.randn(3, 24, requires_grad=True) * 1, []
    for _ in range(native.extension.LONGEST):
        for module in body:
            y = module(y)
            taken.append(recipe.carries(y))
    assert taken == [i % (native.extension.LONGEST + 1) != native.extension.LONGEST for i in range(len(taken))]
