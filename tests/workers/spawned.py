"""Functions for haiscale.spawn, see tests/haiscale/test_launch.py. Importing this does not import torch."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock


def note(folder, name, text=""):
    Path(folder, name).write_text(str(text))


def mark(local, folder):
    """Notes the environment, the CPUs and the arguments."""
    keys = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS"]
    note(folder, f"rank{local}", repr(({key: os.environ[key] for key in keys}, sorted(os.sched_getaffinity(0)))))
    print(f"out of {local}")
    print(f"error of {local}", file=sys.stderr)


def fails(local, folder, how, patient):
    """Rank 1 fails; then the others do, or never."""
    note(folder, f"pid{local}", os.getpid())
    if local == 1:
        while not Path(folder, "pid0").exists():
            time.sleep(0.01)
        note(folder, "failing")
        if how == "raises":
            raise ValueError("what was given\nand more")
        if how == "exits":
            sys.exit(7)
        os.kill(os.getpid(), signal.SIGKILL)
    while not (patient and Path(folder, "failing").exists()):
        time.sleep(0.01)
    time.sleep(0.5 + 0.3 * local)
    raise RuntimeError("rank 1 is gone")


def waits(local, folder, answer):
    """Waits for a signal, which ends it with this exit code; its child must not outlive it."""

    def handle(number, frame):
        note(folder, f"signal{local}", number)
        if number == signal.SIGTERM and answer is not None:
            sys.exit(answer)

    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, handle)
    child = subprocess.Popen(["sleep", "60"])
    note(folder, f"child{local}", child.pid)
    note(folder, f"pid{local}", os.getpid())
    try:
        while True:
            time.sleep(0.05)
    finally:
        child.kill()


def groups(local, folder):
    """haiscale.init and make_subgroups on four ranks."""
    import torch
    import torch.distributed as dist

    import haiscale

    torch.set_num_threads(1)
    found = {"early": _error(lambda: haiscale.make_subgroups())}
    device = haiscale.init(timeout=30)
    found["device"], found["backend"] = str(device), dist.get_backend()
    dp_group, pp_group = haiscale.make_subgroups(pp_size=2)
    found["pair"] = [dist.get_process_group_ranks(group) for group in (dp_group, pp_group)]
    groups = haiscale.make_subgroups(pp_size=2, fsdp_size=2)
    named = (groups.pp_group, groups.dp_group, groups.fsdp_group)
    found["three"] = [dist.get_process_group_ranks(group) for group in named]
    found["mesh"] = [groups.mesh.mesh_dim_names, groups.mesh.mesh.tolist(), tuple(groups.mesh["dp", "fsdp"].shape)]
    x = torch.tensor([float(local)])
    dist.all_reduce(x, group=groups.fsdp_group)
    found["sum"] = x.item()
    found["wrong"] = [_error(lambda: haiscale.make_subgroups(**sizes)) for sizes in WRONG]  # noqa: B023
    from haiscale.mesh import own_gpus, sibling

    found["own"] = {}  # GPUs, identified as by torch
    with (
        mock.patch.object(dist, "is_nccl_available", lambda: True),
        mock.patch.object(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=device.index)),
    ):
        for name, gpus in {"four": range(4), "shared": (0, 1, 2, 0), "none": None, "one has none": (0, 1, 2)}.items():
            mine = torch.device("cuda", gpus[local]) if gpus and local < len(gpus) else torch.device("cpu")
            found["own"][name] = own_gpus(dist.group.WORLD, mine)
    found["sibling"] = str(sibling(pp_group)._get_backend(device).options._timeout)
    dist.new_group([0])
    dist.new_group([2, 3], use_local_synchronization=True) if local > 1 else None
    found["sums"] = []  # on siblings, where ranks have different numbers of groups
    for group in (sibling(dist.group.WORLD), sibling(dist.group.WORLD, "gloo"), sibling(dp_group), sibling(pp_group)):
        x = torch.tensor([float(local)])
        dist.all_reduce(x, group=group)
        found["sums"].append(x.item())
    note(folder, f"groups{local}", repr(found))
    dist.barrier()  # rank 0 hosts the store
    dist.destroy_process_group()


def measures(local, case, entries, options, folder):
    """Replaces `measure` of bench/wrappers.py, without a model: some providers fail on rank 1."""
    for entry in entries:
        if local == 0:
            note(folder, "doing", json.dumps(entry))
        else:
            while not Path(folder, "doing").exists() or Path(folder, "doing").read_text() != json.dumps(entry):
                time.sleep(0.01)
            if entry[0] == "torch-ddp":
                raise NotImplementedError("not on this machine")
            if entry[0] == "haiscale-fsdp":
                os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60 if entry[0] in ("haiscale-ddp", "torch-ddp", "haiscale-fsdp") else 0.2)
    row = {
        "us": [100 * (local + 1)],
        "alone_us": [],
        "peak_gib": None,
        "static_gib": 0.0,
        "loss": 5.0,
        "predicted_us": None,
    }
    note(folder, f"found.{local}", json.dumps([{"entry": entry, **row} for entry in entries]))


WRONG = [{"pp_size": 3}, {"pp_size": 2, "dp_size": 4}, {"pp_size": 0}, {"fsdp_size": True}]


def _error(call):
    try:
        call()
    except ValueError as error:
        return str(error)
