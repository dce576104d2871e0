"""The plan: defaults, file, explanations, and measurement."""

import csv
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import loaded

from hfreduce import _C, core, plan, tune, tune_device

ROOT = Path(__file__).resolve().parents[2]
COLLECTIVES = plan.KINDS[:-2]


@pytest.fixture(autouse=True)
def file(monkeypatch, tmp_path):
    """A path for the test's own file of rows, which does not exist yet; no launcher."""
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "cache" / "plan.json"
    monkeypatch.setenv("HFREDUCE_PLAN", str(path))
    return path


def default(kind, nbytes, ranks=4, hosts=1):
    return plan.choose(kind, nbytes, plan.Shape(ranks, hosts), [])


def row(kind="all_reduce", max_bytes=1000, inside="one_shot", between="ring", chunk=4096, streams=2):
    return plan.Row(kind, max_bytes, inside, between, chunk, streams)


# Defaults


@pytest.mark.parametrize("hosts", (1, 2, 8, 9, 64, 1024))
@pytest.mark.parametrize("kind", plan.KINDS)
def test_there_is_a_choice_for_every_size(kind, hosts):
    for nbytes in (0, 1, 4096, 32 << 10, 1 << 20, 1 << 30, plan.ANY):
        chosen = default(kind, nbytes, 8 * hosts, hosts)
        assert 64 <= chosen.chunk <= plan.SLOT and 1 <= chosen.streams <= plan.MAX_STREAMS


def test_small_messages_take_few_steps_and_large_ones_move_few_bytes():
    assert {default("all_reduce", n, 2).inside for n in (0, 4, 1 << 30)} == {"one_shot"}  # two ranks: equal bytes
    for ranks, most in ((4, 64 << 10), (8, 32 << 10)):
        found = [default("all_reduce", n, ranks).inside for n in (0, 4, most, most + 1, 1 << 30)]
        assert found == ["one_shot"] * 3 + ["two_shot"] * 2
    sizes = (1 << 10, 1 << 20, 1 << 30)
    assert [default("all_reduce", n, 8, 8).between for n in sizes] == ["direct", "direct", "direct"]
    assert [default("all_reduce", n, 16, 16).between for n in sizes] == ["tree", "tree", "ring"]
    assert [default("all_reduce", n, 1024, 1024).between for n in sizes] == ["tree", "tree", "tree"]
    assert [default("broadcast", n, 16, 16).between for n in sizes] == ["tree", "tree", "tree"]
    assert [default("all_to_all", n, 16, 16).between for n in sizes] == ["direct", "direct", "direct"]


def test_hosts_agree_however_many_ranks_and_cores_each_has():
    for kind in COLLECTIVES:
        for nbytes in (1 << 10, 1 << 20, 1 << 26):
            rows = [
                plan.Row.of(_C.choose(local, 16, cores, plan.SLOT, [], plan.KINDS.index(kind), nbytes))
                for local in (1, 2, 8)
                for cores in (1, 64)
            ]
            assert len({(row.between, row.streams) for row in rows}) == 1, rows


def test_a_chunk_fits_into_a_small_slot():
    assert _C.choose(2, 1, 2, 4096, [], plan.KINDS.index("all_reduce"), 1 << 20)[4] == 4096


def test_rows_go_before_the_defaults():
    rows = [row(max_bytes=1000).tuple(), row(max_bytes=2000, streams=3).tuple()]
    of = plan.Shape(4)
    assert plan.choose("all_reduce", 1000, of, rows).streams == 2
    assert plan.choose("all_reduce", 1001, of, rows).streams == 3
    assert plan.choose("all_reduce", 2001, of, rows) == default("all_reduce", 2001)
    assert plan.choose("broadcast", 10, of, rows) == default("broadcast", 10)


@pytest.mark.parametrize(
    "at, value, message",
    [
        (0, 11, "its kind must be known"),
        (1, -1, "not negative"),
        (2, 2, "an algorithm that there is not"),
        (3, 3, "an algorithm that there is not"),
        (4, 0, "a chunk of 0 bytes"),
        (4, plan.SLOT + 1, f"a slot has {plan.SLOT}"),
        (5, 0, "0 streams; there may be 1 to 64"),
        (5, 65, "65 streams"),
    ],
)
def test_rows_that_make_no_sense_are_refused(at, value, message):
    numbers = list(row().tuple())
    numbers[at] = value
    with pytest.raises(ValueError, match=message):
        _C.choose(2, 1, 2, plan.SLOT, [tuple(numbers)], 1, 1)


# The file


def test_rows_come_back_and_other_shapes_stay(file):
    assert plan.load() == {} and plan.rows(2) == []
    plan.save(plan.Shape(2), [row(), row("all_gather", plan.ANY)])
    plan.save(plan.Shape(8, 2), [row(streams=7)])
    plan.save(plan.Shape(2), [row(streams=5)])
    assert plan.rows(2) == [row(streams=5).tuple()] and plan.rows(3) == []
    assert plan.load()["8 ranks on 2 hosts"]["rows"] == [row(streams=7)]
    assert [path.name for path in file.parent.iterdir()] == ["plan.json"]


@pytest.mark.parametrize("peers", [True, False])
@pytest.mark.parametrize("ranks", [2, 8])
def test_what_is_measured_on_gpus_can_be_kept(file, ranks, peers):
    for kind, rows in tune_device.candidates(ranks, peers).items():
        plan.save(plan.Shape(ranks), rows, part="devices")
        assert plan.device_rows(ranks) == [row.tuple() for row in rows]
        assert {row.kind for row in rows} == {kind} and ("mapped" in {row.path for row in rows}) != peers


def test_the_faster_backend_between_hosts_is_kept(file, monkeypatch, capfd):
    """Measured by two ranks as two hosts, with gloo in NCCL's place."""
    program = (
        "import torch.distributed as dist; from types import SimpleNamespace; from hfreduce import tune_device\n"
        "options = SimpleNamespace(hosts=2, sizes=[4096, 1 << 20], rounds=3, seconds=0.01)\n"
        "store, rank, size = next(dist.rendezvous('env://'))\n"
        "rows = tune_device.compare(store, rank, size, options, 'gloo', 'cpu')\n"
        "kinds = {row.kind for row in rows if row.backend in ('hfreduce', 'gloo') and row.max_bytes > 1 << 30}\n"
        "assert kinds == {'all_reduce', 'reduce_scatter', 'all_gather'}, rows"
    )
    assert tune.start(2, [sys.executable, "-c", program], hosts=2) == 0
    assert "all_reduce, 2 ranks on 2 hosts" in capfd.readouterr().out
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert plan.backend(2) is None
    rows = [plan.BackendRow("all_reduce", 1 << 20, "nccl"), plan.BackendRow("all_reduce", plan.ANY, "hfreduce")]
    plan.save(plan.Shape(2, 2), rows, part="backends")
    plan.save(plan.Shape(2), [row()])
    assert plan.backend(2) == ("hfreduce", plan.load(part="backends")["2 ranks on 2 hosts"]["measured"])
    assert plan.backend(4) is None
    with pytest.raises(plan.PlanError, match="backend must be one of hfreduce, nccl, got 'gloo'"):
        plan.save(plan.Shape(2, 2), [plan.BackendRow("all_reduce", plan.ANY, "gloo")], part="backends")
        plan.load(part="backends")


def test_rows_are_those_of_the_shape_that_the_launcher_tells(monkeypatch):
    plan.save(plan.Shape(8, 2), [row()])
    assert plan.rows(8) == []
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert plan.rows(8) == [row().tuple()]
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert plan.rows() == [row().tuple()]
    assert plan.shape(6) == plan.Shape(6, 1) and plan.shape(2) == plan.Shape(2, 1)


def test_where_the_file_is(monkeypatch):
    monkeypatch.delenv("HFREDUCE_PLAN")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert plan.path() == Path("/cache/hfreduce/plan.json")
    monkeypatch.setenv("HFREDUCE_PLAN", "")
    assert plan.path() is None and plan.rows(2) == []
    with pytest.raises(plan.PlanError, match="HFREDUCE_PLAN is empty"):
        plan.save(plan.Shape(2), [])


def laid_out(**fields):
    entry = {"kind": "all_reduce", "max_bytes": 1, "inside": "one_shot", "between": "ring", "chunk": 64, "streams": 1}
    return {"version": 1, "shapes": {"2 ranks on 1 host": {"measured": "today", "rows": [entry | fields]}}}


@pytest.mark.parametrize(
    "content, reason",
    [
        ("", "cannot be read as JSON"),
        ("[1]", "not laid out as a plan"),
        ("{}", "not laid out as a plan: KeyError"),
        ('{"version": 2}', "it is of version 2, and this hfreduce reads 1"),
        ('{"version": 1, "shapes": {"x": 3}}', "not laid out as a plan"),
        (json.dumps(laid_out(kind="all_reduces")), "kind must be one of barrier, all_reduce"),
        (json.dumps(laid_out(between="star")), "between must be one of direct, ring, tree, got 'star'"),
        (json.dumps(laid_out(chunk=plan.SLOT + 1)), f"chunk must be a whole number from 1 to {plan.SLOT}"),
        (json.dumps(laid_out(streams=1.5)), "streams must be a whole number from 1 to 64, got 1.5"),
        (json.dumps(laid_out(max_bytes=True)), "max_bytes must be a whole number"),
        (json.dumps(laid_out(colour="red")), "not laid out as a plan: TypeError"),
    ],
)
def test_a_broken_file_is_ignored_and_told_of_once(file, content, reason, caplog):
    """Explaining fails with the reason; a group uses the defaults; new measurements replace the file."""
    file.parent.mkdir()
    file.write_text(content)
    with pytest.raises(plan.PlanError, match="is not used") as caught:
        plan.explain("all_reduce", 1)
    assert reason in str(caught.value) and str(file) in str(caught.value)
    assert "python -m hfreduce.tune" in str(caught.value)
    for _ in range(2):
        assert plan.rows(2) == [] and plan.device_rows(2) == []
    assert [record.getMessage() for record in caplog.records] == [str(caught.value)]
    plan.save(plan.Shape(2), [row()])
    assert plan.rows(2) == [row().tuple()]


@pytest.mark.parametrize("beside", ["a folder", "a file instead of its folder"])
def test_a_file_that_cannot_be_read_or_written(file, beside, capsys):
    """A group uses the defaults. Measurements are printed, because they cannot be saved."""
    if beside == "a folder":
        file.mkdir(parents=True)
    else:
        file.parent.touch()
    assert plan.rows(2) == []
    assert tune.write(plan.Shape(2), [row()], "shapes") == 1
    told = capsys.readouterr().out
    assert told.startswith("not written: ") and str(row()) in told
    assert not list(file.parent.glob("plan.json?*"))


def test_rows_of_the_file_are_for_slots_of_the_usual_size(file):
    """They would not fit into smaller slots, and were not measured with larger ones."""
    plan.save(plan.Shape(2), [row(chunk=plan.SLOT)])
    assert core.plan_rows(2, plan.SLOT) == plan.rows(2) != [] and core.plan_rows(2, 4096) == []


# Explanations


def test_explain_tells_what_runs_and_why():
    text = plan.explain("all_reduce", 4 << 20, ranks=4)
    assert "all_reduce of 4 MiB, 4 ranks on 1 host\n" in text
    assert "two_shot, chunks of 256 KiB: 32 steps; each rank writes 4 MiB and reads 7 MiB" in text
    assert "between hosts" not in text and "python -m hfreduce.tune --ranks 4" in text
    plan.save(plan.Shape(4), [row(max_bytes=8 << 20)])
    text = plan.explain("all_reduce", 4 << 20, ranks=4)
    assert (
        f"one_shot, chunks of 4 KiB: {(4 << 20) // 4096} steps" in text
        and f"measured on {plan.load()['4 ranks on 1 host']['measured']}" in text
    )
    assert "a default" in plan.explain("all_reduce", 9 << 20, ranks=4)
    assert "a default" in plan.explain("broadcast", 1 << 20, ranks=4)
    text = plan.explain("all_reduce", 64 << 20, ranks=64, hosts=16)
    assert "ring" in text and "each host sends 120 MiB, over 4 rails of 2 connections" in text
    assert "its rank is alone" in plan.explain("reduce", 1 << 20, ranks=16, hosts=16)


def test_explain_on_gpus():
    def told(op, nbytes, **where):
        return plan.explain(op, nbytes, device="cuda", **{"ranks": 4} | where)

    text = told("all_reduce", 64 << 20)
    assert text.startswith("all_reduce of 64 MiB, 4 ranks on 1 host, GPUs that reach each other's memory\n  two_shot: ")
    assert "128 blocks of 512 threads, slots of 64 KiB; each GPU sends 96 MiB\n  a default" in text
    assert "packets: " in told("all_reduce", 4096) and "each GPU sends 24 KiB" in told("all_reduce", 4096)
    assert "packets_two_shot: " in told("all_reduce", 512 << 10) and "sends 1.5 MiB" in told("all_reduce", 512 << 10)
    # Without peer access: mapped memory up to 24 MiB per direction of a link, beyond that, and between hosts, host
    # cores.
    assert "mapped: " in told("all_gather", 32 << 10, peers=False)
    text = told("all_reduce", 16 << 20, peers=False)
    assert "without peer access\n  mapped_two_shot: " in text and "32 blocks" in text and "sends 24 MiB" in text
    assert "assisted: " in told("all_reduce", (16 << 20) + 4, peers=False)
    assert "mapped_two_shot: " in told("reduce_scatter", 1 << 30, peers=False)
    assert "assisted: " in told("all_gather", (32 << 20) + 16, peers=False)
    assert "assisted: " in told("broadcast", 8, hosts=2)
    assert "host: by way of the host" in told("reduce", 8) and "is alone" in told("all_reduce", 8, ranks=1)
    plan.save(plan.Shape(4), [plan.DeviceRow("all_gather", 1 << 20, "copies")], part="devices")
    assert "copies: copy engines" in told("all_gather", 1 << 20) and "measured on" in told("all_gather", 1 << 20)
    assert "sends 768 KiB" in told("all_gather", 1 << 20) and "two_shot" in told("all_gather", 2 << 20)
    with pytest.raises(ValueError, match="device must be 'cpu' or 'cuda', got 'tpu'"):
        plan.explain("all_reduce", 1, device="tpu")


def test_explain_takes_every_collective_of_every_size():
    for kind in COLLECTIVES:
        for nbytes in (0, 1, 1 << 31):
            for ranks, hosts in ((1, 1), (8, 1), (8, 2), (64, 64)):
                for device in ("cpu", "cuda"):
                    text = plan.explain(kind, nbytes, ranks=ranks, hosts=hosts, device=device, peers=nbytes > 1)
                    assert text.startswith(kind)


def test_explain_refuses_what_is_no_collective():
    with pytest.raises(ValueError, match=r"op must be one of barrier, all_reduce, .*, got 'send'"):
        plan.explain("send", 1)
    with pytest.raises(ValueError, match="must not be negative, got -1"):
        plan.explain("all_reduce", -1)


# Measurement


def test_the_default_stays_unless_another_is_clearly_faster():
    assert tune.pick([1.0, 0.96, 2.0]) == 0
    assert tune.pick([1.0, 0.94, 0.93]) == 2


def test_measured_sizes_become_rows_for_all_sizes():
    a, b = row(max_bytes=plan.ANY), row(max_bytes=plan.ANY, inside="two_shot")
    merged = tune.merged([(1024, a), (4096, a), (16384, b), (65536, b)])
    assert [(r.max_bytes, r.inside) for r in merged] == [(8192, "one_shot"), (plan.ANY, "two_shot")]


def command(*arguments, **environment):
    """Output of a Python program that must succeed."""
    found = subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
    )
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout


@pytest.mark.slow
def test_tuning_writes_rows_that_groups_take(file):
    tuned = ["-P", "-m", "hfreduce.tune", "--ranks", 2, "--seconds", 0.01, "--rounds", 3, "--sizes", 1024, 1 << 20]
    assert "all_reduce, 2 ranks on 1 host" in command(*tuned, "--dry") and not file.exists()
    assert str(file) in command(*tuned)
    rows = plan.rows(2)
    assert rows and rows[-1][1] == plan.ANY
    assert plan.choose("all_reduce", 1 << 20, plan.Shape(2), rows).tuple()[2:] == rows[-1][2:]
    assert "measured on" in plan.explain("all_reduce", 1 << 20, ranks=2)


def test_a_rank_that_fails_ends_the_others():
    program = "import os, sys, time; sys.exit(7) if os.environ['RANK'] == '1' else time.sleep(60)"
    assert tune.start(3, [sys.executable, "-c", program]) == 7


# The benchmark


@pytest.mark.slow
def test_the_benchmark_compares_measures_and_keeps_rows(tmp_path):
    bench, where = ROOT / "bench" / "hfreduce.py", ["--results", tmp_path]
    ops = ["all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "all_to_all"]
    command(bench, *ops, "--ranks", 2, "--sizes", "4K", "--seconds", 0.01, "--rounds", 3, *where)
    (path,) = tmp_path.glob("*-hfreduce.csv")
    with path.open(newline="") as rows:
        found = list(csv.DictReader(rows))
    assert {(r["op"], r["provider"]) for r in found} == {(op, p) for op in ops for p in ("gloo", "hfreduce", "direct")}
    assert {r["wrong"] for r in found} == {"0"} and all(float(r["device_us"]) > 0 for r in found)
    bus = {r["op"]: float(r["busbw_gbps"]) / float(r["algbw_gbps"]) for r in found}
    assert bus == pytest.approx(dict(zip(ops, (1, 0.5, 0.5, 1, 1, 0.5), strict=True)), rel=1e-3)
    assert "x gloo" in command(bench, "--table", *where)
    assert len(command(bench, "--plot", *where).split()) == len(ops) == len(list(tmp_path.glob("*.png")))


def test_the_benchmark_sees_wrong_elements(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(ROOT / "bench"), *sys.path])
    bench = loaded(ROOT / "bench" / "hfreduce.py", "bench_hfreduce")
    for op in bench.BUS:
        case = bench.Case(op, 4096, "out of place", 0, 2)
        case.fill()
        assert case.wrong() == 0 if op == "broadcast" else case.wrong() > 0  # the root's data does not change
    case = bench.Case("broadcast", 4096, "in place", 1, 2)
    case.fill()
    assert case.wrong() == case.y.numel()


def test_the_prediction_is_printed_for_many_hosts():
    text = command(ROOT / "bench" / "hfreduce_scale.py", "--sizes", "1M", "--hosts", 1, 1024)
    lines = [line.split() for line in text.splitlines() if line.split()[:1] == ["1024"]]
    assert len(lines) == 1 and "tree" in lines[0]
    direct, ring, tree = map(float, lines[0][1:4])
    assert ring > direct > tree > 0 and math.isfinite(ring)
