"""bench/profiler.py on tiny data: every part is measured, and exceeded limits are reported."""

import pytest
import torch


def test_overhead_and_phases(bench_script):
    profiler = bench_script("profiler")
    status, rows = profiler("--part", "overhead")
    assert status == 0
    without, with_it, *phases = rows
    assert (without["op"], without["provider"], with_it["provider"]) == ("overhead", "without", "haiprof")
    assert float(without["device_us"]) > 0 and 0.2 < float(with_it["ratio"]) < 5
    assert float(with_it["process.cpu"]) > 0
    assert ("does not use CUDA" in with_it["missing"]) is not torch.cuda.is_initialized()
    assert [row["pass"] for row in phases[::2]] == ["step", "forward", "backward", "optimizer"]
    own = {row["pass"]: float(row["device_us"]) for row in phases[::2]}
    found = {row["pass"]: float(row["device_us"]) for row in phases[1::2]}
    step, of_haiprof = own.pop("step"), found.pop("step")  # not the same steps: off by one
    assert step / 3 < of_haiprof < step * 3
    assert all(0.3 * own[name] < found[name] < 1.01 * own[name] for name in own), (own, found)  # inside the marks


@pytest.mark.slow
@pytest.mark.rest  # an attach gets three seconds, which a loaded machine may exceed
def test_scripts_and_attach(bench_script):
    profiler = bench_script("profiler")
    status, rows = profiler("--part", "scripts", "attach", "--ranks", "1")
    assert status == 0 and not any(row["error"] for row in rows)
    scripts = [(row["case"], row["provider"]) for row in rows if row["op"] == "scripts"]
    assert scripts == [("trainer", "rank 0"), ("ddp", "rank 0"), ("train_gpt", "rank 0")]
    assert all(abs(float(row["covered"]) - 1) < 0.02 for row in rows if row["op"] == "scripts")
    seen = [(row["provider"], row["pass"]) for row in rows if row["op"] == "attach" and row["device_us"]]
    assert seen == [(mode, what) for mode in ("nothing", "idle") for what in ("stacks", "counters")]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"op": "overhead", "ratio": "1.02"}, "a step takes 1.02"),
        ({"op": "phases", "provider": "haiprof", "ratio": "0.97"}, "0.97 of the benchmark's own marks"),
        ({"op": "scripts", "covered": "0.9"}, "are 0.9 of the time"),
        ({"op": "attach", "device_us": "3.5e6"}, "came after 3.5 s"),
        ({"op": "attach", "device_us": "", "missing": "stacks: py-spy"}, "none: stacks: py-spy"),
        ({"op": "overhead", "ratio": "1.002"}, None),
    ],
)
def test_what_passes_a_limit(bench_script, given, said):
    row = {"error": "", "pass": "step", "provider": "", "missing": ""} | given
    profiler = bench_script("profiler")
    profiler("--part")
    found = profiler.script.wrong(row)
    assert found is None if said is None else said in found
