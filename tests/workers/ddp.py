"""Rank programs of tests/haiscale/test_ddp.py: cases, most against torch's DistributedDataParallel.

A case returns {what: value}, for the test to check. All cases of a run share one process group. They are in
ddp_training.py and ddp_behaviour.py, models in ddp_models.py.
"""

import contextlib
import os
import traceback
import warnings
from datetime import timedelta

import ddp_behaviour  # noqa: F401 (fills CASES)
import ddp_training  # noqa: F401 (fills CASES)
import torch
import torch.distributed as dist
from ddp_common import CASES
from ddp_models import DEVICE

import hfreduce  # noqa: F401 (a backend)

warnings.filterwarnings("ignore")  # torch's own deprecations


def run(rank, size, store, cases, backend="hfreduce"):
    """cases: {name: [function, arguments]}. Returns each result, or the error raised."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    os.environ["HAISCALE_BUCKETS"] = ""
    if DEVICE.type == "cuda":
        torch.cuda.set_device(DEVICE)
    where = {"init_method": f"file://{store}", "rank": rank, "world_size": size}
    dist.init_process_group(backend, **where, timeout=timedelta(seconds=30))
    found = {}
    for name, (function, arguments) in cases.items():
        try:
            found[name] = CASES[function](rank, size, store, **arguments)
        except Exception:
            found[name] = {"error": traceback.format_exc()[-3000:]}
    failed = any("error" in result for result in found.values())
    with contextlib.suppress(*[RuntimeError] * failed):  # the group may then be unusable
        dist.barrier()
        dist.destroy_process_group()
    return found
