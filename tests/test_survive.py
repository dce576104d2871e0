"""haiscale.survive: the fault matrix, and what is refused. Real processes, real faults."""

import datetime
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch.distributed as dist

from haiscale import coordinator, launch, survive
from haiscale.processes import Rank
from haiscale.survive import connection, training

ROOT = Path(__file__).parents[1]
MATRIX = ROOT / "tests/faults/matrix.py"


def run(*command, **options):
    """The exit code, the output, and the lines of the launcher."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-P", *map(str, command)],
        capture_output=True,
        text=True,
        timeout=240,
        env=environment,
        **options,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("seed", [0, 20, 40])
def test_the_fault_matrix(seed):
    """20 cases each. `python tests/faults/matrix.py --cases 600` runs more, and `--only SEED -v` shows one."""
    code, out, error = run(MATRIX, "--cases", 20, "--seed", seed)
    assert code == 0, out + error


def test_planted_defects_are_found():
    code, out, error = run(MATRIX, "--defects")
    assert code == 0, out + error


def test_the_example(tmp_path):
    """Spares take the places of those that it kills: the parameters are those of a run without faults."""
    found = []
    for options, arguments in (["--spare", 2], []), ([], ["--kill"]):
        start = "-m", "haiscale.launch", "--survive", "--nproc", 3, *options
        code, out, error = run(*start, ROOT / "examples/survive.py", *arguments, cwd=tmp_path)
        assert code == 0, out + error
        assert error.count("was killed by SIGKILL") == (2 if options else 0)
        found.append(re.search(r"trained 60 steps; parameters (\w+)", out)[1])
    assert found[0] == found[1]


def launched(folder, body, *options):
    """Runs a script of two ranks: `train` is `body`."""
    script = folder / "script.py"
    script.write_text(PROGRAM + body)
    return run("-m", "haiscale.launch", "--survive", "--nproc", 2, *options, script, cwd=folder)


PROGRAM = """
import os, signal, torch
import torch.distributed as dist
from torch import nn
from haiscale import survive
from haiscale.ddp import DDP
from haiscale.fsdp import FSDP

def build():
    model = nn.Linear(2, 2)
    return model, torch.optim.SGD(model.parameters(), 0.1)

def refused(call, *arguments, **options):
    try:
        call(*arguments, **options)
    except Exception as error:
        print("REFUSED", type(error).__name__, error)
    else:
        raise AssertionError("accepted")
"""

MISUSES = """
def train(run):
    refused(lambda: next(run.steps(3)))
    refused(run.keep, lambda: (nn.Linear(2, 2), [3]))
    refused(run.keep, lambda: (DDP(nn.Linear(2, 2)),))
    refused(run.batches, 100, 1)
    refused(run.batches, 10, 20)
    refused(run.commit().__enter__)
    model, optimizer = run.keep(build)
    refused(optimizer.step)
    steps = run.steps(3)
    next(steps)
    refused(next, steps)
    steps = run.steps(3)
    for _ in steps:
        with run.commit():
            pass
        refused(run.commit().__enter__)
    FSDP(model)
    refused(lambda: next(run.steps(4)))

refused(survive.run, train, least=3)
refused(survive.run, train, least=0)
refused(survive.run, train, attempts=0)
refused(survive.run, train, timeout=0)
refused(survive.run, train, backend="nccl")
survive.run(train)
refused(survive.run, train)
"""


def test_misuse_is_refused_with_a_sentence(tmp_path):
    code, out, error = launched(tmp_path, MISUSES)
    assert code == 0, out + error
    found = re.findall(r"\[rank 0\] REFUSED (.*)", out)
    wanted = [
        "ValueError least=3 is not accepted: it is a number of ranks, and there are 2",
        "ValueError least=0 is not accepted",
        "ValueError attempts=0 is not accepted",
        "ValueError timeout=0 is not accepted",
        "ValueError backend='nccl' is not accepted",
        "RuntimeError call run.keep(build) before run.steps",
        "TypeError run.keep(build): build returned list, which has no state_dict",
        "TypeError run.keep(build): build returned DDP, which belongs to a process group",
        "ValueError a global batch of 1 samples is not accepted: each of 2 ranks needs one",
        "ValueError 10 samples are not accepted: they do not fill a global batch of 20",
        "RuntimeError run.commit() belongs to a step of run.steps, once in each",
        "RuntimeError call optimizer.step() within `with run.commit():`",
        "RuntimeError step 0 has ended without `with run.commit():`",
        *["RuntimeError run.commit() belongs to a step of run.steps, once in each"] * 3,
        "RuntimeError the parameters of Linear are others than run.keep returned",
        "RuntimeError survive.run was called before in this process",
    ]
    assert len(found) == len(wanted), "\n".join(found)
    for text, beginning in zip(found, wanted, strict=True):
        assert text.startswith(beginning), text


ENDS = {
    "too few": (
        """
def train(run):
    run.keep(build)
    if run.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
survive.run(train, least=2)
""",
        "training ends: 1 of 2 ranks are left, and least=2; rank 1 (pid ",
    ),
    "no step is finished": (
        """
def train(run):
    run.keep(build)
    raise dist.DistBackendError(f"generation {run.generation} fails")
survive.run(train, attempts=2)
""",
        "training ends: 2 generations in a row have finished no step, and attempts=2; rank ",
    ),
    "a rank that does not begin": (
        """
if os.environ["RANK"] == "1":
    raise SystemExit(3)
survive.run(build)
""",
        "training ends: a rank has failed before training began; rank 1 (pid ",
    ),
    "the program does not call it": (
        "os._exit(5 * int(os.environ['RANK']))",
        "--survive had no effect: the program has not",
    ),
}


@pytest.mark.parametrize("why", ENDS)
def test_training_ends_with_the_reasons(tmp_path, why):
    body, reason = ENDS[why]
    code, out, error = launched(tmp_path, body)
    assert code not in (0, None) and reason in error, out + error
    if why == "no step is finished":
        assert "generation 0 fails" in error and "generation 1 fails" in error


SWALLOWS = """
def train(run):
    model, optimizer = run.keep(build)
    replicas = DDP(model)
    for step in run.steps(6):
        if step == 2 and run.generation == 0 and run.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            replicas(torch.ones(1, 2)).sum().backward()
        except Exception:
            pass
        with run.commit():
            optimizer.step()
        optimizer.zero_grad()
        print("finished", run.generation, step)
survive.run(train)
"""


def test_code_that_catches_the_error_finishes_no_step(tmp_path):
    code, out, error = launched(tmp_path, SWALLOWS)
    assert code == 0, out + error
    found = re.findall(r"\[rank 0\] finished (\d) (\d)", out)
    assert found == [("0", "0"), ("0", "1"), *(("1", str(step)) for step in range(2, 6))], out + error


@pytest.mark.parametrize(
    "text", ["[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4",
             "Application timeout caused pair closure", "hfreduce: nobody has set the key 'a' in the store"],
)  # fmt: skip
def test_errors_of_communication_without_a_type(text):
    launcher = connection.Launcher(None, 1.0)
    try:
        try:
            raise RuntimeError(text)
        except RuntimeError as cause:
            raise ValueError("the step failed") from cause
    except ValueError as error:
        assert training._is_fault(error, launcher)
    assert not training._is_fault(RuntimeError("the loss is nan"), launcher)


class Alive:
    """A process that has not ended."""

    exitcode, pid = None, 1


def test_the_store_of_a_generation():
    """As torch's stores. An answer that comes too late is not taken for that of the next question."""
    center = coordinator.Coordinator(1, print, None, None)
    client, stop = connection.Launcher(center.connect(), 5.0), threading.Event()
    served = threading.Thread(target=lambda: [center.look([Rank(0, Alive)]) for _ in iter(stop.is_set, True)])
    served.start()
    try:
        client.begin(client.next(coordinator.Report(0)))
        store = connection.Store(client)
        prefixed = dist.PrefixStore("a", store)
        prefixed.set("key", "value")
        assert prefixed.get("key") == b"value" and prefixed.check(["key"]) and not prefixed.check(["key", "other"])
        assert store.add("count", 2) == 2 and store.add("count", 3) == 5 and store.num_keys() == 2
        assert store.compare_set("key", b"", b"first") == b"first"
        assert store.compare_set("key", b"no", b"second") == b"first"
        with pytest.raises(dist.DistStoreError, match="has not answered wait"):
            store.wait(["late"], datetime.timedelta(seconds=0.05))
        store.set("late", b"now")
        assert store.get("late") == b"now" and store.delete_key("late") and not store.delete_key("late")
    finally:
        stop.set()
        served.join()


def test_without_the_launcher(monkeypatch):
    monkeypatch.delenv("HAISCALE_SURVIVE", raising=False)
    with pytest.raises(RuntimeError, match=r"start this program by `python -m haiscale\.launch --survive"):
        survive.run(lambda run: None)


BAD = {
    "--nproc 2 --spare 1 .": "--spare 1 needs --survive",
    "--nproc 2 --survive --spare -1 .": "-1 spares are not accepted",
    "--nproc 1 --survive --nnodes 2 --master a:1 .": "--survive is for the ranks of one host",
}


@pytest.mark.parametrize("arguments", BAD)
def test_bad_arguments_of_the_launcher(arguments, capsys):
    with pytest.raises(SystemExit):
        launch.parse(arguments.split())
    assert BAD[arguments] in capsys.readouterr().err
