"""A rank of haiscale.fsdp that dies or stops: what the other one is told, and when.

Each scenario runs in a child of this process, which has already imported torch but has no group yet.
"""

import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from fsdp_models import ids, loss_of, net

import hfreduce
from haiscale.fsdp import FSDP

VICTIM, STEP, TIMEOUT = 1, 2, 2.0
SCENARIOS = [(name, place) for name in ("SIGKILL", "SIGSTOP") for place in ("forward", "backward")]


def scenarios(rank, size, store):
    """{"SIGKILL in forward": [seconds, error, error of the next call], ...} on the surviving rank."""
    found = {}
    for name, place in SCENARIOS:
        title = f"{name} in {place}"
        result = Path(f"{store}.{title}")
        child = os.fork()
        if child == 0:
            try:
                train(rank, size, f"{store}.{title}.store", getattr(signal, name), place, result)
            finally:
                os._exit(0)
        if rank == VICTIM:
            wait_for(result)
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        if rank != VICTIM:
            found[title] = result.read_text().split("\n\n")
    return found


def train(rank, size, store, number, place, result):
    torch.set_num_threads(1)
    timeout = timedelta(seconds=TIMEOUT if number == signal.SIGSTOP else 30)
    dist.init_process_group("hfreduce", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timeout)
    model = FSDP(net(depth=4))
    step = 0

    def here(*_):
        if rank == VICTIM and step == STEP:
            os.kill(os.getpid(), number)

    block = model.module.blocks[1]
    if place == "forward":
        block.register_forward_pre_hook(here)
    else:
        block.down.register_full_backward_hook(here)
    errors, took = [], 0.0
    while len(errors) < 2:
        began = time.monotonic()
        try:
            loss_of(model, ids(rank, step)).backward()
            step += 1
        except dist.DistBackendError as error:
            errors.append(str(error))
            took = took or time.monotonic() - began
    assert hfreduce.operations()
    ready = result.with_suffix(".part")
    ready.write_text("\n\n".join([str(took), *errors]))
    ready.rename(result)


def wait_for(path, timeout=30):
    deadline = time.monotonic() + timeout
    while not path.exists():
        assert time.monotonic() < deadline, f"nobody wrote {path}"
        time.sleep(0.02)
