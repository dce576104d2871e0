"""Finds which rank makes the others wait at collectives, and for how long.

A rank that has arrived at a collective is blocked until the last rank arrives, unless it continues meanwhile. If it
arrives at the next collective before that, the first one was asynchronous, and only the last of such a burst counts
(the buckets of DDP). The waiting time of a rank is the union of these spans; each interval is charged to the rank that
arrived last.

So a rank that is slow in backward is also identified. Its backward takes as long as on the other ranks, because these
wait in theirs, but it waits least.
"""

from collections import defaultdict
from statistics import fmean


class Lateness:
    """charged: seconds that each rank has made the others wait, averaged over them. waits: seconds that each rank has
    waited. covered: seconds from the first to the last matched collective. n: the number of matched collectives.
    """

    def __init__(self):
        self.charged, self.waits = defaultdict(float), defaultdict(float)
        self.covered, self.n = 0.0, 0

    def per_second(self, rank) -> float:
        return self.charged[rank] / self.covered if self.covered else 0.0


def lateness(runs, since=0.0, until=float("inf")) -> Lateness:
    """For the collectives recorded by all ranks of a group, between two times (seconds since 1970)."""
    found, spans = Lateness(), []
    for ranks, rows in _groups(runs).items():
        common = sorted(set.intersection(*(set(rows[rank]) for rank in ranks)))
        common = [number for number in common if since <= min(rows[rank][number][0] for rank in ranks) < until]
        for block in _neighbours(common):
            times = {rank: [rows[rank][number] for number in block] for rank in ranks}
            spans.append(_charge(found, times))
        found.n += len(common)
    found.covered = sum(end - begin for begin, end in _union(spans))
    return found


def _groups(runs):
    """(group, its ranks) -> rank -> number of the collective -> (arrival, duration or None)."""
    found = defaultdict(lambda: defaultdict(dict))
    for run in runs:
        for line in run.get("collectives", ()):
            if line["ranks"] and len(line["ranks"]) > 1:
                own = found[line["backend"], line["group"], tuple(line["ranks"])][run["run"]["rank"]]
                timed = line["backend"] == "nccl"  # whose host times are not meaningful
                rows = ((number, (line["wall"] + at, duration)) for number, at, duration, _ in line["rows"])
                own.update(row for row in rows if row[1][1] is not None or not timed)
    return {ranks: rows for (*_, ranks), rows in sorted(found.items(), key=str) if all(rank in rows for rank in ranks)}


def _neighbours(numbers):
    """Runs of two or more consecutive numbers."""
    block = []
    for number in numbers:
        if block and number != block[-1] + 1:
            if len(block) > 1:
                yield block
            block = []
        block.append(number)
    if len(block) > 1:
        yield block


def _charge(found, times):
    """Charges consecutive collectives, except the first, whose waiting began before; returns the time from its end
    on."""
    ranks, n = list(times), len(next(iter(times.values())))
    durations = all(row[1] is not None for rows in times.values() for row in rows)
    lasts, ends = [], []
    for i in range(n):
        if durations:  # of GPU kernels, with meaningless host times: the last rank waits least
            lasts.append(min(ranks, key=lambda rank: times[rank][i][1]))
        else:
            lasts.append(max(ranks, key=lambda rank: times[rank][i][0]))
        ends.append(max(times[rank][i][0] for rank in ranks))
    for rank in ranks:
        reached = ends[0]
        for i in range(1, n):
            begin, duration = times[rank][i]
            if durations:
                waited = duration - times[lasts[i]][i][1]
            else:
                if i + 1 < n and times[rank][i + 1][0] < ends[i]:
                    continue  # it has continued
                waited = ends[i] - max(begin, reached)
                reached = max(reached, ends[i])
            if waited > 0 and lasts[i] != rank:
                found.waits[rank] += waited
                found.charged[lasts[i]] += waited / (len(ranks) - 1)
    return ends[0], ends[-1]


def _union(spans):
    joined = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1][1] = max(joined[-1][1], end)
        else:
            joined.append([begin, end])
    return joined


def phase_of(rank, late, phases) -> str:
    """The phase in which a rank is late by `late` seconds per step. phases: rank -> phase -> seconds per step, without
    calls that waited for collectives.

    If it is slow in data, forward, optimizer or other, these take longer than on the other ranks. Otherwise it is slow
    in backward, at whose end the others wait.
    """
    others = [own for other, own in phases.items() if other != rank]
    excess = {
        name: phases[rank][name] - fmean(own[name] for own in others)
        for name in ("data", "forward", "optimizer", "other")
    }
    worst = max(excess, key=excess.get)
    return worst if excess[worst] >= late / 2 else "backward"
