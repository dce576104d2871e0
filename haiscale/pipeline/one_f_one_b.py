"""1F1B, with the flush of PipeDream-flush: after a warm-up each rank alternates one forward and one backward.

The bubble is the same as in GPipe, (p - 1) / (m + p - 1) of the step for p stages of equal cost and m microbatches, but
rank r keeps the activations of only min(p - r, m) microbatches.

Sources: Harlap et al., PipeDream: Fast and Efficient Pipeline Parallel DNN Training, 2018, https://arxiv.org/abs/1806.03377;
Narayanan et al., Memory-Efficient Pipeline-Parallel DNN Training, 2021, https://arxiv.org/abs/2006.09503
"""

from dataclasses import replace

from haiscale.pipeline import interleaved
from haiscale.pipeline.actions import Schedule


def schedule(stages: int, microbatches: int) -> Schedule:
    """One chunk on each rank. Raises ValueError for counts below one."""
    return replace(interleaved.schedule(stages, microbatches, 1), name="1F1B")
