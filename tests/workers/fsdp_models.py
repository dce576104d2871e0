"""Models for the tests of haiscale.fsdp, and training beside torch's fully_shard."""

import os
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

DEVICE = os.environ.get("FSDP_DEVICE", "cpu")
VOCABULARY, WIDTH = 61, 36
BF16, FP32 = torch.bfloat16, torch.float32
warnings.filterwarnings("ignore")  # torch's own deprecations


class Block(nn.Module):
    def __init__(self, width=WIDTH, checkpointed=None):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(3 * width, width)
        self.checkpointed = checkpointed  # None, or use_reentrant

    def inner(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))

    def forward(self, x):
        return (
            self.inner(x) if self.checkpointed is None else checkpoint(self.inner, x, use_reentrant=self.checkpointed)
        )


class Net(nn.Module):
    """Blocks between an embedding and a head; sizes not divisible by two or four ranks."""

    def __init__(self, depth=3, tied=True, **options):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(**options) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def net(**options):
    torch.manual_seed(0)
    return Net(**options).to(DEVICE)


def ids(rank, step, vocabulary=VOCABULARY):
    return torch.randint(vocabulary, (2, 12), generator=torch.Generator().manual_seed(100 * step + rank)).to(DEVICE)


def loss_of(model, batch):
    return nn.functional.cross_entropy(model(batch).float().flatten(0, 1), batch.flatten().roll(1))


def torchs(model, blocks=None, mesh=None, precision=None, **options):
    """fully_shard, with the same units."""
    mesh = mesh or init_device_mesh(DEVICE, (dist.get_world_size(),))
    for block in model.blocks if blocks is None else blocks:
        fully_shard(block, mesh=mesh, mp_policy=MixedPrecisionPolicy(*(precision or ())), **options)
    return fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(*(precision or ())), **options)


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def check_gradients(model, reference):
    """Bitwise equal, or None on both sides."""
    for (name, p), q in zip(model.module.named_parameters(), reference.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), f"{name}: {p.grad} against {q.grad}"
        if p.grad is not None:
            assert torch.equal(whole(p.grad), whole(q.grad)), name


def check_parameters(model, reference):
    for (name, p), q in zip(model.module.named_parameters(), reference.parameters(), strict=True):
        assert torch.equal(whole(p.detach()), whole(q.detach())), name


def follow(
    model, reference, rank, steps=4, *, loss=loss_of, clip=None, each=None, optimizer=None, vocabulary=VOCABULARY
):
    """Trains both. Losses, and sometimes gradients, are bitwise equal in every step, and parameters at the end."""
    make = optimizer or (lambda params: torch.optim.AdamW(params, lr=1e-2))
    ours, theirs = make(model.parameters()), make(reference.parameters())
    for step in range(steps):
        batch = ids(rank, step, vocabulary)
        got, want = loss(model, batch), loss(reference, batch)
        assert torch.equal(got, want), f"step {step}: loss {got} against {want}"
        for value in (got, want):
            value.backward()
        if step % 10 == 0 or step == steps - 1:
            check_gradients(model, reference)
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
            nn.utils.clip_grad_norm_(reference.parameters(), clip)
        for stepper in (ours, theirs):
            stepper.step()
            stepper.zero_grad()
    check_parameters(model, reference)
