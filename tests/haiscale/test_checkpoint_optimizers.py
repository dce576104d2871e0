"""haiscale.checkpoint: the states of optimizers fit, or an error lists what differs before anything is loaded."""

import pytest
import torch
from torch import nn

from haiscale import checkpoint
from hfnn import optim

TORCHS = {
    "SGD": {},
    "SGD with momentum": {"momentum": 0.9},
    "RMSprop": {},
    "RMSprop with momentum": {"momentum": 0.9, "centered": True},
}
DEFAULTS = ("Adam", "AdamW", "RAdam", "NAdam", "Adamax", "Adagrad", "Adadelta", "Rprop", "ASGD", "Adafactor", "LBFGS")
TORCHS |= {name: {} for name in DEFAULTS}
SAME_STATES = ({"Adam", "AdamW", "RAdam"}, {"SGD", "SGD with momentum"}, {"RMSprop", "RMSprop with momentum"})


def optimized(name, steps, model):
    optimizer = getattr(torch.optim, name.split()[0])(model.parameters(), lr=0.01, **TORCHS[name])

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(2, 3)).square().sum()
        loss.backward()
        return loss

    for _ in range(steps):
        closure()
        optimizer.step(closure)
    return optimizer


def without_class(optimizer, owned, entries=checkpoint.optimizer_state.optimizer_entries):
    """The entries of a checkpoint from before classes were saved."""
    for key, value in entries(optimizer, owned):
        yield key, {k: v for k, v in value.items() if k != "class"} if key.startswith("param_group") else value


@pytest.mark.parametrize("old", [False, True], ids=["new", "old"])
def test_states_of_another_optimizer_are_refused_or_all_used(tmp_path, one_thread, monkeypatch, old):
    """For all pairs of torch's optimizers. An old file without states may be of an optimizer that had taken no step."""
    if old:
        monkeypatch.setattr(checkpoint.optimizer_state, "optimizer_entries", without_class)
    for name in TORCHS:
        model = nn.Linear(3, 2)
        checkpoint.save(tmp_path / name, model, optimized(name, 2, model), step=2)
        for other in TORCHS:
            model = nn.Linear(3, 2)
            before, fresh = model.weight.clone(), optimized(other, 0, model)
            fits = name == other or any({name, other} <= names for names in SAME_STATES)
            if not fits and not (old and name == "SGD"):
                with pytest.raises(ValueError, match=r"states of weight( and 1 more)? are "):
                    checkpoint.load(tmp_path / name, model, fresh)
                assert torch.equal(model.weight, before), f"{name} to {other}: something was loaded"
            elif fits and not (old and name == "LBFGS"):
                checkpoint.load(tmp_path / name, model, fresh)
                assert not torch.equal(model.weight, before)


def test_what_differs_is_listed(tmp_path):
    model = nn.Linear(3, 2)
    checkpoint.save(tmp_path, model, optimized("AdamW", 1, model), step=1)
    text = r"weight and 1 more are exp_avg, exp_avg_sq, step there \(AdamW\) and momentum_buffer here \(SGD\)"
    with pytest.raises(ValueError, match=text):
        checkpoint.load(tmp_path, model, optimized("SGD with momentum", 0, model))
    assert checkpoint.load(tmp_path, model)["step"] == 1, "the model alone"


def test_parameters_without_a_gradient_have_no_states_to_miss(tmp_path):
    model = nn.Linear(3, 2)
    model.bias.requires_grad_(False)
    groups = [{"params": [model.weight]}, {"params": [model.bias]}]
    adam = torch.optim.Adam(groups)
    model(torch.ones(2, 3)).sum().backward()
    adam.step()
    checkpoint.save(tmp_path, model, adam, step=1)
    checkpoint.load(tmp_path, model, torch.optim.AdamW(groups))


def test_states_of_hfnns_optimizers_are_torchs(tmp_path):
    classes = [torch.optim.AdamW, optim.AdamW, optim.Adam]
    for make in classes:
        model = nn.Linear(2, 2)
        optimizer = make(model.parameters())
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        checkpoint.save(tmp_path / make.__module__, model, optimizer, step=1)
        for other in classes:
            model = nn.Linear(2, 2)
            checkpoint.load(tmp_path / make.__module__, model, fresh := other(model.parameters()))
            assert fresh.state_dict()["state"][0]["exp_avg"].any()


def test_a_parameter_of_two_optimizers_is_refused(tmp_path):
    """Their states would have the same keys."""
    model = nn.Linear(2, 2)
    optimizers = [torch.optim.SGD(model.parameters()), torch.optim.Adam([model.bias])]
    with pytest.raises(ValueError, match=r"bias is in two optimizers, SGD and Adam: save"):
        checkpoint.save(tmp_path, model, optimizers, step=1)
    assert checkpoint.latest(tmp_path) is None
    checkpoint.save(tmp_path, model, optimizers[0], step=1)
    with pytest.raises(ValueError, match=r"bias is in two optimizers, SGD and Adam: save"):
        checkpoint.load(tmp_path, model, optimizers)


def test_optimizers_that_do_not_fit(tmp_path):
    """Nothing is loaded then."""
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    first, second = ([*layer.parameters()] for layer in model)
    checkpoint.save(
        tmp_path, model, torch.optim.SGD([{"params": first, "lr": 1.0}, {"params": second}], lr=0.5), step=1
    )
    with pytest.raises(ValueError, match=r"0.bias, optimizer.0.weight of it are not here"):
        checkpoint.load(tmp_path, model, torch.optim.SGD(second))
    with pytest.raises(
        ValueError, match=r"0.weight and 1.weight are in one group of SGD, but were saved with other opt"
    ):
        nn.init.zeros_(first[0])
        checkpoint.load(tmp_path, model, torch.optim.SGD(model.parameters()))
    assert not first[0].any()
    checkpoint.save(tmp_path, model, step=2)
    with pytest.raises(ValueError, match="the state of any optimizer is not in it"):
        checkpoint.load(tmp_path, model, torch.optim.SGD(model.parameters()))
