"""The optimizer's step inside backward, one unit at a time."""

from torch import Tensor, nn
from torch.optim import Optimizer

from haiscale.fsdp.unit import stepped
from hfnn.optim.fused import Fused


class InBackward:
    """While this is attached, each unit is stepped as soon as its gradients are averaged, then they are freed.

    So only the gradients of a few units exist at a time, and the steps run during the backward of earlier units. Works
    with hfnn.optim and torch.optim. `optimizer.step()` must still be called once after each backward, for schedulers
    and for parameters that are not sharded; it finds no gradients for the others. `remove()` detaches.

    Raises ValueError for a second backward before `optimizer.step()` (accumulate under `no_sync`), and if an hfnn
    optimizer's max_grad_norm is set, because clipping needs all gradients before the first step.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer):
        if getattr(optimizer, "max_grad_norm", None) is not None:
            raise ValueError(
                f"step_in_backward: max_grad_norm={optimizer.max_grad_norm} needs all gradients before the first "
                "parameter is stepped; set optimizer.max_grad_norm = None, or do without step_in_backward"
            )
        self._reductions, self._optimizer = model._engine.reductions, optimizer
        self._group_of = {p: i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
        self._stepped: set[Tensor] = set()
        self._before, self._reductions.ended = self._reductions.ended, self._step
        self._handle = optimizer.register_step_pre_hook(lambda *_: None if self._stepping else self._stepped.clear())
        self._stepping = False

    def remove(self) -> None:
        """Detach: gradients stay until `optimizer.step()`, as usual."""
        self._reductions.ended = self._before
        self._handle.remove()

    def _step(self, done) -> None:
        sharded = [p.sharded for p in done if p.sharded in self._group_of]
        again = [p.name for p in done if p.sharded in self._stepped]
        if again:
            raise ValueError(
                f"step_in_backward: a second gradient for {again[0]}, which was stepped since the last "
                "optimizer.step(); call optimizer.step() after every backward, and accumulate gradients under no_sync()"
            )
        self._stepped.update(sharded)
        if isinstance(self._optimizer, Fused):
            self._optimizer.step_parameters(sharded)
            stepped()
        elif sharded:
            self._step_alone(sharded)
        for p in sharded:
            p.grad = None

    def _step_alone(self, parameters: list[Tensor]) -> None:
        """optimizer.step() for only these parameters, without iterating over the others."""
        groups = self._optimizer.param_groups
        everything = [group["params"] for group in groups]
        self._stepping = True
        try:
            for i, group in enumerate(groups):
                group["params"] = [p for p in parameters if self._group_of[p] == i]
            self._optimizer.step()
        finally:
            self._stepping = False
            for group, params in zip(groups, everything, strict=True):
                group["params"] = params
