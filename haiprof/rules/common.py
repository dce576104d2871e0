"""What the rules of the verdict share."""

import re
from statistics import fmean

from haiprof.verdict import Finding, ms

GPU_IDLE = 0.3  # the share of a step from which GPUs that are idle are reported
SYNCHRONISES = re.compile(r"\.(item|tolist|cpu|numpy|nonzero|synchronize)\(\)?|\b(float|int|bool)\(")
TRANSFERS = re.compile(r"\.(to|cuda|copy_)\(")


def spent(kind, rank, share, text, evidence, advice, chosen=None):
    """A finding on a rank's time. text: with the time of a step that it takes."""
    said = text.format(ms(share * rank.seconds)) + f" of a step of {ms(rank.seconds)} on rank {rank.rank}."
    return Finding(kind, share, said, evidence, advice, rank.lines(chosen) if chosen else [])


def most(verdict, share):
    return max(((share(rank), rank) for rank in verdict.ranks), key=lambda row: row[0])


def attach(rank, options, what) -> list[str]:
    """Advice for a process that still runs."""
    return [f"python -m haiprof attach {rank.run['run']['pid']} {options}: {what}"] if rank.runs() else []


def loader_of(rank):
    return (rank.run.get("loader") or [{}])[-1]


def stages(verdict):
    return len(verdict.ranks) > 1 and all(rank.messages >= 1 for rank in verdict.ranks)


def idleness(verdict):
    busy = [each for rank in verdict.ranks if (each := rank.mean("gpu.busy")) is not None]
    return 1 - fmean(busy) if busy else 0.0


def synchronises(sample):
    return bool(SYNCHRONISES.search(sample.expression)) and sample.phase != "data"


def transfers(sample):
    return bool(TRANSFERS.search(sample.expression))


def on_gpu(verdict, rank) -> float:
    """The share of a step outside the phases that the rules of GPUs explain."""
    calls = (synchronises, transfers)
    return rank.share(lambda each: each.phase == "other" and any(c(each) for c in calls)) if verdict.gpu else 0.0


def supply(rank):
    """Seconds in which the loader's workers make a batch together; None if unknown."""
    return fmean(rank.workers.values()) / len(rank.workers) if rank.workers else None
