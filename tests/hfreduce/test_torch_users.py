"""torch's own users of process groups run unchanged on hfreduce. tests/workers/torch_users.py describes them.

Each gives gloo's results within rounding, and the same bits in two runs. Common bugs of third-party backends that are
tested here: a communication hook whose callbacks begin operations and wait for them, with one bucket and with several
(power_sgd, power_sgd_buckets); FSDP2's all-gather whose input is part of its output (fsdp2); a slow all-reduce in
FSDP2's replicas, with bfloat16 parameters and float32 gradients (hsdp_mixed); the bfloat16 hook, which torch allows for
NCCL only, by name (ddp_bf16_hook).
"""

from pathlib import Path

import pytest
import ranks
import torch

WORKER = Path(__file__).parents[1] / "workers" / "torch_users.py"
SCHEDULES = {"GPipe", "1F1B", "LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"}
DETAIL = ["ddp", "power_sgd", "zero1", "fsdp1", "objects", "groups", "pipeline_1F1B"]
if torch.__version__ >= "2.13":  # before, torch's wrapper does not forward allgather_into_tensor_coalesced
    DETAIL += ["fsdp2", "hsdp", "functionals"]


def check(results):
    """Asserts that there is no error, with one line per rank and user."""
    wrong = []
    for rank, found in enumerate(results):
        for user, result in found.items():
            if "error" in result:
                wrong.append(f"rank {rank}, {user}: {result['error']}")
            elif not result["operations"]:
                wrong.append(f"rank {rank}, {user}: nothing ran on hfreduce")
            elif not result["same"]:
                wrong.append(f"rank {rank}, {user}: other bits in a second run")
            elif result.get("distance", 0) > 1:
                wrong.append(f"rank {rank}, {user}: {result['distance']:.2g} times the rounding allowed away from gloo")
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
def test_users(tmp_path):
    results = ranks.run(WORKER, "compare", 4, tmp_path, timeout=200)
    check(results)
    schedules = {user.partition("_")[2] for user in results[0] if user.startswith("pipeline_")}
    assert schedules == SCHEDULES and len(results[0]) > len(SCHEDULES)


@pytest.mark.rest
def test_users_in_detailed_debug_mode(tmp_path):
    """TORCH_DISTRIBUTED_DEBUG=DETAIL: torch wraps the backend, and compares the ranks' calls through a gloo group.

    Not compared with gloo: when torch 2.13 logs DDP, it takes gloo's wrapper for gloo, and crashes.
    """
    debug = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
    results = ranks.run(WORKER, "compare", 4, tmp_path, users=DETAIL, with_gloo=False, env=debug, timeout=200)
    check(results)
    assert list(results[0]) == DETAIL
