"""Rows of results: one CSV file per device, with tables and plots.

A file only ever grows. Tables and plots take the newest row of each (op, case, dtype, provider, kernel, pass).
"""

import contextlib
import csv
import datetime
import functools
import math
import os
import platform
import re
import subprocess
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from hfnn.core import native

# fmt: off
COLUMNS = (
    "date", "op", "case", "dtype", "provider", "kernel", "pass", "device_us", "host_us", "spread_pct", "gbps",
    "pct_of_copy", "copy_gbps", "saved_bytes", "rel_error", "torch", "triton", "driver", "cuda", "commit", "threads",
)
# fmt: on
KEY = ("op", "case", "dtype", "provider", "kernel", "pass", "ranks")


# Writing


def row(op: str, case: tuple, dtype, provider: str, name: str, timing, error: float | None, more: dict) -> dict:
    """One line of the CSV file; `more` has the other known columns, including columns special to a file."""
    return {
        **dict.fromkeys(COLUMNS, ""),
        **_circumstances(),
        "date": datetime.datetime.now().isoformat(" ", "seconds"),
        "op": op,
        "case": "x".join(map(str, case)),
        "dtype": str(dtype).removeprefix("torch."),
        "provider": provider,
        "pass": name,
        "device_us": _short(timing.device_us),
        "host_us": _short(timing.host_us),
        "spread_pct": _short(timing.spread_pct, 3),
        "rel_error": _short(error, 3),
        "threads": torch.get_num_threads(),
        **{column: _short(value) for column, value in more.items()},
    }


def rates(nbytes: float, device_us: float, copy_gbps: float) -> dict:
    """The columns that compare with the bandwidth of a copy."""
    gbps = nbytes / device_us / 1e3
    return {"gbps": gbps, "copy_gbps": copy_gbps, "pct_of_copy": 100 * gbps / copy_gbps}


KINDS = {"_C.cpu": "cpp", "_C.cuda": "cuda", "hfnn.kernels": "triton"}  # kinds of kernels by module


def kernel_of(y: torch.Tensor) -> str:
    """The kernel that made y: hfnn's rooms keep it on their autograd node, some with the other call data."""
    module = native.extension and y.grad_fn is not None and native.extension.module(y.grad_fn)
    if module:  # a described node has the kernel itself
        return getattr(module, "name", None) or next(kind for part, kind in KINDS.items() if part in module.__name__)
    kernel = getattr(getattr(y.grad_fn, "call", y.grad_fn), "kernel", None)
    return "torch" if kernel is None else kernel.name


def _short(value, digits: int = 5):
    if value is None:
        return ""
    return f"{value:.{digits}g}" if isinstance(value, float) else value


@functools.cache
def _circumstances() -> dict:
    """The columns that do not change while a process runs."""
    try:
        import triton
    except ImportError:
        triton = None
    return {
        "torch": torch.__version__,
        "triton": getattr(triton, "__version__", ""),
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"),
        "cuda": torch.version.cuda or "",
        "commit": os.environ.get("HFNN_COMMIT") or _output("git", "describe", "--always", "--dirty") or "unknown",
    }


def _output(*command: str) -> str:
    """The output of a command; empty if it is missing or fails."""
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parent)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return found.stdout.strip()


def path(folder: Path, device: str, suffix: str = "") -> Path:
    """The CSV file of this machine's device."""
    name = torch.cuda.get_device_name() if device == "cuda" else _cpu_name()
    return folder / f"{re.sub('[^A-Za-z0-9]+', '_', name).strip('_')}{suffix}.csv"


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*:\s*(.+)", info.read_text()) if info.exists() else None
    return found[1] if found else platform.processor() or platform.machine()


def append(path: Path, rows: list[dict]) -> list[dict]:
    """Append rows to a file immediately: an interrupted run loses only one case. Returns the rows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new, columns = not path.exists(), list(rows[0])
    if not new and (header := path.read_text().partition("\n")[0]) != ",".join(columns):
        raise SystemExit(f"{path} has the columns {header}; this version writes {','.join(columns)}: move it away")
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerows(rows)
    return rows


# Reading


def newest(path: Path, beside: str | None = None) -> list[dict]:
    """The last row of each key, in the order of the keys' first rows. beside: only of runs with this provider."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    runs = {(r["date"], r["op"], r["case"]) for r in rows if r["provider"] == beside}
    rows = rows if beside is None else [r for r in rows if (r["date"], r["op"], r["case"]) in runs]
    return list({tuple(r.get(k) for k in KEY): r for r in rows}.values())


def show(folder: Path, column: str | None, plots: bool) -> int:
    """A table of every CSV file, and its plots; exit status."""
    files = sorted(folder.glob("*.csv"))
    for file in files:
        rows = newest(file)
        if column and (column != "time" or any(map(_timed, rows))):
            table(rows, f"{file.stem}, {column}", column)
        for name in _plot(rows, file) if plots else ():
            print(name)
    if not files:
        print(f"no CSV file in {folder}")
    return 0 if files else 1


def table(rows: list[dict], title: str, column: str = "time") -> None:
    """A line per case and pass, a column per provider."""
    lines, labels = {}, {}
    for r in rows:
        label = labels.setdefault(_label(r), _label(r))
        lines.setdefault(tuple(r[k] for k in ("op", "case", "dtype", "pass")), {})[label] = _cell(r, column)
    found = grid(title, ("op", "case", "dtype", "pass"), labels)
    for key, cells in lines.items():
        found.add_row(*key, *(cells.get(label, "") for label in labels))
    put(found)


def grid(title: str, left: Iterable[str], right: Iterable[str]) -> Table:
    """An empty table with text columns on the left and number columns on the right."""
    found = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in left:
        found.add_column(heading)
    for heading in right:
        found.add_column(heading, justify="right")
    return found


@contextlib.contextmanager
def shown(table: Callable, title: str) -> Iterator[list[dict]]:
    """A list of rows whose table is shown at the end, also if the run is interrupted."""
    rows = []
    try:
        yield rows
    finally:
        if rows:
            table(rows, title)


def put(table: Table) -> None:
    """Print a table; without a terminal its width is not limited."""
    console = Console()
    console.width = console.width if console.is_terminal else 160
    console.print(table)


def _label(r: dict) -> str:
    return f"{r['provider']} {r['kernel']}".strip()


def _timed(r: dict) -> bool:
    """Whether the row has a time: failed rows and rows only about memory have none."""
    return bool(r["device_us"] or r["host_us"])


def _cell(r: dict, column: str) -> str:
    if column != "time":
        return str(r[column])
    if not _timed(r):
        return "-"
    us = float(r["device_us"] or r["host_us"])
    us = f"{us:.2f} us" if us < 100 else f"{us:.0f} us"
    return f"{us} {float(r['pct_of_copy']):3.0f}%" if r["pct_of_copy"] else us


def _plot(rows: list[dict], file: Path) -> list[Path]:
    """One PNG per op and pass: per cent of the copy bandwidth, a group of bars per case."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [r for r in rows if r["pct_of_copy"]]
    written = []
    for op, name in dict.fromkeys((r["op"], r["pass"]) for r in rows):
        mine = [r for r in rows if (r["op"], r["pass"]) == (op, name)]
        groups = list(dict.fromkeys((r["case"], r["dtype"]) for r in mine))
        labels = list(dict.fromkeys(map(_label, mine)))
        figure, axes = pyplot.subplots(figsize=(max(6, 1.6 * len(groups)), 3.6), layout="constrained")
        for i, label in enumerate(labels):
            heights = {(r["case"], r["dtype"]): float(r["pct_of_copy"]) for r in mine if _label(r) == label}
            at = [g + (i - (len(labels) - 1) / 2) * 0.8 / len(labels) for g in range(len(groups))]
            axes.bar(at, [heights.get(group, math.nan) for group in groups], 0.8 / len(labels), label=label)
        axes.set_xticks(range(len(groups)), ["\n".join(group) for group in groups], fontsize=8)
        axes.set(title=f"{op} {name}, {file.stem}", ylabel="% of the bandwidth of a copy")
        axes.axhline(100, color="grey", linewidth=0.8)
        axes.legend(fontsize=8, ncols=3)
        written.append(file.with_name(f"{file.stem}-{op}-{name}.png"))
        figure.savefig(written[-1], dpi=120)
        pyplot.close(figure)
    return written
