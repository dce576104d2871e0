"""RMSNorms with a gate: which are recognised, what a converted one computes and keeps, and what is left alone."""

import copy
import importlib
import inspect

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hfnn
from hfnn.patterns import gated_norm
from hfnn.patterns.probe import Refusal
from hfnn.patterns.subclass import holds, title
from hfnn.testing import GRADIENTS, OUTPUTS, assert_close

transformers = pytest.importorskip("transformers")
C = 64
# model, class, arguments -> what it becomes
CLASSES = {
    ("qwen3_next", "Qwen3NextRMSNormGated", (C,)): "silu",
    ("olmo_hybrid", "OlmoHybridRMSNormGated", (C,)): "silu",
    ("bailing_hybrid", "BailingHybridRMSNormGated", (C,)): "sigmoid",
    ("mamba2", "MambaRMSNormGated", (C, C)): "silu",
    ("falcon_h1", "FalconH1RMSNormGated", (C, 1e-6, 1, False)): "silu",
}


def made(model, name, arguments):
    try:
        file = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    except ImportError:
        pytest.skip(f"no {model} in this transformers")
    cls = getattr(file, name)
    if "group_size" not in inspect.signature(cls).parameters:  # older versions have one group
        arguments = [a for i, a in enumerate(arguments) if (i, a) != (1, C)]
    module = cls(*arguments)
    nn.init.normal_(module.weight)
    return module


def run(module, *inputs):
    y = module(*inputs)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype)
    return y, *torch.autograd.grad(y, (*inputs, module.weight), dy)


def exact(key, module, x, gate):
    f = torch.sigmoid(gate) if CLASSES[key] == "sigmoid" else F.silu(gate)
    first = key[0] not in ("mamba2", "falcon_h1")
    y = F.rms_norm(x if first else x * f, (C,), module.weight, module.variance_epsilon)
    return y * f if first else y


@pytest.mark.parametrize("dtypes", [("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float32")], ids=str)
@pytest.mark.parametrize("key", CLASSES, ids=lambda key: key[0])
def test_results(key, dtypes):
    """The accuracy rule, with the author's code in torch's place. Only x and the gate are kept."""
    dtype, weight_dtype = (getattr(torch, name) for name in dtypes)
    theirs = made(*key).to(weight_dtype)
    ours = hfnn.convert(copy.deepcopy(theirs), prefer="memory")
    assert title(ours) == f"hfnn rms_norm, {CLASSES[key]} gate"
    x, gate = (torch.randn(3, 40, C).to(dtype).requires_grad_() for _ in range(2))
    wide = copy.deepcopy(theirs).double()
    wide.forward = lambda x, gate: exact(key, wide, x, gate)
    references = run(wide, *(t.detach().double().requires_grad_() for t in (x, gate)))
    for i, (own, got, want) in enumerate(zip(run(theirs, x, gate), run(ours, x, gate), references, strict=True)):
        assert_close(got, want, own, at_most=GRADIENTS if i else OUTPUTS, terms=120 if i == 3 else 1)
    kept = hfnn.memory.saved_bytes(lambda: ours(x, gate)).total
    assert kept <= 2 * x.nbytes + 4 * 120
    assert kept < 0.55 * hfnn.memory.saved_bytes(lambda: theirs(x, gate)).total
    assert type(hfnn.revert(ours)) is type(theirs)


def test_what_changes_afterwards():
    module = hfnn.convert(made("qwen3_next", "Qwen3NextRMSNormGated", (C,)), prefer="memory")
    x, gate = torch.randn(2, 8, C), torch.randn(2, 8, C)
    module.variance_epsilon = 0.5
    assert holds(module), "eps is read at each call"
    torch.testing.assert_close(module(x, gate), F.rms_norm(x, (C,), module.weight, 0.5) * F.silu(gate))
    module.activation = "gelu"
    torch.testing.assert_close(module(x, gate), F.rms_norm(x, (C,), module.weight, 0.5) * F.gelu(gate))
    assert not holds(module)


class GroupsGatedNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(C)), 1e-6

    def forward(self, x, gate):
        groups = (x * F.silu(gate)).unflatten(-1, (2, -1))
        return self.weight * F.rms_norm(groups, groups.shape[-1:], None, self.eps).flatten(-2)


class BoundedGatedNorm(GroupsGatedNorm):
    def forward(self, x, gate):
        return F.rms_norm(x, (C,), self.weight, self.eps) * F.silu(gate.clamp(max=1))


@pytest.mark.parametrize("cls, reason", [(GroupsGatedNorm, "off by"), (BoundedGatedNorm, "calls clamp")])
def test_what_is_none_is_left_alone(cls, reason):
    why = gated_norm.recognise(cls())
    assert isinstance(why, Refusal) and reason in str(why)
