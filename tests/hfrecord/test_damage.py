"""Damage: killed writers and readers, flipped bits, truncated files, hostile headers."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import ranks

import hfrecord

WORKER = Path(__file__).parents[1] / "workers" / "records.py"
worker = ranks.loaded(WORKER)


@contextlib.contextmanager
def started(*arguments, **environment):
    """A worker process, killed at the end if it still runs. Its stderr becomes the error's text."""
    command = [sys.executable, WORKER, *map(str, arguments)]
    environment = {**os.environ, **environment}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True, env=environment)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.stdout.close()
        process.wait()


def killed_writers(kind: str, path: Path, kills: int) -> None:
    """Each continues with what earlier ones left. Everything reported as committed is there each time."""
    rng, least = random.Random(0), 0
    for number in range(kills):
        with started("writes", kind, path) as process:
            wanted = rng.randrange(1, 8)
            told = [int(process.stdout.readline()) for _ in range(wanted)]
            time.sleep(rng.random() * 0.02)  # to any later point: a write, a commit, a new part
            process.send_signal(signal.SIGKILL)
            told += [int(line) for line in process.stdout.read().splitlines(keepends=True) if line.endswith("\n")]
        least = max(least, told[-1])
        found = hfrecord.FileReader(path)
        assert len(found) >= least, f"after kill {number}: {len(found)} records, {least} were committed"
        begin = max(0, len(found) - 200)
        assert found[begin:] == [worker.record(i) for i in range(begin, len(found))]
    assert hfrecord.FileReader(path)[:] == [worker.record(i) for i in range(len(found))]


@pytest.mark.parametrize("kind", ["file", "zstd", "dataset"])
def test_a_killed_writer_leaves_what_was_committed(tmp_path, kind):
    killed_writers(kind, tmp_path / ("set" if kind == "dataset" else "a.hfr"), 6)


@pytest.mark.slow
@pytest.mark.rest
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", ["file", "dataset"])
def test_a_hundred_killed_writers(tmp_path, kind):
    killed_writers(kind, tmp_path / ("set" if kind == "dataset" else "a.hfr"), 100)


def opened(pid: int) -> list[str]:
    """What a process has open or mapped; files that it closes meanwhile may be missing."""
    found = [Path(f"/proc/{pid}/maps").read_text()]
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
    return found


def killed_readers(path: Path, kills: int) -> None:
    """They use no named memory. A killed reader affects neither other readers nor a writer."""
    before = set(os.listdir("/dev/shm"))
    with hfrecord.FileWriter(path) as writer:
        for number in range(1000):
            writer.write(worker.record(number))
    for _ in range(kills):
        with started("reads", path) as process:
            told = {int(process.stdout.readline())}
            while len(told) < 2:  # parent and child read
                told.add(int(process.stdout.readline()))
            for pid in (process.pid, *(told - {0})):
                assert not any("/dev/shm" in place for place in opened(pid))
            with hfrecord.FileWriter(path, append=True) as writer:
                writer.write(worker.record(len(writer)))
    found = hfrecord.FileReader(path)
    assert found[:] == [worker.record(i) for i in range(1000 + kills)]
    assert not [name for name in set(os.listdir("/dev/shm")) - before if "hfr" in name.lower()]


def test_killed_readers_leave_nothing(tmp_path):
    killed_readers(tmp_path / "a.hfr", 3)


@pytest.mark.slow
@pytest.mark.rest
@pytest.mark.timeout(1800)
def test_two_hundred_killed_readers(tmp_path):
    killed_readers(tmp_path / "a.hfr", 200)


def mutated(tmp_path, first: int, last: int, **environment) -> None:
    with started("mutations", tmp_path, first, last, **environment) as process:
        text = process.stdout.read()
        assert process.wait() == 0, "the process's own words are above"
    counts = json.loads(text)
    assert counts["told"] > 3 * counts["right"] > 0, counts


@pytest.mark.parametrize("native", ["1", "0"])
def test_a_damaged_file_is_an_error_or_harmless(tmp_path, native):
    mutated(tmp_path, 600 * int(native), 600 * int(native) + 300, HFRECORD_NATIVE=native)


@pytest.mark.slow
@pytest.mark.rest
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("native", ["1", "0"])
def test_ten_thousand_damaged_files(tmp_path, native):
    mutated(tmp_path, 2000, 12_000, HFRECORD_NATIVE=native)


@pytest.mark.parametrize("check", [True, False])
def test_every_flipped_byte_is_told_or_harmless(tmp_path, check):
    """All bytes of a small file, one after the other; without checks, records may be wrong, and nothing else."""
    path = tmp_path / "a.hfr"
    with hfrecord.FileWriter(path) as writer:
        for number in range(5):
            writer.write(bytes([number]) * 7)
        writer.commit()
        writer.write(b"last")
    whole = path.read_bytes()
    records, told = hfrecord.FileReader(path)[:], 0
    flipped = [place for place in range(len(whole)) if place < 32 or place > 4096 or place % 1024 >= 512 or place < 600]
    for place in flipped[:: 1 if check else 3]:
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x10]) + whole[place + 1 :])
        try:
            found = hfrecord.FileReader(path, check)[:]
            assert found == records or not check, f"byte {place}"
        except hfrecord.RecordError as error:
            told += 1
            assert str(path) in str(error)
            if check and error.record is not None:
                assert f"record {error.record}" in str(error) and f"byte {error.offset}" in str(error)
    assert told > 100 if check else told > 20


def test_verify_finds_what_no_read_has_met(tmp_path):
    path = tmp_path / "a.hfr"
    with hfrecord.FileWriter(path) as writer:
        for number in range(300):
            writer.write(worker.record(number))
    data = bytearray(path.read_bytes())
    data[-10] ^= 1  # the crc of the last record, in the index
    path.write_bytes(data)
    (file,) = hfrecord.FileReader(path).files()
    with pytest.raises(hfrecord.RecordError, match="checksum of the index"):
        file.verify()
    with pytest.raises(hfrecord.RecordError, match="record 299, byte") as error:
        hfrecord.FileReader(path)[299]
    assert error.value.path == str(path) and error.value.record == 299


def test_a_file_that_is_cut_while_it_is_read_is_an_error(tmp_path):
    path = tmp_path / "a.hfr"
    with hfrecord.FileWriter(path) as writer:
        for number in range(40):
            writer.write(worker.record(number))
    found = hfrecord.FileReader(path)
    assert found[30] == worker.record(30)
    os.truncate(path, 100)
    for read in (lambda: found[30], lambda: found.advise([30]), lambda: found[:]):
        with pytest.raises(hfrecord.RecordError, match="cut off while it was open"):
            read()
