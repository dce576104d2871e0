"""Modules whose own code calls functions that hfnn has: detected, and run with these calls routed and no others."""

import copy
import functools
import inspect
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.checkpoint import checkpoint as remat

import hfnn
from hfnn.convert import NO_OP

MEMORY = functools.partial(hfnn.patch_torch, prefer="memory")
pytestmark = pytest.mark.usefixtures("restored")


def nodes(*results):
    """The names of all nodes in the graphs of tensors."""
    found, queue = set(), [y.grad_fn for y in results]
    while queue:
        node = queue.pop()
        if node is not None and node not in found:
            found.add(node)
            queue.extend(after for after, _ in node.next_functions)
    return {node.name() for node in found}


def tensor(*shape, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), requires_grad=True)


def helper(x, p, training):
    return F.dropout(x, p, training)


def decorated(function):
    @functools.wraps(function)
    def run(*args, **kwargs):
        return function(*args, **kwargs)

    return run


class Layer(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.lin = nn.Linear(width, width)
        self.dropout = 0.5

    def forward(self, hidden_states, scale=1.0):
        hidden_states = nn.functional.gelu(self.lin(hidden_states)) * scale
        return F.dropout(hidden_states, p=self.dropout, training=self.training)


class ByHelper(nn.Module):
    @decorated
    def forward(self, x):
        return helper(x, 0.5, self.training)


class ByMethod(nn.Module):
    def inner(self, x):
        return torch.softmax(x, -1)

    def forward(self, x):
        return self.inner(x)


class ByLambda(nn.Module):
    def forward(self, x):
        return sum(f(x) for f in [lambda x: F.silu(x)])


class OfTorch(nn.LayerNorm):
    def forward(self, input):
        return (
            F.layer_norm(input.float(), self.normalized_shape, self.weight, self.bias, self.eps)
            .to(input.dtype)
            .cumsum(0)
        )


class Pads(nn.Module):
    def forward(self, x):
        return F.pad(x, (0, 1)) + torch.cumsum(x.gelu, 0)


class Checkpoints(nn.Module):
    """Its checkpointed function is called again outside of forward."""

    def inner(self, x):
        return F.dropout(x, 0.5)

    def forward(self, x):
        x = checkpoint(self.inner, x, use_reentrant=False)
        x = checkpoint(lambda x: F.dropout(x, 0.5), x, use_reentrant=False)
        return F.gelu(x)


class ByAnotherName(Checkpoints):
    def forward(self, x):
        x = remat(self.inner, x, use_reentrant=False)
        x = remat(lambda x: F.dropout(x, 0.5), x, use_reentrant=False)
        return F.gelu(x)


class ByAttribute(Checkpoints):
    """What calls its functions is not in its code, nor in its file."""

    def __init__(self):
        super().__init__()
        self.run = functools.partial(checkpoint, use_reentrant=False)

    def forward(self, x):
        def block(x):
            return F.dropout(x, 0.5)

        x = self.run(block, self.run(lambda x: F.dropout(x, 0.5), x))
        return F.gelu(self.run(self.inner, self.run(helper, x, 0.5, True)))


def checkpointed(function):
    @functools.wraps(function)
    def run(self, x):
        return checkpoint(function, self, x, use_reentrant=False)

    return run


class Wrapped(nn.Module):
    @checkpointed
    def forward(self, x):
        return F.dropout(x, 0.5)


def wrapped_again(function):
    @functools.wraps(function)
    def run(self, x):
        return remat(function, self, x, use_reentrant=False)

    return run


class WrappedAgain(nn.Module):
    @wrapped_again
    def forward(self, x):
        return F.dropout(x, 0.5)


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = Layer()

    def forward(self, x):
        return F.silu(self.layer(x))


RECOGNISED = {
    Layer: ("hfnn dropout, gelu inside", "called in forward", {"_DropoutBackward", "_GELUBackward"}),
    ByHelper: ("hfnn dropout inside", "called in helper", {"_DropoutBackward"}),
    ByMethod: ("hfnn softmax inside", "called in inner", {"_SoftmaxBackward"}),
    ByLambda: ("hfnn silu inside", "called in forward", {"_SiLUBackward"}),
    Outer: ("hfnn silu inside", "called in forward", {"_SiLUBackward", "_GELUBackward", "_DropoutBackward"}),
    Checkpoints: ("hfnn gelu inside", "called in forward", {"_GELUBackward"}),
    ByAnotherName: ("hfnn gelu inside", "called in forward", {"_GELUBackward"}),
    ByAttribute: ("hfnn gelu inside", "called in forward", {"_GELUBackward"}),
    OfTorch: ("hfnn layer_norm inside", "called in forward", {"_LayerNormBackward"}),
}


def build(cls):
    return OfTorch(8) if cls is OfTorch else cls()


@pytest.mark.parametrize("cls", RECOGNISED)
def test_recognised(cls, restored):
    to, why, ours = RECOGNISED[cls]
    module = build(cls)
    before = vars(module).copy()
    row = hfnn.report(hfnn.convert(module, prefer="memory")).rows[0]
    assert (row.to, row.why, row.kernel) == (to, why, None)
    assert isinstance(module, cls) and type(module).__name__ == cls.__name__
    found = nodes(module(tensor(4, 8)))
    assert {name for name in found if name.startswith("_")} == ours
    restored()
    assert type(hfnn.revert(module)) is cls and vars(module) == before
    assert not any(name.startswith("_") for name in nodes(module(tensor(4, 8))))


def test_not_recognised():
    assert hfnn.report(hfnn.convert(Pads())).rows[0].why == NO_OP
    for cls in (Wrapped, WrappedAgain):
        assert "checkpoints it" in hfnn.report(hfnn.convert(cls())).rows[0].why
    assert hfnn.report(nn.Sequential(nn.Flatten())).rows[0].to is None


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoints_within_and_around(use_reentrant):
    """Backward recomputes with the same functions, whether the checkpoint is around the module or in its code."""
    for cls in (Layer, Checkpoints, ByAnotherName, ByAttribute):
        module = hfnn.convert(cls(), prefer="memory")
        results = []
        for again in (True, False):
            module.zero_grad()
            torch.manual_seed(1)
            x = tensor(4, 8)
            y = checkpoint(module, x, use_reentrant=use_reentrant) if again else module(x)
            y.square().sum().backward()
            results.append([x.grad, *(p.grad for p in module.parameters())])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_skipped_modules_stay_torchs():
    """Only Outer's own code is routed, not that of the unconverted layer inside."""
    model = hfnn.convert(Outer(), skip="layer", prefer="memory")
    assert {name for name in nodes(model(tensor(4, 8))) if name.startswith("_")} == {"_SiLUBackward"}
    with MEMORY("gelu"):  # a block around it applies everywhere, also in there
        assert {n for n in nodes(model(tensor(4, 8))) if n.startswith("_")} == {"_SiLUBackward", "_GELUBackward"}


def test_outside_training():
    model = hfnn.convert(Layer(), prefer="memory").eval()
    x = tensor(4, 8)
    with torch.no_grad():
        theirs = model(x)
    with torch.no_grad():
        assert torch.equal(hfnn.revert(model)(x), theirs)


def test_an_error_inside(restored):
    model = hfnn.convert(Layer(), prefer="memory")
    with pytest.raises(RuntimeError):
        model(tensor(4, 9))
    restored()


def test_autocast():
    model, x = Layer().eval(), tensor(4, 8)
    with torch.autocast("cpu", torch.bfloat16):
        theirs = model(x)
        ours = hfnn.convert(model, prefer="memory")(x)
    assert ours.dtype is theirs.dtype and "_GELUBackward" in nodes(ours)
    torch.testing.assert_close(ours, theirs)


def test_the_module_stays_itself():
    """Signature, hooks, keywords, copies and files."""
    model = Outer()
    fired = []
    model.layer.register_forward_pre_hook(lambda *_: fired.append(1))
    hfnn.convert(model, prefer="memory")
    assert inspect.signature(model.layer.forward) == inspect.signature(Layer().forward)
    model.layer(hidden_states=tensor(4, 8), scale=2.0)
    assert fired
    model.layer._forward_pre_hooks.clear()
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for again in (
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(file, weights_only=False),
    ):
        assert type(again) is type(model) and again.prefer == "memory"
        assert {"_SiLUBackward", "_GELUBackward"} < nodes(again(tensor(4, 8)))
        assert type(hfnn.revert(again)) is Outer


def test_compiled_module():
    torch._dynamo.reset()
    model = hfnn.convert(Outer().eval(), prefer="memory")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x = tensor(4, 8)
    torch.testing.assert_close(compiled(x), model(x))
    with MEMORY():
        torch.testing.assert_close(compiled(x), model(x))


def test_source_of_another_file(tmp_path):
    """A class from a notebook or a page: the lines of its file are not its own, and no code at all."""
    page = tmp_path / "page.md"
    page.write_text("(\n" * 9)
    code, names = (
        "class Net(nn.Module):\n    def forward(self, x):\n        return nn.functional.dropout(x)\n",
        {"nn": nn},
    )
    exec(compile(code, str(page), "exec"), {**names, "__name__": "page"}, names)
    model = hfnn.convert(nn.Sequential(names["Net"]()))
    assert model(torch.ones(4, 8)).shape == (4, 8)
