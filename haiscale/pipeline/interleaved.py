"""Interleaved 1F1B: each rank has v chunks of 1/v the size, and the pipeline fills v times as fast.

Microbatches run in groups of p (the stages): a group passes the rank's first chunk, then its second, and so on;
backward begins with the last chunk. With m microbatches, a multiple of p, and chunks of equal cost the bubble is (p -
1) / (v m + p - 1) of the step, and rank r keeps min(2 (p - r - 1) + (v - 1) p + 1, v m) activations of chunks, for v >
1. There are about v times as many messages as in 1F1B, which is what v = 1 is.

If m is not a multiple of p, the last group is smaller: this is legal, with a larger bubble and no additional memory.

Source: Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM, 2021,
https://arxiv.org/abs/2104.04473
"""

from haiscale.pipeline.actions import Order, Schedule, check_counts, in_turn


def schedule(stages: int, microbatches: int, chunks: int = 2) -> Schedule:
    """`chunks` on each rank, r + v * stages for v in range(chunks). Raises ValueError for counts below one."""
    check_counts(stages=stages, microbatches=microbatches, chunks=chunks)
    orders = tuple(_order(rank, stages, microbatches, chunks) for rank in range(stages))
    return Schedule(f"interleaved 1F1B, {chunks} chunks", microbatches, in_turn(stages, chunks), orders)


def _order(rank, stages, microbatches, chunks):
    mine = range(rank, stages * chunks, stages)
    order = Order(microbatches, mine)
    passes = -(-microbatches // stages) * stages * chunks
    # With one chunk, the microbatch that a rank waits for is on its way back from the last rank. With more chunks, a
    # rank also works ahead by the same amount; otherwise the last ranks would wait for the second chunk's microbatches.
    ahead = (stages - 1 - rank) * min(chunks, 2) + (chunks - 1) * stages
    for k in range(ahead):
        order.forward(mine[k // stages % chunks])
    for k in range(passes):
        order.forward(mine[(ahead + k) // stages % chunks])
        order.backward(mine[-1 - k // stages % chunks])
    return tuple(order.actions)
