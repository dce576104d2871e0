"""Linear under autocast, and with its product recomputed: what is kept; gradients are bitwise unchanged."""

import copy
import functools

import pytest
import torch
import torch.nn.utils.prune
from torch.utils.weak import TensorWeakRef
from transformers.pytorch_utils import Conv1D

import hfnn
from hfnn.core import node as recipe
from hfnn.functional import gelu, layer_norm
from hfnn.memory import saved_bytes

ROWS, COLS, WIDE = 48, 64, 96


# Under autocast small inputs go to torch unless memory is preferred. On a GPU gradients are not bitwise torch's.
added_up = functools.partial(hfnn.functional.linear, prefer="memory")
linear = functools.partial(added_up, exact=True)


def mapping(wide, out, device):
    layer = hfnn.Linear(wide, out, device=device)
    layer.prefer, layer.exact = "memory", True
    return layer


def test_small_inputs_under_autocast_are_torchs(device):
    x, weight = (torch.randn(8, 8, device=device, requires_grad=True) for _ in range(2))
    found = [
        under(device, lambda prefer=prefer: hfnn.functional.linear(x, weight, prefer=prefer))
        for prefer in ("auto", "memory", "speed")
    ]
    assert [y.grad_fn.name() == "_LinearBackward" for y in found] == [False, True, False]


def parameters(device, *shapes, dtype=torch.float32):
    """As Parameters, because their memory is not counted as kept."""
    return [torch.nn.Parameter(torch.randn(shape, device=device, dtype=dtype) * 0.1) for shape in shapes]


def under(device, fn, low=torch.bfloat16):
    with torch.autocast(device, low):
        return fn()


def same(a, b):
    return all(torch.equal(s, t) for s, t in zip(a, b, strict=True))


def products(fn):
    """The number of products that run."""
    with torch.profiler.profile(acc_events=True) as profile:
        fn()
    return sum(event.count for event in profile.key_averages() if event.key in ("aten::mm", "aten::addmm"))


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)
def test_gradients_under_autocast_are_torchs(device, x_dtype, low):
    (x,) = parameters(device, (4, ROWS, COLS), dtype=x_dtype)
    leaves = x, *parameters(device, (WIDE, COLS), (WIDE,))

    def run(fn):
        y = under(device, lambda: fn(*leaves), low)
        assert y.dtype is low
        return y, *torch.autograd.grad(y.float().square().sum(), leaves)

    ours = run(linear)
    assert ours[0].grad_fn.name().startswith("_Linear")
    assert same(ours, run(torch.nn.functional.linear))


def test_no_cast_of_a_weight_is_kept(device):
    """Ours keeps the input in the low dtype; torch also keeps the weight in it."""
    x = torch.randn(ROWS, COLS, device=device, dtype=torch.bfloat16, requires_grad=True)
    layer = mapping(COLS, WIDE, device)
    ours = under(device, lambda: saved_bytes(lambda: layer(x)))
    theirs = under(device, lambda: saved_bytes(lambda: hfnn.revert(layer)(x)))
    assert ours.total == 2 * ROWS * COLS and theirs.total == ours.total + 2 * WIDE * COLS


def test_siblings_share_one_cast_of_their_input(device):
    leaf = torch.randn(ROWS, COLS, device=device, requires_grad=True)
    x, weights = leaf * 1, parameters(device, *[(WIDE, COLS)] * 3)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        results = under(device, lambda: [linear(x, w) for w in weights])
    casts = [t for t in saved if t.dtype is torch.bfloat16]
    assert len(casts) == 3 and len({t.data_ptr() for t in casts}) == 1
    cast = TensorWeakRef(casts[0])
    saved.clear()
    del results, casts
    assert cast() is None, "a cast outlived its consumers"

    def step(fn):
        y = under(device, lambda: sum(fn(x, w).float().square().sum() for w in weights))
        return torch.autograd.grad(y, [*weights, leaf], retain_graph=True)

    ours, theirs = step(linear), step(torch.nn.functional.linear)
    assert same(ours, theirs)


@pytest.mark.parametrize("needs", [False, True])
def test_a_buffer_that_is_filled_anew_is_cast_anew(device, needs):
    """By a write that changes no version: a receive, numpy, `.data`."""
    x = torch.zeros(ROWS, COLS, device=device, requires_grad=needs)
    (weight,) = parameters(device, (WIDE, COLS))

    def step(fn):
        results = []  # with each result's graph, which keeps its cast
        for i in range(3):
            x.data.fill_(i)
            results.append(under(device, lambda: fn(x, weight)))
        return *results, *torch.autograd.grad(sum(y.float().square().sum() for y in results), weight)

    assert same(step(linear), step(torch.nn.functional.linear))


def test_a_written_input_is_cast_anew(device):
    x = torch.randn(ROWS, COLS, device=device)
    (weight,) = parameters(device, (WIDE, COLS))

    def step(fn):
        first = fn(x, weight)
        x.mul_(-1)
        second = fn(x, weight)
        x.mul_(-1)
        return first, second

    ours, theirs = (under(device, lambda fn=fn: step(fn)) for fn in (linear, torch.nn.functional.linear))
    assert same(ours, theirs)


def test_a_frozen_weight_keeps_nothing_under_autocast(device):
    x = torch.randn(ROWS, COLS, device=device, requires_grad=True)
    weight = torch.randn(WIDE, COLS, device=device)
    assert under(device, lambda: saved_bytes(lambda: linear(x, weight))).total in (0, weight.nbytes // 2)
    ours, theirs = (
        torch.autograd.grad(under(device, lambda fn=fn: fn(x, weight)).sum(), x)
        for fn in (linear, torch.nn.functional.linear)
    )
    assert same(ours, theirs)


def test_double_backward_under_autocast(device):
    leaves = parameters(device, (ROWS, COLS), (WIDE, COLS), (WIDE,))

    def second(fn):
        y = under(device, lambda: fn(*leaves))
        first = torch.autograd.grad(y.float().square().sum(), leaves, create_graph=True)
        return torch.autograd.grad(sum(g.float().square().sum() for g in first), leaves)

    for a, b in zip(second(linear), second(torch.nn.functional.linear), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2 * b.abs().max().item())


@pytest.mark.parametrize("hooks", [False, True])
def test_second_derivatives_by_a_shared_cast(device, hooks):
    """A sibling's cast must lead to x, whether it is the same tensor or, under hooks, the same memory."""
    leaf, first, second = parameters(device, (ROWS, COLS), (WIDE, COLS), (WIDE, COLS))

    def gradients(fn):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t) if hooks else torch.enable_grad():
            x = leaf * 2
            y = under(device, lambda: fn(x, first).float().square().sum() + fn(x, second).float().square().sum())
            # Only the second weight's gradient; it depends on x through its own product's cast.
            (dsecond,) = torch.autograd.grad(y, second, create_graph=True)
            return torch.autograd.grad(dsecond.float().square().sum(), leaf)

    (ours,), (theirs,) = gradients(linear), gradients(torch.nn.functional.linear)
    torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2 * theirs.abs().max().item())


def test_gradients_have_the_dtypes_of_their_inputs(device):
    """The engine casts what backward returns, also for an input in the middle of a graph."""
    leaf, weight, bias = parameters(device, (ROWS, COLS), (WIDE, COLS), (WIDE,))
    x = leaf * 2
    y = under(device, lambda: linear(x, weight, bias))
    assert all(g.dtype is torch.float32 for g in torch.autograd.grad(y.float().sum(), [x, weight, bias]))


def mlp(x, norm, first, bias, second, recompute):
    y = layer_norm(x, (COLS,), norm, prefer="memory")
    return linear(gelu(linear(y, first, bias, recompute=recompute), prefer="memory"), second)


@pytest.mark.parametrize("autocast", [False, True])
def test_recompute(device, autocast):
    """The product is not kept, runs exactly once more, and gradients are bitwise equal."""
    x = torch.randn(ROWS, COLS, device=device, requires_grad=True)
    leaves = x, *parameters(device, (COLS,), (WIDE, COLS), (WIDE,), (COLS, WIDE))

    def forward(recompute):
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            return mlp(*leaves, recompute)

    def step(recompute):
        return torch.autograd.grad(forward(recompute).float().square().sum(), leaves)

    kept = {on: saved_bytes(lambda on=on: forward(on)).total for on in (False, True)}
    assert kept[False] - kept[True] == ROWS * WIDE * (2 if autocast else 4)
    assert same(step(True), step(False))
    with recipe.disabled():
        assert same(step(True), step(False))
    assert products(lambda: step(True)) - products(lambda: step(False)) == 1


def test_recompute_by_two_consumers(device):
    """Two activations of one product, as in a gated MLP with a tied gate: it is recomputed once."""
    x, weight, second = parameters(device, (ROWS, COLS), (WIDE, COLS), (COLS, WIDE))

    def step(recompute):
        h = linear(x, weight, recompute=recompute)
        y = linear(gelu(h, prefer="memory"), second) + linear(hfnn.functional.silu(h, prefer="memory"), second)
        return torch.autograd.grad(y.square().sum(), [x, weight, second])

    assert same(step(True), step(False))
    assert products(lambda: step(True)) - products(lambda: step(False)) == 1


def test_recompute_and_double_backward(device):
    leaves = [t.detach().double().requires_grad_() for t in parameters(device, (3, 5), (7, 5), (7,))]
    run = lambda x, w, b: gelu(linear(x, w, b, recompute=True), prefer="memory")  # noqa: E731
    assert torch.autograd.gradcheck(run, leaves) and torch.autograd.gradgradcheck(run, leaves)


def test_recompute_module(device):
    layer = mapping(COLS, WIDE, device)
    layer.recompute = True
    x = torch.randn(ROWS, COLS, device=device, requires_grad=True)
    assert saved_bytes(lambda: gelu(layer(x), prefer="memory")).total == x.nbytes
    with torch.no_grad():
        assert recipe.take(layer(x)) is None


@pytest.mark.parametrize("dtypes", [(torch.float64,) * 3, (torch.float64, torch.float32, torch.float32)])
def test_autocast_leaves_float64_alone(device, dtypes):
    given = [
        torch.randn(shape, device=device, dtype=d) for shape, d in zip(((5, 8), (4, 8), (4,)), dtypes, strict=True)
    ]
    given[1].requires_grad_()
    results = []
    for fn in (linear, torch.nn.functional.linear):
        try:
            y = under(device, lambda fn=fn: fn(*given))
            results.append((y.dtype, y.tolist()))
        except RuntimeError as error:
            results.append(str(error))
    assert results[0] == results[1]


@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8), (8,), (0, 3, 8)])
@pytest.mark.parametrize("outputs", [4, 0])
def test_no_rows_and_one(device, shape, outputs):
    """Like an expert without tokens, or with one."""
    x, weight, bias = parameters(device, shape, (outputs, 8), (outputs,))

    def step(fn):
        y = under(device, lambda: fn(x, weight, bias))
        return y, *torch.autograd.grad(y.float().sum(), [x, weight, bias])

    assert same(step(linear), step(torch.nn.functional.linear))


@pytest.mark.parametrize("shape", [(6, 8), (2, 3, 8), (2, 3, 3, 8)])
@pytest.mark.parametrize("has_bias", [True, False])
def test_the_result_may_be_written_to(device, shape, has_bias):
    (x,) = parameters(device, shape)
    weight, bias = parameters(device, (8, 8), (8,))
    leaves = [x, weight, bias] if has_bias else [x, weight]

    def step(fn):
        h = layer_norm(x, (8,), prefer="memory")
        y = fn(h, *leaves[1:]) + under(device, lambda: fn(x, *leaves[1:])).relu_()
        y = fn(y, weight).mul_(2)
        return torch.autograd.grad(y.square().sum(), leaves)

    with recipe.disabled():
        off = step(linear)
    assert same(step(linear), off) and same(off, step(torch.nn.functional.linear))


def test_a_weight_that_changed_before_backward_is_an_error_that_says_what_to_do(device):
    layer = mapping(8, 8, device)
    x = torch.randn(3, 8, device=device, requires_grad=True)
    y = under(device, lambda: layer(x))
    with torch.no_grad():
        layer.weight.mul_(2)
    with pytest.raises(RuntimeError, match=r"(?s)modified by an inplace.*backward before the weight .* skip="):
        y.sum().backward()


def test_a_weight_that_no_gradient_needs_may_change(device):
    """The weight's gradient depends on the input alone."""
    (weight,) = parameters(device, (WIDE, COLS))
    x = torch.randn(ROWS, COLS, device=device)

    def step(fn):
        y = under(device, lambda: fn(x, weight))
        with torch.no_grad():
            weight.mul_(1)
        return torch.autograd.grad(y.float().square().sum(), weight)

    assert same(step(linear), step(torch.nn.functional.linear))


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("wrong", [None, [1.0], 1.5])
def test_what_is_no_tensor(wrong, recompute):
    """torch's own error."""
    module = hfnn.Linear(4, 4)
    module.recompute = recompute
    errors = []
    for forward in (functools.partial(torch.nn.Linear.forward, module), module):
        with pytest.raises(TypeError) as raised:
            forward(wrong)
        errors.append(str(raised.value))
    assert errors[0] == errors[1] and "must be Tensor" in errors[0]


@pytest.mark.parametrize("change", ["pruned", "parametrised", "shadowed", "deleted", "functional"])
def test_the_weight_is_the_attribute(change):
    torch.manual_seed(0)
    stock, x, other = torch.nn.Linear(8, 8), torch.randn(3, 8), torch.nn.Parameter(torch.randn(8, 8))
    results = []
    for module in (stock, hfnn.convert(copy.deepcopy(torch.nn.Sequential(stock)))[0]):
        call = module
        if change == "pruned":
            torch.nn.utils.prune.l1_unstructured(module, "weight", 0.5)
        elif change == "parametrised":
            torch.nn.utils.parametrizations.weight_norm(module)
        elif change == "shadowed":
            module.__dict__["weight"] = other
        elif change == "deleted":
            del module.weight
            module.weight = other * 2
        else:
            call = functools.partial(torch.func.functional_call, module, {"weight": other})
        results.append(call(x))
    torch.testing.assert_close(*results, rtol=0, atol=0)


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize("prefer", ["auto", "memory"])
@pytest.mark.parametrize("shape", [(8,), (3, 8), (2, 3, 8), (0, 3, 8), (2, 3, 7), (3, 2, 8)])
def test_conv1d_of_transformers(shape, prefer, autocast, grad):
    """Its result, gradients and errors; (3, 2, 8) is transposed, which its view refuses."""
    stock = Conv1D(6, 8)
    model = hfnn.convert(torch.nn.Sequential(copy.deepcopy(stock)), prefer=prefer)
    given, results = torch.randn(shape), []
    for module in (stock, model):
        x = given.clone().requires_grad_()
        try:
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast), torch.set_grad_enabled(grad):
                y = module(x.transpose(0, 1) if shape[0] == 3 and len(shape) == 3 else x)
            found = [y]
            if grad:
                found += torch.autograd.grad(y.float().square().sum(), [x, *module.parameters()])
            results.append([(t.detach(), t.dtype, t.stride()) for t in found])
        except RuntimeError as error:
            results.append(str(error))
    if isinstance(results[0], str) or isinstance(results[1], str):
        assert results[0] == results[1]
    else:
        torch.testing.assert_close(*[[t for t, *_ in each] for each in results])
        assert [rest for _, *rest in results[0]] == [rest for _, *rest in results[1]]
