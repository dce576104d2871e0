"""Kernels launched from C++ on a GPU: recordings are replayed with the results that Python's launches have."""

import importlib
import threading

import pytest
import torch

pytest.importorskip("triton")
autograd = pytest.importorskip("hfnn._autograd")

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
FUNCTIONS = (
    "layer_norm.forward", "layer_norm.backward", "rms_norm.forward", "gelu.forward", "gelu.backward", "dropout.forward",
)  # fmt: skip


def given(name, dtype, seed, device="cuda"):
    """The function, its arguments for TritonFunction, and the same arguments for Python in tensors of their own."""
    file, _, attribute = name.partition(".")
    room = importlib.import_module(f"hfnn.kernels.{file}")
    generator = torch.Generator().manual_seed(seed)
    R, C = 300, 1000
    kinds = {"x": (R, C), "w": (C,), "f": (R,), "p": (2, room.partials(R, C), C) if hasattr(room, "partials") else ()}
    layout = {
        "layer_norm.forward": ("x", "w", "w", "x", "f", "f", 1e-5),
        "layer_norm.backward": ("x", "x", "w", "f", "f", "x", "w", "w", "p"),
        "rms_norm.forward": ("x", "w", "x", "f", 1e-6, 1.0),
        "gelu.forward": ("x", "x", True),
        "gelu.backward": ("x", "x", "x", False),
        "dropout.forward": ("x", "x", 1 << 31, 2.0, "seed", "seed", None),
    }[name]
    ours, theirs = [], []
    for x in layout:
        if x == "seed":
            number = int(torch.randint(-(2**30), 2**30, (), generator=generator))
            ours.append(autograd.Fresh(number))
            theirs.append(number)
        elif isinstance(x, str):
            tensor = torch.randn(kinds[x], generator=generator).to(torch.float32 if x in "fp" else dtype).to(device)
            ours.append(tensor)
            theirs.append(tensor.clone())
        else:
            ours.append(x)
            theirs.append(x)
    return (
        getattr(room, attribute),
        ours,
        [*theirs, torch._C._cuda_getCurrentRawStream(torch.device(device).index or 0)],
    )


def same(ours, theirs):
    pairs = [(x, y) for x, y in zip(ours, theirs, strict=False) if isinstance(x, torch.Tensor)]
    assert pairs and all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in pairs)


@gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_gpu_is_given_the_same(name, dtype):
    function, ours, _ = given(name, dtype, 0)
    f = autograd.TritonFunction(function)
    f(*ours)
    for seed in range(1, 5):
        _, ours, theirs = given(name, dtype, seed)
        f(*ours)
        function(*theirs)
        same(ours, theirs)
    assert f.replays == 4, f.refusal


@gpu
def test_streams_threads_and_graphs_of_a_gpu():
    function, ours, theirs = given("gelu.forward", torch.bfloat16, 0)
    f = autograd.TritonFunction(function)
    f(*ours)
    function(*theirs)
    x, y = ours[:2]
    stream, wrong = torch.cuda.Stream(), []

    def on_stream():
        try:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(50_000_000)
                y.zero_()
                f(*ours)
                if stream.query():
                    wrong.append("it did not wait for its stream")
        except Exception as error:
            wrong.append(error)

    stream.wait_stream(torch.cuda.current_stream())
    thread = threading.Thread(target=on_stream)  # which has not called CUDA before
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert not wrong
    same(ours, theirs)

    bare = threading.Thread(target=f, args=ours)
    y.zero_()
    torch.cuda.synchronize()
    bare.start()
    bare.join()
    torch.cuda.synchronize()
    same(ours, theirs)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        f(*ours)
    y.zero_()
    x.copy_(theirs[0].neg_())
    graph.replay()
    function(*theirs)
    same(ours, theirs)
    assert f.replays == 3


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_of_another_gpu_than_the_current():
    function, ours, theirs = given("layer_norm.forward", torch.bfloat16, 0, "cuda:1")
    f = autograd.TritonFunction(function)
    for _ in range(3):
        f(*ours)
    with torch.cuda.device(1):
        function(*theirs)
    same(ours, theirs)
    assert f.replays == 2 and f.kinds == 1 and torch.cuda.current_device() == 0
