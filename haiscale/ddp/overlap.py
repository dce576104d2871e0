"""Averages that end in the next forward: each layer waits only for its own bucket, and is stepped then.

    backward     | starts the averages, waits for none
    step()       | records the learning rate and other options
    next forward | before a layer runs: waits for the buckets of its parameters, steps them, frees their gradients

After Peng et al., "A Generic Communication Scheduler for Distributed DNN Training Acceleration", SOSP 2019.
"""

import contextlib
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from haiscale import checks
from haiscale.ddp.reducer import Reducer
from hfnn.optim.fused import Fused


class Overlap:
    """The handle of `DDP.overlap_forward`; `remove()` undoes it."""

    def __init__(self, module: nn.Module, reducer: Reducer, optimizer: torch.optim.Optimizer):
        if not isinstance(optimizer, Fused):
            name = f"{type(optimizer).__module__}.{type(optimizer).__name__}"
            raise ValueError(
                "overlap_forward takes an optimizer of hfnn.optim, which can step some parameters at a time, got "
                f"{name}: hfnn.convert(optimizer) first"
            )
        self.module, self.reducer, self.optimizer = module, reducer, optimizer
        self._check_no_norm()
        self.mine: set[torch.Tensor] = {p for group in optimizer.param_groups for p in group["params"]}
        self.options: list[dict[str, Any]] | None = None  # options of the pending step
        self.called: set[nn.Module] = set()
        self.needs: dict[nn.Module, list[int]] | None = None  # indices of the parameters that a module's forward reads
        self.hooks: list[RemovableHandle] = [m.register_forward_pre_hook(self._before) for m in module.modules()]
        self.hooks.append(optimizer.register_step_pre_hook(self._step))
        self.hooks.append(optimizer.register_state_dict_pre_hook(lambda optimizer: self.flush()))
        reducer.sizes.fix("a default: overlapped steps are not timed")
        reducer.defer = True

    def remove(self) -> None:
        """Finishes pending work; from then on backward waits for its averages. May be called more than once."""
        self.flush()
        self.reducer.settle()  # of a backward without a following step: its gradients stay
        self.reducer.defer = False
        while self.hooks:
            self.hooks.pop().remove()

    def flush(self) -> None:
        """Finishes the requested step for all parameters."""
        if self.options is not None:
            for bucket in self.reducer.buckets or ():
                self._finish(bucket)
            self.options = None

    def check_stepped(self) -> None:
        """Before forward."""
        under_way = any(bucket.work is not None for bucket in self.reducer.buckets or ())
        if under_way and self.options is None:
            raise ValueError(
                f"{checks.me()}: overlap_forward: no optimizer.step() came between a backward and the next forward; "
                "call it, and to accumulate gradients use no_sync()"
            )

    @torch._disable_dynamo
    def _before(self, module, args):
        """Called before a module's forward reads its parameters."""
        if self.options is None:
            self.called.add(module)
            return
        if self.needs is None:
            self.needs = self._readers()
        for i in self.needs.get(module, ()):
            bucket = self.reducer.bucket_of.get(i)
            if bucket is not None:
                self._finish(bucket)

    def _readers(self):
        """A module's own parameters, and those of parts that it reads without calling them, as MultiheadAttention
        does."""
        place, needs = {p: i for i, p in enumerate(self.reducer.parameters)}, {}
        for name, part in self.module.named_modules():
            names = name.split(".") if name else []
            while part not in self.called and names:
                names.pop()
                part = self.module.get_submodule(".".join(names))
            own = self.module.get_submodule(name)._parameters.values()
            needs.setdefault(part, []).extend(place[p] for p in own if p in place)
        return needs

    def _finish(self, bucket):
        if bucket.work is None:
            return
        self.reducer.settle(only=bucket)
        with self._noted_options():
            self.optimizer.step_parameters([p for p in bucket.parameters if p in self.mine])
        for p in bucket.parameters:
            p.grad = None

    @contextlib.contextmanager
    def _noted_options(self):
        """Applies the recorded options: a learning rate that a scheduler has set since belongs to the next step."""
        groups = self.optimizer.param_groups
        now = [{key: group[key] for key in group if key != "params"} for group in groups]
        try:
            for group, options in zip(groups, self.options, strict=True):
                group.update(options)
            yield
        finally:
            for group, options in zip(groups, now, strict=True):
                group.update(options)

    def _step(self, optimizer, args, kwargs):
        """Called before every optimizer.step(), which finds no gradients for parameters whose averages are pending."""
        self._check_no_norm()
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        scaled = getattr(optimizer, "grad_scale", None) is not None or getattr(optimizer, "found_inf", None) is not None
        if closure is not None or scaled:
            raise ValueError(
                "overlap_forward: optimizer.step() is made in the next forward, so it takes neither a closure nor a "
                "GradScaler, which looks at all gradients first; do without, or without overlap_forward"
            )
        self.options = [{key: group[key] for key in group if key != "params"} for group in optimizer.param_groups]

    def _check_no_norm(self):
        if self.optimizer.max_grad_norm is not None:
            raise ValueError(
                f"overlap_forward: max_grad_norm={self.optimizer.max_grad_norm} needs all gradients before the first "
                "parameter is stepped; set optimizer.max_grad_norm = None, or do without overlap_forward"
            )
