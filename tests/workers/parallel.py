"""One gloo rank: a converted model, parallelised, has the gradients of the plain model."""

import copy

import torch
from gloo import process_group
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import hfnn
from hfnn.core import node as recipe


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


def fsdp2(model, mesh):
    """The norm in a group of its own, then with its consumer in another, then all in one."""
    for groups in (["norm"], ["norm", "query"], []):
        sharded = copy.deepcopy(model)
        for name in groups:
            fully_shard(getattr(sharded, name), mesh=mesh, reshard_after_forward=True)
        yield fully_shard(sharded, mesh=mesh, reshard_after_forward=True)


def ddp(model, mesh):
    yield nn.parallel.DistributedDataParallel(model)


def tensor_parallel(model, mesh):
    """The split weights are DTensors: torch's own product runs there; the norm and query stay converted."""
    yield parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


# The function, and the least number of recipes taken.
WAYS = {"fsdp2": (fsdp2, 2), "ddp": (ddp, 3), "tensor_parallel": (tensor_parallel, 1)}


def gradients(model, x):
    """Full gradients of every parameter."""
    model(x).square().mean().backward()
    return [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in model.parameters()]


def main(rank, world_size, store, way):
    with process_group(rank, world_size, store):
        torch.manual_seed(0)
        plain, x = Block(), torch.randn(4, 16, 32, requires_grad=True)
        want = gradients(copy.deepcopy(plain), x)
        parallelise, least = WAYS[way]
        for model in parallelise(hfnn.convert(plain, prefer="memory"), init_device_mesh("cpu", (world_size,))):
            recipe.counter.reset()
            got = gradients(model, x)
            assert recipe.counter.taken >= least, recipe.counter.taken
            for a, b in zip(got, want, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
