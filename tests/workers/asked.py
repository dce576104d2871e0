"""A program that saves when a signal asks it to, in one process or on ranks; see tests/haiscale/test_signals.py.

python asked.py FOLDER SIGNAL NAMES     one loader after the other; each prints "running NAME PIDS", later "saved"
"""

import json
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path

import torch

import hfrecord
from haiscale import checkpoint

torch.set_num_threads(1)
torch.utils.data._utils.worker.MP_STATUS_CHECK_INTERVAL = 0.2  # until a worker sees that its rank has gone
torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = 0.2  # until a worker is killed


class Samples(torch.utils.data.Dataset):
    """While the file `hang` exists, samples do not come."""

    def __init__(self, hang=None):
        self.hang = hang

    def __len__(self):
        return 4000

    def __getitem__(self, index):
        if self.hang and self.hang.exists():
            time.sleep(1000)
        return torch.ones(2)


def records(folder):
    if not Path(folder, "records").exists():
        with hfrecord.DatasetWriter(f"{folder}/records", {"x": "float32[2]"}) as writer:
            for _ in range(4000):
                writer.write({"x": torch.ones(2).numpy()})
    return f"{folder}/records"


def stateful(**options):
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(Samples(), 1, **options)


def loader(name, folder):
    kind, *rest = name.split("-")
    options = {"num_workers": 2, "multiprocessing_context": rest[0] if rest else None}
    if kind == "torch":
        return torch.utils.data.DataLoader(Samples(), 1, **options)
    if kind == "persistent":
        return torch.utils.data.DataLoader(Samples(), 1, **options, persistent_workers=True)
    if kind in ("hangs", "kept"):
        return torch.utils.data.DataLoader(Samples(Path(folder, "hang")), 1, **options)
    return stateful(**options) if kind == "stateful" else hfrecord.DataLoader(records(folder), 1, **options)


def train(name, folder, number):
    """Goes on for some batches after the signal, so that workers that it ended would be missed."""
    asked, left = checkpoint.on_signal(number), 20
    model, hang = torch.nn.Linear(2, 1), Path(folder, "hang")
    hang.unlink(missing_ok=True)
    for step, _ in enumerate(batches := iter(loader(name, folder))):
        time.sleep(0.005)
        if step == 3:
            pids = [process.pid for process in multiprocessing.active_children()]
            print("running", name, json.dumps(pids), flush=True)
        left -= left < 20 or asked()
        if left == 1:
            hang.touch()  # for what is asked of the workers from now on
        if left == 0:
            checkpoint.save(f"{folder}/{name}", model, step=step)
            return batches


if __name__ == "__main__":
    folder, number, *names = sys.argv[1:]
    if "RANK" in os.environ:
        torch.distributed.init_process_group("gloo")
    for name in names:
        kept = train(name, folder, signal.Signals[number])
        if name == "kept":  # until Python ends, which also ends processes of others
            multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,), daemon=True).start()
        else:
            del kept
            for process in multiprocessing.active_children():
                process.join(10)  # killed, but not gone yet
        print("saved", len(multiprocessing.active_children()), flush=True)
    if "RANK" in os.environ:
        torch.distributed.destroy_process_group()
