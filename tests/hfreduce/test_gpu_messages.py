"""Messages between GPUs, in real processes. The rank programs are in tests/workers/gpu_messages.py.

As in test_gpu.py. Only ranks with their own GPU and peer access send from device to device; all others go by way of the
host.
"""

import signal
from pathlib import Path

import pytest
import ranks
from test_gpu import GPUS, SIZE

WORKER = Path(__file__).parents[1] / "workers" / "gpu_messages.py"


def environment(path):
    return {"HFREDUCE_DEVICE_MESSAGES": "1", "HFREDUCE_P2P": "0" if path == "no-peers" else ""}


pytestmark = pytest.mark.parametrize("path", ["peers", "no-peers"])


def test_messages(path, tmp_path):
    for found in ranks.run(WORKER, "messages", SIZE, tmp_path, gpus=True, env=environment(path), timeout=120):
        assert "messages by way of the host" not in found["described"], found
        if path == "peers" and GPUS >= SIZE:
            assert found["waited"] < 0.4, found  # its GPU, or its sender's, sleeps for a second


def test_late(path, tmp_path):
    for found in ranks.run(WORKER, "late", SIZE, tmp_path, gpus=True, env=environment(path), timeout=60)[:2]:
        message, seconds = found["differs"]
        assert "Both sides must give the same dtype" in message and "100 float32" in message, message
        message, seconds = found["late"]
        assert "waiting for rank 1" in message and "Timed out after 2.0 s" in message and seconds < 6, found


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["kill", "stop"])
@pytest.mark.parametrize("count", [100, 1 << 20, 40 << 20])
def test_death(path, number, count, tmp_path):
    others = [rank for rank in range(SIZE) if rank != 1]
    options = {"gpus": True, "env": environment(path), "count": count, "number": int(number)}
    with ranks.start(WORKER, "death", SIZE, tmp_path, **options) as group:
        group.until("works")
        assert group.wait(40, others) == [0] * len(others), group.output()
        for rank in others:
            result = group.results()[rank]
            # A rank that waits for one that waits for the stopped rank may report first.
            named = "rank 1" in result["message"] or "does not answer" in result["message"]
            assert named and result["seconds"] < 5, result
