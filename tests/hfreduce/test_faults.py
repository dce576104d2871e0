"""Faults of real processes: kills, stops, late ranks, mismatched calls. Which ranks learn what, and how soon."""

import re
import signal
import time
from pathlib import Path

import pytest
import ranks
import soak

WORKER = Path(__file__).with_name("faulty.py")


def kill(group, rank, after=0.1):
    """The time of the kill, on the workers' clock."""
    time.sleep(after)
    at = time.monotonic()
    group.signal(rank, signal.SIGKILL)
    return at


def survivors(group, culprit, timeout=15):
    others = [rank for rank in range(group.size) if rank != culprit]
    codes = group.wait(timeout, others)
    assert not any(codes), f"exit codes {codes}\n{group.output()}"
    return [group.results()[rank] for rank in others]


@pytest.mark.parametrize("count", [10, 300_000])
@pytest.mark.parametrize("culprit", [0, 1])
def test_killed_in_an_operation(tmp_path, culprit, count):
    """Named within a second, by global rank, host and last operation. Later operations fail at once; all is freed."""
    with ranks.start(WORKER, "works", 3, tmp_path, count=count, global_ranks=[10, 11, 12]) as group:
        group.until("works")
        at = kill(group, culprit)
        for result in survivors(group, culprit):
            first = result["first"]
            assert first["cause"] == "died" and first["ranks"] == [culprit], first
            assert first["at"] - at < ranks.soon(1), first
            assert re.match(rf"rank 1{culprit} \(.*pid {group.processes[culprit].pid}\) has died", first["text"]), first
            assert "all_reduce number" in first["text"].split("Its last collective was")[1].split(".")[0]
            assert result["later"]["text"] == first["text"] and result["later"]["took"] < ranks.soon(0.05)
            assert result["after"][1:] == result["before"][1:] and result["after"][0] <= result["before"][0], result


@pytest.mark.parametrize("culprit", [0, 2])
def test_killed_on_another_host(tmp_path, culprit):
    """All ranks report the same. Only ranks of the same host know its last operation; they tell the others."""
    with ranks.start(WORKER, "works", 3, tmp_path, host_id=["a", "a", "b"]) as group:
        group.until("works")
        at = kill(group, culprit)
        for result in survivors(group, culprit):
            first = result["first"]
            assert first["cause"] == "died" and first["ranks"] == [culprit] and first["at"] - at < ranks.soon(1), first
            known = "Its last collective was all_reduce number" in first["text"]
            assert known if culprit == 0 else "What it did last is not known here" in first["text"], first
            assert "in all_reduce number" in first["text"]


@pytest.mark.parametrize("hosts", ["aaa", "aba"])
def test_no_message_from_the_killed(tmp_path, hosts):
    arguments = {"culprit": 1, "leave": False, "host_id": list(hosts)}
    with ranks.start(WORKER, "receives", 3, tmp_path, **arguments) as group:
        group.until("works", ranks=[0, 2])
        at = kill(group, 1)
        for result in survivors(group, 1):
            assert result["cause"] == "died" and result["ranks"] == [1] and result["at"] - at < ranks.soon(1), result


@pytest.mark.parametrize("hosts", ["aaa", "aba"])
def test_no_message_from_who_left(tmp_path, hosts):
    """Also if the connection breaks: the reason is that the peer has left. Messages sent before arrive."""
    results = ranks.run(WORKER, "receives", 3, tmp_path, culprit=1, leave=True, host_id=list(hosts))
    for result in (results[0], results[2]):
        assert result["cause"] == "left" and result["ranks"] == [1] and result["took"] < ranks.soon(2), result
        assert "rank 1 (" in result["text"] and "has left the group" in result["text"]


def test_killed_between_operations(tmp_path):
    with ranks.start(WORKER, "idles", 3, tmp_path) as group:
        group.until("idle")
        at = kill(group, 2)
        for result in survivors(group, 2):
            assert result["noticed"] - at < ranks.soon(1)
            assert result["next"]["cause"] == "died" and result["next"]["ranks"] == [2]
            assert result["next"]["took"] < ranks.soon(0.05)


def test_a_child_of_the_killed_does_not_hide_its_death(tmp_path):
    with ranks.start(WORKER, "forks", 2, tmp_path, culprit=1) as group:
        group.until("works")
        deadline = time.monotonic() + ranks.soon(10)
        while not Path(f"{group.store}.forked.child").exists():
            assert time.monotonic() < deadline, group.output()
            time.sleep(0.005)
        at = kill(group, 1)
        (result,) = survivors(group, 1)
        assert result["cause"] == "died" and result["ranks"] == [1] and result["at"] - at < ranks.soon(1), result


def test_stopped(tmp_path):
    """At the timeout, with the table of ranks. The stopped rank gets the same error when it continues."""
    with ranks.start(WORKER, "stops", 3, tmp_path, patience=1.0, culprit=1) as group:
        group.until("raised", ranks=[0, 2])
        group.signal(1, signal.SIGCONT)
        assert group.wait(10) == [0, 0, 0], group.output()
        results = group.results()
        for result in results:
            assert result["cause"] == "timeout" and result["ranks"] == [1], result
            assert "waiting for rank 1 (" in result["text"]
            (row,) = [line for line in result["text"].splitlines() if "does not answer" in line]
            assert row.split()[0] == "1" and "missing" in row
        assert max(results[rank]["took"] for rank in (0, 2)) < 1 + ranks.soon(1.5)


def test_late(tmp_path):
    """The table shows the missing rank first, with its line of Python and its last operation."""
    results = ranks.run(WORKER, "meets", 3, tmp_path, patience=1.0, late=[2], global_ranks=[4, 5, 6])
    for result in results:
        assert result["cause"] == "timeout" and result["ranks"] == [2], result
        table = result["text"].splitlines()[1:5]
        assert [line.split()[0] for line in table] == ["rank", "6", "4", "5"], result["text"]
        assert "missing" in table[1] and "all_reduce number 1 of 10 float32, sum" in table[1]
        assert re.search(r"ended it \d\.\d s ago +faulty\.py:\d+ in reads_data", table[1]), table[1]
        for row in table[2:]:
            assert re.search(r"barrier number 2 +in it for \d\.\d s +faulty\.py:\d+ in fault", row), row
    assert max(result["took"] for result in results[:2]) < 1 + ranks.soon(1.5)


def test_calls_that_differ(tmp_path):
    """Every rank raises the same error, whose text names both sides."""
    results = ranks.run(WORKER, "disagrees", 3, tmp_path)
    sides = {
        "count": ("of 4 float32", "of 5 float32"),
        "dtype": ("of 4 float32", "of 4 int32"),
        "op": ("float32, sum", "float32, max"),
        "kind": ("all_reduce", "broadcast"),
        "root": ("root 0", "root 1"),
    }
    for name, (usual, odd) in sides.items():
        texts = {result[name]["text"] for result in results}
        assert len(texts) == 1, texts
        lines = texts.pop().splitlines()
        assert any("rank 0 (" in line and "rank 2 (" in line and usual in line for line in lines), lines
        assert any("rank 1 (" in line and odd in line for line in lines), lines
        assert all(result[name]["cause"] == "mismatch" and result[name]["ranks"] == [1] for result in results)


def test_abort_wakes_all(tmp_path):
    results = ranks.run(WORKER, "aborts", 3, tmp_path, culprit=1)
    at = results[1]["at"]
    for result in results:
        first = result["first"]
        assert first["cause"] == "aborted" and "the loss is not a number" in first["text"], first
        assert "rank 1 (" in first["text"] and first["ranks"] == [1] and first["at"] - at < ranks.soon(0.5)
    assert all(results[rank]["later"]["took"] < ranks.soon(0.05) for rank in (0, 2))


def test_left(tmp_path):
    """A rank that shuts down is not dead, but waiting for it is in vain: the error comes soon."""
    results = ranks.run(WORKER, "leaves", 3, tmp_path, culprit=2)
    for result in results[:2]:
        assert result["cause"] == "left" and result["ranks"] == [2] and result["took"] < ranks.soon(2), result
        assert "rank 2 (" in result["text"] and "has left the group" in result["text"]


def test_again_and_nothing_stays(tmp_path):
    """Groups created repeatedly in the same processes; descriptors, threads, mappings and /dev/shm do not grow."""
    for result in ranks.run(WORKER, "returns", 3, tmp_path, rounds=7):
        assert result["after"] == result["before"]


def test_a_handful_of_random_faults(capsys):
    """A short run of soak.py."""
    bad, share = soak.soak(6, seed=20, several_hosts=True)
    assert not bad and share == 1, capsys.readouterr().out
