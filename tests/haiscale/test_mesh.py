"""haiscale.init, make_subgroups, and the cores that ranks get."""

import ast
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

import haiscale
from haiscale import binding, mesh

WORKERS = Path(__file__).parents[1] / "workers"


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    """What four ranks returned."""
    folder = tmp_path_factory.mktemp("groups")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(WORKERS)
        import spawned

        haiscale.spawn(spawned.groups, 4, args=(str(folder),))
    return [ast.literal_eval((folder / f"groups{rank}").read_text()) for rank in range(4)]


@pytest.mark.slow
def test_subgroups(four):
    """Shards are neighbours, then replicas; pipeline stages are far apart."""
    assert [found["pair"] for found in four] == [[[0, 1], [0, 2]], [[0, 1], [1, 3]], [[2, 3], [0, 2]], [[2, 3], [1, 3]]]
    assert four[3]["three"] == [[1, 3], [3], [2, 3]]
    assert four[0]["mesh"] == [("pp", "dp", "fsdp"), [[[0, 1]], [[2, 3]]], (1, 2)]
    assert [found["sum"] for found in four] == [1, 1, 5, 5]


def test_init(four):
    import torch

    if not torch.cuda.is_available():
        assert four[0]["device"] == "cpu" and four[0]["backend"] == "hfreduce"
    assert four[0]["sibling"] == "0:00:30", "a channel beside another has its timeout"


def test_ranks_with_a_gpu_each(four):
    expected = {"four": True, "shared": False, "none": False, "one has none": False}
    assert [found["own"] for found in four] == [expected] * 4


def test_siblings_of_ranks_with_unequally_many_groups(four):
    assert [found["sums"] for found in four] == [[6, 6, 1, 2], [6, 6, 1, 4], [6, 6, 5, 2], [6, 6, 5, 4]]


@pytest.mark.parametrize("device, hosts, kernels, measured, backend", [
    ("cpu", 2, True, None, "hfreduce"), ("cuda", 1, True, None, "hfreduce"), ("cuda", 1, False, None, "nccl"),
    ("cuda", 2, True, None, "nccl"), ("cuda", 2, True, "nccl", "nccl"), ("cuda", 2, True, "hfreduce", "hfreduce"),
    ("cuda", 2, False, "hfreduce", "nccl"),
])  # fmt: skip
def test_default_backend(device, hosts, kernels, measured, backend, monkeypatch, caplog, tmp_path):
    """Choosing NCCL is logged."""
    import torch

    from hfreduce import plan

    asked, said = [], {}
    monkeypatch.setenv("HFREDUCE_PLAN", str(tmp_path / "plan.json"))
    if measured:
        plan.save(plan.Shape(4 * hosts, hosts), [plan.BackendRow("all_reduce", plan.ANY, measured)], part="backends")
    store = SimpleNamespace(set=said.__setitem__, get=lambda key: said[key].encode())
    monkeypatch.setattr(torch.distributed, "rendezvous", lambda *given, **more: iter([(store, 0, 4 * hosts)]))
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda name, **more: asked.append(name))
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4 * hosts)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(mesh, "_rank_device", lambda: torch.device(device))
    monkeypatch.setattr(mesh, "hfreduce_takes_cuda", lambda: kernels)
    for name, value in {"RANK": 0, "MASTER_ADDR": "here", "MASTER_PORT": 1, "LOCAL_WORLD_SIZE": 4}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("WORLD_SIZE", str(4 * hosts))
    haiscale.init()
    assert asked == [backend]
    why = "this hfreduce was built without"
    if kernels:
        why = "NCCL was the faster one between such hosts on 20" if measured else "GPUs of several hosts, between which"
    lines = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert (backend == "nccl") == bool(lines)
    assert all(f"haiscale.init: {4 * hosts} ranks on NCCL, not on hfreduce: {why}" in line for line in lines)


def test_what_does_not_fit_is_told(four):
    assert "call haiscale.init() first" in four[0]["early"]
    product, too_many, none, no_number = four[0]["wrong"]
    assert product == "pp_size=3, dp_size=None, fsdp_size=1 do not make up 4 ranks: their product must be 4"
    assert "pp_size=2, dp_size=4" in too_many
    assert none == "pp_size=0 is not accepted: give an integer of at least 1" and "fsdp_size=True" in no_number


def test_init_without_an_environment(monkeypatch):
    for name in ("RANK", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("MASTER_ADDR", "a")
    with pytest.raises(ValueError, match=r"RANK, MASTER_PORT is not set .*python -m haiscale.launch --nproc N"):
        haiscale.init()


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """machine(nodes, siblings, gpus, allowed): a folder that looks like /, for `binding.shares`.

    nodes: each node's list of CPUs, as text. siblings: the number of adjacent CPUs per core. gpus: the node of each
    GPU.
    """

    def make(nodes, siblings=1, gpus=(), allowed=None):
        cpus = [cpu for text in nodes for cpu in binding._numbers(text)]
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(allowed or cpus))
        for number, text in enumerate(nodes):
            write(tmp_path / f"sys/devices/system/node/node{number}/cpulist", text)
        for cpu in cpus:
            begin = cpu // siblings * siblings
            text = f"{begin}-{begin + siblings - 1}" if siblings > 1 else str(cpu)
            write(tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", text)
        for number, node in enumerate(gpus):
            name = f"0000:{number:02X}:00.0"
            write(tmp_path / f"proc/driver/nvidia/gpus/{name}/information", f"GPU UUID: \t GPU-{number}abc\n")
            write(tmp_path / f"sys/bus/pci/devices/{name.lower()}/numa_node", str(node))
        return tmp_path

    def write(path, text):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return make


def cpus(shares):
    return [sorted(share.cpus) for share in shares]


def test_nodes_are_split_among_their_ranks(machine):
    root = machine(["0-3", "4-7"])
    assert cpus(binding.shares(4, root)) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert cpus(binding.shares(1, root)) == [[*range(8)]]
    assert cpus(binding.shares(2, root)) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert cpus(binding.shares(3, root)) == [[0, 1], [2, 3], [4, 5, 6, 7]]


def test_cores_stay_whole(machine):
    shares = binding.shares(2, machine(["0-7"], siblings=2))
    assert cpus(shares) == [[0, 1, 2, 3], [4, 5, 6, 7]] and [share.threads for share in shares] == [2, 2]


def test_more_ranks_than_cores_share_them(machine):
    shares = binding.shares(4, machine(["0-1"]))
    assert cpus(shares) == [[0, 1]] * 4 and {share.threads for share in shares} == {1}


def test_only_what_this_process_may_use(machine):
    assert cpus(binding.shares(2, machine(["0-3", "4-7"], allowed=[5, 6]))) == [[5], [6]]


def test_ranks_are_near_their_gpus(machine, monkeypatch):
    root = machine(["0-3", "4-7"], gpus=(1, 1, 0, 0))
    assert cpus(binding.shares(4, root)) == [[4, 5], [6, 7], [0, 1], [2, 3]]
    assert cpus(binding.shares(1, root)) == [[4, 5, 6, 7]]
    for visible in ("3,0", "GPU-3,GPU-0abc"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert cpus(binding.shares(2, root)) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert cpus(binding.shares(1, root)) == [[*range(8)]]


def test_a_machine_that_tells_nothing(machine, tmp_path):
    machine([], allowed=[2, 3])
    assert cpus(binding.shares(2, tmp_path)) == [[2], [3]]
