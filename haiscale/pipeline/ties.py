"""Parameters of several stages, such as a tied embedding on the first and the last: copies that must stay equal.

Each rank has a copy, and each copy gets its own part of the gradient. At the end of a step the parts are added in the
order of the chunks, so all copies have bitwise equal gradients. For accumulation over steps, at the beginning of a step
the first rank keeps its gradient, and the others, which have the same one, begin at zero.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from haiscale import checks
from haiscale.pipeline.stage import cut_of, stage_in


class Ties:
    """The copies of other ranks' parameters in the chunks of this rank, `{chunk: module}`."""

    def __init__(self, chunks: dict[int, nn.Module], placement: tuple[int, ...], group: dist.ProcessGroup):
        self._group, self._rank = group, dist.get_rank(group)
        self._shared: dict[str, tuple[nn.Parameter, list[int]]] = {}  # by name: this rank's copy, and the ranks
        for module in chunks.values():
            cut = cut_of(module)
            for name, holders in cut.shared.items() if cut is not None else ():
                ranks = list(dict.fromkeys(placement[chunk] for chunk in holders))
                found = _find(module, cut, name)
                if self._shared.setdefault(name, (found, ranks))[0] is not found:
                    raise ValueError(
                        f"{name} is tied between chunks {holders} of the model, of which {checks.me()} has several, "
                        "each wrapped so that they no longer share it: take a schedule with one chunk on a rank, "
                        "or DDP, or untie it"
                    )
        self._shared = {name: both for name, both in self._shared.items() if len(both[1]) > 1}

    def counted_elsewhere(self, parameter: nn.Parameter) -> bool:
        """Whether this is a copy of a parameter that an earlier rank has."""
        return any(parameter is p and ranks[0] != self._rank for p, ranks in self._shared.values())

    def begin(self) -> None:
        for parameter, ranks in self._shared.values():
            if ranks[0] != self._rank and parameter.grad is not None:
                _local(parameter.grad).zero_()

    @torch.no_grad()
    def exchange(self) -> None:
        """All copies get the sum of their gradients."""
        for name in sorted(self._shared):
            parameter, ranks = self._shared[name]
            if not parameter.requires_grad:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            mine = _local(parameter.grad)
            peers = [rank for rank in ranks if rank != self._rank]
            parts = {rank: torch.empty_like(mine, memory_format=torch.contiguous_format) for rank in peers}
            self._swap(parts, mine.contiguous())
            parts[self._rank] = mine.clone()
            mine.copy_(sum((parts[rank] for rank in ranks[1:]), parts[ranks[0]]))

    def _swap(self, parts: dict[int, Tensor], mine: Tensor) -> None:
        operations = []
        for rank, part in parts.items():
            peer = dist.get_global_rank(self._group, rank)
            operations.append(dist.P2POp(dist.isend, mine, peer, self._group))
            operations.append(dist.P2POp(dist.irecv, part, peer, self._group))
        for work in dist.batch_isend_irecv(operations):
            work.wait()


def _find(module, cut, name):
    inside = {whole: own for own, whole in cut.names.items()}
    return stage_in(module).get_parameter(inside.get(name, name))


def _local(gradient):
    return gradient.to_local() if hasattr(gradient, "to_local") else gradient
