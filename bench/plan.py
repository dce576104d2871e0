"""The peak memory that `hfnn.plan` predicts, beside that of real steps on a GPU.

    bench/plan.py                                   # every model in every mode
    bench/plan.py --models gpt2 vit --modes stock converted

A step is one of models.py: forward with labels under autocast to bfloat16, backward and AdamW. Predictions run on the
processor's cores meanwhile. Rows are appended to bench/results/<device>-plan.csv.
"""

import argparse
import concurrent.futures
import csv
import gc
import multiprocessing
import statistics
import sys
import time
from pathlib import Path

import report
import torch
from zoo import MODELS

import hfnn
from hfnn.plan import MODES

GIB = 2**30
NAMES = ("gpt2", "bert", "llama", "vit", "t5", "swin", "convnext", "resnet")
FIELDS = (
    "date", "model", "mode", "case", "predicted", "at_most", "measured", "error_pct", "phase", "reserved",
    "really_reserved",
)  # fmt: skip


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
    with concurrent.futures.ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn")) as pool:
        plans = [pool.submit(predict, *case, options) for case in cases]
        if not torch.cuda.is_available():
            for case, plan in zip(cases, plans, strict=True):
                print(*case, plan.result())
            return 0
        path = report.path(options.results, "cuda", "-plan")
        errors, found = [], []
        for (name, mode), plan in zip(cases, plans, strict=True):
            try:
                real, reserved = measure(name, mode, options)
                row = plan.result()
            except Exception as error:  # a library is missing, or a mode does not fit the model
                print(f"{name} {mode}: {type(error).__name__}: {str(error)[:200]}", flush=True)
                continue
            if row.why:
                print(f"{name} {mode}: {row.why}", flush=True)
                continue
            errors.append(100 * (row.peak / real - 1))
            case = "x".join(map(str, MODELS[name].tiny if options.tiny else MODELS[name].shape))
            found.append((
                time.strftime("%F %T"), name, mode, case, row.peak, row.upper, real, f"{errors[-1]:.2f}", row.phase,
                row.reserved, reserved,
            ))  # fmt: skip
            print(
                f"{name:10} {mode:18} {row.peak / GIB:7.2f} (at most {row.upper / GIB:.2f}) measured {real / GIB:7.2f} "
                f"GiB {errors[-1]:+6.1f} %  reserved {row.reserved / GIB:.2f} / {reserved / GIB:.2f}",
                flush=True,
            )  # fmt: skip
    if errors:
        above = sum(row[6] > row[5] for row in found)
        sizes = sorted(map(abs, errors))
        print(f"error: median {statistics.median(sizes):.1f} %, worst {sizes[-1]:.1f} %; above the band: {above}")
        exists = path.exists()
        with path.open("a", newline="") as file:
            writer = csv.writer(file)
            writer.writerows([] if exists else [FIELDS])
            writer.writerows(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
