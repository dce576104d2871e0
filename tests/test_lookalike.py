"""Proofs: faithful look-alikes are recognised, others are refused with a reason, and no state changes."""

import functools
import math
import re
import types

import pytest
import torch
from torch import nn

import hfnn
from hfnn.core.holder import like_of, target_of
from hfnn.patterns import lookalike
from hfnn.patterns.probe import Refusal
from hfnn.patterns.subclass import is_converted, title
from hfnn.testing import GRADIENTS, OUTPUTS, assert_close


class Norm(nn.Module):
    """Base of the classes below: one weight, one eps."""

    def __init__(self, width=32, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)
        self.eps = eps

    def rstd(self, x):
        return torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


class LlamaNorm(Norm):
    def forward(self, x):
        return self.weight * (x.float() * self.rstd(x.float())).to(x.dtype)


class T5Norm(Norm):
    """Rounds to the dtype of its weight."""

    def forward(self, x):
        x = x * self.rstd(x.float())
        return self.weight * (x.to(self.weight.dtype) if self.weight.dtype is torch.bfloat16 else x)


class GemmaNorm(Norm):
    def forward(self, x):
        return (x.float() * self.rstd(x.float()) * (1.0 + self.weight.float())).type_as(x)


class CenteredNorm(Norm):
    """A layer norm without a bias."""

    def forward(self, x):
        centred = x.float() - x.float().mean(-1, keepdim=True)
        return (self.weight.float() * centred * self.rstd(centred)).to(x.dtype)


class BiasNorm(nn.Module):
    """Other names, and an eps that is a literal in the formula."""

    def __init__(self):
        super().__init__()
        self.beta, self.gamma = nn.Parameter(torch.randn(32)), nn.Parameter(torch.randn(32))

    def forward(self, x):
        return nn.functional.layer_norm(x.float(), (32,), self.gamma.float(), self.beta.float(), 1e-5).to(x.dtype)


class BareNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.variance_epsilon = 1e-5

    def forward(self, hidden_states, scale=None):
        x = hidden_states.float()
        x = (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)).type_as(hidden_states)
        return x if scale is None else x * scale


class SlowGELU(nn.Module):
    def forward(self, x):
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


class HeldGELU(nn.Module):
    def __init__(self, form):
        super().__init__()
        self.act = functools.partial(nn.functional.gelu, approximate=form)

    def forward(self, x):
        return self.act(x)


class OwnSiLU(nn.Module):
    def forward(self, x):
        return x * torch.sigmoid(x)


class QuickGELU(nn.Module):
    def forward(self, x):
        return x * torch.sigmoid(1.702 * x)


HONEST = {
    LlamaNorm: "hfnn rms_norm",
    T5Norm: "hfnn rms_norm",
    GemmaNorm: "hfnn rms_norm, offset 1",
    CenteredNorm: "hfnn layer_norm",
    BiasNorm: "hfnn layer_norm",
    BareNorm: "hfnn rms_norm",
    SlowGELU: "hfnn gelu, tanh form",
    functools.partial(HeldGELU, "none"): "hfnn gelu, erf form",
    functools.partial(HeldGELU, "tanh"): "hfnn gelu, tanh form",
    OwnSiLU: "hfnn silu",
    QuickGELU: "hfnn quick_gelu",
}


@pytest.mark.parametrize("make", HONEST)
def test_reading(make):
    m = hfnn.convert(make())
    assert is_converted(m) and title(m) == HONEST[make]
    assert type(m).__name__ == type(make()).__name__ and isinstance(m, type(make()))
    assert type(hfnn.revert(m)) is type(make())


def run(m, x, dy):
    y = m(x)
    return y, *torch.autograd.grad(y, [x, *m.parameters()], dy.to(y.dtype))


@pytest.mark.parametrize("dtypes", [("float32", "float32"), ("bfloat16", "bfloat16"), ("float32", "bfloat16")], ids=str)
@pytest.mark.parametrize("make", HONEST)
def test_results(make, dtypes):
    """The accuracy rule, with the author's code in torch's place. The room ran, with the author's dtype."""
    weight_dtype, dtype = (getattr(torch, name) for name in dtypes)
    m = make().to(weight_dtype)
    x = (torch.randn(5, 7, 32) * 1e-2 + 1e-3).to(dtype).requires_grad_()
    dy = torch.randn(5, 7, 32)
    theirs = run(m, x, dy)
    hfnn.convert(m, prefer="memory")
    assert hfnn.recipe.take(m(x)) is not None
    ours = run(m, x, dy)
    weights = {name: p.detach().double().requires_grad_() for name, p in m.named_parameters()}
    x64, like = x.detach().double().requires_grad_(), like_of(m)
    y64 = like.exact(types.SimpleNamespace(_parameters=weights), x64, None if like.op.likes else like.numbers(m)[2])
    exact = y64, *torch.autograd.grad(y64, [x64, *weights.values()], dy.double())
    for i, tensors in enumerate(zip(ours, exact, theirs, strict=True)):
        assert_close(*tensors, at_most=GRADIENTS if i else OUTPUTS)


class EpsOutsideNorm(Norm):
    def forward(self, x):
        return self.weight * x / (x.pow(2).mean(-1, keepdim=True).sqrt() + self.eps)


class OwnEpsNorm(Norm):
    """Has an eps but uses another."""

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class UnbiasedNorm(Norm):
    def forward(self, x):
        return self.weight * (x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.var(-1, keepdim=True) + self.eps)


class FirstHalfNorm(Norm):
    """Statistics of part of the row."""

    def forward(self, x):
        return self.weight * x * self.rstd(x[..., :16])


class TrainingNorm(Norm):
    def forward(self, x):
        y = self.weight * x * self.rstd(x)
        return y * 1.001 if self.training else y


class NoGradNorm(Norm):
    def forward(self, x):
        y = self.weight * x * self.rstd(x)
        return y if torch.is_grad_enabled() else y * 1.001


class DetachedNorm(Norm):
    """The right values, a wrong gradient."""

    def forward(self, x):
        return self.weight * x * self.rstd(x).detach()


class BatchNorm(Norm):
    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean() + self.eps)


class LowPrecisionNorm(Norm):
    """Right in float32 only."""

    def forward(self, x):
        y = self.weight * x.float() * self.rstd(x.float())
        return (y if x.dtype is torch.float32 else y * 1.1).to(x.dtype)


class CountingNorm(Norm):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return self.weight * x * self.rstd(x)


class ListNorm(Norm):
    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, x):
        self.seen.append(tuple(x.shape))
        return self.weight * x * self.rstd(x)


class RaisingNorm(Norm):
    def forward(self, x):
        raise RuntimeError("not today")


class InPlaceNorm(Norm):
    def forward(self, x):
        return x.mul_(self.rstd(x)) * self.weight


class ChannelsFirstNorm(Norm):
    def forward(self, x):
        return self.weight[:, None] * x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + self.eps)


class GatedNorm(Norm):
    def forward(self, x, gate):
        return self.weight * x * self.rstd(x) * gate


class BufferNorm(Norm):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(32))

    def forward(self, x):
        return self.weight * x * self.rstd(x) * self.scale


class MatrixNorm(Norm):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 8))

    def forward(self, x):
        return x


class ParentNorm(Norm):
    def __init__(self):
        super().__init__()
        self.inner = nn.LayerNorm(32, elementwise_affine=False, bias=False)

    def forward(self, x):
        return self.inner(x) * self.weight


class HardSiLU(nn.Module):
    def forward(self, x):
        return nn.functional.hardswish(x)


class ClippedGELU(nn.Module):
    def forward(self, x):
        return nn.functional.gelu(x).clip(-10, 10)


LIARS = {
    EpsOutsideNorm: "unlike rms_norm, output off by",
    OwnEpsNorm: r"unlike rms_norm, output off by .*eps times 3",
    UnbiasedNorm: "output off by",
    FirstHalfNorm: "output off by",
    TrainingNorm: "output off by",
    NoGradNorm: "depends on more than its input",
    DetachedNorm: "gradient of the input off by",
    BatchNorm: "output off by",
    LowPrecisionNorm: r"output off by .*input torch.bfloat16",
    CountingNorm: "changes attributes of the module",
    ListNorm: "changes attributes of the module",
    RaisingNorm: "raises on the probe: not today",
    InPlaceNorm: "raises on the probe: a (view of a )?leaf Variable",
    ChannelsFirstNorm: "raises on the probe: The size of tensor",
    GatedNorm: "its forward needs 2 arguments",
    BufferNorm: "tensors that are no parameters",
    MatrixNorm: "not one weight",
    ParentNorm: "it has modules inside",
    functools.partial(LlamaNorm, 4): "rows of 4 are too short",
    ClippedGELU: "its forward calls clamp",
    HardSiLU: "unlike silu, output off by",
}


@pytest.mark.parametrize("make", LIARS)
def test_liars_are_left_alone(make):
    m = make()
    before = {name: value.copy() if isinstance(value, list) else value for name, value in vars(m).items()}
    state = torch.get_rng_state()
    hfnn.convert(m)
    assert torch.equal(torch.get_rng_state(), state)
    assert target_of(m) is not lookalike.LookAlike and vars(m).items() >= before.items()
    why = lookalike.recognise(m)
    assert isinstance(why, Refusal) and re.search(LIARS[make], str(why)), why


def test_generators_of_gpus_are_left_alone(monkeypatch):
    """torch.manual_seed seeds all of them."""

    class Norm(LlamaNorm):
        """Not proved before."""

    seeded = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    m = hfnn.convert(Norm(32))
    assert target_of(m) is lookalike.LookAlike and not seeded


def test_modes_around_the_proof():
    class ModestNorm(LlamaNorm):
        """A class that no other test has proved."""

    with torch.device("meta"), torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        m = ModestNorm()
        assert is_converted(hfnn.convert(m))
    assert m.weight.is_meta


def test_the_proof_is_of_attributes_too():
    """Two modules of one class may compute different things."""

    class SwitchNorm(Norm):
        centred = False

        def forward(self, x):
            x = x - x.mean(-1, keepdim=True) if self.centred else x
            return self.weight * x * self.rstd(x)

    one, two = SwitchNorm(), SwitchNorm()
    two.centred = True
    hfnn.convert(nn.ModuleList([one, two]))
    assert title(one) == "hfnn rms_norm" and title(two) == "hfnn layer_norm"
    assert len({type(hfnn.convert(SwitchNorm())) for _ in range(3)}) == 1


def test_wide_clipping_is_seen():
    """A clipped GELU is not a GELU, however wide its bounds."""

    class ClippedGELU(nn.Module):
        def forward(self, x):
            return nn.functional.gelu(x).clip(-1000, 1000)

    module = hfnn.convert(ClippedGELU())
    assert module(torch.full((512, 128), 5000.0)).max() == 1000
