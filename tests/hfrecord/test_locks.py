"""A file and a folder have one writer at a time."""

import os

import pytest

import hfrecord


def test_one_writer_of_a_folder_at_a_time(tmp_path):
    """Also after the first one has gone on to another part; and a writer that could not begin leaves no lock."""
    first = hfrecord.DatasetWriter(tmp_path / "set", part_bytes=40)
    for number in range(8):
        first.write(bytes([number]) * 10)
    assert (tmp_path / "set" / "part-000001.hfr").exists()
    for append in (True, False):
        with pytest.raises(hfrecord.RecordError, match="set: another writer"):
            hfrecord.DatasetWriter(tmp_path / "set", append=append)
    first.close()
    first.close()
    for options in ({}, {"append": True, "schema": {"a": "text"}}):
        with pytest.raises((FileExistsError, ValueError)) as failed:
            hfrecord.DatasetWriter(tmp_path / "set", **options)
        assert not isinstance(failed.value, hfrecord.RecordError)
    with hfrecord.DatasetWriter(tmp_path / "set", append=True) as writer:
        assert len(writer) == 8
    hfrecord.DatasetWriter(tmp_path / "set", append=True).abandon()
    del writer
    hfrecord.DatasetWriter(tmp_path / "set", append=True)  # is not kept
    hfrecord.DatasetWriter(tmp_path / "set", append=True).close()
    assert hfrecord.FileReader(tmp_path / "set")[:] == [bytes([i]) * 10 for i in range(8)]


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_process_neither_keeps_a_lock_nor_ends_it(tmp_path):
    made = {"a.hfr": hfrecord.FileWriter, "set": hfrecord.DatasetWriter}
    for name, kind in made.items():
        writer = kind(tmp_path / name)
        here, there = os.pipe()
        pid = os.fork()
        if not pid:
            writer.abandon()
            os._exit(0)
        os.waitpid(pid, 0)
        with pytest.raises(hfrecord.RecordError, match="another writer"):
            kind(tmp_path / name, append=True)
        pid = os.fork()
        if not pid:
            os.read(here, 1)
            os._exit(0)
        try:
            writer.close()
            kind(tmp_path / name, append=True).close()
        finally:
            os.write(there, b"x")
            os.waitpid(pid, 0)
            os.close(here)
            os.close(there)
