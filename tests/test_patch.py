"""patch_torch: which calls reach hfnn, from where, in which thread."""

import functools
import inspect
import sys
import typing

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import hfnn
from hfnn import ops, patch
from hfnn.patterns.probe import Refusal

pytestmark = pytest.mark.usefixtures("restored")
OPS = {op.name: op for op in ops.ALL if op.name in patch.NAMES}


def is_ours(y):
    return y.grad_fn.name().startswith("_")


def tensor(*shape, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), requires_grad=True)


def gelu_is_ours():
    return is_ours(F.gelu(tensor(4, 8)))


MEMORY = functools.partial(hfnn.patch_torch, prefer="memory")


def called(function):
    """(the function's result from one seed, the code objects of all Python functions that it calls)"""
    codes = set()
    torch.manual_seed(1)
    sys.setprofile(lambda frame, *_: codes.add(frame.f_code))
    try:
        return function(), codes
    finally:
        sys.setprofile(None)


@pytest.mark.parametrize("name", OPS)
def test_every_function(name):
    """The result and graph node are those of hfnn.functional; outside the block torch's own."""
    op = OPS[name]
    case = next(case for case in op.cases if 1 < next(iter(case)) < 64)
    args, kwargs = op.sample(case, torch.float32, "cpu")
    args = [a.requires_grad_() if torch.is_tensor(a) and a.is_floating_point() else a for a in args]
    ours, function = getattr(hfnn.functional, name), lambda: getattr(F, name)(*args, **kwargs)
    how = {"prefer": "memory"} if "prefer" in inspect.signature(ours).parameters else {}
    wanted, _ = called(lambda: ours(*args, **kwargs, **how))
    with MEMORY():
        found, codes = called(function)
    assert ours.__code__ in codes
    assert torch.equal(found, wanted) and found.grad_fn.name() == wanted.grad_fn.name()
    assert ours.__code__ not in called(function)[1]


TWINS = {
    "dropout": lambda x: [torch.dropout(x, 0.5, True), torch.dropout(input=x, p=0.5, train=True)],
    "layer_norm": lambda x: [
        torch.layer_norm(x, (8,), torch.ones(8), torch.zeros(8), 1e-3, False),
        torch.layer_norm(x, [8], eps=1e-3, cudnn_enable=True),
        torch.layer_norm(input=x, normalized_shape=(8,), weight=torch.ones(8)),
    ],
    "rms_norm": lambda x: [torch.rms_norm(x, (8,)), torch.rms_norm(x, [8], torch.ones(8), eps=1e-3)],
    "softmax": lambda x: [torch.softmax(x, -1), torch.softmax(x, 1), torch.softmax(input=x, dim=-1, dtype=x.dtype)],
    "log_softmax": lambda x: [torch.log_softmax(x, -1), torch.log_softmax(x, 1, torch.float32)],
    "relu": lambda x: [torch.relu(x), torch.relu(input=x)],
    "sigmoid": lambda x: [torch.sigmoid(x), torch.sigmoid(input=x)],
    "tanh": lambda x: [torch.tanh(x), torch.tanh(input=x)],
    "selu": lambda x: [torch.selu(x), torch.selu(input=x)],
    "celu": lambda x: [torch.celu(x), torch.celu(x, 0.5), torch.celu(x, alpha=0.5)],
    "prelu": lambda x: [torch.prelu(x, torch.tensor([0.1])), torch.prelu(input=x, weight=torch.tensor([0.1]))],
}


@pytest.mark.parametrize("name", [name for owner, name in patch.PLACES if owner is torch])
def test_functions_of_torch_itself(name):
    """They take torch's own arguments, which may differ from those of torch.nn.functional."""
    x, ours = tensor(4, 8), getattr(hfnn.functional, name)
    theirs, codes = called(lambda: TWINS[name](x))
    assert ours.__code__ not in codes
    with MEMORY():
        found, codes = called(lambda: TWINS[name](x))
    assert ours.__code__ in codes
    if name != "dropout":  # the masks differ
        for a, b in zip(found, theirs, strict=True):
            torch.testing.assert_close(a, b)


def test_arguments_that_hfnn_does_not_take():
    x, out = tensor(4, 8).detach(), torch.empty(4, 8)
    with MEMORY():
        assert torch.softmax(x, -1, out=out) is out
        torch.testing.assert_close(torch.softmax(x, 0), x.softmax(0))
        with pytest.raises(TypeError, match="nonsense"):
            F.gelu(x, nonsense=1)
    torch.testing.assert_close(out, x.softmax(-1))


def test_modules_of_torch_too():
    with MEMORY():
        assert is_ours(nn.GELU()(tensor(4, 8))) and is_ours(nn.LayerNorm(8)(tensor(4, 8)))


def test_block_call_and_decorator():
    patched = MEMORY()
    with patched:
        assert gelu_is_ours()
        with patched:
            assert gelu_is_ours()
        assert gelu_is_ours()
    assert not gelu_is_ours()
    assert patched(gelu_is_ours)() and not gelu_is_ours()
    patched.start()
    assert gelu_is_ours()
    patched.stop()
    assert not gelu_is_ours()
    with pytest.raises(ValueError, match="did not start"):
        patched.stop()


def test_an_error_leaves_torch_as_it_was(restored):
    with pytest.raises(ZeroDivisionError), MEMORY():
        _ = 1 / 0
    with pytest.raises(ValueError, match="approximate"), MEMORY():  # torch's own error, from within a routed call
        try:
            F.gelu(tensor(4), approximate="no")
        except RuntimeError as error:
            assert patch.here.state[0]
            raise ValueError(str(error)) from error
    restored()


def test_only_some():
    with MEMORY(only="silu"):
        assert is_ours(F.silu(tensor(4))) and not gelu_is_ours() and F.gelu is torch._C._nn.gelu
        with MEMORY(only=("gelu", "softmax")):
            assert is_ours(F.silu(tensor(4))) and gelu_is_ours() and is_ours(torch.softmax(tensor(4), -1))
        assert not gelu_is_ours()
    with pytest.raises(ValueError, match=r"only='pad'.*choose from .*cross_entropy, dropout"):
        hfnn.patch_torch(only=["gelu", "pad"])
    with pytest.raises(ValueError, match="choose one of 'auto', 'memory', 'speed'"):
        hfnn.patch_torch(prefer="size")


def test_preference():
    """The innermost block decides; "auto" leaves a small call to torch."""
    with hfnn.patch_torch():
        assert not gelu_is_ours()
        with MEMORY("gelu"):
            assert gelu_is_ours()
            with hfnn.patch_torch("gelu"):
                assert not gelu_is_ours()


def test_stopped_in_any_order():
    first, second = MEMORY("gelu"), MEMORY("silu")
    first.start()
    second.start()
    first.stop()
    assert not gelu_is_ours() and is_ours(F.silu(tensor(4)))
    second.stop()


FORMULAS = {
    "gelu": lambda x: F.gelu(x),
    "silu": lambda x: F.silu(x),
    "softmax": lambda x: F.softmax(x, -1),
    "layer_norm": lambda x: F.layer_norm(x, (8,)),
    "cross_entropy": lambda x: F.cross_entropy(x, torch.arange(4)),
    "dropout": lambda x: F.dropout(x, 0.5) * x,
    **{name: lambda x, name=name: getattr(F, name)(x) for name in ("relu", "sigmoid", "tanh") if name in patch.NAMES},
}


@pytest.mark.parametrize("name", FORMULAS)
def test_double_backward(name):
    """Our backwards' formulas call torch's functions; routing these calls would recurse forever."""
    x = tensor(4, 8)

    def second():
        torch.manual_seed(1)
        y = FORMULAS[name](x).square().sum()
        (dx,) = torch.autograd.grad(y, x, create_graph=True)
        return torch.autograd.grad(dx.square().sum(), x)[0]

    theirs = second()
    with MEMORY():
        ours = second()
    if name != "dropout":
        torch.testing.assert_close(ours, theirs)
    assert ours.isfinite().all()


@pytest.mark.parametrize("function", ["gelu", "silu", "dropout", "softmax"])
def test_overrides_see_torchs_function(function):
    """A subclass of Tensor looks up functions in a table, by identity."""
    seen = []

    class Mine(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            seen.append(func)
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs or {})

    arguments = (-1,) if function == "softmax" else ()
    with MEMORY():
        getattr(F, function)(tensor(4).as_subclass(Mine), *arguments)
    assert getattr(F, function) in seen


def test_what_others_replaced_is_theirs(monkeypatch):
    mine, torchs = lambda x: x * 2, F.gelu
    with monkeypatch.context() as m:
        m.setattr(F, "gelu", mine)
        with MEMORY():
            assert F.gelu is mine
        assert F.gelu is mine
    with MEMORY():
        F.gelu, ours = mine, F.gelu
    assert F.gelu is mine
    F.gelu = ours  # other code restores what it found
    assert not gelu_is_ours()
    with MEMORY():
        assert gelu_is_ours()
    assert F.gelu is torchs


def test_a_checkpoint_inside():
    """Recomputation in backward draws the same mask."""

    def block(x):
        return F.dropout(F.gelu(x), 0.5)

    def run(use_reentrant):
        torch.manual_seed(1)
        x = tensor(64, 64)
        y = block(x) if use_reentrant is None else checkpoint(block, x, use_reentrant=use_reentrant)
        y.square().sum().backward()
        return x.grad

    with MEMORY():
        wanted, *found = run(None), run(True), run(False)
    assert all(torch.equal(dx, wanted) for dx in found)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_checkpoint_on_cuda():
    x = torch.randn(64, 64, device="cuda", requires_grad=True)

    def block(x):
        return F.dropout(F.gelu(x), 0.5)

    def run(again):
        torch.manual_seed(1)
        y = checkpoint(block, x, use_reentrant=False) if again else block(x)
        return torch.autograd.grad(y.square().sum(), x)[0]

    with MEMORY():
        assert torch.equal(run(True), run(False))


@pytest.mark.parametrize("where", ["around the call", "inside", "decorator"])
def test_compiled(where):
    torch._dynamo.reset()
    patched = MEMORY()

    def formula(x):
        return F.softmax(F.dropout(F.gelu(x), 0.0), -1) + F.layer_norm(x, (8,)) + torch.softmax(x, -1)

    def inside(x):
        with hfnn.patch_torch(prefer="memory"):
            return formula(x)

    function = {"around the call": formula, "inside": inside, "decorator": patched(formula)}[where]
    compiled, x = torch.compile(function, fullgraph=True, backend="aot_eager"), tensor(4, 8)
    for _ in range(2):
        with MEMORY() if where == "around the call" else torch.enable_grad():
            found = compiled(x)
        torch.testing.assert_close(found, formula(x))
    found.sum().backward()


class Calls(nn.Module):
    """Its own code calls torch. Records which function ran."""

    ran: typing.ClassVar[list] = []

    def forward(self, x):
        y = F.gelu(x)
        self.ran.append(is_ours(y))
        return y


class OwnGELU(nn.Module):
    def forward(self, x):
        return F.gelu(x) * 1.01


def test_comparisons_with_torch_are_with_torch():
    """`verify` and the proofs of look-alikes, called inside."""
    with hfnn.patch_torch(prefer="memory"):
        Calls.ran.clear()
        assert hfnn.verify(hfnn.convert(Calls(), prefer="memory"), tensor(4, 8).requires_grad_()).ok
        assert Calls.ran == [True, False, False], "converted, original, float64"
        assert gelu_is_ours(), "and afterwards routed as before"
        why = hfnn.patterns.lookalike.recognise(OwnGELU())
    assert isinstance(why, Refusal) and "output off by" in str(why)


class NumpysNames(nn.Module):
    """torch's functions in C also take numpy's names of arguments."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv2d(4, 4, 1), nn.Conv2d(8, 4, 1)

    def forward(self, x):
        y = self.last(torch.cat([torch.relu(x=self.first(x)), x], axis=1))
        return torch.softmax(y, axis=1) + torch.log_softmax(a=y, dim=-1) + torch.sigmoid(x=y)


def test_arguments_by_numpys_names():
    torch.manual_seed(0)
    model, x = NumpysNames(), tensor(2, 4, 5, 6)
    wanted = model(x)
    torch.testing.assert_close(hfnn.convert(model, prefer="memory")(x), wanted)
    with MEMORY():
        torch.testing.assert_close(torch.softmax(x, axis=-1), F.softmax(x, -1))
