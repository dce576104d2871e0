"""A training script with torch's FSDP, old and new, unaware of haiscale, for torchrun."""

import json

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard


def train(wrap):
    torch.manual_seed(0)
    model = wrap(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)))
    optimizer = torch.optim.AdamW(model.parameters())
    torch.manual_seed(1 + dist.get_rank())
    losses = []
    for _ in range(6):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(torch.randn(8, 16)), torch.randint(4, (8,)))
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item())
    return losses


def whole(model):
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"))


def parts(model):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for each in (model[0], model[2], model):
        fully_shard(each, mesh=mesh)
    return model


def main():
    dist.init_process_group("gloo")
    losses = [*train(whole), *train(parts)]
    if dist.get_rank() == 0:
        print(json.dumps(losses))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
