"""Training steps of whole models against eager torch, torch.compile and Liger: time, memory, loss.

    bench/models.py                                         # every model in every mode
    bench/models.py --models gpt2 vit --modes eager hfnn
    bench/models.py --depth                                 # memory that a layer keeps for backward, see depth.py
    bench/models.py --pairs --modes eager hfnn captured     # modes in turns, step by step, see pairs.py
    bench/models.py --device cpu --tiny                     # a smoke test

A step is zero_grad, forward with labels, backward and AdamW, under autocast to bfloat16, on random weights and one
random batch. Every model and mode has its own process, for a fresh allocator, and so that a failure or hang is only a
row with its reason. Rows are appended to bench/results/<device>-models.csv immediately.
"""

import argparse
import functools
import importlib
import importlib.metadata
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import cli
import report
import rivals
import timing
import torch
from zoo import MODELS, Model

import hfnn
from hfnn.capture import captured
from hfnn.tune import explain as chosen

# Neighbours in this order run one after another.
MODES = ("eager", "hfnn", "hfnn-memory", "hfnn-captured", "compile", "compile-0.75", "liger")
# Only on request: exact=True; converted and compiled by our backend; the choice of hfnn.tune.
MORE = ("hfnn-exact", "hfnn-captured-exact", "hfnn-compile", "tuned")
PAIRS = ("eager", "hfnn", "hfnn-captured")
WARM_UP = 5  # capture records after three
# Losses after the same steps differ by dropout masks and rounding: by this share of eager's loss, or of the smallest
# meaningful loss, because a batch may be memorised.
LOSS_NOISE, LEAST_LOSS = 0.02, 0.25
GIB = 2**30


# One model in one mode, in its own process


def prepare(mode: str, of: Model) -> Callable:
    """Prepares a mode before the model is built; returns a function that applies the mode. Raises rivals.Skip."""
    if mode == "liger":
        if of.liger is None:
            raise rivals.Skip("Liger has nothing for it")
        try:
            patch = getattr(importlib.import_module("liger_kernel.transformers"), f"apply_liger_kernel_to_{of.liger}")
        except ImportError as error:
            raise rivals.Skip(f"cannot be imported: {error}") from error
        patch()
    if mode == "compile-0.75":
        # Not `import torch....`, which would make `torch` a local name.
        importlib.import_module("torch._functorch.config").activation_memory_budget = 0.75
    if mode.startswith("compile"):
        return torch.compile
    if mode == "hfnn-compile":
        return lambda model: torch.compile(hfnn.convert(model), backend="hfnn")
    if mode.startswith("hfnn"):
        prefer = "memory" if mode == "hfnn-memory" else "auto"
        return functools.partial(hfnn.convert, prefer=prefer, capture="captured" in mode, exact="exact" in mode)
    return lambda model: model


class Training:
    """A model, its batch and its optimizer."""

    def __init__(self, name: str, mode: str, options):
        of = MODELS[name]
        make = prepare(mode, of)
        self.device = options.device
        torch.manual_seed(0)
        with torch.device(self.device):
            model = of.build(options.layers, options.tiny).train()
        self.optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4, fused=True)
        self._of, self._plain, self._model = of, model, make(model)
        self.take(of.tiny if options.tiny else of.shape)
        if mode == "tuned":
            print(self._tuned(), flush=True)

    def take(self, shape: tuple) -> None:
        """Train on another batch from now on, of this shape."""
        torch.manual_seed(1)
        with torch.device(self.device):
            self._batch = self._of.batch(self._plain, *shape)

    def loss(self) -> torch.Tensor:
        with torch.autocast(self.device, torch.bfloat16):
            return self._of.loss(self._model, **self._batch)

    def step(self) -> torch.Tensor:
        self.forget()
        loss = self.loss()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def forget(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def _tuned(self):
        given = {"optimizer": self.optimizer, "loss": lambda model, batch: self.loss(), "cache": False, "show": False}
        return hfnn.tune(self._model, [self._batch] * 2, steps=10**6, **given)

    def calls(self) -> str | None:
        """A summary of a captured model's calls, or the choice for a tuned one."""
        return chosen(self._plain) or captured.explain(self._model)

    def pool(self) -> int:
        """Bytes that the graphs of a captured model hold and torch's allocator does not count as in use."""
        return captured.pool_bytes(self._model, unseen=True)


def measure(name: str, mode: str, options) -> dict:
    """The columns of a row, and the times of the steps in "us"."""
    training = Training(name, mode, options)
    for _ in range(WARM_UP):
        training.step()
    training.forget()
    found = {}
    # Hooks would cause recompilation.
    if not {"compile", "captured", "tuned"} & {*mode.split("-")}:  # hooks would disable these
        saved = hfnn.memory.saved_bytes(training.loss)
        found["hooks_gib"] = (saved.total + saved.aside) / GIB
    of_steps = _on_cuda if options.device == "cuda" else _on_cpu
    found |= of_steps(training, options.steps)
    return found


def _on_cuda(training: Training, steps: int) -> dict:
    torch.cuda.synchronize()
    static, kept = torch.cuda.memory_allocated(), requested_growth(training.loss)
    torch.cuda.reset_peak_memory_stats()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(steps)]
    for start, end in events:
        start.record()
        loss = training.step()
        end.record()
    torch.cuda.synchronize()
    return {
        "us": [start.elapsed_time(end) * 1e3 for start, end in events],
        "static_gib": static / GIB,
        "peak_gib": (torch.cuda.max_memory_allocated() + training.pool() - static) / GIB,
        "saved_bytes": kept,
        "saved_gib": kept / GIB,
        "loss": loss.item(),
    }


def requested_growth(loss: Callable[[], torch.Tensor]) -> int:
    """The growth of requested bytes in torch's CUDA allocator over a forward of which only the loss is held."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    kept = loss()
    torch.cuda.synchronize()
    after = torch.cuda.memory_stats()["requested_bytes.all.current"]
    del kept
    return after - before


def _on_cpu(training: Training, steps: int) -> dict:
    """Without allocator statistics: the peak is a sum of live tensors, and hooks count the kept bytes."""
    times = []
    for _ in range(steps):
        begin = time.perf_counter()
        loss = training.step()
        times.append((time.perf_counter() - begin) * 1e6)
    training.forget()
    return {"us": times, "peak_gib": hfnn.memory.peak_bytes(training.step) / GIB, "loss": loss.item()}


# All of them


def child(name: str, mode: str, options) -> int:
    """Measure and write the results to a file for the parent process; returns the exit status."""
    try:
        measured = importlib.import_module("pairs").measure if options.pairs else measure
        found = measured(name, options.modes if options.pairs else mode, options)
    except rivals.Skip as why:
        found = {"skip": str(why)}
    options.child.write_text(json.dumps(found))
    return 0


def ask(name: str, mode: str | list[str], options) -> dict:
    """The result of `measure` in its own process, or {"skip": why} or {"error": why}."""
    with tempfile.TemporaryDirectory() as folder:
        out, log = Path(folder, "found.json"), Path(folder, "log")
        modes = [mode] if isinstance(mode, str) else mode
        command = [sys.executable, __file__, "--child", out, "--models", name, "--modes", *modes]
        command += ["--device", options.device, "--steps", str(options.steps)]
        command += ["--pairs"] * options.pairs + ["--tiny"] * options.tiny
        command += ["--layers", str(options.layers)] if options.layers else []
        command += ["--batches", *map(str, options.batches)] if options.batches else []
        with log.open("w") as file:
            process = subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)
        try:
            status = process.wait(options.limit)
        except subprocess.TimeoutExpired:
            status = f"over its limit of {options.limit} s"
        finally:  # including its compiler processes
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if status == 0 and out.exists():
            return json.loads(out.read_text())
        lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
        # Advice may follow a message; the line of an exception begins with its name.
        said = [line for line in lines if line.partition(":")[0].endswith(("Error", "Exception"))] or lines
        return {"error": f"status {status}: {said[-1][:300]}" if said else f"status {status}"}


def row(name: str, mode: str, found: dict, options) -> dict:
    """A line of the CSV file."""
    times = found.get("us", [])
    middle = statistics.median(times) if times else None
    spread = 100 * (max(times) - min(times)) / middle if times else None
    case = MODELS[name].tiny if options.tiny else MODELS[name].shape
    case = (*case, "tiny") if options.tiny else case
    case = (*case, f"{options.layers}layers") if options.layers else case
    columns = ("saved_bytes", "saved_gib", "hooks_gib", "peak_gib", "static_gib", "loss", "error")
    more = {column: found.get(column) for column in columns} | {"steps": options.steps} | versions()
    return report.row(name, case, "autocast", mode, "step", timing.Timing(middle, None, spread), None, more)


@functools.cache
def versions() -> dict:
    """Versions of the libraries of the models."""
    found = {}
    for package in ("transformers", "timm"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def compare(options) -> int:
    """Measure the models; exit status 1 if hfnn failed, or its loss differs from eager's."""
    path = report.path(options.results, options.device, "-models")
    with report.shown(
        table, f"{path.stem}: a training step; GiB at most and kept by autograd, above weights and states"
    ) as rows:
        for name in options.models:
            for mode in options.modes:
                begin = time.perf_counter()
                found = ask(name, mode, options)
                if "skip" in found:
                    print(f"skipped: {mode} {name}: {found['skip']}", flush=True)
                    continue
                rows += report.append(path, [row(name, mode, found, options)])
                said = found.get("error") or f"{float(rows[-1]['device_us']) / 1e3:.1f} ms a step"
                print(f"{name} {mode}: {said}  ({time.perf_counter() - begin:.0f} s in all)", flush=True)
    wrong = list(faults(rows))
    for line in wrong:
        print(f"RED: {line}")
    return int(bool(wrong))


def faults(rows: list[dict]):
    """Sentences about hfnn's rows, and about eager's rows, with which they are compared."""
    eager = {r["op"]: float(r["loss"]) for r in rows if r["provider"] == "eager" and not r["error"]}
    for r in rows:
        if not r["provider"].startswith(("hfnn", "eager")):
            continue
        who = f"{r['provider']} {r['op']}"
        if r["error"]:
            yield f"{who}: {r['error']}"
        elif not math.isfinite(float(r["loss"])):
            yield f"{who}: a loss of {r['loss']}"
        elif r["op"] in eager and abs(float(r["loss"]) - eager[r["op"]]) > LOSS_NOISE * max(eager[r["op"]], LEAST_LOSS):
            yield f"{who}: a loss of {r['loss']} where eager has {eager[r['op']]:.5g}"


def table(rows: list[dict], title: str) -> None:
    """A line per model and mode; in brackets, the share of eager's value."""
    found = report.grid(title, ("model", "case", "mode"), ("time", "spread", "peak", "saved", "by hooks", "loss"))
    last, eager = None, {r["op"]: r for r in rows if r["provider"] == "eager"}
    for r in rows:
        if last not in (None, r["op"]):
            found.add_section()
        where = (r["op"], r["case"]) if r["op"] != last else ("", "")
        last = r["op"]
        if r["error"]:
            found.add_row(*where, r["provider"], r["error"][:60])
            continue
        base = eager.get(r["op"], {})
        clock = f"{float(r['device_us']) / 1e3:.1f} ms{_share(r, base, 'device_us')}", f"{float(r['spread_pct']):.0f}%"
        sizes = (f"{float(r[c]):.2f}{_share(r, base, c)}" if r[c] != "" else "" for c in ("peak_gib", "saved_gib"))
        hooks = f"{float(r['hooks_gib']):.2f}" if r["hooks_gib"] != "" else ""
        found.add_row(*where, r["provider"], *clock, *sizes, hooks, f"{float(r['loss']):.4f}")
    report.put(found)


def _share(r: dict, eager: dict, column: str) -> str:
    if r is eager or not eager.get(column):
        return ""
    return f" ({float(r[column]) / float(eager[column]):.2f})"


def parse(argv=None) -> argparse.Namespace:
    parser = cli.parser(__doc__, tiny="tiny models and batches")
    add = parser.add_argument
    add("--models", nargs="*", default=list(MODELS), choices=MODELS)
    add("--modes", nargs="*", choices=MODES + MORE, help=f"default: all; with --pairs {', '.join(PAIRS)}")
    add("--steps", type=int, default=10, help=f"timed steps, after {WARM_UP} for warm-up")
    add("--layers", type=int, help="replaces the model's number of layers")
    add("--limit", type=int, default=240, help="seconds per model and mode, including compilation")
    add("--pairs", action="store_true", help="run the modes in turns in one process")
    add("--batches", nargs="*", type=int, help="with --pairs (default: 1, 4 and the model's own)")
    add("--depth", action="store_true", help="measure the bytes that a layer keeps instead of steps")
    add("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    options.modes = options.modes or list(PAIRS if options.pairs else MODES)
    return options


def main(argv=None) -> int:
    options = parse(argv)
    if options.depth:
        import depth

        return depth.compare(options)
    if options.child:
        return child(*options.models, options.modes[0], options)
    if options.pairs:
        import pairs

        return pairs.compare(options)
    return compare(options)


if __name__ == "__main__":
    cli.run(main)
