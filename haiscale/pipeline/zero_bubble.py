"""Zero bubble: backward in two parts. The part for the weights, for which no rank waits, fills the bubble.

F, I and W are the times of a forward, of a backward-input and of a backward-weight on one chunk; p the stages, m the
microbatches.

`h1` (ZB-H1) keeps min(p, m) activations on each rank, as many as 1F1B on its first rank. The bubble is (p - 1)(F + I -
W) for m >= p and W at most F and at most I: for three equal parts, a third of that of 1F1B.

`zbv` (ZB-V) has two chunks on each rank, there and back, so the first and the last are both on rank 0. Each rank keeps
at most min(2 p, 2 m) activations of chunks: as much memory as 1F1B on its first rank, whose chunks are twice as large.
For m >= 2 p and F = I = W there is no bubble in the authors' sense: no rank waits between its first and its last
action. The last rank begins (p - 1) F after the first, and the step is longer by this time.

Sources: Qi et al., Zero Bubble Pipeline Parallelism, 2023, https://arxiv.org/abs/2401.10241; Qi et al., Pipeline
Parallelism with Controllable Memory, 2024, https://arxiv.org/abs/2405.15362
"""

from haiscale.pipeline.actions import Order, Schedule, in_turn, scheduled, v_shape


def h1(stages: int, microbatches: int) -> Schedule:
    """One chunk on each rank. Raises ValueError for counts below one."""
    return scheduled("ZB-H1", in_turn, _h1_order, stages, microbatches)


def _h1_order(rank, stages, microbatches):
    order = Order(microbatches, [rank])
    for _ in range(stages - 1 - rank):
        order.forward(rank)
    for k in range(microbatches):
        order.forward(rank)
        order.input(rank)
        # In 1F1B later ranks keep fewer activations. The difference is used for postponed backward-weights.
        if k >= rank:
            order.weight()
    for _ in range(min(rank, microbatches)):
        order.weight()
    return tuple(order.actions)


def zbv(stages: int, microbatches: int) -> Schedule:
    """Two chunks on each rank, r and 2 * stages - 1 - r. Raises ValueError for counts below one."""
    return scheduled("ZB-V", v_shape, _zbv_order, stages, microbatches)


def _zbv_order(rank, stages, microbatches):
    there, back = rank, 2 * stages - 1 - rank
    order = Order(microbatches, [there, back])
    # The pipeline fills until as many microbatches have begun as fit into memory.
    for _ in range(2 * (stages - rank) - 1):
        order.forward(there)
    for _ in range(rank):
        order.forward(back)
        order.forward(there)
    for _ in range(stages - rank):
        order.forward(back)
        order.input(back)
        order.weight()
    # Both chunks in turn. From here on, six actions take one microbatch in and one out.
    for _ in range(max(microbatches, 2 * stages) - stages):
        order.forward(there)
        order.input(there)
        order.weight()
        order.forward(back)
        order.input(back)
        order.weight()
    # The pipeline empties: other ranks wait for gradients of inputs, and gradients of weights fill the time after that.
    for _ in range(rank):
        order.input(there)
        order.input(back)
    for _ in range(stages - rank):
        order.input(there)
        order.weight()
    for _ in range(2 * rank):
        order.weight()
    return tuple(order.actions)
