"""bench/records.py on tiny data: which readers are measured, and that wrong records are not."""

import pytest

OURS = ["hfrecord", "hfrecord-unchecked", "hfrecord-python", "hfrecord-all", "hfrecord-window"]
OTHERS = ["pread", "advised", "ffcv_like"]  # they need no package


def test_every_reader_that_is_here(bench_script):
    status, rows = bench_script("records")("--size", "2K-20K", "--mode", *OURS, *OTHERS, "disk")
    assert status == 0
    passes = {(row["provider"], row["pass"]) for row in rows}
    assert passes >= {(name, "warm") for name in (*OURS, *OTHERS)}
    assert all(float(row["records_per_s"]) > 0 and float(row["gbps"]) > 0 for row in rows)


def test_a_share_of_the_records(bench_script):
    status, rows = bench_script("records")("--size", "2K-20K", "--mode", "hfrecord", "ffcv_like", "--share", "0.5")
    assert status == 0 and {row["provider"] for row in rows} == {"hfrecord"}
    assert {row["case"] for row in rows} == {"2K-20Kx64x0.5"} and {row["records"] for row in rows} == {"128"}


def test_wrong_records_are_an_error(bench_script, monkeypatch):
    records = bench_script("records")
    monkeypatch.setattr(records.script.MODES["pread"], "read", lambda self, batch, following: [b""] * len(batch))
    with pytest.raises(AssertionError, match="pread: wrong records"):
        records("--size", "2K-20K", "--mode", "pread")
