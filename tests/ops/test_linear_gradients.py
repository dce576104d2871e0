"""Gradients of float32 tensors by linear under autocast, as on a GPU: not rounded, and added up where the sum is."""

import random

import pytest
import torch

import hfnn
from hfnn.core import native

from .test_linear import COLS, ROWS, WIDE, added_up, linear, parameters, same, under


@pytest.fixture
def wide():
    """Enables them on the CPU."""
    if native.extension is None:
        pytest.skip(native.why)
    native.extension.set_wide_on_cpu(True)
    yield
    native.extension.set_wide_on_cpu(False)


def apart(found, wanted, exact):
    """The largest errors of two results, relative to the largest number."""
    errors = [
        [(a.double() - e).abs().max() / e.abs().max() for a, e in zip(f, exact, strict=True)] for f in (found, wanted)
    ]
    return [max(e).item() for e in errors]


@pytest.mark.parametrize("turned", [False, True], ids=["by rows", "by columns"])
def test_gradients_of_float32_tensors_are_not_rounded_to_16_bits(device, wide, turned):
    x, weight, bias = parameters(device, (4, ROWS, COLS), (WIDE, COLS), (WIDE,))
    x_given = torch.nn.Parameter(x.detach().transpose(0, 1).contiguous().transpose(0, 1)) if turned else x
    y = under(device, lambda: added_up(x_given, weight, bias))
    dy = torch.randn_like(y)
    ours = torch.autograd.grad(y, (x_given, weight, bias), dy)
    low = [t.bfloat16().double() for t in (x, weight)]
    rows = dy.double().flatten(0, 1)
    exact = (rows @ low[1]).view_as(x), rows.t() @ low[0].flatten(0, 1), rows.sum(0)
    theirs = torch.autograd.grad(
        under(device, lambda: torch.nn.functional.linear(x, weight, bias)), (x, weight, bias), dy
    )
    assert all(g.dtype is torch.float32 and g.stride() == t.stride() for g, t in zip(ours[1:], theirs[1:], strict=True))
    found, wanted = apart(ours, theirs, exact)
    assert found < 1e-5 < 1e-3 < wanted


def test_products_of_one_input_add_up_where_the_sum_is(device, wide):
    leaf = torch.randn(ROWS, COLS, device=device, requires_grad=True)
    x, weights = leaf * 1, parameters(device, *[(WIDE, COLS)] * 3)
    ys = under(device, lambda: [added_up(x, w) for w in weights])
    with torch.profiler.profile(acc_events=True) as profile:
        torch.autograd.backward(ys, [torch.ones_like(y) for y in ys])
    calls = {event.key: event.count for event in profile.key_averages()}
    if native.extension is not None:
        assert not calls.keys() & {"aten::add", "aten::add_"} and calls["aten::addmm"] == 3
    exact = sum(w.detach().bfloat16().double().sum(0) for w in weights).expand_as(leaf)
    torch.testing.assert_close(leaf.grad.double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("seed", range(60))
def test_no_product_is_left_out_or_counted_twice(device, wide, seed):
    """Programs with several consumers of one input, hooks, other ops, and partial gradients."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    weights = parameters(device, *[(COLS, COLS)] * 4)
    start = torch.randn(ROWS, COLS, device=device)
    kinds = [
        draw.choice(["linear", "linear", "linear", "linear", "scale", "late", "chain", "beside"])
        for _ in range(draw.randint(2, 6))
    ]
    hooked = [draw.random() < 0.15 for _ in kinds]
    on_leaf, on_x = draw.random() < 0.3, draw.random() < 0.4
    how = draw.choice(["backward", "twice", "some", "graph", "retained", "many"])
    chosen = sorted(draw.sample(range(4), 2))

    def run(fn):
        leaf = start.clone().requires_grad_()
        found, kept = [], []
        with torch.autocast(device, torch.bfloat16):
            x, beside = (torch.stack([leaf, leaf]) * 2).unbind()  # outputs of one node
            x = leaf if on_leaf else x
            if on_x:
                x.register_hook(lambda g: found.append(g.clone()) or g * 1.5)
            if how == "retained" and not on_leaf:
                x.retain_grad()
            total = 0.0
            for i, (kind, hook) in enumerate(zip(kinds, hooked, strict=True)):
                w = weights[i % 4]
                if kind == "scale":
                    y = x * (i + 1.0)
                elif kind == "chain":
                    y = fn(fn(x, w).float() * 0.1, weights[(i + 1) % 4])
                else:
                    y = fn(beside if kind == "beside" else x, w)
                if hook and kind == "linear":
                    y.grad_fn.register_hook(lambda dx, dy: kept.append(next(g for g in dx if g is not None)))
                y = y.float()
                total = total + (y.sin() if kind == "late" else y * (i + 1)).mean(0).sum()
        if how in ("backward", "retained"):
            total.backward()
            found += [leaf.grad] + ([x.grad] if how == "retained" and not on_leaf else [])
        elif how == "twice":
            total.backward(retain_graph=True)
            total.backward()
            found.append(leaf.grad)
        elif how == "many":
            dys = torch.tensor([1.0, -2.0], device=device)
            found = torch.autograd.grad(total, [leaf, *weights], dys, is_grads_batched=True, allow_unused=True)
            kept.clear()  # hooks saw a batched gradient
        elif how == "some":
            found += torch.autograd.grad(
                total, [x, *(weights[i] for i in chosen)], retain_graph=True, allow_unused=True
            )
            found += torch.autograd.grad(total, [leaf])
        else:
            (g,) = torch.autograd.grad(total, [x], create_graph=True)
            found += [g.detach(), *torch.autograd.grad(g.square().sum() + total, [leaf])]
        grads = [w.grad for w in weights]
        for w in weights:
            w.grad = None
        return [g for g in (*found, *grads) if g is not None], kept

    (ours, kept), (theirs, kept_by_torch) = run(added_up), run(torch.nn.functional.linear)
    assert all(a.dtype is b.dtype for a, b in zip(ours, theirs, strict=True))
    for a, b in zip((*ours, *kept), (*theirs, *(g.float() for g in kept_by_torch)), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0.03 * b.abs().max().item() + 1e-6)


def test_exact_leaves_gradients_as_torch_rounds_them(device, wide):
    leaf, *weights = parameters(device, (ROWS, COLS), (WIDE, COLS), (WIDE, COLS))

    def run(fn):
        x = leaf * 1
        y = under(device, lambda: fn(x, weights[0]) + fn(x, weights[1]))
        return torch.autograd.grad(y.float().square().sum(), (leaf, *weights))

    assert same(run(linear), run(torch.nn.functional.linear)) and not same(
        run(added_up), run(torch.nn.functional.linear)
    )
    model = hfnn.convert(torch.nn.Sequential(torch.nn.Linear(COLS, WIDE)), exact=True)
    assert model[0].exact and not hfnn.convert(model)[0].exact
