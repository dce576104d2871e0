"""Cases for calling the wrapped module's methods through the wrapper: see fsdp.py."""

import copy

import pytest
import torch
from fsdp_models import VOCABULARY, WIDTH, Net, check_gradients, ids
from fsdp_versus import transformer
from torch import nn
from torch.distributed.tensor import DTensor

from haiscale.fsdp import FSDP


class Model(Net):
    """Has methods as users write them; the embedding, the norm and the head belong to the root."""

    limit = 7

    def encode(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def score(self, ids):
        """Calls another method, and forward."""
        return (self.encode(ids) @ self.head.weight.t()).logsumexp(-1).mean() + self(ids).square().mean()

    def project(self, x):
        """Uses only the root's own parameters."""
        return self.norm(x) @ self.head.weight.t()

    def optimizer(self, lr):
        return torch.optim.SGD(self.parameters(), lr)

    def numbers(self):
        return sum(p.numel() for p in self.parameters())

    def halve(self):
        with torch.no_grad():
            self.norm.weight.mul_(0.5)
            self.norm.bias.data.sub_(1.0)

    def fail(self, ids):
        self.encode(ids)
        raise KeyError("after the units ran")


def model():
    torch.manual_seed(0)
    return Model()


def methods(rank, size):
    """They work as on the unwrapped model: values, gradients, an optimizer, writes, errors."""
    made = model()
    alone = copy.deepcopy(made)
    wrapped = FSDP(made)
    assert wrapped.limit == 7 and wrapped.blocks is made.blocks
    if rank == 0:
        assert wrapped.numbers() == alone.numbers()  # on one rank alone, before anything was gathered
    ours, theirs = wrapped.optimizer(lr=0.1), alone.optimizer(lr=0.1)
    assert all(isinstance(p, DTensor) for group in ours.param_groups for p in group["params"])
    for step in range(3):
        batch = ids(0, step)
        for m, o in ((wrapped, ours), (alone, theirs)):
            o.zero_grad()
            m.encode(batch).sin().mean().backward()
            m.score(batch).backward()
        check_gradients(wrapped, alone)
        for m in (wrapped, alone):
            m.project(torch.ones(2, WIDTH)).sin().mean().backward()
        check_gradients(wrapped, alone)
        assert torch.equal(wrapped.encode(batch), alone.encode(batch))
        for m, o in ((wrapped, ours), (alone, theirs)):
            o.step()
            m.halve()
            with pytest.raises(KeyError, match="after the units ran"):
                m.fail(batch)
        with torch.no_grad():
            assert torch.equal(wrapped.score(batch), alone.score(batch))
    with pytest.raises(AttributeError, match="'Model' object has no attribute 'missing'"):
        _ = wrapped.missing
    assert not hasattr(wrapped, "missing")


def generates(rank, size):
    """A transformers model: generate() calls forward for each token."""
    for kind in ("gpt2", "llama"):
        made = transformer(kind, layers=2).eval()
        alone = copy.deepcopy(made)
        wrapped = FSDP(made)
        prompt = torch.arange(6)[None]
        options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
        assert torch.equal(wrapped.generate(prompt, **options), alone.generate(prompt, **options))
        batch = ids(rank, 0, 256)
        assert torch.equal(wrapped(batch).logits, alone(batch).logits)


def own_hands(rank, size):
    """A method of a model without units that computes its only layer by hand."""

    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, VOCABULARY)

        def forward(self, x):
            return self.layer(x)

        def generate(self, x):
            return self.layer(x).argmax(-1)

    torch.manual_seed(0)
    made = Plain()
    alone, x = copy.deepcopy(made), torch.randn(3, 4)
    wrapped = FSDP(made)
    for _ in range(2):
        assert torch.equal(wrapped.generate(x), alone.generate(x))
        assert torch.equal(wrapped(x), alone(x))
