"""`from haiscale.ddp import DDP`: a replacement for torch's DistributedDataParallel. See docs/ddp.md."""

from haiscale.ddp.hooks import GradBucket
from haiscale.ddp.wrapper import DDP, DistributedDataParallel

__all__ = ["DDP", "DistributedDataParallel", "GradBucket"]
