"""Scripts unaware of haiscale, switched over by the environment alone (haiscale/auto.py)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import ranks

SCRIPTS = Path(__file__).parent / "scripts"
WORKER = Path(__file__).parents[1] / "workers" / "switched.py"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
NAME = "haiscale.auto: "
NEEDS = {
    "trainer": "accelerate",
    "accelerated": "accelerate",
    "fabric": "lightning_fabric",
    "lightning_trainer": "lightning",
}
WRAPPER = "DistributedDataParallel is haiscale's where it takes the model"
LINE = f"2 ranks on 1 host run on hfreduce instead of gloo; {WRAPPER}; "
UNCONVERTED = "models are not converted (HAISCALE_AUTO=convert does)"


def launched(tmp_path, *command, auto=None, **more):
    """What a command of two ranks printed: (losses, lines of haiscale.auto, [operations, bytes] by rank)."""
    env = {name: value for name, value in os.environ.items() if name != "HAISCALE_AUTO"}
    env |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HAISCALE_BUCKETS": "", "COUNTED": str(tmp_path)}
    env |= {"PYTHONPATH": str(SCRIPTS / "counted"), **({} if auto is None else {"HAISCALE_AUTO": auto}), **more}
    done = subprocess.run(
        [*map(str, command)], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=ranks.soon(120)
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    (losses,) = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    lines = [line.partition(NAME)[2] for line in done.stderr.splitlines() if NAME in line]
    return losses, lines, [json.loads((tmp_path / str(rank)).read_text()) for rank in range(2)]


@pytest.mark.parametrize(
    "script",
    [
        "ddp",
        *(pytest.param(script, marks=pytest.mark.slow) for script in NEEDS),
        pytest.param("sharded", marks=pytest.mark.rest),
    ],
)
def test_scripts(script, tmp_path):
    pytest.importorskip(NEEDS.get(script, "torch"))
    command = [*TORCHRUN, SCRIPTS / f"{script}.py"]
    stock, said, counts = launched(tmp_path, *command)
    assert not said and counts == [[0, 0]] * 2
    switched, said, counts = launched(tmp_path, *command, auto="1")
    assert said == [LINE + UNCONVERTED]
    assert all(operations > 0 and nbytes > 0 for operations, nbytes in counts)
    assert switched == pytest.approx(stock, rel=1e-5) and len(stock) >= 8


@pytest.mark.rest
def test_off_wins_and_convert_converts(tmp_path):
    """With a script that imports haiscale.auto itself."""
    script = tmp_path / "own.py"
    script.write_text(f"import haiscale.auto\n{(SCRIPTS / 'ddp.py').read_text()}")
    off, said, counts = launched(tmp_path, *TORCHRUN, script, auto="0")
    assert not said and counts == [[0, 0]] * 2
    on, said, counts = launched(tmp_path, *TORCHRUN, script, auto="convert")
    assert said == [LINE + "what it wraps is converted by hfnn"] and counts[1][1] > 0
    assert on == pytest.approx(off, rel=1e-4)


AUTO = {"HAISCALE_AUTO": "1", "HAISCALE_BUCKETS": ""}


def told(results):
    """What rank 0 printed; the others print nothing. The ranks' results must be equal."""
    own, *others = results
    assert not any(other.pop("lines") for other in others)
    lines = [line.removeprefix(NAME) for line in own.pop("lines")]
    assert all(other == own for other in others), results
    return lines


@pytest.mark.parametrize("debug", ["OFF", pytest.param("DETAIL", marks=pytest.mark.slow)])
def test_what_scripts_ask_torch_for_is_answered_as_ever(debug, tmp_path):
    results = ranks.run(WORKER, "as_ever", 2, tmp_path, env={**AUTO, "TORCH_DISTRIBUTED_DEBUG": debug})
    lines = told(results)
    (found, _) = results
    assert found.pop("twice") == "ValueError: trying to initialize the default process group twice!"
    assert "neither" in found.pop("unknown") and found.pop("nccl") is None, "there are no GPUs"
    assert found == {
        "default": "hfreduce", "backend": "gloo", "identity": True, "groups": ["hfreduce"] * 3, "odd": "hfreduce",
        "options": "gloo", "tagged": "gloo", "alone": "hfreduce", "none": "hfreduce",
        "both": ["hfreduce", "cpu:gloo,cuda:gloo"], "devices": ["hfreduce", "cpu:gloo,cuda:nccl"],
    }  # fmt: skip
    assert lines[0] == LINE + UNCONVERTED


@pytest.mark.slow
def test_a_store_that_outlives_its_groups(tmp_path):
    results = ranks.run(WORKER, "one_store", 2, tmp_path, env=AUTO)
    first, last = told(results)
    assert results[0]["found"] == ["hfreduce", "hfreduce", "gloo"] and first == LINE + UNCONVERTED
    assert last.startswith(
        "nothing is switched, 2 ranks on 1 host stay on gloo: on rank 1, ImportError: hfreduce was not built; run pip"
    )


@pytest.mark.rest
def test_what_cannot_be_on_all_ranks_is_on_none(tmp_path):
    lacking = ranks.run(WORKER, "unequal", 2, tmp_path, env=lambda rank: {"HAISCALE_AUTO": str(1 - rank)})
    (line,) = told(lacking)
    assert lacking[0] == {"runs on": "gloo"}
    assert line.startswith("nothing is switched, 2 ranks stay on gloo: not all ranks came in time, or not all have HAI")
    unmet = ranks.run(WORKER, "unmet", 2, tmp_path, env=AUTO)
    (line,) = told(unmet)
    torch = "torch.nn.parallel.distributed"
    assert unmet[0] == {"runs on": "gloo", "again": "gloo", "wrapper": torch, "afterwards": "hfreduce"}
    assert line.startswith("nothing is switched, 2 ranks stay on gloo: ")


@pytest.mark.slow
def test_torch_names_of_the_wrapper(tmp_path):
    results = ranks.run(WORKER, "wrapped", 2, tmp_path, env=AUTO)
    lines = told(results)
    found, torch = results[0], "torch.nn.parallel.distributed"
    assert found.pop("class") == ["haiscale.ddp.as_torch", "DistributedDataParallel"]
    assert found.pop("explains") == "DDP of Sequential, 2 ranks of hfreduce"
    assert found.pop("subclass") == ["switched", "Own"], "a script's own class is left alone"
    assert found.pop("sparse") == [torch, [[0.5, 0.5], [0.5, 0.5], [0.0, 0.0], [0.0, 0.0]]]
    assert found.pop("unequal") == [torch, [1.0, 1.0]] and found.pop("one side") == torch
    assert "not needed when a module doesn't have any parameter" in found.pop("nothing to train")
    assert "missing 1 required positional argument: 'module'" in found.pop("no module")
    assert "can only be None or contain a single element" in found.pop("devices")
    assert found.pop("unfrozen") is None
    assert found and all(value is True for value in found.values()), found
    assert lines[0] == LINE + UNCONVERTED
    assert lines[1].startswith(
        "DistributedDataParallel of Sequential is torch's: on rank 0, 0.weight (of an Embedding)"
    )
    assert lines[2].startswith(
        "DistributedDataParallel of Sequential is torch's: on rank 1, 0.weight (of an Embedding)"
    )
    assert (
        lines[3].startswith("DistributedDataParallel of Linear is torch's: ")
        and "ranks wrap different models" in lines[3]
    )


OFF = """
import sys, time
from importlib.metadata import entry_points
import torch
(point,) = [p for p in entry_points(group="torch.backends") if p.name == "haiscale"]
del sys.modules["_haiscale_autoload"]
del torch.distributed.Backend.HFREDUCE
before, begin = set(sys.modules), time.process_time()
point.load()()
print((time.process_time() - begin) * 1e3, sorted(set(sys.modules) - before))
"""


@pytest.mark.parametrize("value", [None, "", "0", "maybe"])
def test_import_torch_pays_little(value):
    """The backend is registered without an import. An invalid value of the variable is reported."""
    env = {name: own for name, own in os.environ.items() if name != "HAISCALE_AUTO"}
    env |= {} if value is None else {"HAISCALE_AUTO": value}
    program = (
        OFF
        if value != "maybe"
        else "import torch; assert torch.nn.parallel.DistributedDataParallel.__new__ is object.__new__"
    )
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)
    if value == "maybe":
        assert done.stderr == "HAISCALE_AUTO=maybe is none of 0, 1, convert, capture: nothing is switched\n"
        return
    taken, modules = done.stdout.strip().split(" ", 1)
    assert eval(modules) == ["_haiscale_autoload"] and float(taken) < 5
    lazy = "import torch.distributed as d; d.init_process_group('hfreduce', store=d.HashStore(), rank=0, world_size=1)"
    subprocess.run([sys.executable, "-c", f"{lazy}; d.barrier()"], env=env, check=True)
