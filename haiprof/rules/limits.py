"""Rules on memory and disks."""

from haiprof.report import nbytes
from haiprof.rules.common import most, spent
from haiprof.verdict import Finding

MEMORY_FULL, SWAPPING, DISK_FULL = 0.92, 0.05, 0.005  # used; of the time; free
UNEXPLAINED = 64 * 2**20  # bytes of growth that are reported although no Python object holds them


def memory_full(verdict):
    worst = None
    for rank in verdict.ranks:
        for used, total, where in (
            ("gpu.used", "gpu.total", "GPU"),
            ("machine.memory", "machine.memory_total", "host"),
        ):
            if rank.top(total) and (worst is None or rank.top(used) / rank.top(total) > worst[0]):
                worst = rank.top(used) / rank.top(total), where, rank, used
    if worst is None or worst[0] < MEMORY_FULL:
        return None
    share, where, rank, used = worst
    return Finding(
        "memory near its end",
        share - MEMORY_FULL,  # a warning, not a use of time
        f"The {where}'s memory is {share:.0%} full on rank {rank.rank}.",
        f"the highest of {len(rank.counters[used])} readings",
        ['hfnn.convert(model, prefer="memory")', "haiscale.fsdp.FSDP(model, zero=3)", "torch.utils.checkpoint"],
    )


def growth(verdict):
    """A leak counts more, the sooner it fills the memory: all, if within an hour."""
    size, rank = most(verdict, lambda rank: rank.growth)
    if not size:
        return None
    used, total = (rank.top(name) or 0 for name in ("machine.memory", "machine.memory_total"))
    if rank.counters.get("gpu.allocated"):
        used, total = rank.top("gpu.used") or 0, rank.top("gpu.total") or 0
    hours = (total - used) / size * rank.seconds / 3600 if total > used else 0.0
    lines = rank.run.get("growth", [])
    rows = [row for line in lines for row in line["rows"]]
    graphs = [row for line in lines for row in line["graphs"]]
    held = rank.counters.get("gpu.allocated") or rank.counters.get("process.memory") or [0.0]
    if not (rows or graphs) and max(held) - min(held) < UNEXPLAINED:
        return None  # allocators and shared memory grow in a run's first seconds, too
    text = f"Memory grows by {size / 2**20:.2f} MB in each step on rank {rank.rank}"
    kind, advice = "memory grows", ["what each step appends to lists, dicts and caches"]
    if rows:
        what, line, n, own = rows[0]
        if what.endswith("its graph"):
            kind, advice = "leak of graphs", ["append loss.detach() or loss.item(), not loss"]
        elif "Tensor" in what or "Parameter" in what:
            kind = "leak of tensors"
        held = f"{n:.1f} of type {what}" if n else what
        text += f": {held}{f', allocated at {line},' if line else ''} stay alive in each step ({own / 2**20:.2f} MB)"
    elif graphs:
        what, line, n = graphs[0]
        kind, advice = "leak of graphs", ["add loss.detach() to a running sum, not loss"]
        text += f": the graph of a {what} grows by {n:.0f} nodes" + (f" at {line}" if line else "")
    evidence = f"{nbytes(rank.top('process.memory') or 0)} at most, rising in all parts of the run"
    evidence += f"; it is full in {hours:.1f} hours" if hours else ""
    return Finding(kind, 1 / max(1.0, hours) if hours else 1.0, f"{text}.", evidence, advice)


def swapping(verdict):
    def share(rank):
        readings = len(rank.run.get("counters", ()))
        reads = sum(1 for each in rank.counters.get("swap.read", ()) if each > 0) / max(1, readings)
        return max(rank.mean("pressure.memory") or 0.0, SWAPPING) if reads >= 0.2 else 0.0

    worst, rank = most(verdict, share)
    if worst < SWAPPING:
        return None
    return spent(
        "swapping",
        rank,
        worst,
        "The host's memory is full, and processes wait for pages from swap for {}",
        f"{nbytes(rank.mean('swap.read'))}/s are read from swap; tasks wait for memory {worst:.0%} of the time",
        ["fewer loader workers, smaller prefetch_factor", "a smaller batch", "swapoff, to fail instead"],
    )


def disk_full(verdict):
    for rank in verdict.ranks:
        lines = [line for line in rank.run.get("counters", ()) if line.get("disk.size")]
        if lines and lines[-1]["disk.free"] / lines[-1]["disk.size"] < DISK_FULL:
            free, folder = lines[-1]["disk.free"], lines[-1]["disk.folder"]
            return Finding(
                "disk full",
                1.0,
                f"The disk of {folder} is full on rank {rank.rank}: what writes there fails.",
                f"{nbytes(free)} free of {nbytes(lines[-1]['disk.size'])}",
                ["remove old checkpoints (haiscale.checkpoint keeps the newest ones)", "write to another disk"],
            )
    return None
