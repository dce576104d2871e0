"""One of two gloo ranks: a converted model under FSDP2 has the gradients of the whole model.

python fsdp2.py RANK STORE
"""

import copy
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import hfnn
from hfnn import recipe


class Block(nn.Module):
    """A norm whose output two linear layers share."""

    def __init__(self, width=32):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.query = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.act = nn.GELU()
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        h = self.norm(x)
        return x + self.query(h) + self.down(self.act(self.up(h)))


def gradients(model, x):
    """Gradients of every parameter, whole."""
    model(x).square().mean().backward()
    return [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in model.parameters()]


def main(rank, store):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    whole, x = hfnn.convert(Block(), prefer="memory"), torch.randn(4, 16, 32)
    want = gradients(copy.deepcopy(whole), x)
    for groups in (["norm"], ["norm", "query"], []):
        model = copy.deepcopy(whole)
        for name in groups:
            fully_shard(getattr(model, name), mesh=mesh, reshard_after_forward=True)
        fully_shard(model, mesh=mesh, reshard_after_forward=True)
        recipe.counter.reset()
        got = gradients(model, x)
        assert recipe.counter.taken >= 2, recipe.counter.taken
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
    dist.barrier()  # a rank that leaves early takes the other's connections down
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
