"""Attention against torch's backends, flex_attention and padding: time, TFLOP/s, memory, errors; see README.md here.

    bench/attention.py                                      # rows in bench/results/<device>-attention.csv, and a table
    bench/attention.py --case window sinks --against flex --kernel auto
    bench/attention.py --packing                            # training steps on ragged batches, see packing.py
    bench/attention.py --device cpu --tiny                  # a smoke test

Correctness first: output and gradients of every provider are compared with float64 on a part of the timed inputs (with
dropout, for a call without it). A provider that is wrong or fails is a row with its reason. If this is hfnn, nothing of
the case is timed, and the exit status is 1.
"""

import argparse
import contextlib
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace

import attention_calls
import check
import cli
import report
import rivals
import timing
import torch
from attention_calls import CASES, Case, Problem
from torch.nn.attention import SDPBackend, sdpa_kernel

import hfnn

OP = "attention"
PASSES = ("forward", "backward")
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
AGAINST = (*BACKENDS, "flex", "varlen_attn")
_sdpa = torch.nn.functional.scaled_dot_product_attention


@dataclass(frozen=True)
class Run:
    """One provider on one problem. `back` converts [y, gradients] of its own inputs to the problem's layout."""

    call: Callable[[], torch.Tensor]
    leaves: list[torch.Tensor]
    dout: torch.Tensor
    around: Callable = contextlib.nullcontext
    back: Callable[[list], list] = list

    def backward(self, y):
        return torch.autograd.grad(y, self.leaves, self.dout, retain_graph=True)

    def step(self) -> list[torch.Tensor]:
        with self.around():
            y = self.call()
        return [y, *torch.autograd.grad(y, self.leaves, self.dout)]


# Providers: functions from a problem to a run. They may raise rivals.Skip.


def _of_torch(name: str, problem: Problem) -> Run:
    """torch's op with one of its backends, with a dense mask if it has no other way."""
    options, around = problem.options, functools.partial(sdpa_kernel, BACKENDS[name])
    if "softcap" in options or "sinks" in options:
        raise rivals.Skip("torch's op has no such argument")
    if "varlen" in options:
        return _padded(problem, around)
    query, key, value, *more = problem.leaves
    mask = more[0] if more else _dense(problem)
    if mask is not None and name == "flash":
        raise rivals.Skip("flash takes no mask")
    rest = {"is_causal": mask is None and "causal" in options, "enable_gqa": problem.gqa}
    call = functools.partial(_sdpa, query, key, value, mask, options.get("dropout", 0.0), **rest)
    return Run(call, problem.leaves, problem.dout, around)


def _dense(problem: Problem) -> torch.Tensor | None:
    """The matrix that torch's op needs for a window, ALiBi or padding."""
    length, options = problem.case.shape[3], problem.options
    i = torch.arange(length, device=problem.device)
    away = i[:, None] - i
    if "left" in options:
        return (away >= 0) & (away <= options["left"])
    if problem.slopes is not None:
        bias = -problem.slopes[:, None, None] * away.abs()
        return bias.masked_fill(away < 0, -torch.inf).to(problem.dtype)[None]
    return problem.padding.expand(-1, 1, length, -1) if problem.lengths is not None else None


def _padded(problem: Problem, around) -> Run:
    """The sequences stacked and padded to the longest."""
    sizes = torch.tensor(problem.starts).diff().to(problem.device)
    valid = torch.arange(int(sizes.max()), device=problem.device) < sizes[:, None]

    def pad(x):
        _, heads, _, width = x.shape
        padded = x.new_zeros(*valid.shape, heads, width)
        padded[valid] = x.detach()[0].transpose(0, 1)
        return padded.transpose(1, 2)

    def back(results):
        return [x.transpose(1, 2)[valid].transpose(0, 1)[None] for x in results]

    leaves = [pad(x).requires_grad_() for x in problem.leaves]
    return Run(functools.partial(_sdpa, *leaves, is_causal=True), leaves, pad(problem.dout), around, back)


def _flex(problem: Problem) -> Run:
    from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

    torch._dynamo.reset()
    options, length = problem.options, problem.case.shape[3]
    if "dropout" in options or "bias" in options:
        raise rivals.Skip("flex_attention has no dropout, and a bias with a gradient is not what it is for")
    starts = torch.tensor(problem.starts[1:], device=problem.device)
    document = torch.bucketize(torch.arange(length, device=problem.device), starts, right=True)
    lengths, left = problem.lengths, options.get("left", length)

    def sees(b, h, i, j):
        seen = (i >= j) & (i - j <= left) if "causal" in options else i == i
        seen = seen & (document[i] == document[j]) if "varlen" in options else seen
        return seen & (j < lengths[b]) if lengths is not None else seen

    def score(s, b, h, i, j):
        s = options["softcap"] * torch.tanh(s / options["softcap"]) if "softcap" in options else s
        return s - problem.slopes[h] * (i - j).abs() if problem.slopes is not None else s

    on = problem.case.shape[0] if lengths is not None else None, None, length, length
    # Uncompiled it uses a dense mask, which is too large for one row with all sequences.
    make = torch.compile(create_block_mask) if "varlen" in options else create_block_mask
    blocks = make(sees, *on, device=problem.device.type)
    score = score if "softcap" in options or problem.slopes is not None else None

    def attend(query, key, value, *sinks):
        y, aux = flex_attention(
            query, key, value, score, blocks, enable_gqa=problem.gqa, return_aux=AuxRequest(lse=bool(sinks))
        )
        return y * torch.sigmoid(aux.lse - sinks[0][:, None])[..., None].to(y.dtype) if sinks else y

    torch._functorch.config.donated_buffer = False  # otherwise a retained graph cannot run backward twice
    return Run(functools.partial(torch.compile(attend, dynamic=False), *problem.leaves), problem.leaves, problem.dout)


def _varlen_attn(problem: Problem) -> Run:
    """torch's own op for packed sequences, from 2.10 on."""
    if "varlen" not in problem.options:
        raise rivals.Skip("is for sequences behind one another")
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError as error:
        raise rivals.Skip(f"cannot be imported: {error}") from error
    starts = torch.tensor(problem.starts, dtype=torch.int32, device=problem.device)
    longest = int(starts.diff().max())
    old = "is_causal" in inspect.signature(varlen_attn).parameters
    causal = {"is_causal": True} if old else {"window_size": (-1, 0)}
    leaves = [x.detach()[0].transpose(0, 1).requires_grad_() for x in problem.leaves]
    call = functools.partial(varlen_attn, *leaves, starts, starts, longest, longest, **causal)

    def back(results):
        return [x.transpose(0, 1)[None] for x in results]

    return Run(call, leaves, problem.dout[0].transpose(0, 1), back=back)


def _ours(kernel: str, problem: Problem) -> Run:
    options = problem.options
    query, key, value, *more = problem.leaves
    given = {"dropout_p": options.get("dropout", 0.0), "is_causal": "causal" in options, "enable_gqa": problem.gqa}
    given |= {"window": (options["left"], 0)} if "left" in options else {}
    given |= {"softcap": options["softcap"]} if "softcap" in options else {}
    given |= {"alibi": problem.slopes} if problem.slopes is not None else {}
    given |= {"sinks": more[0]} if "sinks" in options else {}
    given |= {"attn_mask": more[0]} if "bias" in options else {}
    given |= {"attn_mask": problem.padding} if problem.lengths is not None else {}
    if problem.starts:
        given["cu_seqlens"] = torch.tensor(problem.starts, dtype=torch.int32, device=problem.device)
    call = functools.partial(hfnn.functional.scaled_dot_product_attention, query, key, value, **given)
    around = contextlib.nullcontext if kernel == "auto" else functools.partial(hfnn.use, kernel)
    return Run(call, problem.leaves, problem.dout, around)


def providers(options) -> dict[str, Callable[[Problem], Run]]:
    """The participating providers, by name."""
    found = {"hfnn" if name == "auto" else f"hfnn {name}": functools.partial(_ours, name) for name in options.kernel}
    for name in options.against:
        found[name] = (
            functools.partial(_of_torch, name) if name in BACKENDS else {"flex": _flex}.get(name, _varlen_attn)
        )
    return found


def kernel_of(y: torch.Tensor, problem: Problem) -> str:
    """The hfnn kernel that made y, or the torch backend that hfnn chose."""
    node = y.grad_fn
    for _ in range(3):  # possibly after a reshape
        if getattr(node, "kernel", None) is not None:
            return node.kernel.name
        node = node.next_functions[0][0] if node is not None and node.next_functions else None
    if set(problem.options) <= {"causal", "dropout"}:
        causal, dropout = "causal" in problem.options, problem.options.get("dropout", 0.0)
        chosen = hfnn.ops.attention.backends.choice(*problem.leaves, dropout, causal, enable_gqa=problem.gqa)
        return f"torch {chosen or ''}".strip()
    return "torch"


# Measuring


def judge(name: str, make, problem: Problem, timed: Problem, exact, rough, device: str) -> tuple[dict, Run | None]:
    """Columns of the provider's rows, and the timed calls; None: the column `error` says why. Raises rivals.Skip."""
    try:
        run = make(problem)
        forced = name.startswith("hfnn ")
        # Under poisoned(), deterministic algorithms are on, and unforced choices would differ.
        with check.poisoned() if forced else contextlib.nullcontext():
            results = run.step()
        part = problem.part(run.back([x.detach() for x in results]))
        errors, of_formula = (check.errors(some, exact) for some in (part, rough))
        wrong = attention_calls.broken(part, errors, of_formula)
        del results, part
        quiet = name == "flex" and device == "cpu"  # counting with a mode would disable compilation from then on
        run = run if timed is problem else make(timed)
        kernel = kernel_of(run.step()[0], timed) if name.startswith("hfnn") else ""
        peak = "" if quiet else hfnn.memory.peak_bytes(run.step, device) / 2**20
    except rivals.Skip:
        raise
    except Exception as why:  # any exception is the reason
        return {"error": f"{type(why).__name__}: {' '.join(str(why).split())[:200]}", "why": type(why)}, None
    found = {"kernel": kernel, "peak_mib": peak, "rel_error": [errors[0].l2, max(e.l2 for e in errors[1:])]}
    if wrong:
        return found | {"error": f"wrong: {'; '.join(wrong)}", "why": AssertionError}, None
    return found | {"error": "", "why": None}, run


def measure(case: Case, dtype: torch.dtype, options) -> tuple[list[dict], bool]:
    """(rows of one case, whether all of ours are right)."""
    torch.manual_seed(0)
    problem = attention_calls.draw(case, dtype, options.device)
    without = replace(case, options={key: value for key, value in case.options.items() if key != "dropout"})
    judged = replace(problem, case=without) if "dropout" in case.options else problem
    exact, rough = judged.exactly(), judged.roughly()
    found, runs, right = {}, {}, True
    for name, make in providers(options).items():
        try:
            found[name], run = judge(name, make, judged, problem, exact, rough, options.device)
        except rivals.Skip as why:
            check.say(f"skipped: {name} {case.name}: {why}")
            continue
        if run is not None:
            runs[name] = run
        elif name.startswith("hfnn") and found[name]["why"] not in (hfnn.NoKernel, torch.OutOfMemoryError):
            print(f"RED: {name} {case.name} {dtype}: {found[name]['error']}")
            right = False
    clocks = _clocks(runs if right else {}, options)
    return [
        row(case, dtype, name, columns, i, clocks.get(name), problem.flops[i])
        for i in range(len(PASSES))
        for name, columns in found.items()
    ], right


def _clocks(runs: dict[str, Run], options) -> dict[str, list[timing.Timing]]:
    """A timing for each pass."""
    calls = {}, {}
    for name, run in runs.items():
        with run.around():
            y = run.call()
        calls[0][name] = timing.Call((run.call,), run.around)
        calls[1][name] = timing.Call((functools.partial(run.backward, y),))
    of_passes = [timing.interleaved(c, options.device, options.rounds, options.seconds) for c in calls if c]
    return {name: [of_pass[name] for of_pass in of_passes] for name in runs}


def row(case: Case, dtype, name: str, columns: dict, i: int, clocks, flops: float) -> dict:
    clock = clocks[i] if clocks else timing.Timing(None, None, None)
    more = {"kernel": columns.get("kernel", ""), "peak_mib": columns.get("peak_mib", "")}
    more |= {"tflops": flops / clock.device_us / 1e6 if clocks else "", "error": columns["error"]}
    error = columns["rel_error"][i] if "rel_error" in columns else None
    return report.row(OP, (*case.shape, case.name), dtype, name, PASSES[i], clock, error, more)


def compare(options) -> int:
    """Time the cases; exit status."""
    check.say.cache_clear()
    path, red = report.path(options.results, options.device, "-attention"), False
    with report.shown(
        table, f"{path.stem}: TFLOP/s of the pairs that count; most memory of a step above its inputs"
    ) as rows:
        for name in options.case:
            case = CASES[name].tiny() if options.tiny else CASES[name]
            for dtype in options.dtype:
                found, right = measure(case, dtype, options)
                rows += report.append(path, found) if found else []
                red = red or not right
                if options.device == "cuda":
                    torch.cuda.empty_cache()
    return int(red)


def table(rows: list[dict], title: str) -> None:
    """A line for each case, dtype and provider."""
    found = report.grid(
        title, ("case", "dtype", "provider", "kernel"), ("forward", "TFLOP/s", "backward", "TFLOP/s", "peak", "errors")
    )
    lines, last = {}, None
    for r in rows:
        lines.setdefault((r["case"], r["dtype"], r["provider"]), {})[r["pass"]] = r
    for (case, dtype, name), passes in lines.items():
        if last not in (None, (case, dtype)):
            found.add_section()
        where = (case, dtype) if last != (case, dtype) else ("", "")
        last = case, dtype
        forward = passes["forward"]
        cells = [cell for r in passes.values() for cell in _cells(r)]
        peak = f"{float(forward['peak_mib']):,.0f} MiB" if forward["peak_mib"] != "" else ""
        errors = forward["error"][:60] or " ".join(f"{float(r['rel_error']):.1e}" for r in passes.values())
        found.add_row(*where, name, forward["kernel"], *cells, peak, errors)
    report.put(found)


def _cells(r: dict) -> tuple[str, str]:
    if r["device_us"] == "":
        return "-", ""
    return f"{float(r['device_us']):,.0f} us", f"{float(r['tflops']):.3g}"


def parse(argv=None) -> argparse.Namespace:
    parser = cli.parser(__doc__, seconds="time per provider and pass", tiny="tiny calls")
    add = parser.add_argument
    add("--case", nargs="*", default=list(CASES), choices=CASES)
    add("--against", nargs="*", default=list(AGAINST), choices=AGAINST)
    add("--kernel", nargs="*", choices=rivals.OURS, help="hfnn's kernels to time; auto: its choice")
    add("--dtype", nargs="*", choices=("float32", "bfloat16", "float16"), help="default: bfloat16, float32 on the CPU")
    add("--packing", action="store_true", help="training steps of a small Llama on ragged batches, padded and packed")
    options = parser.parse_args(argv)
    usual = ("bfloat16", ["auto", "triton"]) if options.device == "cuda" else ("float32", ["auto", "cpp"])
    options.dtype = [getattr(torch, name) for name in options.dtype or [usual[0]]]
    options.kernel = usual[1] if options.kernel is None else options.kernel
    return options


def main(argv=None) -> int:
    options = parse(argv)
    if options.packing:
        import packing

        return packing.compare(options)
    return compare(options)


if __name__ == "__main__":
    cli.run(main)
