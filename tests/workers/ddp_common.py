"""Shared by the cases of tests/workers/ddp.py: training with a wrapper, and comparing the results."""

import contextlib

import torch
import torch.distributed as dist
from ddp_models import DEVICE
from torch import nn

from haiscale.ddp import DDP

Torch = nn.parallel.DistributedDataParallel
CASES = {}


def case(function):
    """Registers a function of (rank, size, store, arguments)."""
    CASES[function.__name__] = function
    return function


def made(make, *args, **options):
    """The same model every time and on all ranks."""
    torch.manual_seed(3)
    return make(*args, **options).to(DEVICE)


def loss_of(output):
    return output.loss if hasattr(output, "loss") else output.float().square().mean()


def train(model, batches, steps, *, accumulate=1, no_sync=True, clip=None, optimizer=None, keep=True, loss=loss_of):
    """Losses, gradients at each optimizer step, and the final state."""
    rank, found = dist.get_rank(), []
    optimizer = optimizer or torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9)
    for step in range(steps):
        for i in range(accumulate):
            silent = no_sync and i + 1 < accumulate
            with model.no_sync() if silent else contextlib.nullcontext():
                value = loss(model(*batches(step * accumulate + i, rank)))
                value.backward()
            found.append(value.detach())
        if clip:
            found.append(nn.utils.clip_grad_norm_(model.parameters(), clip))
        if keep:
            found += [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return found + [t.detach().clone() for t in model.state_dict().values()]


def same(ours, theirs):
    """Whether two lists of tensors (or None) are bitwise equal."""
    if len(ours) != len(theirs):
        return False
    return all(a is b if a is None or b is None else torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def against_torch(make, batches, steps, ours=None, theirs=None, **training):
    """`ours`, `theirs`: arguments of the two wrappers."""
    models = [DDP(made(make), **{"bucket_cap_mb": 0.002, **(ours or {})}), Torch(made(make), **(theirs or {}))]
    results = [train(model, batches, steps, **training) for model in models]
    return {"same": same(*results), "buckets": len(models[0].reducer.buckets), "steps": steps}
