"""float64 is float64: no constant of a kernel, a room or an optimizer is rounded to float32 (an error of 1e-8).

Outputs and gradients of everything in the index of ops and of optimizers, against the definitions in float64. torch's
own hardsigmoid (its gradient) and celu (alpha other than 1, its gradient) have such constants.
"""

import contextlib
import copy

import pytest
import torch
from torch import nn

import hfnn
from hfnn import optim
from hfnn.ops import add_norm, qk_norm_rope, rope
from hfnn.optim import swap
from hfnn.testing import error

from .test_contract import function, leaves, pinned, to

F64 = torch.float64
NEAR = 2e-14  # the largest seen is 3e-15
ELEMENTS = 1 << 15
SUMS = add_norm.LAYER, add_norm.RMS  # a case's last number is the probability of a dropout
# The index, and ops that only modules call.
OPS = (*hfnn.ops.CONTRACT, *SUMS, rope.OP, qk_norm_rope.OP)
CASES = [
    pytest.param(op, case, id=f"{op.name}-{'x'.join(map(str, case))}")
    for op in OPS
    for case in dict.fromkeys((*op.cases, *[op.small] * bool(op.small)))
    if 0 < sum(x.numel() for x in op.sample(case, F64, "meta")[0] if isinstance(x, torch.Tensor)) <= ELEMENTS
    and not (op in SUMS and case[-1])
]


def near(got, want, name):
    found = error(got, want)
    assert got.dtype is F64 and max(found.l2, found.largest) <= NEAR, f"{name}: {found}"


def results(fn, args, kwargs, seed=7):
    """The outputs, and the gradients of the floating-point arguments."""
    torch.manual_seed(seed)
    y = fn(*args, **kwargs)
    y = y if isinstance(y, tuple) else (y,)
    generator = torch.Generator().manual_seed(1)
    dy = [torch.randn(one.shape, generator=generator, dtype=F64) for one in y]
    wanted = [x for x in args if isinstance(x, torch.Tensor) and x.requires_grad]
    return *y, *torch.autograd.grad(y, wanted, dy, allow_unused=True)


def kernel_of(op):
    """The op's kernel for float64, which must then run; torch's own op with hfnn's backward if there is none."""
    name = next((k.name for k in op.kernels if F64 in k.dtypes and k.missing is None), None)
    return hfnn.use(name) if name else contextlib.nullcontext()


@pytest.mark.parametrize("op, case", CASES)
def test_every_op(op, case):
    args, kwargs = op.sample(case, F64, "cpu")
    with kernel_of(op):
        got = results(function(op), leaves(args), kwargs)
    want = results(op.reference, to(args, F64), {**kwargs, **pinned(op, args, got[0])})
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        if w is not None:
            near(g, w, f"{op.name} {case}: result {i}")


def test_every_op_has_a_case():
    assert {p.values[0].name for p in CASES} == {op.name for op in OPS}


# Ops whose modules are called, not their functions: arguments of torch's module, and inputs of a module of width 8.
WIDTH = 8
MODULES = {
    nn.MultiheadAttention: ((WIDTH, 2), {}, 3),
    nn.TransformerEncoderLayer: ((WIDTH, 2, 16, 0.0), {}, 1),
    nn.TransformerDecoderLayer: ((WIDTH, 2, 16, 0.0), {"activation": "gelu"}, 2),
    nn.LSTM: ((WIDTH, 6, 2), {}, 1),
    nn.GRU: ((WIDTH, 6), {"bidirectional": True}, 1),
    nn.RNN: ((WIDTH, 6), {"nonlinearity": "relu"}, 1),
}
BY_MODULE = [(torchs, op) for op in hfnn.ops.ALL if op not in hfnn.ops.CONTRACT for torchs in op.modules]


@pytest.mark.parametrize("torchs, op", BY_MODULE, ids=lambda x: getattr(x, "__name__", getattr(x, "name", "")))
def test_every_other_module(torchs, op):
    torch.manual_seed(0)
    args, options, inputs = MODULES[torchs]
    stock = torchs(*args, **options).to(F64)
    ours = hfnn.convert(copy.deepcopy(stock), prefer="memory")
    x = [torch.randn(5, 3, WIDTH, dtype=F64) for _ in range(inputs)]

    def run(model):
        y = model(*x)
        y = y[0] if isinstance(y, tuple) else y
        dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=F64)
        return y, *torch.autograd.grad(y, [*model.parameters()], dy)

    for got, want, name in zip(run(ours), run(stock), ("output", *dict(stock.named_parameters())), strict=True):
        near(got, want, name)


OPTIMIZERS = [cls for cls in map(vars(optim).get, optim.__all__) if isinstance(cls, type)]
NUMBERS = {"lr": 0.013, "weight_decay": 0.07, "momentum": 0.83, "eps": 1.3e-7}


@pytest.mark.parametrize("cls", OPTIMIZERS, ids=lambda cls: cls.__name__)
def test_every_optimizer(cls):
    """Six steps by the kernel, against torch's class; against the definition in plain torch where torch has none."""
    torch.manual_seed(0)
    stock = swap._torch_class(cls)
    p, q = (nn.Parameter(torch.randn(17, 33, dtype=F64, generator=torch.Generator().manual_seed(0))) for _ in range(2))
    known = cls([q]).defaults
    numbers = {name: value for name, value in NUMBERS.items() if isinstance(known.get(name), float)}
    ours, theirs = cls([p], **numbers), (stock or cls)([q], **numbers)
    for step in range(6):
        p.grad = torch.randn_like(p) * (step + 0.1)
        q.grad = p.grad.clone()
        with hfnn.use("cpp"):
            ours.step()
        with hfnn.use("torch"):
            theirs.step()
    assert ours._ran == ("cpp",)
    near(p, q, "the parameter")
    for name, value in theirs.state[q].items():
        if isinstance(value, torch.Tensor) and value.shape == q.shape:
            near(ours.state[p][name], value, name)
