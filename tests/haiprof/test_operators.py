"""The operators of a window: their modules, shapes, and the FLOPs of a step."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from test_output import played, text_of
from torch import nn
from torch.utils import flop_counter

from haiprof import deep, operators, page, record, report, verdict
from haiprof.collector import Collector


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 64))

    def forward(self, x):
        return self.inner(x)


def trained(model, steps, each=lambda: None):
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(steps):
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        each()


def test_a_window(tmp_path):
    collector = Collector(tmp_path, hz=10).start()
    try:
        model = Net()
        trained(model, 3)
        window = deep.Window(collector, 2, ["operators"])
        call = nn.Module.__call__
        trained(model, 6)
        assert nn.Module.__call__ is call and torch._C._len_torch_dispatch_stack() == 0
        window.wait(20)
        trained(model, 3)
    finally:
        collector.stop()
    (run,) = record.load(tmp_path)
    (line,) = run["operators"]
    rows = {(row[0], row[4], row[5]): row for row in line["rows"]}
    assert rows["aten::addmm", "32, 8x64, 64x32", "Net.inner.0"][1] == 2, "once in each of two steps"
    assert rows["aten::mm", "32x8, 8x64", "Net.inner.0"][1] == 2, "in backward"
    assert rows["aten::mm", "8x64, 64x32", "Net.inner.2"][1] == 2
    assert not any(row[0].startswith("<") or ".py(" in row[0] for row in line["rows"]), "calls of Python"
    times = [row[2] for row in line["rows"]]
    rounded = len(times) * 5e-7  # each to a microsecond
    assert times == sorted(times, reverse=True) and sum(times) <= line["host"] + rounded
    with flop_counter.FlopCounterMode(display=False) as counter:
        model(torch.randn(8, 64)).square().mean().backward()
    assert line["flops"] == counter.get_total_flops() == 5 * 2 * 8 * 32 * 64

    found = verdict.judge([run])
    title, shown = report.operators(found)
    assert len(shown) == 10 and "2 steps" in title
    assert all(float(row[1][:-1]) <= 100 for row in shown) and shown[0][1:3] != ["", ""]
    text = text_of(report.page(found), 200)
    page.write(found, tmp_path / "report.html")
    html = (tmp_path / "report.html").read_text()
    for row in shown:
        assert row[0] in text and f"<td>{row[0]}</td>" in html
    own = [step["n"] for step in run["steps"] if step.get("own")]
    assert sum(own) >= 4, "with the steps of the window and those after which it began and ended"


def test_a_window_that_ends_too_early_counts_no_more(tmp_path):
    collector = Collector(tmp_path, hz=10).start()
    try:
        model = Net()
        trained(model, 2)
        window = deep.Window(collector, 2, ["operators"])
        trained(model, 2)
        assert torch._C._len_torch_dispatch_stack() == 1
        with ThreadPoolExecutor() as pool, pytest.raises(TimeoutError):
            pool.submit(window.wait, 0).result()
        trained(model, 2)
        assert torch._C._len_torch_dispatch_stack() == 0 and collector.window is None
    finally:
        collector.stop()


def test_flops_and_mfu_of_a_gpu_whose_peak_is_known():
    run = played({"forward": 0.1, "backward": 0.1})
    line = {
        "steps": 2,
        "rows": [["aten::mm", 4, 0.1, 0.3, "8x8, 8x8", "Net"]],
        "host": 0.2,
        "on_gpu": 0.6,
        "flops": 2e13,
    }
    run["operators"] = [{**line, "device": "NVIDIA H200", "peak": operators.peak("NVIDIA H200")}]
    found = verdict.judge([run])
    assert report.operators(found)[1] == [["aten::mm", "50.0%", "2", "8x8, 8x8", "Net"]]
    (text,) = report.flops(found)
    assert "2e+13 FLOPs a step" in text and "100 TFLOP/s" in text and "MFU 10.1% of 989.4 (NVIDIA H200" in text
    run["operators"] = [{**line, "device": "another", "peak": operators.peak("another")}]
    assert "MFU" not in report.flops(verdict.judge([run]))[0]


def test_launches():
    events = [
        {"cat": "kernel", "name": "gemm", "dur": 4.0},
        {"cat": "kernel", "name": "add", "dur": 2.0},
        {"cat": "gpu_memcpy", "name": "Memcpy HtoD (Pageable -> Device)", "dur": 10.0},
        {"cat": "gpu_memcpy", "name": "Memcpy HtoD (Pinned -> Device)", "dur": 99.0},
        {"cat": "cpu_op", "name": "aten::mm", "dur": 9.0},
    ]
    found = operators.launches(events, 2)
    assert found == {"kernels": 1, "seconds": pytest.approx(3e-6), "pageable": pytest.approx(5e-6)}
    assert operators.launches(events[2:], 2) == {}
