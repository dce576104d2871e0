"""Attention that a module writes out (hfnn/deferred/scores.py) and that returns its weights: they wait for a read."""

import copy

import pytest
import torch
from test_attention_around import HEADS, TOKENS, WIDTH, converted, draw, same
from test_attention_around import fused as fused

import hfnn


def test_weights_that_are_returned_now_and_then(fused):
    stock, ours = converted()
    x = draw()
    for returns in (True, False, False, True):
        stock.returns = ours.returns = returns
        same(stock, ours, x)
        if returns:
            (_, mine), (_, weights) = ours(x), stock(x)
            torch.testing.assert_close(mine.detach(), weights.detach())
            torch.testing.assert_close(*(torch.autograd.grad(w.square().sum(), x)[0] for w in (mine, weights)))


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_module_whose_weights_are_always_read_is_left_to_itself(when, fused):
    """Before or after the backward."""
    _, ours = converted(watched=False)
    ours.returns = True
    for call in range(4):
        y, weights = ours(draw(tokens=64))
        assert (type(weights) is torch.Tensor) == (call > 1)
        before = weights.mean() if when == "before" else 0
        (y.sum() + before).backward()
        weights.mean()
    assert not fused
    assert "are computed" in str(hfnn.report(ours).swapped[0].why)


def test_weights_that_are_returned_and_not_read(fused):
    stock, ours = converted(watched=False)
    stock.returns = ours.returns = True
    for call in range(5):
        x = draw(tokens=64)
        (y, weights), (mine, unread) = stock(x), ours(x)
        wanted = torch.autograd.grad(y.sum(), [x, *stock.parameters()])
        torch.testing.assert_close(torch.autograd.grad(mine.sum(), [x, *ours.parameters()]), wanted)
        assert len(fused) == call
    with torch.inference_mode():  # of the last call, after its backward
        torch.testing.assert_close(unread.sum(), weights.sum())
    assert unread.requires_grad and unread.grad_fn is not None and not unread.is_inference()
    torch.testing.assert_close(unread.detach(), weights.detach())
    ours(draw(tokens=64))  # watches again
    assert len(fused) == 4


@pytest.mark.parametrize("read", [False, True])
def test_weights_that_are_held_keep_no_more_than_torchs(read, fused):
    """After their backward; their own graph is freed then."""
    stock, ours = converted()
    stock.returns = ours.returns = True
    held = []
    for model in (stock, ours):
        y, weights = model(draw(tokens=64))
        y.sum().backward()
        model.zero_grad()
        if read:
            weights.mean()
        del y
        held.append(weights)
    mine = held[1]
    assert fused and (type(mine) is not torch.Tensor)
    assert (mine._node.plan is None) == (mine._node.before is None) == read
    kept = [mine._node.value()] if read else mine._node.given()
    size = sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in kept}.values())
    assert size <= held[0].untyped_storage().nbytes()


def test_weights_that_are_smaller_than_queries_and_keys_are_computed(fused):
    _, ours = converted(watched=False)
    ours.returns = True
    for _ in range(4):
        ours(draw())[0].sum().backward()
    assert not fused


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # which Dynamo reads of any tensor
def test_copies_of_returned_weights(tmp_path):
    stock, ours = converted()
    stock.returns = ours.returns = True
    x = draw(tokens=64)
    wanted = stock(x)[1].detach()
    torch.save(ours(x)[1], tmp_path / "weights.pt")
    for mine in (torch.load(tmp_path / "weights.pt", weights_only=True), ours(x)[1].detach(), ours(x)[1].clone()):
        assert type(mine) is torch.Tensor
        torch.testing.assert_close(mine.detach(), wanted)
    with pytest.raises(RuntimeError, match="deepcopy protocol"):  # as of torch's
        copy.deepcopy(ours(x)[1])
    torch.testing.assert_close(torch.compile(lambda w: w * 2, backend="eager")(ours(x)[1]).detach(), 2 * wanted)


def test_hooks_on_a_module_whose_weights_nobody_reads():
    """They pass its results through a node, the weights too."""
    stock, ours = converted()
    stock.returns = ours.returns = True
    for model in (stock, ours):
        model.register_full_backward_hook(lambda module, taken, given: None)
    x = draw(tokens=64)
    for _ in range(3):
        for model in (stock, ours):
            model.zero_grad()
            model(x)[0].sum().backward()
        torch.testing.assert_close(*([p.grad for p in m.parameters()] for m in (stock, ours)))


def test_returned_weights_with_dropout_are_those_of_the_result():
    _, ours = converted(0.5, watched=False)
    ours.returns = True
    for _ in range(3):
        x = draw()
        y, weights = ours(x)
        _, _, v = ours.qkv(x).chunk(3, -1)
        v = v.view(3, TOKENS, HEADS, -1).transpose(1, 2)
        torch.testing.assert_close(y, ours.proj((weights @ v).transpose(1, 2).reshape(3, TOKENS, WIDTH)))
