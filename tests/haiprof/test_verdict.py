"""Verdicts on recorded counters and samples: each rule needs its evidence, and names its cause first."""

import os
import socket

import pytest
from test_output import played, text_of

from haiprof import counters as counters_module
from haiprof import growth, report, verdict
from haiprof.counters import Counters

COMPUTE = {"forward": 0.1, "backward": 0.2, "optimizer": 0.02}


def counters(**values):
    return [{"kind": "counters", "wall": 11.0 + i, **values} for i in range(5)]


MEMORY = {"machine.memory": 10, "machine.memory_total": 100}
GPU = {"gpu": {"n": 10, "seconds": 3.0, "forward": 1.0}}


def on_gpu(**more):
    run = played(COMPUTE, counters=counters(**{**MEMORY, "gpu.busy": 0.95, **more}))
    run["steps"][1] |= GPU
    return run


CASES = {
    "compute-bound": (played(COMPUTE, counters=counters(**{"process.cpu": 0.9})), "hfnn.convert"),
    "unknown": (played(COMPUTE, counters=counters(**{"process.cpu": 0.1})), ""),
    "data-bound": (
        played({**COMPUTE, "data": 0.1}, loader=[{"kind": "loader", "num_workers": 0}]),
        "num_workers=4",
    ),
    "host-bound": (on_gpu(**{"gpu.busy": 0.4}), "hfnn.convert(model, optimizer, capture=True)"),
    "memory near its end": (on_gpu(**{"gpu.used": 97, "gpu.total": 100}), 'prefer="memory"'),
    "clock throttled": (
        on_gpu(**{"gpu.throttled": 0x44, "gpu.clock": 900.0, "gpu.clock_max": 1980.0}),
        "nvidia-smi",
    ),
}


@pytest.mark.parametrize("kind", CASES)
def test_verdicts(kind):
    run, advice = CASES[kind]
    first = verdict.judge([run]).findings[0]
    assert first.kind == kind and advice in " ".join(first.advice), first
    assert first.text in " ".join(text_of(report.page(verdict.judge([run])), 1000).split())


def test_host_bound_although_it_is_captured():
    run = on_gpu(**{"gpu.busy": 0.4})
    counted = {"before recording": 3, "its forward draws from numpy": 7}
    run["captures"] = [{"model": "GPT", "number": 0, "replayed": n, "as_it_is": counted} for n in (5, 90)]
    judged = verdict.judge([run])
    (finding,) = judged.findings
    assert "captured GPT: 90 replays; 7 as it is: its forward draws from numpy; 3 as it is" in finding.evidence
    assert finding.advice[0] == "hfnn.report(model), on calls that are not replayed: its forward draws from numpy"
    assert not any("capture=True" in each for each in finding.advice)
    assert "captured GPT: 90 replays" in " ".join(text_of(report.page(judged)).split())


def ranks(n=2, late=None, **more):
    """Runs of ranks whose collectives are recorded; late(rank, number): seconds."""
    runs = [played(COMPUTE, rank=rank, size=n, counters=counters(**{"process.cpu": 0.9})) for rank in range(n)]
    for rank, run in enumerate(runs):
        rows = [[i, 0.32 * i + (late(rank, i) if late else 0.0), None, 0] for i in range(31)]
        line = {"backend": "gloo", "group": "0", "ranks": [*range(n)], "wall": 10, "rows": rows, "n": 31}
        run["collectives"] = [line]
        run["steps"][1] |= {name: values[rank] for name, values in more.items()}
    return runs


def kinds(runs):
    return [finding.kind for finding in verdict.judge(runs).findings]


def test_ranks_that_spend_their_time_in_collectives():
    runs = ranks(waited=[{"backward": 1.2}] * 2)  # 0.12 s of a step of 0.32
    (finding,) = verdict.judge(runs).findings
    assert finding.kind == "communication-bound" and "hfreduce" in " ".join(finding.advice)
    for run in runs:
        del run["collectives"]  # unknown, whether they wait for one another
    assert kinds(runs) == ["compute-bound"]


def test_a_slow_rank():
    assert kinds(ranks(late=lambda rank, i: 0.05 * rank)) == ["slow rank"]
    by_chance = ranks(late=lambda rank, i: 0.05 * (rank == i // 11 % 2))  # first one, then the other
    assert kinds(by_chance) == ["compute-bound"]
    busy = ranks(late=lambda rank, i: 0.05 * rank)
    busy[1]["counters"] = counters(**{"process.cpu": 0.8, "process.delay": 0.16})  # others have its processor
    assert kinds(busy) == ["compute-bound"]


def test_a_rank_is_not_late_because_of_a_loader_like_the_others():
    runs = ranks(late=lambda rank, i: 0.05 * rank)
    runs[1]["steps"][1] |= {"data": 2.0, "backward": 0.0}
    for run in runs:
        run["loader"] = [{"kind": "loader", "num_workers": 1}]
        run["steps"][1]["workers"] = {"0": [10, 3.0]}
    assert kinds(runs) == ["data-bound"]
    runs[0]["steps"][1]["workers"] = {"0": [10, 0.5]}
    assert kinds(runs) == ["data-bound", "slow rank"]
    del runs[0]["steps"][1]["workers"]
    assert kinds(runs) == ["data-bound"], "it is not known which loader is slower"


def test_uneven_batches():
    late = lambda rank, i: 0.05 * (rank == i % 2)  # noqa: E731
    assert kinds(ranks(late=late)) == ["compute-bound"]
    assert kinds(ranks(late=late, batch=[[10, 1000, 150000]] * 2)) == ["uneven batches"]
    most = lambda rank, i: 0.05 * (rank == (i % 3 > 0))  # noqa: E731
    assert kinds(ranks(late=most, batch=[[10, 1000, 150000]] * 2)) == ["uneven batches"]
    assert kinds(ranks(late=most)) == ["slow rank"]
    larger = ranks(late=lambda rank, i: 0.05 * rank, batch=[[10, 1000, 100000], [10, 2000, 400000]])
    assert kinds(larger) == ["uneven batches"]


def test_a_pipeline():
    assert kinds(ranks(messages=[80, 80], waited=[{"other": 0.2}, {"other": 0.1}])) == ["compute-bound"]
    assert kinds(ranks(messages=[80, 80], waited=[{"other": 2.0}, {"other": 0.1}])) == ["imbalance of a pipeline"]


def sampled(doing, line="train.py:3 f", text="f(x)", expression="f()", inner="", area="", phase="other", n=40):
    """A run with 40 of 100 samples like this, and the others in backward."""
    rows = [[phase, doing, n, line, text, expression, inner, area]]
    rows += [["backward", "runs", 100 - n, "train.py:2 f", "loss.backward()", "loss.backward()", "", ""]]
    parts = {"forward": 0.02, "backward": 0.1 - n / 1000, "optimizer": 0.01} | {phase: n / 1000}
    own = {"kind": "samples", "n": 100, "rows": rows}
    return played(parts, samples=[own], counters=counters(**{"process.cpu": 0.9}))


SAMPLED = {
    "asleep": sampled("sleeps", text="time.sleep(1)", expression="time.sleep()"),
    "waits for a lock": sampled("lock", text="with lock:", expression="with lock:"),
    "slow disk": sampled("disk", expression="file.read()", phase="data"),
    "checkpoints in the steps": sampled("disk", inner="torch/serialization.py:9 save", area="checkpoint"),
    "logging in the steps": sampled("runs", text="print(loss)", expression="print()"),
    "outside the model": sampled("runs", text="total += i", expression="total += i"),
    "data-bound": sampled("sleeps", phase="data"),
    "compute-bound": sampled("lock", phase="forward"),  # a barrier of the threads of an op
}


@pytest.mark.parametrize("kind", SAMPLED)
def test_samples(kind):
    run = SAMPLED[kind]
    found = verdict.judge([run])
    assert kinds([run]) == [kind], found.findings
    if kind not in ("compute-bound",):
        assert found.findings[0].lines[0].startswith(" 40%  train.py:3 f")
        assert found.findings[0].lines[0] in text_of(report.page(found), 1000)
    run["samples"][0]["rows"][0][2] = run["samples"][0]["rows"][1][2] = 5  # too few to tell anything
    expected = {"data-bound": "data-bound", "slow disk": "data-bound", "compute-bound": "compute-bound"}
    assert kinds([run]) == [expected.get(kind, "outside the model")]
    assert not found.findings[0].lines or len(found.findings[0].lines) <= 10


def test_ten_lines_are_shown():
    rows = [["other", "runs", 10, f"train.py:{i} f", "g(x)", "g()", "", ""] for i in range(12)]
    run = played({**COMPUTE, "other": 0.5}, samples=[{"n": 120, "rows": rows}])
    (finding,) = verdict.judge([run]).findings
    assert finding.kind == "outside the model" and len(finding.lines) == 10


def test_garbage_collection():
    run = played({**COMPUTE, "other": 0.1}, counters=counters(**{"process.cpu": 0.9}))
    run["steps"][1]["collecting"] = 1.0
    assert kinds([run]) == ["garbage collection"]


def test_a_slow_worker():
    run = played({**COMPUTE, "data": 0.1})
    run["steps"][1]["workers"] = {"0": [10, 0.1], "1": [10, 3.0], "2": [10, 0.12]}
    assert kinds([run]) == ["slow worker"]
    run["steps"][1]["workers"]["1"] = [10, 0.15]
    assert kinds([run]) == ["data-bound"]


def with_samples(run, *args, **more):
    return {**run, "samples": sampled(*args, **more)["samples"]}


def test_causes_on_gpus():
    """From what NVML, the samples and torch.profiler tell."""
    idle = on_gpu(**{"gpu.busy": 0.4})
    item = {"text": "total += loss.item()", "expression": "loss.item()", "phase": "other"}
    assert kinds([with_samples(idle, "runs", **item)])[0] == "synchronising calls"
    busy = on_gpu(**{"gpu.busy": 0.95})
    assert kinds([with_samples(busy, "runs", **item)]) == ["compute-bound"], "the GPU has enough to do meanwhile"
    to = {"text": "x = x.to(device)", "expression": "x.to()", "phase": "other"}
    loader = {"loader": [{"kind": "loader", "num_workers": 2, "pin_memory": False}]}
    assert kinds([with_samples({**idle, **loader}, "runs", **to)])[0] == "transfers from unpinned memory"
    pinned = {"loader": [{"kind": "loader", "num_workers": 2, "pin_memory": True}]}
    assert "transfers from unpinned memory" not in kinds([with_samples({**idle, **pinned}, "runs", **to)])
    counted = {"kernels": 800.0, "seconds": 0.004, "pageable": 0.0}
    assert kinds([{**idle, "operators": [{"gpu": counted}]}]) == ["many small kernels"]
    assert kinds([{**idle, "operators": [{"gpu": {**counted, "seconds": 0.3}}]}]) == ["host-bound"]


def test_throttled_clocks_are_named_before_others():
    slow = {"gpu.throttled": 0x40, "gpu.clock": 600.0, "gpu.clock_max": 1980.0}
    assert kinds([on_gpu(**slow, **{"gpu.used": 97, "gpu.total": 100})]) == ["clock throttled", "memory near its end"]


def test_swapping(tmp_path, monkeypatch):
    """From the kernel's counters, as they are read."""
    monkeypatch.setattr(counters_module, "VMSTAT", tmp_path / "vmstat")
    monkeypatch.setattr(counters_module, "PRESSURE", tmp_path)
    now = [0.0]
    monkeypatch.setattr(counters_module.time, "monotonic", lambda: now[0])

    def kernel(pages, stalled):
        (tmp_path / "vmstat").write_text(f"nr_free_pages 9\npswpin {pages}\npswpout {pages}\n")
        for name in ("cpu", "memory", "io"):
            (tmp_path / name).write_text(f"some avg10=0 avg60=0 avg300=0 total={stalled if name == 'memory' else 0}\n")

    for pages, found in ((500, ["swapping"]), (0, ["compute-bound"])):
        kernel(0, 0)
        source, lines = Counters(), []
        for _ in range(5):
            now[0] += 1
            kernel(int(pages * now[0]), int(3e5 * now[0]))
            reading = source.read()
            lines.append(
                {"process.cpu": 0.9} | {name: reading[name] for name in reading if name[:4] in ("swap", "pres")}
            )
        assert lines[-1]["pressure.memory"] == pytest.approx(0.3)
        assert lines[-1].get("swap.read", 0) == pages * os.sysconf("SC_PAGE_SIZE")
        assert kinds([played(COMPUTE, counters=lines)]) == found


def test_a_full_disk():
    full = counters(**{"process.cpu": 0.9, "disk.free": 1000, "disk.size": 10**9})
    for line in full:
        line["disk.folder"] = "/data"
    assert kinds([played(COMPUTE, counters=full)]) == ["disk full"]
    full[-1] |= {"disk.free": 10**8}
    assert kinds([played(COMPUTE, counters=full)]) == ["compute-bound"]


def grows(of_step, n=40):
    lines = [{"process.cpu": 0.9, "steps": 10 * i, "process.memory": 10**9 + of_step(10 * i)} for i in range(1, n)]
    return [{**line, "machine.memory": 2 * 10**9, "machine.memory_total": 10**10} for line in lines]


def test_memory_that_grows():
    steady = played(COMPUTE, counters=grows(lambda step: 2**20 * step))
    (finding,) = verdict.judge([steady]).findings
    assert finding.kind == "memory grows" and "1.00 MB in each step" in finding.text
    row = ["Tensor", "train.py:3  kept.append(x)", 1.0, 2**20]
    for rows, graphs, kind in (
        ([row], [], "leak of tensors"),
        ([["Tensor with its graph", *row[1:]]], [], "leak of graphs"),
        ([], [["Tensor", "train.py:3  total += loss", 3.0]], "leak of graphs"),
    ):
        (finding,) = verdict.judge([{**steady, "growth": [{"rows": rows, "graphs": graphs}]}]).findings
        assert finding.kind == kind and "train.py:3" in finding.text and "Tensor" in finding.text
    fills = grows(lambda step: 2**20 * min(step, 100))  # a cache
    late = grows(lambda step: 2**20 * max(0, step - 300))
    noise = grows(lambda step: 2**22 * (step // 10 % 3))
    assert [kinds([played(COMPUTE, counters=lines)]) for lines in (fills, late, noise)] == [["compute-bound"]] * 3
    assert growth.per_step([(step, step * 2**20) for step in range(7)]) == 0, "too few"


def test_no_advice_that_cannot_be_followed():
    """None on GPUs without one, and none to attach to a process that has ended."""
    cases = [
        *SAMPLED.values(),
        played({**COMPUTE, "data": 0.1}, loader=[{"kind": "loader", "num_workers": 0}]),
        played(COMPUTE),
        *ranks(late=lambda rank, i: 0.05 * rank),
    ]
    for run in cases:
        run["end"] = [{"kind": "end"}]
    for runs in ([case] for case in cases):
        for finding in verdict.judge(runs).findings:
            said = " ".join(finding.advice)
            assert not any(word in said for word in ("attach", "GPU", "CUDA", "pin_memory", "capture=True")), finding
    head = {"host": socket.gethostname(), "pid": os.getpid()}
    here = played(COMPUTE)
    here["run"] |= head
    assert "attach" in verdict.judge([here]).findings[0].advice[0]
    here["run"]["pid"] = 2**22 + 1
    assert not verdict.judge([here]).findings[0].advice


def test_steps_of_its_own_work_are_left_out():
    run = played(COMPUTE)
    run["steps"].append({**run["steps"][1], "first": 11, "forward": 90.0, "seconds": 99.0, "own": True})
    (rank,) = verdict.judge([run]).ranks
    assert rank.seconds == pytest.approx(sum(COMPUTE.values())) and rank.phases["forward"] == COMPUTE["forward"]
    assert rank.steps == 21
