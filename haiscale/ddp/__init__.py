"""`from haiscale.ddp import DDP`: torch's DistributedDataParallel with another engine. See docs/ddp.md."""

from haiscale.ddp.hooks import GradBucket
from haiscale.ddp.wrapper import DDP, DistributedDataParallel

__all__ = ["DDP", "DistributedDataParallel", "GradBucket"]
