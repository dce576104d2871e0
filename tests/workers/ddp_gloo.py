"""One rank on gloo, which has no ReduceOp.AVG: haiscale.ddp trains there as torch's DistributedDataParallel does.

python ddp_gloo.py RANK WORLD_SIZE STORE
"""

import os
import sys

from ddp_common import against_torch
from ddp_models import Branches, mlp, vectors
from ranks import process_group


def main(rank, world_size, store):
    os.environ["HAISCALE_BUCKETS"] = ""
    with process_group(rank, world_size, store):
        for norm in (False, True):
            assert against_torch(lambda norm=norm: mlp(norm=norm), vectors, 4)["same"], norm
        options = {"find_unused_parameters": True}
        assert against_torch(lambda: Branches(lambda step: (step + rank) % 2), vectors, 4, options, options)["same"]


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
