"""`report DIR` as one self-contained HTML file: Bokeh's script is included."""

import html
from pathlib import Path

from haiprof import report, trace
from haiprof.report import COUNTERS
from haiprof.verdict import PARTS, Verdict, captures, ms

COLORS = {
    "data": "#e6ab02",
    "forward": "#1b9e77",
    "inference": "#66c2a5",
    "backward": "#7570b3",
    "optimizer": "#d95f02",
    "other": "#bbbbbb",
    "wait": "#e7298a",
}
SHOWN_STEPS, SHOWN_RANKS = 12, 64  # limits of the timeline


def write(verdict: Verdict, path):
    """Raises ImportError that says what to install if Bokeh is missing."""
    try:
        from bokeh.embed import components
        from bokeh.resources import Resources
    except ImportError:
        raise ImportError("the HTML page needs Bokeh: pip install hfnn[prof]") from None
    figures = [_timeline(verdict), _shares(verdict), *_counters(verdict)] if verdict.ranks else []
    script, divs = components([each for each in figures if each is not None]) if figures else ("", ())
    resources = Resources(mode="inline", components=["bokeh"])
    bokeh = resources.render_js() if figures else ""
    captured = [f"<p>{html.escape(each)}</p>" for each in captures(verdict)]
    body = "\n".join([_findings(verdict), _table(verdict), _operators(verdict), *captured, *divs])
    style = "body{font:15px sans-serif;margin:2em;max-width:1100px}td,th{padding:.2em .8em;text-align:right}"
    style += "table{border-collapse:collapse}tr:nth-child(even){background:#f4f4f4}li{margin:.2em}pre{overflow-x:auto}"
    Path(path).write_text(
        f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>haiprof</title><style>{style}</style>'
        f'<link rel="icon" href="data:,">{bokeh}</head><body>{body}{script}</body></html>\n'
    )


def _findings(verdict):
    rows = []
    for number, finding in enumerate(verdict.findings):
        tag = "h1" if number == 0 else "h2"
        advice = "".join(f"<li>{html.escape(each)}</li>" for each in finding.advice)
        rows.append(
            f"<{tag}>{html.escape(finding.kind)}</{tag}><p><b>{html.escape(finding.text)}</b></p>"
            f"<p>{html.escape(finding.evidence)}</p>{_lines(finding)}<ul>{advice}</ul>"
        )
    return "".join(rows)


def _lines(finding):
    return f"<pre>{html.escape(chr(10).join(finding.lines))}</pre>" if finding.lines else ""


def _table(verdict):
    if not verdict.ranks:
        return ""
    head = "".join(f"<th>{name}</th>" for name in ("rank", "steps", "a step", *PARTS, "blocked", "makes others wait"))
    rows = []
    for rank in verdict.ranks:
        late = verdict.late.per_second(rank.rank) * verdict.step
        cells = [ms(rank.seconds), *(ms(rank.phases[name]) for name in PARTS), ms(rank.communication()), ms(late)]
        cells = "".join(f"<td>{cell}</td>" for cell in (rank.rank, rank.steps, *cells))
        rows.append(f'<tr class="rank">{cells}</tr>')
    return f"<table><tr>{head}</tr>{''.join(rows)}</table>"


def _operators(verdict):
    title, rows = report.operators(verdict)
    if not rows:
        return ""
    head = "".join(f"<th>{name}</th>" for name in ("operator", "share", "calls a step", "shapes", "module"))
    body = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    counted = "".join(f"<p>{html.escape(each)}</p>" for each in report.flops(verdict))
    table = f'<div class="wide"><table class="text"><tr>{head}</tr>{body}</table></div>'
    return f"<h3>{html.escape(title)}</h3>{table}{counted}"


def _figure(title, **more):
    from bokeh.plotting import figure

    plot = figure(title=title, width=1050, tools="xpan,xwheel_zoom,box_zoom,reset,hover", **more)
    plot.toolbar.logo = None
    return plot


def _timeline(verdict):
    """The last steps of all ranks: one bar per phase, with waits as narrow bars inside."""
    ranks = verdict.ranks[:SHOWN_RANKS]
    events = {rank.rank: _events(rank) for rank in ranks}
    steps = [[e for e in own if e["tid"] == trace.STEPS] for own in events.values()]
    if not all(steps):
        return None
    begin = min(own[-min(SHOWN_STEPS, len(own))]["ts"] for own in steps)
    plot = _figure(
        "the last steps", height=160 + 40 * len(ranks), x_axis_label="ms", y_range=[str(r.rank) for r in ranks][::-1]
    )
    for name, color in COLORS.items():
        bars = {"y": [], "left": [], "right": [], "what": []}
        for rank, own in events.items():
            for event in own:
                if event["name"] == name and event["tid"] != trace.STEPS and event["ts"] >= begin:
                    bars["y"].append(str(rank))
                    bars["left"].append((event["ts"] - begin) / 1e3)
                    bars["right"].append((event["ts"] - begin + event["dur"]) / 1e3)
                    bars["what"].append(f"{name} {event['dur'] / 1e3:.2f} ms")
        if bars["y"]:
            height = 0.25 if name == "wait" else 0.8
            plot.hbar(
                "y", left="left", right="right", height=height, color=color, legend_label=name, source=_source(bars)
            )
    plot.hover.tooltips = [("rank", "@y"), ("", "@what")]
    plot.yaxis.axis_label = "rank"
    return _legend_below(plot)


def _events(rank):
    path = Path(f"{rank.run['stem']}.trace.json.gz")
    return [e for e in trace.read(path)["traceEvents"] if e["ph"] == "X"] if path.exists() else []


def _source(columns):
    from bokeh.models import ColumnDataSource

    return ColumnDataSource(columns)


def _legend_below(plot):
    if plot.legend:
        plot.add_layout(plot.legend[0], "below")
        plot.legend.orientation = "horizontal"
    return plot


def _shares(verdict):
    """Milliseconds per step by phase, one bar per rank: the numbers of the table."""
    names = [str(rank.rank) for rank in verdict.ranks]
    columns = {"rank": names, **{part: [1e3 * rank.phases[part] for rank in verdict.ranks] for part in PARTS}}
    plot = _figure("a step", height=160 + 30 * len(names), y_range=names[::-1], x_axis_label="ms")
    colors = [COLORS[part] for part in PARTS]
    plot.hbar_stack(
        PARTS, y="rank", height=0.8, color=colors, source=_source(columns), legend_label=list(PARTS), name="shares"
    )
    plot.hover.tooltips = [("rank", "@rank"), *((part, f"@{part}{{0.00}} ms") for part in PARTS)]
    plot.yaxis.axis_label = "rank"
    return _legend_below(plot)


def _counters(verdict):
    """Counters over time, one line per rank; and milliseconds per step over time."""
    start = min(rank.run["run"]["wall"] for rank in verdict.ranks)
    rows = [("a step", "ms", _steps), *((title, form, name) for name, title, form in COUNTERS)]
    for title, form, name in rows:
        lines = {}
        for rank in verdict.ranks[:SHOWN_RANKS]:
            points = name(rank) if callable(name) else _readings(rank, name, form)
            if points:
                lines[rank.rank] = ([at - start for at, _ in points], [value for _, value in points])
        if lines:
            unit = "MiB/s" if form == "rate" else "MiB" if form == "bytes" else ""
            plot = _figure(f"{title} {unit or form if form == 'ms' else unit}".strip(), height=180, x_axis_label="s")
            for rank, (times, values) in lines.items():
                source = _source({"t": times, "v": values, "rank": [str(rank)] * len(times)})
                plot.line("t", "v", source=source, color=_color(rank), width=1.5)
            plot.hover.tooltips = [("rank", "@rank"), ("s", "@t{0.0}"), ("", "@v{0.00}")]
            yield plot


def _steps(rank):
    return [(line["wall"], 1e3 * line["seconds"] / line["n"]) for line in rank.run["steps"]]


def _readings(rank, name, form):
    scale = 1 / 2**20 if form in ("rate", "bytes") else 1
    lines = rank.run.get("counters", ())
    return [(line["wall"], scale * line[name]) for line in lines if name in line]


def _color(rank):
    from bokeh.palettes import Category10

    return Category10[10][rank % 10]
