"""Ops on tensors without values against real calls; what make_fx and torch.export record of hfnn, run with values."""

import copy
import itertools

import pytest
import torch
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import hfnn

from .test_fakes import own_classes

LAYOUTS = ("contiguous", "transposed", "autocast")


def arguments(op, layout):
    """Tensors and other values of the smallest case that has tensors; the first tensor may be transposed."""
    fresh = lambda x: x.detach().clone() if isinstance(x, torch.Tensor) else x  # noqa: E731
    args, options = op.sample(op.small or op.cases[0], torch.float32, "cpu")
    args, options = [*map(fresh, args)], {name: fresh(x) for name, x in options.items()}
    if layout == "transposed" and args[0].dim() > 1:
        args[0] = args[0].transpose(0, 1).contiguous().transpose(0, 1)
    return args, options if op.name == "nll_loss" else {**options, "prefer": "memory"}  # nll_loss has one way only


def described(op, args, options, layout):
    """Shape, strides and dtype of an op's result and of the gradients of all its inputs."""
    inputs = [a.requires_grad_() for a in args if isinstance(a, torch.Tensor) and a.is_floating_point()]
    with torch.autocast("cpu", torch.bfloat16, enabled=layout == "autocast"):
        y = getattr(hfnn.functional, op.name)(*args, **options)
    y = y[0] if isinstance(y, tuple) else y
    grads = torch.autograd.grad(y, inputs, torch.ones_like(y), allow_unused=True)
    return [t if t is None else (t.shape, t.stride(), t.dtype, type(t)) for t in (y, *grads)]


@pytest.mark.parametrize("op", hfnn.ops.CONTRACT, ids=lambda op: op.name)
def test_ops_without_values_give_the_shapes_of_a_real_call(op):
    """All tensors are fake, or the first, or the others; or all are real ones in a mode that takes them."""
    for layout, (first, others) in itertools.product(LAYOUTS, itertools.product((True, False), repeat=2)):
        args, options = arguments(op, layout)
        wanted = described(op, args, options, layout)
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            change = lambda x, to: mode.from_tensor(x.detach()) if to and isinstance(x, torch.Tensor) else x  # noqa: E731
            args = [change(args[0], first), *(change(x, others) for x in args[1:])]
            found = described(op, args, {name: change(x, others) for name, x in options.items()}, layout)
        assert found == [t if t is None else (*t[:-1], FakeTensor) for t in wanted], (layout, first, others)


# ---- recorded graphs


def leaves(x):
    """Fresh leaves in place of the tensors among some values."""
    return [t.detach().clone().requires_grad_(t.is_floating_point()) for t in x if isinstance(t, torch.Tensor)]


@pytest.mark.parametrize("fakes", [False, True], ids=["make_fx's fakes", "fakes"])
@pytest.mark.parametrize("op", hfnn.ops.CONTRACT, ids=lambda op: op.name)
def test_a_recorded_graph_computes_torchs_op_and_gradients(op, fakes):
    """With real values: what was recorded on fakes would read memory that nobody wrote, were it not torch's own ops."""
    args, options = arguments(op, "contiguous")
    prefer = {"prefer": options.pop("prefer")} if "prefer" in options else {}
    values = [*args, *options.values()]

    def step(function, tensors, **extra):
        given = iter(tensors)
        given = [next(given) if isinstance(x, torch.Tensor) else x for x in values]
        y = function(*given[: len(args)], **dict(zip(options, given[len(args) :], strict=True)), **extra)
        y = y[0] if isinstance(y, tuple) else y
        inputs = [t for t in given[: len(args)] if isinstance(t, torch.Tensor) and t.is_floating_point()]
        grads = torch.autograd.grad(y, inputs, torch.ones_like(y), allow_unused=True)
        return y, *[g for g in grads if g is not None]

    own = lambda *tensors: step(getattr(hfnn.functional, op.name), tensors, **prefer)  # noqa: E731
    real = leaves(values)
    if fakes:
        with FakeTensorMode() as mode:
            graph = make_fx(own)(*map(mode.from_tensor, real))
    else:
        graph = make_fx(own, tracing_mode="fake")(*real)
    torch.manual_seed(1)
    found = graph(*real)
    torch.manual_seed(1)
    for mine, theirs in zip(found, step(op.torch, real), strict=True):
        assert torch.equal(mine, theirs) and mine.stride() == theirs.stride()


@pytest.mark.parametrize("recompute", [None, "gemm"])
@pytest.mark.parametrize("by", ["make_fx", "export"])
def test_a_recorded_model_computes_the_stock_models_step(by, recompute):
    torch.manual_seed(0)
    stock = own_classes()
    model = hfnn.convert(copy.deepcopy(stock), prefer="memory", recompute=recompute)
    x, names = torch.randn(4, 64), [name for name, _ in stock.named_parameters()]

    def step(module, parameters, x):
        y = torch.func.functional_call(module, dict(zip(names, parameters, strict=True)), (x,))
        return y, *torch.autograd.grad(y.sum(), parameters)

    wanted = step(stock, tuple(stock.parameters()), x)
    if by == "make_fx":
        found = make_fx(lambda p, x: step(model, p, x), tracing_mode="fake")(leaves(model.parameters()), x)(
            leaves(model.parameters()), x
        )
    else:
        recorded = torch.export.export(model, (x,), strict=False).module()
        y = recorded(x)
        found = y, *torch.autograd.grad(y.sum(), [recorded.get_parameter(name) for name in names])
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs)
