"""DualPipeV: two chunks on each rank, there and back, where a forward of one runs next to a backward of the other.

In the main phase each forward is directly followed by a whole backward of the rank's other chunk, and neither depends
on the other. So an engine may overlap the two: communication inside a layer (of experts, for example) with computation.
F, B and W are the times of a forward, of a whole backward and of a backward-weight on one chunk, and F&B is the time of
such a pair; p is the number of ranks, the authors' PP / 2, and m the number of microbatches.

Each rank keeps at most min(2 p + 1, 2 m) activations of chunks. The authors give the bubble as (p - 1)(F&B + B - 3W),
for pairs that are one unit: they wait for the inputs of both halves, and both results are sent at the end. If a pair is
two actions, as in `simulate`, F&B is F + B, each half waits and sends separately, and the bubble is (p - 1) F shorter.
(Both for m >= 2 p and F = W = B / 2.)

The authors require m >= 2 p microbatches. Fewer are legal here: the order for 2 p without the missing ones.

Sources: DeepSeek, DualPipe, 2025, https://github.com/deepseek-ai/DualPipe (DualPipeV); DeepSeek-V3 Technical Report,
2024, https://arxiv.org/abs/2412.19437; the half that suffices was pointed out by Sea AI Lab, the authors of ZB-V.
"""

from haiscale.pipeline.actions import Order, Schedule, scheduled, v_shape


def schedule(stages: int, microbatches: int) -> Schedule:
    """Two chunks on each rank, r and 2 * stages - 1 - r. Raises ValueError for counts below one."""
    return scheduled("DualPipeV", v_shape, _order, stages, microbatches)


def _order(rank, stages, microbatches):
    there, back = rank, 2 * stages - 1 - rank
    order = Order(microbatches, [there, back])
    before, after = rank + 1, stages - 1 - rank  # ranks, this one among the former
    # The pipeline fills: first in the forward direction, then in both.
    for _ in range(2 * after):
        order.forward(there)
    for _ in range(before):
        order.forward(there)
        order.forward(back)
    # The first gradients arrive. Their backward-weights fill the time until the next.
    for _ in range(after):
        order.input(back)
        order.weight()
        order.forward(back)
    for _ in range(max(microbatches - 2 * stages, 0) + before):
        order.forward(there)
        order.backward(back)
        order.forward(back)
        order.backward(there)
    for _ in range(after):
        order.backward(back)
        order.forward(back)
        order.backward(there)
    # The pipeline empties. From the middle on, backward-weights wait until there is nothing else to do.
    for k in range(2 * before):
        chunk = (back, there)[k % 2]
        if k < before:
            order.backward(chunk)
        else:
            order.input(chunk)
    for _ in range(after):
        order.weight()
        order.input(there)
    for _ in range(before):
        order.weight()
    return tuple(order.actions)
