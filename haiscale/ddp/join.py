"""Uneven inputs: the actions of a rank without inputs while others still train, for
torch.distributed.algorithms.Join."""

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import JoinHook

from haiscale import checks
from haiscale.ddp.buffers import broadcast


class Live:
    """How many ranks still have inputs, and whether their next backward averages."""

    def __init__(self, group: dist.ProcessGroup, sync: bool, live: bool):
        self.numbers = torch.tensor([sync, live], dtype=torch.float32, device=checks.host_device(group))
        self.work = dist.all_reduce(self.numbers, group=group, async_op=True)

    def read(self) -> tuple[bool, int]:
        self.work.wait()
        sync, live = self.numbers.tolist()
        return sync > 0, int(live)


def common_rank(group: dist.ProcessGroup, candidate: bool) -> int:
    """The highest rank in the group that is a candidate."""
    rank = torch.tensor([group.rank() if candidate else -1], device=checks.host_device(group))
    dist.all_reduce(rank, dist.ReduceOp.MAX, group=group)
    return int(rank)


class Shadow(JoinHook):
    """Starts the same collectives as the others in each of their steps. At the end all get the model that trained
    longest."""

    def __init__(self, ddp, divide_by_initial_world_size: bool):
        self.ddp, self.divide_by_initial = ddp, divide_by_initial_world_size
        ddp._divide_by_initial = divide_by_initial_world_size

    def main_hook(self) -> None:
        ddp, group = self.ddp, self.ddp.process_group
        ddp._synchronise_buffers(live=False)
        live = Live(group, sync=False, live=False)
        sync, count = live.read()
        ddp.require_forward_param_sync = sync
        if not sync:
            return
        reducer = ddp.reducer
        reducer.authority = lambda: common_rank(group, False)
        reducer.contributors = None if self.divide_by_initial else lambda: count
        reducer.shadow()

    def post_hook(self, is_last_joiner: bool) -> None:
        ddp = self.ddp
        source = common_rank(ddp.process_group, is_last_joiner)
        broadcast(ddp._states(), ddp.process_group, source)
        ddp.reducer.authority = ddp.reducer.contributors = None
        ddp._join_config = type(ddp._join_config).construct_disabled_join_config()
