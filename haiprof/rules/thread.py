"""Rules on what the training thread does: in the program's own code, by samples of its stack, and in the loader."""

import re
from statistics import median

from haiprof.rules.common import attach, loader_of, most, on_gpu, spent, stages, supply
from haiprof.stacks import DISK, LOCK, SLEEPS, WAITS
from haiprof.verdict import ms

# The share of a step from which something is reported; a worker's time to the median of the others'.
DATA_BOUND, OUTSIDE, SAMPLED, COLLECTING, SLOW_WORKER = 0.15, 0.15, 0.1, 0.1, 2.0
CROWDED = 0.3  # the share of time in which tasks wait for a core, from which waits say little
LOCKS = re.compile(r"^(async )?with |\.(acquire|wait|join|get|put|result)\(")


# What the training thread does, by samples of its stack. What the loader does there is data's.


def checkpoints(sample):
    return sample.area == "checkpoint" and sample.phase != "data"


def logs(sample):
    return (sample.area == "logging" or sample.expression.startswith("print(")) and sample.phase != "data"


def apart(sample):
    return sample.phase != "data" and not checkpoints(sample) and not logs(sample)


def sleeps(sample):
    return sample.doing == SLEEPS and apart(sample)


def locked(sample):
    waits = sample.area == "lock" or LOCKS.search(sample.expression) or LOCKS.search(sample.text)
    return sample.doing == LOCK and bool(waits) and apart(sample)


def reads_or_writes(sample):
    return sample.doing == DISK and not checkpoints(sample) and not logs(sample)


CAUSES = (checkpoints, logs, sleeps, locked, reads_or_writes)


def _sampled(kind, chosen, text, advice):
    def rule(verdict):
        share, rank = most(verdict, lambda rank: rank.share(chosen))
        if share < SAMPLED:
            return None
        others = rank.lines(lambda sample: sample.phase == "meanwhile", 1) if chosen is locked else []
        evidence = f"{share:.0%} of the samples of its stack" + "".join(
            f"; another thread meanwhile: {line.split('  ', 1)[1]}" for line in others
        )
        return spent(kind, rank, share, text, evidence, advice, chosen)

    return rule


SAMPLED_RULES = [
    _sampled(
        "checkpoints in the steps",
        checkpoints,
        "Checkpoints take {}",
        ["save less often", "haiscale.checkpoint: save(async_=True) writes while training goes on"],
    ),
    _sampled(
        "logging in the steps", logs, "Logging takes {}", ["log every 50 steps", "keep numbers, write them later"]
    ),
    _sampled("asleep", sleeps, "Outside the model, the training thread sleeps for {}", ["remove it from the loop"]),
    _sampled(
        "waits for a lock",
        locked,
        "The training thread waits for another thread for {}",
        ["hold the lock for less time in the other thread", "hand its results over in a queue, a step later"],
    ),
    _sampled(
        "slow disk",
        reads_or_writes,
        "The training thread waits for a disk for {}",
        ["read in the loader's workers (num_workers=...)", "hfrecord: samples in few large files", "a local disk"],
    ),
]


def explained(rank, phase) -> float:
    """The share of a step that other rules explain in a phase."""
    rules = [rule for rule in CAUSES if rank.share(rule) >= SAMPLED]
    return rank.share(lambda sample: sample.phase == phase and any(rule(sample) for rule in rules))


def garbage(verdict):
    share, rank = most(verdict, lambda rank: rank.collecting / rank.seconds)
    if share < COLLECTING:
        return None
    return spent(
        "garbage collection",
        rank,
        share,
        "Python's garbage collector takes {}",
        "measured by its callbacks (gc.callbacks)",
        [
            "gc.freeze() after the model is built",
            "gc.collect() not in each step; gc.disable(), and collect every 1000 steps",
        ],
    )


def outside(verdict):
    """What is in no phase and has no cause of its own."""
    if stages(verdict):
        return None

    def share(rank):
        own = rank.phases["other"] - rank.waits["other"]
        return own / rank.seconds - explained(rank, "other") - rank.collecting / rank.seconds - on_gpu(verdict, rank)

    worst, rank = most(verdict, share)
    if worst * (1 - (rank.mean("process.delay") or 0.0)) < OUTSIDE:  # the thread may only lack a processor
        return None

    def here(sample):
        return sample.phase == "other" and not any(cause(sample) for cause in CAUSES)

    waits = rank.share(lambda sample: here(sample) and sample.doing in (WAITS, LOCK))
    does = "waits for another process or the network" if waits > worst / 2 else "runs the program's own code"
    known = bool(rank.lines(here))
    return spent(
        "outside the model",
        rank,
        worst,
        f"Outside the model, the training thread {does} for {{}}" if known else "Outside the model pass {}",
        f"neither loader, forward, backward nor optimizer: {rank.phases['other'] / rank.seconds:.0%} of the time"
        + ("" if known else "; too few samples of the stack to say where"),
        ["move it out of the loop, or to the loader's workers", "tensors instead of loops over their elements"] if known
        else attach(rank, "--stacks", "the lines where this time goes"),
        here,
    )  # fmt: skip


def data(verdict):
    def share(rank):
        disk = rank.share(lambda sample: sample.phase == "data" and reads_or_writes(sample))
        return rank.phases["data"] / rank.seconds - disk

    worst, rank = most(verdict, share)
    if worst < DATA_BOUND:
        return None
    loader = loader_of(rank)
    workers = loader.get("num_workers") or 0
    made = ", ".join(f"{name}={value}" for name, value in loader.items() if name != "kind")
    evidence = [f"{worst:.0%} of the time in the loader" + (f" ({made})" if made else "")]
    if rank.workers:
        times = ", ".join(f"{w}: {ms(own)}" for w, own in sorted(rank.workers.items(), key=lambda row: -row[1])[:4])
        evidence.append(f"its workers take for a batch: {times}")
    if pressure := rank.mean("pressure.io"):
        evidence.append(f"tasks wait for disks {pressure:.0%} of the time" if pressure > 0.2 else "")
    evidence = "; ".join(filter(None, evidence))
    if len(rank.workers) > 1:
        slow = max(rank.workers, key=rank.workers.get)
        others = median(own for worker, own in rank.workers.items() if worker != slow)
        if rank.workers[slow] >= SLOW_WORKER * others:
            return spent(
                "slow worker",
                rank,
                worst,
                f"Worker {slow} of the loader makes the run wait {{}}",
                evidence,
                [f"what worker {slow} does differently: its shard, its file, its host mount"],
            )
    if rank.workers and supply(rank) < rank.seconds / 2 and (rank.mean("pressure.cpu") or 0.0) > CROWDED:
        return None  # the workers are ahead; they and the run wait for cores
    pinned = ", pin_memory=True" if verdict.gpu else ""
    advice = [f"DataLoader(num_workers={2 * workers or 4}, persistent_workers=True, prefetch_factor=4{pinned})"]
    if workers == 0:
        advice.insert(0, "the loader has no workers: it works while the model waits; give it num_workers=4")

    def in_loader(sample):
        return sample.phase == "data"

    return spent(
        "data-bound", rank, worst, "The run waits for data for {}", evidence, advice, None if workers else in_loader
    )
