"""Converted models beside stock ones, in one process, in turn: the time of a step and its host's. `models.py --pairs`.

Each pair is a few steps of the one and as many of the other, in either order by turns; what is told is the median over
the pairs of converted / stock. A host's time is that of all its threads, until the GPU has been given the last kernel.
Batches are of 1, of 4 and of the model's own size: the smaller, the more the GPU waits for the host.
"""

import statistics
import time

import models
import report
import timing
import torch
from rich import box
from rich.table import Table
from zoo import MODELS

STEPS = 2  # of each in a pair
PROVIDERS = "eager", "hfnn"


def measure(name: str, mode: str, options) -> dict:
    """{"batches": [{"shape", "pairs": [[[us, host us] of eager, of hfnn], ...]}, ...]}"""
    both = [models.Training(name, provider, options) for provider in PROVIDERS]
    of, found = MODELS[name], []
    largest, *rest = of.tiny if options.tiny else of.shape
    for batch in sorted({min(n, largest) for n in (1, 4, largest)}):
        for training in both:
            training.take((batch, *rest))
        for training in both * models.WARM_UP:
            training.step()
        pairs = []
        for turn in range(options.steps):
            pair = {which: _timed(both[which]) for which in ((0, 1), (1, 0))[turn % 2]}
            pairs.append([pair[0], pair[1]])
        found.append({"shape": [batch, *rest], "pairs": pairs})
    return {"batches": found}


def _timed(training) -> list[float]:
    """(microseconds of a step, those of the host)"""
    wait = torch.cuda.synchronize if training.device == "cuda" else lambda: None
    wait()
    begin, of_host = time.perf_counter(), time.process_time()
    for _ in range(STEPS):
        training.step()
    host = time.process_time() - of_host
    wait()
    return [(time.perf_counter() - begin) * 1e6 / STEPS, host * 1e6 / STEPS]


def rows_of(name: str, batch: dict, options) -> list[dict]:
    """A line of the CSV file for each provider; ratio, host_ratio: to eager's, medians over the pairs."""
    case = (*batch["shape"], "tiny") if options.tiny else batch["shape"]
    rows = []
    for which, provider in enumerate(PROVIDERS):
        times, hosts = zip(*(pair[which] for pair in batch["pairs"]), strict=True)
        middle = statistics.median(times)
        spread = 100 * (max(times) - min(times)) / middle
        ratio, of_host = (statistics.median(p[which][i] / p[0][i] for p in batch["pairs"]) for i in (0, 1))
        more = {"ratio": ratio, "host_ratio": of_host, "pairs": len(times)} | models.versions()
        clock = timing.Timing(middle, statistics.median(hosts), spread)
        rows.append(report.row(name, case, "autocast", provider, "step", clock, None, more))
    return rows


def compare(options) -> int:
    """Measure the models; exit status: 1 where one failed."""
    path, rows, failed = report.path(options.results, options.device, "-pairs"), [], 0
    for name in options.models:
        found = models.ask(name, "eager", options)
        if "batches" not in found:
            failed |= "error" in found
            print(f"{name}: {found.get('error') or 'skipped: ' + found['skip']}", flush=True)
            continue
        for batch in found["batches"]:
            rows += report.append(path, rows_of(name, batch, options))
            stock, ours = rows[-2:]
            print(f"{name} {ours['case']}: {ours['ratio']} of {stock['device_us']} us", flush=True)
    table(rows, path.stem)
    return int(failed)


def table(rows: list[dict], title: str) -> None:
    """A line for each model and batch."""
    found = Table(title=f"{title}: a training step, converted / stock", title_justify="left", box=box.SIMPLE_HEAD)
    for heading in ("model", "case", "stock ms", "converted ms", "ratio", "stock host ms", "host ratio"):
        found.add_column(heading, justify="left" if heading in ("model", "case") else "right")
    for stock, ours in zip(rows[::2], rows[1::2], strict=True):
        times = (f"{float(r['device_us']) / 1e3:.2f}" for r in (stock, ours))
        host = f"{float(stock['host_us']) / 1e3:.2f}"
        found.add_row(ours["op"], ours["case"], *times, ours["ratio"], host, ours["host_ratio"])
    report.put(found)
