"""The results of curve.py: the table, the verdict, and the picture."""

import csv
import math
import statistics
from pathlib import Path

import report
from rich import box
from rich.table import Table

STYLES = {"eager": ("stock", "#8a94a6", 3.2), "hfnn": ("converted", "#c8102e", 1.2)}  # name, colour, width of a line
WIDTH, HEIGHT = 900, 400  # of the picture
TOP, BOTTOM = 76, 348  # of its panels


def finals(rows: list[dict]) -> dict[str, dict[int, float]]:
    """The validation loss after the last step, by provider and seed, for complete runs."""
    found = {provider: {} for provider in STYLES}
    for r in rows:
        if r["pass"] == "validation" and int(r["step"]) == int(r["steps"]):
            found[r["provider"]][int(r["seed"])] = float(r["loss"])
    return found


def spread(losses) -> float:
    return max(losses) - min(losses)


def verdict(stock: dict[int, float], ours: dict[int, float]) -> tuple[bool, str]:
    """Whether the means are no further apart than the stock seeds, and a sentence; both are losses by seed."""
    off, wide = statistics.fmean(ours.values()) - statistics.fmean(stock.values()), spread(stock.values())
    within = abs(off) <= wide  # no, if one is NaN
    said = f"{'within' if within else 'NOT within'} the stock seeds' spread: {off:+.4f}, spread {wide:.4f}"
    by_seed = [ours[seed] - stock[seed] for seed in stock.keys() & ours.keys()]
    if len(by_seed) > 1:
        said += f", standard error of the differences by seed {statistics.stdev(by_seed) / len(by_seed) ** 0.5:.4f}"
    return within, said


def table(rows: list[dict]) -> int:
    """Print the last validation losses and the verdict; exit status."""
    found = finals(rows)
    stock, ours = (found[provider] for provider in ("eager", "hfnn"))
    grid = Table(title=f"validation loss after {rows[-1]['steps']} steps", title_justify="left", box=box.SIMPLE_HEAD)
    for heading in ("seed", "stock", "converted", "converted - stock"):
        grid.add_column(heading, justify="right")
    seeds = sorted({int(r["seed"]) for r in rows})
    for seed in seeds:
        both = [of.get(seed, math.nan) for of in (stock, ours)]
        grid.add_row(str(seed), *(f"{loss:.4f}" for loss in both), f"{both[1] - both[0]:+.4f}")
    if stock and ours:
        means = [statistics.fmean(of.values()) for of in (stock, ours)]
        grid.add_row("mean", *(f"{mean:.4f}" for mean in means), f"{means[1] - means[0]:+.4f}")
        grid.add_row("spread", *(f"{spread(of.values()):.4f}" for of in (stock, ours)), "")
    peaks = [max([float(r["peak_gib"] or 0) for r in rows if r["provider"] == p], default=0) for p in found]
    if any(peaks):
        grid.add_row("GiB at most", *(f"{peak:.2f}" for peak in peaks), "")
    report.put(grid)
    wrong = [f"{r['provider']} seed {r['seed']}: {r['error']}" for r in rows if r["error"]]
    for provider, of in found.items():
        if len(of) < len(seeds):
            wrong.append(f"{provider}: {len(of)} of {len(seeds)} seeds came to the last step")
    if stock and ours:
        within, said = verdict(stock, ours)
        print(f"converted - stock: {said}")
        wrong += [] if within else ["the last losses differ by more than the stock seeds do"]
    for line in wrong:
        print(f"RED: {line}")
    return int(bool(wrong))


# The picture


def draw(folder: Path, target: Path) -> int:
    """Write the picture of the newest run of the folder's only file, and print its table; exit status."""
    paths = sorted(folder.glob("*-curve.csv"))
    if len(paths) != 1:
        raise SystemExit(f"{folder} has {len(paths)} files *-curve.csv, takes one: give another folder with --results")
    with paths[0].open(newline="") as file:
        rows = list(csv.DictReader(file))
    rows = [r for r in rows if r["run"] == rows[-1]["run"]]
    target.write_text(picture(rows, paths[0].stem.removesuffix("-curve").replace("_", " ")))
    return table(rows)


def picture(rows: list[dict], machine: str) -> str:
    """SVG: on the left the training loss, a line for each run; on the right the validation loss, from steps / 3 on."""
    r, steps = rows[-1], int(rows[-1]["steps"])
    name = "GPT-2 small" if "tiny" not in r["case"] else "a tiny GPT-2"
    batch, length = r["case"].split("x")[:2]
    title = f"{name}, {batch} x {length} tokens a step, bfloat16 autocast; {machine}, torch {r['torch']}"
    style = (
        "text { font: 13px sans-serif; fill: #24292f } .t { font-size: 11px; fill: #57606a } .b { font-weight: bold }"
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        f"<title>Losses of stock and converted runs: {title}</title>",
        f'<style>{style}</style><rect width="100%" height="100%" fill="#ffffff"/>',
        f'<text x="52" y="26" class="b">{title}</text>',
    ]
    parts += panel("training loss", 52, 430, curves(rows, "train", 0), (0, steps), dots=False)
    parts += panel("validation loss", 505, 883, curves(rows, "validation", steps / 3), (steps / 3, steps), dots=True)
    x = 52
    for provider, (word, colour, width) in STYLES.items():
        seeds = len({r["seed"] for r in rows if r["provider"] == provider})
        line = f'<line x1="{x}" y1="386" x2="{x + 28}" y2="386" stroke="{colour}" stroke-width="{width}"/>'
        parts += [line, f'<text x="{x + 36}" y="390">{word}, {seeds} seed{"s" * (seeds > 1)}</text>']
        x += 170
    return "\n".join([*parts, "</svg>", ""])


def curves(rows: list[dict], name: str, begin: float) -> list[tuple[str, list]]:
    """(provider, [(step, loss), ...]) of every run; stock ones first, so that the others are drawn on top."""
    found = {(p, seed): [] for p in STYLES for seed in dict.fromkeys(r["seed"] for r in rows)}
    for r in rows:
        if r["pass"] == name and int(r["step"]) >= begin and math.isfinite(float(r["loss"])):
            found[r["provider"], r["seed"]].append((int(r["step"]), float(r["loss"])))
    return [(provider, points) for (provider, _), points in found.items() if points]


def panel(title: str, left: int, right: int, lines: list, steps: tuple[float, float], dots: bool) -> list[str]:
    """SVG of axes and lines; the losses' range is that of the points."""
    losses = [loss for _, points in lines for _, loss in points] or [0.0]
    low, high = min(losses), max(losses)
    margin = 0.05 * (high - low) or 0.1
    low, high = low - margin, high + margin

    def x(step):
        return round(left + (step - steps[0]) / (steps[1] - steps[0]) * (right - left), 1)

    def y(loss):
        return round(BOTTOM - (loss - low) / (high - low) * (BOTTOM - TOP), 1)

    parts = [f'<text x="{left}" y="{TOP - 14}">{title}, by step</text>']
    for at in ticks(low, high):
        parts += [f'<line x1="{left}" y1="{y(at)}" x2="{right}" y2="{y(at)}" stroke="#d8dee4"/>']
        parts += [f'<text class="t" x="{left - 6}" y="{y(at) + 4}" text-anchor="end">{at:g}</text>']
    for at in ticks(*steps):
        parts += [f'<line x1="{x(at)}" y1="{BOTTOM}" x2="{x(at)}" y2="{BOTTOM + 5}" stroke="#57606a"/>']
        parts += [f'<text class="t" x="{x(at)}" y="{BOTTOM + 18}" text-anchor="middle">{at:g}</text>']
    parts += [f'<line x1="{left}" y1="{BOTTOM}" x2="{right}" y2="{BOTTOM}" stroke="#57606a"/>']
    for provider, points in lines:
        _, colour, width = STYLES[provider]
        path = " ".join(f"{x(step)},{y(loss)}" for step, loss in points)
        parts += [f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}"/>']
        for step, loss in points if dots else ():
            parts += [f'<circle cx="{x(step)}" cy="{y(loss)}" r="{width}" fill="{colour}"/>']
    return parts


def ticks(low: float, high: float) -> list[float]:
    """Four to ten round numbers from low to high."""
    unit = 10 ** math.floor(math.log10(high - low))
    unit = next(unit * share for share in (0.1, 0.2, 0.5, 1) if (high - low) / (unit * share) <= 10)
    return [round(n * unit, 9) for n in range(math.ceil(low / unit), math.floor(high / unit) + 1)]
