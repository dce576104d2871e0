"""One gloo rank of linear losses over a vocabulary split among ranks, and over weights sharded by fully_shard."""

import torch
import torch.distributed as dist
from gloo import process_group
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import hfnn

TOKENS, WIDTH, VOCABULARY = 150, 16, 51
F = hfnn.functional


def problem():
    torch.manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, dtype=torch.float64)
    weight, bias = torch.randn(VOCABULARY, WIDTH, dtype=torch.float64), torch.randn(VOCABULARY, dtype=torch.float64)
    target = torch.randint(VOCABULARY, (TOKENS,))
    target[3] = -100
    return hidden, weight, bias, target


def gradients(y, inputs, **options):
    dy = [torch.linspace(1, 2, t.numel(), dtype=t.dtype).view(t.shape) for t in y]
    return torch.autograd.grad(y, inputs, dy, **options)


def shared_vocabulary(rank, world_size):
    """Each rank has a different number of the weight's rows, and every rank gets the gradient of hidden."""
    hidden, weight, bias, target = problem()
    rows = torch.arange(VOCABULARY).tensor_split(world_size)[rank]
    options = {"softcap": 5.0, "logit_scale": 0.5}
    for reduction, z_loss, max_bytes in (("mean", 0.0, None), ("none", 0.1, None), ("sum", 0.1, 40 * 26 * 8)):
        whole = [t.clone().requires_grad_() for t in (hidden, weight, bias)]
        want = F.linear_cross_entropy(
            whole[0], whole[1], target, whole[2], reduction=reduction, z_loss=z_loss, prefer="memory", **options
        )
        mine = [t.clone().requires_grad_() for t in (hidden, weight[rows], bias[rows])]
        got = F.linear_cross_entropy(
            mine[0], mine[1], target, mine[2], reduction=reduction, z_loss=z_loss, max_bytes=max_bytes,
            group=dist.group.WORLD, **options,
        )  # fmt: skip
        torch.testing.assert_close(got, want)
        dwhole = gradients([want], whole)
        for _ in range(2):
            dmine = gradients([got], mine, retain_graph=True)
            for g, w in zip(dmine, (dwhole[0], dwhole[1][rows], dwhole[2][rows]), strict=True):
                torch.testing.assert_close(g, w)
    whole = [t.clone().requires_grad_() for t in (hidden, weight)]
    mine = [t.clone().requires_grad_() for t in (hidden, weight[rows])]
    want = F.linear_log_probs(*whole, target, prefer="memory", **options)
    got = F.linear_log_probs(*mine, target, group=dist.group.WORLD, **options)
    dwhole, dmine = gradients(want, whole), gradients(got, mine)
    for g, w in zip((*got, *dmine), (*want, dwhole[0], dwhole[1][rows]), strict=True):
        torch.testing.assert_close(g, w)


def fully_sharded(rank, world_size):
    """Different data on each rank; gradients are the mean over the ranks, for whole and for sharded weights."""
    hidden, weight, _, target = problem()
    mesh = init_device_mesh("cpu", (world_size,))
    part = torch.arange(TOKENS).tensor_split(world_size)[rank]

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Linear(WIDTH, WIDTH, bias=False).double()
            self.head = nn.Linear(WIDTH, VOCABULARY, bias=False).double()
            with torch.no_grad():
                self.body.weight.copy_(torch.eye(WIDTH))
                self.head.weight.copy_(weight)

        def forward(self, x, target):
            return F.linear_cross_entropy(self.body(x), self.head.weight, target, prefer="memory", reduction="sum")

    plain = Model()
    (plain(hidden, target) / world_size).backward()
    for apart in (False, True):
        model = Model()
        if apart:  # a group of its own: sharded where the loss reads it
            fully_shard(model.head, mesh=mesh)
        fully_shard(model, mesh=mesh)
        model(hidden[part], target[part]).backward()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p.grad.full_tensor(), q.grad)


def main(rank, world_size, store):
    with process_group(rank, world_size, store):
        shared_vocabulary(rank, world_size)
        fully_sharded(rank, world_size)
