"""The file of bucket sizes: if it cannot be read or written, it is ignored, and this is reported once."""

import json
import logging
import os

import pytest

from haiscale.ddp import sizes

WHOLE = {"bytes": 1 << 20, "measured": "2026-01-01", "seconds": {"1048576": 0.5}}


def text_of(**changes):
    return json.dumps({"version": sizes.VERSION, "sizes": {"a model": WHOLE | changes}})


UNREADABLE = {
    "empty": "",
    "truncated": text_of()[:60],
    "not a dict": "[1, 2]",
    "no dict of sizes": json.dumps({"version": sizes.VERSION, "sizes": 3}),
    "of another key": json.dumps({"2 ranks": [1, 2]}),
    "bytes": text_of(bytes="many"),
    "no bytes": text_of(bytes=0),
    "seconds": text_of(seconds={"a": 1.0}),
    "no date": text_of(measured=None),
    "no text": b"\xff\xfe\x00",
}


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setenv("HAISCALE_BUCKETS", str(tmp_path / "buckets.json"))
    sizes._say.cache_clear()
    return tmp_path / "buckets.json"


def said(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("name", UNREADABLE)
def test_what_cannot_be_read_is_ignored_and_replaced(file, caplog, name):
    content = UNREADABLE[name]
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert sizes.load() == sizes.load() == {}
    (message,) = said(caplog)
    assert str(file) in message and "is ignored" in message
    sizes.save("a model", 4096, {4096: 0.25})
    assert sizes.load()["a model"]["bytes"] == 4096


def test_another_version_is_passed_by(file, caplog):
    file.write_text(json.dumps({"version": sizes.VERSION + 1, "sizes": {"a": "b"}}))
    assert sizes.load() == {} and not said(caplog)


@pytest.mark.parametrize("place", ["/proc/nope/buckets.json", "/dev/null/buckets.json"])
def test_what_cannot_be_written_is_said_once(file, monkeypatch, caplog, place):
    monkeypatch.setenv("HAISCALE_BUCKETS", place)
    assert sizes.load() == {}
    for _ in range(2):
        sizes.save("a model", 4096, {4096: 0.25})
    (message,) = said(caplog)
    assert "is not kept for the next time" in message


def test_a_file_that_is_a_folder(file, caplog):
    file.mkdir()
    assert sizes.load() == {}
    sizes.save("a model", 4096, {4096: 0.25})
    assert len(said(caplog)) == 2 and os.listdir(file.parent) == [file.name]


def test_without_a_home(monkeypatch):
    for name in ("HAISCALE_BUCKETS", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)

    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(sizes.Path, "home", no_home)
    assert sizes.path() is None and sizes.load() == {}
