"""What the Triton kernels compile to for one architecture; needs no GPU.

python compile_kernels.py CAPABILITY [few]

few: every kernel, at few widths and in one 16-bit format. Runs in a separate process, because @triton.jit reads
TRITON_INTERPRET when it decorates. Every launch is intercepted and compiled instead, specialised as launched, so no
second list of signatures is needed. Prints a list of launches as JSON: the arguments of each, and the resources it
takes of a multiprocessor.
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
    """The rooms' launches for logits of a vocabulary, and for probabilities."""

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


def launch_masked_softmax(dtype, cols):
    """With each kind of mask, by rows and broadcast, and without."""
    op, x = kernels("masked_softmax"), torch.empty(2, 4, 64, cols, dtype=dtype, device="meta")
    masks = [torch.empty(2, 1, 64, width, dtype=d, device="meta") for d in (torch.uint8, F32) for width in (1, cols)]
    for y in (x, x.float()):
        for causal in (False, True):
            for mask in (None, *(mask.expand(x.shape) for mask in masks)):
                op.forward(x, mask, y, 0.125, causal, 0, 0)
            op.backward(y, y, x, 0.125, causal, 0, 0)


def launch_batch_norm(dtype, shape):
    """Each combination of activation and sum that the room launches, in training."""
    op, (P, C, S) = kernels("batch_norm"), shape
    x = torch.empty(shape, dtype=dtype, device="meta")
    w, mean, rstd = (torch.empty(C, device="meta") for _ in range(3))
    bits = torch.empty((P * C // 8,) if S == 1 else (P, C, -(-S // 8)), dtype=torch.uint8, device="meta")
    partials = torch.empty(3, op.partials(P, C, S), C, device="meta")
    for kind, residual in ((0, None), (1, None), (1, x), (2, x), (3, None), (4, None), (5, None)):
        flags = None if residual is None else bits
        op.forward(x, w, w, residual, x, flags, mean, rstd, w, w, partials, 0.1, 1e-5, kind, 0.1, 0)
        op.backward(x, x, w, w, flags, mean, rstd, x, residual, w, w, partials, True, kind, 0.1, 0)
        op.backward(x, x, w, w, flags, mean, rstd, x, residual, None, None, None, False, kind, 0.1, 0)


def launch_wire():
    """Four ranks, a float32 gradient with its kept error, and a bfloat16 one without."""
    op, length = kernels("wire"), 1 << 18
    for dtype in (F32, BF16):
        x, error = (torch.empty(1_000_003, dtype=d, device="meta") for d in (dtype, F32))
        error = error if dtype == F32 else None
        scaled = torch.empty(4, length + length // 128, dtype=torch.uint8, device="meta")
        for rows in (scaled, torch.empty(4, length, dtype=BF16, device="meta")):
            op.encode(x, error, rows, 1, length)
            op.reduce(x, error, rows, rows[:1], 1, length, 4)
            op.decode(rows, x, length)


def launch_attention(dtype, width, softcap=0.0, left=-1, right=0, threshold=0, uniform=False, **given):
    """given: the optional tensors that are passed."""
    op, (B, H, G, T) = kernels("attention"), (2, 8, 4, 1024)

    def new(name, *shape, dtype=dtype):
        return torch.empty(shape, dtype=dtype, device="meta") if name is None or name in given else None

    q, o, dq = (new(None, B, T, H, width).transpose(1, 2) for _ in range(3))
    k, v, dk, dv = (new(None, B, T, G, width).transpose(1, 2) for _ in range(4))
    lse, delta = (new(None, B, H, T, dtype=F32) for _ in range(2))
    sums = new("bias", B, H, T, dtype=F32)
    bits, tiles = (
        new("mask", B, H, T, T // 8, dtype=torch.uint8),
        new("mask", B, H, T // 128, T // 128, dtype=torch.uint8),
    )
    bias, dbias, slopes, sinks = new("bias", B, H, T, T), new("bias", 1, H, T, T), new("slopes", B, H), new("sinks", H)
    bounds, starts = new("bounds", B, 2, dtype=torch.int32), new("starts", 5, dtype=torch.int32)
    numbers = width**-0.5, softcap, left, right, 0, uniform, threshold, 1, 1, new("pair", 2, dtype=torch.int64), 0
    op.forward(q, k, v, o, lse, sums, bits, tiles, bias, slopes, sinks, bounds, starts, starts, *numbers)
    op.delta(o, o, delta, 0)
    op.backward(
        q, k, v, lse, sums, o, delta, dq, dk, dv, dbias, bits, tiles, bias, slopes, bounds, starts, starts, *numbers
    )


def launch_attentions(capability, everything):
    """`everything` for the architecture that the tiles were tuned on; else one of each way to load and multiply."""
    kernels("attention")._has_tma = lambda index: capability >= 90
    widths = ((BF16, 64), (F16, 128), (BF16, 256), (F32, 64))
    variants = ({"left": 9, "softcap": 30.0, "sinks": 1, "starts": 1}, {"mask": 1, "threshold": 9}, {"bias": 1})
    variants += {"uniform": True, "bounds": 1}, {"uniform": True, "mask": 1, "threshold": 9}
    for dtype, width in widths if everything else widths[::3]:
        launch_attention(dtype, width)
    for options in variants if everything else variants[1:4]:
        launch_attention(BF16, 128, **options)


def launch_rooms(dtype, ones):
    """What every room of the index launches, in forward, rebuild and backward, for each way of calling it.

    ones: also with one element, because Triton treats an argument of 1 as a constant.
    """
    from hfnn import functional, ops, warmup
    from hfnn.core import kernel
    from hfnn.core import node as recipe

    def choose(op, *_, **__):
        source = next(k.source for k in op.kernels if k.name == "triton")
        return types.SimpleNamespace(**vars(kernels(source.rpartition(".")[2])), queue=lambda x: 0, name="triton")

    kernel.Op._choose = kernel.Op.find = choose
    for op in (op for op in ops.CONTRACT if any(k.name == "triton" for k in op.kernels)):
        sizes = (c for c in op.cases if all(entry == 1 for entry in c if isinstance(entry, int)))
        for case in (*warmup.cases(op, 1024, 1024), *(sizes if ones else ())):
            args, options = op.sample(case, dtype, "meta")
            args = [a.requires_grad_() if warmup.is_float(a) else a for a in args]
            y = getattr(functional, op.name)(*args, **options, prefer="memory")
            token = recipe.take(y)
            if token is not None:
                with torch.no_grad():
                    token.tensor()
            y.sum().backward()


def launch_rope(dtype, out, case):
    """One launch for queries and keys, and for one of them; angles per token, or looked up."""
    batch, heads, groups, tokens, dims, rotary, interleaved = case

    def new(*shape, dtype=F32):
        return torch.empty(shape, dtype=dtype, device="meta")

    q, k, yq, yk = (new(batch, tokens, h, dims, dtype=d).transpose(1, 2) for d in (dtype, out) for h in (heads, groups))
    rstd_q, rstd_k, w = new(batch, tokens, heads), new(batch, tokens, groups), new(dims, dtype=dtype)
    turn, norm = kernels("rope"), kernels("qk_norm_rope")
    sums = new(2, norm.partials(batch, tokens, dims), dims)
    whole, half, at = new(batch, tokens, rotary, dtype=out), new(1, tokens, rotary // 2), new(1, tokens).long()
    for t, positions in ((whole, None), (half, at)):
        turn.forward(q, k, t, t, positions, yq, yk, rotary, interleaved, False, 0)
        turn.forward(yq, None, t, t, positions, q, None, rotary, interleaved, True, 0)
        norm.forward(q, k, w, w, t, t, positions, yq, yk, rstd_q, rstd_k, 1e-6, 0.0, rotary, interleaved, 0)
        norm.rebuild(q, w, rstd_q, t, t, positions, yq, 0.0, rotary, interleaved, 0)
        given = yq, yk, q, k, w, w, rstd_q, rstd_k, t, t, positions, q, k
        norm.backward(*given, w, w, sums, 1.0, rotary, interleaved, 0)
        norm.backward(*given, None, None, None, 1.0, rotary, interleaved, 0)


def launch_optim(everything):
    """A step by each rule, with parameters, gradients and states in each format, and optional features."""
    op = kernels("optim")

    def new(*shape, dtype=F32):
        return torch.empty(shape, dtype=dtype, device="meta")

    rows, owner = new(1000, 16, dtype=torch.int64), new(100_000, dtype=torch.int32)
    hyper, control, squares = new(2, 8, dtype=torch.float64), new(4), new(op.partials(100_000), dtype=torch.float64)
    op.prepare(rows, owner, control, None, 0)
    op.prepare(rows, owner, control, squares, 0)
    float32, bfloat16, float16, mixed, int8, int4 = 0x000, 0x111, 0x222, 0x011, 0x411, 0x511
    # The rule and the format codes; amsgrad, remainder, ema; a seed.
    tables = [(0, (float32,), 0, 0, 0, -1), (0, (mixed,), 0, 1, 0, -1), (0, (float32, int8), 0, 0, 0, -1),
              (0, (int4,), 0, 0, 0, 7), (1, (float32,), 0, 0, 0, -1), (2, (bfloat16,), 0, 0, 0, -1)]  # fmt: skip
    if everything:
        tables += [(0, (float32,), 1, 0, 1, -1), (0, (mixed,), 0, 0, 0, -1), (0, (float16,), 0, 0, 0, 7),
                   (0, (bfloat16,), 0, 0, 0, 7), (0, (int8,), 0, 1, 1, -1), (0, (int4,), 0, 0, 0, -1),
                   (0, (0x400,), 0, 0, 0, -1), (1, (int8,), 0, 0, 0, -1), (0, (int8,), 1, 0, 0, 7)]  # fmt: skip
    for rule, codes, amsgrad, remainder, ema, seed in tables:
        features = op.Features(codes, bool(amsgrad), bool(remainder), bool(ema))
        decay = 0.99 if ema else -1.0
        op.update(rows, owner, hyper, control, squares, rule, decay, seed, 0, 0, features)


def launch_lamb_and_adafactor(everything):
    """Steps with and without clipping, in every format, and with all optional features."""
    lamb, adafactor, features = kernels("lamb"), kernels("adafactor"), kernels("optim").Features

    def new(*shape, dtype=torch.float64):
        return torch.empty(shape, dtype=dtype, device="meta")

    rows, shapes, tiles = new(1000, 16).long(), new(1000, 5).long(), new(100_000, dtype=torch.int32)
    hyper, control, work = new(2, 8), new(4, dtype=F32), new(1 << 20, dtype=F32)
    pairs, norms, scales = new(100_000, 2), new(1000, 2), new(1000)
    lamb.norms(rows, pairs, norms, 0)
    squares = new(lamb.partials(100_000))
    adafactor.scale(rows, shapes, hyper, control, squares, pairs, scales, 0)
    tables = [(0x000, 0, 0, -1), (0x011, 1, 1, -1), (0x411, 0, 0, -1)]
    if everything:
        tables += [(0x111, 0, 0, -1), (0x222, 0, 0, -1), (0x111, 0, 0, 7), (0x011, 0, 0, 7), (0x511, 0, 0, -1)]
    for code, remainder, ema, seed in tables:
        occurs, clip = features((code,), False, bool(remainder), bool(ema)), squares if code else None
        keep, given = (0.9 if ema else -1.0, seed, 0, 0, occurs), (hyper, control, clip, work)
        lamb.moments(rows, tiles, hyper, control, clip, pairs, 0, occurs)
        lamb.update(rows, tiles, hyper, control, norms, *keep)
        if code >> 8 >= 4:
            continue
        adafactor.sums(rows, shapes, tiles, *given, 0, occurs)
        adafactor.factors(rows, shapes, tiles, *given, 0, occurs)
        for small in (False, True):
            adafactor.norms(rows, shapes, tiles, *given, pairs, 0, occurs, small)
            adafactor.update(rows, shapes, tiles, hyper, control, work, scales, *keep, small)


def launch_all(everything):
    """`everything` adds what does not depend on the architecture, so one architecture is enough: float16 besides
    bfloat16, which has the same size, constants in place of arguments of 1, and float32, intermediate widths and
    formats (a thread has the same number of registers on all of them)."""
    dtypes = (BF16, F16, F32) if everything else (BF16,)
    launch_bits()
    launch_wire()
    launch_optim(everything)
    launch_lamb_and_adafactor(everything)
    cases = (2, 8, 4, 4096, 256, 256, False), (2, 32, 8, 4096, 128, 128, False), (2, 8, 8, 4096, 80, 32, True)
    for case in cases if everything else cases[:1]:
        launch_rope(BF16, BF16, case)
        launch_rope(BF16, F32, case)
    launch_rope(F32, F32, (2, 32, 8, 4096, 128, 64, True))
    for cols in (64, 1000, 1024, 2048, 4096, 8192, 32768) if everything else (1000, 4096, 32768):
        launch_layer_norm(BF16, BF16, BF16, cols)
        launch_layer_norm(F32, F32, F32, cols)
        launch_rms_norm(BF16, BF16, BF16, cols)
    for cols in (1024, 4096, 8192, 32768) if everything else (8192,):
        launch_layer_norm(F16, F32, F32, cols)
        launch_rms_norm(F32, BF16, F32, cols)
    launch_layer_norm(BF16, BF16, BF16, 1 << 14)
    launch_layer_norm(BF16, BF16, BF16, 1 << 16)
    for cols in (1000, 8192, 128256) if everything else (128256,):
        launch_losses(BF16, cols)
        launch_masked_softmax(BF16, cols)
    for shape in (
        ((401408, 256, 1), (128, 256, 3136), (128, 512, 49)) if everything else ((401408, 256, 1), (128, 512, 49))
    ):
        launch_batch_norm(BF16, shape)
    for dtype in dtypes:
        launch_rooms(dtype, everything)
        for cols in (64, 1000, 1001, 2048, 3000, 4096, 8192, 10000) if everything else (1000, 8192):
            launch_add_norms(dtype, cols)
        launch_dropout_in_a_graph(dtype)


def compile_launches(capability, everything):
    """Every launch of `launch_all` as a dict with its description and resources."""
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

    kernels("rows").device = lambda: (132, SHARED[capability])
    JITFunction.run = run  # after the kernels' own launcher has read Triton's
    launch_all(everything)
    launch_attentions(capability, everything)
    return list(found.values())


def resources(cubin):
    tool = pathlib.Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return {key: int(re.search(rf"\b{key}:(\d+)", text)[1]) for key in ("REG", "STACK", "LOCAL")}


def resident(launch, capability):
    """How many programs of a launch fit on one multiprocessor."""
    registers = -(-launch["REG"] // 8) * 8 * 32 * launch["warps"]
    return min(65536 // registers, 64 // launch["warps"], SHARED[capability] // (launch["shared"] + 1024))


if __name__ == "__main__":
    json.dump(compile_launches(int(sys.argv[1]), everything=sys.argv[2:] != ["few"]), sys.stdout)
