"""A Lightning Fabric script unaware of haiscale: torchrun --nproc-per-node 2 fabric.py [cuda]."""

import json
import sys

import torch
from lightning_fabric import Fabric
from torch import nn


def main():
    fabric = Fabric(accelerator="cuda" if sys.argv[1:] == ["cuda"] else "cpu", devices=2, strategy="ddp")
    fabric.launch()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters()))
    torch.manual_seed(1 + fabric.global_rank)
    losses = []
    for step in range(10):
        x, y = torch.randn(8, 16, device=fabric.device), torch.randint(4, (8,), device=fabric.device)
        with fabric.no_backward_sync(model, enabled=step % 2 == 0):
            loss = nn.functional.cross_entropy(model(x), y)
            fabric.backward(loss)
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(fabric.all_reduce(loss.detach()).item())
    fabric.barrier()
    if fabric.global_rank == 0:
        print(json.dumps(losses))


if __name__ == "__main__":
    main()
