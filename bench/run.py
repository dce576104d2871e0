"""Time hfnn's ops against torch, torch.compile and other libraries; see README.md here.

    bench/run.py layer_norm gelu --against torch compile      # rows in bench/results/<device>.csv, and a table
    bench/run.py --table                                      # the newest rows again
    bench/run.py --head                                       # linear and cross-entropy without logits: time, memory
    bench/run.py --small                                      # the rule for small shapes, host time included
    bench/run.py --crossover                                  # the size from which a kernel is worth its host time

Correctness comes first: a kernel that breaks the accuracy rule of hfnn/testing.py on the timed inputs is reported,
nothing of that case is timed, and the exit status is 1.
"""

import argparse
import functools
import itertools
import subprocess
import sys
from pathlib import Path

import check
import cli
import heads
import report
import rivals
import small
import timing
import torch

import hfnn

# The part of Op.traffic for each pass. A loss is also timed as a whole, because its gradient may be made in forward or
# in backward.
PASSES = {"forward": slice(0, 1), "backward": slice(1, None), "both": slice(None)}
ROOT = Path(__file__).resolve().parent.parent
OPS = {op.name: op for op in (*hfnn.ops.CONTRACT, hfnn.ops.rope.OP, hfnn.ops.qk_norm_rope.OP)}
DTYPES = ("float32", "bfloat16", "float16", "float64")


def participants(op, options) -> list[rivals.Provider]:
    """The providers timed on a case; prints which are not, and why."""
    found = [rivals.ours(op, kernel) for kernel in options.kernel]
    for name in options.against:
        try:
            found.append(rivals.rival(op, name, options.device))
        except rivals.Skip as why:
            check.say(f"skipped: {name} {op.name}: {why}")
    return found


def measure(op, case, dtype, options) -> list[dict] | None:
    """Rows of one case, or None if one of our kernels is wrong."""
    first = check.draw(op, case, dtype, options.device)
    errors, right = check.judge(op, case, first, participants(op, options))
    if not right:
        print(f"refused: {op.name} {case}: not timed while a kernel is wrong")
        return None
    count = timing.input_sets(3 * first.args[0].nbytes, options.device)
    sets = [first, *(check.draw(op, case, dtype, options.device) for _ in range(count - 1))]
    found = {provider: calls(provider, sets) for provider in errors}
    rows = []
    for name in PASSES if not op.like_input else ("forward", "backward"):
        timed = {provider: of_pass[name] for provider, (of_pass, _) in found.items() if name in of_pass}
        timings = timing.interleaved({**timed, "copy": options.copy}, options.device, options.rounds, options.seconds)
        copy = 2 * timing.COPY_BYTES[options.device] / timings.pop("copy").device_us / 1e3
        for provider, clocks in timings.items():
            rates = report.rates(sum(op.traffic[PASSES[name]]) * first.args[0].nbytes, clocks.device_us, copy)
            split = len(check.several(first.dy))
            part = {"forward": slice(split), "backward": slice(split, None), "both": slice(None)}[name]
            error, notes = max(e.l2 for e in errors[provider][part]), found[provider][1]
            rows.append(report.row(op.name, case, dtype, provider.name, name, clocks, error, rates | notes))
    return rows


def calls(provider, sets) -> tuple[dict[str, timing.Call], dict]:
    """({pass: its calls}, columns of the CSV file) of a provider. Backward alone runs on retained graphs."""
    given = [s.of(provider) for s in sets]
    found = {"both": timing.Call(tuple(functools.partial(g.step, provider.fn) for g in given), provider.around)}
    with provider.around():
        outputs = [g.forward(provider.fn) for g in given]
        kernel = report.kernel_of(check.several(outputs[0])[0]) if provider.name == "hfnn" else ""
        notes = {"kernel": kernel, "saved_bytes": saved(provider, given[0])}
    if not provider.whole:
        forward = tuple(functools.partial(g.forward, provider.fn) for g in given)
        backward = tuple(functools.partial(g.backward, y) for g, y in zip(given, outputs, strict=True))
        found |= {"forward": timing.Call(forward, provider.around), "backward": timing.Call(backward)}
    return found, notes


def saved(provider, given: check.Inputs) -> int | None:
    """Bytes kept for backward, or None if they cannot be counted."""
    try:
        return hfnn.memory.saved_bytes(lambda: given.forward(provider.fn)).total
    except Exception as why:
        print(f"no saved bytes of {provider}: {why}")
        return None


def cases(op, options) -> list[tuple]:
    """The requested cases; else the op's own, on a CPU with a sixteenth of the rows, and smaller ones for --sweep."""
    if options.case:
        return [(*shape, *(rest or small.tail(op))) for shape, rest in options.case]
    found = [c if options.device == "cuda" else (max(1, c[0] // 16), *c[1:]) for c in op.bench]
    if options.sweep:
        found = [(c[0] >> shift, *c[1:]) for c in found for shift in range(0, 32, 4) if c[0] >> shift]
    return found


def own_tests(op) -> bool:
    """Whether the op's tests pass; slow, only with --tests."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "tests/ops", "-k", op.name]
    return subprocess.run(command, cwd=ROOT).returncode == 0


def compare(options) -> int:
    """Time the requested ops; returns the exit status."""
    check.say.cache_clear()
    options.copy = timing.copy_call(options.device)
    path, red = report.path(options.results, options.device), False
    with report.shown(table, f"{path.stem}: time and per cent of the bandwidth of a copy") as rows:
        for op in options.ops or OPS.values():
            if not op.kernels:
                print(f"skipped: {op.name}: has no kernels of its own")
            elif options.tests and not own_tests(op):
                print(f"refused: {op.name}: its tests fail")
                red = True
            else:
                for case, dtype in itertools.product(cases(op, options), options.dtype):
                    found = measure(op, case, dtype, options)
                    red = red or found is None
                    if found:
                        rows += report.append(path, found)
    return int(red)


def table(rows: list[dict], title: str) -> None:
    report.table(rows, f"{title} ({rows[-1]['copy_gbps']} GB/s)")


# Command line


def _case(text: str) -> tuple[list, list]:
    """The shape of x, and further options of an op's cases: 8192x1024, 16384x8192x0.1, 16384x8192xtanh."""
    parts = [_number(part) for part in text.split("x")]
    rest = itertools.dropwhile(lambda part: isinstance(part, int), parts)
    return [part for part in parts if isinstance(part, int)], list(rest)


def _op(text: str):
    if text not in OPS:
        raise argparse.ArgumentTypeError(f"no op {text!r}; there are {', '.join(OPS)}")
    return OPS[text]


def _number(text: str):
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def parse(argv=None) -> argparse.Namespace:
    parser = cli.parser(__doc__, seconds="time per provider and pass")
    add = parser.add_argument
    add("ops", nargs="*", metavar="OP", type=_op, help=f"ops: {', '.join(OPS)} (default: all)")
    add("--against", nargs="*", default=["torch"], choices=rivals.AGAINST)
    add("--kernel", nargs="*", default=["auto"], choices=rivals.OURS, help="hfnn's kernels to time; auto: its choice")
    add("--case", nargs="*", type=_case, help="such as 8192x1024 or 8192x1024xtanh, as in the op's room")
    add("--sweep", action="store_true", help="also run each case with its rows divided by 16, 256, ...")
    add("--dtype", nargs="*", choices=DTYPES, help="default: bfloat16 on CUDA, float32 on the CPU")
    add("--threads", type=int, help="CPU threads (default: torch's)")
    add("--tests", action="store_true", help="run the op's own tests first")
    add("--head", action="store_true", help="time linear_cross_entropy; cases are tokens x hidden x vocabulary")
    add("--small", action="store_true", help="check the rule for small shapes")
    add("--crossover", action="store_true", help="find the smallest size worth a kernel")
    add("--table", nargs="?", const="time", metavar="COLUMN", help="print the newest rows; default: time, %% of copy")
    add("--plot", action="store_true", help="write PNG files next to the CSV files")
    options = parser.parse_args(argv)
    if options.rounds < 3:
        parser.error("--rounds: at least 3, because the spread needs them")
    usual = "bfloat16" if options.device == "cuda" else "float32"
    options.dtype = [getattr(torch, name) for name in options.dtype or [usual]]
    return options


def main(argv=None) -> int:
    options = parse(argv)
    if options.table or options.plot:
        return report.show(options.results, options.table, options.plot)
    torch.manual_seed(0)
    if options.threads:
        torch.set_num_threads(options.threads)
    if options.crossover:
        return small.crossover(options)
    if options.small:
        return small.rule(options)
    if options.head:
        return heads.compare(options)
    return compare(options)


if __name__ == "__main__":
    cli.run(main)
