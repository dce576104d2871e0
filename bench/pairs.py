"""Modes of a model in one process, in turns: the time of a step and its host time. `models.py --pairs`.

Each round is a few steps in every mode, in alternating order. The result is the median over the rounds of a mode's
ratio to the first mode. The host time is that of all threads until the last kernel is launched. Batch sizes are 1, 4
and the model's own: the smaller, the more the GPU waits for the host.
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

STEPS = 4  # steps per mode in a round


def measure(name: str, modes: list[str], options) -> dict:
    """{"batches": [{"shape", "rounds": [[[us, host us] of each mode], ...], "calls": [str of each]}, ...]}"""
    all_of = [models.Training(name, mode, options) for mode in modes]
    of, found = MODELS[name], []
    largest, *rest = of.tiny if options.tiny else of.shape
    for batch in options.batches or sorted({min(n, largest) for n in (1, 4, largest)}):
        for training in all_of:
            training.take((batch, *rest))
        for training in all_of * models.WARM_UP:
            training.step()
        rounds = []
        for turn in range(options.steps):
            order = range(len(all_of))[:: 1 if turn % 2 else -1]
            timed = {which: _timed(all_of[which]) for which in order}
            rounds.append([timed[which] for which in range(len(all_of))])
        calls = [training.calls() for training in all_of]
        found.append({"shape": [batch, *rest], "rounds": rounds, "calls": calls})
    return {"batches": found}


def _timed(training) -> list[float]:
    """(microseconds of a step, microseconds of the host)"""
    wait = torch.cuda.synchronize if training.device == "cuda" else lambda: None
    wait()
    begin, of_host = time.perf_counter(), time.process_time()
    for _ in range(STEPS):
        training.step()
    host = time.process_time() - of_host
    wait()
    return [(time.perf_counter() - begin) * 1e6 / STEPS, host * 1e6 / STEPS]


def rows_of(name: str, batch: dict, options) -> list[dict]:
    """A line of the CSV file per mode; ratio, host_ratio: to the first mode, medians over the rounds."""
    case = (*batch["shape"], "tiny") if options.tiny else batch["shape"]
    rows = []
    for which, provider in enumerate(options.modes):
        times, hosts = zip(*(found[which] for found in batch["rounds"]), strict=True)
        middle = statistics.median(times)
        spread = 100 * (max(times) - min(times)) / middle
        ratio, of_host = (statistics.median(r[which][i] / r[0][i] for r in batch["rounds"]) for i in (0, 1))
        more = {"ratio": ratio, "host_ratio": of_host, "pairs": len(times)} | models.versions()
        clock = timing.Timing(middle, statistics.median(hosts), spread)
        rows.append(report.row(name, case, "autocast", provider, "step", clock, None, more))
    return rows


def compare(options) -> int:
    """Measure the models; exit status 1 if one failed."""
    path, rows, failed = report.path(options.results, options.device, "-pairs"), [], 0
    for name in options.models:
        found = models.ask(name, options.modes, options)
        if "batches" not in found:
            failed |= "error" in found
            print(f"{name}: {found.get('error') or 'skipped: ' + found['skip']}", flush=True)
            continue
        for batch in found["batches"]:
            new = report.append(path, rows_of(name, batch, options))
            rows += new
            said = ", ".join(f"{r['provider']} {r['ratio']}" for r in new[1:])
            print(f"{name} {new[0]['case']}: {said} of {new[0]['device_us']} us", flush=True)
            for calls in filter(None, batch["calls"]):
                print(f"  {calls}", flush=True)
    table(rows, path.stem)
    return int(failed)


def table(rows: list[dict], title: str) -> None:
    """A line for each model, batch and mode."""
    title = f"{title}: a training step, and its share of the first"
    found = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for heading in ("model", "case", "mode", "ms", "ratio", "host ms", "host ratio"):
        found.add_column(heading, justify="left" if heading in ("model", "case", "mode") else "right")
    last = None
    for r in rows:
        where = (r["op"], r["case"])
        times = (f"{float(r[column]) / 1e3:.2f}" for column in ("device_us", "host_us"))
        of_step, of_host = times
        shown = where if where != last else ("", "")
        found.add_row(*shown, r["provider"], of_step, r["ratio"], of_host, r["host_ratio"])
        last = where
    report.put(found)
