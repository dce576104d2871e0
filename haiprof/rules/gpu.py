"""Rules on GPUs that are idle or slow."""

from statistics import fmean

from haiprof.counters import THROTTLED
from haiprof.rules.common import GPU_IDLE, attach, idleness, loader_of, most, spent, synchronises, transfers
from haiprof.rules.thread import explained
from haiprof.verdict import Finding, captures, ms

SAMPLED, THROTTLED_SHARE = 0.1, 0.1  # of the samples of the stack; of the readings of the clocks
SMALL_KERNEL, MANY_KERNELS = 15e-6, 50  # mean seconds; number per step


def _launches(rank):
    """What torch.profiler has counted per step, if asked: kernels, their seconds, those of copies from pageable
    memory."""
    lines = [line["gpu"] for line in rank.run.get("operators", ()) if line.get("gpu")]
    return lines[-1] if lines else {}


def synchronising(verdict):
    share, rank = most(verdict, lambda rank: rank.share(synchronises))
    idle = idleness(verdict)
    if not verdict.gpu or idle < GPU_IDLE or share < SAMPLED:
        return None
    return spent(
        "synchronising calls",
        rank,
        share,
        "The host waits for its GPU for {}, and the GPU then for the host",
        f"{share:.0%} of the samples of its stack are in such calls; the GPUs are idle {idle:.0%} of the time",
        ["keep losses as tensors, and read them every 50 steps", "torch.where and masks instead of `if` on a tensor"],
        synchronises,
    )


def unpinned(verdict):
    if not verdict.gpu:
        return None
    share, rank = most(verdict, lambda rank: rank.share(transfers))
    counted = _launches(rank).get("pageable", 0.0)
    pinned = loader_of(rank).get("pin_memory")
    share = max(share, counted / rank.seconds)
    if share < SAMPLED or (pinned and not counted):
        return None
    seen = f"torch.profiler saw copies from pageable memory for {ms(counted)} a step" if counted else ""
    seen = (
        seen
        or f"{share:.0%} of the samples of its stack are in copies to the GPU, and the loader has pin_memory={pinned}"
    )
    return spent(
        "transfers from unpinned memory",
        rank,
        share,
        "Copies from memory that is not pinned take {}",
        seen,
        ["DataLoader(pin_memory=True), and x.to(device, non_blocking=True)"],
        transfers,
    )


def host(verdict):
    """GPUs that are idle although the host does nothing else."""
    idle = idleness(verdict)
    if not verdict.gpu or idle < GPU_IDLE or not verdict.ranks[0].gpu:
        return None
    calls = (synchronises, transfers)

    def other(rank):
        seen = rank.share(lambda sample: any(c(sample) for c in calls))
        return (
            seen
            + rank.phases["data"] / rank.seconds
            + max(explained(rank, "other"), rank.phases["other"] / rank.seconds)
        )

    share = idle - fmean(other(rank) for rank in verdict.ranks)
    if share < GPU_IDLE:
        return None
    evidence = "; ".join([f"utilisation by NVML {1 - idle:.0%}", *captures(verdict)])
    advice = [*_about_captures(verdict), 'torch.compile(model, mode="reduce-overhead")', "a larger batch"]
    counted = _launches(verdict.ranks[0])
    n = counted.get("kernels", 0)
    if n >= MANY_KERNELS and counted["seconds"] / n < SMALL_KERNEL:
        mean = counted["seconds"] / n * 1e6
        text = f"The GPUs are idle {idle:.0%} of the time: a step launches {n:.0f} kernels of {mean:.0f} us each."
        return Finding("many small kernels", share, text, f"counted by torch.profiler; {evidence}", advice)
    text = f"The GPUs are idle {idle:.0%} of the time: the host does not launch fast enough."
    return Finding("host-bound", share, text, evidence, advice)


def _about_captures(verdict):
    lines = [line for rank in verdict.ranks for line in rank.run.get("captures", ())]
    if not lines:
        return ["hfnn.convert(model, optimizer, capture=True): forward and backward as CUDA graphs, in fewer kernels"]
    reasons = {reason: None for line in lines for reason in line["as_it_is"] if reason != "before recording"}
    advice = [f"hfnn.report(model), on calls that are not replayed: {reason}" for reason in reasons]
    return advice or attach(verdict.ranks[0], "--stacks", "what the host does between the replays")


def throttled(verdict):
    for rank in verdict.ranks:
        readings = [int(value) for value in rank.counters.get("gpu.throttled", ())]
        share = sum(map(bool, readings)) / len(readings) if readings else 0.0
        if share >= THROTTLED_SHARE:
            names = [name for bit, name in THROTTLED.items() if any(value & bit for value in readings)]
            clock, most = rank.mean("gpu.clock"), rank.top("gpu.clock_max")
            lost = 1 - clock / most if clock and most else 0.1
            return Finding(
                "clock throttled",
                share * lost,
                f"The GPU of rank {rank.rank} is slowed down ({', '.join(names)}) in {share:.0%} of the readings.",
                f"mean clock {clock:.0f} of {most:.0f} MHz" if clock and most else "by NVML",
                ["nvidia-smi -q -d PERFORMANCE,TEMPERATURE on its host", "cooling, or the power limit"],
            )
    return None
