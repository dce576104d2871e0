"""Parameters that a wrapped model is given: see tests/haiscale/test_added.py."""

import functools

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

import hfreduce  # noqa: F401
from haiscale.ddp import DDP
from haiscale.fsdp import FSDP


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.head = nn.ModuleList([nn.Linear(4, 4)]), nn.Linear(4, 4)
        self.tied = nn.Linear(4, 4, bias=False)
        self.tied.weight = self.layers[0].weight

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def inserted(net):
    net.layers.insert(0, nn.Linear(4, 4))


def appended(net):
    net.layers.append(nn.Linear(4, 4))


def adapted(net):
    """As LoRA does: a module in the place of another, which it holds."""
    net.head = nn.Sequential(net.head.requires_grad_(False), nn.Linear(4, 4, bias=False))


def given(net):
    net.head.scale = nn.Parameter(torch.ones(4))


def normed(net):
    weight_norm(net.head)


def replaced(net):
    net.head.bias = nn.Parameter(torch.zeros(4))


def larger(net):
    net.head.weight = nn.Parameter(torch.zeros(5, 4))


def doubled(net):
    net.head.weight = nn.Parameter(torch.zeros(4, 4, dtype=torch.float64))


def untied(net):
    net.tied.weight = nn.Parameter(torch.zeros(4, 4))


def another(net):
    net.head = nn.Linear(4, 4)


def frozen(net):
    net.teacher = nn.Linear(4, 4).requires_grad_(False)


def thawed(net):
    net.teacher = nn.Linear(4, 4).requires_grad_(False)
    yield
    net.teacher.weight.requires_grad_(True)


CHANGES = [
    *(inserted, appended, adapted, given, normed, replaced, larger, doubled, untied, another, frozen, thawed),
]


def directly(model, x):
    return model(x)


def in_a_checkpoint(model, x):
    return checkpoint(model, x.requires_grad_(), use_reentrant=True)


def changed(wrap, change, call=directly):
    """What the forward after a change raised, and then a step of an optimizer that was made after it; or None."""
    model, x = wrap(Net()), torch.ones(2, 4)
    model(x).sum().backward()
    for _ in change(model.module) or ():
        model(x).sum().backward()
    try:
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        if change not in (larger, doubled):  # which cannot run
            with torch.no_grad():
                model(x)
        call(model, x).sum().backward()
        optimizer.step()
    except ValueError as error:
        return str(error)
    return None


def changes(rank, size, store):
    torch.set_num_threads(1)
    dist.init_process_group("hfreduce", init_method=f"file://{store}", rank=rank, world_size=size)
    wrappers = {"DDP": DDP, "FSDP": functools.partial(FSDP, units=[])}
    return {
        name: {
            **{change.__name__: changed(wrap, change) for change in CHANGES},
            "in_a_checkpoint": changed(wrap, given, in_a_checkpoint),
            "trained": frozen_instead(wrap),
        }
        for name, wrap in wrappers.items()
    }


def frozen_instead(wrap):
    """The parameters that are trained after a frozen one replaced a trained one."""
    model = wrap(Net())
    model.module.head.weight = nn.Parameter(torch.zeros(4, 4), requires_grad=False)
    model(torch.ones(2, 4)).sum().backward()
    return [name for name, p in model.module.named_parameters() if p.requires_grad]
