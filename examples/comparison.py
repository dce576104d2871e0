"""Compares runs of an example: tables, JSON, a picture."""

import functools
import json
import os
import statistics
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from runs import HFNN, OTHER, PLAIN, Run

import hfnn

WARM_UP = 3  # steps left out of the times: allocators fill up, torch.compile and Triton compile
LAST = 10  # losses of single batches scatter: the final loss is the mean of this many steps


def measure(run: Run, plain: Run, batch, count: int) -> dict:
    """The table entries of a run. count: items per batch."""
    gaps = [abs(a - b) for a, b in zip(run.losses, plain.losses, strict=True)]
    ms = statistics.median(run.ms[WARM_UP:] or run.ms)
    return {
        "final_loss": statistics.fmean(run.losses[-LAST:]),
        "mean_gap": statistics.fmean(gaps),
        "largest_gap": max(gaps),
        "median_ms": ms,
        f"{run.items}_per_s": count / ms * 1000,
        "activation_bytes": hfnn.memory.saved_bytes(lambda: run.loss(batch)).total,
        "peak_bytes": peak_bytes(run, batch),
        "losses": run.losses,
        "ms": run.ms,
    }


def peak_bytes(run: Run, batch) -> int:
    """Peak memory of forward and backward, in torch's allocations, above weights and optimizer."""
    if run.cuda:
        torch.cuda.reset_peak_memory_stats(run.args.device)
        before = torch.cuda.memory_allocated(run.args.device)
        run.loss(batch).backward()
        peak = torch.cuda.max_memory_allocated(run.args.device) - before
    else:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # silences the profiler's messages
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            run.loss(batch).backward()
        events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
        peak = np.cumsum([e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]).max()
    run.optimizer.zero_grad()
    return int(peak)


FINAL_LOSS = f"final loss: mean of {LAST} steps"
OF_BAND = "its largest gap to plain is the band"
LOSSES = (  # label, field, format, unit, whether hfnn / plain is meaningful
    ("final loss", "final_loss", "{:.4f}", 1, False),
    ("mean gap to plain", "mean_gap", "{:.1e}", 1, False),
    ("largest gap to plain", "largest_gap", "{:.1e}", 1, False),
    ("ms per step, median", "median_ms", "{:.1f}", 1, True),
)
KEPT = (("kept for backward, MB", "activation_bytes", "{:.1f}", 1e6, True),)
PEAK = (("peak above weights, MB", "peak_bytes", "{:.1f}", 1e6, True),)
COLORS = {PLAIN: "#b0b7c3", OTHER: "#f2a154", HFNN: "#1f6feb"}
BARS = {"median_ms": ("ms per step", 1), "activation_bytes": ("MB kept", 1e6), "peak_bytes": ("MB at the peak", 1e6)}


def verdict(rows: dict) -> dict:
    """Whether hfnn's losses are in the band around plain's, which is never narrower than a loss's rounding."""
    band = max(rows[OTHER]["largest_gap"], 4 * torch.finfo(torch.float32).eps * max(rows[PLAIN]["losses"]))
    steps = sum(abs(a - b) <= band for a, b in zip(rows[HFNN]["losses"], rows[PLAIN]["losses"], strict=True))
    return {"half_width": band, "inside": rows[HFNN]["mean_gap"] <= band, "steps_inside": steps}


def comparison(rows: dict, lines) -> Table:
    ratio = [f"{HFNN} / {PLAIN}"] if HFNN in rows else []
    table = Table("")
    for name in [*rows, *ratio]:
        table.add_column(name, justify="right")
    for label, field, form, unit, compare in lines:
        last = [f"{rows[HFNN][field] / rows[PLAIN][field]:.2f}x" if compare else ""] if ratio else []
        table.add_row(label, *(form.format(row[field] / unit) for row in rows.values()), *last)
    return table


def keepers(kept: dict[str, float], unit: str, why: dict[str, str]) -> Table:
    """why: by a part of the name of the autograd node; if several keep one tensor, the last one that used it."""
    table = Table.grid(padding=(0, 2))
    for op, size in kept.items():
        reason = next(
            (reason for key, reason in why.items() if key in op.lower()), "torch's own op: its input or output"
        )
        table.add_row(f"{size:6.2f} {unit}", f"{op}: {reason}")
    return table


def picture(rows: dict, title: str, loss: str, path: Path) -> None:
    """Losses over each other, and bars of time and memory."""
    panels, widths = [["loss", *BARS]], [3, 1, 1, 1]
    figure, axes = plt.subplot_mosaic(panels, figsize=(12, 4), width_ratios=widths, layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", weight="bold")
    axes["loss"].set(title=f"{loss} by step")
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


def report(args, name: str, size: str, rows: dict, lines, notes: str, loss: str, kept=None) -> None:
    """Prints the tables and writes `name`.json and `name`.png.

    lines: as LOSSES; loss: its name with the unit; kept: a title and a table of what hfnn's model keeps.
    """
    title = f"{args.arch}, {size}, {args.dtype} on {args.device}" + (", compiled" if args.compile else "")
    band = verdict(rows) if {OTHER, HFNN} <= set(rows) else None
    say, out = functools.partial(Console().print, highlight=False), Path(args.out)
    say(f"\n{title}", comparison(rows, lines), notes, sep="\n")
    if band:
        where = "inside" if band["inside"] else "OUTSIDE"
        say(f"hfnn's mean gap is {where} the band, and so are {band['steps_inside']} of its {args.steps} single gaps")
    if kept:
        say(f"\n{kept[0]}", kept[1], sep="\n")
    machine = {"torch": torch.__version__, "hfnn": hfnn.__version__, "threads": torch.get_num_threads()}
    settings = {key: value for key, value in vars(args).items() if isinstance(value, (str, int, float, type(None)))}
    result = {"title": title, "settings": settings, "machine": machine, "runs": rows, "band": band}
    (out / f"{name}.json").write_text(json.dumps(result, indent=1))
    picture(rows, title, loss, out / f"{name}.png")
    say(f"wrote {out / f'{name}.json'} and {out / f'{name}.png'}")
