"""Models that tests/workers/ddp.py wraps, and their inputs by step and rank."""

import os

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as functional
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH = 16
DEVICE = torch.device(os.environ.get("DDP_DEVICE", "cpu"))


def numbers(step, rank, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1000 * step + rank)).to(DEVICE)


def vectors(step, rank):
    return (numbers(step, rank, 4, WIDTH),)


def images(step, rank):
    return (numbers(step, rank, 4, 3, 8, 8),)


def tokens(step, rank):
    return (torch.randint(0, 61, (2, 12), generator=torch.Generator().manual_seed(1000 * step + rank)).to(DEVICE),)


def mlp(depth=4, norm=False):
    layers = []
    for _ in range(depth):
        layers += [nn.Linear(WIDTH, WIDTH), *([nn.BatchNorm1d(WIDTH)] if norm else []), nn.GELU()]
    return nn.Sequential(*layers)


class Language(nn.Module):
    """A transformers decoder, from tokens to its loss."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids):
        return self.model(ids, labels=ids)


def gpt2():
    """The head is tied to the embedding."""
    import transformers  # takes seconds, and not all cases need it

    config = transformers.GPT2Config(
        n_embd=32, n_layer=4, n_head=2, vocab_size=61, n_positions=16, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    return Language(transformers.GPT2LMHeadModel(config))


def llama():
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=32, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1, intermediate_size=64,
        vocab_size=61, max_position_embeddings=16,
    )  # fmt: skip
    return Language(transformers.LlamaForCausalLM(config))


class SyncBatchNorm(nn.Module):
    """Computes torch.nn.SyncBatchNorm, which supports GPUs only: with collectives in forward and in backward."""

    def __init__(self, width):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, x):
        dims = (0, 2, 3)
        sums = torch.stack([x.mean(dims), x.square().mean(dims)])
        mean, square = functional.all_reduce(sums) / dist.get_world_size()
        self.mean.lerp_(mean.detach(), 0.1)
        x = (x - mean.view(-1, 1, 1)) * (square - mean.square() + 1e-5).rsqrt().view(-1, 1, 1)
        return x * self.weight.view(-1, 1, 1) + self.bias.view(-1, 1, 1)


class Residual(nn.Module):
    def __init__(self, width, norm):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False), norm(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False), norm(width),
        )  # fmt: skip

    def forward(self, x):
        return torch.relu(x + self.body(x))


def resnet(norm=nn.BatchNorm2d):
    """Convolution weights are channels-last."""
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), Residual(8, norm), Residual(8, norm), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(8, 5),
    )  # fmt: skip
    return model.to(memory_format=torch.channels_last)


class Branches(nn.Module):
    """A trunk and two branches; `choose(step)` selects 0, 1 or both (2). Another part is never used."""

    def __init__(self, choose):
        super().__init__()
        self.trunk, self.branches, self.never = mlp(1), nn.ModuleList([mlp(1), mlp(2)]), nn.Linear(3, 3)
        self.choose, self.step = choose, 0

    def forward(self, x):
        which, self.step = self.choose(self.step), self.step + 1
        x = self.trunk(x)
        return sum(branch(x) for i, branch in enumerate(self.branches) if which in (i, 2))


class Checkpointed(nn.Module):
    """A layer shared by several checkpoints, and layers with one checkpoint each."""

    def __init__(self, reentrant, shared=True):
        super().__init__()
        self.first, self.layers, self.shared = nn.Linear(WIDTH, WIDTH), mlp(3), nn.Linear(WIDTH, WIDTH)
        self.reentrant, self.uses = reentrant, shared

    def part(self, layer, x):
        return self.shared(layer(x)) if self.uses else layer(x)

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = checkpoint(self.part, layer, x, use_reentrant=self.reentrant)
        return x if self.uses else self.shared(x)


class Attention(nn.Module):
    """torch.nn.MultiheadAttention reads its out_proj's parameters without calling it."""

    def __init__(self):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), nn.MultiheadAttention(WIDTH, 2)
        self.mlp = mlp(2)

    def forward(self, x):
        y = self.norm(x)[:, None]
        return self.mlp(x + self.attention(y, y, y)[0][:, 0])


class Wide(nn.Module):
    """1.9 MiB large, because torch's compiler has a minimum bucket of 1 MiB; it also does not start at a Sequential."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(WIDTH, 500), nn.GELU(), nn.Linear(500, 500), nn.GELU(), nn.Linear(500, 500)
        )  # fmt: skip

    def forward(self, x):
        return self.layers(x)
