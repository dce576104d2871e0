"""Stages that die or stop in training: what the others are told, and whether a new run resumes from what was saved.

Each scenario trains in children of these processes, which have already imported torch but have no group yet, with its
own folder of checkpoints. Scenarios of the same place run concurrently.
"""

import itertools
import json
import os
import signal
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch._dynamo  # once, instead of in each child
import torch.distributed as dist
from pipeline_models import Place, batch, layers
from torch.nn.functional import mse_loss

import hfreduce  # noqa: F401  the backend
from haiscale import checkpoint
from haiscale.pipeline import messages

STEP, PATIENCE = 3, 2.0  # the step that fails; seconds until a group gives up
# Where a stage stops, and the schedule used.
PLACES = {
    "forward": "PipeDream",
    "backward": "ZeroBubble-H1",
    "message": "PipeDream",
    "optimizer": "GPipe",
    "save": "PipeDream",
}
SIGNS = ("SIGKILL", "SIGSTOP")
ROWS = {"message": 1 << 17}  # for messages that do not leave at once: 2 MiB


def name_of(place, victim, sign):
    return f"{place}, rank {victim}, {sign}"


def chosen(size, half):
    """[(place, victim, sign)] by place: half of the scenarios, with every pair of the three."""
    for number, place in enumerate(PLACES):
        yield [(place, victim, SIGNS[(number + victim + half) % 2]) for victim in range(size)]


def scenarios(rank, size, store, half):
    """{scenario: this rank's report}: the survivors' errors, the victim's time, and the state afterwards."""
    torch.set_num_threads(1)
    found, names = {}, []
    for here in chosen(size, half):
        children = [child(rank, size, store, *scenario) for scenario in here]
        for (place, victim, sign), pid in zip(here, children, strict=True):
            name = name_of(place, victim, sign)
            if rank == victim:
                wait_for(survivors(f"{store}.{name}", size, victim))
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            found[name] = json.loads(Path(f"{store}.{name}.{rank}").read_text())
            names.append(name)
    for name, wrong in zip(names, resumed(rank, size, store, names), strict=True):
        found[name]["resumed"] = wrong
    return found


def child(rank, size, store, place, victim, sign):
    pid = os.fork()
    if pid:
        return pid
    path = f"{store}.{name_of(place, victim, sign)}"
    try:
        story = until_told(rank, size, path, place, victim, getattr(signal, sign))
    except BaseException:
        story = {"raised": traceback.format_exc()[-2000:]}
    write(Path(f"{path}.{rank}"), story)
    wait_for(survivors(path, size, victim))  # otherwise the others might report the end of this one
    os._exit(0)


def survivors(path, size, victim):
    return [Path(f"{path}.{other}") for other in range(size) if other != victim]


def until_told(rank, size, path, place, victim, sign):
    begin(rank, size, f"{path}.store")
    rows = ROWS.get(place, 16)
    pp, optimizer = made(rank, size, PLACES[place], rows)
    for step in range(1, STEP):
        train(pp, optimizer, step, rows)
        checkpoint.save(f"{path}.saved", pp, optimizer, step=step)
    dist.barrier()
    dist.group.WORLD.set_timeout(timedelta(seconds=PATIENCE if sign == signal.SIGSTOP else 30))
    if rank == victim:
        sabotage(place, pp, optimizer, lambda **more: fail(Path(f"{path}.{rank}"), sign, **more))
    try:
        train(pp, optimizer, STEP, rows)
        checkpoint.save(f"{path}.saved", pp, optimizer, step=STEP)
    except dist.DistBackendError as error:
        told, first = time.monotonic(), str(error)
    try:
        train(pp, optimizer, STEP, rows)
    except dist.DistBackendError as error:
        return {"text": first, "at": told, "again": str(error), "later": time.monotonic() - told}


def fail(path, sign, **more):
    write(path, {"at": time.monotonic(), **more})
    os.kill(os.getpid(), sign)


def sabotage(place, pp, optimizer, fail):
    """Stops this rank in the middle of the step: at the second microbatch, or with a message under way."""
    turns = itertools.count()

    def at_the_second(*_):
        if next(turns) == 1:
            fail()

    if place == "forward":
        pp.module[0].register_forward_pre_hook(at_the_second)
    elif place == "backward":
        pp.module[0].register_full_backward_hook(at_the_second)
    elif place == "message":
        send = messages.Sender.send

        def sends(sender, tensors):
            send(sender, tensors)
            turn = next(turns)  # of four; a busy machine may have sent one before it is checked
            left = not sender._leaving or sender._leaving[-1][0].is_completed()
            if turn == 3 or (turn and not left):
                fail(left=left)

        messages.Sender.send = sends
    elif place == "optimizer":
        optimizer.register_step_pre_hook(lambda *_: fail())
    else:
        checkpoint.dcp.FileSystemWriter.write_data = lambda *_: fail()


def begin(rank, size, store):
    dist.init_process_group("hfreduce", store=dist.FileStore(store, size), rank=rank, world_size=size)


def made(rank, size, schedule, rows):
    pp = Place(dist.group.WORLD, rank, size).pipeline(layers(12), schedule, 4)
    return pp, torch.optim.AdamW(pp.parameters(), lr=0.01)


def train(pp, optimizer, step, rows):
    x, y = (part.repeat(rows // 16, 1) for part in batch(step))
    pp.forward_backward(x, criterion=mse_loss, labels=y, keep_outputs=False)
    optimizer.step()
    optimizer.zero_grad()


def resumed(rank, size, store, names):
    """For each scenario: the step at which a new run resumes, and what differs from an uninterrupted run."""
    begin(rank, size, f"{store}.resumed")
    found, whole = [], {}
    for name in names:
        place = name.partition(",")[0]
        rows = ROWS.get(place, 16)
        if place not in whole:
            pp, optimizer = made(rank, size, PLACES[place], rows)
            for step in range(1, STEP + 2):
                train(pp, optimizer, step, rows)
            whole[place] = dict(pp.named_shards())
        pp, optimizer = made(rank, size, PLACES[place], rows)
        last = checkpoint.load(f"{store}.{name}.saved", pp, optimizer)["step"]
        for step in range(last + 1, STEP + 2):
            train(pp, optimizer, step, rows)
        wrong = [key for key, p in pp.named_shards() if not torch.equal(p, whole[place][key])]
        found.append([last, len(whole[place]), wrong])
    dist.destroy_process_group()
    return found


def write(path, story):
    """Atomic: the file is complete once it exists."""
    path.with_name(path.name + ".part").write_text(json.dumps(story))
    path.with_name(path.name + ".part").rename(path)


def wait_for(paths, timeout=40):
    deadline = time.monotonic() + timeout
    while not all(path.exists() for path in paths) and time.monotonic() < deadline:
        time.sleep(0.01)
