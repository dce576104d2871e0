"""The verdict on a run in words: where its time goes, the evidence, and what to try. The rules are in rules.py."""

import os
import socket
from collections import Counter, namedtuple
from dataclasses import dataclass, field
from statistics import fmean

from haiprof import arrivals, growth, record
from haiprof.record import PHASES

PARTS = (*PHASES, "other")
FEWEST = 30  # samples of the stack from which they tell anything

# Samples of the stack in one phase and state (stacks.py): their number, and where they were taken.
Sample = namedtuple("Sample", "phase doing n line text expression inner area")


@dataclass
class Rank:
    """Means of a rank's steps, without the first one and those of haiprof's own work, if there are others. Seconds per
    step."""

    rank: int
    steps: int
    seconds: float
    phases: dict[str, float]
    waits: dict[str, float]  # in calls, by their phase
    exposed: float  # from the last collective of a backward to its end
    slowest: float
    passes: float
    gap: float  # total seconds of validation between steps
    gpu: dict[str, float]
    counters: dict[str, list[float]]
    run: dict = field(repr=False)
    samples: list[Sample] = field(default_factory=list, repr=False)
    collecting: float = 0.0  # by Python's garbage collector
    messages: float = 0.0  # sent and received, of a pipeline
    batch: tuple = (0, 0.0)  # mean number of a model's input elements, and their standard deviation in shares of it
    workers: dict[str, float] = field(default_factory=dict)  # seconds per batch of each worker of a loader
    growth: float = 0.0  # bytes of memory per step

    def operators(self) -> dict:
        """The line of the last window of operators, or {}."""
        return (self.run.get("operators") or [{}])[-1]

    def communication(self) -> float:
        """Seconds per step for which the host was blocked by collectives, in calls and at the end of backward."""
        return sum(self.waits.values()) + self.exposed

    def mean(self, name):
        values = self.counters.get(name)
        return fmean(values) if values else None

    def top(self, name):
        return max(self.counters.get(name, ()), default=None)

    def share(self, chosen=lambda sample: True) -> float:
        """The share of the samples that are `chosen`; 0 if there are too few samples."""
        total = sum(sample.n for sample in self.samples if sample.phase != "meanwhile")
        found = sum(sample.n for sample in self.samples if sample.phase != "meanwhile" and chosen(sample))
        return found / total if total >= FEWEST else 0.0

    def lines(self, chosen, most=10) -> list[str]:
        """The lines of source with most of the chosen samples."""
        counts = Counter()
        for each in self.samples:
            if chosen(each):
                within = f", in {each.inner}" if each.inner else ""
                counts[f"{each.line}  {each.text}  ({each.doing}{within})"] += each.n
        total = sum(sample.n for sample in self.samples if sample.phase != "meanwhile")
        return [f"{n / total:4.0%}  {line}" for line, n in counts.most_common(most)] if total >= FEWEST else []

    def runs(self) -> bool:
        """Whether the process has not ended, as far as this host can tell."""
        head = self.run["run"]
        ended = "end" in self.run or (
            head["host"] == socket.gethostname() and not os.path.exists(f"/proc/{head['pid']}")
        )
        return not ended


@dataclass
class Finding:
    """share: of the time of a step, or of a limit; findings are sorted by it. advice: what to try, in order. lines: of
    source, where the time goes."""

    kind: str
    share: float
    text: str
    evidence: str
    advice: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)


@dataclass
class Verdict:
    ranks: list[Rank]
    late: arrivals.Lateness
    findings: list[Finding]

    @property
    def step(self) -> float:
        """Seconds per step, mean over the ranks."""
        return fmean(rank.seconds for rank in self.ranks) if self.ranks else 0.0

    @property
    def gpu(self) -> bool:
        """Whether a GPU was in use."""
        return any(rank.gpu or rank.counters.get("gpu.busy") for rank in self.ranks)


def summary(run) -> Rank | None:
    """Means of a rank; None if it has made no step."""
    lines = run.get("steps", [])
    later = [line for line in lines if line["first"] > 0]
    steady = [line for line in later if not line.get("own")] or later or lines
    n = sum(line["n"] for line in steady)
    if not n:
        return None
    total = {name: sum(line.get(name, 0) for line in steady) for name in ("collecting", "messages")}
    total |= {name: sum(line[name] for line in steady) for name in ("seconds", "passes", *PARTS)}
    waits = {name: sum(line["waited"].get(name, 0.0) for line in steady) / n for name in PARTS}
    recorded = [line for line in run.get("collectives", ()) if line.get("backwards")]
    backwards = sum(line["backwards"] for line in recorded)
    exposed = sum(line["exposed"] for line in recorded) / backwards if backwards else 0.0
    counters, held = {}, []
    for line in run.get("counters", ()):
        if line.get("own"):
            held.clear()  # it was memory of haiprof
            continue
        for name, value in line.items():
            if isinstance(value, int | float):
                counters.setdefault(name, []).append(value)
        if line.get("steps") and (memory := line.get("gpu.allocated", line.get("process.memory"))) is not None:
            held.append((line["steps"], memory))
    return Rank(
        rank=run["run"]["rank"],
        steps=sum(line["n"] for line in lines),
        seconds=total["seconds"] / n,
        phases={name: total[name] / n for name in PARTS},
        waits=waits,
        exposed=exposed * total["passes"] / n,
        slowest=max(line["slowest"] for line in steady),
        passes=total["passes"] / n,
        gap=sum(line["gap"] for line in lines),
        gpu=_gpu(steady),
        counters=counters,
        run=run,
        samples=[Sample(*row) for line in run.get("samples", ()) for row in line["rows"]],
        collecting=total["collecting"] / n,
        messages=total["messages"] / n,
        batch=_batch(steady),
        workers=_workers(lines),
        growth=growth.per_step(held),
    )


def _gpu(lines):
    own = [line["gpu"] for line in lines if "gpu" in line]
    n = sum(each["n"] for each in own)
    return {name: sum(each.get(name, 0.0) for each in own) / n for name in ("seconds", *PHASES)} if n else {}


def _batch(lines):
    n, elements, squares = (sum(line.get("batch", (0, 0, 0))[i] for line in lines) for i in range(3))
    if not elements:
        return 0, 0.0
    mean = elements / n
    return mean, max(0.0, squares / n - mean * mean) ** 0.5 / mean


def _workers(lines):
    rows = {}
    for line in lines:
        for worker, (n, seconds) in line.get("workers", {}).items():
            before = rows.get(worker, (0, 0.0))
            rows[worker] = before[0] + n, before[1] + seconds
    return {worker: seconds / n for worker, (n, seconds) in rows.items()}


def judge(runs) -> Verdict:
    """The verdict on `record.load`'s runs; its first finding is the most important."""
    from haiprof import rules

    ranks = [rank for rank in map(summary, runs) if rank is not None]
    warm = max((line["until"] for run in runs for line in run.get("steps", ()) if line["first"] == 0), default=0.0)
    late = arrivals.lateness(runs, warm)
    if not late.n:
        late = arrivals.lateness(runs)
    verdict = Verdict(ranks, late, [])
    if not ranks:
        text = "No optimizer has stepped while haiprof looked on, so there are no steps to tell of."
        reasons = sorted({why for run in runs if (why := record.missing(run).get("phases"))})
        if reasons:
            text = f"There are no steps to tell of: {'; '.join(reasons)}."
        verdict.findings.append(Finding("nothing", 0.0, text, f"{len(runs)} processes were profiled"))
        return verdict
    found = [found for rule in rules.RULES if (found := rule(verdict))]
    verdict.findings = sorted(found, key=lambda each: -each.share) or [rules.conclusion(verdict)]
    return verdict


def ms(seconds) -> str:
    return f"{seconds * 1e3:.1f} ms"


def captures(verdict) -> list[str]:
    """For each model captured by hfnn on each rank: replays, and why other calls ran uncaptured. Equal ones once."""
    found = []
    for rank in verdict.ranks:
        newest = {line["number"]: line for line in rank.run.get("captures", ())}
        for line in newest.values():
            why = [f"{n} as it is: {reason}" for reason, n in sorted(line["as_it_is"].items(), key=lambda row: -row[1])]
            found.append("; ".join([f"captured {line['model']}: {line['replayed']} replays", *why]))
    return list(dict.fromkeys(found))
