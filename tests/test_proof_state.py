"""A forward that asks for the state of torch, or changes its class, does on a converted model what it does on stock."""

import contextlib
import copy

import pytest
import torch
import torch.nn.functional as F
from torch import is_inference_mode_enabled, nn

import hfnn

WIDTH, INNER = 16, 32


class Gated(nn.Module):
    """A gated feed-forward network, plus one where the state is not the usual one."""

    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x):
        y = self.down(F.silu(self.gate(x)) * self.up(x))
        return y + 1 if self.unusual(x) else y

    def unusual(self, x):
        return False


class Autocast(Gated):
    def unusual(self, x):
        return torch.is_autocast_enabled("cpu")


class Inference(Gated):
    def unusual(self, x):
        return is_inference_mode_enabled()


class NoGrad(Gated):
    def unusual(self, x):
        return not torch.is_grad_enabled()


class Deterministic(Gated):
    def unusual(self, x):
        return torch.are_deterministic_algorithms_enabled()


class DefaultDtype(Gated):
    def unusual(self, x):
        return torch.get_default_dtype() is torch.float64


class Device(Gated):
    def unusual(self, x):
        return x.device.type == "meta"


class Hooks(Gated):
    def unusual(self, x):
        return len(self.up._forward_hooks) > 0


class Calls(Gated):
    calls = 0

    def unusual(self, x):
        type(self).calls += 1
        return type(self).calls > 1


@contextlib.contextmanager
def set_to(setter, value, usual):
    setter(value)
    try:
        yield
    finally:
        setter(usual)


def other_algorithms(now):
    return set_to(torch.use_deterministic_algorithms, not now, now)


STATES = {
    Autocast: lambda model: torch.autocast("cpu", torch.bfloat16),
    Inference: lambda model: torch.inference_mode(),
    NoGrad: lambda model: torch.no_grad(),
    Deterministic: lambda model: other_algorithms(torch.are_deterministic_algorithms_enabled()),
    DefaultDtype: lambda model: set_to(torch.set_default_dtype, torch.float64, torch.float32),
    Hooks: lambda model: model.up.register_forward_hook(lambda *_: None),
    Calls: lambda model: contextlib.nullcontext(),
}


@pytest.mark.parametrize("cls", STATES)
def test_a_forward_that_asks_for_a_state(cls):
    x, results = torch.randn(2, 3, WIDTH), []
    model = cls()
    for each in (copy.deepcopy(model), hfnn.convert(copy.deepcopy(model), prefer="memory")):
        if cls is Calls:
            cls.calls = 0
        found = [each(x)]
        with STATES[cls](each):
            found.append(each(x))
        results.append(found)
    assert (results[0][1] - results[0][0]).mean().abs() > 0.5, "the program has no branch"
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)


def test_a_forward_that_asks_for_the_device():
    model = hfnn.convert(Device(), prefer="memory")
    assert "swiglu of" not in str(hfnn.report(model))
    assert "swiglu of" in str(hfnn.report(hfnn.convert(Gated(), prefer="memory")))
