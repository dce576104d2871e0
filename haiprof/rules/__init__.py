"""The rules of the verdict. Each looks at evidence of its own, and returns None where this is missing."""

from statistics import fmean

from haiprof.rules import gpu, limits, ranks, thread
from haiprof.rules.common import GPU_IDLE, attach, idleness
from haiprof.verdict import PARTS, PHASES, Finding

RULES = (
    *thread.SAMPLED_RULES, thread.garbage, thread.outside, thread.data,
    ranks.slow_rank, ranks.uneven_batches, ranks.pipeline, ranks.communication,
    gpu.synchronising, gpu.unpinned, gpu.host, gpu.throttled,
    limits.memory_full, limits.growth, limits.swapping, limits.disk_full,
)  # fmt: skip
COMPUTES = 0.5  # the share of a step that is the model's, and of that time in which a host computes, at least


def conclusion(verdict):
    """Where no rule has found anything: compute-bound if there is evidence that processors compute, else unknown."""
    means = {name: fmean(rank.phases[name] for rank in verdict.ranks) for name in PARTS}
    shares = ", ".join(f"{name} {means[name] / verdict.step:.0%}" for name in PARTS)
    model = sum(means[name] for name in PHASES[1:]) / verdict.step
    if verdict.gpu:
        busy = [each for rank in verdict.ranks if (each := rank.mean("gpu.busy")) is not None]
        computes = 1 - idleness(verdict) > 1 - GPU_IDLE if busy else None
        seen = (
            f"the GPUs are busy {1 - idleness(verdict):.0%} of the time"
            if busy
            else "no utilisation of the GPUs is known"
        )
    else:
        cores = [rank.mean("process.cpu") for rank in verdict.ranks]
        delays = [rank.mean("process.delay") or 0.0 for rank in verdict.ranks]
        known = all(each is not None for each in cores)
        computes = fmean(cores) + fmean(delays) >= COMPUTES * model if known else None
        seen = f"{fmean(cores):.2f} cores compute for a rank" if known else "no use of processors is known"
        if fmean(delays) > 0.1:
            seen += f"; it waits {fmean(delays):.0%} of the time for a processor that others use"
    if computes and model >= COMPUTES:
        return Finding(
            "compute-bound",
            model,
            "The processors compute forward, backward and optimizer nearly all the time.",
            f"{shares}; {seen}",
            [
                "hfnn.convert(model, optimizer), and hfnn.report(model) for what it swaps",
                "lower precision: torch.autocast",
                *attach(verdict.ranks[0], "--operators", "which operators take the time"),
            ],
        )
    return Finding(
        "unknown",
        0.0,
        "No cause stands out, and nothing shows that the processors compute.",
        f"{shares}; {seen}",
        attach(verdict.ranks[0], "--stacks", "the lines where the time goes"),
    )
