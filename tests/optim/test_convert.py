"""`hfnn.convert(optimizer)`: the same object, which keeps stepping for everything that refers to it."""

import copy
import gc
import io
import pickle
import warnings
import weakref

import pytest
import torch
from torch import nn

import hfnn

TORCH = {
    "AdamW": {"lr": 0.01, "weight_decay": 0.1},
    "Adam": {"lr": 0.01, "weight_decay": 0.1, "amsgrad": True},
    "SGD": {"lr": 0.01, "momentum": 0.9, "nesterov": True},
    "Adafactor": {"lr": 0.01},
}


class Inherits(torch.optim.AdamW):
    """A subclass without relevant code of its own."""

    def __init__(self, params, note="", **options):
        super().__init__(params, **options)
        self.note = note


def build(name="AdamW", seed=0, dtype=torch.float32, **options):
    """A model and torch's optimizer, with two groups."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 8)).to(dtype)
    cls = getattr(torch.optim, name) if isinstance(name, str) else name
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.002}]
    return model, cls(groups, **{**TORCH.get(name, {"lr": 0.01}), **options})


def train(model, optimizer, first, last, scheduler=None):
    """Runs steps first to last. The gradients depend on the model and the step's number."""
    for i in range(first, last):
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(i)).to(model[0].weight.dtype)
        optimizer.zero_grad()
        model(x).float().square().mean().backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


def assert_equal(model, other, **tolerance):
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, **tolerance)


CLOSE = {"rtol": 2e-5, "atol": 2e-6}


@pytest.mark.parametrize("name", TORCH)
def test_same_object_same_steps(name):
    (model, optimizer), (plain, reference) = build(name), build(name)
    train(model, optimizer, 0, 3)
    train(plain, reference, 0, 3)
    groups, state, before = optimizer.param_groups, optimizer.state, copy.deepcopy(optimizer.state_dict())
    assert hfnn.convert(optimizer) is optimizer
    assert type(optimizer) is getattr(hfnn.optim, name) and isinstance(optimizer, getattr(torch.optim, name))
    assert optimizer.param_groups is groups and optimizer.state is state
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for index, values in before["state"].items():
        assert values.keys() == after["state"][index].keys()
        assert all(torch.equal(values[key], torch.as_tensor(after["state"][index][key]).cpu()) for key in values)
    train(model, optimizer, 3, 8)
    train(plain, reference, 3, 8)
    assert_equal(model, plain, **CLOSE)
    steps = [float(v["step"]) for v in optimizer.state_dict()["state"].values() if "step" in v]
    assert steps == ([] if name == "SGD" else [8.0] * 4)


@pytest.mark.parametrize("name", TORCH)
def test_revert_goes_on_as_torch(name):
    (model, optimizer), (plain, reference) = build(name), build(name)
    train(model, hfnn.convert(optimizer), 0, 3)
    train(plain, reference, 0, 3)
    before = [p.detach().clone() for p in model.parameters()]
    assert hfnn.revert(optimizer) is optimizer and type(optimizer) is getattr(torch.optim, name)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert optimizer.state[p].keys() == reference.state[q].keys()
        for key, wanted in reference.state[q].items():
            found = optimizer.state[p][key]
            assert (found.dtype, found.device, found.shape) == (wanted.dtype, wanted.device, wanted.shape), key
            assert found.untyped_storage().nbytes() == found.nbytes, "a view of hfnn's buffers"
    train(model, optimizer, 3, 6)
    train(plain, reference, 3, 6)
    assert_equal(model, plain, **CLOSE)
    hfnn.convert(hfnn.revert(hfnn.convert(optimizer)))
    train(model, optimizer, 6, 8)
    train(plain, reference, 6, 8)
    assert_equal(model, plain, **CLOSE)


def test_convert_and_revert_change_no_bit():
    model, optimizer = build()
    train(model, hfnn.convert(optimizer), 0, 3)
    other, same = build()
    train(other, hfnn.convert(same), 0, 2)
    hfnn.convert(hfnn.revert(same))
    train(other, same, 2, 3)
    assert_equal(model, other, rtol=0, atol=0)


def test_model_and_optimizer():
    model, optimizer = build()
    found = hfnn.convert(model, optimizer, prefer="memory", state_dtype=torch.bfloat16)
    assert found == (model, optimizer) and hfnn.is_converted(model[0]) and type(optimizer) is hfnn.optim.AdamW
    assert optimizer.state_dtype is torch.bfloat16
    assert hfnn.revert(model, optimizer) == (model, optimizer)
    assert not hfnn.is_converted(model[0]) and type(optimizer) is torch.optim.AdamW


SCHEDULERS = {
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 8),
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.05, total_steps=10),
    "swa": lambda o: torch.optim.swa_utils.SWALR(o, 0.05, anneal_epochs=4),
    "sequence": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [torch.optim.lr_scheduler.LinearLR(o, 0.1, total_iters=3), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)],
        milestones=[3],
    ),
}


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("kind", SCHEDULERS)
def test_schedulers(kind, before):
    """Built before or after convert; stepped before convert and after revert: the same rates, no warning."""
    (model, optimizer), (plain, reference) = build(), build()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler = SCHEDULERS[kind](optimizer if before else hfnn.convert(optimizer))
        wanted = SCHEDULERS[kind](reference)
        if before:
            train(model, optimizer, 0, 2, scheduler)
            train(plain, reference, 0, 2, wanted)
        first = 2 if before else 0
        train(model, hfnn.convert(optimizer), first, 5, scheduler)
        assert scheduler.optimizer is optimizer and type(optimizer) is hfnn.optim.AdamW
        train(model, hfnn.revert(optimizer), 5, 8, scheduler)
        train(plain, reference, first, 8, wanted)
    assert scheduler.get_last_lr() == wanted.get_last_lr()
    assert_equal(model, plain, **CLOSE)


def test_the_scheduler_still_warns():
    _, optimizer = build()
    scheduler = SCHEDULERS["cosine"](optimizer)
    hfnn.convert(optimizer)
    with pytest.warns(UserWarning, match="before `optimizer.step"):
        scheduler.step()


def test_a_scheduled_optimizer_is_freed():
    _, optimizer = build()
    scheduler = SCHEDULERS["cosine"](optimizer)
    gone = weakref.ref(hfnn.convert(optimizer))
    del optimizer, scheduler
    gc.collect()
    assert gone() is None


def test_hooks_stay():
    model, optimizer = build()
    seen = []
    optimizer.register_step_pre_hook(lambda o, *_: seen.append(("before", o)))
    handle = optimizer.register_step_post_hook(lambda o, *_: seen.append(("after", o)))
    optimizer.register_state_dict_post_hook(lambda o, state: state | {"note": 1})
    train(model, hfnn.convert(optimizer), 0, 1)
    assert seen == [("before", optimizer), ("after", optimizer)] and optimizer.state_dict()["note"] == 1
    handle.remove()
    train(model, hfnn.revert(optimizer), 1, 2)
    assert seen[2:] == [("before", optimizer)]


def test_the_profiler_names_the_step():
    model, optimizer = build()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        train(model, hfnn.convert(optimizer), 0, 1)
    names = {event.key for event in profile.key_averages()}
    assert {"Optimizer.step#AdamW.step", "Optimizer.zero_grad#AdamW.zero_grad"} <= names


def test_grad_scaler():
    """A GradScaler used before conversion continues with it; a step with an infinite gradient does nothing."""
    (model, optimizer), (plain, reference) = build(), build()
    for m, o in ((model, optimizer), (plain, reference)):
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for i in range(5):
            o.zero_grad()
            x = torch.randn(4, 64, generator=torch.Generator().manual_seed(i))
            scaler.scale(m(x).square().mean()).backward()
            if i == 3:
                m[0].weight.grad[0, 0] = torch.inf
            scaler.step(o)
            scaler.update()
            if i == 1 and o is optimizer:
                hfnn.convert(o)
        assert scaler.get_scale() == 4.0
    assert_equal(model, plain, **CLOSE)
    assert float(optimizer.state[model[0].weight]["step"]) == 4.0


def test_averaged_model():
    (model, optimizer), (plain, reference) = build(), build()
    ema = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    averages = [torch.optim.swa_utils.AveragedModel(m, multi_avg_fn=ema) for m in (model, plain)]
    for m, o, average in zip((model, plain), (hfnn.convert(optimizer), reference), averages, strict=True):
        for i in range(4):
            train(m, o, i, i + 1)
            average.update_parameters(m)
    assert_equal(averages[0].module, averages[1].module, **CLOSE)


@pytest.mark.parametrize("again", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("cls", ["AdamW", Inherits])
def test_copies(cls, again):
    model, optimizer = build(cls)
    train(model, hfnn.convert(optimizer, state_dtype=torch.bfloat16), 0, 2)
    both, twin = again((model, optimizer))
    assert type(twin) is type(optimizer) and twin.state_dtype is torch.bfloat16
    train(model, optimizer, 2, 4)
    train(both, twin, 2, 4)
    assert_equal(model, both, rtol=0, atol=0)


def test_a_subclass_without_a_step_of_its_own():
    (model, optimizer), (plain, reference) = build(Inherits, note="mine"), build(Inherits)
    hfnn.convert(optimizer)
    assert isinstance(optimizer, Inherits) and isinstance(optimizer, hfnn.optim.AdamW) and optimizer.note == "mine"
    assert type(optimizer).__name__ == "Inherits"
    train(model, optimizer, 0, 3)
    train(plain, reference, 0, 3)
    assert_equal(model, plain, **CLOSE)
    assert type(hfnn.revert(optimizer)) is Inherits


def test_report():
    model, optimizer = build()
    (row,) = hfnn.report(optimizer).rows
    assert row.to is None and row.why == "not converted: hfnn.convert would swap it"
    train(model, hfnn.convert(optimizer), 0, 1)
    (row,) = hfnn.report(optimizer).swapped
    assert (row.original, row.to) == ("torch.AdamW", "hfnn.optim.AdamW") and row.kernel in ("cpp", "triton", "torch")
    assert "modules" not in str(hfnn.report(optimizer)) and "hfnn.optim.AdamW" in str(hfnn.report(optimizer))


@pytest.mark.parametrize("state_dtype", ["8bit", "4bit", torch.bfloat16])
def test_low_bit_states_from_torchs_and_back(state_dtype):
    """convert encodes the states of torch's optimizer, revert decodes them; both train on."""
    (model, optimizer), (plain, reference) = build(), build()
    model[0].weight.shape.numel() >= 4096 or pytest.fail("too small for low-bit states")
    train(model, optimizer, 0, 4)
    train(plain, reference, 0, 4)
    weight, other = model[0].weight, plain[0].weight
    train(model, hfnn.convert(optimizer, state_dtype=state_dtype), 4, 5)
    assert optimizer.state[weight]["exp_avg"].dtype is (
        state_dtype if isinstance(state_dtype, torch.dtype) else torch.uint8
    )
    before = optimizer.state_dict()["state"][0]["exp_avg"].float()
    hfnn.revert(optimizer)
    assert torch.equal(optimizer.state[weight]["exp_avg"], before) and not hasattr(optimizer, "state_dtype")
    train(plain, reference, 4, 5)
    a, b = optimizer.state[weight]["exp_avg"], reference.state[other]["exp_avg"]
    assert a.dtype is torch.float32 and a.shape == b.shape
    bound = {"8bit": 0.05, "4bit": 0.25}.get(state_dtype, 0.01)
    assert (a - b).norm() < bound * b.norm()
    train(model, optimizer, 5, 6)


def test_revert_of_a_remainder_leaves_the_rounded_parameter():
    model, optimizer = build(dtype=torch.bfloat16)
    train(model, hfnn.convert(optimizer, master="remainder", state_dtype=torch.float32), 0, 3)
    assert optimizer.state[model[0].weight]["remainder"].dtype is torch.int16
    hfnn.revert(optimizer)
    for p in model.parameters():
        assert optimizer.state[p].keys() == {"step", "exp_avg", "exp_avg_sq"}
        assert optimizer.state[p]["exp_avg"].dtype is torch.bfloat16
    train(model, optimizer, 3, 4)


def test_what_torch_has_no_class_for_stays():
    optimizer = hfnn.optim.Lion(nn.Linear(2, 2).parameters())
    assert type(hfnn.revert(optimizer)) is hfnn.optim.Lion


def test_options_of_a_converted_optimizer_change():
    (model, optimizer), (other, same) = build(), build()
    train(model, hfnn.convert(optimizer, state_dtype="8bit"), 0, 3)
    train(other, hfnn.convert(same), 0, 3)
    hfnn.convert(optimizer, state_dtype=torch.float32, max_grad_norm=0.1)
    train(model, optimizer, 3, 4)
    assert optimizer.state[model[0].weight]["exp_avg"].dtype is torch.float32
    assert float(optimizer.grad_norm) > 0


@pytest.mark.parametrize("fp16", [False, True])
@pytest.mark.parametrize("first", ["convert", "prepare"])
def test_accelerate(first, fp16, monkeypatch):
    accelerate = pytest.importorskip("accelerate")
    from accelerate.optimizer import AcceleratedOptimizer

    accelerate.Accelerator(cpu=True)
    (model, optimizer), (plain, reference) = build(), build()
    scalers = [torch.amp.GradScaler("cpu", init_scale=4.0) if fp16 else None for _ in range(2)]
    if first == "convert":
        hfnn.convert(optimizer)
    prepared, wanted = (AcceleratedOptimizer(o, scaler=s) for o, s in zip((optimizer, reference), scalers, strict=True))
    if first == "prepare":
        assert hfnn.convert(prepared) is prepared
    for o, m, scaler in ((prepared, model, scalers[0]), (wanted, plain, scalers[1])):
        for i in range(3):
            o.zero_grad()
            loss = m(torch.randn(4, 64, generator=torch.Generator().manual_seed(i))).square().mean()
            (scaler.scale(loss) if scaler else loss).backward()
            o.step()
    assert type(optimizer) is hfnn.optim.AdamW
    assert_equal(model, plain, **CLOSE)


def test_checkpoints_travel_both_ways():
    """torch's checkpoint into a converted optimizer, and the reverse, through torch.save."""
    for kinds in ((torch.optim.AdamW, hfnn.optim.AdamW), (hfnn.optim.AdamW, torch.optim.AdamW)):
        (model, _), (other, _) = build(), build()
        first, second = (kind(m.parameters(), lr=0.01) for kind, m in zip(kinds, (model, other), strict=True))
        train(model, first, 0, 3)
        file = io.BytesIO()
        torch.save([model.state_dict(), first.state_dict()], file)
        file.seek(0)
        weights, state = torch.load(file, weights_only=True)
        other.load_state_dict(weights)
        second.load_state_dict(state)
        train(model, first, 3, 5)
        train(other, second, 3, 5)
        assert_equal(model, other, **CLOSE)
