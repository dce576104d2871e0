"""Tensors without values (FakeTensor) and dispatch modes: the nodes in C++ keep what they keep in a real step."""

import copy
import functools

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import hfnn
from hfnn.core import native

pytestmark = pytest.mark.skipif(native.extension is None, reason="hfnn._autograd is not built")


class Block(nn.Module):
    """Every op that has a node in C++ takes part, after `hfnn.convert` or here."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(32, 64), nn.Linear(32, 8)
        self.norm, self.rms, self.batch = nn.LayerNorm(32), nn.RMSNorm(32), nn.BatchNorm1d(32)
        self.gelu, self.silu, self.dropout = nn.GELU(), nn.SiLU(), nn.Dropout(0.5)

    def forward(self, x):
        x = hfnn.functional.swiglu(self.first(self.norm(x)), prefer="memory")
        y, total = hfnn.functional.add_layer_norm(x, x, (32,), self.norm.weight, p=0.5, prefer="memory")
        total = hfnn.functional.dropout_add(self.rms(self.dropout(total)), x, prefer="memory")
        return self.last(self.silu(self.batch(self.gelu(y) + total)))


MODELS = {
    "block": (Block, (16, 32)),
    "images": (
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.SiLU(), nn.Conv2d(8, 8, 3)),
        (2, 3, 9, 9),
    ),
}


def graph(y) -> tuple[list[str], int]:
    """The names of the nodes behind y, and the bytes that they keep."""
    names, bytes_, seen, left = [], {}, set(), [y.grad_fn]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        names.append(node.name())
        saved = [getattr(node, name) for name in dir(node) if name.startswith("_saved_")]
        for x in (*native.extension.stored(node), *saved):
            if isinstance(x, torch.Tensor):
                bytes_[x.untyped_storage()._cdata] = x.untyped_storage().nbytes()
        left += [edge for edge, _ in node.next_functions]
    return sorted(names), sum(bytes_.values())


def faked(model, mode):
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is not None:
                module._parameters[name] = nn.Parameter(mode.from_tensor(p))
        for name, buffer in module._buffers.items():
            module._buffers[name] = mode.from_tensor(buffer)
    return model


@pytest.mark.parametrize("inside", [True, False], ids=["inside", "outside"])
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("name", MODELS)
def test_fake_tensors_keep_what_a_real_step_keeps(name, autocast, inside):
    make, shape = MODELS[name]
    model = hfnn.convert(make(), prefer="memory", recompute="gemm")
    context = functools.partial(torch.autocast, "cpu", torch.bfloat16, enabled=autocast)
    with context():
        real = graph(model(torch.randn(shape, requires_grad=True)))
    before = torch.get_rng_state()
    copied = copy.deepcopy(model)
    with FakeTensorMode() as mode:
        fakes = faked(copied, mode)
        x = mode.from_tensor(torch.empty(shape)).requires_grad_()
        with context():
            y = fakes(x)
        found, loss = graph(y), y.float().sum()
        if inside:
            loss.backward()
    if not inside:
        loss.backward()
    assert found == real and {"_LinearBackward", "_ConvolutionBackward"} & set(found[0])
    assert torch.equal(torch.get_rng_state(), before)
    for p in (x, *fakes.parameters()):
        assert type(p.grad) is FakeTensor and p.grad.shape == p.shape and p.grad.device == p.device


def test_real_tensors_in_the_mode_give_fake_results():
    norm, x = hfnn.LayerNorm(8), torch.randn(4, 8, requires_grad=True)
    norm.prefer = "memory"
    with FakeTensorMode(allow_non_fake_inputs=True):
        y = norm(x)
        (dx,) = torch.autograd.grad(y.sum(), x)
    assert type(y) is type(dx) is FakeTensor


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.ops = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops.add(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", MODELS)
def test_dispatch_modes_see_the_same_nodes(name):
    """A mode sees torch's ops as in torch: those below autograd, such as `addmm` and not `linear`."""
    make, shape = MODELS[name]
    model, x = hfnn.convert(make(), prefer="memory"), torch.randn(shape)
    wanted = graph(model(x))
    with Seen() as mode:
        y = model(x)
        found = graph(y)
        y.sum().backward()
    assert found == wanted
    composite = [op for op in mode.ops if op._can_decompose()]
    assert {torch.ops.aten.addmm.default, torch.ops.aten.convolution.default} & mode.ops and not composite, composite
