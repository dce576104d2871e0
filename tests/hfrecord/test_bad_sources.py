"""Conversions of damaged, linked and empty sources, and conversions that are interrupted at any point."""

import errno
import io
import json
import os
import random
import tarfile

import pytest

import hfrecord
from hfrecord import convert, sources
from hfrecord.__main__ import main
from hfrecord.manifest import Manifest


def test_links_are_followed_and_what_is_left_out_is_listed(tmp_path, capsys):
    far, source = tmp_path / "far", tmp_path / "in"
    far.mkdir()
    (source / "near").mkdir(parents=True)
    (far / "a.txt").write_text("far")
    (source / "near" / "b.txt").write_text("near")
    (source / "linked").symlink_to(far)
    (source / "near" / "loop").symlink_to(source)
    (source / "gone").symlink_to(tmp_path / "nowhere")
    (source / "self").symlink_to(source / "self")
    os.mkfifo(source / "pipe")
    assert main(["pack", str(source), str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert "out: 2 records, 4 left out" in said
    for why in (
        f"gone: a broken link to {tmp_path / 'nowhere'}",
        "loop: a link to a folder that it is in",
        "pipe: neither a file nor a folder",
        "self: a broken link",
    ):
        assert why in said
    found = hfrecord.FileReader(tmp_path / "out")
    assert found[:] == [{"name": "linked/a.txt", "data": b"far"}, {"name": "near/b.txt", "data": b"near"}]


def test_nothing_to_convert_is_an_error_unless_it_is_allowed(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text("\n")
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "empty").write_text("")  # a document without a token
    for name, options in (("a.jsonl", []), ("texts", ["--format", "documents"])):
        command = ["convert", str(tmp_path / name), str(tmp_path / f"out {name}"), *options]
        assert main(command) == 2 and "record" in capsys.readouterr().err
        assert main([*command, "--allow-empty"]) == 0
        assert main(["verify", str(tmp_path / f"out {name}")]) == 0


def test_an_error_has_the_file_and_the_line(tmp_path, capsys):
    lines = ['{"text": "one"}', "", '{"text": ', '{"text": "four"}', '"no object"']
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    (tmp_path / "b.jsonl").write_bytes(b'{"text": "ok"}\n{"text": "\xff"}\n')
    (tmp_path / "c.jsonl").write_text("[" * 100_000)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "binary").write_bytes(b"\xff\xfe")
    name = os.fsencode(tmp_path / "names") + b"/caf\xe9.txt"
    (tmp_path / "names").mkdir()
    with open(name, "wb") as file:
        file.write(b"x")
    for source, options, said in (
        ("a.jsonl", [], "a.jsonl, line 3: Expecting value"),
        ("a.jsonl", ["--format", "documents"], "a.jsonl, line 3: Expecting value"),
        (
            "a.jsonl",
            ["--format", "documents", "--skip-bad", "1"],
            'line 5: no object with a string "text" (more than 1',
        ),
        ("b.jsonl", [], "b.jsonl, line 2: 'utf-8' codec"),
        ("c.jsonl", [], "c.jsonl, line 1: "),
        ("texts", ["--format", "documents"], "texts/binary: 'utf-8' codec"),
        ("names", [], "caf\\xe9.txt: "),
    ):
        out = str(tmp_path / f"out {source} {len(options)}")
        assert main(["convert", str(tmp_path / source), out, *options]) == 2
        message = capsys.readouterr().err
        assert said in message and message.count("\n") == 1, message
        assert main(["verify", out]) == 1 == main(["info", out])
        assert "incomplete" in capsys.readouterr().out


@pytest.mark.parametrize("jobs", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_bad_units_are_skipped_and_listed(tmp_path, capsys, jobs):
    (tmp_path / "a.jsonl").write_text("".join("{bad\n" if i in (3, 70) else f'{{"n": {i}}}\n' for i in range(100)))
    command = ["convert", str(tmp_path / "a.jsonl"), str(tmp_path / "out"), "--jobs", str(jobs), "--skip-bad"]
    assert main([*command, "1"]) == 2 and "a.jsonl, line 71: " in capsys.readouterr().err
    assert main([*command, "2"]) == 0
    said = capsys.readouterr().out
    assert "skipped: " in said and "line 4: " in said and "out: 98 records, 2 skipped" in said
    assert hfrecord.FileReader(tmp_path / "out")[:] == [{"json": {"n": i}} for i in range(100) if i not in (3, 70)]
    assert main(["info", str(tmp_path / "out")]) == 0 and capsys.readouterr().out.count("skipped: ") == 2
    assert main([*command, "2"]) == 0 and len(Manifest.load(tmp_path / "out").skipped) == 2  # again: nothing is done


def archive(kind: str = "w") -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode=kind, format=tarfile.PAX_FORMAT) as tar:
        for i in range(6):
            for ending, size in (("txt", 9), ("bin", 700)):
                member = tarfile.TarInfo(("é" * 60 if i == 3 else "") + f"{i}.{ending}")
                member.size = size
                tar.addfile(member, io.BytesIO(bytes([i]) * size))
    return file.getvalue()


@pytest.mark.parametrize("kind", ["w", "w:gz", "w:xz"])
def test_a_tar_that_is_cut_off_anywhere(tmp_path, kind):
    """All samples, or an error that names the file."""
    data, path = archive(kind), tmp_path / "a.tar"
    path.write_bytes(data)
    whole = list(sources.source(path, "tar").read(0, 6))
    drawn = random.Random(0)
    cuts = {0, 1, 511, 512, 513, len(data) - 1} | {drawn.randrange(len(data)) for _ in range(60)}
    failed = 0
    for cut in cuts | {at + off for at in range(0, len(data), 512) for off in (0, 1, 300) if at + off < len(data)}:
        path.write_bytes(data[:cut])
        try:
            source = sources.source(path, "tar")
        except ValueError as error:
            assert str(path) in str(error) and "\n" not in str(error)
            failed += 1
        else:
            assert list(source.read(0, source.units)) == whole, cut
    assert failed > len(cuts) / 2


def test_a_damaged_header_of_a_tar_is_no_end(tmp_path):
    data = bytearray(archive())
    for number in range(0, len(data) - 1024, 512):
        damaged = data.copy()
        if damaged[number + 257 : number + 262] != b"ustar":
            continue
        damaged[number] ^= 0xFF
        (tmp_path / "a.tar").write_bytes(damaged)
        with pytest.raises(ValueError, match=r"a\.tar: "):
            sources.source(tmp_path / "a.tar")


def test_a_parquet_file_that_is_cut_off_anywhere(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([{"a": i} for i in range(50)]), path, 7)
    data = path.read_bytes()
    for cut in range(0, len(data), 31):
        path.write_bytes(data[:cut])
        with pytest.raises(ValueError, match=r"a\.parquet: ") as error:
            sources.source(path)
        assert "\n" not in str(error.value)


def test_a_writer_is_true_while_it_is_open(tmp_path):
    for writer in (hfrecord.DatasetWriter(tmp_path / "set"), hfrecord.FileWriter(tmp_path / "a.hfr")):
        assert writer and not len(writer)
        writer.close()
        assert not writer


def test_a_data_set_is_complete_when_its_writer_was_closed(tmp_path, capsys):
    with pytest.raises(ZeroDivisionError), hfrecord.DatasetWriter(tmp_path / "set") as writer:
        writer.write(b"a")
        writer.commit()
        raise ZeroDivisionError
    assert not Manifest.load(tmp_path / "set").complete
    assert main(["verify", str(tmp_path / "set")]) == 1
    assert "incomplete: 1 records are whole, but their writer was not closed\n" in capsys.readouterr().out
    with hfrecord.DatasetWriter(tmp_path / "set", append=True) as writer:
        writer.write(b"b")
    assert main(["verify", str(tmp_path / "set")]) == 0 and hfrecord.FileReader(tmp_path / "set")[:] == [b"a", b"b"]


CALLS = ("pwrite", "fsync", "replace", "ftruncate", "unlink")  # what a writer does to the disk


def interrupted(path, out, point: int, full: bool) -> int:
    """Converts in a process that is killed at the `point`-th call (a write half done), or whose disk is full then.

    Returns how the process ended: 0 if it came to its end.
    """
    if pid := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    at = 0

    def wrapped(name, call):
        def wrapper(*args, **kwargs):
            nonlocal at
            at += 1
            if at < point:
                return None if name == "fsync" else call(*args, **kwargs)  # a kill loses nothing that was written
            if name == "pwrite" and (at == point or not full):
                call(args[0], bytes(args[1])[: len(args[1]) // 2], args[2])
            if not full:
                os.kill(os.getpid(), 9)
            if name in ("pwrite", "fsync"):
                raise OSError(errno.ENOSPC, "no space left on device")
            return call(*args, **kwargs)

        return wrapper

    for name in CALLS:
        setattr(os, name, wrapped(name, getattr(os, name)))
    convert.COMMIT = 1
    status = 1
    try:
        status = main(["convert", str(path), str(out), "--part-bytes", "3000"])
    finally:
        os._exit(status)


@pytest.mark.parametrize(
    "format", ["jsonl", *(pytest.param(name, marks=pytest.mark.slow) for name in ("folder", "tar"))]
)
def test_interrupted_at_any_point(tmp_path, format, capfd):
    """What is verified is true, and the same command goes on without a lost or a doubled record."""
    path = tmp_path / {"folder": "in", "jsonl": "a.jsonl", "tar": "a.tar"}[format]
    if format == "folder":
        path.mkdir()
        for i in range(200):
            (path / f"{i:03d}").write_bytes(bytes([i]) * i)
    elif format == "jsonl":
        path.write_text("".join(json.dumps({"n": i, "text": "x" * i}) + "\n" for i in range(200)))
    else:
        with tarfile.open(path, "w") as tar:
            for i in range(200):
                member = tarfile.TarInfo(f"{i:03d}.bin")
                member.size = i
                tar.addfile(member, io.BytesIO(bytes([i]) * i))
    assert main(["convert", str(path), str(tmp_path / "whole"), "--part-bytes", "3000"]) == 0
    whole, drawn, ends = hfrecord.FileReader(tmp_path / "whole")[:], random.Random(1), set()
    for trial in range(8):
        full, out = trial % 3 == 2, tmp_path / f"out{trial}"
        for _ in range(3):
            ends.add(interrupted(path, out, drawn.randrange(1, 60), full))
            if Manifest.path(out).exists():
                records = hfrecord.FileReader(out)[:]
                assert records == whole[: len(records)]
                complete = main(["verify", str(out)]) == 0
                assert complete == Manifest.load(out).complete and (not complete or records == whole)
        assert main(["convert", str(path), str(out), "--part-bytes", "3000"]) == 0 == main(["verify", str(out)])
        assert hfrecord.FileReader(out)[:] == whole
    assert {-9, 2} <= ends
    capfd.readouterr()
