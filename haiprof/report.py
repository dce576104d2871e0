"""`report DIR` in the terminal: the verdict, then the numbers behind it."""

from pathlib import Path
from statistics import fmean

from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from haiprof import record
from haiprof.verdict import PARTS, Verdict, captures, ms

# The shown counters: name, title, and format of the mean.
COUNTERS = [
    ("process.cpu", "CPU of the process", "{:.2f} cores"),
    ("process.memory", "memory of the process", "bytes"),
    ("process.disk_read", "read from files", "rate"),
    ("process.disk_write", "written to files", "rate"),
    ("net.sent", "sent by the host", "rate"),
    ("gpu.busy", "GPU busy", "{:.0%}"),
    ("gpu.sm", "multiprocessors active", "{:.0%}"),
    ("gpu.tensor", "tensor cores active", "{:.0%}"),
    ("gpu.dram", "GPU memory bandwidth", "{:.0%}"),
    ("gpu.power", "power", "{:.0f} W"),
    ("gpu.clock", "clock", "{:.0f} MHz"),
    ("gpu.used", "GPU memory", "bytes"),
    ("gpu.reserved", "of it reserved by torch", "bytes"),
    ("memory.traffic", "memory traffic of the host", "rate"),
    ("memory.to_other_sockets", "of it to other sockets", "rate"),
]


def show(verdict: Verdict, console: Console):
    console.print(page(verdict))


def page(verdict: Verdict) -> Group:
    """The whole report, for printing with rich."""
    parts = [_findings(verdict)]
    if verdict.ranks:
        parts += [_phases(verdict), *_operators(verdict), _counters(verdict), *map(Text, captures(verdict))]
    missing = {name: why for rank in verdict.ranks for name, why in record.missing(rank.run).items()}
    parts += [Text(f"not measured: {name}: {why}", style="dim") for name, why in sorted(missing.items())]
    return Group(*parts)


def _findings(verdict):
    text = Text()
    for number, finding in enumerate(verdict.findings):
        text.append(f"{finding.kind}: " if number == 0 else f"\nalso {finding.kind}: ", style="bold")
        text.append(f"{finding.text}\n")
        text.append(f"  evidence: {finding.evidence}\n")
        for line in finding.lines:
            text.append(f"    {line}\n", style="dim")
        for advice in finding.advice:
            text.append(f"  try: {advice}\n")
    return Panel(text, title="verdict")


def _phases(verdict):
    """Milliseconds."""
    table = Table(
        "rank",
        "steps",
        "step",
        *PARTS,
        "blocked",
        "late",
        "slowest",
        title="ms a step",
        box=None,
        pad_edge=False,
        collapse_padding=True,
    )
    for rank in verdict.ranks:
        late = verdict.late.per_second(rank.rank) * verdict.step
        row = [rank.seconds, *rank.phases.values(), rank.communication(), late, rank.slowest]
        table.add_row(str(rank.rank), str(rank.steps), *(f"{1e3 * value:.1f}" for value in row))
        if rank.gpu:
            own = (rank.gpu["seconds"], *(rank.gpu[name] for name in PARTS[:-1]))
            table.add_row("", "GPU", *(f"{1e3 * value:.1f}" for value in own))
    shares = [fmean(rank.phases[name] for rank in verdict.ranks) / verdict.step for name in PARTS]
    table.add_row("", "", "", *(f"{share:.0%}" for share in shares), style="bold")
    table.caption = _caption(verdict)
    return table


def _caption(verdict):
    said = ["means of all steps but the first"]
    if len(verdict.ranks) > 1:
        said.append("blocked: in collectives; late: what others wait for this rank")
    passes = max(rank.passes for rank in verdict.ranks)
    if passes > 1.01:
        said.append(f"{passes:.1f} backward passes a step")
    gap = max(rank.gap for rank in verdict.ranks)
    if gap:
        said.append(f"validation between steps took {gap:.2f} s in all")
    return "; ".join(said)


LARGEST = 10  # operators that are shown


def operators(verdict) -> tuple[str, list[list[str]]]:
    """Of the first rank with a window of operators: a title, and rows of operator, share, calls per step, shapes,
    module."""
    rank = next((rank for rank in verdict.ranks if rank.operators().get("steps")), None)
    if rank is None:
        return "", []
    line = rank.operators()
    column, total = (3, line["on_gpu"]) if line["on_gpu"] else (2, line["host"])
    rows = [
        [row[0], f"{row[column] / total:.1%}" if total else "", f"{row[1] / line['steps']:g}", row[4], row[5]]
        for row in line["rows"][:LARGEST]
    ]
    where = "GPU" if line["on_gpu"] else "host"
    title = f"largest operators of rank {rank.rank}, shares of {ms(total / line['steps'])} a step on the {where}"
    return f"{title} ({line['steps']} steps; all in {Path(str(rank.run['stem'])).name}.operators.json.gz)", rows


def flops(verdict) -> list[str]:
    """For each rank whose FLOPs were counted."""
    found = []
    for rank in verdict.ranks:
        line = rank.operators()
        if line.get("flops"):
            seconds = (rank.gpu or {}).get("seconds") or rank.seconds
            rate = line["flops"] / seconds
            text = f"rank {rank.rank}: {line['flops']:.3g} FLOPs a step (FlopCounterMode), {rate / 1e12:.3g} TFLOP/s"
            if line.get("peak"):
                text += f", MFU {rate / line['peak']:.1%} of {line['peak'] / 1e12:g} ({line['device']}, bfloat16)"
            found.append(text)
    return found


def _operators(verdict):
    title, rows = operators(verdict)
    if not rows:
        return []
    table = Table("operator", "share", "calls a step", "shapes", "module", title=title, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*row)
    return [table, *map(Text, flops(verdict))]


def _counters(verdict):
    table = Table(
        "counter", *(f"rank {rank.rank}" for rank in verdict.ranks), box=None, pad_edge=False, collapse_padding=True
    )
    for name, title, form in COUNTERS:
        means = [rank.mean(name) for rank in verdict.ranks]
        if any(mean is not None for mean in means):
            table.add_row(title, *("" if mean is None else _written(mean, form) for mean in means))
    return table


def _written(value, form):
    return form.format(value) if "{" in form else nbytes(value) + ("/s" if form == "rate" else "")


def nbytes(value) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
