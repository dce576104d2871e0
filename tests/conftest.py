"""Settings of the whole suite: seeds, NaN in uninitialised memory, and Triton's interpreter where there is no GPU."""

import collections
import csv
import functools
import gc
import importlib.util
import itertools
import math
import os
import pathlib
import re
import sys
import weakref

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is first imported

import pytest

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def rebuilt():
    """Weak references to the tensors that recipes rebuild from now on."""
    from hfnn.core import native

    found = []
    if native.extension is None:
        yield found
        return
    native.extension.watch(lambda y: found.append(weakref.ref(y)))
    try:
        yield found
    finally:
        native.extension.watch(None)


@pytest.fixture(scope="module")
def one_thread():
    """One torch thread, for all tests of a module."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def examples(one_thread):
    """The examples folder, on sys.path because the examples import each other. One thread: the models are tiny."""
    root = pathlib.Path(__file__).parents[1]
    # With the root on the path, transformers takes our `kernels` for the package of that name.
    with pytest.MonkeyPatch.context() as patch:
        others = [path for path in sys.path if pathlib.Path(path).resolve() != root]
        patch.setattr(sys, "path", [str(root / "examples"), *others])
        yield root / "examples"


@pytest.fixture
def restored():
    """Checks that torch is restored when the test ends. The test can also call the check itself."""
    from hfnn import patch

    originals = {place: place.original for place in patch.PLACES.values()}

    def check():
        assert all(getattr(place.owner, place.name) is original for place, original in originals.items())
        assert patch.here.state is None and not patch.here.patches
        assert not any(place.users for place in originals)

    yield check
    check()


@pytest.fixture
def bench(monkeypatch, tmp_path):
    """`bench(*arguments)` runs bench/run.py in this process on the CPU and returns (exit status, rows by file name)."""
    monkeypatch.syspath_prepend(pathlib.Path(__file__).parents[1] / "bench")
    run, timing = importlib.import_module("run"), importlib.import_module("timing")
    gc.freeze()  # garbage is collected before each measurement; imported objects need not be scanned
    monkeypatch.setitem(timing.COPY_BYTES, "cpu", 1 << 16)
    monkeypatch.setattr(importlib.import_module("small"), "RULE", (16,))
    # These tests check the output, not the times.
    monkeypatch.setattr(timing, "side_by_side", functools.partial(timing.side_by_side, rounds=3, block_us=20.0))
    threads = torch.get_num_threads()

    def main(*arguments):
        common = ["--device", "cpu", "--threads", "1", "--seconds", "0.01", "--results", str(tmp_path)]
        status = run.main([*arguments, *common])
        return status, {p.name: list(csv.DictReader(p.read_text().splitlines())) for p in tmp_path.glob("*.csv")}

    yield main
    torch.set_num_threads(threads)


@pytest.fixture
def bench_script(monkeypatch, tmp_path):
    """`bench_script(name)` -> a function of arguments that runs bench/<name>.py, tiny: (exit status, rows)."""
    monkeypatch.syspath_prepend(pathlib.Path(__file__).parents[1] / "bench")

    def load(name):
        def main(*arguments):
            common = ["--device", "cpu", "--tiny", "--rounds", "3", "--seconds", "0.01", "--results", str(tmp_path)]
            status = main.script.main([*arguments, *common])
            return status, [row for p in tmp_path.glob("*.csv") for row in csv.DictReader(p.read_text().splitlines())]

        # A fuzzer's module may have the same name.
        for path in (pathlib.Path(__file__).parents[1] / "bench").glob("*.py"):
            if path.stem == name or getattr(sys.modules.get(path.stem), "__file__", str(path)) != str(path):
                monkeypatch.delitem(sys.modules, path.stem, raising=False)
        main.script = importlib.import_module(name)
        return main

    return load


def repair_interpreter():
    """Works around defects of Triton 3.6's interpreter that would look like ours."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    patch, cast = interpreter._patch_lang_tensor, interpreter.InterpreterBuilder.cast_impl

    # It calls int() on arrays of one element to count loops; numpy 2.4 refuses this (triton issue 9171).
    def patch_lang_tensor(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    # It truncates float32 to bfloat16, where GPUs round.
    def cast_impl(self, source, dtype):
        if (source.dtype.scalar, dtype.scalar) != (tl.float32, tl.bfloat16):
            return cast(self, source, dtype)
        rounded = torch.from_numpy(np.ascontiguousarray(source.data)).bfloat16().view(torch.uint16).numpy()
        return interpreter.TensorHandle(rounded, tl.bfloat16)

    # It multiplies the bit patterns of bfloat16 as integers.
    def as_float(x):
        if x.dtype.scalar != tl.bfloat16:
            return x
        wide = torch.from_numpy(np.ascontiguousarray(x.data)).view(torch.bfloat16).float().numpy()
        return interpreter.TensorHandle(wide, tl.float32)

    dot = interpreter.InterpreterBuilder.create_dot
    interpreter.InterpreterBuilder.create_dot = lambda self, a, b, *rest: dot(self, as_float(a), as_float(b), *rest)
    np.seterr(all="ignore")  # on a GPU overflow to inf gives no warning
    interpreter._patch_lang_tensor, interpreter.InterpreterBuilder.cast_impl = patch_lang_tensor, cast_impl


def hasten_interpreter():
    """Removes needless work that takes half of the time of Triton 3.6's interpreter."""
    import numpy as np
    from triton.language import core
    from triton.runtime import interpreter

    # It computes integer sums and products a second time, in int64, for an assertion that only debug mode uses.
    options = interpreter.InterpreterOptions()
    assert not options.debug
    interpreter.InterpreterOptions = functools.partial(type(options), sanitize_overflow=False)
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions()

    # At each launch and each call of a device function it searches the language for what to replace. Nothing is
    # compiled in this process, so once per file of kernels is enough, and the replacements may stay.
    patch_lang, done = interpreter._patch_lang, set()

    def patch_lang_once(fn):
        if fn.__module__ not in done:
            done.add(fn.__module__)
            patch_lang(fn)
        return interpreter._LangPatchScope()  # with nothing to restore

    interpreter._patch_lang = patch_lang_once

    # It rebuilds the table of all dtypes at each lookup.
    known, find = {}, interpreter._get_np_dtype

    def get_np_dtype(dtype):
        if dtype.name not in known:
            known[dtype.name] = find(dtype)
        return known[dtype.name]

    interpreter._get_np_dtype = get_np_dtype

    # It builds tuples of constexprs for the shape of each value and each type: a quarter of its time.
    make_type, types, shapes = core.block_type.__init__, {}, {}

    def init_type(self, element_ty, shape):
        key = element_ty.name, tuple(map(int, shape))
        if key not in types:
            make_type(self, element_ty, shape)
            types[key] = vars(self)
        vars(self).update(types[key], element_ty=element_ty)

    def init(self, handle, type):
        self.handle, self.type, self.dtype = handle, type, type.scalar
        sizes = tuple(type.shape) if type.is_block() else ()
        if sizes not in shapes:
            shapes[sizes] = core.constexpr(math.prod(sizes)), core.tuple([core.constexpr(size) for size in sizes])
        self.numel, self.shape = shapes[sizes]

    core.block_type.__init__, core.tensor.__init__ = init_type, init

    # Its reductions other than sums and extrema go element by element. By halves, as on a GPU, they are vectorised.
    one_by_one = interpreter.ReduceOps.generic_reduce

    def by_halves(self, given):
        if self.axis is None:
            return one_by_one(self, given)
        axis, dtypes = self.axis, [x.dtype for x in given]
        values = [np.moveaxis(x.handle.data, axis, 0) for x in given]
        while len(values[0]) > 1:
            ends = slice(len(values[0]) // 2), slice(len(values[0]) // 2, None)
            halves = [self.to_tensor(x[end], dtype) for end in ends for x, dtype in zip(values, dtypes, strict=True)]
            combined = self.combine_fn.fn(*halves)
            values = [x.handle.data for x in (combined if isinstance(combined, tuple) else (combined,))]
        each = [x if self.keep_dims else x[0] for x in values]
        return [
            self.to_tensor(np.moveaxis(x, 0, axis) if self.keep_dims else x, t)
            for x, t in zip(each, dtypes, strict=True)
        ]

    interpreter.ReduceOps.generic_reduce = by_halves


if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton"):
    repair_interpreter()
    hasten_interpreter()


@pytest.hookimpl(tryfirst=True)  # before marks are evaluated
def pytest_collection_modifyitems(config, items):
    """Runs tests that take minutes first; otherwise all workers but one would wait for them at the end. Fuzzers get a
    timeout of 900 s."""
    mark_slow(items, whole=not any("::" in argument for argument in config.args))
    fuzzers = {item for item in items if item.path.parent.name == "fuzz"}
    for item in fuzzers:
        item.add_marker(pytest.mark.timeout(900))
    items.sort(key=lambda item: item.get_closest_marker("slow") is None and item not in fuzzers)
    products = collections.defaultdict(list)
    for item in items:
        if torch.cuda.is_available() and item.get_closest_marker("interpreted"):
            item.add_marker(pytest.mark.skip("Triton's interpreter is there without a GPU alone"))
        if hasattr(item, "callspec") and len(item.callspec.params) > 2:
            products[item.nodeid.partition("[")[0]].append(item)
    for product in products.values():
        for item in beyond_pairs(product):
            item.add_marker("rest")


def mark_slow(items, whole):
    """Marks the tests that slow.txt names. whole: whether all tests of each file were collected. If so, a line that
    matches no function of its file is an error. Only functions count, because parameters differ between machines."""
    files = collections.defaultdict(list)
    for item in items:
        files[item.path.relative_to(pathlib.Path(__file__).parent).as_posix()].append(item)
    for line in (pathlib.Path(__file__).parent / "slow.txt").read_text().splitlines():
        file, _, name = line.partition("::")
        if line.startswith("#") or file not in files:
            continue
        matches = re.compile(".*".join(map(re.escape, name.split("*")))).fullmatch
        found = [item for item in files[file] if matches(item.nodeid.partition("::")[2])]
        function = re.split(r"[*\[]", name)[0]
        if whole and not any(item.name.startswith(function) for item in files[file]):
            raise pytest.UsageError(f"tests/slow.txt names {line}, and there is no such test")
        for item in found:
            item.add_marker("slow")


def beyond_pairs(product):
    """The combinations that covering all pairs of parameter values does not need. The order decides which are kept."""
    pairs = [set(itertools.combinations(map(_key, item.callspec.params.items()), 2)) for item in product]
    most, missing = len(pairs[0]), set().union(*pairs)
    for least in sorted({most, most // 2, 1}, reverse=True):  # first those that add many missing pairs
        for number, own in enumerate(pairs):
            if len(own & missing) >= least > 0:
                missing -= own
                pairs[number] = set()
    return [item for item, own in zip(product, pairs, strict=True) if own]


def _key(parameter):
    name, value = parameter
    try:
        hash(value)
    except TypeError:
        return name, id(value)
    return name, type(value), value


def pytest_collection_finish():
    """Imported and collected objects live until the end; `gc.collect()` need not scan them."""
    gc.freeze()


@pytest.fixture
def device():
    return DEVICE


@pytest.fixture(autouse=True)
def _known_state(request):
    """A fixed seed, and NaN in whatever `torch.empty` returns, which shows what a kernel forgets to write."""
    torch.manual_seed(0)
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])
