"""CUDA tensors on the c10d backend, in real processes: what each rank does is in tests/workers/gpu_groups.py.

With one GPU its ranks share it; with two or more, each of two ranks has one (four: of four), and torch's users are
compared with NCCL. Everything runs with peer access and without (HFREDUCE_P2P=0): by mapped memory of the host for
small messages, where ranks do not share a GPU, and by the CPU-assisted reduce.
"""

import signal
from pathlib import Path

import pytest
import ranks
import torch
from test_torch_users import WORKER as USERS
from test_torch_users import check

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

WORKER = Path(__file__).parents[1] / "workers" / "gpu_groups.py"
GPUS = torch.cuda.device_count()
SIZE = 4 if GPUS >= 4 else 2
PATHS = {"peers": {}, "no-peers": {"HFREDUCE_P2P": "0"}}
SOME = ["ddp", "power_sgd_buckets", "fsdp1", "fsdp2_bf16", "hsdp_mixed", "functionals", "objects", "pipeline_1F1B"]


def environment(path):
    return {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", **PATHS[path]}


@pytest.fixture(params=PATHS)
def path(request):
    return request.param


def told(described, path):
    """That the path is the one which was to be tested."""
    if path == "no-peers":
        assert "HFREDUCE_P2P=0" in described and described.endswith("CPU-assisted reduce"), described
        assert ("small messages by mapped memory" in described) == (GPUS >= SIZE), described
    elif GPUS >= SIZE:
        assert "GPUs reach each other's memory" in described, described


@pytest.mark.parametrize("bound", [False, True])
def test_operations(path, bound, tmp_path):
    results = ranks.run(WORKER, "operations", SIZE, tmp_path, env=environment(path), timeout=120, device_id=bound)
    for described in results:
        told(described, path)


def test_streams(path, tmp_path):
    ranks.run(WORKER, "streams", SIZE, tmp_path, env=environment(path), timeout=90)


def test_graphs(path, tmp_path):
    for found in ranks.run(WORKER, "graphs", SIZE, tmp_path, env=environment(path), timeout=90):
        assert found == {"peers": path == "peers" and GPUS >= SIZE, "mapped": path == "no-peers" and GPUS >= SIZE}


@pytest.mark.parametrize("bound", [False, True], ids=["", "bound"])
def test_users(path, bound, tmp_path):
    """All of them over peers, some without."""
    options = {"users": None if path == "peers" else SOME, "bound": bound}
    check(ranks.run(USERS, "compare_on_gpus", SIZE, tmp_path, env=environment(path), timeout=240, **options))


@pytest.mark.parametrize("count", [100, 1 << 20])
def test_late(path, count, tmp_path):
    for rank, found in enumerate(ranks.run(WORKER, "late", SIZE, tmp_path, env=environment(path), count=count)):
        message, seconds = found["differs"]
        assert "different collectives" in message and str(count) in message, message
        if rank != 1:
            message, seconds = found["late"]
            assert "rank 1" in message and "Timed out after 2.0 s" in message and seconds < 6, (seconds, message)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["kill", "stop"])
@pytest.mark.parametrize("count", [100, 8 << 20])
def test_death(path, number, count, tmp_path):
    others = [rank for rank in range(SIZE) if rank != 1]
    with ranks.start(WORKER, "death", SIZE, tmp_path, env=environment(path), count=count, number=int(number)) as group:
        group.until("works")
        assert group.wait(40, others) == [0] * len(others), group.output()
        for rank in others:
            result = group.results()[rank]
            assert "rank 1" in result["message"] and result["seconds"] < 5, result
