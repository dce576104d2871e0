"""Recipes with the rest of torch: hooks, checkpoints, offloading, sharding, partial backwards."""

import copy
import gc
import io
import pickle
from pathlib import Path

import pytest
import ranks
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import hfnn
from hfnn.core import native
from hfnn.core import node as recipe


class Block(nn.Module):
    """Norm, two siblings that share its output, and a gelu -> dropout -> linear chain."""

    def __init__(self, width=32, modules=hfnn, p=0.1):
        super().__init__()
        self.norm = modules.LayerNorm(width)
        self.query = modules.Linear(width, width)
        self.up = modules.Linear(width, 4 * width, bias=False)
        self.act = modules.GELU()
        self.drop = modules.Dropout(p)
        self.down = modules.Linear(4 * width, width)
        for module in self.modules():
            module.prefer = "memory"

    def forward(self, x):
        h = self.norm(x)
        return x + self.query(h) + self.down(self.drop(self.act(self.up(h))))


def gradients(model, x, forward=None, seed=3):
    """Gradients of x and of every parameter."""
    torch.manual_seed(seed)
    x = x.detach().requires_grad_()
    model.zero_grad()
    (forward or model)(x).square().mean().backward()
    return [x.grad, *(p.grad for p in model.parameters())]


def same(a, b):
    return all(map(torch.equal, a, b))


@pytest.fixture
def block(device):
    return Block().to(device)


@pytest.fixture
def x(device):
    return torch.randn(4, 16, 32, device=device).requires_grad_()


def kept() -> int:
    """How many tensors consumers keep as recipes."""
    return native.extension.counts()[2]


@pytest.fixture(autouse=True)
def fresh_counter():
    recipe.counter.reset()
    gc.collect()
    before = kept()
    yield
    gc.collect()
    assert kept() <= before, "a recipe outlived its node"


def test_a_block_is_torchs_to_the_bit_without_recipes_and_with(block, x):
    on = gradients(block, x)
    assert (recipe.counter.taken, recipe.counter.rebuilt) == (4, 3)  # siblings share; the dropout takes the gelu's
    with recipe.disabled():
        off = gradients(block, x)
    assert recipe.counter.taken == 4 and same(on, off)


def test_what_is_kept(block, x):
    """x, the gelu's input and statistics; not the outputs of norm, gelu and dropout."""
    x.requires_grad_()
    saved = hfnn.memory.saved_bytes(lambda: block(x))
    rows, cols = x.numel() // x.shape[-1], x.shape[-1]
    assert saved.total == 4 * (rows * cols + rows * 4 * cols + 2 * rows)
    with recipe.disabled():
        assert hfnn.memory.saved_bytes(lambda: block(x)).total == saved.total + 4 * rows * (cols + 4 * cols)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(block, x, reentrant):
    plain = gradients(block, x)
    assert same(plain, gradients(block, x, lambda x: checkpoint(block, x, use_reentrant=reentrant)))


def test_checkpoint_between_producer_and_consumer(block, x):
    """The norm outside, its consumer inside a checkpointed region."""

    def forward(x):
        h = block.norm(x)
        return x + checkpoint(block.query, h, use_reentrant=False) + block.down(block.drop(block.act(block.up(h))))

    assert same(gradients(block, x), gradients(block, x, forward))


def test_save_on_cpu(block, x):
    def forward(x):
        with torch.autograd.graph.save_on_cpu():
            return block(x)

    assert same(gradients(block, x), gradients(block, x, forward))
    assert recipe.counter.taken == 8


def test_module_hooks(block, x):
    plain = gradients(block, x)
    seen = []
    for module in block.children():
        module.register_forward_hook(lambda m, args, y: seen.append("forward"))
        module.register_full_backward_hook(lambda m, gi, go: seen.append("backward"))
    assert same(plain, gradients(block, x))
    assert seen.count("forward") == seen.count("backward") == 6


def test_tensor_hooks_see_each_gradient_once(block, x):
    seen = []

    def forward(x):
        h = block.norm(x)
        h.register_hook(lambda g: seen.append(g.shape))
        return block.query(h) + block.query(h)

    gradients(block, x, forward)
    assert seen == [x.shape]


def test_a_module_called_twice(block, x):
    twice = lambda x: block(block(x))  # noqa: E731
    on = gradients(block, x, twice)
    with recipe.disabled():
        assert same(on, gradients(block, x, twice))


def test_retained_graph(block, x):
    torch.manual_seed(3)
    x.requires_grad_()
    y = block(x).square().mean()
    parameters = list(block.parameters())
    first = torch.autograd.grad(y, parameters, retain_graph=True)
    assert same(first, torch.autograd.grad(y, parameters))


def test_copies_and_files_have_no_recipe(block, x):
    h = block.norm(x)
    assert recipe.take(h) is not None
    copies = [h.detach().clone(), h.detach().view(-1, 32), pickle.loads(pickle.dumps(h.detach()))]
    copies.append(copy.deepcopy(h.detach()))
    file = io.BytesIO()
    torch.save(h, file)
    file.seek(0)
    copies.append(torch.load(file, weights_only=True))
    assert all(recipe.take(c) is None for c in copies) and torch.equal(copies[-1], h)


def test_no_recipe_without_grad(block, x):
    with torch.no_grad():
        assert recipe.take(block.norm(x)) is None
    with torch.inference_mode():
        assert recipe.take(block.norm(x)) is None


def test_a_source_changed_after_the_consumer_is_an_error(block, x):
    """As in torch: the norm also keeps its input for its own backward."""
    x = (x * 1).requires_grad_()
    x = x * 1
    y = block.query(block.norm(x))
    x.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_the_rebuilt_tensor_is_freed_by_a_partial_backward(block, x, rebuilt):
    """Only one of two siblings runs: their shared result is freed when this backward ends."""
    h = block.norm(x.requires_grad_())
    a, b = block.query(h), block.up(h)
    a.sum().backward(retain_graph=True)
    gc.collect()
    assert len(rebuilt) == 1 and rebuilt[0]() is None
    b.sum().backward()


def gemms(fn):
    """FLOPs of the products that fn runs."""
    with FlopCounterMode(display=False) as counter:
        fn()
    return counter.get_total_flops()


def test_input_and_weight_gradients_are_separable(block, x):
    """Zero-bubble schedules need this: each product runs once, in the pass that asks for it."""
    x = x.requires_grad_() * 1
    h = block.norm(x)
    y = block.query(h)
    product = 2 * h.numel() * 32
    dy = torch.ones_like(y)
    weight = block.query.weight
    assert gemms(lambda: torch.autograd.grad(y, x, dy, retain_graph=True)) == product
    assert recipe.counter.rebuilt == 0
    node = torch.autograd.graph.get_gradient_edge(weight)
    assert gemms(lambda: torch.autograd.grad(y, node, dy, retain_graph=True)) == product
    assert gemms(lambda: torch.autograd.grad(y, [x, weight], dy)) == 2 * product


def test_double_backward_through_a_chain(block, x):
    def second(model, x):
        torch.manual_seed(3)
        x = x.detach().requires_grad_()
        (dx,) = torch.autograd.grad(model(x).square().mean(), x, create_graph=True)
        return torch.autograd.grad(dx.square().sum(), [x, *model.parameters()], allow_unused=True)

    block.drop.p = 0.0
    plain = Block(modules=nn, p=0.0).to(x.device)
    plain.load_state_dict(block.state_dict())
    plain, wide = plain.double(), x.double()
    for got, want in zip(second(block, x), second(plain, wide), strict=True):
        assert (got is None) == (want is None)
        if got is not None:
            torch.testing.assert_close(got.double(), want, rtol=1e-3, atol=1e-6 * want.abs().max().item())


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_autocast(block, x, low):
    """Products in the low dtype, one cast for both siblings, and the same bits with and without recipes."""

    def forward(x):
        with torch.autocast(x.device.type, dtype=low):
            return block(x)

    on = gradients(block, x, forward)
    with recipe.disabled():
        off = gradients(block, x, forward)
    for a, b in zip(on, off, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    plain = Block(modules=nn, p=0.0).to(x.device)
    plain.load_state_dict(block.state_dict())
    x.requires_grad_()
    with torch.autocast(x.device.type, dtype=low):
        assert block(x).dtype is plain(x).dtype
        kept, stock = (hfnn.memory.saved_bytes(lambda m=m: m(x)).total for m in (block, plain))
    assert kept < 0.6 * stock


def test_frozen_weights_keep_nothing(block, x):
    block.requires_grad_(False)
    h = block.norm(x.requires_grad_())
    block.query(h)
    assert recipe.counter.taken == 0


@pytest.mark.parametrize(
    "way", ["fsdp2", *(pytest.param(way, marks=pytest.mark.slow) for way in ("ddp", "tensor_parallel"))]
)
def test_parallelised(way, tmp_path):
    """fsdp2: a norm in a group of its own. Its weight is gone in the consumer's backward; the recipe holds a copy."""
    ranks.run(Path(__file__).parent / "workers" / "parallel.py", "main", 2, tmp_path, timeout=120, way=way)


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
def test_rebuilt_into_a_cast(norm, low, device, rebuilt):
    """A norm rebuilds its output directly in the consumer's dtype, without the wide tensor: the same bits."""
    x = torch.randn(64, 1025, device=device, requires_grad=True)
    weight = nn.Parameter(torch.randn(1025, device=device))
    y = getattr(hfnn.functional, norm)(x, (1025,), weight, prefer="memory")
    token = recipe.take(y)
    with torch.no_grad():
        again = token.tensor(low)
    assert torch.equal(again, y.to(low)) and [ref().dtype for ref in rebuilt] == [low]


@pytest.mark.parametrize("form", ["none", "tanh"])
@pytest.mark.parametrize("dtype, low", [(torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16)], ids=str)
def test_a_wide_gelu_is_rebuilt_into_a_cast(form, dtype, low, device):
    """A GELU that returns float32 for a narrow input, as authors' GELUs do under autocast."""
    x = torch.randn(64, 1025, device=device).mul(3).to(dtype).requires_grad_()
    y = hfnn.ops.OPS["gelu"].fused(x, torch.float32, "memory", approximate=form)
    dy = torch.randn_like(y)
    token = recipe.take(y)
    with torch.no_grad():
        assert torch.equal(token.tensor(low), y.to(low))
    wide = x.detach().float().requires_grad_()
    want = hfnn.ops.OPS["gelu"].fused(wide, torch.float32, "memory", approximate=form)
    assert torch.equal(y, want)
    (dx,), (dwide,) = torch.autograd.grad(y, x, dy), torch.autograd.grad(want, wide, dy)
    assert torch.equal(dx, dwide.to(dtype))


@pytest.mark.parametrize(
    "norm", [nn.LayerNorm(16), nn.RMSNorm(16), nn.GroupNorm(4, 16), nn.BatchNorm1d(16)], ids=lambda m: type(m).__name__
)
def test_a_checkpoint_in_a_functional_call_with_frozen_weights(norm):
    """Its second forward, after the call, finds parameters where the first one had tensors."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.linear = copy.deepcopy(norm).requires_grad_(False), nn.Linear(16, 16)

        def forward(self, x):
            return checkpoint(lambda x: self.linear(self.norm(x)), x, use_reentrant=False)

    stock, x = nn.Sequential(nn.Linear(16, 16), Block()), torch.randn(4, 16)
    grads = []
    for model in stock, hfnn.convert(copy.deepcopy(stock), prefer="memory"):
        given = {name: p * 1 if p.requires_grad else p.detach() for name, p in model.named_parameters()}
        torch.func.functional_call(model, given, x).square().sum().backward()
        grads.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(*grads)
