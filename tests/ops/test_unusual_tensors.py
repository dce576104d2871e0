"""Tensors whose memory kernels cannot read: lazily negated ones, such as the imaginary part of a conjugate, have the
other sign there; for sparse and nested ones, and those of oneDNN, torch has kernels of its own."""

import copy
import inspect

import pytest
import torch
from torch import nn

import hfnn

OPS = [op for op in hfnn.ops.CONTRACT if hasattr(hfnn.functional, op.name)]


def negated(x):
    """A leaf with the values of x."""
    y = torch._neg_view(-x.detach()).detach()
    assert y.is_neg() and torch.equal(y, x)
    return y.requires_grad_(x.requires_grad)


def is_float(x):
    return isinstance(x, torch.Tensor) and x.is_floating_point()


def run(fn, args, kwargs):
    """The result, and the gradients of the arguments that require them."""
    torch.manual_seed(5)
    y = fn(*args, **kwargs)
    y = y[0] if isinstance(y, tuple) else y
    wanted = [x for x in (*args, *kwargs.values()) if is_float(x) and x.requires_grad]
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y)
    return y, *(torch.autograd.grad(y, wanted, dy, allow_unused=True) if wanted else ())


@pytest.mark.parametrize("grad", [False, True], ids=["", "grad"])
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_every_op_reads_their_sign(op, grad):
    filled = (case for case in op.cases if 0 not in case)
    case = min(filled, key=lambda case: op.sample(case, torch.float32, "meta")[0][0].numel())
    args, kwargs = op.sample(case, torch.float32, "cpu", torch.Generator().manual_seed(2))
    names = [*range(len(args)), *kwargs]
    given = dict(zip(names, (*args, *kwargs.values()), strict=True))
    given = {name: x.detach() if is_float(x) else x for name, x in given.items()}
    if grad:
        given |= {name: x.requires_grad_() for name, x in given.items() if is_float(x) and name in range(len(args))}
    ours = getattr(hfnn.functional, op.name)
    more = {"prefer": "memory"} if "prefer" in inspect.signature(ours).parameters else {}
    for name, x in given.items():
        if not is_float(x):
            continue
        changed = {**given, name: negated(x)}
        values = [changed[i] for i in range(len(args))]
        options = {key: changed[key] for key in kwargs}
        if not grad:
            values = [x.detach() if is_float(x) else x for x in values]
        got = run(ours, values, {**options, **more})
        pin = {} if op.pin is None else op.pin(values, got[0])
        # Stock on the same tensors: torch's max_pool1d itself misreads them without a gradient.
        want = run(op.torch if op.pin is None else op.reference, values, {**options, **pin})
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4, check_dtype=False)


MODULES = {
    "conv": lambda: nn.Conv1d(16, 16, 3, padding=1),
    "transposed conv": lambda: nn.ConvTranspose1d(16, 16, 3),
    "LSTM": lambda: nn.LSTM(64, 8),
    "attention": lambda: nn.TransformerEncoderLayer(64, 2, 64, 0.0, batch_first=True),
    "batch norm": lambda: nn.Sequential(nn.BatchNorm1d(16), nn.ReLU()),
    "mlp": lambda: nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)),
}


@pytest.mark.parametrize("name", MODULES)
def test_converted_modules_read_their_sign(name):
    stock = MODULES[name]()
    ours = hfnn.convert(copy.deepcopy(stock), prefer="memory")
    x = torch.randn(4, 16, 64)
    found = []
    for module in (stock, ours):
        leaf = negated(x).requires_grad_()
        y = module(leaf)
        y = y[0] if isinstance(y, tuple) else y
        y.square().sum().backward()
        found.append((y, leaf.grad, *(p.grad for p in module.parameters())))
    for got, want in zip(*reversed(found), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    "loss", ["cross_entropy", "nll_loss", "mse_loss", "l1_loss", "binary_cross_entropy_with_logits"]
)
def test_targets_and_weights_of_losses(loss):
    x = torch.randn(16, 12).log_softmax(-1)
    target, weight = torch.rand(16, 12).softmax(-1), torch.rand(12)
    stock, ours = getattr(nn.functional, loss), getattr(hfnn.functional, loss)
    more = {} if loss == "nll_loss" else {"prefer": "memory"}
    if loss == "nll_loss":
        calls = [((x, torch.randint(12, (16,))), {"weight": negated(weight)})]
    elif loss == "cross_entropy":
        calls = [((x, negated(target)), {}), ((x, target), {"weight": negated(weight)})]
        calls.append(((x, torch.randint(12, (16,))), {"weight": negated(weight)}))
    else:
        calls = [((x, negated(target)), {})]
    for args, options in calls:
        for got, want in zip(run(ours, args, {**options, **more}), run(stock, args, options), strict=True):
            torch.testing.assert_close(got, want)


def test_masks_that_are_added_to_scores():
    q, mask = torch.randn(2, 4, 16, 8), negated(torch.randn(16, 16).requires_grad_())
    stock = run(nn.functional.scaled_dot_product_attention, (q, q, q, mask), {})
    ours = run(hfnn.functional.scaled_dot_product_attention, (q, q, q, mask), {"prefer": "memory"})
    for got, want in zip(ours, stock, strict=True):
        torch.testing.assert_close(got, want)


def test_the_refusal_has_a_reason():
    x = negated(torch.randn(64, 64))
    with hfnn.use("cpp"), pytest.raises(hfnn.NoKernel, match="lazily negated"):
        hfnn.functional.softplus(x)


KINDS = {
    "sparse": torch.Tensor.to_sparse,
    "csr": torch.Tensor.to_sparse_csr,
    "nested": lambda x: torch.nested.nested_tensor([*x[:1], *(row[:-1] for row in x[1:])]),
    "mkldnn": torch.Tensor.to_mkldnn,
}


def dense(x):
    if x.is_nested:
        return torch.cat([part.flatten() for part in x.unbind()])
    return x if x.layout is torch.strided else x.to_dense()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested", "ignore:Sparse CSR")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_other_layouts_are_torchs(op, kind):
    """The result, or its error, in float32 and without a gradient."""
    samples = [op.sample(case, torch.float32, "cpu", torch.Generator().manual_seed(2)) for case in op.cases]
    (x, *args), kwargs = min(
        (s for s in samples if s[0][0].numel()), key=lambda s: (s[0][0].dim() < 2, s[0][0].numel())
    )
    x = x.detach()
    if kind == "mkldnn" and not x.is_floating_point():
        pytest.skip("oneDNN has no tensors of ids")
    x = KINDS[kind](x[None] if x.dim() < 2 else x)
    ours = getattr(hfnn.functional, op.name)
    more = {"prefer": "memory"} if "prefer" in inspect.signature(ours).parameters else {}
    results = []
    for call, options in ((ours, {**kwargs, **more}), (op.torch, kwargs)):
        torch.manual_seed(5)
        try:
            with torch.no_grad():
                y = call(x, *args, **options)
            results.append(y[0] if isinstance(y, tuple) else y)
        except Exception as error:
            results.append(error)
    if any(isinstance(y, Exception) for y in results):
        assert type(results[0]) is type(results[1]), results
    else:
        assert results[0].layout is results[1].layout
        torch.testing.assert_close(*map(dense, results))
