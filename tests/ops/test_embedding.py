"""embedding: bitwise torch's results, and the ids that are kept."""

import pytest
import torch
from torch import nn

import hfnn
from hfnn.core.holder import target_of
from hfnn.ops import embedding as room

F = hfnn.functional


def run(fn, ids, weight, *args, **kwargs):
    weight = weight.detach().requires_grad_()
    y = fn(ids, weight, *args, **kwargs)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y)
    return y, *torch.autograd.grad(y, weight, dy)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("kind", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("padding_idx", [None, 0, 3, -1])
@pytest.mark.parametrize("scale", [False, True])
def test_torchs_bits(scale, padding_idx, kind, dtype, device):
    ids = torch.randint(0, 11, (4, 70), device=device).to(kind)
    weight = torch.randn(11, 8, dtype=dtype, device=device)
    options = {"padding_idx": padding_idx, "scale_grad_by_freq": scale}
    ours = run(F.embedding, ids, weight, prefer="memory", **options)
    assert ours[0].grad_fn.name() == "_EmbeddingBackward"
    assert all(map(torch.equal, ours, run(nn.functional.embedding, ids, weight, **options)))


def test_matches_the_definition():
    (ids, weight), _ = room.sample((3, 5, 64, 32), torch.float64, "cpu")
    for padding_idx in (None, 3):
        ours = run(F.embedding, ids, weight, padding_idx, prefer="memory")
        for got, want in zip(ours, run(room.reference, ids, weight, padding_idx), strict=True):
            torch.testing.assert_close(got, want)


def test_odd_shapes(device):
    weight = torch.randn(11, 8, device=device)
    for ids in (
        torch.tensor(3),
        torch.zeros(0, 4, dtype=torch.int64),
        torch.arange(11)[::2],
        torch.tensor([[1]] * 3).expand(3, 5),
    ):
        ids = ids.to(device)
        ours = run(F.embedding, ids, weight, prefer="memory")
        assert all(map(torch.equal, ours, run(nn.functional.embedding, ids, weight)))


def kept(ids, fn):
    return hfnn.memory.saved_bytes(lambda: fn(ids)).total


def test_what_is_kept(device):
    """4 bytes per id; ids that take less memory already are kept as they are."""
    ids = torch.randint(0, 7, (8, 512), device=device)
    one = hfnn.Embedding(7, 4, device=device)
    one.prefer = "memory"
    assert kept(ids, one) == 4 * ids.numel()
    assert kept(ids, nn.Embedding(7, 4, device=device)) == 8 * ids.numel()
    assert kept(ids.int(), one) == 4 * ids.numel()
    row = torch.arange(512, device=device) % 7
    assert kept(row.expand(8, 512), one) == row.nbytes


def test_changed_ids_are_not_taken_for_the_old(device):
    """Changed in place, also without a new version, or by other memory: gradients are those of the ids looked up."""
    weight = torch.randn(7, 4, device=device)
    ids = torch.randint(0, 7, (64,), device=device)
    for change in (
        lambda: ids.copy_((ids + 1) % 7),
        lambda: ids.data.copy_((ids + 3) % 7),
        lambda: setattr(ids, "data", (ids + 2) % 7),
    ):
        first = F.embedding(ids, weight.requires_grad_(), prefer="memory")
        before = ids.clone()
        change()
        second = F.embedding(ids, weight, prefer="memory")
        assert torch.equal(torch.autograd.grad(first.sum(), weight)[0], run_sum(before, weight))
        assert torch.equal(torch.autograd.grad(second.sum(), weight)[0], run_sum(ids, weight))


def run_sum(ids, weight):
    (grad,) = torch.autograd.grad(nn.functional.embedding(ids, weight).sum(), weight)
    return grad


def test_torchs_own_op_runs(device):
    ids, weight = torch.randint(0, 7, (64,), device=device), torch.randn(7, 4, device=device, requires_grad=True)

    def name(*args, **kwargs):
        y = F.embedding(ids, weight, *args, **kwargs)
        return y.grad_fn.name()  # some versions of torch lose the name of a Function's node with y

    assert name(prefer="memory") == "_EmbeddingBackward"
    for options in (
        {},
        {"prefer": "speed"},
        {"prefer": "memory", "sparse": True},
        {"prefer": "memory", "max_norm": 1.0},
    ):
        assert name(**options) == "EmbeddingBackward0"
    with hfnn.use("torch"):
        assert name(prefer="memory") == "EmbeddingBackward0"
    assert F.embedding(ids, weight, sparse=True, prefer="memory").sum().backward() is None and weight.grad.is_sparse
    with torch.no_grad():
        assert F.embedding(ids, weight, prefer="memory").grad_fn is None
    tangent = torch.func.jvp(lambda w: F.embedding(ids, w, prefer="memory"), (weight,), (weight,))[1]
    assert torch.equal(tangent, weight[ids])


def test_torchs_errors(device):
    weight = torch.randn(7, 4, device=device, requires_grad=True)
    good = torch.randint(0, 7, (8,), device=device)
    for ids, more, kind in (
        (good.float(), {}, RuntimeError),
        (good, {"padding_idx": 7}, AssertionError),
        (good, {"padding_idx": -8}, AssertionError),
        *(() if device == "cuda" else ((good + 7, {}, IndexError),)),
    ):
        for prefer in ("memory", "speed"):
            with pytest.raises(kind):
                F.embedding(ids, weight, prefer=prefer, **more)


def test_double_backward():
    ids, weight = torch.randint(0, 7, (8,)), torch.randn(7, 4, dtype=torch.float64, requires_grad=True)

    def function(weight):
        return F.embedding(ids, weight, 3, prefer="memory")

    def wanted(weight):
        y = function(weight)
        (first,) = torch.autograd.grad(y.pow(3).sum(), weight, create_graph=True)
        return torch.autograd.grad(first.square().sum(), weight)[0]

    theirs = nn.functional.embedding(ids, weight, 3)
    (first,) = torch.autograd.grad(theirs.pow(3).sum(), weight, create_graph=True)
    assert torch.equal(wanted(weight), torch.autograd.grad(first.square().sum(), weight)[0])


def test_the_module():
    m = hfnn.convert(nn.Embedding(7, 4, padding_idx=2), prefer="memory")
    assert target_of(m) is hfnn.Embedding and m.padding_idx == 2
    y = m(torch.randint(0, 7, (8,)))
    assert y.grad_fn.name() == "_EmbeddingBackward"
    assert "32 bits" in str(hfnn.report(m))
    m.sparse = True
    assert "never" in str(hfnn.report(m))
    assert type(hfnn.revert(m)) is nn.Embedding and "prefer" not in vars(m)
