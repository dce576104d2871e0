"""Kernels launched from C++: what kernels/launch.py records, and how csrc/autograd/triton.cpp replays it.

No kernel runs: a test's function declares its launch, and a stand-in replaces CUDA's driver. tests/workers/launches.py
compares the recordings of real kernels with Triton's launches.
"""

import ctypes
import struct
import threading

import pytest
import torch

pytest.importorskip("triton")
autograd = pytest.importorskip("hfnn._autograd")
from hfnn.kernels import launch as module  # noqa: E402

KERNEL = 0x1000
X = torch.zeros(64, dtype=torch.float32)
A, B = X[:32], X[32:]


class Driver:
    """Keeps the launches, and the first `count` parameters of each as 8-byte integers."""

    def __init__(self):
        self.seen, self.count, self.error = [], 1, 0

    def __call__(self, function, grid, threads, shared, stream, params):
        params = ctypes.cast(params, ctypes.POINTER(ctypes.POINTER(ctypes.c_uint64)))
        self.seen.append((function, grid, threads, shared, stream, [params[i][0] for i in range(self.count)]))
        return self.error

    def params(self):
        return self.seen[-1][-1]


@pytest.fixture
def driver():
    found = Driver()
    autograd.fake_driver(found)
    yield found
    autograd.fake_driver(None)


def function(types, give=lambda *args: args, grid=(3, 2), calls=None, queue=False):
    """A function like those of kernels/, with one launch. `calls` counts how often Python runs."""

    def body(*args):
        if module.record(KERNEL, grid, 128, 1024, types, give(*args)) and calls is not None:
            calls.append(args)

    if queue:
        return autograd.TritonFunction(lambda x, queue, n: body(x, queue, n))
    return autograd.TritonFunction(body)


def bits(x):
    return struct.unpack("<I", struct.pack("<f", x))[0]


def test_the_second_call_is_the_drivers(driver):
    calls = []
    f = function(("*fp32", "*fp32", "i32", "fp32", "i1"), calls=calls)
    driver.count = 7
    f(A, B, -3, 0.25, True)
    assert len(calls) == 1 and not driver.seen
    f(A, B, -3, 0.25, True)
    assert len(calls) == 1 and (f.calls, f.replays, f.kinds, f.refusal) == (2, 1, 1, "")
    params = [A.data_ptr(), B.data_ptr(), 0xFFFFFFFD, bits(0.25), 1, 0, 0]  # and Triton's two scratch memory pointers
    assert driver.seen == [(KERNEL, (3, 2, 1), 128, 1024, 0, params)]
    others = torch.ones(32), torch.ones(32)
    f(*others, -3, 0.25, True)
    assert len(calls) == 1 and driver.params()[:2] == [x.data_ptr() for x in others]


KINDS = {
    "dtype": (A.double(),),
    "size": (A[:16],),
    "stride": (torch.empty(64)[::2],),
    "alignment": (torch.empty(33)[1:],),
    "shape": (A.view(4, 8),),
    "absent": (None,),
    "integer": (A, B, 2),
    "real": (A, B, 1, 0.5),
    "sign of zero": (A, B, 1, -0.0),
    "boolean": (A, B, 1, 0.0, True),
    "integer for boolean": (A, B, 1, 0.0, 0),
    "integer for real": (A, B, 1, 0),
    "one address": (A, A),
}


@pytest.mark.parametrize("name", KINDS)
def test_another_kind_is_recorded_anew(driver, name):
    calls, usual = [], (A, B, 1, 0.0, False)
    f = function((), give=lambda *args: (), calls=calls)
    other = *KINDS[name], *usual[len(KINDS[name]) :]
    for args in (usual, usual, other, other, usual):
        f(*args)
    assert len(calls) == 2 and (f.kinds, f.replays) == (2, 3)


def test_parameters_of_every_size(driver):
    types = "i8", "i16", "i32", "i64", "u8", "u16", "u32", "u64", "fp32", "fp64"
    values = -1, -2, -3, -4, 250, 65000, 2**32 - 1, 2**64 - 1, 0.1, 0.1
    f = function(types, give=lambda x: values)
    driver.count = len(types)
    f(A)
    f(A)
    packed = [struct.unpack("<Q", struct.pack("<d", 0.1))[0]]
    assert driver.params() == [255, 65534, 2**32 - 3, 2**64 - 4, *values[4:8], bits(0.1), *packed]


def test_views_are_their_tensors_and_an_offset(driver):
    driver.count = 3
    f = function(("*fp32", "*fp32", "*fp32"), give=lambda x, y: (x.view(4, 8), x[5:], y.view(4, 8)[2:]))
    f(A, B)
    x, y = torch.zeros(32), torch.zeros(32)
    f(x, y)
    assert driver.params()[:3] == [x.data_ptr(), x.data_ptr() + 20, y.data_ptr() + 64]


REFUSED = {
    "operators": (("*fp32",), lambda x, y: (x.add_(1),)),
    "memory of its own": (("*fp32",), lambda x, y: (torch.empty(3),)),
    "a copy": (("*fp32",), lambda x, y: (x.view(4, 8).t().reshape(-1),)),
    "another tensor": (("*fp32",), lambda x, y: (B,)),
    "a view of several": (("*fp32",), lambda x, y: (x[5:],)),
    "an address": (("i64",), lambda x, y: (y.data_ptr() + 8,)),
    "a type": (("fp16",), lambda x, y: (0.5,)),
    "a descriptor": (("tensordesc<fp32[8]>",), lambda x, y: (x,)),
    "a value": (("i32",), lambda x, y: (0.5,)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_repeated_runs_in_python(driver, name):
    calls = []
    types, give = REFUSED[name]
    f = function(types, give, calls=calls)
    x = torch.zeros(32)
    y = x[4:28] if name == "a view of several" else torch.zeros(32)
    for _ in range(5):
        f(x, y)
    assert len(calls) == 5 and not driver.seen and f.refusal
    if name == "operators":
        assert torch.equal(x, torch.full((32,), 5.0))


def test_the_queue_is_added_where_the_function_has_it(driver):
    calls, driver.count = [], 2
    f = function(("*fp32", "i32"), give=lambda x, queue, n: (x, n), calls=calls, queue=True)
    f(A, autograd.Fresh(3))
    f(A, autograd.Fresh(4))
    assert calls == [(A, torch.get_num_threads(), 3)] and driver.params()[1] == 4


def test_nothing_to_launch(driver):
    calls = []
    f = function((), give=lambda x: (), grid=(0,), calls=calls)
    f(A)
    f(A)
    assert len(calls) == 1 and f.replays == 1 and not driver.seen


def test_errors(driver):
    f = function(("*fp32",))
    f(A)
    for driver.error, text in ((1, "invalid argument"), (700, "unknown error")):
        with pytest.raises(RuntimeError, match=text):
            f(A)

    def broken(x):
        raise KeyError("x")

    f = autograd.TritonFunction(broken)
    for _ in range(5):
        with pytest.raises(KeyError):
            f(A)
    assert not module._recordings


def test_without_the_driver_nothing_is_recorded():
    calls = []
    f = function(("*fp32",), calls=calls)
    for _ in range(3):
        f(A)
    assert len(calls) == 3 and f.kinds == 0


WATCHERS = {
    "debug": lambda patch: patch.setattr(module.RUNTIME, "debug", True),
    "instrumentation": lambda patch: patch.setattr(module.COMPILATION, "instrumentation_mode", "x"),
    "hook": lambda patch: patch.setattr(module.RUNTIME, "launch_enter_hook", lambda metadata: None),
    "chain": lambda patch: module.EXIT.calls.append(print),
    "run": lambda patch: patch.setattr(module.JITFunction, "run", lambda *args, **options: None),
    "class": lambda patch: patch.setattr(type(module.RUNTIME), "debug", True),
}


@pytest.mark.parametrize("name", WATCHERS)
def test_python_runs_while_someone_watches(driver, name, monkeypatch):
    calls = []
    f = function(("*fp32",), calls=calls)
    f(A)
    f(A)
    with monkeypatch.context() as patch:
        WATCHERS[name](patch)
        f(A)
        f(A)
        assert len(calls) == 3 and f.replays == 1
        module.EXIT.calls.clear()
    for knobs in (module.RUNTIME, module.COMPILATION):  # older versions of pytest leave the old value there
        for attribute in ("debug", "launch_enter_hook", "instrumentation_mode"):
            vars(knobs).pop(attribute, None)
    f(A)
    assert len(calls) == 3 and f.replays == 2


def test_hooks_of_one_kernel(driver):
    calls, hooks = [], []

    def body(x):
        calls.append(x)
        recording = module._recordings.get(threading.get_ident())
        if recording is not None:
            recording.add(KERNEL, (1,), 32, 0, ("*fp32",), (x,), hooks)

    f = autograd.TritonFunction(body)
    f(A)
    hooks.append(print)
    f(A)
    hooks.clear()
    f(A)
    assert len(calls) == 2 and f.replays == 1


def test_recordings_are_a_threads_own(driver):
    """One thread records while another launches."""
    inside, done, found = threading.Event(), threading.Event(), []

    def slow(x):
        inside.set()
        done.wait(60)
        module.record(KERNEL, (1,), 32, 0, ("*fp32",), (x,))

    f = autograd.TritonFunction(slow)
    thread = threading.Thread(target=f, args=(A,))
    thread.start()
    inside.wait(60)
    found.append(module.record(KERNEL, (1,), 32, 0, (), ()))
    done.set()
    thread.join()
    f(A)
    assert found == [True] and len(driver.seen) == 1


def test_threads(driver):
    calls = []
    f = function(("*fp32", "i32"), calls=calls)
    tensors = [torch.zeros(n) for n in range(1, 9)]
    driver.count = 1
    barrier = threading.Barrier(6)

    def work():
        barrier.wait()
        for _ in range(50):
            for i, x in enumerate(tensors):
                f(x, i)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert f.calls == 6 * 50 * 8 == f.replays + len(calls) and f.kinds == 8
    assert {params[0] for *_, params in driver.seen} == {x.data_ptr() for x in tensors}


def test_kinds_are_not_without_number(driver):
    calls = []
    f = function((), give=lambda *args: (), calls=calls)
    for i in range(4100):
        f(A, i)
    for i in (0, 4099):
        f(A, i)
    assert f.kinds == 4096 and len(calls) == 4101
