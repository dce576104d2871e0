"""The output layer of a model that computes a loss from its logits.

A language model of transformers says which layer makes its logits, and that it computes a loss of them: it got labels.
In any other model the layer is found by use. Candidates are linear maps with the weight of an embedding, else the only
one whose weight has the shape of the largest embedding's, else the last layer of the model if it widens its input. Each
of their calls in which gradients are recorded gives deferred logits, and a `Use` counts what happens to them. After two
calls in a row whose logits were read by anything but a recorded operation or a loss, the layer computes its logits for
good, as `nn.Linear` does. Until two calls went by without a read, the logits are computed in forward besides, so a read
finds them whatever has changed; an embedding's counterpart is believed from its first call on.
"""

import contextvars
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from hfnn.core.context import capturing, compiling, in_checkpoint
from hfnn.core.holder import foreign_forward
from hfnn.deferred.logits import Deferred, defer
from hfnn.deferred.product import Outcome, Writes
from hfnn.ops import linear
from hfnn.ops.head import WORTH_LOGITS, passes

CALLS = 2  # in a row, after which a layer is known
FEWEST = 1 << 16  # logits with prefer="memory": fewer save too little


@dataclass(frozen=True)
class Deferring:
    """A language model during a forward with labels. compact: whether most labels are ignored."""

    head: nn.Module
    compact: bool
    prefer: str


deferring: contextvars.ContextVar[Deferring | None] = contextvars.ContextVar("hfnn_deferring", default=None)


class Use:
    """What became of a layer's logits. unread: calls whose logits only a loss used, in all; read: calls whose logits
    were read, in a row."""

    __slots__ = "last", "read", "unread"  # without a dict, they are no attributes of the model

    def __init__(self, known: bool):
        self.unread, self.read = CALLS * known, 0
        self.last: Outcome | None = None

    def __reduce__(self):
        return Use, (self.unread >= CALLS,)

    def computes(self) -> bool:
        """Whether the layer computes its logits for good."""
        last, self.last = self.last, None
        if last is not None and last.read:
            self.read += 1
        elif last is not None and last.used:
            self.read, self.unread = 0, self.unread + 1
        return self.read >= CALLS

    def logits(self, head: "Head", input: torch.Tensor) -> Deferred | None:
        """The logits of this call if they are deferred."""
        if (
            not torch.is_grad_enabled()
            or self.computes()
            or passes(input.shape[:-1].numel(), head.weight, head.prefer)
            or in_checkpoint()  # its two forwards must be the same
            or torch._C._current_graph_task_id() != -1
            or (capturing() and self.unread < CALLS)
            or not deferrable(head)
        ):
            return None
        logits = defer(input, head.weight, head.bias, prefer=head.prefer)
        if logits is not None and logits._plan.grad:
            product = logits._plan.product
            self.last = product.outcome
            if self.unread < CALLS:
                product.make()
            return logits
        return None


class Head(Writes, linear.Linear):
    """The output layer of a model, deferred where only a loss uses its logits; else `hfnn.Linear`. One that is found by
    use has a `Use` in `vars(module)["_hfnn_use"]`."""

    defer = True

    @property
    def _hfnn_when(self) -> str:
        """When the logits are deferred, for `hfnn.report`."""
        use = vars(self).get("_hfnn_use")
        if use is None or not self.defer:
            return ""
        if use.read >= CALLS:
            return "logits are computed: other operations than a loss read them"
        fewest = FEWEST if self.prefer == "memory" else WORTH_LOGITS
        return f"in training, from {fewest} logits on, they are computed if they are read"

    def forward(self, input):
        if not compiling():
            logits, now = None, deferring.get()
            if now is not None and now.head is self:
                if not passes(input.shape[:-1].numel(), self.weight, now.prefer):
                    logits = defer(input, self.weight, self.bias, compact=now.compact, prefer=now.prefer)
            elif input.numel() * self.out_features >= FEWEST * self.in_features and self.defer:
                use = vars(self).get("_hfnn_use")
                logits = None if use is None else use.logits(self, input)
            if logits is not None:
                return logits
        return linear.Linear.forward(self, input)


def deferrable(head: nn.Module) -> bool:
    """Whether nothing but the model sees the head's result. A hook, also one of fully_shard or accelerate, may read the
    logits or free the weight. DataParallel gathers outputs in C++."""
    kinds = "forward_hooks", "backward_hooks", "backward_pre_hooks"
    return not (
        any(getattr(head, f"_{kind}") or getattr(torch_module, f"_global_{kind}") for kind in kinds)
        or foreign_forward(head)
        or vars(head).get("_is_replica")
    )


def candidates(model: nn.Module) -> dict[nn.Module, Use]:
    """The linear maps of a model that may make its logits."""
    tables = [m.weight for m in model.modules() if isinstance(m, nn.Embedding)]
    layers = [m for m in model.modules() if any(p is not None for p in m._parameters.values())]
    maps = [m for m in layers if type(m) in (nn.Linear, linear.Linear) and m is not model]
    tied = [m for m in maps if any(m.weight is table for table in tables)]
    largest = {tuple(table.shape) for table in tables if len(table) == max(map(len, tables))}  # tokens, not positions
    alike = [m for m in maps if tuple(m.weight.shape) in largest]
    if tied or len(alike) == 1:  # several are layers that happen to be as large
        return {m: Use(known=True) for m in tied or alike}
    return {m: Use(known=False) for m in maps if m is layers[-1] and m.out_features > m.in_features}
