"""The simulation: exact on hand-computed cases and against the longest chain of dependencies; and its refusals."""

import sys
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from haiscale.pipeline import (
    SCHEDULES,
    Action,
    Costs,
    Schedule,
    Span,
    Timeline,
    check,
    draw,
    plot,
    predict,
)
from haiscale.pipeline.gpipe import schedule as gpipe
from haiscale.pipeline.one_f_one_b import schedule as one_f_one_b
from haiscale.pipeline.timeline import picture


def by_hand(*orders, placement=None, microbatches=None):
    """A schedule from "F0 F1' B0 ..." for each rank: kind, microbatch, and an apostrophe for each earlier chunk of the
    rank."""
    placement = placement or tuple(range(len(orders)))
    made = []
    for rank, order in enumerate(orders):
        mine = [chunk for chunk, home in enumerate(placement) if home == rank]
        words = [(word[0], word[1:].rstrip("'"), word.count("'")) for word in order.split()]
        made.append(tuple(Action(kind, mine[marks], int(number)) for kind, number, marks in words))
    found = max(action.microbatch for order in made for action in order) + 1
    return Schedule("by hand", microbatches or found, placement, tuple(made))


# Time


def test_times_by_hand():
    """Two ranks, chunks of different costs, and a message that takes 3."""
    costs = Costs(forward=(2, 5), input=(4, 1), weight=(1, 7), latency=3)
    timeline = predict(by_hand("F0 F1 I0 W0 B1", "F0 B0 F1 I1 W1"), costs)
    times = [[(str(action), start, end) for action, start, end in spans] for spans in timeline.spans]
    assert times == [
        [
            ("F of microbatch 0 on chunk 0", 0, 2),
            ("F of microbatch 1 on chunk 0", 2, 4),
            ("I of microbatch 0 on chunk 0", 21, 25),
            ("W of microbatch 0 on chunk 0", 25, 26),
            ("B of microbatch 1 on chunk 0", 27, 32),
        ],
        [
            ("F of microbatch 0 on chunk 1", 5, 10),
            ("B of microbatch 0 on chunk 1", 10, 18),
            ("F of microbatch 1 on chunk 1", 18, 23),
            ("I of microbatch 1 on chunk 1", 23, 24),
            ("W of microbatch 1 on chunk 1", 24, 31),
        ],
    ]
    assert timeline.makespan == 32 and timeline.peak == (2, 1)
    assert timeline.bubble == (18 / 32, 6 / 32)


def test_chunks_of_one_rank_send_no_messages():
    turning = by_hand("F0 F0' B0' B0", placement=(0, 0))
    assert predict(turning, Costs(latency=100)).makespan == 6
    # Four forwards, four backward-inputs, four messages, and two backward-weights; the other two fill waits.
    assert predict(SCHEDULES["zbv"](2, 1), Costs(latency=100)).makespan == 4 + 4 + 4 * 100 + 2


@pytest.mark.parametrize("name", sorted(SCHEDULES))
@settings(max_examples=15, deadline=None, derandomize=True)
@given(st.integers(1, 5), st.integers(1, 9), st.data())
def test_the_makespan_is_the_longest_chain(name, p, m, data):
    schedule = SCHEDULES[name](p, m)
    chunks = len(schedule.placement)
    each = st.lists(st.fractions(0, 5, max_denominator=12), min_size=chunks, max_size=chunks)
    forward, inputs, weight = (data.draw(each) for _ in range(3))
    latency = data.draw(st.fractions(0, 5, max_denominator=12))
    found = predict(schedule, Costs(forward, inputs, weight, latency))
    chain = longest_chain(schedule, forward, inputs, weight, latency)
    assert [[span.end for span in spans] for spans in found.spans] == chain


def longest_chain(schedule, forward, inputs, weight, latency):
    """When each action ends, by recursion over its dependencies."""
    place = schedule.placement
    home = {}
    for rank, order in enumerate(schedule.orders):
        for number, (kind, chunk, microbatch) in enumerate(order):
            home["I" if kind == "B" else kind, chunk, microbatch] = rank, number

    def arrival(at, kind, chunk, microbatch):
        return end(*home[kind, chunk, microbatch]) + (latency if place[chunk] != place[at] else 0)

    @lru_cache(None)
    def end(rank, number):
        kind, chunk, i = schedule.orders[rank][number]
        starts = [end(rank, number - 1)] if number else [0]
        if kind == "F" and chunk > 0:
            starts.append(arrival(chunk, "F", chunk - 1, i))
        if kind in "BI":
            starts.append(arrival(chunk, "F", chunk, i))
            if chunk + 1 < len(place):
                starts.append(arrival(chunk, "I", chunk + 1, i))
        if kind == "W":
            starts.append(arrival(chunk, "I", chunk, i))
        times = {"F": forward[chunk], "I": inputs[chunk], "W": weight[chunk], "B": inputs[chunk] + weight[chunk]}
        return max(starts) + times[kind]

    return [[end(rank, number) for number in range(len(order))] for rank, order in enumerate(schedule.orders)]


def test_a_microbatch_pays_the_latency_there_and_back():
    assert predict(one_f_one_b(4, 1), Costs(latency=Fraction(1, 4))).makespan == 12 + 2 * 3 * Fraction(1, 4)


def test_what_is_sent_takes_time_of_its_rank():
    """Activations forward and gradients back; chunks of the same rank send nothing."""
    assert predict(one_f_one_b(2, 1), Costs(sending=5)).makespan == 6 + 2 * 5
    turning = SCHEDULES["zbv"](1, 1)
    assert predict(turning, Costs(sending=5)).makespan == 6


def test_a_whole_backward_may_take_less_than_its_parts():
    costs = Costs(input=2, weight=2, backward=(3, 1))
    assert predict(one_f_one_b(2, 1), costs).makespan == 1 + 1 + 1 + 3
    assert (
        predict(SCHEDULES["zb-h1"](2, 1), costs).makespan == predict(SCHEDULES["zb-h1"](2, 1), Costs(1, 2, 2)).makespan
    )


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zbv", "dualpipev"])
def test_the_period_is_the_time_from_step_to_step(name):
    """Between steps simulated one after another, as one schedule."""
    arguments = (3, 6, 2) if name == "interleaved" else (3, 6)
    one, costs = SCHEDULES[name](*arguments), Costs(1, 2, 3, latency=Fraction(1, 2))

    def steps(count):
        orders = [
            tuple(a._replace(microbatch=a.microbatch + 6 * step) for step in range(count) for a in order)
            for order in one.orders
        ]
        return predict(Schedule(name, 6 * count, one.placement, tuple(orders)), costs).makespan

    timeline = predict(one, costs)
    assert timeline.period() == steps(5) - steps(4) < timeline.makespan + 1
    windows = [spans[-1].end - spans[0].start for spans in timeline.spans]
    assert timeline.period((4, 0, 70)) == windows[2] + 70 and timeline.period(2) == max(windows) + 2


def test_no_costs_at_all():
    timeline = predict(one_f_one_b(3, 3), Costs(0, 0, 0))
    assert timeline.makespan == 0 and timeline.bubble == (0, 0, 0)
    assert "|.|   0.0%      3" in draw(timeline, 80)


def test_inference_is_forwards_alone():
    forwards = tuple(order[:5] for order in gpipe(3, 5).orders)
    timeline = predict(replace(gpipe(3, 5), orders=forwards))
    assert timeline.makespan == 7 and timeline.bubble == (2 / 7,) * 3


# Memory


def test_activations_are_kept_from_forward_to_backward_weight():
    assert predict(by_hand("F0 I0 F1 W0 I1 W1")).peak == (2,)
    assert predict(by_hand("F0 I0 W0 F1 I1 W1")).peak == (1,)
    assert predict(by_hand("F0 B0 F1 B1 F2 F3 B2 B3")).peak == (2,)
    sized = predict(by_hand("F0 F0' B0' F1 B0 F1' B1' B1", placement=(0, 0)), Costs(activation=(10, Fraction(1, 2))))
    assert sized.peak == (20,)
    assert predict(one_f_one_b(3, 9), Costs(activation=[4, 3, 10])).peak == (12, 6, 10)


# Refusals


def moved(schedule, rank, change):
    orders = list(schedule.orders)
    order = list(orders[rank])
    change(order)
    orders[rank] = tuple(order)
    return replace(schedule, orders=tuple(orders))


def swap(a, b):
    def change(order):
        order[a], order[b] = order[b], order[a]

    return change


def add(*action):
    return lambda order: order.append(Action(*action))


# On rank 1 of four, with chunk 1.
WRONG = {
    "lost": (lambda order: order.pop(3), r"microbatch 0 on chunk 1 \(rank 1\) has the actions \['F'\]: each must be "),
    "twice": (add("F", 1, 0), r"microbatch 0 on chunk 1 .* has the actions \['B', 'F', 'F'\]"),
    "whole and split": (add("W", 1, 0), r"has the actions \['B', 'F', 'W'\]"),
    "half of a split": (lambda order: order.__setitem__(-1, Action("I", 1, 5)), r"\['F', 'I'\]"),
    "another rank's": (add("F", 0, 0), "rank 1 cannot run F of microbatch 0 on chunk 0"),
    "no such chunk": (add("F", 9, 0), r"it has chunks \(1,\)"),
    "no such chunk below": (add("F", -3, 0), r"it has chunks \(1,\)"),
    "no such microbatch": (add("F", 1, 6), "cannot run F of microbatch 6"),
    "no such microbatch below": (add("F", 1, -1), "cannot run F of microbatch -1"),
    "no such kind": (add("FB", 1, 0), "cannot run FB of microbatch 0"),
    "forwards in another order": (
        swap(0, 1),
        "sends rank 1 the activations for microbatch 0 on chunk 1 where that rank receives those for microbatch 1",
    ),
    "backwards in another order": (
        swap(3, 5),
        "rank 1 sends rank 0 the gradients for microbatch 1 on chunk 0 where that rank receives those for microbatch 0",
    ),
    "backward before its forward": (
        lambda order: order.insert(0, order.pop(3)),
        r"deadlock: .*rank 1 is to run B of microbatch 0 on chunk 1, which needs F of microbatch 0 on chunk 1 \(ra",
    ),
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_planted_fault_is_found_and_named(fault):
    right = one_f_one_b(4, 6)
    assert right.orders[1][3].kind == right.orders[1][5].kind == "B" and right.orders[1][-1] == Action("B", 1, 5)
    change, message = WRONG[fault]
    with pytest.raises(ValueError, match=message):
        predict(moved(right, 1, change))


def test_ranks_that_wait_for_each_other():
    """All actions exist once and messages match, but each rank first waits for the other's next action."""
    waiting = by_hand("F0 B0 F1 B1", "F0 F1 B0 B1")
    check(waiting)
    with pytest.raises(ValueError) as raised:
        predict(waiting)
    assert str(raised.value) == (
        "deadlock: rank 0 is to run B of microbatch 0 on chunk 0, which needs I of microbatch 0 on chunk 1 (rank 1); "
        "rank 1 is to run F of microbatch 1 on chunk 1, which needs F of microbatch 1 on chunk 0 (rank 0)"
    )


def test_a_weight_before_its_input():
    with pytest.raises(ValueError, match="deadlock: rank 0 is to run W of microbatch 0 on chunk 0, which needs I of "):
        predict(by_hand("F0 W0 I0"))


def test_messages_that_cross_in_the_wrong_order_are_found_without_a_deadlock():
    """Both chunks' activations use the same channel, from rank 0 to rank 1 and back."""
    crossing = by_hand("F0 F1 F0' F1' B0' B1' B0 B1", "F0 F1 F1' F0' B0' B1' B0 B1", placement=(0, 1, 0, 1))
    assert longest_chain(crossing, *[[1] * 4] * 3, 0)[0][-1] > 0  # with mailboxes instead of channels it would run
    with pytest.raises(ValueError, match=r"rank 0 sends rank 1 the activations for microbatch 0 on chunk 3 where"):
        predict(crossing)


@pytest.mark.parametrize("field", ("forward", "input", "weight", "latency", "activation"))
@pytest.mark.parametrize("wrong", (-1, float("nan"), float("inf"), "1", (1, 2), (1, 1, -1), [1, 1, 1, 1], None))
def test_costs_are_checked(field, wrong):
    with pytest.raises(ValueError, match=rf"Costs\({field}=.* is not accepted: give a number of at least 0"):
        predict(gpipe(3, 3), Costs(**{field: wrong}))


# Pictures


def test_the_picture_in_the_documentation_is_what_is_drawn():
    drawn = draw(predict(one_f_one_b(3, 4)), 60)
    assert drawn in picture.__doc__
    assert "\n   1 |..0F1F....0BBB2F1BBB3F2BBB..3BBB....|  33.3%      2\n" in drawn


def test_where_there_is_less_room_letters_go_and_then_numbers():
    timeline = predict(SCHEDULES["dualpipev"](1, 2))
    drawn = {width: draw(timeline, width).splitlines()[-4:] for width in (60, 56, 40)}
    assert "   0 |a0Fb0Fa1Fb0BBBBb1Fa0BBBBb1BBBBa1Ia1W|   0.0%      3" in drawn[60]
    assert "   0 |0F0F1Fb0BB1Fa0BBb1BB1I1W|   0.0%      3" in drawn[56]
    assert "   0 |FFF0BF0B1BIW|   0.0%      3" in draw(timeline, 40).splitlines()


def test_a_picture_has_the_terminal_s_width(monkeypatch):
    timeline = predict(gpipe(2, 30))
    for width in (50, 120):
        monkeypatch.setenv("COLUMNS", str(width))
        assert draw(timeline) == draw(timeline, width)
        assert width - 20 < max(map(len, draw(timeline).splitlines())) <= width


def test_a_picture_needs_a_column():
    timeline = predict(gpipe(3, 4))
    with pytest.raises(ValueError, match=r"width=10 is not accepted: give at least 22 for this timeline"):
        draw(timeline, 10)
    with pytest.raises(ValueError, match="width=21 is not accepted"):
        draw(timeline, 21)
    rows = [line.split("|") for line in draw(timeline, 22).splitlines() if line.count("|") == 2]
    assert [len(row[1]) for row in rows] == [1, 1, 1]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.sampled_from(sorted(SCHEDULES)), st.integers(1, 16), st.integers(1, 64), st.integers(26, 200), st.data())
def test_a_picture_fits_and_shows_who_works_when(name, p, m, width, data):
    timeline = predict(SCHEDULES[name](p, m), Costs(*(data.draw(st.integers(1, 9)) for _ in range(3))))
    lines = draw(timeline, width).splitlines()
    assert max(map(len, lines)) <= width
    rows = [line for line in lines if line.count("|") == 2]
    assert len(rows) == p
    columns = len(rows[0].split("|")[1])
    for row, spans, bubble, peak in zip(rows, timeline.spans, timeline.bubble, timeline.peak, strict=True):
        drawn = row.split("|")[1]
        assert len(drawn) == columns
        first, last = (int(time * columns / timeline.makespan + 1e-6) for time in (spans[0].start, spans[-1].end))
        assert set(drawn[: max(0, first - 1)] + drawn[last + 1 :]) <= {"."}
        # Stretches without a wait are drawn to within a column.
        runs = 1 + sum(a.end < b.start for a, b in pairwise(spans))
        assert abs(drawn.count(".") - bubble * columns) < runs + 1
        assert row.split("|")[2].split() == [f"{bubble:.1%}", str(peak)]


def test_a_measured_timeline_is_drawn_from_its_own_first_start():
    """As from an engine: clocks do not begin at 0, and times are not integers."""
    expected = predict(one_f_one_b(3, 4))
    spans = [[Span(a, 1e4 + start / 7, 1e4 + end / 7) for a, start, end in spans] for spans in expected.spans]
    measured = Timeline(expected.schedule, tuple(map(tuple, spans)), (3e9, 2e9, 1e9))
    first, second = (draw(timeline, 60).splitlines() for timeline in (expected, measured))
    assert [line.split("|")[1] for line in first[1:5]] == [line.split("|")[1] for line in second[1:5]]
    assert measured.bubble == pytest.approx(expected.bubble) and "3e+09" in draw(measured, 60)


def test_plot_writes_a_png_with_a_bar_for_each_action(tmp_path, monkeypatch):
    from matplotlib.axes import Axes

    called = {"broken_barh": [], "text": []}

    def listen(name, plain):
        def call(axes, *given, **named):
            called[name].append(given)
            return plain(axes, *given, **named)

        monkeypatch.setattr(Axes, name, call)

    for name in called:
        listen(name, getattr(Axes, name))
    timeline = predict(SCHEDULES["zbv"](2, 4), Costs(Fraction(1, 2), 1, 1))
    plot(timeline, tmp_path / "zbv.png")
    assert (tmp_path / "zbv.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    spans = [(rank, span) for rank, spans in enumerate(timeline.spans) for span in spans]
    bars = [(start, length, round(low + 0.4)) for ((start, length),), (low, _) in called["broken_barh"]]
    assert bars == [(start, end - start, rank) for rank, (_, start, end) in spans]
    assert [label for _, _, label in called["text"]] == [str(span.action.microbatch) for _, span in spans]


def test_plot_without_matplotlib_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="`pip install matplotlib`"):
        plot(predict(gpipe(1, 1)), tmp_path / "no.png")
