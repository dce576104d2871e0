"""One rank on gloo, which has no ReduceOp.AVG: haiscale.ddp trains like torch's DistributedDataParallel."""

import os

from ddp_common import against_torch
from ddp_models import Branches, mlp, vectors
from gloo import process_group


def main(rank, world_size, store):
    os.environ["HAISCALE_BUCKETS"] = ""
    with process_group(rank, world_size, store):
        for norm in (False, True):
            assert against_torch(lambda norm=norm: mlp(norm=norm), vectors, 4)["same"], norm
        options = {"find_unused_parameters": True}
        assert against_torch(lambda: Branches(lambda step: (step + rank) % 2), vectors, 4, options, options)["same"]
