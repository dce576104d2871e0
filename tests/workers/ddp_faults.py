"""Rank programs with a killed or stopped rank, for tests/haiscale/test_ddp.py: one child process per case."""

import json
import os
import signal
import time
import traceback
from pathlib import Path

import pytest
import torch
import torch._dynamo  # once, instead of in each child
import torch.distributed as dist
from ddp_models import mlp, vectors
from process_groups import init
from torch import nn

from haiscale.ddp import DDP
from haiscale.fsdp import FSDP

CULPRIT, PATIENCE = 1, 2.0  # seconds until a group gives up


class Failing(nn.Module):
    """A model whose rank sends itself a signal in the middle of `where`."""

    def __init__(self):
        super().__init__()
        self.first, self.last, self.fail = mlp(2, norm=True), mlp(2), None

    def forward(self, x):
        x = self.first(x)
        where, how = self.fail or (None, None)
        if where == "forward":
            how()
        if where == "backward":
            x.register_hook(lambda gradient: how())
        return self.last(x)


def one(rank, size, store, where, sign, wire=None):
    """The survivor's report; ends the culprit."""
    init(rank, size, store, timeout=PATIENCE if sign == signal.SIGSTOP else 30)
    model = DDP(Failing(), bucket_cap_mb=0.001, wire_dtype=wire and getattr(torch, wire))
    for step in range(2):
        model(*vectors(step, rank)).square().mean().backward()
    dist.barrier()

    def fail():
        Path(f"{store}.at").write_text(str(time.monotonic()))
        os.kill(os.getpid(), sign)

    stage = "forward"
    if rank == CULPRIT:
        if where == "between":
            fail()
        model.module.fail = where, fail
    with pytest.raises(dist.DistBackendError) as caught:
        output = model(*vectors(3, rank))
        stage = "backward"
        output.square().mean().backward()
    at = time.monotonic()
    with pytest.raises(dist.DistBackendError) as again:
        model(*vectors(4, rank))
    return {
        "stage": stage, "text": str(caught.value), "at": at, "again": str(again.value) == str(caught.value),
        "soon": time.monotonic() - at,
    }  # fmt: skip


def run(rank, size, store, cases):
    """cases: {name: [where, signal, wire_dtype if any]}. The survivors' reports, with the time of the fault."""
    torch.set_num_threads(1)
    found = {}
    for name, case in cases.items():
        path = f"{store}.{name}"
        child = os.fork()
        if child == 0:
            code = 1
            try:
                Path(f"{path}.{rank}").write_text(json.dumps(one(rank, size, path, *case)))
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        story = Path(f"{path}.{1 - CULPRIT}")
        deadline = time.monotonic() + 20
        while not (story.exists() and story.read_text()) and time.monotonic() < deadline:
            time.sleep(0.01)
        if rank == CULPRIT:
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        found[name] = json.loads(story.read_text()) if rank != CULPRIT else float(Path(f"{path}.at").read_text())
    return found


def alone(rank, size, store):
    """The errors on rank 0, which evaluates alone by DDP and by FSDP."""
    init(rank, size, store)
    messages = []
    for wrapper in (DDP, FSDP):
        group = dist.new_group(range(size))
        model = wrapper(mlp(2, norm=True), process_group=group)
        model(*vectors(0, rank)).sum().backward()
        dist.barrier()
        with pytest.raises(dist.DistBackendError) as caught:
            if rank == 0:
                model.eval()(*vectors(1, rank))
            dist.barrier(group)
        messages.append(str(caught.value))
    return messages
