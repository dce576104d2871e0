"""`report DIR` as one self-contained HTML file: Bokeh's script is included."""

import html
from pathlib import Path

from haiprof import report, trace
from haiprof.report import COUNTERS
from haiprof.verdict import PARTS, Verdict, captures

COLORS = {  # in the order of drawing
    "other": "#bbbbbb",
    "data": "#e6ab02",
    "forward": "#1b9e77",
    "inference": "#66c2a5",
    "backward": "#7570b3",
    "optimizer": "#d95f02",
    "wait": "#e7298a",
}
SHOWN_STEPS, SHOWN_RANKS = 12, 64  # limits of the timeline
STYLE = (
    "body{font:15px sans-serif;margin:2em auto;padding:0 1em;max-width:1100px}"
    "th,td{padding:.2em .8em;text-align:right;vertical-align:top}th small{display:block;font-weight:normal;color:#555}"
    ".text th,.text td{text-align:left}table{border-collapse:collapse}tr:nth-child(even){background:#f4f4f4}"
    "li{margin:.2em;overflow-wrap:anywhere}.wide,pre{overflow-x:auto}"
)
# What the columns mean that no phase of a step explains.
BLOCKED = "waits in collectives; part of the phases"
MAKES_WAIT = "others wait at collectives until this rank arrives, on average"


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
    Path(path).write_text(
        f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>haiprof</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style>'
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
    head = "".join(f"<th>{name}</th>" for name in ("rank", "steps", "a step (ms)", *(f"{part} (ms)" for part in PARTS)))
    head += f"<th>blocked (ms)<small>{BLOCKED}</small></th>"
    head += f"<th>makes others wait (ms)<small>{MAKES_WAIT}</small></th>"
    rows = []
    for rank in verdict.ranks:
        late = verdict.late.per_second(rank.rank) * verdict.step
        times = [rank.seconds, *(rank.phases[name] for name in PARTS), rank.communication(), late]
        cells = (rank.rank, rank.steps, *(f"{1e3 * seconds:.1f}" for seconds in times))
        cells = "".join(f"<td>{cell}</td>" for cell in cells)
        rows.append(f'<tr class="rank">{cells}</tr>')
    return f'<div class="wide"><table><tr>{head}</tr>{"".join(rows)}</table></div>'


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

    tools = "xpan,xwheel_zoom,box_zoom,reset,hover"
    plot = figure(title=title, sizing_mode="stretch_width", tools=tools, **more)
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
        "the last steps (ms)",
        height=160 + 40 * len(ranks),
        x_axis_label="ms",
        y_range=[str(r.rank) for r in ranks][::-1],
    )
    for name, color in COLORS.items():
        bars = {"y": [], "left": [], "right": [], "what": []}
        for rank, own in events.items():
            for event in own:
                # The color of "other" is under the whole step: it is what no phase covers.
                drawn = "other" if event["tid"] == trace.STEPS else event["name"]
                if drawn == name and event["ts"] >= begin:
                    bars["y"].append(str(rank))
                    bars["left"].append((event["ts"] - begin) / 1e3)
                    bars["right"].append((event["ts"] - begin + event["dur"]) / 1e3)
                    bars["what"].append(f"{'step' if name == 'other' else name} {event['dur'] / 1e3:.2f} ms")
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
    plot = _figure("means of a step (ms)", height=160 + 30 * len(names), y_range=names[::-1], x_axis_label="ms")
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
            unit = {"rate": "MiB/s", "bytes": "MiB", "{:.0%}": "%"}.get(form) or form.rpartition(" ")[2]
            plot = _figure(f"{title} ({unit})", height=180, x_axis_label="s", y_axis_label=unit)
            plot.y_range.start = 0
            for rank, (times, values) in lines.items():
                source = _source({"t": times, "v": values, "rank": [str(rank)] * len(times)})
                plot.line("t", "v", source=source, color=_color(rank), width=1.5)
            plot.hover.tooltips = [("rank", "@rank"), ("s", "@t{0.0}"), ("", "@v{0.00}")]
            yield plot


def _steps(rank):
    return [(line["wall"], 1e3 * line["seconds"] / line["n"]) for line in rank.run["steps"]]


def _readings(rank, name, form):
    scale = 1 / 2**20 if form in ("rate", "bytes") else 100 if form == "{:.0%}" else 1
    lines = rank.run.get("counters", ())
    return [(line["wall"], scale * line[name]) for line in lines if name in line]


def _color(rank):
    from bokeh.palettes import Category10

    return Category10[10][rank % 10]
