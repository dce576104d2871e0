"""Schedules: each action once and in order, all executable, memory as stated, bubbles as in theory."""

import subprocess
import sys
from collections import Counter
from fractions import Fraction
from functools import lru_cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from haiscale.pipeline import SCHEDULES, Costs, interleaved, predict

WHOLE, SPLIT = ("B", "F"), ("F", "I", "W")
PARTS = {
    "gpipe": {WHOLE},
    "1f1b": {WHOLE},
    "interleaved": {WHOLE},
    "zb-h1": {SPLIT},
    "zbv": {SPLIT},
    "dualpipev": {WHOLE, SPLIT},
}
thorough = settings(max_examples=60, deadline=None, derandomize=True)

stages = st.integers(1, 16)
microbatches = st.integers(1, 64)
whole = st.integers(1, 9)


@st.composite
def cases(draw):
    """(name, arguments of the schedule)."""
    name = draw(st.sampled_from(sorted(SCHEDULES)))
    return name, (draw(stages), draw(microbatches), *([draw(st.integers(1, 4))] if name == "interleaved" else []))


def make(case):
    name, arguments = case
    return SCHEDULES[name](*arguments)


def texts(schedule):
    """Each rank's actions as kind and microbatch, with an apostrophe for the rank's second chunk."""
    marks = {chunk: "'" * schedule.chunks(rank).index(chunk) for chunk, rank in enumerate(schedule.placement)}
    return [" ".join(f"{k}{i}{marks[c]}" for k, c, i in order) for order in schedule.orders]


# Orders


@thorough
@given(cases())
def test_each_action_is_there_once_where_its_chunk_is_and_in_order(case):
    (name, (p, m, *_)), schedule = case, make(case)
    assert (schedule.stages, schedule.microbatches) == (p, m)
    found = Counter(action for order in schedule.orders for action in order)
    assert set(found.values()) == {1}
    parts = {}
    for kind, chunk, microbatch in found:
        parts.setdefault((chunk, microbatch), []).append(kind)
    assert set(parts) == {(chunk, microbatch) for chunk in range(len(schedule.placement)) for microbatch in range(m)}
    assert {tuple(sorted(kinds)) for kinds in parts.values()} <= PARTS[name]
    for rank, order in enumerate(schedule.orders):
        assert {chunk for _, chunk, _ in order} == set(schedule.chunks(rank))
        at = {action: place for place, action in enumerate(order)}
        for (kind, chunk, microbatch), place in at.items():
            before = {"F": "", "B": "F", "I": "F", "W": "I"}[kind]
            assert not before or at[before, chunk, microbatch] < place
        # On each chunk microbatches are in order: outputs, gradients sent on, and accumulation of weight gradients.
        for chunk in schedule.chunks(rank):
            for kinds in ("F", "BI", "BW"):
                assert [i for kind, c, i in order if c == chunk and kind in kinds] == list(range(m))


@thorough
@given(stages, st.integers(1, 4))
def test_chunks_go_round_or_there_and_back(p, v):
    for name in ("gpipe", "1f1b", "zb-h1"):
        assert SCHEDULES[name](p, 2).placement == tuple(range(p))
    looped = interleaved.schedule(p, 2, v)
    assert [looped.chunks(rank) for rank in range(p)] == [tuple(r + k * p for k in range(v)) for r in range(p)]
    for name in ("zbv", "dualpipev"):
        assert [SCHEDULES[name](p, 2).chunks(rank) for rank in range(p)] == [(r, 2 * p - 1 - r) for r in range(p)]


# As drawn in the papers: GPipe figure 2 (but see gpipe.py), PipeDream-flush figure 2, Megatron-LM figure 4, Zero Bubble
# figure 2, and for the last two the phases of their figures at this size.
DRAWN = {
    ("gpipe", (2, 3)): ["F0 F1 F2 B0 B1 B2", "F0 F1 F2 B0 B1 B2"],
    ("1f1b", (3, 4)): [
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ],
    ("interleaved", (2, 4, 2)): [
        "F0 F1 F0' F1' F2 B0' F3 B1' F2' B0 F3' B1 B2' B3' B2 B3",
        "F0 F1 F0' B0' F1' B1' F2 B0 F3 B1 F2' B2' F3' B3' B2 B3",
    ],
    ("zb-h1", (3, 4)): [
        "F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3",
        "F0 F1 I0 F2 I1 W0 F3 I2 W1 I3 W2 W3",
        "F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3",
    ],
    ("zbv", (2, 4)): [
        "F0 F1 F2 F0' I0' W0' F1' I1' W1' F3 I0 W0 F2' I2' W2' I1 W1 F3' I3' W3' I2 W2 I3 W3",
        "F0 F0' F1 F1' I0' W0' F2 I0 W0 F2' I1' W1' F3 I1 W1 F3' I2' W2' I2 I3' I3 W2 W3' W3",
    ],
    ("dualpipev", (2, 4)): [
        "F0 F1 F2 F0' I0' W0' F1' F3 B1' F2' B0 B2' F3' B1 B3' I2 W2 I3 W3",
        "F0 F0' F1 F1' F2 B0' F2' B0 F3 B1' F3' B1 B2' B2 I3' I3 W3' W3",
    ],
}


@pytest.mark.parametrize("case", DRAWN, ids=lambda case: case[0])
def test_orders_are_those_of_the_papers(case):
    assert texts(make(case)) == DRAWN[case]


def published(name, rank, p, m, v=2):
    """A rank's actions, phase by phase, each as kind and the rank's chunk.

    For m >= 2 p; interleaved: a multiple of p.
    """
    after = p - 1 - rank
    if name == "interleaved":
        groups = [k // p % v for k in range(m * v)]
        forwards, backwards = [f"F{k}" for k in groups], [f"B{v - 1 - k}" for k in groups]
        ahead = (2 * after if v > 1 else after) + (v - 1) * p
        steady = "".join(map("".join, zip(forwards[ahead:], backwards, strict=False)))
        return "".join(forwards[:ahead]) + steady + "".join(backwards[m * v - ahead :])
    if name == "zbv":
        filling = "F0" * (2 * after + 1) + "F1F0" * rank + "F1I1W1" * (after + 1)
        steady = "F0I0W0F1I1W1" * (m - 2 * p + rank + 1) + "I0W0F1I1W1" * after
        late = "01" * rank + "0" * (after + 1)  # chunks whose weights are still pending after the last forward
        emptying = "I0I1" * rank + "".join(f"I0W{chunk}" for chunk in late[: after + 1])
        return filling + steady + emptying + "".join(f"W{chunk}" for chunk in late[after + 1 :])
    if name == "dualpipev":
        filling = "F0" * (2 * after) + "F0F1" * (rank + 1) + "I1W1F1" * after
        steady = "F0B1F1B0" * (m - 2 * p + rank + 1) + "B1F1B0" * after
        turns = "10" * (rank + 1)
        wholes, parts = turns[: rank + 1], turns[rank + 1 :]
        late = parts + "0" * after
        emptying = "".join(f"B{chunk}" for chunk in wholes) + "".join(f"I{chunk}" for chunk in parts)
        emptying += "".join(f"W{chunk}I0" for chunk in late[:after]) + "".join(f"W{chunk}" for chunk in late[after:])
        return filling + steady + emptying
    return {
        "gpipe": "F0" * m + "B0" * m,
        "1f1b": "F0" * after + "F0B0" * (m - after) + "B0" * after,
        "zb-h1": "F0" * after + "F0I0" * rank + "F0I0W0" * (m - p + 1) + "I0W0" * after + "W0" * rank,
    }[name]


def without(schedule, m):
    """The orders without the microbatches from m on."""
    return tuple(tuple(action for action in order if action.microbatch < m) for order in schedule.orders)


@thorough
@given(cases())
def test_orders_are_as_published_or_that_without_some_microbatches(case):
    name, (p, m, *v) = case
    full = SCHEDULES[name](p, max(2 * p, -(-m // p) * p if name == "interleaved" else m), *v)
    for rank, order in enumerate(full.orders):
        mine = full.chunks(rank)
        text = "".join(f"{kind}{mine.index(chunk)}" for kind, chunk, _ in order)
        assert text == published(name, rank, p, full.microbatches, *v)
    assert make(case).orders == without(full, m)


def test_fewer_microbatches_than_stages():
    assert texts(SCHEDULES["1f1b"](4, 2)) == ["F0 F1 B0 B1"] * 3 + ["F0 B0 F1 B1"]
    assert texts(SCHEDULES["zbv"](3, 1)) == ["F0 F0' I0' W0' I0 W0"] * 3
    assert interleaved.schedule(5, 7, 1).orders == SCHEDULES["1f1b"](5, 7).orders


@pytest.mark.parametrize("name", sorted(SCHEDULES))
@pytest.mark.parametrize("wrong", (0, -1, 2.0, "2", True, None))
def test_counts_are_checked(name, wrong):
    for arguments in ((wrong, 4), (4, wrong)):
        with pytest.raises(ValueError, match="give an integer of at least 1"):
            SCHEDULES[name](*arguments)
    with pytest.raises(ValueError, match=f"chunks={wrong!r} is not accepted"):
        interleaved.schedule(2, 2, wrong)


def test_nothing_but_python_is_needed():
    code = "import sys, haiscale.pipeline; assert not {'torch', 'matplotlib', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-P", "-c", code], check=True)


# Can they run?


@thorough
@given(cases(), st.data())
def test_no_costs_make_it_deadlock_or_break_an_order(case, data):
    schedule = make(case)
    chunks = len(schedule.placement)
    each = st.lists(st.integers(0, 9), min_size=chunks, max_size=chunks)
    latency = data.draw(st.integers(0, 20))
    forward, inputs, weight = (data.draw(each) for _ in range(3))
    timeline = predict(schedule, Costs(forward, inputs, weight, latency))
    took = {"F": forward, "I": inputs, "W": weight, "B": [sum(both) for both in zip(inputs, weight, strict=True)]}
    ends = {}
    for order, spans in zip(schedule.orders, timeline.spans, strict=True):
        assert [span.action for span in spans] == list(order)
        for (action, start, end), previous in zip(spans, (None, *spans), strict=False):
            assert end - start == took[action.kind][action.chunk] and start >= (previous.end if previous else 0)
            ends["I" if action.kind == "B" else action.kind, action.chunk, action.microbatch] = end

    def arrives(kind, chunk, microbatch, at):
        return ends[kind, chunk, microbatch] + (latency if schedule.placement[chunk] != schedule.placement[at] else 0)

    for spans in timeline.spans:
        for (kind, c, i), start, _ in spans:
            if kind == "F":
                assert c == 0 or start >= arrives("F", c - 1, i, c)
            elif kind == "W":
                assert start >= ends["I", c, i]
            else:
                assert start >= ends["F", c, i] and (c + 1 == chunks or start >= arrives("I", c + 1, i, c))


# Memory


def kept(schedule):
    """The most activations that each rank keeps, counted from forward to backward-weight."""
    peaks = []
    for order in schedule.orders:
        steps = [{"F": 1, "B": -1, "I": 0, "W": -1}[kind] for kind, _, _ in order]
        peaks.append(max(sum(steps[: n + 1]) for n in range(len(steps))))
    return peaks


def stated(name, p, m, v=2):
    """(bound on each rank, whether it is reached)."""
    if name == "interleaved" and v > 1:
        return [min(2 * (p - rank - 1) + (v - 1) * p + 1, v * m) for rank in range(p)], m % p == 0
    bound = {
        "gpipe": lambda rank: m,
        "1f1b": lambda rank: min(p - rank, m),
        "interleaved": lambda rank: min(p - rank, m),
        "zb-h1": lambda rank: min(p, m),
        "zbv": lambda rank: min(2 * p, 2 * m),
        "dualpipev": lambda rank: min(2 * p + 1, 2 * m),
    }[name]
    reached = name not in ("zbv", "dualpipev") or m >= 2 * p
    return [bound(rank) for rank in range(p)], reached and (name, v) != ("interleaved", 1)


@thorough
@given(cases())
def test_memory_is_as_stated(case):
    (name, arguments), schedule = case, make(case)
    bound, reached = stated(name, *arguments)
    peak = kept(schedule)
    assert peak == bound if reached else all(a <= b for a, b in zip(peak, bound, strict=True))
    assert predict(schedule).peak == tuple(peak)


# Bubbles. Exact: fractions for times, and == for "within 1 %".


def bubble_time(schedule, forward, inputs, weight):
    """How much longer the step is than a rank's work."""
    timeline = predict(schedule, Costs(*map(Fraction, (forward, inputs, weight))))
    work = len(schedule.placement) // schedule.stages * schedule.microbatches * (forward + inputs + weight)
    assert set(timeline.bubble) == {(timeline.makespan - work) / timeline.makespan}
    return timeline.makespan - work


@pytest.mark.parametrize("name", ("gpipe", "1f1b"))
@thorough
@given(stages, microbatches, whole, whole, whole)
def test_bubble_of_gpipe_and_1f1b(name, p, m, forward, inputs, weight):
    timeline = predict(SCHEDULES[name](p, m), Costs(*map(Fraction, (forward, inputs, weight))))
    assert set(timeline.bubble) == {Fraction(p - 1, m + p - 1)}


@thorough
@given(stages, st.integers(1, 64), st.integers(1, 4), whole, whole, whole)
def test_bubble_of_interleaved(p, rounds, v, forward, inputs, weight):
    m = p * min(rounds, max(1, 64 // p))
    timeline = predict(interleaved.schedule(p, m, v), Costs(*map(Fraction, (forward, inputs, weight))))
    assert set(timeline.bubble) == {Fraction(p - 1, v * m + p - 1)}


@thorough
@given(stages, microbatches, whole, whole, whole)
def test_bubble_of_zb_h1(p, m, forward, inputs, weight):
    m, weight = max(p, m), min(forward, inputs, weight)
    schedule = SCHEDULES["zb-h1"](p, m)
    assert bubble_time(schedule, forward, inputs, weight) == (p - 1) * (forward + inputs - weight)
    assert 3 * bubble_time(schedule, weight, weight, weight) == bubble_time(SCHEDULES["1f1b"](p, m), *[weight] * 3)


@thorough
@given(stages, microbatches, whole)
def test_bubble_of_zbv(p, m, time):
    m = max(2 * p, m)
    timeline = predict(SCHEDULES["zbv"](p, m), Costs(time, time, time))
    for rank, spans in enumerate(timeline.spans):
        assert (spans[0].start, spans[-1].end) == (rank * time, rank * time + 6 * m * time)  # no wait in between
    assert bubble_time(SCHEDULES["zbv"](p, m), time, time, time) == (p - 1) * time


@thorough
@given(stages, microbatches, whole)
def test_bubble_of_dual_pipe_v_where_pairs_are_two_actions(p, m, time):
    """The authors' formula, minus (p - 1) F: a pair's forward result leaves before its backward has ended."""
    schedule = SCHEDULES["dualpipev"](p, max(2 * p, m))
    forward, weight, backward = time, time, 2 * time
    pair = forward + backward
    assert bubble_time(schedule, time, time, time) == (p - 1) * (pair + backward - 3 * weight - forward)


@pytest.mark.parametrize("p", (1, 2, 3, 4, 5))
def test_bubble_of_dual_pipe_v_where_pairs_are_one_piece(p):
    """The authors' formula, (PP / 2 - 1)(F&B + B - 3W), with PP / 2 = p and F&B = F + B."""
    for m in (2 * p, 2 * p + 1, 3 * p):
        schedule = SCHEDULES["dualpipev"](p, m)
        assert makespan_in_pairs(schedule) - 6 * m == (p - 1) * (3 + 2 - 3)


def makespan_in_pairs(schedule):
    """The makespan at unit costs if a forward and the following whole backward begin and end together.

    By the longest chain of dependencies. The last rank's first pair is not one: its authors run it in turn.
    """
    pieces, place = [], {}
    for rank, order in enumerate(schedule.orders):
        rest, first = list(order), True
        while rest:
            paired = len(rest) > 1 and (rest[0].kind, rest[1].kind) == ("F", "B")
            length = 2 if paired and not (first and rank == schedule.stages - 1) else 1
            first = first and not paired
            for kind, chunk, microbatch in rest[:length]:
                place["I" if kind == "B" else kind, chunk, microbatch] = len(pieces)
            pieces.append((rank, rest[:length]))
            rest = rest[length:]

    def needs(kind, chunk, microbatch):
        if kind == "F":
            return [("F", chunk - 1, microbatch)]
        return [("I", chunk, microbatch)] if kind == "W" else [("I", chunk + 1, microbatch)]

    @lru_cache(None)
    def end(piece):
        rank, together = pieces[piece]
        before = [piece - 1] if piece and pieces[piece - 1][0] == rank else []
        before += [place[need] for action in together for need in needs(*action) if need in place]
        return max(map(end, before), default=0) + sum({"F": 1, "B": 2, "I": 1, "W": 1}[kind] for kind, _, _ in together)

    return max(map(end, range(len(pieces))))


def test_every_bubble_is_shorter_than_that_of_one_microbatch_at_a_time():
    for name, schedule in SCHEDULES.items():
        for p in range(2, 7):
            for m in range(2, 15):
                assert predict(schedule(p, m)).makespan < m * predict(schedule(p, 1)).makespan, (name, p, m)
