"""The peak memory that `hfnn.plan` predicts, beside that of real steps on a GPU.

    bench/plan.py                                   # every model in every mode
    bench/plan.py --models gpt2 vit --modes stock converted

A step is one of models.py: forward with labels under autocast to bfloat16, backward and AdamW. Predictions run on the
processor's cores meanwhile. Rows are appended to bench/results/<device>-plan.csv.
"""

import argparse
import concurrent.futures
import gc
import multiprocessing
import statistics
import sys
from pathlib import Path

import report
import timing
import torch
from zoo import MODELS

import hfnn
from hfnn.plan import MODES

GIB = 2**30
NAMES = ("gpt2", "bert", "llama", "vit", "t5", "swin", "convnext", "resnet")


def predict(name: str, mode: str, options):
    """The planned row."""
    torch.set_num_threads(1)
    of = MODELS[name]
    shape = of.tiny if options.tiny else of.shape
    model = of.build(options.layers, options.tiny).train()
    batch = of.batch(model, *shape)
    return hfnn.plan(
        model, loss=lambda m, **given: of.loss(m, **given), modes=(mode,), autocast=torch.bfloat16,
        device=options.device, **batch,
    ).rows[0]  # fmt: skip


def measure(name: str, mode: str, options) -> tuple[int, int]:
    """(most bytes allocated in the third step, bytes reserved) of torch's allocator, without what was there before."""
    of = MODELS[name]
    shape = of.tiny if options.tiny else of.shape
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    with torch.device("cuda"):
        model = of.build(options.layers, options.tiny).train()
        batch = of.batch(model, *shape)
    MODES[mode](model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    for _ in range(3):
        torch.cuda.reset_peak_memory_stats()
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = of.loss(model, **batch)
        loss.backward()
        del loss
        optimizer.step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before[0], torch.cuda.memory_reserved() - before[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=list(NAMES), choices=MODELS)
    parser.add_argument("--modes", nargs="*", default=["stock", "converted", 'recompute="gemm"', "checkpoints"])
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: predictions alone")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    cases = [(name, mode) for name in options.models for mode in options.modes]
    path, errors = report.path(options.results, "cuda" if torch.cuda.is_available() else "cpu", "-plan"), []
    with (
        concurrent.futures.ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn")) as pool,
        report.shown(table, f"{path.stem}: GiB at the peak of a step") as rows,
    ):
        plans = [pool.submit(predict, *case, options) for case in cases]
        for (name, mode), plan in zip(cases, plans, strict=True):
            try:
                planned = plan.result()
                real = measure(name, mode, options) if torch.cuda.is_available() else None
            except Exception as error:  # a library is missing
                print(f"{name} {mode}: {type(error).__name__}: {str(error)[:200]}", flush=True)
                continue
            if planned.why:
                print(f"{name} {mode}: {planned.why}", flush=True)
                continue
            rows += append(path, name, mode, planned, real, options)
            if real:
                errors.append(abs(planned.peak / real[0] - 1))
    if errors:
        print(f"error: median {statistics.median(errors):.1%}, worst {max(errors):.1%}")
    return 0


def append(path: Path, name: str, mode: str, planned, real, options) -> list[dict]:
    """The row of a case; without a GPU it is not written."""
    shape = MODELS[name].tiny if options.tiny else MODELS[name].shape
    more = {"planned": planned.peak, "at_most": planned.upper, "reserved": planned.reserved, "phase": planned.phase}
    more |= dict(zip(("measured", "really_reserved"), real or ("", ""), strict=True))
    none = timing.Timing(None, None, None)
    error = None if real is None else planned.peak / real[0] - 1
    row = report.row(name, shape, "autocast", mode, "step", none, error, more)
    return [row] if real is None else report.append(path, [row])


def table(rows: list[dict], title: str) -> None:
    found = report.grid(title, ("model", "case", "mode", "in"), ("planned", "at most", "measured", "error"))
    for row in rows:
        sizes = (f"{row[column] / GIB:.2f}" if row[column] else "" for column in ("planned", "at_most", "measured"))
        error = f"{float(row['rel_error']):+.1%}" if row["rel_error"] else ""
        found.add_row(row["op"], row["case"], row["provider"], row["phase"], *sizes, error)
    report.put(found)


if __name__ == "__main__":
    sys.exit(main())
