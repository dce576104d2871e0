"""Compares what hfnn.kernels.launch passes to Triton's launcher with what Triton passes; needs no GPU.

pytest launches.py, with TRITON_INTERPRET=0. Runs in a separate process, because @triton.jit reads that variable when it
decorates, and because Triton caches what was compiled for this file's driver, whose launcher records its arguments.
"""

import importlib
import struct
import threading

import pytest
import torch
import triton
import triton.language as tl
from hfnn.kernels import launch as module
from hfnn.kernels.launch import launch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaDriver, CudaLauncher
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

BASE = 13  # the launcher's arguments that are not the kernel's
written, scratch = threading.local(), 0


class Launcher(CudaLauncher):
    def __init__(self, source, metadata):
        self.kinds, self.hash = list(source.signature.values()), metadata.hash
        self.global_scratch_size, self.profile_scratch_size = scratch, 0
        self.global_scratch_align, self.profile_scratch_align, self.num_ctas = 1, 1, 1
        self.launch_cooperative_grid, self.launch_pdl = metadata.launch_cooperative_grid, metadata.launch_pdl
        self.launch = self.write

    def write(self, *args):
        x, y, z, stream, function, cooperative, pdl, _, _, packed, _, enter, _ = args[:BASE]
        values = [plain(v) for v, kind in zip(args[BASE:], self.kinds, strict=True) if kind != "constexpr"]
        written.by_triton, written.kinds = enter is not None, [kind for kind in self.kinds if kind != "constexpr"]
        written.launch = (x, y, z), stream, function, self.hash, cooperative, pdl, packed, values


class Driver(CudaDriver):
    launcher_cls = Launcher
    device = 0

    def __init__(self):
        self.utils = self

    def get_current_device(self):
        return self.device

    def get_current_stream(self, device):
        return 100 + device

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_device_properties(self, device):
        return {"max_shared_mem": 228 * 1024}

    def load_binary(self, name, binary, shared, device):
        return None, (name, hash(binary), device), 32, 0, 1024  # not unique: some kernels compile to the same code


@pytest.fixture(scope="module", autouse=True)
def driver():
    triton.runtime.driver.set_active(Driver())
    return triton.runtime.driver.active


def plain(x):
    if isinstance(x, TensorDescriptor):
        return x.base.data_ptr(), x.base.dtype, *x.shape, *x.strides, *x.block_shape
    return x.data_ptr() if isinstance(x, torch.Tensor) else (type(x), x)


def pointers(launch):
    """Replaces each tensor with its address."""
    *rest, values = launch
    return *rest, [v[1] if isinstance(v, tuple) and v[0] is int else v for v in values]


def seen(call):
    call()
    return pointers(written.launch), written.by_triton


@triton.jit(do_not_specialize=["loose"])
def toy_kernel(x, y, stride, loose, scale, flag, exact: tl.float32, CONSTANT: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK) * stride + loose
    value = tl.load(x + i) * scale * exact + CONSTANT
    if flag:
        value += 1
    if y is not None:
        value += tl.load(y + i)
    tl.store(x + i, value)


@triton.jit
def tiles_kernel(x, out, BLOCK: tl.constexpr):
    tl.store(out + tl.arange(0, BLOCK), x.load([0, 0]).reshape(BLOCK).to(tl.float32))


MEMORY = torch.empty(64, dtype=torch.float64)
X = MEMORY.view(torch.float32)
USUAL = {"x": X, "y": X, "stride": 3, "loose": 3, "scale": 0.5, "flag": True, "exact": 0.5, "CONSTANT": 3, "BLOCK": 16}
INTEGERS = (
    0,
    1,
    2,
    16,
    17,
    -1,
    -16,
    2**31 - 1,
    2**31,
    -(2**31),
    -(2**31) - 1,
    2**32 + 1,
    2**63 - 16,
    2**63,
    2**64 - 16,
)
CHANGES = [
    {},
    *({"x": x, "y": y} for x in (X, X[1:], X[4:]) for y in (X, X[1:], X[8:], None)),
    *({"x": MEMORY.view(dtype)} for dtype in (torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.int64)),
    {"x": torch.nn.Parameter(X)},
    *({"stride": n} for n in INTEGERS),
    *({"loose": n} for n in INTEGERS),
    *({"scale": s} for s in (0.0, 1.0, -2.5, 1, 16, 2**40)),
    *({"flag": f} for f in (False, 1, 0, 5)),
    *({"exact": e} for e in (1.0, 0.0)),
    *({"CONSTANT": c} for c in (0, 1, 16, 0.5, -1.5)),
    {"BLOCK": 32},
    *({"num_warps": n} for n in (1, 2, 8)),
    {"num_stages": 1},
    {"maxnreg": 32},
    {"maxnreg": None},
    {"enable_fp_fusion": False},
    {"enable_fp_fusion": True},
    {"num_warps": 8, "maxnreg": 8 * 5},
]


def arguments(change):
    """By position, and by name: CONSTANT and BLOCK in either way."""
    given = USUAL | change
    options = {name: value for name, value in change.items() if name not in USUAL}
    if len(options) % 2:
        options |= {name: given.pop(name) for name in ("CONSTANT", "BLOCK")}
    return [value for name, value in given.items() if name in USUAL], options


@pytest.mark.parametrize("change", CHANGES)
def test_every_launch_is_tritons(change):
    args, options = arguments(change)
    launch(toy_kernel, (7,), *args, **options)
    expected, _ = seen(lambda: toy_kernel[(7,)](*args, **options))
    assert seen(lambda: launch(toy_kernel, (7,), *args, **options)) == (expected, False)


def test_all_are_still_apart():
    """A variant made last does not affect the first launches."""
    for change in CHANGES:
        args, options = arguments(change)
        expected, _ = seen(lambda: toy_kernel[(7, 2)](*args, **options))  # noqa: B023
        assert seen(lambda: launch(toy_kernel, (7, 2), *args, **options)) == (expected, False), change  # noqa: B023


@pytest.mark.parametrize("grid", [(3,), (3, 4), (3, 4, 5), (0,)])
def test_grids(grid):
    args, options = arguments({})
    launch(toy_kernel, grid, *args, **options)
    assert seen(lambda: launch(toy_kernel, grid, *args, **options))[0][0] == (*grid, 1, 1)[:3]


def test_descriptors():
    for rows, cols, block in ((32, 64, (4, 16)), (32, 64, (8, 8)), (64, 32, (4, 16))):
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.empty(rows, cols, dtype=dtype)
            args = TensorDescriptor(x, list(x.shape), list(x.stride()), list(block)), X, 64
            launch(tiles_kernel, (1,), *args)
            expected, _ = seen(lambda: tiles_kernel[(1,)](*args))  # noqa: B023
            assert seen(lambda: launch(tiles_kernel, (1,), *args)) == (expected, False)  # noqa: B023


def test_devices(driver, monkeypatch):
    args, options = arguments({})
    for device in (0, 1, 0, 1):
        monkeypatch.setattr(driver, "device", device)
        launch(toy_kernel, (1,), *args, **options)
        (_, stream, (*_, loaded), *_), by_triton = seen(lambda: launch(toy_kernel, (1,), *args, **options))
        assert (stream, loaded, by_triton) == (100 + device, device, False)


def test_hooks_are_called():
    args, options = arguments({})
    calls = []
    launch(toy_kernel, (1,), *args, **options)
    for chain in (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook):
        chain.add(calls.append)
        assert seen(lambda: launch(toy_kernel, (1,), *args, **options))[1]
        chain.remove(calls.append)
        assert not seen(lambda: launch(toy_kernel, (1,), *args, **options))[1]
    toy_kernel.add_pre_run_hook(lambda *_, **__: calls.append("before"))
    assert seen(lambda: launch(toy_kernel, (1,), *args, **options))[1] and calls == ["before"]
    toy_kernel.pre_run_hooks.clear()


WATCHERS = {
    "enter": (knobs.runtime, "launch_enter_hook", lambda metadata: None),
    "exit": (knobs.runtime, "launch_exit_hook", lambda metadata: None),
    "debug": (knobs.runtime, "debug", True),
    "run": (JITFunction, "run", lambda self, *args, **options: module.RUN(self, *args, **options)),
    "version": (module, "KNOWN", False),
}


@pytest.mark.parametrize("name", WATCHERS)
def test_triton_launches_what_is_watched(name, monkeypatch):
    args, options = arguments({})
    launch(toy_kernel, (1,), *args, **options)
    with monkeypatch.context() as patch:
        patch.setattr(*WATCHERS[name])
        assert seen(lambda: launch(toy_kernel, (1,), *args, **options))[1]
    assert not seen(lambda: launch(toy_kernel, (1,), *args, **options))[1]


@pytest.mark.parametrize(
    "change", [{"x": X.as_subclass(type("Mine", (torch.Tensor,), {}))}, {"stride": tl.constexpr(4)}]
)
def test_triton_launches_what_is_not_known(change):
    args, options = arguments(change)
    for _ in range(2):
        assert seen(lambda: launch(toy_kernel, (1,), *args, **options))[1]


def test_triton_launches_what_wants_scratch_memory(monkeypatch):
    monkeypatch.setattr(importlib.import_module(__name__), "scratch", 1)
    triton.set_allocator(lambda size, alignment, stream: X)
    args, options = arguments({"BLOCK": 64})
    for _ in range(2):
        assert seen(lambda: launch(toy_kernel, (1,), *args, **options))[1]


def test_threads():
    """All of them start before anything is compiled."""
    cases, wrong, barrier = [arguments({"stride": n, "num_stages": 2}) for n in (1, 3, 16)], [], threading.Barrier(6)

    def work(case):
        args, options = cases[case % 3]
        barrier.wait()
        got = [seen(lambda: launch(toy_kernel, (1,), *args, **options))[0] for _ in range(50)]
        expected, _ = seen(lambda: toy_kernel[(1,)](*args, **options))
        wrong.extend(g for g in got if g != expected)

    threads = [threading.Thread(target=work, args=(case,)) for case in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


SIZES = {"u1": 1, "i32": 4, "i64": 8, "u64": 8, "fp32": 4}


def packed(kind, value):
    """The bits that a kernel receives for an argument of Triton's launcher."""
    if kind[0] == "*":
        return value
    number, size = value[1], SIZES[kind]
    return struct.unpack("<I", struct.pack("<f", number))[0] if kind == "fp32" else number % (1 << 8 * size)


def repeated(call, *args, fresh=()):
    """What C++ would launch, with the arguments of another call, and the reason if it would not."""
    launches, why, _ = module.recorded(call, args, fresh)
    return launches, why


def in_full(launch, args):
    """A recorded launch in the form of `seen`."""
    function, grid, threads, shared, _, params = launch
    bits = [
        args[a].data_ptr() + b if kind == module.POINTER
        else packed("fp32" if type(args[a]) is float else f"i{8 * b}", ("", args[a])) if kind == module.FRESH else b
        for kind, a, b in params
    ]  # fmt: skip
    return grid, function, threads, shared, bits


def in_full_by_triton():
    (grid, _, function, _, cooperative, pdl, (warps, clusters, shared), values), kinds = written.launch, written.kinds
    assert (cooperative, pdl, clusters) == (False, False, 1)
    values = [v[1] if isinstance(v, tuple) and kind[0] == "*" else v for v, kind in zip(values, kinds, strict=True)]
    return grid, function, 32 * warps, shared, [packed(kind, v) for kind, v in zip(kinds, values, strict=True)]


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_recorded_is_tritons(change):
    """At the first launch, which Triton compiles, and at a later one."""
    args, options = arguments(change)
    for grid in ((11,), (11, 2)):
        (found,), why = repeated(lambda *args: launch(toy_kernel, grid, *args, **options), *args)  # noqa: B023
        assert not why and in_full(found, args) == in_full_by_triton()
        sizes = [8 if kind == module.POINTER else a for kind, a, _ in found[-1]]
        assert sizes == [SIZES.get(kind, 8) for kind in written.kinds]


@pytest.mark.parametrize("value", [0, 1, 16, -3, 2**31 - 1, 2**31, -(2**40)])
def test_fresh_integers_are_found(value):
    def call(x, loose):
        launch(toy_kernel, (7,), x, None, 3, loose, 0.5, True, 0.5, 3, 16)

    (found,), why = repeated(call, X, value, fresh=(1,))
    other = X.clone(), (5 if -(2**31) <= value < 2**31 else 2**50)
    call(*other)
    assert not why and in_full(found, other) == in_full_by_triton()


@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, -3.0])
def test_fresh_reals_are_found(value):
    def call(x, real):
        launch(toy_kernel, (7,), x, None, 3, 5, real, True, 0.5, 3, 16)

    (found,), why = repeated(call, X, value, fresh=(1,))
    other = X.clone(), 0.7
    call(*other)
    assert not why and in_full(found, other) == in_full_by_triton()


def test_a_kernel_that_specialises_on_a_fresh_integer():
    launches, why = repeated(lambda n: launch(toy_kernel, (7,), X, None, n, 3, 0.5, True, 0.5, 3, 16), 3, fresh=(0,))
    assert launches is None and why


def test_a_recording_launches_once():
    calls, (args, options) = [], arguments({"x": X.double(), "stride": 5})
    for _ in range(2):
        written.launch = None
        repeated(lambda x, n: calls.append(launch(toy_kernel, (n,), *args, **options)), X, 300, fresh=(1,))
        assert written.launch[0] == (300, 1, 1)


@pytest.mark.parametrize("name", WATCHERS)
def test_nothing_is_recorded_of_what_is_watched(name, monkeypatch):
    args, options = arguments({})
    with monkeypatch.context() as patch:
        patch.setattr(*WATCHERS[name])
        launches, why = repeated(lambda *args: launch(toy_kernel, (1,), *args, **options), *args)
    assert launches is None and why and module.watched() is False


def test_descriptors_are_not_recorded():
    x = torch.empty(32, 64)
    block = TensorDescriptor(x, [32, 64], [64, 1], [4, 16])
    assert repeated(lambda x, out: launch(tiles_kernel, (1,), block, out, 64), x, X)[0] is None


def test_every_kernel_of_ours_is_known(monkeypatch):
    """No kernel uses Triton's own launch path because of the order or types of its arguments."""
    compiled = importlib.import_module("compile_kernels")
    slow, count = set(), 0

    def run(self, *args, grid, warmup, **options):
        nonlocal count
        count += 1
        if not module.Form(self, args).known:
            slow.add(f"{self.module}.{self.__name__}")

    monkeypatch.setattr(JITFunction, "run", run)
    monkeypatch.setattr(compiled.kernels("rows"), "device", lambda: (132, 228 * 1024))
    compiled.launch_all(everything=False)
    compiled.launch_attentions(90, everything=True)
    assert count and not slow
