"""haiscale.checkpoint: one format for all layouts, on 4, 2 and 1 ranks. The rank programs are in
workers/checkpoints.py.

A folder's name says how it was saved: layout, optimizer, ranks. The result of a case is the error, or None.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import ranks
import torch
from torch import nn

from haiscale import checkpoint, partial

WORKER = Path(__file__).parents[1] / "workers" / "checkpoints.py"
SAVED_ON_4 = [
    ("torch_ddp", "adamw"),
    ("ddp", "8bit"),
    ("torch_fsdp2", "adamw"),
    ("torch_fsdp2", "8bit"),
    ("fsdp", "adamw"),
    ("fsdp", "8bit"),
    ("torch_fsdp2", "several"),
    ("torch_hsdp", "sgd"),
    ("stages", "adamw"),
]
SOURCES = [f"{layout}-{optimizer}-4" for layout, optimizer in SAVED_ON_4]


@pytest.fixture(scope="module")
def worker(one_thread):
    """The worker's functions in this process: one rank, without a process group."""
    return ranks.loaded(WORKER)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def saved(folder):
    """Results of saving on four ranks, by case, for each rank."""
    return ranks.run(WORKER, "saves", 4, folder, timeout=120, target=str(folder), combinations=SAVED_ON_4)


@pytest.fixture(scope="module")
def loaded(folder, saved):
    """Results of loading on two ranks."""
    layouts = ["ddp", "fsdp", "torch_fsdp2"]
    return ranks.run(WORKER, "loads", 2, folder, timeout=120, target=str(folder), combinations=SOURCES, layouts=layouts)


def right(results, case):
    wrong = {rank: result[case] for rank, result in enumerate(results) if result[case] is not None}
    assert not wrong, "\n".join(f"rank {rank}: {text}" for rank, text in wrong.items())


@pytest.mark.parametrize("case", [f"{layout} {optimizer}" for layout, optimizer in SAVED_ON_4])
@pytest.mark.rest
def test_saving_on_four_ranks_leaves_training_alone(saved, case):
    right(saved, case)


@pytest.mark.parametrize("layout", ["ddp", "fsdp", "torch_fsdp2"])
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.slow
def test_goes_on_on_two_ranks_bit_for_bit(loaded, source, layout):
    right(loaded, f"{source} in {layout}")


@pytest.mark.parametrize("source", SOURCES)
def test_goes_on_on_one_rank_bit_for_bit(worker, folder, saved, source):
    right([worker.loads(0, 1, None, folder, [source], ["plain"])], f"{source} in plain")


@pytest.mark.parametrize(
    "case", ["resumes ddp", "resumes fsdp", "resumes pipeline", "misfits", "stops", "cannot_write"]
)
def test_on_two_ranks(loaded, case):
    right(loaded, case)


@pytest.mark.slow
def test_a_save_killed_at_any_point_harms_nothing(tmp_path):
    """Wherever the save is killed, a whole checkpoint remains, of the previous step or of this one."""
    target = tmp_path / "killed"
    (found,) = ranks.run(WORKER, "killed", 1, tmp_path, target=str(target))
    assert len(found) > 8 and not found[-1]["killed"], found
    for trial in found:
        assert trial["step"] in (trial["before"], trial["before"] + 1) and trial["values"] == [trial["step"]], trial
    steps = [trial["step"] - trial["before"] for trial in found]
    assert {0, 1} == set(steps), "killed before and after the new one got its name"
    assert any(any(name.startswith(".partial") for name in trial["there"]) for trial in found)
    # The next save removes the remains of killed ones.
    assert found[-1]["there"] == [f"step-{found[-1]['step']:08d}"], found[-1]


@pytest.mark.parametrize(
    ("layout", "number"),
    [
        pytest.param("ddp", signal.SIGKILL, id="ddp-killed"),
        pytest.param("fsdp", signal.SIGSTOP, marks=pytest.mark.slow, id="fsdp-stopped"),
        pytest.param("ddp", signal.SIGSTOP, marks=pytest.mark.rest, id="ddp-stopped"),
        pytest.param("fsdp", signal.SIGKILL, marks=pytest.mark.rest, id="fsdp-killed"),
    ],
)
def test_a_rank_that_is_gone_while_saving(worker, tmp_path, number, layout):
    """The other rank is told which one; a new run continues from the last checkpoint."""
    target, timeout = tmp_path / "saved", ranks.soon(2.0)
    options = {"target": str(target), "timeout": timeout, "layout": layout}
    with ranks.start(WORKER, "saves_for_ever", 2, tmp_path, **options) as group:
        group.until("saves")
        time.sleep(0.05)
        begin = time.monotonic()
        group.signal(1, number)
        group.until("told", ranks=[0])
        found = json.loads(Path(f"{group.store}.told").read_text())
    assert found["at"] - begin < (1 if number == signal.SIGKILL else timeout + 2), found
    assert "rank 1 (" in found["text"] and ("died" if number == signal.SIGKILL else "Timed out") in found["text"], found
    first, wrong = worker.goes_on(target)
    assert first >= 3 and wrong is None


@pytest.fixture
def folder_of(tmp_path):
    """folder_of(steps, **options): a folder with these steps saved, in turn."""

    def save(*steps, **options):
        for step in steps:
            checkpoint.save(tmp_path / "a", nn.Linear(2, 2), step=step, **options)
        return tmp_path / "a"

    return save


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_keeps_so_many(folder_of):
    assert names(folder_of(1, 5, 12, 20, keep=2)) == ["step-00000012", "step-00000020"]


def test_going_back_removes_nothing_newer(folder_of):
    """Continuing from step 5 keeps later checkpoints, and never loses the one just saved."""
    assert names(folder_of(5, 12, 20)) == ["step-00000005", "step-00000012", "step-00000020"]
    folder = folder_of(8, keep=1)
    assert names(folder) == ["step-00000008", "step-00000012", "step-00000020"]


def test_the_same_step_again_takes_its_place(folder_of):
    folder = folder_of(5, 5, 5)
    assert names(folder) == ["step-00000005.2"] and checkpoint.latest(folder).name == "step-00000005.2"


SAVES = """
import sys
from pathlib import Path
import torch
from haiscale import checkpoint
folder, first = Path(sys.argv[1]), int(sys.argv[2])
(folder / f"ready{first}").touch()
while len(list(folder.glob("ready*"))) < 2:
    pass
model = torch.nn.Sequential(*[torch.nn.Linear(300, 300) for _ in range(6)])
for step in range(first, first + 8):
    checkpoint.save(folder / "saved", model, step=step)
"""


@pytest.mark.slow
def test_two_jobs_in_one_folder(tmp_path):
    """Each saves as if it were alone."""
    command = [sys.executable, "-P", "-c", SAVES, tmp_path]
    jobs = [subprocess.Popen([*command, first], stderr=subprocess.PIPE, text=True) for first in ("0", "100")]
    errors = [job.communicate(timeout=120)[1] for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0], "\n".join(errors)
    assert names(tmp_path / "saved") == [f"step-{first + i:08d}" for first in (0, 100) for i in range(8)]


def test_two_jobs_save_one_step(folder_of, monkeypatch):
    """The later one finds the name taken, and uses the next one."""
    folder = folder_of(5)
    seen = iter([[], []])  # what the other has written since this one looked
    monkeypatch.setattr(checkpoint, "_checkpoints", lambda _, real=checkpoint._checkpoints: next(seen, real(folder)))
    folder_of(5)
    assert names(folder) == ["step-00000005", "step-00000005.1"]


def test_only_what_is_abandoned_is_removed(folder_of, monkeypatch):
    folder = folder_of(1)
    with subprocess.Popen(["sleep", "60"]) as alive, subprocess.Popen(["true"]) as zombie:
        mine, number, began = partial.claim("00000002"), os.getpid(), partial._start(os.getpid())
        given_up = partial.claim("00000003")
        partial.release(given_up)

        def of(process, start, machine=None):
            return f".partial-00000004-host-{machine or partial._machine()}-{process}-{start}-{process:08x}"

        kept = [mine, of(alive.pid, partial._start(alive.pid)), of(number, began, "0" * 8), ".partial-00000005-ab"]
        while partial._start(zombie.pid) is not None:
            time.sleep(0.01)
        gone = [given_up, of(alive.pid, partial._start(alive.pid) + 1), of(zombie.pid, began), of(2**22 + 1, began)]
        stale = [of(number, began, "1" * 8), ".partial-step-00000006-cd"]
        for name in (*kept, *gone, *stale):
            (folder / name).mkdir()
            (folder / name / "part").touch()
        for name in stale:
            for path in (folder / name, folder / name / "part"):
                os.utime(path, (0, time.time() - partial.STALE - 60))
        folder_of(7)
        assert names(folder) == sorted([*kept, "step-00000001", "step-00000007"])
        alive.kill()
    partial.release(mine)


def test_a_save_that_failed_is_removed_by_the_next(folder_of, monkeypatch):
    folder = folder_of(1)
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="rank 0: OSError: no room"):
        patch.setattr(checkpoint.dcp.FileSystemWriter, "write_data", no_room)
        folder_of(2)
    folder_of(3)
    assert names(folder) == ["step-00000001", "step-00000003"]


def no_room(*_):
    raise OSError("no room")


def test_what_is_no_checkpoint_is_not_found(folder_of, tmp_path):
    assert checkpoint.latest(tmp_path / "missing") is None
    with pytest.raises(FileNotFoundError, match=r"no checkpoint in .*missing: give one named step-"):
        checkpoint.load(tmp_path / "missing", nn.Linear(2, 2))
    folder = folder_of(3)
    for name in (".partial-00000009-ab", "step-9", "step-00000009-old", "notes.txt"):
        (folder / name).mkdir()
    assert checkpoint.latest(folder) == folder / "step-00000003"
    assert checkpoint.load(folder / "step-00000003", nn.Linear(2, 2))["step"] == 3


def test_bad_arguments(tmp_path):
    model = nn.Linear(2, 2)
    for options, why in (({"step": -1}, "step=-1"), ({"step": 1.0}, "step=1.0"), ({"step": 1, "keep": 0}, "keep=0")):
        with pytest.raises(ValueError, match=why):
            checkpoint.save(tmp_path, model, **options)
    with pytest.raises(ValueError, match=r"parameter 0 of group 0 of SGD, of shape \(2, 2\), is none of the model's"):
        checkpoint.save(tmp_path, model, torch.optim.SGD(nn.Linear(2, 2).parameters()), step=1)
    with pytest.raises(ValueError, match="weight is on the meta device"):
        checkpoint.save(tmp_path, nn.Linear(2, 2, device="meta"), step=1)
    assert not names(tmp_path)


class Noting(torch.optim.SGD):
    """Keeps a history, in a list, under a name with a dot."""

    def step(self):
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p].setdefault("norms.of.steps", []).append(p.detach().norm())


def stepped_once(model):
    optimizer = Noting(model.parameters(), lr=torch.tensor(0.5))
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


@pytest.mark.parametrize("async_", [False, True])
def test_what_training_changes_later_is_saved_as_it_was(tmp_path, monkeypatch, async_):
    """Extras, a learning rate that is a tensor, and tensors nested in states."""
    model = nn.Linear(2, 2)
    optimizer, log, best = stepped_once(model), ["step 1"], {"loss": torch.ones(1)}
    norms = [norm.clone() for norm in optimizer.state[model.weight]["norms.of.steps"]]
    gate, write = threading.Event(), checkpoint._write
    monkeypatch.setattr(checkpoint, "_write", lambda *given: (gate.wait(30 * async_), write(*given))[1])
    saving = checkpoint.save(tmp_path, model, optimizer, step=1, async_=async_, log=log, best=best)
    log.append("step 2")
    best["loss"].zero_()
    optimizer.param_groups[0]["lr"].zero_()
    optimizer.state[model.weight]["norms.of.steps"][0].zero_()
    gate.set()
    if async_:
        saving.result(60)
    other = nn.Linear(2, 2)
    fresh = Noting(other.parameters(), lr=torch.tensor(0.1))
    extra = checkpoint.load(tmp_path, other, fresh)
    assert extra == {"step": 1, "log": ["step 1"], "best": {"loss": torch.ones(1)}}
    assert fresh.param_groups[0]["lr"] == 0.5
    assert fresh.state[other.weight]["norms.of.steps"] == norms and norms[0] > 0


def test_what_cannot_be_pickled_is_an_error_of_the_save(tmp_path):
    future = checkpoint.save(tmp_path, nn.Linear(2, 2), step=1, async_=True, log=threading.Lock())
    with pytest.raises(RuntimeError, match="rank 0: TypeError: cannot pickle"):
        future.result(60)
    with pytest.raises(RuntimeError, match="rank 0: TypeError: cannot pickle"):
        checkpoint.save(tmp_path, nn.Linear(2, 2), step=1)
    assert not names(tmp_path) or checkpoint.latest(tmp_path) is None


def test_a_failure_of_the_thread_is_raised(tmp_path):
    """By the future, and by the next save; the save after that succeeds."""
    (tmp_path / "file").touch()
    future = checkpoint.save(tmp_path / "file", nn.Linear(2, 2), step=1, async_=True)
    with pytest.raises(FileExistsError):
        future.result(30)
    with pytest.raises(FileExistsError):
        checkpoint.save(tmp_path / "a", nn.Linear(2, 2), step=1)
    checkpoint.save(tmp_path / "a", nn.Linear(2, 2), step=1)
