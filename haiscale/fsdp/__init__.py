"""Sharded data parallelism: ZeRO-1, 2 and 3 (arXiv 1910.02054) with one wrapper.

    from haiscale.fsdp import FSDP

    model = FSDP(model)

replaces torch.distributed.fsdp's FullyShardedDataParallel and fully_shard. docs/fsdp.md explains how it works.
"""

from haiscale.fsdp.options import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from haiscale.fsdp.wrapper import FSDP, FullyShardedDataParallel

__all__ = [
    "FSDP",
    "BackwardPrefetch",
    "CPUOffload",
    "FullyShardedDataParallel",
    "MixedPrecision",
    "ShardingStrategy",
]
