"""GPipe: all forwards, then all backwards.

The bubble is (p - 1) / (m + p - 1) of the step for p stages of equal cost and m microbatches. Each rank keeps the
activations of all m microbatches, so use few microbatches, or recomputation.

Backward processes the microbatches in the order of forward; the paper uses the reverse order. Bubble and memory are the
same, and gradients are added in the same order as in a model without a pipeline.

Source: Huang et al., GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism, 2019,
https://arxiv.org/abs/1811.06965
"""

from haiscale.pipeline.actions import Order, Schedule, check_counts, in_turn


def schedule(stages: int, microbatches: int) -> Schedule:
    """One chunk on each rank. Raises ValueError for counts below one."""
    check_counts(stages=stages, microbatches=microbatches)
    orders = tuple(_order(rank, microbatches) for rank in range(stages))
    return Schedule("GPipe", microbatches, in_turn(stages), orders)


def _order(rank, microbatches):
    order = Order(microbatches, [rank])
    for _ in range(microbatches):
        order.forward(rank)
    for _ in range(microbatches):
        order.backward(rank)
    return tuple(order.actions)
