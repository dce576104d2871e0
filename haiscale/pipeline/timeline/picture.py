"""A timeline as a picture: `draw` for a terminal, `plot` for a file.

1F1B: 3 stages, 4 microbatches; makespan 18
rank                                      | bubble   peak
   0 |0F1F2F........0BBB3F1BBB..2BBB..3BBB|  33.3%      3
   1 |..0F1F....0BBB2F1BBB3F2BBB..3BBB....|  33.3%      2
   2 |....0F0BBB1F1BBB2F2BBB3F3BBB........|  33.3%      1
number: microbatch; F forward; B backward
"""

import shutil
import string
import textwrap
from os import PathLike

from haiscale.pipeline.actions import BACKWARD, FORWARD, INPUT, KINDS, WEIGHT
from haiscale.pipeline.timeline.simulate import Timeline

NAMES = {FORWARD: "forward", BACKWARD: "backward", INPUT: "backward of inputs", WEIGHT: "backward of weights"}
COLOURS = {FORWARD: "#6fa8dc", BACKWARD: "#93c47d", INPUT: "#76a5af", WEIGHT: "#f6b26b"}


def draw(timeline: Timeline, width: int | None = None) -> str:
    """A timeline as ASCII art.

    A line is a rank, and a column is an interval of time. An action is drawn as its microbatch followed by its kind,
    repeated to fill its columns. If ranks have several chunks, a letter in front shows which of the rank's chunks it
    is. If there is not enough room, the letter is dropped, then the number; actions shorter than a column may be left
    out. At the end of a line are the idle part of the makespan and the maximum number of kept activations.

    Args:
        timeline: Predicted or measured.
        width: Columns of a line at most; None: those of the terminal.

    Raises:
        ValueError: `width` leaves no column.
    """
    width = shutil.get_terminal_size().columns if width is None else width
    tails = [f"| {bubble:6.1%} {peak:>6g}" for bubble, peak in _figures(timeline)]
    heads = [f"{rank:4} |" for rank in range(len(tails))]
    room = width - max(map(len, heads)) - max(map(len, tails))
    if room < 1:
        raise ValueError(f"width={width} is not accepted: give at least {width - room + 1} for this timeline")
    scale, columns = _scale(timeline, room)
    title = f"rank  {'':{columns}}| bubble   peak"
    rows = [head + _row(timeline, rank, scale, columns) + tails[rank] for rank, head in enumerate(heads)]
    caption, legend = (textwrap.wrap(text(timeline), width) for text in (_caption, _legend))
    return "\n".join([*caption, title, *rows, *legend])


def _figures(timeline):
    """(bubble, peak) of each rank, as floats: fractions cannot be formatted before Python 3.12."""
    return [(float(bubble), float(peak)) for bubble, peak in zip(timeline.bubble, timeline.peak, strict=True)]


def _scale(timeline, room):
    """Columns per unit of time, and in total: an integer for the shortest action, if there is room."""
    makespan = timeline.makespan
    if not makespan:
        return 0.0, 1
    times = [span.end - span.start for spans in timeline.spans for span in spans]
    shortest = min(time for time in times if time)
    each = int(room * shortest / makespan)
    scale = each / shortest if each else room / makespan
    return float(scale), max(1, _column(makespan, scale))


def _column(time, scale):
    return int(time * scale + 1e-6)  # 1e-6: compensates for rounding below an integer


def _row(timeline, rank, scale, columns):
    begin = min(spans[0].start for spans in timeline.spans if spans)
    chunks = timeline.schedule.chunks(rank)
    row = ["."] * columns
    for action, start, end in timeline.spans[rank]:
        first, last = _column(start - begin, scale), _column(end - begin, scale)
        room = last - first
        letter = string.ascii_lowercase[chunks.index(action.chunk) % 26] if len(chunks) > 1 else ""
        labels = (f"{letter}{action.microbatch}", str(action.microbatch))
        label = next((label for label in labels if len(label) < room), "")
        row[first:last] = label.ljust(room, action.kind)
    return "".join(row)


def _caption(timeline):
    schedule = timeline.schedule
    stages = f"{schedule.stages} stage{'s' if schedule.stages > 1 else ''}"
    microbatches = f"{schedule.microbatches} microbatch{'es' if schedule.microbatches > 1 else ''}"
    return f"{schedule.name}: {stages}, {microbatches}; makespan {float(timeline.makespan):.6g}"


def _legend(timeline):
    there = {span.action.kind for spans in timeline.spans for span in spans}
    kinds = "; ".join(f"{kind} {NAMES[kind]}" for kind in KINDS if kind in there)
    several = len(timeline.schedule.placement) > timeline.schedule.stages
    letters = "; a, b, ... the rank's chunks" if several else ""
    return f"number: microbatch; {kinds}{letters}"


def plot(timeline: Timeline, path: str | PathLike[str], width: float = 14.0) -> None:
    """Writes the picture to a file. Later chunks of a rank are darker.

    Args:
        timeline: Predicted or measured.
        path: With the ending of a format that matplotlib has, such as .png, .svg or .pdf.
        width: Inches.

    Raises:
        ImportError: matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as why:
        raise ImportError("haiscale.pipeline.plot needs matplotlib: `pip install matplotlib`") from why
    from matplotlib.patches import Patch

    stages = len(timeline.spans)
    figure = Figure(figsize=(width, 1.6 + 0.4 * stages), layout="constrained")
    axes = figure.add_subplot()
    for rank in range(stages):
        _bars(axes, timeline, rank, width)
    figures = enumerate(_figures(timeline))
    names = [f"rank {rank}: {bubble:.1%} bubble, peak {peak:g}" for rank, (bubble, peak) in figures]
    axes.set_yticks(range(stages), names)
    axes.set_ylim(stages - 0.5, -0.5)
    axes.set_xlabel("time")
    axes.set_title(_caption(timeline))
    there = {span.action.kind for spans in timeline.spans for span in spans}
    patches = [Patch(color=COLOURS[kind], label=NAMES[kind]) for kind in KINDS if kind in there]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches))
    figure.savefig(path, dpi=150)


def _bars(axes, timeline, rank, width):
    from matplotlib.colors import to_rgb

    chunks, makespan = timeline.schedule.chunks(rank), float(timeline.makespan)
    for action, start, end in timeline.spans[rank]:
        start, length = float(start), float(end - start)
        shade = 1 - 0.4 * chunks.index(action.chunk) / len(chunks)
        colour = tuple(part * shade for part in to_rgb(COLOURS[action.kind]))
        axes.broken_barh([(start, length)], (rank - 0.4, 0.8), facecolors=colour, edgecolors="white", linewidth=0.5)
        # About the width of a digit at this size of type, in inches of the figure.
        if makespan and length / makespan * width > 0.09 * (1 + len(str(action.microbatch))):
            axes.text(start + length / 2, rank, str(action.microbatch), ha="center", va="center", fontsize=7)
