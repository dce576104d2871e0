"""One gloo rank: a converted model under DDP and under tensor parallelism has the gradients of the plain model.

python ddp_tp.py RANK STORE
"""

import copy
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import hfnn
from hfnn import recipe


class Block(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.act = nn.GELU()
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(self.act(self.up(self.norm(x))))


def gradients(model, x):
    """Gradients of every parameter, whole."""
    model(x).square().mean().backward()
    return [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in model.parameters()]


def main(rank, store):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=1)
    torch.manual_seed(0)
    plain, x = Block(), torch.randn(4, 8, 32)
    want = gradients(copy.deepcopy(plain), x)
    model = hfnn.convert(plain, prefer="memory")

    recipe.counter.reset()
    replicated = gradients(nn.parallel.DistributedDataParallel(copy.deepcopy(model)), x)
    assert recipe.counter.taken == 2, recipe.counter.taken
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    # Their weights are DTensors now: torch's own product runs there, and the norm stays converted.
    split = gradients(parallelize_module(copy.deepcopy(model), init_device_mesh("cpu", (1,)), plan), x)
    for got in (replicated, split):
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
