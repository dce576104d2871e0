"""Puts runs of train_gpt.py side by side: tables, JSON, a picture."""

import functools
import json
import os
import statistics
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from gpt import HFNN, OTHER, PLAIN, Run
from rich.console import Console
from rich.table import Table

import hfnn

WARM_UP = 3  # steps left out of the times: allocators fill up, torch.compile and Triton compile
LAST = 10  # losses of single batches scatter: the final loss is the mean of this many steps


def measure(run: Run, plain: Run, ids: torch.Tensor) -> dict:
    """What the table says of a run."""
    gaps = [abs(a - b) for a, b in zip(run.losses, plain.losses, strict=True)]
    ms, layer = statistics.median(run.ms[WARM_UP:] or run.ms), kept_per_layer(run, ids)
    return {
        "final_loss": statistics.fmean(run.losses[-LAST:]),
        "mean_gap": statistics.fmean(gaps),
        "largest_gap": max(gaps),
        "median_ms": ms,
        "tokens_per_s": ids.numel() / ms * 1000,
        "activation_bytes": hfnn.memory.saved_bytes(lambda: run.loss(ids)).total,
        "layer_u": sum(layer.values()),
        "peak_bytes": peak_bytes(run, ids),
        "layer_u_by_op": layer,
        "losses": run.losses,
        "ms": run.ms,
    }


def kept_per_layer(run: Run, ids: torch.Tensor) -> dict[str, float]:
    """What a layer keeps for backward, by op: what a model of two layers keeps less what a model of one keeps.

    In u, which is batch * seq * width bytes, or twice that where numbers are float32: a tensor is 2 u in any dtype.
    """
    runs = (Run(run.name, run.args, layers) for layers in (1, 2))
    one, two = (hfnn.memory.saved_bytes(lambda r=r: r.loss(ids)).by_op for r in runs)
    u = ids.numel() * run.args.width * (2 if run.args.dtype == "float32" else 1)
    kept = ((op, (two[op] - one.get(op, 0)) / u) for op in two)
    return {op: size for op, size in sorted(kept, key=lambda item: -item[1]) if abs(size) >= 0.005}


def peak_bytes(run: Run, ids: torch.Tensor) -> int:
    """The most that forward and backward hold at one time, in torch's allocations, above weights and optimizer."""
    if run.cuda:
        torch.cuda.reset_peak_memory_stats(run.args.device)
        before = torch.cuda.memory_allocated(run.args.device)
        run.loss(ids).backward()
        peak = torch.cuda.max_memory_allocated(run.args.device) - before
    else:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's own words
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            run.loss(ids).backward()
        events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
        peak = np.cumsum([e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]).max()
    run.optimizer.zero_grad()
    return int(peak)


ROWS = (  # label, field, format, unit, whether hfnn / plain says something
    ("final loss", "final_loss", "{:.4f}", 1, False),
    ("mean gap to plain", "mean_gap", "{:.1e}", 1, False),
    ("largest gap to plain", "largest_gap", "{:.1e}", 1, False),
    ("ms per step, median", "median_ms", "{:.1f}", 1, True),
    ("tokens per second", "tokens_per_s", "{:,.0f}", 1, True),
    ("kept for backward, MB", "activation_bytes", "{:.1f}", 1e6, True),
    ("    each layer, u", "layer_u", "{:.2f}", 1, True),
    ("peak above weights, MB", "peak_bytes", "{:.1f}", 1e6, True),
)
NOTES = f"""final loss: mean of {LAST} steps; u: bytes per batch x sequence x width, a float32 counted as 2 bytes
plain again: another attention kernel, other dropout masks; its largest gap to plain is the band"""
COLORS = {PLAIN: "#b0b7c3", OTHER: "#f2a154", HFNN: "#1f6feb"}
BARS = {"median_ms": ("ms per step", 1), "activation_bytes": ("MB kept", 1e6), "peak_bytes": ("MB at the peak", 1e6)}
# By the name of the autograd node; where several keep one tensor, the one that used it last is named.
WHY = {
    "linear": "hfnn: what a product's input is rebuilt from, the inputs of the norm and of the activation",
    "norm": "the norm's own input, where no product keeps it already",
    "scaleddotproduct": "torch's attention: q, k, v, and a number for each row of the softmax",
    "mm": "torch's product: its input, as that of attention's projection, which attention keeps as well",
}


def verdict(rows: dict) -> dict:
    """Whether hfnn's losses lie in the band around plain's, which is never narrower than a loss's own rounding."""
    band = max(rows[OTHER]["largest_gap"], 4 * torch.finfo(torch.float32).eps * max(rows[PLAIN]["losses"]))
    steps = sum(abs(a - b) <= band for a, b in zip(rows[HFNN]["losses"], rows[PLAIN]["losses"], strict=True))
    return {"half_width": band, "inside": rows[HFNN]["mean_gap"] <= band, "steps_inside": steps}


def comparison(rows: dict) -> Table:
    ratio = [f"{HFNN} / {PLAIN}"] if HFNN in rows else []
    table = Table("")
    for name in [*rows, *ratio]:
        table.add_column(name, justify="right")
    for label, field, form, unit, compare in ROWS:
        last = [f"{rows[HFNN][field] / rows[PLAIN][field]:.2f}x" if compare else ""] if ratio else []
        table.add_row(label, *(form.format(row[field] / unit) for row in rows.values()), *last)
    return table


def keepers(kept: dict[str, float]) -> Table:
    table = Table.grid(padding=(0, 2))
    for op, size in kept.items():
        why = next((why for key, why in WHY.items() if key in op.lower()), "torch's own op: its input or output")
        table.add_row(f"{size:6.2f} u", f"{op}: {why}")
    return table


def picture(rows: dict, title: str, path: Path) -> None:
    """Losses over each other, and bars of time and memory."""
    panels, widths = [["loss", *BARS]], [3, 1, 1, 1]
    figure, axes = plt.subplot_mosaic(panels, figsize=(12, 4), width_ratios=widths, layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", weight="bold")
    axes["loss"].set(title="loss (nats per byte) by step")
    for name, row in rows.items():
        axes["loss"].plot(row["losses"], label=name, color=COLORS[name], linewidth=3 if name == PLAIN else 1.5)
    axes["loss"].legend(frameon=False)
    shown = [name for name in (PLAIN, HFNN) if name in rows]
    for field, (label, unit) in BARS.items():
        values = [rows[name][field] / unit for name in shown]
        bars = axes[field].bar(shown, values, color=[COLORS[name] for name in shown], width=0.6)
        axes[field].bar_label(bars, fmt="%.0f")
        axes[field].set(title=label, yticks=[], ymargin=0.1)
    for axis in axes.values():
        axis.spines[["top", "right", *(["left"] if axis is not axes["loss"] else [])]].set_visible(False)
    figure.savefig(path, dpi=150)


def report(args, rows: dict) -> None:
    """Prints the tables and writes the JSON and the picture."""
    size = f"{args.layers} layers of width {args.width}, {args.batch} x {args.seq} tokens a step"
    title = f"{args.arch}, {size}, {args.dtype} on {args.device}" + (", compiled" if args.compile else "")
    band = verdict(rows) if {OTHER, HFNN} <= set(rows) else None
    say, out = functools.partial(Console().print, highlight=False), Path(args.out)
    say(f"\n{title}", comparison(rows), NOTES, sep="\n")
    if band:
        where = "inside" if band["inside"] else "OUTSIDE"
        say(f"hfnn's mean gap is {where} the band, and so are {band['steps_inside']} of its {args.steps} single gaps")
    if HFNN in rows:
        say("\nwhat a layer of hfnn keeps", keepers(rows[HFNN]["layer_u_by_op"]), sep="\n")
    machine = {"torch": torch.__version__, "hfnn": hfnn.__version__, "threads": torch.get_num_threads()}
    settings = {name: value for name, value in vars(args).items() if name not in ("text", "order")}
    result = {"title": title, "settings": settings, "machine": machine, "runs": rows, "band": band}
    (out / "train_gpt.json").write_text(json.dumps(result, indent=1))
    picture(rows, title, out / "train_gpt.png")
    say(f"wrote {out / 'train_gpt.json'} and {out / 'train_gpt.png'}")
