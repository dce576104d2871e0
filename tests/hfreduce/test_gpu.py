"""CUDA tensors on the c10d backend, in real processes. The rank programs are in tests/workers/gpu_groups.py.

With one GPU the ranks share it. With two or more, each of two ranks has one (with four: each of four), and torch's
users are compared with NCCL. Everything runs with peer access, and twice without (HFREDUCE_P2P=0): with the defaults,
which use mapped memory for all but large messages if ranks do not share a GPU, and with the CPU-assisted reduce.
"""

import signal
from pathlib import Path

import pytest
import ranks
import torch
from test_torch_users import WORKER as USERS
from test_torch_users import check

from hfreduce import plan

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

WORKER = Path(__file__).parents[1] / "workers" / "gpu_groups.py"
GPUS = torch.cuda.device_count()
SIZE = 4 if GPUS >= 4 else 2
PATHS = ("peers", "no-peers", "assisted")
HOSTS = {"HFREDUCE_TEST_HOSTS": "2"}
SOME = ["ddp", "power_sgd_buckets", "fsdp1", "fsdp2_bf16", "hsdp_mixed", "functionals", "objects", "pipeline_1F1B"]


ENVIRONMENT = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


def by(way, kinds, folder):
    """An environment in which these collectives use one path, as with a measured plan."""
    rows = [plan.DeviceRow(kind, plan.ANY, way) for kind in kinds]
    return ENVIRONMENT | {"HFREDUCE_PLAN": str(plan.save(plan.Shape(SIZE), rows, folder / "plan.json", "devices"))}


@pytest.fixture
def copies(tmp_path):
    if GPUS < SIZE:
        pytest.skip("needs a GPU for each rank")
    return by("copies", ["all_gather"], tmp_path)


@pytest.fixture(params=PATHS)
def path(request):
    return request.param


@pytest.fixture
def environment(path, tmp_path):
    if path == "assisted":
        kinds = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")
        return by("assisted", kinds, tmp_path) | {"HFREDUCE_P2P": "0"}
    return ENVIRONMENT | ({"HFREDUCE_P2P": "0"} if path == "no-peers" else {})


def told(described, path):
    """Checks that the path under test is the one in use."""
    if path != "peers":
        assert "HFREDUCE_P2P=0" in described and "CPU-assisted reduce" in described, described
        assert ("kernels over mapped memory" in described) == (GPUS >= SIZE), described
    elif GPUS >= SIZE:
        assert "GPUs reach each other's memory" in described, described


@pytest.mark.parametrize("bound", [False, True])
def test_operations(path, environment, bound, tmp_path):
    results = ranks.run(WORKER, "operations", SIZE, tmp_path, gpus=True, env=environment, timeout=120, device_id=bound)
    for described in results:
        told(described, path)


@pytest.mark.parametrize("function", ["operations", "streams"])
def test_hosts(function, tmp_path):
    """Two hosts, by name: they share no memory and use TCP."""
    for described in ranks.run(WORKER, function, SIZE, tmp_path, gpus=True, env=HOSTS, timeout=180):
        if function == "operations":
            assert "on 2 hosts" in described and described.endswith("CPU-assisted reduce"), described


def test_streams(environment, tmp_path):
    ranks.run(WORKER, "streams", SIZE, tmp_path, gpus=True, env=environment, timeout=90)


def test_graphs(path, environment, tmp_path):
    for found in ranks.run(WORKER, "graphs", SIZE, tmp_path, gpus=True, env=environment, assisted=path == "assisted"):
        assert found == {"peers": path == "peers" and GPUS >= SIZE, "mapped": path == "no-peers" and GPUS >= SIZE}


@pytest.mark.parametrize("bound", [False, True], ids=["", "bound"])
def test_users(path, environment, bound, tmp_path):
    """All users with peer access, some without."""
    options = {"users": None if path == "peers" else SOME, "bound": bound}
    check(ranks.run(USERS, "compare_on_gpus", SIZE, tmp_path, gpus=True, env=environment, timeout=240, **options))


def test_copies(copies, tmp_path):
    for described in ranks.run(WORKER, "copies", SIZE, tmp_path, gpus=True, env=copies, timeout=120):
        assert "all_gather by copy engines" in described, described
    ranks.run(WORKER, "streams", SIZE, tmp_path, gpus=True, env=copies, timeout=90)
    check(ranks.run(USERS, "compare_on_gpus", SIZE, tmp_path, gpus=True, env=copies, timeout=240, users=SOME))


def late(tmp_path, env, count, **options):
    for rank, found in enumerate(ranks.run(WORKER, "late", SIZE, tmp_path, gpus=True, env=env, count=count, **options)):
        message, seconds = found["differs"]
        assert "different collectives" in message and str(count) in message, message
        if rank != 1:
            message, seconds = found["late"]
            assert "rank 1" in message and "Timed out after 2.0 s" in message and seconds < 6, (seconds, message)


@pytest.mark.parametrize("count", [100, 1 << 20])
def test_late(environment, count, tmp_path):
    late(tmp_path, environment, count)


@pytest.mark.parametrize("count", [100, 40_000_000])
def test_late_in_copies(copies, count, tmp_path):
    late(tmp_path, copies, count, gathers=True)


def death(tmp_path, env, **options):
    others = [rank for rank in range(SIZE) if rank != 1]
    with ranks.start(WORKER, "death", SIZE, tmp_path, gpus=True, env=env, **options) as group:
        group.until("works")
        assert group.wait(40, others) == [0] * len(others), group.output()
        for rank in others:
            result = group.results()[rank]
            assert "rank 1" in result["message"] and result["seconds"] < 5, result


DEATHS = pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["kill", "stop"])


@DEATHS
@pytest.mark.parametrize("count", [100, 8 << 20])
def test_death(environment, number, count, tmp_path):
    death(tmp_path, environment, count=count, number=int(number))


@DEATHS
@pytest.mark.parametrize("count", [100, 8 << 20])
def test_death_of_a_host(number, count, tmp_path):
    death(tmp_path, HOSTS, count=count, number=int(number))


@DEATHS
@pytest.mark.parametrize("count", [100, 40_000_000])
def test_death_in_copies(copies, number, count, tmp_path):
    death(tmp_path, copies, count=count, number=int(number), gathers=True)
