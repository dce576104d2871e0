"""Counters that this machine may lack, read from file trees like the kernel's, and what is reported without them."""

import os
from pathlib import Path

import pytest

from haiprof import counters
from haiprof.counters import Counters


def tree(root, files):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


@pytest.fixture
def seconds(monkeypatch):
    """seconds(n) advances the clock by n seconds."""
    now = [0.0]
    monkeypatch.setattr(counters.time, "monotonic", lambda: now[0])

    def go_by(n):
        now[0] += n

    return go_by


@pytest.fixture
def resctrl(tmp_path, monkeypatch):
    """Two sockets: of 1000 bytes each, 600 and 900 are local."""
    monkeypatch.setattr(counters, "RESCTRL", tmp_path)
    for socket, local in enumerate((600, 900)):
        domain = f"mon_data/mon_L3_{socket:02}"
        tree(tmp_path, {f"{domain}/mbm_total_bytes": "1000\n", f"{domain}/mbm_local_bytes": f"{local}\n"})
    return tmp_path


def add(path, n):
    path.write_text(f"{int(path.read_text()) + n}\n")


def test_memory_bandwidth_and_traffic_to_other_sockets(resctrl, seconds):
    found = Counters()
    seconds(2)
    found.read()
    add(resctrl / "mon_data/mon_L3_00/mbm_total_bytes", 5000)
    add(resctrl / "mon_data/mon_L3_00/mbm_local_bytes", 3000)
    add(resctrl / "mon_data/mon_L3_01/mbm_total_bytes", 1000)
    add(resctrl / "mon_data/mon_L3_01/mbm_local_bytes", 1000)
    seconds(2)
    reading = found.read()
    assert (reading["memory.traffic"], reading["memory.to_other_sockets"]) == (3000, 1000)
    assert "memory bandwidth" not in found.missing


def test_a_domain_that_has_no_number_for_now(resctrl, seconds):
    found, path = Counters(), resctrl / "mon_data/mon_L3_01/mbm_total_bytes"
    seconds(1)
    found.read()
    path.write_text("Unavailable\n")
    seconds(1)
    assert "memory.traffic" not in found.read()
    path.write_text("3000\n")
    seconds(1)
    assert found.read()["memory.traffic"] == 1000, "in the two seconds since the last number"


def test_a_processor_that_counts_all_traffic_alone(resctrl, seconds):
    for path in resctrl.rglob("mbm_local_bytes"):
        path.unlink()
    found = Counters()
    found.read()
    seconds(1)
    reading = found.read()
    assert reading["memory.traffic"] == 0 and "memory.to_other_sockets" not in reading


REFUSED = [
    ("nodev\ttmpfs\n", "the kernel or the processor has no resctrl"),
    ("nodev\tresctrl\n", "resctrl is not mounted"),
]


@pytest.mark.parametrize(("filesystems", "why"), REFUSED)
def test_why_there_is_no_memory_bandwidth(tmp_path, monkeypatch, filesystems, why):
    tree(tmp_path, {"filesystems": filesystems})
    monkeypatch.setattr(counters, "RESCTRL", tmp_path / "resctrl")
    monkeypatch.setattr(counters, "FILESYSTEMS", tmp_path / "filesystems")
    assert why in Counters().missing["memory bandwidth"]


def test_a_processor_that_counts_no_traffic(resctrl):
    for path in resctrl.rglob("mbm_total_bytes"):
        path.unlink()
    assert "does not count it: no mbm_total_bytes" in Counters().missing["memory bandwidth"]


@pytest.mark.skipif(os.path.exists("/sys/fs/resctrl/mon_data"), reason="resctrl is mounted")
def test_what_this_machine_says():
    assert "resctrl" in Counters().missing["memory bandwidth"]
    if len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) < 2:
        assert Counters().missing["numa"] == "the machine has one NUMA node"


def test_pages_for_processes_of_other_nodes(tmp_path, monkeypatch, seconds):
    monkeypatch.setattr(counters, "NODES", tmp_path)
    tree(tmp_path, {f"node{i}/numastat": f"numa_hit 9\nother_node {n}\n" for i, n in enumerate((100, 10))})
    found = Counters()
    seconds(1)
    found.read()
    tree(tmp_path, {"node1/numastat": "numa_hit 9\nother_node 60\n"})
    seconds(2)
    assert found.read()["numa.remote_pages"] == 25


def test_ports_of_infiniband_count_words(tmp_path, monkeypatch, seconds):
    monkeypatch.setattr(counters, "IB", tmp_path)
    port = "mlx5_0/ports/1/counters"
    tree(tmp_path, {f"{port}/port_xmit_data": "10", f"{port}/port_rcv_data": "20"})
    found = Counters()
    seconds(1)
    found.read()
    tree(tmp_path, {f"{port}/port_xmit_data": "110", f"{port}/port_rcv_data": "20"})
    seconds(1)
    reading = found.read()
    assert (reading["ib.mlx5_0.1.sent"], reading["ib.mlx5_0.1.received"]) == (400, 0)
