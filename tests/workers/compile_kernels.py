"""What the Triton kernels compile to for one architecture: no GPU is asked for.

python compile_kernels.py CAPABILITY

A process of its own, since @triton.jit looks at TRITON_INTERPRET when it decorates. Every launch is caught and compiled
instead, specialised just as it was launched; what is looked at is what the kernels' own functions launch, and there is
no second list of signatures to keep. A list of launches goes to the standard output, as JSON: what each is given, and
what it takes of a multiprocessor.
"""

import importlib
import json
import pathlib
import re
import subprocess
import sys
import tempfile
import types

import torch
import triton

SHARED = {80: 164 * 1024, 90: 228 * 1024, 100: 228 * 1024}  # bytes of a multiprocessor
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


def kernels(name):
    return importlib.import_module(f"hfnn.kernels.{name}")


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
    """What every room of the index launches, forward, rebuilt and backward, in each way of calling it.

    Of one element too: Triton takes an argument of 1 for a constant.
    """
    from hfnn import functional, kernel, ops, recipe, warmup

    def choose(op, *_, **__):
        source = next(k.source for k in op.kernels if k.name == "triton")
        return types.SimpleNamespace(**vars(kernels(source.rpartition(".")[2])), queue=lambda x: 0, name="triton")

    kernel.Op._choose = kernel.Op.find = choose
    for op in (op for op in ops.ALL if any(k.name == "triton" for k in op.kernels)):
        sizes = (c for c in op.cases if all(entry == 1 for entry in c if isinstance(entry, int)))
        for case in (*warmup.cases(op, 1024, 1024), *sizes):
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
            launch = {"kernel": name, "given": given, "grid": grid, "warps": options.num_warps,
                      "shared": code.metadata.shared, "ahead": "cp.async" in code.asm["ptx"],
                      **resources(code.asm["cubin"])}  # fmt: skip
            found[key] = launch | {"resident": resident(launch, capability)}

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


if __name__ == "__main__":
    json.dump(compile_launches(int(sys.argv[1])), sys.stdout)
