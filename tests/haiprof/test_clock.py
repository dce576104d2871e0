"""Clocks that differ between hosts: what is measured, and when nothing can be."""

import json
import socket
import threading
import time
from types import SimpleNamespace

import pytest

from haiprof import clock


@pytest.fixture
def server(tmp_path, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    found = clock.Server(tmp_path)
    yield found
    found.close()
    assert not found._thread.is_alive()


@pytest.mark.parametrize("ahead", [0.0, 1.5, -1.5])
def test_how_far_the_clock_of_who_asks_is_ahead(tmp_path, server, monkeypatch, ahead):
    here = threading.get_ident()

    def now():
        return time.time() + (ahead if threading.get_ident() == here else 0.0)

    monkeypatch.setattr(clock, "time", SimpleNamespace(time=now, monotonic=time.monotonic))
    asker = clock.Asker(tmp_path)
    line = asker.ask()
    assert line["offset"] == pytest.approx(-ahead, abs=line["error"]) and 0 < line["error"] < 0.1
    assert asker.offsets == [(line["wall"], line["offset"] if ahead else 0.0)], "an offset within its error is none"
    assert asker.due > time.monotonic() + 50


def test_datagrams_that_are_lost_or_late(tmp_path, monkeypatch):
    """Two are lost, and one duplicate replaces the next: the others count."""
    monkeypatch.setattr(clock, "PATIENCE", 0.05)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as own:
        own.bind(("127.0.0.1", 0))
        where = {"address": "127.0.0.1", "port": own.getsockname()[1]}
        (tmp_path / clock.FILE).write_text(json.dumps(where))

        def serve():
            before = b""
            for number in range(clock.ASKED):
                asked, sender = own.recvfrom(64)
                answer = asked + clock.TIME.pack(time.time() + 10)
                if number in (0, 1):
                    continue
                if number == 5 and before:
                    own.sendto(before, sender)
                own.sendto(answer, sender)
                before = answer

        thread = threading.Thread(target=serve)
        thread.start()
        assert clock.Asker(tmp_path).ask()["offset"] == pytest.approx(10, abs=0.05)
        thread.join()
        with pytest.raises(TimeoutError):
            clock.Asker(tmp_path).ask()
    with pytest.raises(ConnectionRefusedError):
        clock.Asker(tmp_path).ask()


def test_who_asks_before_rank_0_has_begun(tmp_path):
    asker = clock.Asker(tmp_path)
    assert asker.ask() is None and asker.due <= time.monotonic()


def test_between_two_offsets_they_count_in_proportion():
    offsets = [(100.0, 1.0), (200.0, 2.0), (300.0, 0.0)]
    found = [clock.at(offsets, when) for when in (0.0, 100.0, 150.0, 200.0, 250.0, 999.0)]
    assert found == pytest.approx([1.0, 1.0, 1.5, 2.0, 1.0, 0.0]) and clock.at([], 5.0) == 0.0


@pytest.mark.parametrize(
    ("size", "here", "several"), [("16", "8", True), ("8", "8", False), ("1", "1", False), ("", "", False)]
)
def test_whether_there_are_several_hosts(monkeypatch, size, here, several):
    monkeypatch.setenv("WORLD_SIZE", size)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", here)
    assert clock.on_several_hosts() is several
