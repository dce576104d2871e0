"""Backward in two parts: gradients of the inputs, then of the weights, bitwise equal to backward's."""

import copy

import pytest
import torch
from torch import nn

import hfnn
from haiscale.pipeline import backward


class Squared(torch.autograd.Function):
    """A Python function computes both gradients whenever it is called."""

    calls = 0

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w**2

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        Squared.calls += 1
        return dy * w**2, (2 * dy * x * w).sum(0)


class Custom(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.rand(6))

    def forward(self, x):
        return Squared.apply(x, self.w)


def shared_twice():
    linear = nn.Linear(6, 6)
    return nn.Sequential(linear, nn.Tanh(), linear, nn.Linear(6, 6))


class Conditioned(nn.Module):
    """A parameter that reaches the output through several parallel products."""

    def __init__(self):
        super().__init__()
        self.table, self.a, self.b = nn.Parameter(torch.randn(6, 6)), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        weight = self.table.tanh()
        return self.a(x @ weight) + self.b(x @ weight.t())


class Product(nn.Module):
    """Like transformers' Conv1D, or with factors, or with the weight on the left."""

    def __init__(self, left=False, **factors):
        super().__init__()
        self.w, self.b, self.left, self.factors = (
            nn.Parameter(torch.randn(6, 6)),
            nn.Parameter(torch.randn(6)),
            left,
            factors,
        )

    def forward(self, x):
        return (self.w @ x.t()).t() + self.b if self.left else torch.addmm(self.b, x, self.w, **self.factors)


def batches_of_sequences():
    return nn.Sequential(nn.Unflatten(0, (5, 1)), nn.Linear(6, 6), nn.Linear(6, 6, bias=False), nn.Flatten())


def rebuilding():
    """Products that are Python functions, because they rebuild their inputs."""
    layers = nn.LayerNorm(6), nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6), nn.Tanh()
    return hfnn.convert(nn.Sequential(*layers), prefer="memory")


PARTS = {  # the model, and the number of parameters whose gradients are delayed
    "linear": (lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6, bias=False)), 3),
    "norms are not put off": (lambda: nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6), nn.LayerNorm(6)), 2),
    "a layer used twice": (shared_twice, 2),
    "products in Python": (rebuilding, 4),
    "one of them at the end": (lambda: rebuilding()[:-1], 4),
    "functions in Python": (lambda: nn.Sequential(nn.Linear(6, 6), Custom()), 2),
    "convolutions": (
        lambda: nn.Sequential(nn.Unflatten(1, (2, 3)), nn.Conv1d(2, 4, 2), nn.BatchNorm1d(4), nn.Flatten()),
        2,
    ),
    "by several ways": (Conditioned, 4),
    "weights in their own order": (lambda: nn.Sequential(Product(), Product()), 4),
    "with factors": (lambda: nn.Sequential(Product(), Product(alpha=3, beta=2)), 4),
    "weights on the left": (lambda: nn.Sequential(Product(), Product(left=True)), 3),
    "of three dimensions": (batches_of_sequences, 3),
}


@pytest.mark.parametrize("hold", [False, True])
@pytest.mark.parametrize("name", PARTS)
def test_backward_in_two_parts_is_backward(name, hold):
    torch.manual_seed(0)
    build, later = PARTS[name]
    model, x = build(), torch.randn(5, 6)
    other, dy = copy.deepcopy(model), None
    for _ in range(2):  # gradients accumulate
        inputs = [x.clone().requires_grad_() for _ in range(2)]
        y = other(inputs[0])
        dy = torch.randn_like(y) if dy is None else dy
        y.backward(dy)
        Squared.calls = 0
        before = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        weights = backward.split(backward.edges([model(inputs[1])]), [dy], [inputs[1]], hold)
        same = [name in before and torch.equal(p.grad, before[name]) for name, p in model.named_parameters()]
        waiting = [p.grad is None for p in model.parameters()] if not before else same
        assert sum(waiting) == (len(waiting) if hold else later)
        assert torch.equal(inputs[0].grad, inputs[1].grad)
        weights.run()
        assert Squared.calls <= 1
        for p, expected in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(p.grad, expected.grad)


@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_what_is_frozen_is_left_alone(frozen):
    model, x = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)), torch.randn(5, 6, requires_grad=True)
    model[1].get_parameter(frozen).requires_grad_(False)
    other = copy.deepcopy(model)
    other(x.detach().requires_grad_()).backward(torch.ones(5, 6))
    backward.split(backward.edges([model(x)]), [torch.ones(5, 6)], [x]).run()
    for p, expected in zip(model.parameters(), other.parameters(), strict=True):
        assert p.grad is expected.grad is None or torch.equal(p.grad, expected.grad)


@pytest.mark.parametrize(("together", "calls"), [(1 << 20, 1), (1, 8)])
def test_weights_are_handed_to_the_engine_together(monkeypatch, together, calls):
    """One engine call per layer would traverse all layers before it each time."""
    model, x = nn.Sequential(*[nn.Linear(6, 6) for _ in range(8)]), torch.randn(5, 6, requires_grad=True)
    weights = backward.split(backward.edges([model(x)]), [torch.ones(5, 6)], [x])
    monkeypatch.setattr(backward, "TOGETHER", together)
    made, usual = [], torch.autograd.backward
    monkeypatch.setattr(torch.autograd, "backward", lambda *given, **more: [made.append(1), usual(*given, **more)])
    weights.run()
    assert len(made) == calls and all(p.grad is not None for p in model.parameters())


def test_counted_gradients_come_once_and_at_the_end():
    """With `hold`, each parameter accumulates once, in `run`, as wrappers that count gradients need."""
    model, x = shared_twice(), torch.randn(5, 6, requires_grad=True)
    counts = []
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: counts.append(id(p)))
    y = model(x)
    weights = backward.split(backward.edges([y]), [torch.ones_like(y)], [x], hold=True)
    assert not counts
    weights.run()
    assert sorted(counts) == sorted(id(p) for p in model.parameters())


@pytest.mark.parametrize("hold", [False, True])
@pytest.mark.parametrize("name", PARTS)
def test_hooks_of_parameters_run_once(name, hold):
    """Each once per backward, on the whole gradient; what they return counts. So do they in the backwards after it."""
    torch.manual_seed(0)
    build, _ = PARTS[name]
    model, x = build(), torch.randn(5, 6)
    other, calls = copy.deepcopy(model), []
    for m in (model, other):
        for at, p in enumerate(m.parameters()):
            p.register_hook(lambda g, at=at, mine=m is model: calls.append((mine, at)) or g * 2)
            p.register_hook(lambda g: g + 1)
    for _ in range(2):
        calls.clear()
        inputs = [x.clone().requires_grad_() for _ in range(2)]
        y = other(inputs[0])
        y.backward(torch.ones_like(y))
        backward.split(backward.edges([model(inputs[1])]), [torch.ones_like(y)], [inputs[1]], hold).run()
        assert sorted(calls) == [(mine, at) for mine in (False, True) for at in range(len([*model.parameters()]))]
        for p, expected in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(p.grad, expected.grad)
