"""Rules on ranks that wait for one another."""

from statistics import fmean

from haiprof import arrivals
from haiprof.rules.common import attach, loader_of, stages, supply
from haiprof.verdict import PARTS, Finding, ms

LATE, COMMUNICATION_BOUND = 0.05, 0.2  # the share of a step from which something is reported
UNEVEN, HEAVIEST = 0.15, 1.25  # deviation of batches; work of a stage to the mean


def _third_by_third(verdict):
    """Lateness in each third of the run: what happens by chance is not in all of them."""
    runs = [rank.run for rank in verdict.ranks]
    lines = [line for run in runs for line in run.get("steps", ()) if line["first"] > 0]
    if not lines:
        return [verdict.late]
    begin, end = min(line["wall"] for line in lines), max(line["until"] for line in lines)
    cuts = [begin + (end - begin) * i / 3 for i in range(4)]
    found = [arrivals.lateness(runs, cuts[i], cuts[i + 1]) for i in range(3)]
    return [late for late in found if late.n] or [verdict.late]


def _latest(verdict):
    """(rank, share of a step that the others wait for it, what of it other processes on its cores take) if it is the
    same rank all the time, else (None, the share of a step that ranks wait for one another, 0)."""
    late = verdict.late
    total = sum(late.charged.values())
    worst = max(late.charged, key=late.charged.get, default=None)
    if worst is None or not late.covered:
        return None, 0.0, 0.0
    always = all(
        third.charged[worst] >= 0.6 * sum(third.charged.values()) and third.per_second(worst) >= LATE / 2
        for third in _third_by_third(verdict)
    )
    if not always:
        return None, total / late.covered, 0.0
    delays = {rank.rank: rank.mean("process.delay") or 0.0 for rank in verdict.ranks}
    others = [delay for rank, delay in delays.items() if rank != worst]
    excess = max(0.0, delays.get(worst, 0.0) - fmean(others)) if others else 0.0
    return worst, late.per_second(worst), excess


def _sizes(verdict):
    return ", ".join(f"rank {rank.rank} {rank.batch[0]:.0f} ± {rank.batch[1]:.0%}" for rank in verdict.ranks)


def slow_rank(verdict):
    late, step = verdict.late, verdict.step
    if len(verdict.ranks) < 2 or not late.n:
        return None
    worst, share, excess = _latest(verdict)
    own = next((rank for rank in verdict.ranks if rank.rank == worst), None)
    if own is None or share - excess < LATE:
        return None
    others = [rank for rank in verdict.ranks if rank is not own]
    phases = {rank.rank: {name: rank.phases[name] - rank.waits[name] for name in PARTS} for rank in verdict.ranks}
    phase = arrivals.phase_of(worst, share * step, phases)
    if phase == "data" and loader_of(own).get("num_workers"):
        supplies = [supply(rank) for rank in (own, *others)]
        if None in supplies or supplies[0] - fmean(supplies[1:]) < share * step / 2:
            return None  # the loaders are alike, or it is not known: the one that is ahead waits for the other
    if own.batch[0] > (1 + UNEVEN) * fmean(rank.batch[0] for rank in others) > 0:
        return _uneven(verdict, share)
    if min(map(late.per_second, late.charged)) >= LATE and (uneven := _uneven(verdict, share)):
        return uneven  # all wait for all: the batches are the larger cause
    waits = ", ".join(f"rank {rank} {ms(late.waits[rank] / late.covered * step)}" for rank in sorted(phases))
    advice = attach(own, "--stacks", f"what rank {worst} does in {phase}")
    advice.append("compare its clocks, its throttling and its cores with the other ranks' below")
    if verdict.gpu and phase != "data":
        advice.append("haiscale.launch binds ranks to cores near their GPU")
    name = f"{worst} ({own.run['run']['host']})"
    return Finding(
        "slow rank",
        share - excess,
        f"Rank {name} makes the others wait {ms(share * step)} of a step of {ms(step)}; it is late in {phase}.",
        f"waits of a step: {waits}; it came last to most of {late.n} collectives",
        advice,
        own.lines(lambda sample: sample.phase == phase),
    )


def uneven_batches(verdict):
    if len(verdict.ranks) < 2 or not verdict.late.n:
        return None
    worst, share, _ = _latest(verdict)
    return _uneven(verdict, share) if worst is None and share >= LATE else None


def _uneven(verdict, share):
    means = [rank.batch[0] for rank in verdict.ranks]
    if not all(means) or max(*(rank.batch[1] for rank in verdict.ranks), max(means) / min(means) - 1) < UNEVEN:
        return None
    return Finding(
        "uneven batches",
        share,
        f"Ranks wait for one another for {ms(share * verdict.step)} of a step of {ms(verdict.step)}: "
        "their batches differ.",
        f"elements of a batch: {_sizes(verdict)}",
        ["sort samples by length and deal them out to the ranks", "hfnn.data packs sequences to the same length"],
    )


def pipeline(verdict):
    """Of ranks that send one another messages in each step."""
    if not stages(verdict):
        return None
    work = {rank.rank: rank.seconds - sum(rank.waits.values()) for rank in verdict.ranks}
    heaviest = max(work, key=work.get)
    if work[heaviest] < HEAVIEST * fmean(work.values()):
        return None
    times = ", ".join(f"rank {rank} {ms(own)}" for rank, own in work.items())
    return Finding(
        "imbalance of a pipeline",
        1 - fmean(work.values()) / work[heaviest],
        f"The stage of rank {heaviest} works {ms(work[heaviest])} of a step of {ms(verdict.step)}; "
        "the others wait for it.",
        f"without waiting for messages a step takes {times}",
        ["haiscale.pipeline.partition splits by measured costs (layer_costs)", f"fewer layers on rank {heaviest}"],
    )


def communication(verdict):
    """The time of collectives, minus the waiting for late ranks, which other rules cover. On GPUs the host does not
    wait."""
    step, late = verdict.step, verdict.late
    if len(verdict.ranks) < 2 or not late.n or not late.covered or pipeline(verdict):
        return None
    spent = fmean(rank.communication() for rank in verdict.ranks)
    waiting = sum(late.waits.values()) / len(verdict.ranks) / late.covered * step
    delayed = fmean(rank.mean("process.delay") or 0.0 for rank in verdict.ranks)
    share = max(0.0, spent - waiting) / step - delayed
    if share < COMMUNICATION_BOUND:
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
