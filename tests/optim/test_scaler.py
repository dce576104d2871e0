"""GradScaler: gradients are unscaled and steps are skipped on the device, without a wait of the host."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import hfnn

INTERPRETED = pytest.param("triton", marks=pytest.mark.interpreted)

OPTIMIZERS = (("AdamW", {}), ("SGD", {"momentum": 0.9}), ("SGD", {"momentum": 0.9, "dampening": 0.5}), ("Lion", {}))


class NoSync(TorchDispatchMode):
    """Refuses ops that wait for a device, except for `read`, which steps read on the CPU only."""

    def __init__(self, read=None):
        super().__init__()
        self.read = read

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        waits = function in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
        if waits and args[0] is not self.read:
            raise AssertionError(f"waits for the device: {function}")
        return function(*args, **(kwargs or {}))


def pair(name, options, **extras):
    x = [torch.randn(5, 3), torch.randn(70, 70)]
    made = []
    for more in (extras, {}):
        p = [t.clone().requires_grad_() for t in x]
        made.append((p, getattr(hfnn.optim, name)(p, lr=0.1, **options, **more)))
    return made


@pytest.mark.parametrize("kernel", ["cpp", INTERPRETED, "torch"])
@pytest.mark.parametrize("unscaled", [False, True])
@pytest.mark.parametrize(("name", "options"), OPTIMIZERS)
def test_as_without(name, options, unscaled, kernel):
    """A scaler gives the same as none; a step whose gradients overflow, even the very first, has no effect."""
    (a, mine), (b, other) = pair(name, options)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    for i in range(6):
        overflows = i in (0, 3)
        for x, y in zip(a, b, strict=True):
            y.grad = torch.randn_like(y)
            x.grad = torch.full_like(x, torch.inf) if overflows else y.grad * scaler.get_scale()
        scaler.scale(torch.ones(()))  # initialises the scale
        with hfnn.use(kernel):
            if unscaled:
                scaler.unscale_(mine)
            scaler.step(mine)
            scaler.update()
            if not overflows:
                other.step()
        assert mine._ran == ((kernel,) if kernel != "torch" or name == "Lion" else ("torch",))
        for x, y in zip(a, b, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-6)
            if name == "AdamW" and i:
                assert mine.state[x]["step"] == other.state[y]["step"]
    assert scaler.get_scale() == 256.0 and not hasattr(mine, "found_inf")


@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 1.0}, {"state_dtype": "8bit", "ema_decay": 0.9}])
def test_no_sync(options):
    (a, mine), _ = pair("AdamW", {"capturable": True}, **options)
    mine.param_groups[0]["lr"] = torch.tensor(0.1)
    for x in a:
        x.grad = torch.randn_like(x)
    mine.step()
    mine.grad_scale, mine.found_inf = torch.tensor(2.0), torch.tensor(0.0)
    mine.param_groups[0]["lr"] = 0.2
    with NoSync(read=mine.found_inf):
        mine.step()
        norm = mine.grad_norm
    assert (norm is None) == (mine.max_grad_norm is None)
    with pytest.raises(AssertionError, match="waits"), NoSync():
        mine.found_inf.item()


@pytest.mark.parametrize("kernel", ["cpp", INTERPRETED, "torch"])
def test_clipping_is_of_what_was_scaled(kernel):
    (a, mine), (b, _) = pair("AdamW", {}, max_grad_norm=0.5)
    other = torch.optim.AdamW(b, lr=0.1)
    for x, y in zip(a, b, strict=True):
        y.grad = torch.randn_like(y)
        x.grad = y.grad * 64
    mine.grad_scale, mine.found_inf = torch.tensor(64.0), torch.tensor(0.0)
    norm = torch.nn.utils.clip_grad_norm_(b, 0.5)
    with hfnn.use(kernel):
        mine.step()
    other.step()
    torch.testing.assert_close(mine.grad_norm, norm, rtol=1e-6, atol=0)
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("then", ["a step", "more gradients", "revert", "state_dict"])
@pytest.mark.parametrize("kernel", ["cpp", INTERPRETED])
def test_the_first_step_is_the_first_that_was_taken(kernel, then):
    """A momentum that overflowed in its first step starts with the next gradient, whatever comes in between."""
    results = []
    for mine in (True, False):
        torch.manual_seed(1)
        params = [torch.randn(5, 3, requires_grad=True), torch.randn(70, 70, requires_grad=True)]
        make = hfnn.optim.SGD if mine else torch.optim.SGD
        optimizer = make(params, lr=0.1, momentum=0.9, dampening=0.5)
        scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
        scaler.scale(torch.ones(()))  # initialises the scale
        with hfnn.use(kernel):
            for p in params[: 1 if then == "more gradients" else 2]:
                p.grad = torch.full_like(p, torch.inf)
            scaler.step(optimizer)
            scaler.update()
            assert not any(optimizer.state.values())
            if then == "revert" and mine:
                hfnn.revert(optimizer)
            elif then == "state_dict":
                saved, optimizer = optimizer.state_dict(), make(params, lr=0.1, momentum=0.9, dampening=0.5)
                optimizer.load_state_dict(saved)
            for _ in range(2):
                for p in params:
                    p.grad = torch.randn_like(p)
                optimizer.step()
        results.append([*params, *(optimizer.state[p]["momentum_buffer"] for p in params)])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
