"""Convolutions for tests: tensors, producers of their inputs, and comparisons with torch's."""

import pytest
import torch
from torch.nn import functional as F

import hfnn

N, C, OUT = 3, 8, 16
SIZES = {1: (17,), 2: (9, 7), 3: (5, 4, 6)}
LAST = {2: torch.channels_last, 3: torch.channels_last_3d}
NAMES = [f"conv{'_transpose' if turned else ''}{dims}d" for turned in (False, True) for dims in (1, 2, 3)]
names = pytest.mark.parametrize("name", NAMES)


def ours(name):
    return lambda *args, **how: getattr(hfnn.functional, name)(*args, **how, prefer="memory")


def theirs(name):
    return getattr(F, name)


def tensors(name, device, dtype=torch.float32, groups=1, size=3, bias=True, last=False, inputs=C):
    """x, weight, bias as leaves. last: x and weight are channels-last."""
    dims = int(name[-2])
    shape = (inputs, OUT // groups) if "transpose" in name else (OUT, inputs // groups)
    made = [torch.randn(N, inputs, *SIZES[dims]), torch.randn(*shape, *(size,) * dims) * 0.2]
    if last and dims in LAST:
        made = [t.contiguous(memory_format=LAST[dims]) for t in made]
    made += [torch.randn(OUT)] if bias else []
    return [t.to(device, dtype).requires_grad_() for t in made]


def norm(x):
    weight = torch.linspace(0.5, 1.5, x.shape[1], device=x.device, dtype=x.dtype).requires_grad_()
    return hfnn.functional.batch_norm_act(x, None, None, weight, None, True, act="relu", prefer="memory")


def dropped(x):
    torch.manual_seed(1)
    return hfnn.functional.dropout(hfnn.functional.silu(x, prefer="memory"), 0.5, prefer="memory")


PRODUCERS = {
    "batch_norm_act": norm,
    "silu": lambda x: hfnn.functional.silu(x, prefer="memory"),
    "gelu": lambda x: hfnn.functional.gelu(x, prefer="memory"),
    "silu, dropout": dropped,
}
silu = PRODUCERS["silu"]


def kernels_take(dtype, device):
    """Whether the input's producer can rebuild it: GPU kernels do not take float64."""
    return dtype is not torch.float64 or device == "cpu"


def gradients(conv, leaves, how, producer=silu, cotangent=None):
    """y, and the gradients of the leaves that require grad."""
    x, *rest = leaves
    y = conv(producer(x), *rest, **how)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(3)).to(y) if cotangent is None else cotangent(y)
    return y, *torch.autograd.grad(y, [t for t in leaves if t.requires_grad], dy)


def same(found, wanted):
    """Bitwise equal, with the same strides and dtypes."""
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype is b.dtype and a.stride() == b.stride() and torch.equal(a, b)


def node(y):
    return y.grad_fn.name()
