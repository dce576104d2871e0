"""A training that loses two of its ranks and goes on without them. It kills them itself.

    python -m haiscale.launch --survive --nproc 4 examples/survive.py
    python -m haiscale.launch --survive --nproc 4 --spare 2 examples/survive.py     # others take their places

The launcher's lines say who has ended, and why. With spares the parameters are those of a run without faults (`--kill`
with no numbers), to the last bit.
"""

import argparse
import hashlib
import os
import signal
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from haiscale import survive
from haiscale.ddp import DDP


def build():
    """What training changes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 60)


def data():
    x = torch.randn(4096, 32, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x[:, :8].sum(1, keepdim=True).sin())


def train(run, args, dataset=None):
    """Called once in each generation, in the same processes."""
    began = time.perf_counter()
    model, optimizer, scheduler = run.keep(build)
    replicas, dataset = DDP(model), dataset or data()
    batches = run.batches(len(dataset), 60)
    loader = DataLoader(dataset, batch_sampler=batches)
    first = run.step
    for step, (x, y) in zip(run.steps(60), loader, strict=False):
        if step in args.kill[run.generation : run.generation + 1] and run.rank == run.size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        loss = nn.functional.mse_loss(replicas(x), y)
        (loss * batches.weight).backward()
        with run.commit():
            optimizer.step()
            scheduler.step()
        optimizer.zero_grad()
        if run.rank == 0 and step == first and run.reason:
            print(
                f"step {step} is finished, {time.perf_counter() - began:.3f} s after generation {run.generation} began"
            )
        if run.rank == 0 and step % 10 == 9:
            print(f"step {step}: loss {loss.item():.4f} on {run.size} ranks")
    if run.rank == 0:
        values = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
        print(f"trained {run.step} steps; parameters {hashlib.sha1(values).hexdigest()[:12]}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--kill", type=int, nargs="*", default=[20, 40], help="the steps at which the last rank is killed"
    )
    arguments = parser.parse_args()
    survive.run(lambda run: train(run, arguments))
