"""The collector on GPUs, with fakes of CUDA events, graphs, NVML and NCCL's recorder."""

import ctypes
import os
import pickle
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from haiprof import arrivals, collectives, record
from haiprof.collector import Collector
from haiprof.counters import Counters
from haiprof.events import Captures, Events
from haiprof.phases import Span, Step

# Events


class Event:
    """The GPU has reached the first `done` of the `made` events, which are 1 ms apart."""

    made, done = 0, 0

    def __init__(self, device=0):
        Event.made += 1
        self.at, self.device = Event.made, device

    def query(self):
        return self.at <= Event.done

    def elapsed_time(self, other):
        if not (self.query() and other.query()):
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        if self.device != other.device:
            raise RuntimeError("events of two devices")
        return float(other.at - self.at)


@pytest.fixture
def events():
    Event.made = Event.done = 0
    return Events()


def step(*names, device=0):
    return Step(0.0, 1.0, 0.0, [Span(name, 0.0, 1.0, None, (Event(), Event(device))) for name in names])


def test_events_are_read_two_steps_later_and_none_is_waited_for(events):
    for number in range(6):
        events.add(number, step("forward", "backward"))
    assert events.read() == {}, "the GPU has done nothing yet"
    Event.done = 9  # the first event of step 2
    assert events.read() == {"n": 1, "seconds": 0.004, "forward": 0.001, "backward": 0.001}, "step 0 warms up"
    Event.done = 24
    assert events.read()["n"] == 2
    assert events.read() == {}, "those of the last two are kept"


def test_steps_that_have_no_times_are_left_out(events):
    captured = [Span("forward", 0.0, 1.0, None, None), Span("backward", 0.0, 1.0, None, (Event(), None))]
    events.add(1, step("forward"))
    events.add(2, Step(0.0, 1.0, 0.0, captured))
    events.add(3, step("forward", device=1))  # ends on another device
    for number in (4, 5, 6):
        events.add(number, step("inference"))
    Event.done = 100
    assert events.read() == {"n": 1, "seconds": 0.002, "forward": 0.001}, "step 4 alone"


def test_marks_before_cuda_is_used_and_while_a_graph_is_captured(events, monkeypatch):
    state = SimpleNamespace(used=False, capturing=False)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: state.used)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.capturing)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=f"uuid-{index}"))
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: SimpleNamespace(record=lambda: None))
    assert events.mark() is None and events.device is None
    state.used = state.capturing = True
    assert events.mark() is None and events.device is None
    state.capturing = False
    assert events.mark() is not None and events.device == (3, "GPU-uuid-3")


# Graphs


@pytest.fixture
def graph(monkeypatch):
    class Graph:
        def capture_begin(self, fails=False):
            if fails:
                raise RuntimeError("no capture")

        def capture_end(self):
            pass

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    return Graph()


def test_while_a_graph_is_captured_the_collector_asks_nothing(tmp_path, graph, monkeypatch):
    read, asked = Counters.read, []

    def counted(self):
        asked.append(time.monotonic())
        return read(self)

    monkeypatch.setattr(Counters, "read", counted)
    collector = Collector(tmp_path, hz=50).start()
    model = nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    deadline = time.monotonic() + 20
    while len(asked) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(asked) >= 3
    graph.capture_begin()
    before = len(asked)
    time.sleep(0.2)
    assert len(asked) == before
    graph.capture_end()
    while len(asked) == before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(asked) > before
    collector.stop()
    assert not collector._failed and not hasattr(type(graph).capture_begin, "__wrapped__")


def test_a_capture_waits_until_the_collector_has_asked(graph):
    captures, began = Captures(), threading.Event()
    captures.install()

    def capture():
        graph.capture_begin()
        began.set()

    with captures.none() as nothing_is_captured:
        assert nothing_is_captured
        thread = threading.Thread(target=capture)
        thread.start()
        assert not began.wait(0.1)
    assert began.wait(10)
    thread.join()
    with captures.none(0.05) as nothing_is_captured:
        assert not nothing_is_captured
    graph.capture_end()
    with pytest.raises(RuntimeError, match="no capture"):
        graph.capture_begin(fails=True)
    with captures.none(0.05) as nothing_is_captured:
        assert nothing_is_captured, "one that did not begin does not count"
    captures.remove()


# NVML


class NVMLError(Exception):
    pass


class Metric(ctypes.Structure):
    _fields_ = (("metricId", ctypes.c_uint), ("nvmlReturn", ctypes.c_int), ("value", ctypes.c_double))


class Asked(ctypes.Structure):
    _fields_ = (
        ("version", ctypes.c_uint),
        ("numMetrics", ctypes.c_uint),
        ("sample1", ctypes.py_object),
        ("sample2", ctypes.py_object),
        ("metrics", Metric * 8),
    )


class Nvml:
    """Like nvidia-ml-py. refused: functions that the GPU does not support. metrics: (value, status) by number."""

    NVMLError, NVML_SUCCESS, NVML_CLOCK_SM, NVML_GPM_METRICS_GET_VERSION = NVMLError, 0, 1, 1
    NVML_GPM_METRIC_SM_UTIL, NVML_GPM_METRIC_ANY_TENSOR_UTIL, NVML_GPM_METRIC_DRAM_BW_UTIL = 2, 5, 10
    c_nvmlGpmMetricsGet_t = Asked

    def __init__(self):
        self.refused, self.found, self.samples = set(), [], 0
        self.metrics = {2: (80.0, 0), 5: (40.0, 0), 10: (20.0, 0)}

    def __getattribute__(self, name):
        own = object.__getattribute__(self, name)
        if name.startswith("nvml") and name in self.refused:

            def refuse(*_):
                raise NVMLError("Not Supported")

            return refuse
        return own

    def nvmlInit(self):
        pass

    def nvmlDeviceGetHandleByUUID(self, name):
        self.found.append(name)
        return name

    def nvmlDeviceGetHandleByIndex(self, index):
        self.found.append(index)
        return index

    def nvmlDeviceGetUtilizationRates(self, device):
        return SimpleNamespace(gpu=90)

    def nvmlDeviceGetPowerUsage(self, device):
        return 650_000

    def nvmlDeviceGetClockInfo(self, device, which):
        return 1700

    def nvmlDeviceGetMaxClockInfo(self, device, which):
        return 1980

    def nvmlDeviceGetCurrentClocksEventReasons(self, device):
        return 0x1 | 0x4 | 0x20

    def nvmlDeviceGetMemoryInfo(self, device):
        return SimpleNamespace(used=100, total=1000)

    def nvmlGpmQueryDeviceSupport(self, device):
        return SimpleNamespace(isSupportedDevice=1)

    def nvmlGpmSampleAlloc(self):
        return SimpleNamespace(at=0)

    def nvmlGpmSampleGet(self, device, sample):
        self.samples += 1
        sample.at = self.samples

    def nvmlGpmMetricsGet(self, asked):
        assert asked.sample2.at == asked.sample1.at + 1, "the older sample comes first"
        for row in asked.metrics[: asked.numMetrics]:
            row.value, row.nvmlReturn = self.metrics[row.metricId]


@pytest.fixture
def nvml(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", found := Nvml())
    return found


def of_gpu(reading):
    return {name: value for name, value in reading.items() if name.startswith("gpu.")}


SAID = {"gpu.busy": 0.9, "gpu.power": 650, "gpu.clock": 1700, "gpu.clock_max": 1980, "gpu.throttled": 0x24}
SAID |= {"gpu.used": 100, "gpu.total": 1000}
GPM = {"gpu.sm": 0.8, "gpu.tensor": 0.4, "gpu.dram": 0.2}
TORCH = {"gpu.allocated": 0, "gpu.reserved": 0}


def test_the_gpu_is_counted_from_when_cuda_is_used(nvml):
    device = None
    counters = Counters(gpu=lambda: device)
    assert not of_gpu(counters.read()) and "does not use CUDA" in counters.missing["gpu"] and not nvml.found
    device = 1, "GPU-of-this-rank"
    assert of_gpu(counters.read()) == SAID | TORCH, "GPM has had no time yet"
    for _ in range(2):
        time.sleep(0.11)
        assert of_gpu(counters.read()) == SAID | GPM | TORCH
    assert {*nvml.found} == {"GPU-of-this-rank"} and "gpu" not in counters.missing


@pytest.mark.parametrize(
    ("refused", "lost"),
    [
        ("nvmlDeviceGetPowerUsage", {"gpu.power"}),
        ("nvmlDeviceGetCurrentClocksEventReasons", {"gpu.throttled"}),
        ("nvmlDeviceGetUtilizationRates", {"gpu.busy"}),
        ("nvmlGpmQueryDeviceSupport", {*GPM}),
        ("nvmlGpmSampleGet", {*GPM}),
        ("nvmlGpmMetricsGet", {*GPM}),
        ("nvmlDeviceGetHandleByUUID", {*SAID, *GPM}),
        ("nvmlInit", {*SAID, *GPM}),
    ],
)
def test_what_nvml_refuses_is_missing_with_its_words_and_no_more(nvml, refused, lost):
    nvml.refused.add(refused)
    counters = Counters(gpu=lambda: (0, "GPU-0"))
    counters.read()
    time.sleep(0.11)
    counters.read()
    time.sleep(0.11)
    assert {*of_gpu(counters.read())} == {*SAID, *GPM, *TORCH} - lost
    names = {name for name, why in counters.missing.items() if "Not Supported" in why}
    assert names == (lost if len(lost) == 1 else {"gpu activity"} if lost == {*GPM} else {"gpu"})


def test_metrics_of_gpm_that_have_no_number(nvml):
    counters = Counters(gpu=lambda: (0, "GPU-0"))
    counters.read()
    nvml.metrics |= {5: (0.0, 3), 10: (float("nan"), 0)}
    time.sleep(0.11)
    assert {name for name in counters.read() if name in GPM} == {"gpu.sm"}
    assert counters.missing["gpu.tensor"].startswith("GPM: ") and counters.missing["gpu.dram"] == "GPM: no number"
    nvml.metrics |= {5: (10.0, 0)}
    time.sleep(0.11)
    assert counters.read()["gpu.tensor"] == 0.1 and "gpu.tensor" not in counters.missing


@pytest.mark.parametrize(
    ("environment", "handle"),
    [
        ({}, 0),
        ({"LOCAL_RANK": "2"}, 2),
        ({"LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": "5,7"}, 7),
        ({"LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b"}, "GPU-b"),
    ],
)
def test_the_gpu_of_another_process(nvml, monkeypatch, environment, handle):
    from haiprof import counters

    monkeypatch.setattr(counters, "environment", lambda pid: environment)
    assert of_gpu(counters.Counters(os.getpid()).read()) == SAID
    assert {*nvml.found} == {handle}


def test_reasons_are_told_when_they_change(tmp_path, nvml):
    collector = Collector(tmp_path, hz=10).start()
    model = nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    deadline = time.monotonic() + 20
    while not collector.latest and time.monotonic() < deadline:
        time.sleep(0.02)
    collector.events.device = 0, "GPU-0"
    while "gpu.sm" not in collector.latest and time.monotonic() < deadline:
        time.sleep(0.02)
    collector.stop()
    (run,) = record.load(tmp_path)
    assert "does not use CUDA" in run["missing"][0]["why"]["gpu"]
    assert "gpu" not in record.missing(run) and "infiniband" in record.missing(run)
    assert next(line["gpu.sm"] for line in run["counters"] if "gpu.sm" in line) == 0.8


# NCCL


def entry(number, retired=True, duration=1.0):
    return {
        "collective_seq_id": number,
        "is_p2p": False,
        "retired": retired,
        "profiling_name": "nccl:all_reduce",
        "process_group": ("0", "default"),
        "time_created_ns": number * 10**9,
        "input_sizes": [[4]],
        "input_dtypes": ["Float"],
        **({"duration_ms": duration} if retired and duration else {}),
    }


@pytest.fixture
def nccl(monkeypatch):
    """entries: the contents of NCCL's recorder, which is separate from gloo's."""
    c10d, entries = sys.modules["torch._C._distributed_c10d"], []
    monkeypatch.setattr(collectives, "_groups", lambda: {"a group": "0"})
    monkeypatch.setattr(collectives, "_hfreduce", lambda: [])
    monkeypatch.setattr(collectives, "_ranks", lambda name: [0, 1])
    dump = lambda *_: pickle.dumps({"entries": entries})  # noqa: E731
    monkeypatch.setattr(c10d, "_dump_nccl_trace", dump, raising=False)
    monkeypatch.setattr(c10d, "_dump_fr_trace", lambda *_: pickle.dumps({}))
    return entries


def test_collectives_of_nccl_are_written_when_their_durations_are_known(nccl):
    found = collectives.Arrivals()
    nccl += [entry(1), entry(2), entry(3, retired=False)]
    (line,) = found.read()
    assert (line["backend"], line["ops"], line["n"]) == ("nccl", {"all_reduce": 2}, 2)
    assert [(number, duration) for number, _, duration, _ in line["rows"]] == [(1, 0.001), (2, 0.001)]
    assert found.read() == []
    nccl[2] = entry(3)
    (line,) = found.read()
    assert [row[0] for row in line["rows"]] == [3]


def run_of(rank, durations):
    rows = [[number, float(number + 5 * rank), duration, 0] for number, duration in enumerate(durations, 1)]
    line = {"wall": 0.0, "group": "0", "backend": "nccl", "ranks": [0, 1], "rows": rows}
    return {"run": {"rank": rank}, "collectives": [line]}


def test_late_ranks_by_the_durations_of_kernels_alone():
    """Rank 1's host is always later, which proves nothing; rank 0's kernels wait least."""
    late = arrivals.lateness([run_of(0, [0.1] * 4), run_of(1, [0.6] * 4)])
    assert late.n == 4 and dict(late.charged) == {0: pytest.approx(1.5)}
    assert not arrivals.lateness([run_of(0, [None] * 4), run_of(1, [None] * 4)]).n
