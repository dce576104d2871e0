"""Training steps on several ranks of this host: haiscale's wrappers against torch's, each with its backend.

    bench/parallel.py --nproc 4                                     # every case and provider that fits
    bench/parallel.py --case gpt2 --provider torch-ddp haiscale-ddp --backend nccl hfreduce
    bench/parallel.py --device cpu --tiny --nproc 2                 # a smoke test
    bench/parallel.py --table                                       # the newest rows again

All providers of a case run in the same ranks, in turns. One that fails, or exceeds its time, becomes a row with the
reason, and the others start again without it. Rows are in bench/results/<device>-parallel.csv.
"""

import argparse
import json
import math
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import cli
import torch

sys.path.sort(key=str(Path(__file__).resolve().parent).__eq__)  # last: hfreduce.py here would hide the package

import report
import timing
import wrappers
from wrappers import CASES, PROVIDERS

import haiscale
from haiscale.launch import RankFailed

LOSS_NOISE = 0.02  # relative to the first provider of that kind, after the same steps


def entries(case: str, options) -> list[tuple[str, str]]:
    """The requested (provider, backend) pairs that fit the case."""
    theirs = "nccl" if options.device == "cuda" else "gloo"
    found = []
    for name in options.provider:
        provider = PROVIDERS[name]
        if provider.kind not in CASES[case].kinds:
            continue
        backends = options.backend or ["hfreduce" if provider.ours else theirs]
        # A single rank does not communicate.
        found += [(name, backend) for backend in (backends if provider.kind != "alone" else backends[:1])]
    return found


def ask(case: str, wanted: list, options) -> tuple[dict, dict]:
    """The results of the ranks, and the reasons of the entries that were not timed, both by entry."""
    wanted, failed = list(wanted), {}
    settings = SimpleNamespace(**{key: getattr(options, key) for key in ("device", "tiny", "steps", "rounds")})
    while wanted:
        with tempfile.TemporaryDirectory() as folder:
            ranks = haiscale.spawn(
                wrappers.measure, options.nproc, args=(case, wanted, settings, folder), join=False, prefix=False
            )
            try:
                why = None if ranks.join(options.limit) else f"over its limit of {options.limit} s"
            except RankFailed as error:
                why = f"rank {error.rank}: {error.why}"
            finally:
                ranks.kill()
            if why is None:
                found = [json.loads(Path(folder, f"found.{rank}").read_text()) for rank in range(options.nproc)]
                return wrappers.merged(found), failed
            doing = Path(folder, "doing")
            # If it is missing, none of them had begun.
            culprits = [tuple(json.loads(doing.read_text()))] if doing.exists() else wanted
            failed |= dict.fromkeys(culprits, why[:300])
            wanted = [entry for entry in wanted if entry not in culprits]
    return {}, failed


def row(case: str, entry: tuple[str, str], found: dict, failed: str | None, found_all: dict, options) -> dict:
    """A line of the CSV file."""
    model, (name, backend) = CASES[case].model, entry
    shape = (*(model.tiny if options.tiny else model.shape), *(["tiny"] if options.tiny else []))
    clock = timing.Timing(found.get("us"), None, found.get("spread"))
    more = {key: found.get(key) for key in ("peak_gib", "static_gib", "loss")}
    more |= {"ranks": options.nproc, "exposed_us": exposed(entry, found, found_all), "kernel": backend}
    predicted = {"predicted_us": found.get("predicted_us")}  # the last column, which old rows do not have
    dtype = "autocast" if options.device == "cuda" else "float32"
    return report.row(case, shape, dtype, name, "step", clock, None, more | {"error": failed} | predicted)


def exposed(entry: tuple[str, str], found: dict, found_all: dict) -> float | None:
    """Microseconds of a step in which a rank does nothing but communicate: above no_sync, or above one rank alone."""
    if found.get("alone_us") is not None:
        return found["us"] - found["alone_us"]
    provider = PROVIDERS[entry[0]]
    base = "alone" + ("+captured" if provider.capture else "+hfnn" if provider.hfnn else "")
    alone = next((of["us"] for (name, _), of in found_all.items() if name == base), None)
    return found["us"] - alone if found and alone is not None and provider.kind == "fsdp" else None


def faults(rows: list[dict]):
    """Sentences about rows of haiscale's that failed, or learnt something else than the first of their kind."""
    first = {}
    for r in rows:
        kind = PROVIDERS[r["provider"]].kind
        if r["error"]:
            if PROVIDERS[r["provider"]].ours:
                yield f"{r['provider']} {r['op']}: {r['error']}"
            continue
        loss = float(r["loss"])
        # Each rank that is alone learns its own batch by heart.
        base = first.setdefault((r["op"], "data" if kind in ("ddp", "fsdp") else kind), loss)
        if not math.isfinite(loss) or abs(loss - base) > LOSS_NOISE * abs(base):
            yield f"{r['provider']} {r['op']}: a loss of {loss:.5g} where the first provider has {base:.5g}"


def compare(options) -> int:
    """Measure all cases; exit status: 1 where something of ours failed, or learnt something else."""
    path = report.path(options.results, options.device, "-parallel")
    with report.shown(table, f"{path.stem}: a training step on {options.nproc} ranks") as rows:
        for case in options.case:
            wanted = entries(case, options)
            found, failed = ask(case, wanted, options)
            made = [row(case, entry, found.get(entry, {}), failed.get(entry), found, options) for entry in wanted]
            rows += report.append(path, made) if made else []
    wrong = list(faults(rows))
    for line in wrong:
        print(f"RED: {line}")
    return int(bool(wrong) or not rows)


def table(rows: list[dict], title: str) -> None:
    found = report.grid(
        title,
        ("case", "batch", "provider", "backend"),
        ("time", "spread", "predicted", "exposed", "peak", "static", "loss"),
    )
    for r in rows:
        who = (r["op"], r["case"], r["provider"], r["kernel"])
        if r["error"]:
            found.add_row(*who, f"failed: {r['error']}"[:60])
            continue
        keys = ("device_us", "predicted_us", "exposed_us")
        ms = [f"{float(r[key]) / 1e3:.2f} ms" if r[key] != "" else "" for key in keys]
        if ms[1]:
            ms[1] += f" {float(r['predicted_us']) / float(r['device_us']) - 1:+.1%}"
        gib = [f"{float(r[key]):.2f} GiB" if r[key] != "" else "" for key in ("peak_gib", "static_gib")]
        found.add_row(*who, ms[0], f"{float(r['spread_pct']):.0f}%", *ms[1:], *gib, f"{float(r['loss']):.4f}")
    report.put(found)


def parse(argv=None) -> argparse.Namespace:
    parser = cli.parser(__doc__, tiny="tiny models and batches")
    add = parser.add_argument
    add("--case", nargs="*", default=list(CASES), choices=CASES)
    add("--provider", nargs="*", default=list(PROVIDERS), choices=PROVIDERS)
    add("--backend", nargs="*", choices=("nccl", "gloo", "hfreduce"), help="for all providers (default: its own)")
    add("--nproc", type=int, default=torch.cuda.device_count() or 2, help="ranks")
    add("--steps", type=int, default=5, help="per round")
    add("--rounds", type=int, default=5)
    add("--limit", type=int, default=400, help="seconds for each start of a case's providers")
    add("--table", action="store_true", help="print the newest rows, measure nothing")
    return parser.parse_args(argv)


def main(argv=None) -> int:
    options = parse(argv)
    if options.table:
        path = report.path(options.results, options.device, "-parallel")
        table(report.newest(path), path.stem)
        return 0
    return compare(options)


if __name__ == "__main__":
    cli.run(main)
