"""bench/records.py on next to no data: who is measured, and that wrong records are not."""

import pytest


def test_every_reader_that_is_here(bench_script):
    records = bench_script("records")
    status, rows = records("--size", "2K-20K", "--mode", "hfrecord", "hfrecord-unchecked", "pread", "disk")
    assert status == 0
    passes = {(row["provider"], row["pass"]) for row in rows}
    assert passes >= {(name, "warm") for name in ("hfrecord", "hfrecord-unchecked", "pread", "disk")}
    assert all(float(row["records_per_s"]) > 0 and float(row["gbps"]) > 0 for row in rows)


def test_wrong_records_are_an_error(bench_script, monkeypatch):
    records = bench_script("records")
    monkeypatch.setattr(records.script.Pread, "read", lambda self, batch, following: [b""] * len(batch))
    with pytest.raises(AssertionError, match="pread: wrong records"):
        records("--size", "2K-20K", "--mode", "pread")
