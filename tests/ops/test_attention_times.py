"""How torch's backends of attention are timed, and the file that keeps the times. Mostly with a stand-in for a GPU."""

import json
import os

import pytest
import torch

from hfnn.ops.attention import backend_times, backends
from hfnn.ops.attention.backend_times import NUMBERS, Kind

from . import test_attention_backends as choosing
from .test_attention_backends import CUDNN, run

KIND = Kind("GPU", "torch", torch.bfloat16, 64, 64, True, False, True, False, 1)
fresh, gpu = choosing.fresh, choosing.gpu  # fixtures


# Measuring


def test_medians_of_rounds_there_and_back():
    clocked, times = [], {"a": iter((9, 1, 2, 3)), "b": iter((9, 30, 10, 20))}

    def clock(call):
        clocked.append(call())
        return float(next(times[clocked[-1]]))

    found = backend_times.medians({"a": lambda: "a", "b": lambda: "b"}, clock, rounds=3)
    assert found == {"a": 2.0, "b": 20.0} and "".join(clocked) == "ab" + "abba" + "ab"


def test_who_cannot_run_has_no_time():
    def broken():
        raise RuntimeError("no plan")

    def short():
        raise torch.OutOfMemoryError("no")

    assert backend_times.medians({"a": broken, "b": int}, lambda call: 1.0) == {"a": None, "b": 1.0}
    with pytest.raises(torch.OutOfMemoryError):
        backend_times.medians({"a": short}, lambda call: 1.0)


@pytest.mark.parametrize("grad", [False, True])
def test_measuring_leaves_no_trace(monkeypatch, grad):
    """Random state, modes and hooks are unchanged. On the CPU torch always takes flash."""
    monkeypatch.setattr(backend_times, "MEASURED", (16, 16, 16))
    monkeypatch.setattr(backend_times, "BYTES", 1 << 14)
    packed, seen, calls = [], [], []

    def clock(call):
        seen.append((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.is_inference_mode_enabled()))
        calls.append(call())
        return 7.0

    torch.manual_seed(1)
    state = torch.get_rng_state()
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: packed.append(x) or x, lambda x: x)
    kind = KIND._replace(dtype=torch.float32, grad=grad, causal=False)
    with hooks, torch.inference_mode(not grad), torch.autocast("cpu", torch.bfloat16):
        found = backend_times.measure(kind, list(NUMBERS), torch.device("cpu"), clock)
    assert found == {"cudnn": None, "flash": 7.0, "efficient": None}
    assert set(seen) == {(grad, False, False)} and not packed
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("gqa", [False, True])
def test_the_tensors_stand_for_their_kind(gqa):
    for bucket, length in enumerate(backend_times.MEASURED):
        kind = KIND._replace(bucket=bucket, gqa=gqa, value_width=32)
        query, key, value, dout = backend_times._tensors(kind, torch.device("cpu"))
        assert query.shape[2:] == (length, 64) and value.shape[3] == dout.shape[3] == 32
        assert query.shape[1] == key.shape[1] * (4 if gqa else 1)
        assert query.nbytes <= backend_times.BYTES and query.requires_grad and not dout.requires_grad
        expected = torch.nn.functional.scaled_dot_product_attention(
            query[:, :, :8], key[:, :, :8], value[:, :, :8], enable_gqa=gqa
        )
        assert expected.shape == (*query.shape[:2], 8, 32)
    wide = KIND._replace(width=256, dtype=torch.float32, bucket=2, value_width=256)
    assert backend_times._tensors(wide, torch.device("cpu"))[0].shape == (1, 2, 4096, 256)


# The file


def test_the_next_process_reads_what_this_one_measured(gpu):
    run()
    assert json.loads(backend_times.cache_file().read_text())[str(gpu.measured[0][0])] == gpu.times
    assert os.listdir(backend_times.cache_file().parent) == ["attention.json"], "nothing is left beside it"
    backend_times.rows.cache_clear()
    backends._known.clear()
    run()
    assert len(gpu.measured) == 1 and gpu.orders[0] == gpu.orders[1]


def test_rows_of_another_process_are_kept(gpu):
    run()
    other = str(KIND._replace(gpu="another"))
    path = backend_times.cache_file()
    path.write_text(json.dumps({**json.loads(path.read_text()), other: {"flash": 1.5}}))
    run(is_causal=False)
    assert len(json.loads(path.read_text())) == 3 and other in json.loads(path.read_text())


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[1]",
        "null",
        '{"%s": 3}',
        '{"%s": {"flash": "x"}}',
        '{"%s": {"flash": -1}}',
        '{"%s": {"new": 1}}',
        "[" * 99999,
    ],
)
def test_a_broken_file_is_measured_anew(gpu, content):
    path = backend_times.cache_file()
    path.parent.mkdir(parents=True)
    kind = Kind("NVIDIA H200", backends.software(), torch.bfloat16, 64, 64, True, False, True, False, 1)
    path.write_text(content.replace("%s", str(kind)))
    run()
    assert len(gpu.measured) == 1 and gpu.measured[0][0] == kind
    assert json.loads(path.read_text()) == {str(kind): gpu.times}, "and replaced"


def test_without_a_place_for_the_file(gpu, monkeypatch, tmp_path):
    (tmp_path / "taken").write_text("a file, not a folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "taken"))
    run()
    run()
    assert len(gpu.measured) == 1 and gpu.orders[0][0] == CUDNN


def test_the_table(gpu):
    run()
    gpu.times = {"cudnn": None, "flash": 20.0, "efficient": 12.25}
    run((2, 4, 4096, 128), 0.1, False)
    assert backends.table() == [
        (
            "NVIDIA H200",
            backends.software(),
            "bfloat16 128x128 dropout grad over 2048",
            "efficient",
            "-",
            "20.0",
            "12.2",
        ),
        ("NVIDIA H200", backends.software(), "bfloat16 64x64 causal grad up to 2048", "cudnn", "1.0", "2.0", "3.0"),
    ]


def test_warm_measures_what_is_not_known(gpu):
    assert backends.warm([torch.bfloat16]) == len(gpu.measured) == 12
    assert backends.warm([torch.bfloat16]) == len(gpu.measured) == 12
    run((2, 4, 1024, 64))
    assert len(gpu.measured) == 12
