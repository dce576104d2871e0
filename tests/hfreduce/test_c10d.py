"""The c10d backend in real processes. The rank programs are in tests/workers: process_groups.py, own_groups.py and
process_faults.py.

Common bugs of third-party backends, and their tests. Nested operations in callbacks: test_futures. Threads that outlive
the interpreter: test_leaves. A store that serialises its calls: test_stores. split_group on a bound device, one name
for two devices, two backends side by side: test_splits. Coalescing, both peers sending first: test_messages. In place,
empty, non-contiguous and unaligned: test_operations. Backends identified by name: test_faults (monitored_barrier) and
test_torch_users (the bfloat16 hook). A slow all-reduce in FSDP2's replicas: test_torch_users (hsdp_mixed). A peer's
death, and memory that it leaves: test_death. Tensors of different sizes: test_faults.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import ranks

WORKER = Path(__file__).parents[1] / "workers" / "process_groups.py"
OWN = WORKER.with_name("own_groups.py")
FAULTS = WORKER.with_name("process_faults.py")


@pytest.mark.parametrize(
    "function, size",
    [
        ("messages", 3),
        ("direct", 3),
        ("lazy", 3),
        pytest.param("operations", 3, marks=pytest.mark.slow),
        pytest.param("futures", 2, marks=pytest.mark.slow),
        pytest.param("stores", 2, marks=pytest.mark.slow),
        pytest.param("splits", 4, marks=pytest.mark.slow),
        pytest.param("sparse", 3, marks=pytest.mark.slow),
    ],
)
def test(function, size, tmp_path):
    ranks.run(OWN if function in ("direct", "stores") else WORKER, function, size, tmp_path)


@pytest.mark.slow
def test_leaves(tmp_path):
    with ranks.start(FAULTS, "leaves", 4, tmp_path) as group:
        assert group.wait(40) == [0] * 4, group.output()
        assert "terminate" not in group.output() and "left" not in group.output(), group.output()


@pytest.mark.slow
def test_faults(tmp_path):
    for rank, found in enumerate(ranks.run(FAULTS, "faults", 3, tmp_path)):
        message, _ = found["mismatch"]
        assert "rank 1" in message and "3" in message and "4" in message, message
        assert found["afterwards"][1] < 0.5
        if rank == 1:
            continue
        for kind in ("late", "monitored"):
            message, seconds = found[kind]
            assert "rank 1" in message and 0.9 < seconds < 3, (kind, seconds, message)
            assert "process_faults.py" in message, message  # where the late one is
        assert "abort() was called" in found["aborted"][0] and found["error"].endswith("COMM_ERROR")


def test_caught(tmp_path):
    ranks.run(FAULTS, "caught", 2, tmp_path)


def test_receives(tmp_path):
    begun = time.monotonic()
    assert max(ranks.run(FAULTS, "receives", 2, tmp_path)) < ranks.soon(2)
    assert time.monotonic() - begun < ranks.soon(8)


def test_raises(tmp_path):
    """A rank that ends with an exception has not left in peace."""
    with ranks.start(FAULTS, "raises", 3, tmp_path) as group:
        assert group.wait(40) == [0, 1, 1], group.output()
        for rank, (text, why) in enumerate(
            zip(group.results()[0], ("ValueError: the loss is nan", "KeyError: 'no such sample'"), strict=True), 1
        ):
            assert text.startswith(f"rank {rank} (") and f"because of an exception: {why}" in text, text


def test_forked(tmp_path):
    for told in ranks.run(FAULTS, "forked", 2, tmp_path):
        assert len(told) == 4 and all("fork of" in text for text in told), told


def test_options(tmp_path):
    first, second = ranks.run(FAULTS, "options", 2, tmp_path)
    assert first == second and first[1].endswith("got 64")


def test_barriers(tmp_path):
    with ranks.start(FAULTS, "barriers", 2, tmp_path) as group:
        assert group.wait(40) == [0, 0], group.output()
        message, seconds = group.results()[0]
        assert "Timed out after 0.0 s" in message and seconds < 0.9, (message, seconds)


def test_names(tmp_path):
    for told in ranks.run(OWN, "names", 2, tmp_path):
        assert all("give them different names" in text for text in told), told


@pytest.mark.slow
def test_death(tmp_path):
    before = set(os.listdir("/dev/shm"))
    with ranks.start(FAULTS, "death", 3, tmp_path) as group:
        group.until("works")
        assert not set(os.listdir("/dev/shm")) - before  # nothing has a name, even while all ranks live
        assert group.wait(30, [0, 2]) == [0, 0], group.output()
        for result in (group.results()[rank] for rank in (0, 2)):
            message, seconds = result["first"]
            assert "rank 1" in message and seconds < 2, (seconds, message)
            assert result["again"][1] < 0.5
    assert not set(os.listdir("/dev/shm")) - before


def python(code, **environment):
    command = [sys.executable, "-P", "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ, **environment})


def test_torchcomms_is_refused():
    """torchcomms would take over all groups unasked."""
    run = python("import hfreduce", TORCH_DISTRIBUTED_USE_TORCHCOMMS="1")
    assert run.returncode and "TORCH_DISTRIBUTED_USE_TORCHCOMMS is set" in run.stderr, run.stderr


def test_another_torch_is_refused(monkeypatch):
    """Checked against the version recorded at build time, because loading it could crash."""
    from hfreduce import _build, backend

    monkeypatch.setattr(_build, "torch_version", "1.0")
    with pytest.raises(ImportError, match=r"built for torch 1\.0, this is torch .*; run pip"):
        backend.native()
    monkeypatch.setattr(_build, "c10d", "not built: no torch")
    with pytest.raises(ImportError, match=r"was not built: no torch; run pip"):
        backend.native()
