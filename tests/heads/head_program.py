"""Models with an output layer of the user's own, and what programs that train them have in common."""

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from hfnn.deferred.head import FEWEST

VOCABULARY, WIDTH, ROWS, SEQ, STEPS = 512, 16, 4, 64, 5
assert ROWS * SEQ * VOCABULARY >= FEWEST


class Tied(nn.Module):
    """As nanoGPT: the loss is in forward, and the head has the embedding's weight."""

    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.wte.weight = self.lm_head.weight

    def hidden(self, x):
        x = self.wte(x)
        return x + self.mlp(self.norm(x))

    def forward(self, x, y=None):
        logits = self.lm_head(self.hidden(x))
        loss = None if y is None else F.cross_entropy(logits.view(-1, VOCABULARY), y.view(-1), ignore_index=-1)
        return logits, loss


class Last(Tied):
    """The head is the last layer, with a bias, and nothing else tells what it is."""

    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY - 8, WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY)


def batches(steps=STEPS):
    g = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x, y = (torch.randint(VOCABULARY - 8, (ROWS, SEQ), generator=g) for _ in range(2))
        y[0, :3] = -1
        yield x, y


@contextlib.contextmanager
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


PROGRAMS = {}


def program(function):
    PROGRAMS[function.__name__] = function
    return function


def train(model, loss_of, optimizer=None):
    """A loop over `loss_of(model, x, y)`; gives the losses and the parameters."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), 0.5)
    losses = []
    for x, y in batches():
        loss = loss_of(model, x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [*losses, *(p.detach() for p in model.parameters())]


def cross_entropy(logits, y, **options):
    return F.cross_entropy(logits.reshape(-1, VOCABULARY), y.reshape(-1), ignore_index=-1, **options)
