"""Which of torch's backends runs plain attention: the choice. Mostly with stand-ins for a GPU."""

import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import hfnn
from hfnn.ops.attention import backend_times, backends
from hfnn.ops.attention.backend_times import NUMBERS

CUDNN, FLASH, EFFICIENT = (NUMBERS[name] for name in ("cudnn", "flash", "efficient"))
FLASH_FIRST, _ = backends._TORCHS
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    """Nothing known, a file of its own, and no deterministic algorithms, with which nothing is chosen."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(backends, "_known", {})
    monkeypatch.setattr(backends, "_planned", {})
    backend_times.rows.cache_clear()
    torch.use_deterministic_algorithms(False)
    if torch.cuda.is_available():
        backends._begin(torch.cuda.current_device())  # torch fixes its order at the first query
    before = backend_times.get_order()
    backend_times.set_order(backends._FLASH_FIRST)
    yield
    backend_times.rows.cache_clear()
    left = backend_times.get_order()
    backend_times.set_order(before)
    assert left == backends._FLASH_FIRST, "torch's order was not put back"


class Fake(SimpleNamespace):
    """The attributes of a CUDA tensor that are read."""

    def __init__(self, *shape, dtype=torch.bfloat16, requires_grad=True):
        super().__init__(shape=torch.Size(shape), dtype=dtype, requires_grad=requires_grad, is_cuda=True)

    def get_device(self):
        return 0


class Gpu:
    """Planted times, and the orders in which torch was called."""

    def __init__(self):
        self.times = {"cudnn": 1.0, "flash": 2.0, "efficient": 3.0}
        self.measured, self.orders, self.capturing = [], [], False

    def measure(self, kind, names, device, clock):
        self.measured.append((kind, tuple(names)))
        return {name: self.times[name] for name in names}

    def sdpa(self, *args, **kwargs):
        self.orders.append(backend_times.get_order())
        return len(self.orders)


@pytest.fixture
def gpu(monkeypatch):
    gpu = Gpu()
    monkeypatch.setattr(backends, "Tensor", Fake)
    monkeypatch.setattr(backends, "_sdpa", gpu.sdpa)
    monkeypatch.setattr(backends, "_begin", lambda place: None)
    monkeypatch.setattr(backends, "context", lambda *tensors: None)
    monkeypatch.setattr(backends, "gpu", lambda place: "NVIDIA H200")
    monkeypatch.setattr(backend_times, "measure", gpu.measure)
    monkeypatch.setattr(backends, "capturing", lambda: gpu.capturing)
    return gpu


def run(shape=(2, 4, 1024, 64), dropout_p=0.0, is_causal=True, enable_gqa=False, **options):
    x = Fake(*shape, **options)
    return backends.plain(x, x, x, dropout_p, is_causal, None, enable_gqa)


# Choosing


def test_the_fastest_goes_first_and_is_measured_once(gpu):
    for _ in range(3):
        run()
    assert len(gpu.measured) == 1 and gpu.measured[0][1] == ("cudnn", "flash", "efficient")
    assert [order[0] for order in gpu.orders] == [CUDNN] * 3
    assert all(sorted(order) == sorted(FLASH_FIRST) for order in gpu.orders), "every backend has its place"
    run((3, 4, 1100, 64))
    assert len(gpu.measured) == 1, "another shape of the same kind"


@pytest.mark.parametrize(
    "other",
    [
        {"shape": (2, 4, 1024, 128)},
        {"shape": (2, 4, 512, 64)},
        {"shape": (2, 4, 2049, 64)},
        {"dtype": torch.float16},
        {"is_causal": False},
        {"requires_grad": False},
        {"dropout_p": 0.1},
        {"enable_gqa": True},
    ],
)
def test_what_makes_another_kind(gpu, other):
    run()
    run(**other)
    first, second = (kind for kind, _ in gpu.measured)
    assert first != second and str(first) != str(second)


def test_times_that_are_noise_apart_leave_it_to_torch(gpu):
    gpu.times = {"cudnn": 0.99, "flash": 1.0, "efficient": 0.98}
    run()
    assert gpu.orders == [[FLASH, EFFICIENT, CUDNN, 0, 4]]


def test_who_does_not_take_the_call_is_not_chosen(gpu):
    gpu.times = {"cudnn": None, "flash": None, "efficient": 3.0}
    run()
    assert gpu.orders[0][0] == EFFICIENT
    gpu.times = dict.fromkeys(gpu.times)
    run(is_causal=False)
    assert gpu.orders[1] == FLASH_FIRST, "torch's own where nobody has a time"


def test_what_is_off_stays_off_and_is_measured_when_it_is_on(gpu):
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        run()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)
    run()
    assert [names for _, names in gpu.measured] == [("flash", "efficient"), ("cudnn",)]
    assert [order[0] for order in gpu.orders] == [FLASH, CUDNN]


@pytest.mark.parametrize("priority", [False, True])
def test_in_sdpa_kernel_the_users_order_holds(gpu, priority):
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION], set_priority=priority):
        expected = backend_times.get_order()
        run()
    assert gpu.orders == [expected] and not gpu.measured


def test_an_order_that_was_set_otherwise_holds(gpu):
    before = backend_times.get_order()
    run()
    backend_times.set_order([EFFICIENT, CUDNN, FLASH, 0, 4])
    try:
        run()
        run((2, 4, 64, 64))
    finally:
        backend_times.set_order(before)
    assert gpu.orders[1:] == [[EFFICIENT, CUDNN, FLASH, 0, 4]] * 2 and len(gpu.measured) == 1


def test_switched_off_or_deterministic_is_torchs_order(gpu):
    with hfnn.use("torch"):
        run()
    torch.use_deterministic_algorithms(True)
    run()
    torch.use_deterministic_algorithms(False)
    run((4, 1024, 64))
    run((0, 4, 1024, 64))
    run(dtype=torch.float64)
    assert gpu.orders == [FLASH_FIRST] * 5 and not gpu.measured


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_torchs(gpu, monkeypatch):
    x = torch.nested.nested_tensor([torch.randn(3, 4, 8), torch.randn(3, 2, 8)])
    monkeypatch.setattr(backends, "Tensor", torch.Tensor)
    assert backends._call(x, x, x, 0.0, False, False) is None
    assert backends._call(*[torch.randn(2, 3, 4, 8)] * 3, 0.0, False, False) is not None


def test_autocast_decides_the_dtype(gpu, monkeypatch):
    monkeypatch.setattr(backends, "_cuda_autocasts", lambda: True)
    run(dtype=torch.float32)
    assert gpu.measured[0][0].dtype is torch.get_autocast_dtype("cuda")


def test_dropout_goes_the_same_way_with_and_without_grad(gpu):
    """A checkpoint may run forward without a graph and again with one; both must draw the same mask."""
    run(dropout_p=0.1)
    with torch.no_grad():
        run(dropout_p=0.1)
    run(dropout_p=0.1, requires_grad=False)
    assert len(gpu.measured) == 1 and gpu.measured[0][0].grad
    with torch.no_grad():
        run()
    assert not gpu.measured[1][0].grad


def test_what_comes_first_in_a_capture_goes_by_torchs_order(gpu):
    """For a new shape cuDNN would plan, which breaks the capture, even if its kind has been timed."""
    gpu.capturing = True
    run()
    assert gpu.orders == [FLASH_FIRST] and not gpu.measured
    gpu.capturing = False
    run()
    gpu.capturing = True
    run()
    run((3, 4, 1024, 64))
    assert [order[0] for order in gpu.orders[1:]] == [CUDNN, CUDNN, FLASH_FIRST[0]] and len(gpu.measured) == 1


def test_without_memory_torchs_order_and_another_try(gpu, monkeypatch):
    def short(*args):
        raise torch.OutOfMemoryError("no")

    monkeypatch.setattr(backend_times, "measure", short)
    run(dtype=torch.float32)
    monkeypatch.setattr(backend_times, "measure", gpu.measure)
    run(dtype=torch.float32)
    assert gpu.orders[0] == FLASH_FIRST and gpu.orders[1][0] == CUDNN


def test_ever_new_shapes_are_not_planned_by_cudnn(gpu, monkeypatch):
    monkeypatch.setattr(backends, "PLANS", 2)
    lengths = (600, 601, 602, 600, 602, 601)
    for _ in range(2):
        for length in lengths:
            run((1, 4, length, 64))
        backends._known.clear()
    assert [order[0] for order in gpu.orders] == [CUDNN, CUDNN, FLASH, CUDNN, FLASH, CUDNN] * 2
    gpu.times = {"cudnn": 1.0, "flash": None, "efficient": None}
    for length in lengths:
        run((1, 4, length, 96))
    assert [order[0] for order in gpu.orders[12:]] == [CUDNN] * 6, "where nobody else takes it, cuDNN does"


def test_what_is_remembered_is_bounded(gpu, monkeypatch):
    monkeypatch.setattr(backends, "MOST", 3)
    for length in range(600, 610):
        run((1, 4, length, 64))
    assert len(backends._known) <= 3 and len(gpu.measured) == 1


@pytest.mark.parametrize("error", [RuntimeError, torch.OutOfMemoryError])
def test_what_fails_in_our_order_goes_by_torchs(error, gpu, monkeypatch):
    def picky(*args, **kwargs):
        if gpu.sdpa() and backend_times.get_order()[0] == CUDNN:
            raise error("no valid execution plan")
        return "done"

    monkeypatch.setattr(backends, "_sdpa", picky)
    assert run() == "done" and run() == "done"
    again = [CUDNN] if error is torch.OutOfMemoryError else []  # there may be memory by the next call
    assert [order[0] for order in gpu.orders] == [CUDNN, FLASH, *again, FLASH]


def test_an_error_is_torchs_own(gpu, monkeypatch):
    def refuse(*args, **kwargs):
        raise RuntimeError(f"refused in order {backend_times.get_order()}")

    monkeypatch.setattr(backends, "_sdpa", refuse)
    with pytest.raises(RuntimeError, match=r"order \[1, 2, 0, 3, 4\]"):
        run()


def test_threads_do_not_leave_an_order_behind(gpu):
    gpu.times = {"cudnn": 1.0, "flash": 2.0, "efficient": 0.5}
    run()

    def many():
        for _ in range(300):
            run()

    threads = [threading.Thread(target=many) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert {order[0] for order in gpu.orders} == {EFFICIENT}


# On the CPU


def test_on_the_cpu_it_is_torchs_op(monkeypatch):
    q, k, v = (torch.randn(2, 4, 9, 8, requires_grad=True) for _ in range(3))
    for options in ({}, {"is_causal": True}, {"scale": 0.3}):
        expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)
        assert torch.equal(backends.plain(q, k, v, **options), expected)
    few = k[:, :2], v[:, :2]
    expected = torch.nn.functional.scaled_dot_product_attention(q, *few, enable_gqa=True)
    assert torch.equal(backends.plain(q, *few, 0.0, False, None, True), expected)
    assert backends.choice(q, k, v) == "flash" and backends.choice(q, k, v, dropout_p=0.5) == "math"
    assert backends.choice(torch.nn.Parameter(q.detach()), k, v) is None
    with pytest.raises(RuntimeError):
        backends.plain(q, k[..., :3], v)


# On a GPU


@needs_gpu
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_on_a_gpu(causal, grad):
    q, k, v = (torch.randn(2, 4, 300, 64, device="cuda", dtype=torch.bfloat16, requires_grad=grad) for _ in range(3))
    state = torch.cuda.get_rng_state()
    y = backends.plain(q, k, v, 0.0, causal)
    assert torch.equal(torch.cuda.get_rng_state(), state)
    ((kind, row),) = backend_times.rows().items()
    assert "bfloat16 64x64" in kind and row["flash"] > 0
    fastest = min((us, name) for name, us in row.items() if us is not None)[0]
    assert row[backends.choice(q, k, v, 0.0, causal)] <= fastest * backends.NOISE
    exact = torch.nn.functional.scaled_dot_product_attention(*(x.double() for x in (q, k, v)), is_causal=causal)
    assert hfnn.testing.error(y, exact).l2 < 0.01
    if grad:
        torch.autograd.grad(y.sum(), (q, k, v))


@needs_gpu
def test_torchs_own_order_is_what_it_would_be_without_us():
    """torch's first query fixes the order; ours must not become the default."""
    code = (
        "import torch; x = torch.randn(1, 2, 64, 64, device='cuda', dtype=torch.float16)\n"
        "{}; torch.nn.functional.scaled_dot_product_attention(x, x, x); print(torch._C._get_sdp_priority_order())"
    )
    ours = "from hfnn.ops.attention import backends; backends.plain(x, x, x)"
    orders = [subprocess.check_output([sys.executable, "-P", "-c", code.format(c)]) for c in ("pass", ours)]
    assert orders[0] == orders[1]


@needs_gpu
def test_in_a_graph_capture():
    q = torch.randn(2, 4, 300, 64, device="cuda", dtype=torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    expected = torch.nn.functional.scaled_dot_product_attention(q, q, q)
    backends._begin(0)
    with torch.cuda.graph(graph):
        y = backends.plain(q, q, q)
    graph.replay()
    assert not backend_times.rows() and hfnn.testing.error(y, expected).l2 < 0.01
