"""The verdict on a run in words: where its time goes, the evidence, and what to try."""

from dataclasses import dataclass, field
from statistics import fmean

from haiprof import arrivals, record
from haiprof.counters import THROTTLED
from haiprof.record import PHASES

PARTS = (*PHASES, "other")
# The share of a step from which something is reported.
DATA_BOUND, LATE, COMMUNICATION_BOUND, GPU_IDLE, MEMORY_FULL, THROTTLED_SHARE = 0.15, 0.05, 0.2, 0.3, 0.92, 0.1


@dataclass
class Rank:
    """Means of a rank's steps, without the first one if there are more. Seconds per step."""

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

    def communication(self) -> float:
        """Seconds per step for which the host was blocked by collectives, in calls and at the end of backward."""
        return sum(self.waits.values()) + self.exposed

    def mean(self, name):
        values = self.counters.get(name)
        return fmean(values) if values else None

    def top(self, name):
        return max(self.counters.get(name, ()), default=None)


@dataclass
class Finding:
    """share: of the time of a step, or of a limit; findings are sorted by it. advice: what to try, in order."""

    kind: str
    share: float
    text: str
    evidence: str
    advice: list[str] = field(default_factory=list)


@dataclass
class Verdict:
    ranks: list[Rank]
    late: arrivals.Lateness
    findings: list[Finding]

    @property
    def step(self) -> float:
        """Seconds per step, mean over the ranks."""
        return fmean(rank.seconds for rank in self.ranks) if self.ranks else 0.0


def summary(run) -> Rank | None:
    """Means of a rank; None if it has made no step."""
    lines = run.get("steps", [])
    steady = [line for line in lines if line["first"] > 0] or lines
    n = sum(line["n"] for line in steady)
    if not n:
        return None
    total = {name: sum(line[name] for line in steady) for name in ("seconds", "passes", *PARTS)}
    waits = {name: sum(line["waited"].get(name, 0.0) for line in steady) / n for name in PARTS}
    recorded = [line for line in run.get("collectives", ()) if line.get("backwards")]
    backwards = sum(line["backwards"] for line in recorded)
    exposed = sum(line["exposed"] for line in recorded) / backwards if backwards else 0.0
    counters = {}
    for line in run.get("counters", ()):
        for name, value in line.items():
            if isinstance(value, int | float):
                counters.setdefault(name, []).append(value)
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
    )


def _gpu(lines):
    own = [line["gpu"] for line in lines if "gpu" in line]
    n = sum(each["n"] for each in own)
    return {name: sum(each.get(name, 0.0) for each in own) / n for name in ("seconds", *PHASES)} if n else {}


def judge(runs) -> Verdict:
    """The verdict on `record.load`'s runs; its first finding is the most important."""
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
    found = (rule(verdict) for rule in (_slow_rank, _data, _communication, _host, _memory, _throttled))
    verdict.findings = sorted((each for each in found if each), key=lambda each: -each.share) or [_computes(verdict)]
    return verdict


def ms(seconds) -> str:
    return f"{seconds * 1e3:.1f} ms"


def _slow_rank(verdict):
    late, step = verdict.late, verdict.step
    if len(verdict.ranks) < 2 or not late.n:
        return None
    worst = max(late.charged, key=late.charged.get, default=None)
    total = sum(late.charged.values())
    share = late.per_second(worst) if worst is not None else 0.0
    if share < LATE or late.charged[worst] < 0.6 * total:
        return None
    phases = {rank.rank: {name: rank.phases[name] - rank.waits[name] for name in PARTS} for rank in verdict.ranks}
    phase = arrivals.phase_of(worst, share * step, phases) if worst in phases else "backward"
    name = next(f"{worst} ({rank.run['run']['host']})" for rank in verdict.ranks if rank.rank == worst)
    waits = ", ".join(f"rank {rank} {ms(late.waits[rank] / late.covered * step)}" for rank in sorted(phases))
    return Finding(
        "slow rank",
        share,
        f"Rank {name} makes the others wait {ms(share * step)} of a step of {ms(step)}; it is late in {phase}.",
        f"waits of a step: {waits}; it came last to most of {late.n} collectives",
        [
            f"python -m haiprof attach {_pid(verdict, worst)} --stacks: what rank {worst} does in {phase}",
            "compare its clocks, its throttling and its cores with the other ranks' below",
            "haiscale.launch binds ranks to cores near their GPU" if phase != "data" else LOADER,
        ],
    )


def _pid(verdict, rank):
    return next(each.run["run"]["pid"] for each in verdict.ranks if each.rank == rank)


LOADER = "DataLoader(num_workers=..., persistent_workers=True, prefetch_factor=4, pin_memory=True)"


def _data(verdict):
    worst = max(verdict.ranks, key=lambda rank: rank.phases["data"] / rank.seconds)
    share = worst.phases["data"] / worst.seconds
    if share < DATA_BOUND:
        return None
    loader = (worst.run.get("loader") or [{}])[-1]
    advice = [LOADER]
    if loader.get("num_workers") == 0:
        advice.insert(0, "the loader has no workers: it works while the model waits; give it num_workers=4")
    advice.append("hfnn.data packs sequences, so that no batch is spent on padding")
    made = ", ".join(f"{name}={value}" for name, value in loader.items() if name != "kind")
    return Finding(
        "data-bound",
        share,
        f"The run waits for data: {ms(worst.phases['data'])} of a step of {ms(worst.seconds)} on rank {worst.rank}.",
        f"{share:.0%} of the time in the loader" + (f" ({made})" if made else ""),
        advice,
    )


def _communication(verdict):
    """The time of collectives, minus the waiting for a late rank, which another rule covers."""
    step, late = verdict.step, verdict.late
    spent = fmean(rank.communication() for rank in verdict.ranks)
    waiting = sum(late.waits.values()) / len(verdict.ranks) / late.covered * step if late.covered else 0.0
    share = max(0.0, spent - waiting) / step
    if len(verdict.ranks) < 2 or share < COMMUNICATION_BOUND:
        return None
    return Finding(
        "communication-bound",
        share,
        f"Collectives take {ms(share * step)} of a step of {ms(step)}, beyond waiting for late ranks.",
        f"blocked {ms(spent)} a step, {ms(waiting)} of it until the last rank came",
        [
            "haiscale.ddp.DDP overlaps them with backward in buckets of measured sizes",
            "DDP(model, wire_dtype=torch.bfloat16), or torch.float8_e4m3fn with error_feedback=True, sends fewer bytes",
            'init_process_group("hfreduce"), and python -m hfreduce.tune for its plan',
            "accumulate gradients under model.no_sync()",
        ],
    )


def _host(verdict):
    busy = [rank.mean("gpu.busy") for rank in verdict.ranks]
    busy = [each for each in busy if each is not None and verdict.ranks[0].gpu]
    if not busy or 1 - fmean(busy) < GPU_IDLE:
        return None
    return Finding(
        "host-bound",
        1 - fmean(busy),
        f"The GPUs are idle {1 - fmean(busy):.0%} of the time: the host does not launch fast enough.",
        "; ".join([f"utilisation by NVML {fmean(busy):.0%}", *captures(verdict)]),
        [*_about_captures(verdict), 'torch.compile(model, mode="reduce-overhead")', "a larger batch"],
    )


def captures(verdict) -> list[str]:
    """For each model captured by hfnn on each rank: replays, and why other calls ran uncaptured. Equal ones once."""
    found = []
    for rank in verdict.ranks:
        newest = {line["number"]: line for line in rank.run.get("captures", ())}
        for line in newest.values():
            why = [f"{n} as it is: {reason}" for reason, n in sorted(line["as_it_is"].items(), key=lambda row: -row[1])]
            found.append("; ".join([f"captured {line['model']}: {line['replayed']} replays", *why]))
    return list(dict.fromkeys(found))


def _about_captures(verdict):
    lines = [line for rank in verdict.ranks for line in rank.run.get("captures", ())]
    if not lines:
        return ["hfnn.convert(model, optimizer, capture=True): forward and backward as CUDA graphs, in fewer kernels"]
    reasons = {reason: None for line in lines for reason in line["as_it_is"] if reason != "before recording"}
    advice = [f"hfnn.report(model), on calls that are not replayed: {reason}" for reason in reasons]
    return advice or ["python -m haiprof attach PID --stacks: what the host does between the replays"]


def _memory(verdict):
    worst = None
    for rank in verdict.ranks:
        for used, total, where in (
            ("gpu.used", "gpu.total", "GPU"),
            ("machine.memory", "machine.memory_total", "host"),
        ):
            if rank.top(total) and (worst is None or rank.top(used) / rank.top(total) > worst[0]):
                worst = rank.top(used) / rank.top(total), where, rank
    if worst is None or worst[0] < MEMORY_FULL:
        return None
    share, where, rank = worst
    return Finding(
        "memory near its end",
        share - MEMORY_FULL,  # a warning, not a use of time
        f"The {where}'s memory is {share:.0%} full on rank {rank.rank}.",
        f"the highest of {len(rank.counters['machine.memory'])} readings",
        ['hfnn.convert(model, prefer="memory")', "haiscale.fsdp.FSDP(model, zero=3)", "torch.utils.checkpoint"],
    )


def _throttled(verdict):
    for rank in verdict.ranks:
        readings = [int(value) for value in rank.counters.get("gpu.throttled", ())]
        share = sum(map(bool, readings)) / len(readings) if readings else 0.0
        if share >= THROTTLED_SHARE:
            names = [name for bit, name in THROTTLED.items() if any(value & bit for value in readings)]
            clock = f"{rank.mean('gpu.clock'):.0f} of {rank.top('gpu.clock_max'):.0f} MHz"
            return Finding(
                "clock throttled",
                share * 0.1,
                f"The GPU of rank {rank.rank} is slowed down ({', '.join(names)}) in {share:.0%} of the readings.",
                f"mean clock {clock}",
                ["nvidia-smi -q -d PERFORMANCE,TEMPERATURE on its host", "cooling, or the power limit"],
            )
    return None


def _computes(verdict):
    means = {name: fmean(rank.phases[name] for rank in verdict.ranks) for name in PARTS}
    shares = ", ".join(f"{name} {means[name] / verdict.step:.0%}" for name in PARTS)
    return Finding(
        "compute-bound",
        (means["forward"] + means["backward"]) / verdict.step,
        "Nothing keeps the model from computing.",
        shares,
        [
            "hfnn.convert(model, optimizer), and hfnn.report(model) for what it swaps",
            "lower precision: torch.autocast",
            "python -m haiprof attach PID --operators: which operators take the time",
        ],
    )
