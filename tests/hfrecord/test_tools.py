"""python -m hfrecord: packing, converting, verifying, and going on after a kill."""

import io
import itertools
import json
import tarfile

import numpy as np
import pytest

import hfrecord
from hfrecord import convert
from hfrecord.__main__ import main


@pytest.fixture
def folder(tmp_path):
    for number in range(20):
        file = tmp_path / "in" / f"class{number % 3}" / f"{number}.bin"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(bytes([number]) * number)
    return tmp_path / "in"


def test_a_folder_and_back(folder, tmp_path, capsys):
    assert main(["pack", str(folder), str(tmp_path / "out"), "--part-bytes", "5000", "--compression", "zstd"]) == 0
    assert main(["verify", str(tmp_path / "out")]) == 0 and main(["info", str(tmp_path / "out")]) == 0
    assert "20 records are whole" in (said := capsys.readouterr().out) and "name: text" in said
    assert main(["unpack", str(tmp_path / "out"), str(tmp_path / "back")]) == 0
    for file in folder.rglob("*.bin"):
        assert (tmp_path / "back" / file.relative_to(folder)).read_bytes() == file.read_bytes()


def test_a_conversion_that_was_killed_is_gone_on_with(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(convert, "COMMIT", 1)
    schema, records, total = convert.source(folder)
    with pytest.raises(ZeroDivisionError):
        cut = (record if record["name"] < "class1/" else 1 / 0 for record in records)
        convert.write(tmp_path / "out", schema, cut, 5000, None, lambda items, done: items)
    before = len(hfrecord.FileReader(tmp_path / "out"))
    assert 0 < before < total
    assert main(["pack", str(folder), str(tmp_path / "out"), "--part-bytes", "5000"]) == 0
    assert hfrecord.FileReader(tmp_path / "out")[:] == list(convert.source(folder)[1])


def test_formats(folder, tmp_path):
    rows = [{"a": i, "b": [1.5, "\u00e9"]} for i in range(5)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    np.save(tmp_path / "a.npy", np.arange(12, dtype=np.int16).reshape(4, 3))
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for number, field in itertools.product(range(3), ("cls", "jpg")):
            member = tarfile.TarInfo(f"d/{number}.{field}")
            member.size = number
            archive.addfile(member, io.BytesIO(bytes(number)))
    with hfrecord.FfrWriter(tmp_path / "a.ffr") as writer:
        writer.write(b"x")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(_table(), tmp_path / "a.parquet")
    found = {}
    for name in ("a.jsonl", "a.npy", "a.tar", "a.ffr", "a.parquet"):
        assert main(["convert", str(tmp_path / name), str(tmp_path / "out" / name)]) == 0
        found[name] = hfrecord.FileReader(tmp_path / "out" / name)[:]
    assert [record["json"] for record in found["a.jsonl"]] == rows
    assert [record["x"].tolist() for record in found["a.npy"]] == np.arange(12).reshape(4, 3).tolist()
    assert found["a.tar"] == [{"key": f"d/{i}", "cls": bytes(i), "jpg": bytes(i)} for i in range(3)]
    assert found["a.ffr"] == [b"x"] and [record["json"] for record in found["a.parquet"]] == [{"a": 1}, {"a": 2}]
    assert main(["convert", str(folder), str(tmp_path / "images"), "--format", "images"]) == 0
    labels = hfrecord.FileReader(tmp_path / "images").schema.fields
    assert labels == {"image": "image", "label": "int64"}


def _table():
    import pyarrow

    return pyarrow.Table.from_pylist([{"a": 1}, {"a": 2}])


def test_tokens(folder, tmp_path):
    text = b"".join(file.read_bytes() for file in sorted(folder.rglob("*.bin")))
    command = ["convert", str(folder), str(tmp_path / "out"), "--format", "tokens", "--length", "32"]
    assert main(command) == 0
    found = [bytes(record["input_ids"]) for record in hfrecord.FileReader(tmp_path / "out")]
    assert len(found) == len(text) // 32 > 1 and b"".join(found) == text[: len(text) // 32 * 32]


def test_damage_is_told_in_a_line(tmp_path, capsys):
    (tmp_path / "a.hfr").write_bytes(b"no record file")
    assert main(["verify", str(tmp_path / "a.hfr")]) == 1
    assert main(["convert", str(tmp_path / "a.what"), str(tmp_path / "out")]) == 1
    assert capsys.readouterr().err.count("\n") == 2
