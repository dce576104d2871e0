"""Steps each parameter as soon as its gradient is complete, so the gradients are never all in memory at once."""

from typing import Any

import torch

from hfnn.optim.fused import Fused


class InBackward:
    """The handle of `step_in_backward`: while it is attached, the optimizer steps within backward. See there."""

    def __init__(self, optimizer: Fused):
        self.optimizer = optimizer
        self.stepped: set[torch.Tensor] = set()  # since the last call of optimizer.step()
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        self.hooks: list[Any] = [p.register_post_accumulate_grad_hook(self._step) for p in parameters]
        self.hooks.append(optimizer.register_step_pre_hook(self._count))

    def remove(self) -> None:
        """Detach: gradients stay until `optimizer.step()`, as usual. May be called more than once."""
        while self.hooks:
            self.hooks.pop().remove()

    def _step(self, parameter: torch.Tensor) -> None:
        """The gradient of a parameter is complete: step it, and free the gradient."""
        _check_no_norm(self.optimizer)
        if parameter in self.stepped:
            raise ValueError(
                "step_in_backward: a second gradient for a parameter that was stepped since the last optimizer.step(); "
                "call optimizer.step() after every backward, and to accumulate gradients do without step_in_backward"
            )
        self.stepped.add(parameter)
        self.optimizer.step_parameters([parameter])
        parameter.grad = None

    def _count(self, optimizer, args, kwargs) -> None:
        """Runs before every `optimizer.step()`, which finds no gradients for parameters that were already stepped."""
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is not None:
            raise ValueError(
                "step_in_backward: optimizer.step(closure) would step within the closure; call the closure, then step()"
            )
        if getattr(optimizer, "grad_scale", None) is not None or getattr(optimizer, "found_inf", None) is not None:
            raise ValueError(
                "step_in_backward: GradScaler knows whether gradients are finite after backward only, when the "
                "parameters are stepped already; use bfloat16, which needs no GradScaler, or no step_in_backward"
            )
        self.stepped.clear()


def step_in_backward(optimizer: torch.optim.Optimizer) -> InBackward:
    """Steps each parameter inside backward, at the moment its gradient is complete, and frees the gradient at once.

    Only a few gradients exist at a time instead of all. Each
    parameter gets the same value as in the ordinary step, bit for bit (except for the random bits of
    `stochastic_rounding`). `optimizer.step()` must still be called once after each backward, because schedulers and
    step hooks need it. It steps the remaining gradients: those of parameters that were frozen or not in the optimizer
    when this was called. A changed learning rate takes effect at the next backward.

    Works with `fully_shard`, whose gradients are already reduced by then. `clip_grad_norm_` finds no gradients to clip;
    this cannot be detected.

    Args:
        optimizer: One of hfnn.optim.

    Returns:
        A handle; `handle.remove()` undoes it.

    Raises:
        ValueError: All gradients are needed together: `max_grad_norm` is set; GradScaler; a second backward before
            `optimizer.step()` (gradient accumulation; checkpoints with `use_reentrant=True` around a tied parameter);
            `optimizer.step(closure)`; parameters that are not sharded in a process group of several ranks (DDP averages
            gradients later). Or the optimizer is not hfnn's.

    >>> w = torch.nn.Parameter(torch.ones(2))
    >>> optimizer = hfnn.optim.SGD([w], lr=0.5)
    >>> handle = hfnn.optim.step_in_backward(optimizer)
    >>> w.sum().backward()
    >>> w.detach(), w.grad
    (tensor([0.5000, 0.5000]), None)
    >>> optimizer.step()
    >>> handle.remove()
    """
    if not isinstance(optimizer, Fused):
        name = f"{type(optimizer).__module__}.{type(optimizer).__name__}"
        raise ValueError(
            f"step_in_backward takes an optimizer of hfnn.optim, got {name}: hfnn.convert(optimizer) first"
        )
    _check_no_norm(optimizer)
    if any(isinstance(getattr(hook, "__self__", None), InBackward) for hook in _pre_hooks(optimizer)):
        raise ValueError("step_in_backward: this optimizer steps in backward already; .remove() the other handle first")
    ranks = _ranks()
    if ranks > 1 and not all(hasattr(p, "_local_tensor") for g in optimizer.param_groups for p in g["params"]):
        raise ValueError(
            f"step_in_backward: parameters are not sharded while {ranks} ranks train; DistributedDataParallel would "
            "average gradients after the parameters are stepped; use torch.distributed.fsdp.fully_shard"
        )
    return InBackward(optimizer)


def _pre_hooks(optimizer):
    return optimizer._optimizer_step_pre_hooks.values()


def _ranks() -> int:
    dist = torch.distributed
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _check_no_norm(optimizer) -> None:
    if optimizer.max_grad_norm is not None:
        raise ValueError(
            f"step_in_backward: max_grad_norm={optimizer.max_grad_norm} needs all gradients before the first parameter "
            "is stepped; set optimizer.max_grad_norm = None, or do without step_in_backward"
        )
