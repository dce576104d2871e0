"""Rendezvous and connections: hosts, interfaces, ranks that do not come or die on the way, strangers, forks."""

import array
import contextlib
import os
import re
import socket
import struct
import time
from pathlib import Path

import pytest
import ranks
from hfreduce._C import Communicator
from hosts import hosts
from relay import far
from threads import group, run

WORKER = Path(__file__).with_name("meshing.py")
FLOAT32 = 8
GREETING = 1.0  # seconds that a stranger gets to show the secret
REFUSAL = 1.0  # seconds after which a peer that no longer listens counts as dead


def passes(comms, count=1000):
    """Rank 0 sends each of the others a message, and gets it back."""

    def one(comm):
        data = array.array("f", range(count) if comm.rank == 0 else [0] * count)
        address = data.buffer_info()[0]
        for peer in range(1, comm.size) if comm.rank == 0 else [0]:
            for move in (comm.send, comm.recv) if comm.rank == 0 else (comm.recv, comm.send):
                move(address, count, FLOAT32, peer)
        return data

    return all(data == array.array("f", range(count)) for data in run(one, comms))


def join(notes, rank, size, **config):
    return Communicator(notes.__setitem__, notes.get, rank, size, **{"timeout": 20.0, **config})


def raised(f, *arguments, **options):
    begun = time.monotonic()
    with pytest.raises(RuntimeError) as error:
        f(*arguments, **options)
    return str(error.value), time.monotonic() - begun


@contextlib.contextmanager
def met(notes, size=2, **config):
    """Like threads.group, with a store that can be inspected."""
    comms = run(lambda rank: join(notes, rank, size, **config), range(size))
    try:
        yield comms
    finally:
        run(Communicator.shutdown, comms)


# ---- hosts and interfaces


def test_two_hosts(tmp_path):
    """Hosts are distinguished by network namespace. Their address is the one on the route to MASTER_ADDR."""
    with hosts(2) as h:
        env = {"MASTER_ADDR": h.address(0)}
        results = ranks.run(WORKER, "meets", 4, tmp_path, env=env, prefix=lambda rank: h.prefix(rank // 2))
        for rank, result in enumerate(results):
            assert f"rank {rank} (host host{rank // 2}, pid " in result["describe"]
            assert "4 ranks on 2 hosts (host0: 2, host1: 2)" in result["describe"]
            assert f"TCP over eth0 {h.address(rank // 2)}" in result["describe"]
            assert result["message"] == [(rank - 1) % 4] and result["sum"] == [6]


def test_a_host_that_is_cut_off(tmp_path):
    """Both sides report who cannot be reached, where and from which interface, soon after the deadline."""
    with hosts(2) as h:
        h.cut(1)
        results = ranks.run(WORKER, "fails", 2, tmp_path, prefix=h.prefix, seconds=2.0)
        assert (
            "rank 1 (host host1, pid" in results[0]["text"] and "has not dialed by the deadline" in results[0]["text"]
        )
        assert "rank 0 (host host0, pid" in results[1]["text"]
        assert re.search(rf"at {h.address(0)} port \d+, from eth0 {h.address(1)}: ", results[1]["text"])
        assert all(1.9 < result["took"] < 3.5 for result in results), results


@pytest.mark.parametrize("wanted, chosen", [("lo", "lo 127.0.0.1"), ("127.0.0.1", "lo 127.0.0.1"), ("::1", "lo ::1")])
@pytest.mark.parametrize("by", ["argument", "variable"])
def test_interface(wanted, chosen, by, monkeypatch):
    """By name or address, IPv4 or IPv6."""
    monkeypatch.setenv("HFREDUCE_INTERFACE", wanted if by == "variable" else "nonsense")
    with group(2, host_id=["a", "b"], interface=wanted if by == "argument" else "") as comms:
        assert comms[0].describe().endswith(f"TCP over {chosen}")
        assert passes(comms)


def test_interface_of_one_machine(monkeypatch):
    """A job with a loopback MASTER_ADDR stays on this machine."""
    monkeypatch.delenv("HFREDUCE_INTERFACE", raising=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with group(2, host_id=["a", "b"]) as comms:
        assert comms[0].describe().endswith("TCP over lo 127.0.0.1")


def test_interface_that_is_not():
    text, _ = raised(join, {}, 0, 1, interface="eth77")
    assert "no network interface 'eth77'" in text and "lo 127.0.0.1" in text and "HFREDUCE_INTERFACE" in text


# ---- rendezvous


def test_a_rank_that_never_comes():
    """All others name its global rank, at the deadline."""
    notes, config = {}, {"global_ranks": [10, 11, 12, 13], "timeout": 1.0}
    for text, took in run(lambda rank: raised(join, notes, rank, 4, **config), [0, 1, 3]):
        assert re.search(
            r"rank 1[013] \(host .*, pid \d+\) has waited 1\.\d s for 1 of 4 ranks, .*not come: 12\.", text
        ), text
        assert 0.9 < took < 2
    text, _ = raised(join, {}, 1, 4, **config)
    assert "which have not come: 10." in text


def test_the_same_store_again():
    """torchrun's store outlives destroy_process_group: keys of an earlier communicator must not interfere."""
    notes = {}
    for _ in range(3):
        begun = time.monotonic()
        with met(notes, 3) as comms:
            assert time.monotonic() - begun < 5
            assert passes(comms)


def test_a_rank_that_does_not_come_again():
    notes = {}
    with met(notes):
        pass
    text, _ = raised(join, notes, 1, 2, timeout=0.5)
    assert "rank 0 has not come again" in text


def test_one_rank_twice():
    """Two processes claim to be rank 1: one is admitted, the other gets the reason."""
    notes, outcomes = {}, []

    def attempt(rank):
        try:
            outcomes.append(join(notes, rank, 2, timeout=2.0))
        except RuntimeError as error:
            outcomes.append(str(error))

    run(attempt, [0, 1, 1])
    texts = [outcome for outcome in outcomes if isinstance(outcome, str)]
    assert len(texts) == 1 and "two processes were started with this rank" in texts[0], texts
    run(Communicator.shutdown, [outcome for outcome in outcomes if not isinstance(outcome, str)])


def test_other_world_sizes():
    notes = {}
    results = run(lambda rank, size: raised(join, notes, rank, size, timeout=1.0), [0, 1], [3, 2])
    assert "which have not come: 2" in results[0][0]
    # Rank 0 has not found all its ranks, so no rank knows more.
    assert "which have not come: 0" in results[1][0]


@pytest.mark.parametrize("culprit", [1, 2])
def test_killed_in_the_meeting(culprit, tmp_path):
    """A rank that dies after the rendezvous but before connecting is named long before the deadline."""
    with ranks.start(WORKER, "dies", 3, tmp_path, culprit=culprit) as running:
        others = [rank for rank in range(3) if rank != culprit]
        running.wait(15, others)
        texts = [running.results()[rank]["text"] for rank in others]
        assert any(f"rank {culprit} (host" in text and "its process has ended" in text for text in texts), texts
        assert all(running.results()[rank]["took"] < 5 * REFUSAL for rank in others)


# ---- strangers


def entries(notes):
    """The secret, and each rank's TCP port and Unix socket, from the roster."""
    (roster,) = [value for key, value in notes.items() if key.endswith("/roster")]
    secret, *peers = roster.split(b"\x1e")
    fields = [peer.split(b"\x1f") for peer in peers]
    return secret, [(int(field[6]), field[10]) for field in fields]


def hello(secret, rank=0, magic=b"hfreduce"):
    return struct.pack("=8siiB3x64s", magic, rank, 9, 3, secret)


def sockets():
    """This process's open sockets, by inode: those of earlier tests may close at any moment."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.add(os.readlink(f"/proc/self/fd/{name}"))
    return {name for name in found if name.startswith("socket:")}


def dropped_after(connection):
    begun = time.monotonic()
    connection.settimeout(5)
    with contextlib.suppress(ConnectionResetError):
        assert connection.recv(1) == b""
    return time.monotonic() - begun


def test_strangers():
    """Noise, silence and wrong secrets, on both listening sockets: all are dropped, and the group still works."""
    notes = {}
    with met(notes, host_id="", interface="lo") as comms:
        secret, doors = entries(notes)
        wrong = secret[:-1] + (b"0" if secret[-1:] != b"0" else b"1")
        says = [
            hello(wrong),
            hello(secret, rank=2),
            hello(secret, rank=-1),
            hello(secret, magic=b"GET / HT"),
            b"x" * 500,
        ]
        before = sockets()
        with contextlib.ExitStack() as stack:

            def knock(say):
                port, name = doors[0]
                tcp = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=5))
                unix = stack.enter_context(socket.socket(socket.AF_UNIX))
                unix.connect(b"\0" + name)
                for connection in (tcp, unix):
                    connection.sendall(say)
                return [tcp, unix]

            refused = [connection for say in says for connection in knock(say)]
            silent = [connection for say in [b"", hello(secret)[:50]] * 20 for connection in knock(say)]
            assert all(dropped_after(connection) < GREETING for connection in refused)
            assert passes(comms)
            assert dropped_after(silent[0]) > GREETING / 4
            for connection in silent[1:]:
                dropped_after(connection)
            # The same greeting with the secret is admitted, so the others were dropped for their content.
            assert all(connection.recv(1) == b"w" for connection in knock(hello(secret)))
        late = time.monotonic() + 5  # the other end closes its side a moment after ours has seen it
        while len(sockets() - before) > 2 and time.monotonic() < late:
            time.sleep(0.01)
        assert len(sockets() - before) == 2  # those two, which wait to be asked for
        assert passes(comms)


def test_nothing_to_do_costs_nothing():
    """The listening thread sleeps."""

    def switches():
        tasks = [task for task in Path("/proc/self/task").iterdir() if (task / "comm").read_text() == "hfreduce-mesh\n"]
        return [re.findall(r"ctxt_switches:\s+(\d+)", (task / "status").read_text()) for task in tasks]

    with group(2) as comms:
        assert passes(comms)
        time.sleep(0.1)
        before = switches()
        time.sleep(0.5)
        assert len(before) == 2 and switches() == before


def test_forks_keep_no_socket(tmp_path):
    """A DataLoader's worker must not keep connections open, or its parent's death would go unnoticed."""
    for rank, result in enumerate(ranks.run(WORKER, "forks", 2, tmp_path)):
        assert result["mine"] >= 4  # two that listen, liveness, messages
        assert result["inherited"] == 0 and result["after"] == 0
        assert result["message"] == [1 - rank] and result["sum"] == [1]


# ---- streams over TCP


@pytest.mark.parametrize("seconds", [0, 0.02])
def test_delay(seconds):
    """Late data, in parts of any size, arrives whole."""
    with far(2, seconds) as comms:
        assert passes(comms)
        begun = time.monotonic()
        assert passes(comms)
        took = time.monotonic() - begun
        assert 2 * seconds < took < 2 * seconds + 0.3
        assert passes(comms, 500_000)


@pytest.mark.parametrize("streams", [1, 3])
def test_streams(streams):
    """One byte stream over several connections, which carry pieces in turn."""
    plan = [(1, 1 << 62, 1, 1, 1 << 18, streams)]  # all_reduce, two_shot, ring

    def one(comm):
        data = array.array("f", range(comm.rank, 1_000_000 + comm.rank))
        comm.all_reduce(data.buffer_info()[0], data.buffer_info()[0], len(data), FLOAT32)
        return data

    with group(2, host_id=["a", "b"], interface="lo", plan=[plan, plan]) as comms:
        before = sockets()
        assert all(data == array.array("f", range(1, 2_000_001, 2)) for data in run(one, comms))
        assert len(sockets() - before) >= 2 * 2 * streams  # both ends, of both directions
