"""Ways of wrapping a model, each of which saves the plain model's names and loads what any other saved."""

import contextlib
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import hfreduce  # noqa: F401
from haiscale import checkpoint
from haiscale.ddp import DDP
from haiscale.fsdp import FSDP

EVALUATED = "fully_shard after a forward"  # torch leaves parameters whole until a backward


class Net(nn.Module):
    """A buffer, a tied weight, and a child that is called as wrappers call theirs."""

    def __init__(self):
        super().__init__()
        self.a = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.b = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.head = nn.Linear(4, 4)
        self.module = nn.Linear(4, 4, bias=False)
        self.module.weight = self.head.weight

    def forward(self, x):
        return self.module(self.head(self.b(self.a(x))))


def compiled(model):
    return torch.compile(model, backend="eager")  # others take seconds to import


def blocks(wrap):
    def wrapped(model):
        model.a, model.b = wrap(model.a), wrap(model.b)
        return model

    return wrapped


def torch_fsdp2(model):
    return fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def ways():
    wrappers = {"DDP": DDP, "FSDP": FSDP, "torch's DDP": DistributedDataParallel, "fully_shard": torch_fsdp2}
    inner = {"compiled": compiled, "compiled blocks": blocks(compiled)}
    inner |= {"checkpoint_wrapper": blocks(checkpoint_wrapper)}
    inner |= {"checkpoint_wrapper of compiled blocks": blocks(lambda block: checkpoint_wrapper(compiled(block)))}
    found = {"plain": lambda model: model, **inner, **wrappers, EVALUATED: torch_fsdp2}
    for name, wrap in wrappers.items():
        found[f"compiled {name}"] = lambda model, wrap=wrap: compiled(wrap(model))
        for what, change in inner.items():
            found[f"{name} of {what}"] = lambda model, wrap=wrap, change=change: wrap(change(model))
    found["DDP of blocks"], found["torch's DDP of blocks"] = blocks(DDP), blocks(DistributedDataParallel)
    found["FSDP of blocks"] = blocks(FSDP)
    return found


class LongNames(nn.Module):
    """Saves as older versions did: with the names of wrappers inside of the model."""

    def __init__(self, model, long):
        super().__init__()
        self.model, self.long = model, long

    def named_shards(self):
        for name, tensor in checkpoint.states.named_shards(self.model):
            yield self.long(name), tensor


OLD = {
    "of compiled": lambda name: f"_orig_mod.{name}",
    "of checkpoint_wrapper of compiled blocks": lambda name: name.replace(
        ".", "._checkpoint_wrapped_module._orig_mod.", 1
    ),
    "DDP of blocks": lambda name: name.replace(".", ".module.", 1) if name[0] in "ab" else name,
}


def made(way):
    torch.manual_seed(made.number)
    made.number += 1
    model = way(Net())
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


made.number = 0


def stepped(model, optimizer):
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    return model, optimizer


def values(model):
    return {
        name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()
        for name, tensor in checkpoint.states.named_shards(model)
    }


def names(rank, size, store, target, several):
    """What went wrong, by pair of ways. several: every third way saves, not only the plain model."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "hfreduce", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=60)
    )
    wrong, saved, plain = {}, {}, sorted(values(Net()))
    for name, way in list(ways().items())[: None if several else 1 : 3]:
        model, optimizer = stepped(*made(way))
        checkpoint.save(Path(target, name), model, optimizer, step=1)
        saved[name] = values(model)
    for name, long in OLD.items():
        model, optimizer = stepped(*made(lambda model: model))
        checkpoint.save(Path(target, f"old {name}"), LongNames(model, long), optimizer, step=1)
        saved[f"old {name}"] = values(model)
    for name, way in ways().items():
        if (found := sorted(values(made(way)[0]))) != plain:
            wrong[name] = str(found)
        for source, wanted in saved.items():
            if source == "old DDP of blocks" and "DDP of blocks" not in name:
                continue  # such a file does not tell its wrapper's "module" from a module of that name
            if source.startswith("old") and not several and name not in ("DDP of blocks", "FSDP of compiled"):
                continue
            try:
                model, optimizer = made(way)
                if name == EVALUATED:
                    model.eval()(torch.ones(2, 4))
                checkpoint.load(Path(target, source), model, optimizer)
                found, states = values(model), optimizer.state_dict()["state"]
                right = all(torch.equal(found[name], wanted[name]) for name in plain)
                if not right or len(states) != len(list(model.parameters())):
                    wrong[f"{source} to {name}"] = "other values"
            except Exception as error:
                wrong[f"{source} to {name}"] = f"{type(error).__name__}: {error}"[:1000]
    with contextlib.suppress(ValueError):
        checkpoint.save(target, FullyShardedDataParallel(Net(), device_id=torch.device("cpu")), step=1)
        wrong["torch's FullyShardedDataParallel"] = "saved"
    return wrong
