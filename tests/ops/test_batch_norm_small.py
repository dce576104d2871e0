"""Batch norms below the rooms' size limits: torch's own ops, called from C++."""

import copy
import itertools

import pytest
import torch
from torch import nn

import hfnn
from hfnn.core import native
from hfnn.core.kernel import PREFERENCES
from hfnn.ops import batch_norm
from hfnn.ops.batch_norm import ACTIVATIONS

from .test_batch_norm import LAYOUTS, MODULES, SHAPES, random_parts
from .test_batch_norm_node import stub

F = hfnn.functional
EVERY_ACT = *((act, False) for act in ACTIVATIONS), *((act, True) for act in ACTIVATIONS)


def nodes(y):
    """The names of the nodes that made y, in order, without their number: an op in place may have another."""
    found, node = [], y.grad_fn
    while node is not None:
        found.append(node.name().rstrip("0123456789"))
        node = node.next_functions[0][0] if node.next_functions else None
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dims", SHAPES)
def test_bits_strides_and_nodes_are_torchs(dims, layout, device):
    """Results, gradients and running statistics; also if the sum's operands have different layouts."""
    shape = SHAPES[dims]
    for (act, with_sum), training, other, grad in itertools.product(
        EVERY_ACT, (True, False), (layout, "contiguous"), (True, False)
    ):
        x, residual, dy = (torch.randn(shape, device=device) for _ in range(3))
        x, residual = LAYOUTS[layout](x), LAYOUTS[other](residual)
        theirs = random_parts(MODULES[dims](shape[1], device=device)).train(training)

        def run(fn, theirs=theirs, x=x, residual=residual, dy=dy, grad=grad, with_sum=with_sum, act=act):
            module = copy.deepcopy(theirs)
            leaves = [t.detach().requires_grad_(grad) for t in (x, residual)]
            with torch.set_grad_enabled(grad):
                y = fn(leaves[0], *batch_norm.arguments(module), leaves[1] if with_sum else None, act, 0.3)
            wanted = [leaves[0], *module.parameters(), *(leaves[1:] if with_sum else [])]
            grads = torch.autograd.grad(y, wanted, dy) if grad else []
            return [y.detach(), *grads, *module.buffers()], nodes(y)

        (mine, names), (want, expected) = run(F.batch_norm_act), run(batch_norm._in_torch)
        assert names == expected
        for a, b in zip(mine, want, strict=True):
            assert torch.equal(a, b) and a.stride() == b.stride()


@pytest.mark.skipif(native.extension is None, reason="hfnn._autograd is not built")
def test_python_is_not_asked(device, monkeypatch):
    """torch.nn.functional takes longer than the ops that it calls."""
    monkeypatch.setattr(nn.functional, "batch_norm", lambda *args, **how: pytest.fail("was called"))
    x = torch.randn(3, 4, 5, device=device, requires_grad=True)
    module = hfnn.BatchNorm1d(4, device=device)
    assert module(x).shape == x.shape
    assert F.batch_norm_act(x, None, None, training=True, residual=x, act="relu").min() == 0
    assert F.batch_norm(x, None, None, training=True).shape == x.shape


BAD = {
    "one value a channel": ((torch.ones(1, 4), None, None), {"training": True}),
    "no statistics": ((torch.ones(3, 4), None, None), {}),
    "statistics of another size": ((torch.ones(3, 4), torch.zeros(5), torch.ones(5)), {}),
    "a weight of another size": ((torch.ones(3, 4), None, None, torch.ones(5)), {"training": True}),
    "one dimension": ((torch.ones(4), None, None), {"training": True}),
    "a number for input": ((3, None, None), {"training": True}),
    "a weight of another dtype": ((torch.ones(3, 4), None, None, torch.ones(4).double()), {"training": True}),
}


@pytest.mark.parametrize("name", BAD)
def test_errors_are_torchs(name):
    args, how = BAD[name]
    with pytest.raises(Exception) as theirs:
        nn.functional.batch_norm(*args, **how)
    with pytest.raises(theirs.type) as mine:
        F.batch_norm(*args, **how)
    if theirs.type is not AttributeError:
        assert str(mine.value) == str(theirs.value)


class Sub(torch.Tensor):
    pass


def test_what_python_is_asked_for():
    """Sums that broadcast or change the dtype, subclasses, modes, transforms: the results are torch's."""
    x, weight = torch.randn(3, 4, 5), torch.ones(4, requires_grad=True)
    for residual in (torch.randn(5), torch.randn(3, 4, 1), torch.randn(3, 4, 5).double()):
        y = F.batch_norm_act(x, None, None, weight, None, True, residual=residual, act="relu")
        want = (nn.functional.batch_norm(x, None, None, weight, None, True) + residual).relu()
        assert torch.equal(y, want) and y.dtype is want.dtype
    sub = x.as_subclass(Sub)
    assert type(F.batch_norm(sub, None, None, training=True)) is Sub
    assert type(hfnn.BatchNorm1d(4)(sub)) is Sub
    one = lambda x: F.batch_norm_act(x, None, None, training=True, act="relu")  # noqa: E731
    found = torch.func.vmap(one)(torch.stack([x, x + 1]))
    torch.testing.assert_close(found[1], one(x + 1))

    class Seen(torch.overrides.TorchFunctionMode):
        seen = ()

        def __torch_function__(self, func, types, args=(), kwargs=None):
            Seen.seen += (func,)
            return func(*args, **(kwargs or {}))

    with Seen():
        one(x)
    assert nn.functional.batch_norm in Seen.seen


@pytest.mark.skipif(native.extension is None, reason="hfnn._autograd is not built")
def test_a_room_of_the_activation_goes_before():
    """If the norm is below its room's limit but the activation is not, Python runs each."""
    x, large = torch.randn(3, 4, 5), dict.fromkeys(PREFERENCES, (1 << 40, 1 << 40))
    small = dict.fromkeys(PREFERENCES, (0, 0))
    room, _ = stub(floors=large, apart=[large, small, large, large, large, large])
    of_x = x, None, None, None, None, True, 0.1, 1e-5
    assert room(*of_x, None, ACTIVATIONS.index("relu"), 0.0, "auto") is None
    assert room(*of_x, x, 0, 0.0, "auto").shape == x.shape
    assert room(*of_x, None, ACTIVATIONS.index("silu"), 0.0, "auto").shape == x.shape


_x, _c = torch.randn(3, 4, 5), torch.ones(4)
NOT_OURS = {
    "one dimension": {"x": _c},
    "nothing": {"x": _x[:0]},
    "one value a channel": {"x": _x[:1, :, :1]},
    "a subclass": {"x": _x.as_subclass(Sub)},
    "statistics of another dtype": {"mean": _c.double(), "var": _c.double()},
    "statistics that want gradients": {"mean": _c.clone().requires_grad_()},
    "statistics with holes": {"mean": torch.ones(8)[::2]},
    "one statistic": {"mean": None},
    "no statistics in evaluation": {"mean": None, "var": None, "training": False},
    "a weight with holes": {"weight": torch.ones(8)[::2]},
    "a bias of another size": {"bias": torch.ones(5)},
    "a bias of another dtype": {"bias": _c.bfloat16()},
    "no eps": {"eps": 0.0},
    "a tensor for momentum": {"momentum": torch.tensor(0.1)},
    "a number for training": {"training": 1},
    "a sum that broadcasts": {"residual": _x[:, :1]},
    "a sum of another dtype": {"residual": _x.double()},
    "a sum before what no bit tells": {"residual": _x, "kind": ACTIVATIONS.index("silu")},
}


@pytest.mark.skipif(native.extension is None, reason="hfnn._autograd is not built")
@pytest.mark.parametrize("name", [None, *NOT_OURS])
def test_the_room_leaves_to_python(name):
    usual = {"x": _x, "mean": _c.clone(), "var": _c.clone(), "weight": _c, "bias": _c, "training": True}
    usual |= {"momentum": 0.1, "eps": 1e-5, "residual": None, "kind": 0, "slope": 0.0, "prefer": "memory"}
    given = usual | NOT_OURS.get(name, {})
    assert (batch_norm._native_act(*given.values()) is NotImplemented) is (name is not None)
