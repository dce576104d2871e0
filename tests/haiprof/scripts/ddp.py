"""A training script of torch's DDP that knows nothing of haiprof: torchrun --nproc-per-node 2 ddp.py [steps]."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(*[each for _ in range(6) for each in (nn.Linear(512, 512), nn.ReLU())], nn.Linear(512, 10))
    model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters())
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 30
    data = TensorDataset(torch.randn(2 * 64 * steps, 512), torch.randint(10, (2 * 64 * steps,)))
    for x, y in DataLoader(data, batch_size=64, sampler=DistributedSampler(data)):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    total = loss.detach().clone()
    dist.all_reduce(total)
    if dist.get_rank() == 0:
        print(f"loss {total.item() / dist.get_world_size():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
