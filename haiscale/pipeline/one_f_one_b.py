"""1F1B, with the flush of PipeDream-flush: after a warm-up each rank alternates one forward and one backward.

The bubble is that of GPipe, (p - 1) / (m + p - 1) of the step for p stages of equal cost and m microbatches, but rank r
keeps the activations of min(p - r, m) microbatches only.

Sources: Harlap et al., PipeDream: Fast and Efficient Pipeline Parallel DNN Training, 2018, https://arxiv.org/abs/1806.03377;
Narayanan et al., Memory-Efficient Pipeline-Parallel DNN Training, 2021, https://arxiv.org/abs/2006.09503
"""

from haiscale.pipeline.actions import Order, Schedule, check_counts, in_turn


def schedule(stages: int, microbatches: int) -> Schedule:
    """One chunk on each rank. Raises ValueError for counts below one."""
    check_counts(stages=stages, microbatches=microbatches)
    orders = tuple(_order(rank, stages, microbatches) for rank in range(stages))
    return Schedule("1F1B", microbatches, in_turn(stages), orders)


def _order(rank, stages, microbatches):
    order = Order(microbatches, [rank])
    for _ in range(stages - 1 - rank):
        order.forward(rank)
    for _ in range(microbatches):
        order.forward(rank)
        order.backward(rank)
    return tuple(order.actions)
