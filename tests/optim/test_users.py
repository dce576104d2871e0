"""What users do to an optimizer between steps, beside torch.optim: states moved, freed or of another shape, parameters
moved between groups, other default dtypes and devices, infinite parameters, lazily negated gradients."""

import gc
import weakref

import pytest
import torch
from torch import nn

import hfnn

CLASSES = ("AdamW", "Adam", "SGD", "Adafactor")
BOTH = (torch.optim, hfnn.optim)
INTERPRETED = pytest.param("triton", marks=pytest.mark.interpreted)


def make(lib, name, params, **options):
    return getattr(lib, name)(params, **({"momentum": 0.9} if name == "SGD" else {}), **options)


def filled(*shape, value=1.0):
    p = nn.Parameter(torch.zeros(shape))
    p.grad = torch.full(shape, value)
    return p


def moved(optimizer):
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                value.data = value.data.clone()


def freed_between(optimizer):
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and name != "step":
                kept = value.clone()
                value.untyped_storage().resize_(0)
                value.set_(kept)


def replaced(optimizer):
    for state in optimizer.state.values():
        for name, value in [*state.items()]:
            state[name] = value.clone() if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("change", [moved, freed_between, replaced])
@pytest.mark.parametrize("name", CLASSES)
def test_states_elsewhere(name, change):
    found = []
    for lib in BOTH:
        params = [filled(4, 3), filled(5)]
        optimizer = make(lib, name, params, lr=0.1)
        for _ in range(4):
            optimizer.step()
            change(optimizer)
        found.append([*(p.data for p in params), *(optimizer.state[p].get("step", torch.zeros(())) for p in params)])
    for ours, theirs in zip(*found[::-1], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("way", ["load", "data", "set"])
@pytest.mark.parametrize("name", CLASSES)
def test_states_of_another_shape_are_an_error(name, way):
    for lib in BOTH:
        p, q = filled(8, 4), filled(400, 4)
        optimizer = make(lib, name, [p])
        optimizer.step()
        if way == "load":
            state = optimizer.state_dict()
            optimizer = make(lib, name, [q])
            optimizer.load_state_dict(state)
        elif way == "data":
            p.data, p.grad = q.data, None
            p.grad = q.grad
        else:
            for key, value in optimizer.state[p].items():
                if key != "step":
                    value.data = torch.zeros(400, 4)
        with pytest.raises(RuntimeError, match="size of"):
            optimizer.step()


@pytest.mark.parametrize("options", [{"state_dtype": "8bit"}, {"state_dtype": "4bit"}, {"ema_decay": 0.9}])
def test_codes_and_averages_of_another_shape_are_an_error(options):
    p = filled(80, 80)
    optimizer = hfnn.optim.AdamW([p], **options)
    optimizer.step()
    q = filled(90, 90)
    other = hfnn.optim.AdamW([q], **options)
    other.state[q] = optimizer.state[p]
    with pytest.raises(RuntimeError, match=r"does not fit|must match"):
        other.step()


@pytest.mark.parametrize("name", CLASSES)
def test_replaced_states_and_parameters_are_freed(name):
    for lib in BOTH:
        p = filled(6, 6)
        optimizer = make(lib, name, [p])
        optimizer.step()
        optimizer.step()
        old = [weakref.ref(x) for x in optimizer.state[p].values() if isinstance(x, torch.Tensor) and x.dim()]
        replaced(optimizer)
        assert old and not any(ref() is not None for ref in old)
        kept = weakref.ref(p)
        optimizer.state.clear()
        optimizer.param_groups.clear()
        del p
        gc.collect()
        assert kept() is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CLASSES)
def test_another_default_dtype(name, dtype):
    found = []
    for lib in BOTH:
        torch.set_default_dtype(dtype)
        try:
            p = filled(3, 2)
            optimizer = make(lib, name, [p], lr=0.125)
            optimizer.step()
            steps = [x["step"].dtype for x in optimizer.state_dict()["state"].values() if "step" in x]
        finally:
            torch.set_default_dtype(torch.float32)
        found.append((p.data, steps))
    (theirs, steps), (ours, own_steps) = found
    assert own_steps == steps
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("name", CLASSES)
def test_another_default_device(name):
    """It makes no difference. Some of torch's optimizers read a step on the default device, so theirs are outside."""
    found = []
    for lib, device in zip(BOTH, ("cpu", "meta"), strict=True):
        p = filled(3, 2)
        optimizer = make(lib, name, [p], lr=0.1)
        with torch.device(device):
            optimizer.step()
            optimizer.step()
        found.append(p.data)
    torch.testing.assert_close(*found)


def test_a_parameter_moved_to_the_next_group():
    found = []
    for lib in BOTH:
        a, b, c = (filled(1) for _ in range(3))
        optimizer = lib.SGD([{"params": [a, b], "lr": 1.0}, {"params": [c], "lr": 0.01}])
        optimizer.step()
        optimizer.param_groups[1]["params"].insert(0, optimizer.param_groups[0]["params"].pop())
        optimizer.step()
        found.append([a.item(), b.item(), c.item()])
    assert found[0] == pytest.approx(found[1])


@pytest.mark.parametrize("kernel", ["cpp", INTERPRETED, "torch"])
@pytest.mark.parametrize("decay", [0.0, 0.01])
@pytest.mark.parametrize("name", ["AdamW", "Adam", "SGD"])
def test_infinite_parameters(name, decay, kernel):
    """Learnable masks: no NaN where torch has none."""
    found = []
    for lib in BOTH:
        p = nn.Parameter(torch.tensor([1.0, -torch.inf, torch.inf]))
        optimizer = make(lib, name, [p], lr=0.1, weight_decay=decay)
        with hfnn.use(kernel):
            for _ in range(2):
                p.grad = torch.tensor([1.0, 0.0, 0.0])
                optimizer.step()
        found.append(p.data)
    torch.testing.assert_close(*found, equal_nan=True)


@pytest.mark.parametrize("kernel", ["cpp", INTERPRETED])
def test_averages_of_a_gradient_that_shrinks(kernel):
    """With a small beta1, little is left of the last average, and the gradient must not be lost in it."""
    for betas in ((0.0, 0.99), (0.1, 0.99), (0.6, 0.99)):
        found = []
        for lib in BOTH:
            p = nn.Parameter(torch.zeros(3))
            optimizer = lib.Adam([p], lr=0.1, betas=betas)
            with hfnn.use(kernel):
                for grad in ([1.0, 1e4, 1e8], [1e-5, 1e-4, 1.0]):
                    p.grad = torch.tensor(grad)
                    optimizer.step()
            found.append(optimizer.state[p]["exp_avg"])
        torch.testing.assert_close(*found, rtol=1e-6, atol=0.0)


def test_gradients_that_are_negated_lazily():
    found = []
    for lib in BOTH:
        p = nn.Parameter(torch.tensor(0.5))
        optimizer = lib.SGD([p], lr=0.1)
        for factor in (1.0, 1 + 2j, 1.0, 1 + 2j):  # plain gradients in between: at the same address, if it is reused
            optimizer.zero_grad()
            (torch.complex(torch.tensor(1.0), p).conj() * factor).real.backward()
            optimizer.step()
        found.append(p.data)
    torch.testing.assert_close(*found)


def test_parameters_that_are_negated_lazily():
    found = []
    for lib in BOTH:
        p = nn.Parameter(torch._neg_view(torch.ones(3)))
        p.grad = torch.ones(3)
        optimizer = lib.SGD([p], lr=0.1)
        optimizer.step()
        found.append(p.data.resolve_neg())
    torch.testing.assert_close(*found)


def test_states_of_something_else_than_a_parameter():
    optimizer = hfnn.optim.AdamW([filled(2)])
    optimizer.step()
    optimizer.state["global"] = {"count": torch.ones(2)}
    optimizer.load_state_dict(optimizer.state_dict())
    assert torch.equal(optimizer.state["global"]["count"], torch.ones(2))
