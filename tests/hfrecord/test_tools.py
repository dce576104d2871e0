"""python -m hfrecord: packing, converting, verifying, and resuming after a kill."""

import io
import itertools
import json
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import hfnn
import hfrecord
from hfrecord import convert, sources
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
    """In the middle of a chunk, and between two commits."""
    monkeypatch.setattr(convert, "COMMIT", 1)
    source = sources.source(folder)
    cut = sources.Source(source.schema, source.units, lambda begin, end: _cut(source.read(begin, end)), str, chunk=3)
    with pytest.raises(ZeroDivisionError):
        convert.write(tmp_path / "out", cut, 5000)
    before = len(hfrecord.FileReader(tmp_path / "out"))
    assert 0 < before < source.units
    assert main(["pack", str(folder), str(tmp_path / "out"), "--part-bytes", "5000"]) == 0
    assert hfrecord.FileReader(tmp_path / "out")[:] == list(source.read(0, source.units))


def _cut(records):
    return (record if record["name"] < "class1/" else 1 / 0 for record in records)


def test_another_source_does_not_go_on_in_the_same_folder(tmp_path, capsys):
    """As many units, fewer, more, the same file when it has grown, and another length; the same source goes on."""
    for name, units in (("a", 3), ("b", 3), ("c", 2), ("d", 5)):
        (tmp_path / f"{name}.jsonl").write_text("".join(f'{{"text": "{name}{i}"}}\n' for i in range(units)))
    out, first = str(tmp_path / "out"), tmp_path / "a.jsonl"
    assert main(["convert", str(first), out]) == 0 == main(["convert", str(first), out])
    whole = hfrecord.FileReader(out)[:]
    for other in ("b", "c", "d"):
        assert main(["convert", str(tmp_path / f"{other}.jsonl"), out]) == 2
        said = capsys.readouterr().err
        assert "out holds records of another source" in said and "a.jsonl" in said and f"{other}.jsonl" in said
    documents = ["convert", str(first), str(tmp_path / "documents"), "--format", "documents", "--length"]
    assert main([*documents, "8"]) == 0 == main([*documents, "8"]) and main([*documents, "9"]) == 2
    assert "(length 8, now 9): give another folder" in capsys.readouterr().err
    with first.open("a") as file:
        file.write("{}\n")
    assert main(["convert", str(first), out]) == 2 and "units 3, now 4" in capsys.readouterr().err
    assert hfrecord.FileReader(out)[:] == whole and len(whole) == 3


def test_a_data_set_of_no_conversion_and_one_of_an_older_version(tmp_path):
    (tmp_path / "a.jsonl").write_text("{}\n" * 4)
    source = sources.source(tmp_path / "a.jsonl")
    with hfrecord.DatasetWriter(tmp_path / "own", source.schema) as writer:
        writer.write({"json": 1})
    with pytest.raises(ValueError, match="own has records of no conversion"):
        convert.write(tmp_path / "own", source)
    with hfrecord.DatasetWriter(tmp_path / "old", source.schema) as writer:  # which kept no origin
        writer.write({"json": 1})
        writer.commit(1)
    assert convert.write(tmp_path / "old", source) == 4 == convert.write(tmp_path / "old", source)
    assert hfrecord.FileReader(tmp_path / "old")[0] == {"json": 1}


def test_what_is_written_does_not_depend_on_the_number_of_processes(folder, tmp_path, monkeypatch):
    for name, jobs in (("one", "1"), ("three", "3")):
        command = ["pack", str(folder), str(tmp_path / name), "--part-bytes", "5000", "--compression", "zstd"]
        assert main([*command, "--jobs", jobs]) == 0
    one, three = ({file.name: file.read_bytes() for file in (tmp_path / name).iterdir()} for name in ("one", "three"))
    assert one == three and len(one) > 1
    seen = []
    convert.write(tmp_path / "two", sources.source(folder), progress=seen.append)
    assert seen == [0, 20]


def test_an_error_of_a_process_is_told(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n' * 100 + "{no json\n")
    assert main(["convert", str(tmp_path / "a.jsonl"), str(tmp_path / "out"), "--jobs", "2"]) == 2
    assert "a.jsonl, line 101: Expecting" in capsys.readouterr().err


def test_a_killed_conversion_leaves_no_process_and_goes_on(tmp_path):
    rows = np.arange(200_000 * 64, dtype=np.int64).reshape(-1, 64)
    np.save(tmp_path / "a.npy", rows)
    command = [sys.executable, "-c", SLOW, tmp_path / "a.npy", tmp_path / "out"]
    for _ in range(2):
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            told = [int(process.stdout.readline()) for _ in range(50)]
            own = children(process.pid)
            process.kill()
            process.wait()
        assert len(own) >= 2 and told[-1] > told[0]
        for _ in range(1000):
            if not any(Path(f"/proc/{pid}").exists() for pid in own):
                break
            time.sleep(0.02)
        assert not any(Path(f"/proc/{pid}").exists() for pid in own)
        assert len(hfrecord.FileReader(tmp_path / "out")) >= told[-2]  # the last but one was committed
    found = convert.write(tmp_path / "out", sources.source(tmp_path / "a.npy"))
    assert found == 200_000
    reader = hfrecord.FileReader(tmp_path / "out")
    assert all((reader[k]["x"] == rows[k]).all() for k in range(0, 200_000, 997))


SLOW = """
import sys
from hfrecord import convert, sources
if __name__ == "__main__":
    convert.COMMIT = 1
    convert.write(sys.argv[2], sources.source(sys.argv[1]), jobs=2, progress=lambda units: print(units, flush=True))
"""


def children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


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


def test_records_are_copied_as_they_are(tmp_path):
    """An image is not encoded again: a CMYK image, which has no PNG, and bytes that are no image."""
    image, buffer = pytest.importorskip("PIL.Image"), io.BytesIO()
    exif = image.Exif()
    exif[0x0112] = 6
    image.new("CMYK", (8, 8)).save(buffer, "JPEG", exif=exif)
    records = [{"n": i, "image": data} for i, data in enumerate([buffer.getvalue(), b"no image"] * 20)]
    with hfrecord.DatasetWriter(tmp_path / "a", {"n": "int64", "image": "image"}, part_bytes=5000) as writer:
        for record in records:
            writer.write(record)
    before = hfrecord.FileReader(tmp_path / "a").read(range(40))
    for name, options in {"b": [], "c": ["--compression", "zstd"], "d": ["--jobs", "2"]}.items():
        assert main(["convert", str(tmp_path / "a"), str(tmp_path / name), "--format", "hfr", *options]) == 0
        found = hfrecord.FileReader(tmp_path / name)
        assert found.read(range(40)) == before and found[0]["image"].getexif()[0x0112] == 6
    assert hfrecord.FileReader(tmp_path / "c").sizes().sum() < sum(map(len, before))


def test_images_are_those_of_torchvisions_imagefolder(tmp_path, capsys):
    names = ["cat/z.JPG", "cat/a.jpeg", "cat/sub/b.webp", "cat/.DS_Store", "cat/notes.txt", "dog/c.png", "list.txt"]
    for name in names:
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_bytes(name.encode())
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "d.bmp").write_bytes(b"linked")
    (tmp_path / "in" / "dog" / "more").symlink_to(tmp_path / "linked")
    command = ["convert", str(tmp_path / "in"), str(tmp_path / "out"), "--format", "images"]
    assert main(command) == 0
    reader = hfrecord.FileReader(tmp_path / "out")
    assert reader.schema.fields == {"image": "image", "label": "int64"}
    expected = [(b"cat/a.jpeg", 0), (b"cat/z.JPG", 0), (b"cat/sub/b.webp", 0), (b"dog/c.png", 1), (b"linked", 1)]
    assert [(data[8:-8], data[-8]) for data in reader.read(range(len(reader)))] == expected
    (tmp_path / "in" / ".ipynb_checkpoints").mkdir()
    assert main(command) == 2 and "no image in the folder of a class, .ipynb_checkpoints" in capsys.readouterr().err
    assert main(["convert", str(tmp_path / "linked"), str(tmp_path / "no"), "--format", "images"]) == 2
    assert "linked: no folder of a class" in capsys.readouterr().err
    folders = pytest.importorskip("torchvision.datasets")
    (tmp_path / "in" / ".ipynb_checkpoints").rmdir()
    samples = folders.ImageFolder(tmp_path / "in").samples
    assert [(Path(file).read_bytes(), label) for file, label in samples] == expected


def test_a_member_that_is_twice_in_a_sample_of_a_tar_is_an_error(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for name in ("a.txt", "a.txt", "b.txt"):
            archive.addfile(tarfile.TarInfo(name))
    with pytest.raises(ValueError, match=r"a.tar: a.txt is there twice"):
        sources.source(tmp_path / "a.tar")


def _table():
    import pyarrow

    return pyarrow.Table.from_pylist([{"a": 1}, {"a": 2}])


def test_tokens(folder, tmp_path):
    text = b"".join(file.read_bytes() for file in sorted(folder.rglob("*.bin")))
    command = ["convert", str(folder), str(tmp_path / "out"), "--format", "tokens", "--length", "32"]
    assert main(command) == 0
    found = [bytes(record["input_ids"]) for record in hfrecord.FileReader(tmp_path / "out")]
    assert len(found) == len(text) // 32 > 1 and b"".join(found) == text[: len(text) // 32 * 32]


def test_parquet_and_tokens_in_parts(tmp_path):
    """Units are located wherever a chunk begins."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist([{"a": i} for i in range(100)]), tmp_path / "a.parquet", 7)
    (tmp_path / "texts").mkdir()
    for number in range(9):
        (tmp_path / "texts" / str(number)).write_bytes(bytes([number]) * (number * 5 % 11))
    for source in (sources.source(tmp_path / "a.parquet"), sources.source(tmp_path / "texts", "tokens", 4)):
        whole = list(map(str, source.read(0, source.units)))
        assert len(whole) == source.units > 9
        for step in (1, 3, 10):
            parts = [source.read(at, min(at + step, source.units)) for at in range(0, source.units, step)]
            assert [str(record) for part in parts for record in part] == whole


def test_a_compressed_tar(tmp_path):
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as archive:
        for number in range(5):
            member = tarfile.TarInfo(f"{number}.bin")
            member.size = 1000 + number
            archive.addfile(member, io.BytesIO(bytes([number]) * member.size))
    assert main(["convert", str(tmp_path / "a.tar.gz"), str(tmp_path / "out"), "--format", "tar"]) == 0
    found = hfrecord.FileReader(tmp_path / "out")[:]
    assert [record["bin"] for record in found] == [bytes([i]) * (1000 + i) for i in range(5)]


def test_documents_are_packed_by_the_collator(tmp_path):
    """Bytes as tokens: all are there, each sequence has its own positions, and batches have at most max_tokens."""
    texts = ["a" * 5, "", "\u00e9" * 20, "b" * 70, "c"]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    command = ["convert", str(tmp_path / "a.jsonl"), str(tmp_path / "out"), "--format", "documents", "--length", "32"]
    assert main([*command, "--jobs", "2"]) == 0 == main(command)
    dataset = hfrecord.Dataset(tmp_path / "out")
    pieces = [bytes(record["input_ids"].astype(np.uint8)) for record in dataset]
    cut = [text.encode()[at : at + 32] for text in texts for at in range(0, len(text.encode()), 32)]
    assert pieces == cut
    lengths = (dataset.reader.sizes() - 8) // 4
    assert lengths.tolist() == list(map(len, cut))
    sampler = hfnn.data.PackedBatchSampler(lengths, 40, rank=0, world_size=1)
    collate = hfnn.data.PackedCollator(max_tokens=40)
    loader = torch.utils.data.DataLoader(dataset, batch_sampler=sampler, collate_fn=collate)
    found = []
    for batch in loader:
        starts = batch["cu_seqlens"].tolist()
        ids, positions = batch["input_ids"][0].tolist(), batch["position_ids"][0].tolist()
        for begin, end in itertools.pairwise(starts):
            found.append(bytes(ids[begin:end]))
            assert positions[begin:end] == list(range(end - begin))
    assert sorted(found) == sorted(cut)
    resumed = hfrecord.DataLoader(dataset, 2, seed=1, collate_fn=collate)
    first = next(iter(resumed))
    assert first["input_ids"].shape[0] == 1 and resumed.state_dict()["consumed"] == 2


def test_documents_by_a_tokenizer_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "one": 1, "two": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a").write_text("two one one")
    (tmp_path / "texts" / "b").write_text("three two")
    more = ["--format", "documents", "--length", "2", "--tokenizer", str(tmp_path / "tokenizer")]
    assert main(["convert", str(tmp_path / "texts"), str(tmp_path / "out"), *more]) == 0
    found = [record["input_ids"].tolist() for record in hfrecord.FileReader(tmp_path / "out")]
    assert found == [[2, 1], [1], [0, 2]]


def test_bench_says_what_it_reads(folder, tmp_path, capsys):
    assert main(["pack", str(folder), str(tmp_path / "out")]) == 0
    assert main(["bench", str(tmp_path / "out"), "--batch", "4", "--batches", "3"]) == 0
    said = capsys.readouterr().out
    assert "3 random batches of 4" in said and said.count("dropped before") == 2 == said.count("in memory")


def test_damage_is_told_in_a_line(tmp_path, capsys):
    (tmp_path / "a.hfr").write_bytes(b"no record file")
    assert main(["verify", str(tmp_path / "a.hfr")]) == 2
    assert main(["convert", str(tmp_path / "a.what"), str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.count("\n") == 2
