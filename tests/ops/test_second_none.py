"""Which second derivatives are None: the same as torch's, for every op and for fused combinations.

A caller may tell None from zeros: `torch.autograd.grad` raises an error for None unless `allow_unused=True`.
"""

import functools
import random
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import hfnn
from hfnn.ops.batch_norm import ACTIVATIONS, _activated

sys.path.append(str(Path(__file__).parents[1] / "fuzz"))
import convert_models as models


def pattern(make, leaves, cast=None) -> list:
    """For each first gradient: None, "constant", or for each leaf and the output's gradient whether there is a second
    derivative."""
    torch.manual_seed(0)
    y = make()
    dy = torch.ones_like(y).requires_grad_()
    found = []
    for g in torch.autograd.grad(y, leaves, dy, create_graph=True, allow_unused=True):
        if g is None or not g.requires_grad:
            found.append("constant" if g is not None else None)
            continue
        second = torch.autograd.grad(g.sum(), [*leaves, dy], retain_graph=True, allow_unused=True)
        found.append(tuple(s is not None for s in second))
    return found


def choices(count):
    """Which leaves require grad: all, one, all but one."""
    one = [[i == j for j in range(count)] for i in range(count)]
    return [[True] * count, *one, *([[not on for on in each] for each in one] if count > 2 else [])]


def is_float(x):
    return isinstance(x, torch.Tensor) and x.is_floating_point()


# torch's own of ops whose definition is pinned to what ours drew.
STOCK = {
    "rrelu": lambda x, *args, **how: F.rrelu(x, *args, **how),
    "relu_dropout": lambda x, p=0.5, training=True, **how: F.dropout(F.relu(x), p, training),
}


@pytest.mark.parametrize("op", hfnn.ops.CONTRACT, ids=lambda op: op.name)
def test_ops(op):
    case = next((c for c in op.cases if 769 in c), op.cases[0])
    args, kwargs = op.sample(case, torch.float32, "cpu")
    ours, stock = getattr(hfnn.functional, op.name), STOCK.get(op.name, op.torch)
    if op.name == "rrelu" or op.name.startswith("adaptive_max"):  # without kernels, and too small for "auto"
        ours = functools.partial(ours, prefer="memory")
    for grads in choices(sum(map(is_float, args))):
        wanted = iter(grads)
        given = [a.detach().clone().requires_grad_(next(wanted)) if is_float(a) else a for a in args]
        leaves = [a for a in given if is_float(a) and a.requires_grad]
        try:
            expected = pattern(lambda: stock(*given, **kwargs), leaves)  # noqa: B023
        except RuntimeError as error:
            if "is not implemented" in str(error):  # hfnn may support more than torch
                continue
            raise
        with hfnn.use("cpp"):
            assert pattern(lambda: ours(*given, **kwargs), leaves) == expected, grads  # noqa: B023


# An activation in each way that the kernels compute one, and the others.
QUICK = [act if act in (None, "relu", "silu") else pytest.param(act, marks=pytest.mark.slow) for act in ACTIVATIONS]


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("act", QUICK)
def test_batch_norm_act(act, training, residual):
    def stock(x, weight, bias, *residual):
        y = F.batch_norm(x, torch.zeros(8), torch.ones(8), weight, bias, training)
        return _activated(y + residual[0] if residual else y, act, 0.01)

    def ours(x, weight, bias, *residual):
        of_x = torch.zeros(8), torch.ones(8), weight, bias, training
        residual = residual[0] if residual else None
        return hfnn.functional.batch_norm_act(x, *of_x, residual=residual, act=act, prefer="memory")

    shapes = [(4, 8, 6, 6), (8,), (8,)] + [(4, 8, 6, 6)] * residual
    for grads in choices(len(shapes)):
        given = [torch.randn(shape).requires_grad_(on) for shape, on in zip(shapes, grads, strict=True)]
        between = [t * 1 for t in given]  # not leaves themselves
        for inputs in (given, between):
            leaves = [t for t in given if t.requires_grad]
            found = [pattern(lambda f=f: f(*inputs), leaves) for f in (stock, ours)]  # noqa: B023
            assert found[0] == found[1], (grads, found)


LAYERS = [name for name in models.LAYERS if name not in models.AROUND and name not in ("chain", "probe", "written")]


def trees(kind, draws):
    """Some layers of a kind as the fuzzer draws them, with a layer before and one after."""
    rng = random.Random(kind)
    for layout in sorted({*models.LAYERS[kind].layouts} - {"last"}):
        for _ in range(draws):
            own = (kind, *models.LAYERS[kind].draw(rng, lambda to=None: [], layout))
            ends = (
                [("linear", True)]
                if layout in models.LAST
                else [("conv", models.DIMENSIONS[layout], 1, True, 1, "plain")]
            )
            yield layout, [*ends, own, *ends]


@pytest.mark.filterwarnings(
    "ignore:Sparse CSR tensor support:UserWarning", "ignore:torch.quantize_per_tensor:UserWarning"
)
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("draws", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_modules(kind, draws):
    for layout, tree in trees(kind, draws):
        torch.manual_seed(0)
        stock = models.sequential(8, tree)
        torch.manual_seed(0)
        ours = hfnn.convert(models.sequential(8, tree), prefer="memory")  # torch cannot copy some buffers
        x = torch.randn(models.shape({"layout": layout, "N": 2, "D": 8})).requires_grad_()
        found = []
        for model in (stock, ours):
            leaves = [x, *model.parameters()]
            try:
                found.append(pattern(lambda: model(x), leaves))  # noqa: B023
            except RuntimeError as error:
                if "is not implemented" not in str(error):
                    raise
                break
        assert len(found) < 2 or found[0] == found[1], (tree, [p for p, _ in stock.named_parameters()])
