"""Rank programs of tests/hfrecord/test_training.py: a small model with haiscale's DDP, trained from records."""

from datetime import timedelta

import torch
import torch.distributed as dist

import hfrecord
import hfreduce  # noqa: F401 (a backend)
from haiscale.ddp import DDP


def train(rank, size, store, path, state=None, steps=None):
    """Labels that this rank received, losses, and the loader's state."""
    torch.set_num_threads(1)
    where = {"init_method": f"file://{store}", "rank": rank, "world_size": size}
    dist.init_process_group("hfreduce", **where, timeout=timedelta(seconds=60))
    torch.manual_seed(0)
    model = DDP(torch.nn.Linear(12, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = hfrecord.DataLoader(hfrecord.Dataset(path, fields=("x", "label")), 4, seed=1, tail="drop")
    if state is not None:
        loader.load_state_dict(state)
    labels, losses = [], []
    for number, (x, label) in enumerate(loader, 1):
        loss = torch.nn.functional.cross_entropy(model(x), label % 3)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        labels += label.tolist()
        losses.append(loss.item())
        if number == steps:
            break
    dist.barrier()
    dist.destroy_process_group()
    return {"labels": labels, "losses": losses, "state": loader.state_dict()}
