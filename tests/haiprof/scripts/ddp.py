"""A training script with torch's DDP, unaware of haiprof: torchrun --nproc-per-node 2 ddp.py [steps] [width].

Uses NCCL if each rank has a GPU, else gloo.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    steps, width = (int(sys.argv[i]) if len(sys.argv) > i else default for i, default in ((1, 30), (2, 512)))
    cuda = torch.cuda.device_count() >= int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    torch.manual_seed(0)
    layers = [each for _ in range(6) for each in (nn.Linear(width, width), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(width, 10)).to(device)
    model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters())
    rows = dist.get_world_size() * 64 * min(steps, 100)
    data = TensorDataset(torch.randn(rows, width), torch.randint(10, (rows,)))
    loader = DataLoader(data, batch_size=64, sampler=DistributedSampler(data))
    done = 0
    while done < steps:
        for x, y in loader:
            x, y = x.to(device), y.to(device)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            done += 1
            if done == steps:
                break
    total = loss.detach().clone()
    dist.all_reduce(total)
    if dist.get_rank() == 0:
        print(f"loss {total.item() / dist.get_world_size():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
