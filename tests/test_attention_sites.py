"""Attention called by the code of timm and diffusers models: once converted, their calls run hfnn's function."""

import copy
import pickle
import sys
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hfnn
from hfnn.ops.attention import sdpa

WIDTH, HEADS = 16, 2


class Timm(nn.Module):
    """Like timm's Attention."""

    def __init__(self, dim=WIDTH, num_heads=HEADS, attn_drop=0.0):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, dim // num_heads
        self.qkv, self.proj = nn.Linear(dim, dim * 3), nn.Linear(dim, dim)
        self.attn_drop = nn.Dropout(attn_drop)

    def forward(self, x, attn_mask=None):
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        x = F.scaled_dot_product_attention(
            q, k, v, attn_mask=attn_mask, dropout_p=self.attn_drop.p if self.training else 0.0
        )
        return self.proj(x.transpose(1, 2).reshape(B, N, C))


class Attention(nn.Module):
    """Like diffusers' Attention."""

    def __init__(self, dim=WIDTH, heads=HEADS):
        super().__init__()
        self.heads = heads
        self.to_q, self.to_k, self.to_v, self.to_out = (nn.Linear(dim, dim) for _ in range(4))
        self.processor = Fused()

    def forward(self, hidden_states, attention_mask=None):
        return self.processor(self, hidden_states, attention_mask=attention_mask)


def heads(attn, x):
    return [m(x).unflatten(-1, (attn.heads, -1)).transpose(1, 2) for m in (attn.to_q, attn.to_k, attn.to_v)]


class Fused:
    def __call__(self, attn, x, attention_mask=None):
        y = F.scaled_dot_product_attention(*heads(attn, x), attn_mask=attention_mask, dropout_p=0.0)
        return attn.to_out(y.transpose(1, 2).flatten(2))


class ByHand:
    def __call__(self, attn, x, attention_mask=None):
        q, k, v = heads(attn, x)
        y = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v
        return attn.to_out(y.transpose(1, 2).flatten(2))


def _native_attention(query, key, value, attn_mask=None):
    return torch.nn.functional.scaled_dot_product_attention(query=query, key=key, value=value, attn_mask=attn_mask)


def dispatch_attention_fn(*args):
    return sys.modules["diffusers.models.attention_dispatch"].dispatched(*args)


class Dispatches:
    def __call__(self, attn, x, attention_mask=None):
        y = dispatch_attention_fn(*heads(attn, x), attention_mask)
        return attn.to_out(y.transpose(1, 2).flatten(2))


@pytest.fixture
def calls(monkeypatch):
    """Records the calls of hfnn's function."""
    found, suffices = [], sdpa.suffices
    monkeypatch.setattr(sdpa, "suffices", lambda *args: found.append(1) or suffices(*args))
    return found


@pytest.fixture
def diffusers(monkeypatch):
    """A stand-in for the library, made of the classes above."""
    modules = {"attention_processor": {"Attention": Attention}}
    modules["attention_dispatch"] = {"_native_attention": _native_attention, "dispatched": _native_attention}
    for name, contents in modules.items():
        module = types.ModuleType(f"diffusers.models.{name}")
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, module.__name__, module)


def assert_alike(theirs, ours, *args):
    leaves = [x.requires_grad_() for x in args[:1]]
    results = [module(*args) for module in (theirs, ours)]
    grads = [
        torch.autograd.grad(y.square().sum(), [*leaves, *module.parameters()])
        for y, module in zip(results, (theirs, ours), strict=True)
    ]
    torch.testing.assert_close(results[1], results[0])
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-4, atol=1e-5)


MASKS = (None, torch.ones(5, 5, dtype=torch.bool).tril(), torch.zeros(5, 5).masked_fill(torch.eye(5) > 0, -1.0))


def test_a_module_that_calls_the_function(calls):
    theirs = Timm()
    ours = hfnn.convert(copy.deepcopy(theirs), prefer="memory")
    for mask in MASKS:
        assert_alike(theirs, ours, torch.randn(2, 5, WIDTH), mask)
    assert len(calls) == 3 and sdpa._torch is F.scaled_dot_product_attention
    row = hfnn.report(ours).rows[0]
    assert row.to == "hfnn scaled_dot_product_attention inside" and row.why == "called in forward"
    calls.clear()
    with hfnn.patch_torch(only="scaled_dot_product_attention"):
        theirs(torch.randn(2, 5, WIDTH))
    assert calls == [1]


def test_a_processor_that_calls_the_function(calls, diffusers):
    theirs = Attention()
    ours = hfnn.convert(copy.deepcopy(theirs), prefer="memory")
    for mask in MASKS:
        assert_alike(theirs, ours, torch.randn(2, 5, WIDTH), mask)
    assert len(calls) == 3
    row = hfnn.report(ours).rows[0]
    assert row.to == "hfnn scaled_dot_product_attention in its processor" and row.why == "called in Fused.__call__"
    copies = copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))
    x = torch.randn(2, 5, WIDTH)
    assert all(type(found) is type(ours) and found(x).equal(ours(x)) for found in copies)
    calls.clear()
    assert type(hfnn.revert(ours)) is Attention and ours(x).equal(theirs(x)) and not calls


def test_a_processor_that_is_set_later(calls, diffusers):
    theirs = Attention()
    ours = hfnn.convert(copy.deepcopy(theirs))
    for processor, count, why in (
        (ByHand(), 0, "never: its processor calls none"),
        (Dispatches(), 1, "called in _native_attention"),
        (Fused(), 1, "called in Fused.__call__"),
    ):
        calls.clear()
        theirs.processor = ours.processor = processor
        assert_alike(theirs, ours, torch.randn(2, 5, WIDTH))
        assert len(calls) == count and hfnn.report(ours).rows[0].why == why


def test_a_processor_that_computes_by_hand_is_left_alone(diffusers):
    module = Attention()
    module.processor = ByHand()
    assert type(hfnn.convert(module)) is Attention


def test_without_the_library_the_class_is_not_looked_at():
    assert type(hfnn.convert(Attention())) is Attention


def test_timm(calls):
    timm = pytest.importorskip("timm")
    theirs = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2)
    ours = hfnn.convert(copy.deepcopy(theirs), prefer="memory")
    x = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-4, atol=1e-5)
    assert len(calls) == 2


def test_diffusers(calls):
    library = pytest.importorskip("diffusers.models.attention_processor")
    theirs = library.Attention(WIDTH, heads=HEADS, dim_head=WIDTH // HEADS)
    ours = hfnn.convert(copy.deepcopy(theirs), prefer="memory")
    assert_alike(theirs, ours, torch.randn(2, 5, WIDTH))
    assert calls == [1]
