"""A training that meets faults, and the same training without any: what the cases of matrix.py run.

`launches` is a launcher whose ranks are forked from it, because a new interpreter would import for seconds. Each rank
notes what it does in a file, line by line, until it is killed.
"""

import hashlib
import json
import operator
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from functools import partial
from pathlib import Path

import torch
import torch._dynamo  # optimizers import it, which takes a second
import torch.distributed as dist
from torch import nn

import hfreduce.backend
import hfreduce.plan
from haiscale import _start, launch, processes, survive
from haiscale.ddp import DDP

SAMPLES, BATCH, TOTAL, FAULT_STEP, SEED = 48, 12, 6, 2, 7
WRAPPERS = {"haiscale": partial(DDP, bucket_cap_mb=0.01), "torch": nn.parallel.DistributedDataParallel}


class Net(nn.Module):
    """With random numbers, and with a buffer that each forward changes and reads."""

    def __init__(self, meets):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(8, 64), nn.Linear(64, 64), nn.Linear(64, 1)
        self.register_buffer("seen", torch.zeros(()))
        self.meets = meets

    def forward(self, x):
        self.seen += 1
        x = self._watched("backward, between averages", self.first(x).relu())
        self.meets("forward")
        x = self.second(nn.functional.dropout(x, 0.2, self.training)).relu()
        return self._watched("backward, before averages", self.third(x)) / self.seen

    def _watched(self, moment, x):
        x.register_hook(lambda gradient: self.meets(moment))
        return x


def build(meets):
    torch.manual_seed(SEED)
    model = Net(meets)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2)


def sample(indices):
    x = torch.stack([torch.randn(8, generator=torch.Generator().manual_seed(index)) for index in indices])
    return x, x.sum(1, keepdim=True)


def digest(objects):
    model, optimizer, scheduler = objects
    found = hashlib.sha1(json.dumps([scheduler.last_epoch, optimizer.param_groups[0]["lr"]]).encode())
    states = [x for p in model.parameters() for x in (optimizer.state[p]["exp_avg"], optimizer.state[p]["exp_avg_sq"])]
    for x in (*model.state_dict().values(), *states):
        found.update(x.detach().numpy().tobytes())
    return found.hexdigest()


def belongings(before=None):
    """Open files, threads, mapped shared memory. before: waits a while until there is no more than that. A thread more
    is right: a group on hfreduce has one or two for its asynchronous operations."""
    until = time.monotonic() + 1
    while True:
        mapped = Path("/proc/self/maps").read_text().count("memfd:")
        found = [len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), mapped]
        if before is None:
            return [found[0], found[1] + 1, found[2]]
        if all(map(operator.le, found, before)) or time.monotonic() > until:
            return found
        time.sleep(0.01)


# The training that survives


class Notes:
    """Lines of JSON, each written at once."""

    def __init__(self, folder, number):
        self._file = os.open(Path(folder, f"notes.{number}"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.number, self.belongings = number, None

    def __call__(self, what, **more):
        line = {"what": what, "process": self.number, "at": time.monotonic(), **more}
        os.write(self._file, json.dumps(line).encode() + b"\n")


def strike(fault):
    """The fault happens to this process."""
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault == "stop and continue":
        if os.fork() == 0:
            time.sleep(0.3)
            os.kill(os.getppid(), signal.SIGCONT)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGSTOP)
        os.wait()
    elif fault == "exception":
        raise ValueError("the loss is nan")
    elif fault == "exit":
        os._exit(0)
    elif fault == "memory":
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (1 << 30, most))
        torch.empty(1 << 33, dtype=torch.uint8)
    elif fault == "slow":
        time.sleep(0.3)
    elif fault == "launcher killed":
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(30)


def trains(case, notes, run):
    """What each process does in each generation."""
    step, reached = -1, []

    def meets(moment):
        for number, fault in enumerate(case["strikes"]):
            here = notes.number in fault["victims"] and fault["moment"] == moment
            if here and run.generation == fault["generation"] and step in (FAULT_STEP, -1) and number not in reached:
                reached.append(number)
                notes("fault")
                strike(fault["fault"])

    notes("generation", number=run.generation, rank=run.rank, size=run.size, reason=run.reason)
    if run.generation == 1:
        meets("recovering, before the state")
    objects = run.keep(lambda: build(meets))
    model, optimizer, scheduler = objects
    model.meets = meets
    if run.generation == 1:
        meets("recovering, after the state")
    begins = run.step
    replicas = WRAPPERS[case["wrapper"]](model)
    batches = run.batches(SAMPLES, BATCH, seed=SEED)
    for step, indices in zip(run.steps(TOTAL, seed=SEED), batches, strict=False):
        notes("samples", step=step, generation=run.generation, indices=indices)
        if step == begins + 1:
            now = belongings(notes.belongings)
            notes.belongings = notes.belongings or now
            notes("has", belongings=now)
        meets("data")
        x, y = sample(indices)
        loss = nn.functional.mse_loss(replicas(x), y) * batches.weight
        loss.backward()
        meets("backward, after averages")
        with run.commit():
            meets("commit, before the step")
            optimizer.step()
            meets("commit, after the step")
            scheduler.step()
        optimizer.zero_grad()
        notes("commit", step=step, generation=run.generation)
        meets("after the step")
    step = -1
    meets("after training")
    notes("end", generation=run.generation, digest=digest(objects))


def rank_program(case, folder, number):
    notes = Notes(folder, number)
    notes("process", pid=os.getpid())
    survive.run(partial(trains, case, notes), backend=case["backend"], timeout=case["timeout"])


class Process:
    """A forked child that runs a function, with the attributes of Python's process objects. output: a file."""

    def __init__(self, function, output=None):
        parent, self._code, self.pid = os.getpid(), None, os.fork()
        if self.pid == 0:
            _become(function, parent, output)

    @property
    def exitcode(self):
        if self._code is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if ended else None
        return self._code

    def join(self, timeout):
        until = time.monotonic() + timeout
        while self.exitcode is None and time.monotonic() < until:
            time.sleep(0.002)


def _become(function, parent, output):
    code = 1
    try:
        _start.die_with(parent)
        os.setsid()
        if output:
            with open(output, "w") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
        code = function()
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code or 0)


class Forked(processes.Rank):
    """A rank that runs a function in a forked process."""

    def __init__(self, program, local, variables, pipes):
        def function():
            os.environ.update(variables)
            program(int(variables["RANK"]))

        super().__init__(int(variables["RANK"]), Process(function))
        self.wakes = [os.pidfd_open(self.process.pid)]


def launches(case, folder, defect):
    """The launcher of a case. defect: the name of one that is planted (defects.py)."""
    if defect:
        import defects

        getattr(defects, defect)()
    tempfile.tempdir = os.environ["TMPDIR"] = f"{folder}/tmp"
    variables = launch.environment(case["size"])
    variables += [variables[0] | {"RANK": str(case["size"] + i)} for i in range(case["spares"])]
    start = partial(Forked, partial(rank_program, case, folder))
    ranks = launch.Ranks(start, variables, None, bind_numa=False, spares=case["spares"])
    try:
        ranks.join()
    except launch.RankFailed as failed:
        print(failed)
        return 1
    return 0


# The same in order


def in_order(rank, size, wrapper, backend, begin, end, state):
    """A rank of a training from step `begin` to `end`, from the file `state` if begin > 0, and then written to it."""
    dist.init_process_group(backend, init_method=f"file://{state}.store", rank=rank, world_size=size)
    objects = build(lambda moment: None)
    if begin:
        for value, saved in zip(objects, torch.load(state, weights_only=False), strict=True):
            value.load_state_dict(saved)
    model, optimizer, scheduler = objects
    replicas = WRAPPERS[wrapper](model)
    for step in range(begin, end):
        torch.manual_seed((SEED * 1_000_003 + step) * 1_000_003 + rank)
        indices = batch(step)[BATCH * rank // size : BATCH * (rank + 1) // size]
        x, y = sample(indices)
        (nn.functional.mse_loss(replicas(x), y) * (len(indices) * size / BATCH)).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0:
        torch.save([value.state_dict() for value in objects], state)
        Path(f"{state}.digest").write_text(digest(objects))


def batch(step):
    """The samples of a global batch."""
    epoch, place = divmod(step, SAMPLES // BATCH)
    order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(SEED * 1_000_003 + epoch))
    return order[place * BATCH :][:BATCH].tolist()


hfreduce.backend.native()
