"""The Triton kernels: what they compute (by Triton's interpreter where there is no GPU) and what they compile to.

Compiling needs no GPU but a process of its own, since @triton.jit looks at TRITON_INTERPRET when it decorates. There,
every launch is caught and compiled for the architecture in question, specialised just as it was launched; what is
tested is what the kernels' own functions launch, and there is no second list of signatures to keep.
"""

import importlib
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import types

import pytest
import torch

if not torch.cuda.is_available() and __name__ != "__main__":
    os.environ.setdefault("TRITON_INTERPRET", "1")
triton = pytest.importorskip("triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KERNELS = pathlib.Path(__file__).parent.parent / "kernels"
SHARED = {80: 164 * 1024, 90: 228 * 1024, 100: 228 * 1024}  # bytes of a multiprocessor
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


def kernels(name):
    return importlib.import_module(f"hfnn.kernels.{name}")


# ---- what they compile to


def launch_layer_norm(x_dtype, y_dtype, w_dtype, cols, rows=100_000):
    op = kernels("layer_norm")
    x, dx = (torch.empty(rows, cols, dtype=x_dtype, device="meta") for _ in range(2))
    y, dy = (torch.empty(rows, cols, dtype=y_dtype, device="meta") for _ in range(2))
    w, b, dw, db = (torch.empty(cols, dtype=w_dtype, device="meta") for _ in range(4))
    mean, rstd = (torch.empty(rows, device="meta") for _ in range(2))
    sums = torch.empty(2, op.partials(rows, cols), cols, device="meta")
    op.forward(x, w, b, y, mean, rstd, 1e-5, 0)
    op.rebuild(x, w, b, mean, rstd, y, 0)
    op.backward(dy, x, w, mean, rstd, dx, dw, db, sums, 0)
    op.backward(dy, x, w, mean, rstd, None, dw, db, sums, 0)


def launch_rms_norm(x_dtype, y_dtype, w_dtype, cols, rows=100_000):
    op = kernels("rms_norm")
    x, dx = (torch.empty(rows, cols, dtype=x_dtype, device="meta") for _ in range(2))
    y, dy = (torch.empty(rows, cols, dtype=y_dtype, device="meta") for _ in range(2))
    w, dw = (torch.empty(cols, dtype=w_dtype, device="meta") for _ in range(2))
    rstd = torch.empty(rows, device="meta")
    sums = torch.empty(1, op.partials(rows, cols), cols, device="meta")
    op.forward(x, w, y, rstd, 1e-5, 0.0, 0)
    op.rebuild(x, w, rstd, y, 0.0, 0)
    op.backward(dy, x, w, rstd, dx, dw, sums, 0.0, 0)


def launch_dropout_in_a_graph(dtype):
    x, y = (torch.empty(1 << 20, dtype=dtype, device="meta") for _ in range(2))
    kernels("dropout").forward(x, y, 1 << 31, 2.0, 1, 1, torch.empty(2, dtype=torch.int64, device="meta"), 0)


def launch_bits():
    codes, op = torch.empty(1 << 20, dtype=torch.uint8, device="meta"), kernels("bits")
    for width in (1, 2, 4, 5):
        packed = codes[: width << 17]
        op.pack(codes, packed, width, 0)
        op.unpack(packed, codes, width, 0)


def launch_add_norms(dtype, cols):
    rows = 1000
    x, y = torch.empty(2, rows, cols, dtype=dtype, device="meta")
    w, rstd, pair = torch.empty(cols, device="meta"), torch.empty(rows, device="meta"), torch.empty(2, device="meta")
    for total in (x, x.float()):
        kernels("layer_norm").add(x, total, total, w, w, y, rstd, rstd, 1e-5, 1 << 31, 2.0, 1, 1, None, 0)
        kernels("rms_norm").add(x, total, total, w, y, rstd, 1e-5, 0.0, 1 << 31, 2.0, 1, 1, pair.long(), 0)
        kernels("rms_norm").add(x, total, total, w, y, rstd, 1e-5, 0.0, 0, 1.0, 0, 0, None, 0)


def launch_losses(dtype, cols):
    """What rooms launch for logits of a vocabulary, and for probabilities."""

    def new(*shape, dtype=F32):
        return torch.empty(shape, dtype=dtype, device="meta")

    rows = 64
    x, soft, classes = new(rows, cols, dtype=dtype), new(rows, cols, dtype=dtype), new(rows, dtype=torch.int64)
    loss, share, slope, a, b, t = (new(rows) for _ in range(6))
    lse, one, w = new(rows, dtype=torch.float64), new(1), new(cols, dtype=dtype)
    op = kernels("cross_entropy")
    for target, weight, options in (
        (classes, None, (-100, 0.0, 0.0, 1.0, 0.0)),
        (classes, w, (-100, 0.1, 1e-4, 0.5, 30.0)),
        (soft, None, (-100, 0.1, 0.0, 1.0, 0.0)),
    ):
        op.forward(x, target, weight, loss, share, lse, slope, *options, 0)
        op.backward(x, target, weight, lse, slope, one, x, *options, 0)
        op.fused(x, target, weight, loss, None, None, None, one, x, *options, 0)
    op = kernels("log_probs")
    for mean, slopes in ((None, None), (a, b)):
        op.forward(x, classes, loss, lse, mean, 1.0, 0.0, 0)
        op.backward(x, classes, lse, a, slopes, t, x, 1.0, 0.0, 0)
    columns, partials = new(cols, rows, dtype=dtype), new(2, op.column_splits(cols, rows), rows)
    op.forward_columns(columns, classes, partials, loss, lse, 1.0, 0.0, 0)
    op.backward_columns(columns, classes, lse, a, t, columns, 1.0, 0.0, 0)
    op = kernels("softmax")
    for log in (False, True):
        op.forward(x, x, log, 0)
        op.backward(x, x, x, log, 0)
    for beta in (0.0, 0.5, 1.0):
        kernels("distillation").fused(x, soft, loss, one, x, beta, 1.0, 0)


def launch_recode():
    x, op = torch.empty(1 << 20, dtype=BF16, device="meta"), kernels("recode")
    rank, start, table = (torch.empty(1 << 16, dtype=d, device="meta") for d in (torch.uint8, torch.int32, torch.int16))
    packed = torch.empty(5 << 17, dtype=torch.uint8, device="meta")
    op.encode(x, rank, packed, 0)
    op.decode(x, packed, start, table, x, 0)


def launch_rooms(dtype):
    """What every room of the index launches, forward, rebuilt and backward, in each way of calling it."""
    from hfnn import functional, kernel, ops, recipe, warmup

    def choose(op, *_, **__):
        source = next(k.source for k in op.kernels if k.name == "triton")
        return types.SimpleNamespace(**vars(kernels(source.rpartition(".")[2])), queue=lambda x: 0, name="triton")

    kernel.Op._choose = kernel.Op.find = choose
    for op in (op for op in ops.ALL if any(k.name == "triton" for k in op.kernels)):
        for case in warmup.cases(op, 1024, 1024):
            args, options = op.sample(case, dtype, "meta")
            args = [a.requires_grad_() if warmup.is_float(a) else a for a in args]
            y = getattr(functional, op.name)(*args, **options, prefer="memory")
            tag = recipe.find(y)
            if tag is not None:
                with torch.no_grad():
                    tag.recipe.rebuild(tag.sources)
            y.sum().backward()


def launch_all():
    launch_bits()
    launch_recode()
    for cols in (64, 1000, 1024, 2048, 4096, 8192, 32768):
        launch_layer_norm(BF16, BF16, BF16, cols)
        launch_layer_norm(F32, F32, F32, cols)
        launch_rms_norm(BF16, BF16, BF16, cols)
    for cols in (1024, 4096, 8192, 32768):
        launch_layer_norm(F16, F32, F32, cols)
        launch_rms_norm(F32, BF16, F32, cols)
    launch_layer_norm(BF16, BF16, BF16, 1 << 14)
    launch_layer_norm(BF16, BF16, BF16, 1 << 16)
    for cols in (1000, 8192, 128256):
        launch_losses(BF16, cols)
    for dtype in (BF16, F16, F32):
        launch_rooms(dtype)
        for cols in (64, 1000, 1001, 2048, 3000, 4096, 8192, 10000):
            launch_add_norms(dtype, cols)
        launch_dropout_in_a_graph(dtype)


def compile_launches(capability):
    """Every launch of `launch_all` as a dict of what it is and what it takes."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend
    from triton.runtime.jit import JITFunction, create_function_from_signature

    target = GPUTarget("cuda", capability, 32)
    backend = make_backend(target)
    found = {}

    def run(self, *args, grid, warmup, **options):
        bound, kinds, options = create_function_from_signature(self.signature, self.params, backend)(*args, **options)
        options, signature, constants, hints = self._pack_args(backend, options, bound, kinds, options)
        given = {k: str(v.dtype if hasattr(v, "dtype") else v) for k, v in bound.items()}
        name = f"{self.module.rpartition('.')[2]}.{self.__name__}"
        key = name + str(given)
        if key not in found:
            code = triton.compile(ASTSource(self, signature, constants, hints), target=target, options=options.__dict__)
            found[key] = {"kernel": name, "given": given, "grid": grid, "warps": options.num_warps,
                          "shared": code.metadata.shared, "ahead": "cp.async" in code.asm["ptx"],
                          **resources(code.asm["cubin"])}  # fmt: skip

    JITFunction.run = run
    kernels("rows").device = lambda: (132, SHARED[capability])
    launch_all()
    return list(found.values())


def resources(cubin):
    tool = pathlib.Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return {key: int(re.search(rf"\b{key}:(\d+)", text)[1]) for key in ("REG", "STACK", "LOCAL")}


def resident(launch, capability):
    """How many programs of a launch one multiprocessor holds."""
    registers = -(-launch["REG"] // 8) * 8 * 32 * launch["warps"]
    return min(65536 // registers, 64 // launch["warps"], SHARED[capability] // (launch["shared"] + 1024))


def entry_kernels():
    """Every @triton.jit function in kernels/ that a launch can name: those called *_kernel."""
    for path in KERNELS.glob("[a-z]*.py"):
        for name in re.findall(r"^@triton\.jit.*\ndef (\w+_kernel)\(", path.read_text(), re.M):
            yield f"{path.stem}.{name}"


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_compiles_without_spilling(capability, tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, __file__, str(capability)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    launches = json.loads(done.stdout)

    assert {launch["kernel"] for launch in launches} == set(entry_kernels())
    for launch in launches:
        assert launch["STACK"] == launch["LOCAL"] == 0, launch
        given = launch["given"]
        # What promises to have tiles in flight has them.
        assert launch["ahead"] == (int(given.get("STAGES", 1)) > 1), launch
        # Programs that add up parameter gradients all run at once, or the last ones would double the time.
        if launch["kernel"] == "rows.backward_kernel" and given["dx_RC"] != "None":
            assert launch["grid"][0] <= 132 * resident(launch, capability), launch


# ---- what they compute


def error(got, exact):
    return ((got.double() - exact).norm() / exact.norm()).item()


def draw(*shape, dtype=F32, scale=1.0, shift=0.0):
    return (torch.randn(*shape, device=DEVICE) * scale + shift).to(dtype)


ROUNDING = {F32: 2**-24, F16: 2**-11, BF16: 2**-8}
ROWS = [(1, 1), (4, 17), (37, 96), (3, 1000), (2, 4096), (3, 8200), (1, 33000)]


@pytest.mark.parametrize("dtypes", [(F32, F32), (BF16, BF16), (F16, F16), (BF16, F32), (F32, F16)], ids=str)
@pytest.mark.parametrize("rows, cols", ROWS)
def test_layer_norm(rows, cols, dtypes):
    op = kernels("layer_norm")
    x, dy = draw(rows, cols, dtype=dtypes[0], scale=2, shift=1), draw(rows, cols, dtype=dtypes[1])
    w, b = draw(cols, dtype=dtypes[0]), draw(cols, dtype=dtypes[0])
    y, again, dx, dx_alone = (torch.full_like(t, torch.nan) for t in (dy, dy, x, x))
    mean, rstd = (torch.full((rows,), torch.nan, device=DEVICE) for _ in range(2))
    op.forward(x, w, b, y, mean, rstd, 1e-5, 0)
    op.rebuild(x, w, b, mean, rstd, again, 0)
    assert torch.equal(y, again)

    dw, db, dw_alone, db_alone = (torch.full_like(w, torch.nan) for _ in range(4))
    sums = torch.full((2, op.partials(rows, cols), cols), torch.nan, device=DEVICE)
    op.backward(dy, x, w, mean, rstd, dx, dw, db, sums, 0)
    op.backward(dy, x, w, mean, rstd, dx_alone, None, None, None, 0)
    op.backward(dy, x, w, mean, rstd, None, dw_alone, None, sums, 0)
    op.backward(dy, x, w, mean, rstd, None, None, db_alone, sums, 0)

    x64, w64, b64 = (t.double().requires_grad_() for t in (x, w, b))
    y64 = torch.nn.functional.layer_norm(x64, (cols,), w64, b64, 1e-5)
    y64.backward(dy.double())
    if cols == 1:  # exactly the bias, and no gradient but its own
        assert torch.equal(y, b.expand(rows, 1).to(y.dtype)) and not dx.any() and not dw.any()
        return
    assert error(y, y64.detach()) < 2 * ROUNDING[dtypes[1]]
    for got in (dx, dx_alone):
        assert error(got, x64.grad) < 3 * ROUNDING[dtypes[0]]
    for got in (dw, dw_alone):
        assert error(got, w64.grad) < 3 * ROUNDING[dtypes[0]]
    for got in (db, db_alone):
        assert error(got, b64.grad) < 3 * ROUNDING[dtypes[0]]


@pytest.mark.parametrize("dtypes", [(F32, F32), (BF16, BF16), (F16, F32)], ids=str)
@pytest.mark.parametrize("rows, cols", ROWS)
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm(rows, cols, dtypes, offset):
    op = kernels("rms_norm")
    x, dy, w = draw(rows, cols, dtype=dtypes[0]), draw(rows, cols, dtype=dtypes[1]), draw(cols)
    y, again, dx, dw = (torch.full_like(t, torch.nan) for t in (dy, dy, x, w))
    rstd = torch.full((rows,), torch.nan, device=DEVICE)
    sums = torch.full((1, op.partials(rows, cols), cols), torch.nan, device=DEVICE)
    op.forward(x, w, y, rstd, 1e-2, offset, 0)
    op.rebuild(x, w, rstd, again, offset, 0)
    op.backward(dy, x, w, rstd, dx, dw, sums, offset, 0)
    assert torch.equal(y, again)

    x64, w64 = x.double().requires_grad_(), w.double().requires_grad_()
    y64 = torch.nn.functional.rms_norm(x64, (cols,), w64 + offset, 1e-2)
    y64.backward(dy.double())
    assert error(y, y64.detach()) < 2 * ROUNDING[dtypes[1]]
    if cols > 1:  # of one column, dx is a difference of all but equal numbers
        assert error(dx, x64.grad) < 3 * ROUNDING[dtypes[0]]
    assert error(dw, w64.grad) < 3 * ROUNDING[F32]


def test_norm_without_parameters_or_rows():
    op = kernels("layer_norm")
    x = draw(3, 100)
    y, again = torch.full_like(x, torch.nan), torch.full_like(x, torch.nan)
    mean, rstd = torch.empty(3, device=DEVICE), torch.empty(3, device=DEVICE)
    op.forward(x, None, None, y, mean, rstd, 0.0, 0)
    op.rebuild(x, None, None, mean, rstd, again, 0)
    assert torch.equal(y, again)
    assert error(y, torch.nn.functional.layer_norm(x.double(), (100,), eps=0.0)) < 2 * ROUNDING[F32]
    op.forward(x, None, draw(100), y, mean, rstd, 0.0, 0)

    none, parameter = x[:0], torch.full((100,), torch.nan, device=DEVICE)
    sums = torch.empty(2, op.partials(0, 100), 100, device=DEVICE)
    op.forward(none, None, None, none, mean[:0], rstd[:0], 0.0, 0)
    op.backward(none, none, None, mean[:0], rstd[:0], none, parameter, None, sums, 0)
    assert not parameter.any()


@pytest.mark.parametrize("tanh", [False, True])
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_gelu(dtype, tanh):
    op = kernels("gelu")
    x, dy = draw(5000, dtype=dtype, scale=2), draw(5000, dtype=dtype)
    y, again, dx = (torch.full_like(x, torch.nan) for _ in range(3))
    op.forward(x, y, tanh, 0)
    op.forward(x, again, tanh, 0)
    op.backward(dy, x, dx, tanh, 0)
    assert torch.equal(y, again)
    x64 = x.double().requires_grad_()
    y64 = torch.nn.functional.gelu(x64, approximate="tanh" if tanh else "none")
    y64.backward(dy.double())
    assert error(y, y64.detach()) < 2 * ROUNDING[dtype]
    assert error(dx, x64.grad) < 3 * ROUNDING[dtype]


@pytest.mark.parametrize("tanh", [False, True])
def test_gelu_of_every_16_bit_number(tanh):
    """The short erf is exact to bfloat16 element by element, tails included."""
    x = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).to(DEVICE).view(BF16)
    y = torch.empty_like(x)
    kernels("gelu").forward(x, y, tanh, 0)
    x64 = x.double()
    u = (2 / torch.pi) ** 0.5 * (x64 + 0.044715 * x64**3)
    exact = x64 * (torch.sigmoid(2 * u) if tanh else torch.special.erfc(-x64 / 2**0.5) / 2)
    known = exact.abs() > 1e-37  # below, float32 has no exponents left
    assert ((y.double() - exact).abs() <= 1.02 * ROUNDING[BF16] * exact.abs())[known & exact.isfinite()].all()
    assert torch.equal(y.isnan(), x.isnan() | (x == -torch.inf))  # -inf * 0, as by torch's formula
    assert y[x == torch.inf].item() == torch.inf


def philox(counter, key):
    """The four words of Philox4x32-10 by the paper, in Python's integers."""
    c, k = list(counter), list(key)
    for _ in range(10):
        p, q = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [q >> 32 ^ c[1] ^ k[0], q & 0xFFFFFFFF, p >> 32 ^ c[3] ^ k[1], p & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


def words(seed, offset, n):
    mask = 0xFFFFFFFF
    counters = ((offset + i) & (1 << 64) - 1 for i in range(-(-n // 4)))
    drawn = [philox((c & mask, c >> 32, 0, 0x68666E6E), (seed & mask, seed >> 32 & mask)) for c in counters]
    return torch.tensor(drawn).flatten()[:n]


def test_philox_known_answer():
    assert philox((0,) * 4, (0,) * 2) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("seed, offset", [(0, 0), (-1, (1 << 32) - 3), (0x123456789ABCDEF, (1 << 62) + 1)])
def test_dropout(seed, offset, dtype):
    op = kernels("dropout")
    n, threshold, scale = 4097, 0x40000001, 4 / 3
    x = draw(n, dtype=dtype)
    keep = (words(seed, offset, n) >= threshold).to(DEVICE)
    expected = torch.where(keep, (x.float() * scale).to(dtype), 0)
    pair = torch.tensor([seed, offset], device=DEVICE)
    for given in ((seed, offset, None), (0, 0, pair)):
        y = torch.full_like(x, torch.nan)
        op.forward(x, y, threshold, scale, *given, 0)
        assert torch.equal(y, expected)


def test_dropout_of_all_and_of_nothing():
    op, x = kernels("dropout"), draw(100)
    y = torch.full_like(x, torch.nan)
    op.forward(x, y, 1 << 32, 1.0, 1, 2, None, 0)
    assert not y.any()
    op.forward(x, y, 0, 1.0, 1, 2, None, 0)
    assert torch.equal(x, y)
    op.forward(x[:0], y[:0], 5, 1.0, 1, 2, None, 0)
    kernels("gelu").forward(x[:0], y[:0], False, 0)


if __name__ == "__main__":
    json.dump(compile_launches(int(sys.argv[1])), sys.stdout)
