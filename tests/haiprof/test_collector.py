"""The collector in a process: its cost, its output, and that it does no harm."""

import json
import logging
import os
import subprocess
import sys
import threading
import time
import urllib.request
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from haiprof import collector as collector_module
from haiprof import control, deep, record, trace, verdict
from haiprof.collector import Collector
from haiprof.counters import Counters
from haiprof.phases import Hooks, Phases


def model_and_optimizer():
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def losses(steps=20):
    torch.manual_seed(0)
    model, optimizer = model_and_optimizer()
    found = []
    for _ in range(steps):
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def threads():
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("haiprof")}


def test_files_of_a_run(tmp_path):
    plain = losses()
    collector = Collector(tmp_path, hz=10).start()
    try:
        assert losses() == plain
        time.sleep(0.3)
    finally:
        collector.stop()
    assert not threads()
    (run,) = record.load(tmp_path)
    assert run["run"]["pid"] == os.getpid() and run["run"]["torch"] == torch.__version__
    assert sum(line["n"] for line in run["steps"]) == run["end"][0]["steps"] == 20
    assert run["steps"][0]["n"] == 1, "the first step warms up, and has a line of its own"
    assert len(run["counters"]) >= 2 and run["counters"][-1]["process.memory"] > 1e7
    assert {"infiniband", "memory bandwidth", "gpu"} - {*run["missing"][0]["why"]} == set() or torch.cuda.is_available()
    assert all(run["missing"][0]["why"].values())


class Planted(Exception):
    pass


def fails(*_, **__):
    raise Planted("planted")


FAILING = (
    "Phases._arrive Phases._marks Phases._settle Hooks._optimizer Collector._begin Collector._on_step Collector._serve "
    "Collector._line Counters.read Arrivals.read Writer.write"
)


@pytest.mark.parametrize("place", FAILING.split())
def test_a_failure_in_it_is_told_once_and_changes_nothing(tmp_path, monkeypatch, caplog, place):
    plain = losses()
    owners = {each.__name__: each for each in (Phases, Hooks, Collector, Counters, record.Writer)}
    owners["Arrivals"] = collector_module.Arrivals
    owner, name = place.split(".")
    call = nn.Module.__call__
    monkeypatch.setattr(owners[owner], name, fails)
    with caplog.at_level(logging.WARNING, "haiprof"):
        collector = Collector(tmp_path, hz=10).start()
        try:
            assert losses() == plain
            time.sleep(0.25)
            assert losses() == plain
        finally:
            collector.stop()
    told = [entry for entry in caplog.records if entry.name == "haiprof"]
    assert len(told) == 1 and told[0].exc_info[0] is Planted and "the training goes on" in told[0].message
    assert nn.Module.__call__ is call and not threads()


def test_loaders_and_modules_of_another_kind_are_left_as_they_are(tmp_path):
    class Own(torch.utils.data.DataLoader):
        def _get_iterator(self):
            return (x for x in "ab")

    class Unfinished(nn.Module):
        def __init__(self):
            pass

    collector = Collector(tmp_path).start()
    try:
        assert list(Own([1, 2])) == ["a", "b"]
        with pytest.raises(AttributeError, match=r"_backward_hooks|_forward_hooks"), torch.no_grad():
            Unfinished()(1)
    finally:
        collector.stop()
    assert not collector._failed


def test_a_counter_that_fails_is_given_up_with_its_reason(monkeypatch):
    counters = Counters()
    counters._readers["machine"] = fails
    assert "process.memory" in counters.read()
    assert counters.missing["machine"] == "gave up: Planted: planted"
    assert "process.memory" in counters.read()


@pytest.mark.rest  # times, which other load on the machine changes
def test_what_it_costs_a_step_of_10_ms(tmp_path):
    """Its own time: in hooks, for a step of three phases and a loader over 100 inner modules, and in its thread."""
    steps, rounds, inner = 200, 7, 100
    collector = Collector(tmp_path)
    collector.phases._on_begin = None
    phases = collector.phases
    call = collector.hooks._module_call(lambda module, *args: None)
    module, key = nn.Identity(), object()

    def step():
        for name in ("data", "forward", "backward", "optimizer"):
            phases.enter(name, id(key))
            if name == "forward":
                for _ in range(inner):
                    call(module)
            phases.leave()

    def plain():
        for _ in range(inner):
            nothing(module)

    def nothing(module, *args, **kwargs):
        return None

    def best(run):
        taken = []
        for _ in range(rounds):
            begin = time.thread_time()
            for _ in range(steps):
                run()
            taken.append((time.thread_time() - begin) / steps)
        return min(taken)

    hooks = best(step) - best(plain)
    assert phases.steps >= steps
    counters = Counters()
    begin = time.thread_time()
    for _ in range(10):
        counters.read()
    reading = (time.thread_time() - begin) / 10
    share = hooks / 0.010 + reading / 1.0
    print(f"hooks {hooks * 1e6:.0f} us a step, counters {reading * 1e3:.1f} ms a second")
    assert share <= 0.01, f"hooks take {hooks * 1e6:.0f} us a step, counters {reading * 1e3:.1f} ms a second"


def test_files_stay_below_5_mb_an_hour(tmp_path, monkeypatch):
    """An hour of a fast run, second by second, on a simulated clock."""
    now = [0.0]
    monkeypatch.setattr(record.time, "monotonic", lambda: now[0])
    writer = record.Writer(tmp_path, record.header())
    line = {"kind": "counters", "wall": time.time(), **Counters().read(), "machine.cores": [0.123456] * 128}
    rows = [[10**7 + i, 0.123456, 0.123456, 0] for i in range(128)]
    wait, due = 1.0, 0.0
    while now[0] < 3600:
        now[0] += wait
        writer.write(line)
        writer.write({"kind": "steps", **dict.fromkeys("abcdefghijklmn", 123.456789)})
        if now[0] > due:
            writer.write({"kind": "collectives", "rows": rows})
            due = now[0] + 10
        wait *= 2 if writer.full() else 1
    writer.close()
    assert wait > 1, "it was to be slowed down"
    assert 2_000_000 < writer.path.stat().st_size < 4_700_000
    spans = [("backward", i * 0.002, i * 0.002 + 0.0013337) for i in range(20000)]
    steps = [(f"step {i}", i * 0.01, i * 0.01 + 0.01) for i in range(5000)]
    trace.write(tmp_path / "trace", record.header(), trace.events(record.header(), spans, steps=steps))
    assert (tmp_path / "trace").stat().st_size < 300_000 + 200_000


SECRETS = {
    "HAIPROF_TOKEN": "s3cret-of-a-name",
    "TORCH_API_KEY": "s3cret-of-a-key",
    "NCCL_PASSWORD": "s3cret-word",
    "HFNN_PLACE": "https://user:s3cret-in-an-address@example.com/data",
    "CUDA_NOTE": "hf_s3cretABCDEFGHIJKLMNOP",
    "AWS_SECRET_ACCESS_KEY": "s3cret-of-another-kind",
    "UNRELATED": "s3cret-that-has-no-telling-name",
}
ARGUMENTS = ["--token", "s3cret-argument", "--api-key=s3cret-argument", "PASSWORD=s3cret-argument", "--lr", "0.5"]


def test_no_secrets_are_written(tmp_path, monkeypatch):
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    plain = "data/a_file_with_a_long_name_of_words"
    monkeypatch.setattr(sys, "argv", ["train.py", *ARGUMENTS, "ghp_s3cretABCDEFGHIJKLMN", plain])
    collector = Collector(tmp_path, hz=10).start()
    losses()
    collector.stop()
    for path in tmp_path.iterdir():
        content = path.read_bytes() if path.suffix != ".gz" else json.dumps(trace.read(path)).encode()
        assert b"s3cret" not in content, path
    (run,) = record.load(tmp_path)
    assert run["run"]["environment"]["OMP_NUM_THREADS"] == "7" and "UNRELATED" not in run["run"]["environment"]
    shown = ["train.py", "--token", "***", "--api-key=***", "PASSWORD=***", "--lr", "0.5", "***"]
    assert run["run"]["command"] == [*shown, plain]


def test_metrics_are_served_where_a_port_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.setenv("HAIPROF_PORT", "0")
    collector = Collector(tmp_path, hz=10).start()
    try:
        losses()
        deadline = time.monotonic() + 20
        while collector.latest.get("steps", 0) < 19 or "process.memory" not in collector.latest:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        with urllib.request.urlopen(f"http://127.0.0.1:{collector.metrics.port}/metrics", timeout=10) as answer:
            assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
            rows = answer.read().decode().splitlines()
    finally:
        collector.stop()
    values = dict(row.rsplit(" ", 1) for row in rows if not row.startswith("#"))
    assert float(values['haiprof_steps{rank="0"}']) in (19, 20)
    phases = [float(values[f'haiprof_step_seconds{{rank="0",phase="{name}"}}']) for name in verdict.PARTS]
    assert sum(phases) == pytest.approx(float(values['haiprof_step_seconds{rank="0",phase="seconds"}']), rel=1e-6)
    assert float(values['haiprof_process_memory{rank="0"}']) > 1e7
    assert not threads()


FORKED = """
import os, sys, torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

class Data(Dataset):
    transform = nn.Identity()  # as torchvision's are: called in the loader's workers, where no step is made
    def __len__(self): return 8
    def __getitem__(self, i): return self.transform(torch.ones(4))

model = nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    for x in DataLoader(Data(), batch_size=2, num_workers=2):
        model(x).sum().backward(); optimizer.step()
if os.fork() == 0:
    os.environ["RANK"], os.environ["WORLD_SIZE"] = "1", "2"
    for _ in range(3):
        model(x).sum().backward(); optimizer.step()
    sys.exit()
os.wait()
"""


# Where torch sees a GPU, it refuses a backward in a process that was forked after one.
ON_THE_CPU = {"HAIPROF": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def test_started_by_the_environment_with_workers_and_forks(tmp_path):
    """`import torch` alone starts it; a loader's workers leave no files; a forked child has its own."""
    env = {**os.environ, **ON_THE_CPU, "HAIPROF_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", FORKED], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and not done.stderr, done.stderr
    runs = [json.loads(path.read_text().splitlines()[0]) for path in sorted(tmp_path.glob("*.jsonl"))]
    assert [run["rank"] for run in runs] == [0, 1]
    ends = [json.loads(path.read_text().splitlines()[-1]) for path in sorted(tmp_path.glob("*.jsonl"))]
    assert [(end["kind"], end["steps"]) for end in ends] == [("end", 8), ("end", 3)]
    assert not list(tmp_path.glob("*.sock"))


PROCESS = """
import multiprocessing, os, torch

def train(rank, steps):
    os.environ["RANK"], os.environ["WORLD_SIZE"] = str(rank), "3"
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.ones(4)).sum().backward(); optimizer.step()

if __name__ == "__main__":
    for rank, before in ((0, 0), (1, 4)):
        if before:
            train(2, before)
        child = multiprocessing.get_context("fork").Process(target=train, args=(rank, 5 + rank))
        child.start()
        child.join()
"""


def test_a_forked_process_of_multiprocessing_has_its_steps(tmp_path):
    """It ends by os._exit, whether its parent has trained before or not."""
    env = {**os.environ, **ON_THE_CPU, "HAIPROF_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", PROCESS], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and not done.stderr, done.stderr
    ends = {run["run"]["rank"]: [end["steps"] for end in run["end"]] for run in record.load(tmp_path)}
    assert ends == {0: [5], 1: [6], 2: [4]}


OFF = """
import sys, time
from importlib.metadata import entry_points
(point,) = [p for p in entry_points(group="torch.backends") if p.name == "haiprof"]
before, begin = set(sys.modules), time.process_time()
point.load()()
print((time.process_time() - begin) * 1e3, sorted(set(sys.modules) - before))
"""


@pytest.mark.parametrize("value", [None, "", "0"])
def test_it_costs_nothing_where_it_is_not_asked_for(value):
    env = {name: own for name, own in os.environ.items() if not name.startswith("HAIPROF")}
    env |= {} if value is None else {"HAIPROF": value}
    done = subprocess.run([sys.executable, "-c", OFF], env=env, capture_output=True, text=True, check=True)
    taken, modules = done.stdout.strip().split(" ", 1)
    assert eval(modules) == ["_haiprof_autoload"]
    assert float(taken) < 5


def test_a_folder_that_cannot_be_written_stops_nobody(tmp_path):
    (tmp_path / "file").write_text("")
    env = {**os.environ, "HAIPROF": "1", "HAIPROF_DIR": str(tmp_path / "file"), "OMP_NUM_THREADS": "1"}
    script = "import torch; m = torch.nn.Linear(2, 2); m(torch.ones(2)).sum().backward(); print(m.weight.grad.sum())"
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout == "tensor(4.)\n"
    assert done.stderr.count("haiprof does not profile this process") == 1


def test_sockets_have_short_addresses_whatever_their_folder(tmp_path):
    folder = tmp_path / ("long" * 30)
    server = control.Server(str(folder))
    try:
        (path,) = control.sockets(str(folder))
        assert control.ask(path, {"do": "info"})["pid"] == os.getpid()
        with pytest.raises(RuntimeError, match="the collector does not run"):
            control.ask(path, {"do": "deep", "steps": 1, "what": [], "seconds": 1})
    finally:
        server.close(os.getpid())
    assert not control.sockets(str(folder))
    server.thread.join(20)
    assert not server.thread.is_alive()


def test_the_end_of_a_deep_window_is_in_no_stack():
    """torch.profiler takes long to stop where there is a GPU."""

    def slow_stop():
        time.sleep(0.1)

    window = deep.Window(SimpleNamespace(window=None), 1, ["stacks"])
    window.on_step()
    window._profiler = SimpleNamespace(stop=slow_stop)
    time.sleep(0.1)
    window.on_step()
    window._sampler.join()
    assert window.stacks and not any("slow_stop" in stack for stack in window.stacks)
