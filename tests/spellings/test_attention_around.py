"""Attention that a module writes out (hfnn/deferred/scores.py): what may happen around it and to its scores."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import hfnn
from hfnn.deferred import attended, hidden, scored
from hfnn.testing import GRADIENTS, OUTPUTS, assert_close

WIDTH, TOKENS, HEADS = 32, 24, 2


class Attention(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.qkv, self.proj, self.drop = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(dropout)
        self.register_buffer("tril", torch.tril(torch.ones(64, 64)))
        self.seen, self.asked, self.hooked, self.returns = [], False, None, False

    def forward(self, x, mask=None):
        B, T, C = x.shape
        q, k, v = (t.view(B, T, HEADS, C // HEADS).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        scores = q @ k.transpose(-2, -1) * (C // HEADS) ** -0.5
        scores = scores.masked_fill(self.tril[:T, :T] == 0 if mask is None else mask, float("-inf"))
        weights = self.drop(F.softmax(scores, -1).to(v.dtype))
        y = self.proj((weights @ v).transpose(1, 2).reshape(B, T, C))
        if self.asked:
            self.seen.append(weights.mean().item())
        if self.hooked is not None:
            weights.register_hook(self.hooked)
        return (y, weights) if self.returns else y


@pytest.fixture
def fused(monkeypatch):
    """Counts attentions that were computed without scores."""
    calls, own = [], attended.sdpa.in_rows
    monkeypatch.setattr(attended.sdpa, "in_rows", lambda *args, **how: calls.append(how) or own(*args, **how))
    return calls


def draw(batch=3, dtype=torch.float32, tokens=TOKENS):
    return torch.randn(batch, tokens, WIDTH, dtype=dtype, requires_grad=True)


def converted(dropout=0.0, watched=True):
    stock = Attention(dropout)
    ours = hfnn.convert(copy.deepcopy(stock), prefer="memory")
    if watched:
        ours(draw()).sum().backward()
        ours.zero_grad()
    return stock, ours


def same(stock, ours, x, *arguments, by=None):
    """Values and gradients keep the accuracy rule."""
    of = [run(model, x, *arguments) for model in (stock, ours)]
    wide = run(copy.deepcopy(stock).double(), x.double(), *arguments)
    for number, (y, mine, exact) in enumerate(zip(*of, wide, strict=True)):
        assert mine.stride() == y.stride()
        assert_close(mine, exact, y, by or (GRADIENTS if number else OUTPUTS))


def run(model, x, *arguments):
    x = x.detach().requires_grad_()
    y = model(x, *arguments)
    y = y[0] if isinstance(y, tuple) else y
    return [y.detach(), *torch.autograd.grad(y, [x, *model.parameters()], torch.ones_like(y))]


def test_the_first_call_only_watches(fused):
    stock, ours = converted(watched=False)
    x = draw()
    y = ours(x)
    assert torch.equal(ours(x), stock(x)) and not fused
    y.sum().backward()
    ours(x)
    assert fused and fused[0]["is_causal"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes(dtype, fused):
    stock, ours = converted()
    x = draw(dtype=dtype)
    if dtype is torch.float64:  # in which two computations differ by their order
        torch.testing.assert_close(run(stock.to(dtype), x), run(ours.to(dtype), x), rtol=1e-9, atol=1e-12)
    else:
        same(stock.to(dtype), ours.to(dtype), x, by=4)
    assert fused


def test_autocast(fused):
    stock, ours = converted()
    x = draw()
    with torch.autocast("cpu", torch.bfloat16):
        y, mine = stock(x), ours(x)
    assert mine.dtype is y.dtype is torch.bfloat16 and fused
    assert (mine - y).norm() < 0.02 * y.norm()


def test_masks_that_are_known_by_how_they_are_made(fused, monkeypatch):
    """As on a GPU, where reading a mask would wait."""
    monkeypatch.setattr(hidden, "WAITS", "cpu")
    monkeypatch.setattr(hidden, "_read", {})
    reads, own = [], attended._facts
    monkeypatch.setattr(attended, "_facts", lambda *args: reads.append(1) or own(*args))
    stock, ours = converted()
    for _ in range(3):
        same(stock, ours, draw())
    assert len(fused) == 3 and all(how["is_causal"] for how in fused) and len(reads) == 1
    ours.tril.fill_(1.0)
    stock.tril.fill_(1.0)
    same(stock, ours, draw())
    assert len(reads) == 2 and "is_causal" not in fused[-1]
    mask = torch.rand(3, 1, 1, TOKENS) > 0.9
    for _ in range(2):
        same(stock, ours, draw(), mask)
    assert len(reads) == 3 and len(fused) == 6
    mask[:, :, :, 3] = True
    same(stock, ours, draw(), mask)
    assert len(reads) == 4
    mask[1] = True  # no key is seen
    ours(draw(), mask)
    assert len(reads) == 5 and len(fused) == 7
    with pytest.raises(AssertionError):  # a mask of unknown origin is not read, and the scores are computed
        ours(draw(), torch.zeros(1, 1, 1, TOKENS).bernoulli() > 1)
        assert len(fused) == 8


def test_weights_that_are_asked_for():
    stock, ours = converted()
    x = draw()
    for model in (stock, ours):
        model.asked = True
        model(x)
        model.asked = False
    torch.testing.assert_close(ours.seen, stock.seen)


def test_dropout_is_on_average_that_of_torch(fused):
    stock, ours = converted(0.3)
    x = draw(1)
    mean = sum(ours(x).detach() for _ in range(2000)) / 2000
    wanted = stock.eval()(x)
    assert fused and (mean - wanted).norm() < 0.05 * wanted.norm()


def test_masks_that_are_written_to_before_the_scores_are_read():
    mask = torch.zeros(1, TOKENS, TOKENS, dtype=torch.bool)

    class Late(Attention):
        def forward(self, x):
            scores = x @ x.mT
            weights = scores.masked_fill(mask, float("-inf")).softmax(-1)
            y = weights @ x
            if not self.asked:
                return y
            mask[..., 3].logical_not_()
            return y + weights.sum()

    late = hfnn.convert(Late(), prefer="memory")
    late(draw(1)).sum().backward()
    late.asked = True
    with pytest.raises(RuntimeError, match="have been written to"):
        late(draw(1))


def test_a_hook_that_comes_too_late_is_an_error():
    _, ours = converted()
    ours.hooked = lambda grad: None
    with pytest.raises(RuntimeError, match="too late"):
        ours(draw())


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints(reentrant):
    stock, ours = converted(watched=False)
    x = draw()
    for _ in range(2):
        results = []
        for model in (stock, ours):
            y = checkpoint(model, x, use_reentrant=reentrant)
            results.append([y, *torch.autograd.grad(y.sum(), x)] if not reentrant else [y])
        torch.testing.assert_close(*results)
        ours(x).sum().backward()


def test_transforms_compilers_and_tracers_run_the_modules_own_code(fused):
    stock, ours = converted()
    x = draw().detach()
    torch.testing.assert_close(torch.func.vmap(ours)(x[:, None]), torch.func.vmap(stock)(x[:, None]))
    torch.testing.assert_close(
        torch.func.grad(lambda x: ours(x).sum())(x), torch.func.grad(lambda x: stock(x).sum())(x)
    )
    torch.testing.assert_close(torch.compile(ours, backend="eager")(x), stock(x))
    assert not fused


def test_modes_and_inference(fused):
    stock, ours = converted()
    x = draw()

    class Seen(torch.overrides.TorchFunctionMode):
        names: list = []

        def __torch_function__(self, func, types, args=(), kwargs=None):
            self.names.append(getattr(func, "__name__", ""))
            return func(*args, **(kwargs or {}))

    with Seen() as seen:
        torch.testing.assert_close(ours(x), stock(x))
    assert seen.names.count("matmul") == 4 and not fused
    with torch.inference_mode():
        torch.testing.assert_close(ours(x), stock(x))
    assert not fused
    with torch.device("cpu"):
        ours(x)
    assert fused


def test_second_derivatives(fused):
    """The watch sees the first backward that makes a graph, also after other calls."""
    stock, ours = converted(watched=False)
    x = draw()
    ours(x)
    for _ in range(2):
        found = []
        for model in (stock, ours):
            (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
            found.append(torch.autograd.grad(grad.square().sum(), x)[0])
        torch.testing.assert_close(*found)
        ours(x).sum().backward()
    assert not fused


def test_copies_and_pickles(fused, tmp_path):
    _, ours = converted()
    other = copy.deepcopy(ours)
    other(draw()).sum().backward()
    before = len(fused)
    other(draw())
    assert len(fused) == before + 1
    torch.save(ours.state_dict(), tmp_path / "model.pt")
    hfnn.revert(ours)(draw())
    assert len(fused) == before + 1


class Near(Attention):
    """A triangle of its own, filled with a number."""

    def __init__(self, diagonal, number):
        super().__init__()
        self.hidden, self.number = torch.ones(TOKENS, TOKENS).triu(diagonal).bool(), number

    def forward(self, x):
        q, k, v = (t.view(3, TOKENS, HEADS, -1).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        weights = (q @ k.mT * 0.25).masked_fill(self.hidden, self.number).softmax(-1)
        return self.proj((weights @ v).transpose(1, 2).flatten(2))


NEAR = [(1, -math.inf), (2, -math.inf), (0, -1e9), (1, -2.0), (1, -1e4)]
FAULTS = {
    "every mask is a triangle": (attended, "_facts", lambda own: lambda *args: own(*args)._replace(triangle=True)),
    "no query is blind": (attended, "_facts", lambda own: lambda *args: own(*args)._replace(blind=False)),
    "any number hides": (scored, "LOWEST", lambda own: 0.0),
    "no scale": (attended, "Plan", lambda own: lambda *args: own(*args, scale=2.0)),
}


def differ(arguments) -> bool:
    stock = Near(*arguments)
    ours = hfnn.convert(copy.deepcopy(stock), prefer="memory")
    x = draw()
    ours(x).sum().backward()
    return any(not torch.allclose(a, b, 1e-4, 1e-5) for a, b in zip(run(ours, x), run(stock, x), strict=True))


def test_near_misses():
    assert not any(map(differ, NEAR))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault, monkeypatch):
    owner, name, change = FAULTS[fault]
    monkeypatch.setattr(owner, name, change(getattr(owner, name)))
    assert any(map(differ, NEAR))


class Mixed(Attention):
    """With a function of torch beside its products."""

    def forward(self, x):
        return F.gelu(super().forward(x))


def test_functions_of_torch_beside_it_are_routed(monkeypatch):
    """Also while its products are watched, but not under a mode of the user's, which might count them."""
    ours = hfnn.convert(Mixed(), prefer="memory")
    seen = []

    class Seen(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    for _ in range(2):
        assert "GELU" in ours(draw()).grad_fn.name()
        with torch.device("cpu"):
            assert "GELU" in ours(draw()).grad_fn.name()
    with Seen():
        assert ours(draw()).grad_fn.name() == "GeluBackward0"
    assert F.gelu in seen
