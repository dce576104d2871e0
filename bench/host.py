"""Host time of a training step of converted models beside stock ones, at sizes where the host binds.

    bench/host.py                                   # all models; rows in bench/results/<device>-host.csv, and a table
    bench/host.py --models opt t5 --rounds 200
    bench/host.py --models codec demucs --prefer memory
    bench/host.py --models opt --functions          # the functions that take a step's time, converted and stock

Models of transformers and timm with tiny widths, few tokens and six layers (host_models.py). Each has its own process,
in which both sides take turns: a block of steps (forward, backward) of one, then of the other, in alternating order.
The time is the processor's. `ratio` is the median over the pairs of blocks; `low` and `high` bound it with 95 %
confidence. `calls` counts the Python functions of a step: it has no noise.
"""

import copy
import gc
import math
import multiprocessing
import pstats
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from cProfile import Profile

import cli
import host_models
import report
import timing
import torch

import hfnn

LIMIT = 900  # seconds for one model


class Side:
    """A model, stock or converted."""

    def __init__(self, model, batch: dict):
        self.model, self.batch = model, batch

    def step(self) -> None:
        self.model.zero_grad(set_to_none=True)
        host_models.loss(self.model, self.batch).backward()

    def block(self, steps: int) -> float:
        """Seconds of the processor for a step."""
        begin = time.process_time()
        for _ in range(steps):
            self.step()
        return (time.process_time() - begin) / steps

    def calls(self) -> int:
        """The number of Python functions that a step calls."""
        count = 0

        def note(frame, event, argument):
            nonlocal count
            count += event == "call"

        sys.setprofile(note)
        try:
            self.step()
        finally:
            sys.setprofile(None)
        return count


def sides(name: str, options) -> tuple[Side, Side]:
    """The stock model and a converted copy of it."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with torch.device(options.device):
        made, batch = host_models.MODELS[name]()
    model, ours = copy.deepcopy(made), hfnn.convert(copy.deepcopy(made), prefer=options.prefer)  # both in fresh memory
    both = Side(model, batch), Side(ours, batch)
    for side in both * 3:
        side.step()
    return both


def measure(name: str, options) -> dict:
    """{"us": (stock, ours), "ratios": of the pairs, "calls": (stock, ours)}"""
    both = sides(name, options)
    steps = max(1, round(options.seconds / both[0].block(3)))
    gc.collect()
    gc.freeze()
    gc.disable()
    found = []
    for pair in range(options.rounds):
        order = (0, 1) if pair % 2 else (1, 0)
        times = {which: both[which].block(steps) * 1e6 for which in order}
        found.append((times[0], times[1]))
        if pair % 16 == 0:
            gc.collect()
    medians = [statistics.median(times) for times in zip(*found, strict=True)]
    return {"us": medians, "ratios": [ours / stock for stock, ours in found], "calls": [side.calls() for side in both]}


def bounds(ratios: list[float]) -> tuple[float, float]:
    """The order statistics that bound the median with 95 % confidence."""
    ordered, off = sorted(ratios), math.ceil(0.98 * math.sqrt(len(ratios)))
    middle = len(ratios) // 2
    return ordered[max(middle - off, 0)], ordered[min(middle + off, len(ratios) - 1)]


def rows_of(name: str, found: dict, options) -> list[dict]:
    low, high = bounds(found["ratios"])
    ratios = ({"ratio": 1.0}, {"ratio": statistics.median(found["ratios"]), "low": low, "high": high})
    rows = []
    for which, provider in enumerate(("torch", f"hfnn-{options.prefer}")):
        more = {"ratio": "", "low": "", "high": "", **ratios[which], "calls": found["calls"][which]}
        more |= {"pairs": options.rounds, **host_models.versions()}
        clock = timing.Timing(None, found["us"][which], None)
        rows.append(report.row(name, ("tiny",), "float32", provider, "step", clock, None, more))
    return rows


def functions(name: str, options) -> None:
    """Print the functions of a converted step and of a stock one, by their own time."""
    for side in sides(name, options):
        profile = Profile()
        profile.runcall(side.block, 20)
        pstats.Stats(profile).sort_stats("tottime").print_stats(options.lines)


def _child(work, name: str, options, sender) -> None:
    warnings.simplefilter("ignore")
    try:
        sender.send(work(name, options))
    except host_models.Skip as why:
        sender.send({"skip": str(why)})


def ask(work: Callable, name: str, options) -> dict | None:
    """`work(name, options)` in its own process; None if it fails or takes too long."""
    context = multiprocessing.get_context("spawn" if options.device == "cuda" else "fork")
    receiver, sender = context.Pipe(False)
    process = context.Process(target=_child, args=(work, name, options, sender))
    process.start()
    sender.close()
    try:
        return receiver.recv() if receiver.poll(LIMIT) else None
    except EOFError:
        return None
    finally:
        process.kill()
        process.join()


def table(rows: list[dict], title: str) -> None:
    found = report.grid(title, ("model",), ("stock us", "hfnn us", "ratio", "low", "high", "stock calls", "hfnn calls"))
    for stock, ours in zip(rows[::2], rows[1::2], strict=True):
        ratios = (ours[column] for column in ("ratio", "low", "high"))
        cells = stock["host_us"], ours["host_us"], *ratios, stock["calls"], ours["calls"]
        found.add_row(ours["op"], *map(str, cells))
    report.put(found)


def main(argv=None) -> int:
    parser = cli.parser(__doc__, seconds="processor time of a block of steps", tiny="the first model alone")
    parser.set_defaults(rounds=60, seconds=0.03)
    add = parser.add_argument
    add("--models", nargs="*", default=list(host_models.MODELS), choices=host_models.MODELS)
    add("--prefer", default="auto", choices=("auto", "memory", "speed"))
    add("--functions", action="store_true", help="profile instead of measuring")
    add("--lines", type=int, default=30, help="of a profile")
    options = parser.parse_args(argv)
    options.models = options.models[: 1 if options.tiny else None]
    if options.functions:
        for name in options.models:
            functions(name, options)
        return 0
    path, failed = report.path(options.results, options.device, "-host"), []
    with report.shown(table, f"{path.stem}: processor time of a step, converted over stock") as rows:
        for name in options.models:
            found = ask(measure, name, options)
            if found is None or "skip" in found:
                failed += [name] if found is None else []
                print(f"{name}: {'failed' if found is None else 'skipped: ' + found['skip']}", flush=True)
                continue
            rows += report.append(path, rows_of(name, found, options))
            print(f"{name}: {rows[-1]['ratio']}", flush=True)
    slower = [row["op"] for row in rows[1::2] if float(row["low"]) > 1]
    print(f"{len(slower)} of {len(rows) // 2} slower than stock: {', '.join(slower)}")
    return int(bool(failed))


if __name__ == "__main__":
    cli.run(main)
