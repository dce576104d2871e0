"""A linear map into a vocabulary and the cross-entropy of its logits: a training step's time, memory and errors.

A step is forward and backward of the mean loss, with gradients of hidden and weight. Its peak memory above the inputs
is as important as its time, because the logits are often the largest tensor of a model.

Names end in their shape: T tokens, H hidden, V vocabulary.
"""

import contextlib
import functools
from dataclasses import dataclass

import check
import report
import rivals
import timing
import torch

import hfnn
from hfnn import testing

OP = "linear_cross_entropy"
TOKENS = {"cuda": (256, 1024, 4096, 8192, 16384, 65536), "cpu": (256, 512, 1024, 2048)}
SIZES = {"cuda": (4096, 128256), "cpu": (256, 8192)}  # hidden, vocabulary
AUTOCAST = {"cuda": 8192, "cpu": 256}  # tokens of the one case with a float32 weight under autocast to bfloat16
MAX_BYTES = {"cuda": (128 << 20, 1 << 30), "cpu": (1 << 20, 16 << 20)}
# Rows of the gradients that are compared with float64, and tokens processed at a time for this.
PICKED, SLAB = 256, 512


@dataclass(frozen=True)
class Head:
    """x_TH, weight_VH and target_T of a step."""

    x: torch.Tensor
    weight: torch.Tensor
    target: torch.Tensor
    autocast: bool

    @property
    def device(self) -> str:
        return self.x.device.type

    @property
    def case(self) -> tuple[int, int, int]:
        return *self.x.shape, self.weight.shape[0]

    @property
    def dtype(self) -> str:
        """The case as written in the rows."""
        return "autocast" if self.autocast else str(self.x.dtype).removeprefix("torch.")

    @property
    def picked(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(tokens, classes) whose gradients are compared: the frequent classes and some of the others."""
        tokens, _, vocabulary = self.case
        frequent = min(PICKED // 2, vocabulary)
        others = torch.arange(frequent, vocabulary, vocabulary // frequent | 1)
        some = torch.arange(0, tokens, -(-tokens // PICKED)), torch.cat([torch.arange(frequent), others])
        return tuple(t.to(self.device) for t in some)

    def step(self, provider) -> list[torch.Tensor]:
        """[loss, dX, dW]"""
        low = torch.autocast(self.device, torch.bfloat16) if self.autocast else contextlib.nullcontext()
        with provider.around(), low:
            loss = provider.fn(self.x, self.weight, self.target)
        return [loss, *torch.autograd.grad(loss, (self.x, self.weight))]

    def part(self, results: list[torch.Tensor]) -> list[torch.Tensor]:
        """The compared part of [loss, dX, dW]."""
        loss, dx, dw = results
        tokens, classes = self.picked
        return [loss.detach(), dx[tokens], dw[classes]]

    def exactly(self) -> list[torch.Tensor]:
        """The same part in float64, by slabs of tokens."""
        x, weight = self.x.detach(), self.weight.detach().double()
        count, (tokens, classes) = x.shape[0], self.picked

        def slab(rows):
            logits = x[rows].double() @ weight.t()
            target = self.target[rows].unsqueeze(1)
            lse = logits.logsumexp(1, keepdim=True)
            loss = (lse - logits.gather(1, target)).sum() / count
            probabilities = logits.sub_(lse).exp_()
            minus_one = torch.full_like(lse, -1)
            return loss, probabilities.scatter_add_(1, target, minus_one) / count

        loss, dw = 0, 0
        for rows in torch.arange(count, device=x.device).split(SLAB):
            of_slab, dlogits = slab(rows)
            loss, dw = loss + of_slab, dw + dlogits[:, classes].t() @ x[rows].double()
        return [loss, slab(tokens)[1] @ weight, dw]


def draw(case, dtype, device: str, autocast: bool = False) -> Head:
    """Logits with a standard deviation somewhat above 1, and classes of which a few are frequent, as in text."""
    tokens, hidden, vocabulary = case
    x = torch.randn(tokens, hidden, device=device)
    weight = torch.randn(vocabulary, hidden, device=device).mul_(1.3 * hidden**-0.5)
    target = (torch.rand(tokens, device=device) ** 4 * vocabulary).long()
    return Head(x.to(dtype).requires_grad_(), torch.nn.Parameter(weight.to(dtype)), target, autocast)


def cases(options):
    """Heads, the small ones first: the requested ones, or the usual token counts and one of them under autocast."""
    device = options.device
    asked = [tuple(shape) for shape, _ in options.case or ()]
    for case in asked:
        if len(case) != 3:
            raise SystemExit(f"--head: a case is tokens x hidden x vocabulary, got {'x'.join(map(str, case))}")
    for case in asked or [(tokens, *SIZES[device]) for tokens in TOKENS[device]]:
        for dtype in options.dtype:
            yield functools.partial(draw, case, dtype, device)
        if not asked and case[0] == AUTOCAST[device]:
            yield functools.partial(draw, case, torch.float32, device, autocast=True)


# Providers


def _eager(x, weight, target):
    return torch.nn.functional.cross_entropy(torch.nn.functional.linear(x, weight), target)


def _torch(device: str) -> list[rivals.Provider]:
    """torch's two ops, and from 2.13 on its own chunked op."""
    options = getattr(torch.nn, "LinearCrossEntropyOptions", None)
    if options is None:
        check.say(f"skipped: torch chunked: torch {torch.__version__} has no linear_cross_entropy in chunks")
        return []

    def chunked(x, weight, target):
        return torch.nn.functional.linear_cross_entropy(x, weight, target, options=options())

    return [rivals.Provider("torch", chunked, "chunked")]


def _compile(device: str) -> list[rivals.Provider]:
    # Compiled for any number of tokens from the second one on: compiling each separately would take longer than the
    # rest.
    torch._dynamo.reset()
    return [rivals.Provider("compile", torch.compile(_eager))]


def _compile_max(device: str) -> list[rivals.Provider]:
    torch._dynamo.reset()
    return [rivals.Provider("compile-max", torch.compile(_eager, mode="max-autotune-no-cudagraphs"))]


def _liger(device: str) -> list[rivals.Provider]:
    if device != "cuda":
        raise rivals.Skip("runs on CUDA only")
    try:
        from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction
    except ImportError as error:
        raise rivals.Skip(f"cannot be imported: {error}") from error
    return [rivals.Provider("liger", lambda x, w, target: LigerFusedLinearCrossEntropyFunction.apply(x, w, target)[0])]


def _quack(device: str) -> list[rivals.Provider]:
    if device != "cuda":
        raise rivals.Skip("runs on CUDA only")
    try:
        from quack.linear_cross_entropy import chunked_linear_cross_entropy
    except Exception as error:  # as in rivals.py
        raise rivals.Skip(f"cannot be imported: {error}") from error
    return [rivals.Provider("quack", chunked_linear_cross_entropy)]


MAKERS = {"torch": _torch, "compile": _compile, "compile-max": _compile_max, "liger": _liger, "quack": _quack}


def providers(options) -> list[rivals.Provider]:
    """The participating providers, with torch's plain ops always first; prints who does not take part, and why."""
    found = [rivals.Provider("torch", _eager)]
    fn = hfnn.functional.linear_cross_entropy
    for kernel in options.kernel:
        if kernel != "auto":
            found.append(rivals.Provider("hfnn", fn, kernel, around=functools.partial(hfnn.use, kernel)))
            continue
        found.append(rivals.Provider("hfnn", fn))
        for limit in MAX_BYTES[options.device]:
            found.append(rivals.Provider("hfnn", functools.partial(fn, max_bytes=limit), f"{limit >> 20}MiB"))
    for name in options.against:
        try:
            found += MAKERS[name](options.device)
        except rivals.Skip as why:
            check.say(f"skipped: {name} {OP}: {why}")
    return found


# Measuring


def judge(head: Head, found: list[rivals.Provider]) -> tuple[dict, bool]:
    """({provider: columns of the CSV file} of those that can run, whether all of ours are right)."""
    exact, able, right, torchs = head.exactly(), {}, True, None
    for provider in found:
        try:
            with check.poisoned() if provider.name == "hfnn" else contextlib.nullcontext():
                results = head.step(provider)
            kernel = report.kernel_of(results[0]) if provider.name == "hfnn" else ""
            errors = [testing.error(r, e) for r, e in zip(head.part(results), exact, strict=True)]
            results = [r.detach().to("meta") for r in results]
            peak = _peak(head, provider)
        # Any exception of a rival is its reason; ours may only report that it has no kernel or not enough memory.
        except Exception as why:
            check.say(f"skipped: {provider} {OP} {head.case} {head.dtype}: {type(why).__name__}: {why}")
            right = right and (provider.name != "hfnn" or isinstance(why, (hfnn.NoKernel, torch.OutOfMemoryError)))
            continue
        if provider is found[0]:
            torchs = errors
        able[provider] = _columns(kernel, peak, errors, torchs)
        wrong = check.broken(results, errors, torchs) if provider.name == "hfnn" and torchs else []
        for line in wrong:
            print(f"RED: {provider} {OP} {head.case} {head.dtype}: {line}")
        right = right and not wrong
    return able, right


def _peak(head: Head, provider: rivals.Provider) -> float | str:
    """Peak MiB, after a first step; nothing for compiled code on a CPU, for which counting would disable
    compilation."""
    if provider.name.startswith("compile") and head.device == "cpu":
        return ""
    return hfnn.memory.peak_bytes(lambda: head.step(provider), head.device) / 2**20


def _columns(kernel: str, peak: float | str, errors, torchs) -> dict:
    found = {"kernel": kernel, "peak_mib": peak}
    names = ("loss", "dx", "dw")
    found |= {f"{name}_error": e.l2 for name, e in zip(names, errors, strict=True)}
    ratios = (
        [None] * 3 if torchs is None else [e.l2 / t.l2 if t.l2 else None for e, t in zip(errors, torchs, strict=True)]
    )
    return found | {f"{name}_ratio": ratio for name, ratio in zip(names, ratios, strict=True)}


def measure(head: Head, found: list[rivals.Provider], options) -> list[dict] | None:
    """Rows of one case, or None if hfnn is wrong."""
    able, right = judge(head, found)
    if not right:
        print(f"refused: {OP} {head.case} {head.dtype}: not timed while a kernel is wrong")
        return None
    calls = {provider: timing.Call((functools.partial(head.step, provider),)) for provider in able}
    clocks = timing.interleaved(calls, head.device, options.rounds, options.seconds, fewest=1)
    flops = 6 * head.x.numel() * head.weight.shape[0]  # three products
    rows = []
    for provider, clock in clocks.items():
        columns = able[provider] | {"tflops": flops / clock.device_us / 1e6}
        error = max(columns[f"{name}_error"] for name in ("loss", "dx", "dw"))
        rows.append(report.row(OP, head.case, head.dtype, str(provider), "both", clock, error, columns))
    return rows


def compare(options) -> int:
    """Time the heads; exit status."""
    check.say.cache_clear()
    path, red = report.path(options.results, options.device, "-heads"), False
    found = providers(options)
    with report.shown(
        table, f"{path.stem}: a step's time, most memory above its inputs, errors (times torch's)"
    ) as rows:
        for make in cases(options):
            measured = measure(make(), found, options)
            red = red or measured is None
            if measured:
                rows += report.append(path, measured)
            if options.device == "cuda":
                torch.cuda.empty_cache()
    return int(red)


def table(rows: list[dict], title: str) -> None:
    """A line for each provider and case."""
    found = report.grid(
        title, ("T x H x V", "dtype", "provider", "kernel"), ("time", "spread", "TFLOP/s", "peak", "loss", "dX", "dW")
    )
    last = None
    for r in rows:
        key = r["case"], r["dtype"]
        if last not in (None, key):
            found.add_section()
        errors = (f"{float(r[f'{n}_error']):.1e}{_times(r[f'{n}_ratio'])}" for n in ("loss", "dx", "dw"))
        peak = f"{float(r['peak_mib']):,.0f} MiB" if r["peak_mib"] != "" else ""
        clock = f"{float(r['device_us']) / 1e3:.2f} ms", f"{float(r['spread_pct']):.0f}%"
        where = key if key != last else ("", "")
        found.add_row(*where, r["provider"], r["kernel"], *clock, f"{float(r['tflops']):.3g}", peak, *errors)
        last = key
    report.put(found)


def _times(ratio) -> str:
    return "" if ratio == "" else f" ({float(ratio):.2f})"
