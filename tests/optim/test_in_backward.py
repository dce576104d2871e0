"""`hfnn.optim.step_in_backward`: the ordinary step, bit for bit, without all gradients at once."""

import copy
import gc
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hfnn
from hfnn.optim import step_in_backward

OPTIMIZERS = {
    "adamw": (hfnn.optim.AdamW, {"weight_decay": 0.1}),
    "amsgrad": (hfnn.optim.Adam, {"amsgrad": True, "maximize": True}),
    "sgd": (hfnn.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "plain sgd": (hfnn.optim.SGD, {}),
    "lion": (hfnn.optim.Lion, {}),
    "8bit": (hfnn.optim.AdamW, {"state_dtype": "8bit", "ema_decay": 0.9}),
    "remainder": (hfnn.optim.AdamW, {"master": "remainder", "dtype": torch.bfloat16}),
}


class Tied(nn.Module):
    """An embedding that is also the head, a layer that is used twice, and a frozen one."""

    def __init__(self):
        super().__init__()
        self.embed, self.layer = nn.Embedding(96, 64), nn.Linear(64, 64)
        self.frozen, self.head = nn.Linear(64, 64), nn.Linear(64, 96)
        self.head.weight = self.embed.weight
        self.frozen.requires_grad_(False)

    def forward(self, ids):
        return self.head(self.frozen(self.layer(self.layer(self.embed(ids)).tanh()).tanh()))


def build(name="adamw"):
    """A model, and an optimizer with two groups."""
    torch.manual_seed(0)
    cls, options = OPTIMIZERS[name]
    options = dict(options)
    model = Tied().to(options.pop("dtype", torch.float32))
    rest = [p for key, p in model.named_parameters() if not key.startswith("embed")]
    return model, cls([{"params": rest}, {"params": model.embed.weight, "lr": 0.003}], lr=0.01, **options)


def backward(model, i):
    ids = torch.randint(96, (4, 16), generator=torch.Generator().manual_seed(i))
    nn.functional.cross_entropy(model(ids).float().flatten(0, 1), ids.flatten().roll(1)).backward()


def train(model, optimizer, first, last, scheduler=None):
    for i in range(first, last):
        backward(model, i)
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()


def assert_same(model, optimizer, other, reference):
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)
        found, wanted = optimizer.state.get(p, {}), reference.state.get(q, {})
        assert found.keys() == wanted.keys() and all(torch.equal(found[key], wanted[key]) for key in wanted)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_bits_of_the_ordinary_step(name):
    """Tied, frozen and shared parameters, two groups; attached, detached and attached again."""
    (model, optimizer), (other, reference) = build(name), build(name)
    handle = step_in_backward(optimizer)
    train(model, optimizer, 0, 3)
    handle.remove()
    handle.remove()
    train(model, optimizer, 3, 4)
    with_handle = step_in_backward(optimizer)
    train(model, optimizer, 4, 6)
    train(other, reference, 0, 6)
    assert_same(model, optimizer, other, reference)
    assert with_handle.optimizer is optimizer
    assert set(optimizer._ran) == set(reference._ran) == {"cpp"}


def test_a_converted_optimizer_goes_on():
    torch.manual_seed(0)
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, 0, 2)
    other, reference = copy.deepcopy((model, optimizer))
    hfnn.convert(reference)
    step_in_backward(hfnn.convert(optimizer))
    train(model, optimizer, 2, 4)
    train(other, reference, 2, 4)
    assert_same(model, optimizer, other, reference)


def most_bytes(model, optimizer):
    """The most bytes of gradients alive at one time in backward, counted at each completed gradient, including it."""
    most, parameters = 0, list(model.parameters())

    def count(_):
        nonlocal most
        most = max(most, sum(p.grad.nbytes for p in parameters if p.grad is not None))

    hooks = [p.register_post_accumulate_grad_hook(count) for p in parameters]
    handle = step_in_backward(optimizer) if optimizer is not None else None
    model(torch.randn(2, 64)).sum().backward()
    left = sum(p.grad.nbytes for p in parameters if p.grad is not None)
    for hook in hooks:
        hook.remove()
    if handle is not None:
        handle.remove()
    return most, left


def test_gradients_are_freed_at_once():
    """The peak is the largest gradient instead of the sum, and gradients do not outlive their step."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    total = sum(p.nbytes for p in model.parameters())
    assert most_bytes(model, None) == (total, total)
    model.zero_grad()
    assert most_bytes(model, hfnn.optim.AdamW(model.parameters())) == (model[0].weight.nbytes, 0)


def test_the_memory_is_given_back():
    """hfnn holds no gradient: its storage is freed before the next one."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    seen, alive = [], []

    def watch(p):
        alive.append(sum(storage() is not None for storage in seen))
        seen.append(weakref.ref(p.grad))

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(watch)
    optimizer = hfnn.optim.AdamW(model.parameters())
    step_in_backward(optimizer)
    for _ in range(2):
        model(torch.randn(2, 64)).sum().backward()
        optimizer.step()
    assert len(alive) == 16 and max(alive) == 0


def test_schedulers_and_step_hooks_count():
    (model, optimizer), (other, reference) = build(), build()
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        schedulers = [torch.optim.lr_scheduler.CosineAnnealingLR(o, 6) for o in (optimizer, reference)]
        step_in_backward(optimizer)
        train(model, optimizer, 0, 4, schedulers[0])
        train(other, reference, 0, 4, schedulers[1])
    assert_same(model, optimizer, other, reference)
    assert len(calls) == 4 and float(optimizer.state[model.layer.weight]["step"]) == 4.0


def test_what_was_not_there_is_stepped_by_step():
    """A parameter that is unfrozen, and a group that is added later."""
    (model, optimizer), (other, reference) = build(), build()
    step_in_backward(optimizer)
    train(model, optimizer, 0, 1)
    train(other, reference, 0, 1)
    for m, o in ((model, optimizer), (other, reference)):
        m.frozen.requires_grad_(True)
        torch.manual_seed(1)
        m.head.bias = nn.Parameter(torch.randn(96))
        o.add_param_group({"params": m.head.bias, "lr": 0.1})
    train(model, optimizer, 1, 3)
    train(other, reference, 1, 3)
    assert_same(model, optimizer, other, reference)


def test_checkpointed_layers():
    """A layer recomputed in backward gets its gradient once, complete."""
    torch.manual_seed(0)
    model, other = (nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)) for _ in range(2))
    other.load_state_dict(model.state_dict())
    optimizer, reference = (hfnn.optim.AdamW(m.parameters()) for m in (model, other))
    step_in_backward(optimizer)
    for _ in range(2):
        x = torch.randn(4, 64, requires_grad=True)
        for m, o in ((model, optimizer), (other, reference)):
            checkpoint(m, x, use_reentrant=False).square().sum().backward()
            o.step()
            o.zero_grad()
    assert_same(model, optimizer, other, reference)


def test_gradient_accumulation_is_an_error():
    """The second backward ends at its first parameter, and changes nothing."""
    model, optimizer = build()
    handle = step_in_backward(optimizer)
    backward(model, 0)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ValueError, match="accumulate"):
        backward(model, 1)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    handle.remove()
    backward(model, 2)
    optimizer.step()


def test_norms_closures_and_scalers_are_errors():
    model, optimizer = build()
    optimizer.configure(max_grad_norm=1.0)
    with pytest.raises(ValueError, match="max_grad_norm=1"):
        step_in_backward(optimizer)
    optimizer.configure(max_grad_norm=None)
    step_in_backward(optimizer)
    with pytest.raises(ValueError, match="already"):
        step_in_backward(optimizer)
    for call in (lambda c: optimizer.step(c), lambda c: optimizer.step(closure=c)):
        with pytest.raises(ValueError, match="closure"):
            call(lambda: 0.0)
    optimizer.step(closure=None)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(model(torch.zeros(1, 1, dtype=torch.long)).sum()).backward()
    with pytest.raises(ValueError, match="GradScaler"):
        scaler.step(optimizer)
    model, optimizer = build()
    step_in_backward(optimizer)
    optimizer.configure(max_grad_norm=1.0)
    with pytest.raises(ValueError, match="max_grad_norm"):
        backward(model, 0)


def test_a_scaler_that_is_off_does_no_harm():
    model, optimizer = build()
    step_in_backward(optimizer)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    scaler.scale(model(torch.zeros(1, 1, dtype=torch.long)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()


def test_takes_hfnns_optimizers():
    with pytest.raises(ValueError, match=r"torch.optim.adamw.AdamW: hfnn.convert"):
        step_in_backward(torch.optim.AdamW(nn.Linear(2, 2).parameters()))


def test_a_detached_optimizer_is_freed():
    model, optimizer = build()
    handle = step_in_backward(optimizer)
    train(model, optimizer, 0, 1)
    handle.remove()
    gone = weakref.ref(optimizer)
    del handle, optimizer
    gc.collect()
    assert gone() is None
