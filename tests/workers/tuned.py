"""Ranks for tests/test_tune_ranks.py: one of two differs from the other, and both must choose the same."""

import json
import os
import time
from pathlib import Path

import torch
from gloo import process_group
from torch import nn

import hfnn
from hfnn.tuning.candidates import Candidate


class Planted(Candidate):
    """Runs a function of (the model's forward, images)."""

    def __init__(self, call):
        super().__init__("fast")
        object.__setattr__(self, "call", call)

    def enter(self, model):
        vars(model)["_compiled_call_impl"] = lambda x: self.call(model._call_impl, x)

    def leave(self, model):
        vars(model).pop("_compiled_call_impl", None)


class Net(nn.Linear):
    """Slow, unless `quick` is set."""

    def forward(self, x):
        if not torch.is_tensor(x):
            return super().forward(x[0]).square().mean()
        torch.randn(600, 600) @ torch.randn(600, 600)
        return super().forward(x).square().mean()


def choose(call, budget=60, **how):
    torch.manual_seed(0)
    given = [torch.randn(8, 16) for _ in range(5)]
    how = {"among": [Planted(call)], "budget": budget, "steps": 10**9, "show": False, **how}
    return hfnn.tune(Net(16, 16), given, **how)


def told(found):
    return [found.choice, found.rows[1].why]


def hang(forward, x):
    while True:
        time.sleep(0.01)


def right(forward, x):
    return forward([x])


def fail(model, x):
    raise ZeroDivisionError("here")


def tell(store, rank, found):
    """Writes the result as the end of a rank's process does, for ranks that end earlier."""
    Path(f"{store}.result.{rank}").write_text(json.dumps(found))


def tuned(rank, world_size, store):
    with process_group(rank, world_size, store):
        wrong = choose((lambda forward, x: forward(x) * 1.001) if rank else right, cache=False)
        hangs = choose(hang if rank else right, budget=2, cache=False)
        try:
            choose(right, loss=fail if rank else None, cache=False)
        except (RuntimeError, ZeroDivisionError) as error:
            fails = str(error)
        tell(store, rank, [told(wrong), told(hangs), fails])


def kept(rank, world_size, store):
    os.environ["XDG_CACHE_HOME"] = f"{store}.cache{rank}"
    with process_group(rank, world_size, store):
        first, second = choose(right), choose(right)
        assert (Path(f"{store}.cache{rank}") / "hfnn/tune.json").exists() == (rank == 0)
        tell(store, rank, [first.choice, first.kept, second.choice, second.kept])
