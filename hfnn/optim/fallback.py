"""The fallback if no kernel runs: the step of torch's class, or the definition in plain torch."""

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hfnn.optim import reference
from hfnn.optim.distributed import total_squares
from hfnn.optim.state import OPTIONS, States
from hfnn.optim.table import StepPlan, fit, local, sharding

log = logging.getLogger("hfnn")

ASKED = "hfnn.use('torch')"  # not logged: the user asked for torch
_logged: set[str] = set()


class Fallback(States):
    """The part of `Fused` without kernels."""

    param_groups: list[dict[str, Any]]
    _ran: tuple[str, ...] = ()
    _norm: Tensor | None = None

    def _fall_back(self, plan: StepPlan, params: list[Tensor], wanted: list[Tensor] | None) -> None:
        """torch's own step, or the definition in plain torch if torch does not support the states."""
        self._ran = ("torch",)
        if plan.refusal != ASKED and plan.refusal not in _logged:
            _logged.add(plan.refusal)
            log.warning("torch's own optimizer runs instead of hfnn's (said once): %s", plan.refusal)
        pairs = [(params[i], params[i].grad) for i in plan.which]
        if self._plain(pairs):
            self._torch_step(pairs, wanted)
            return
        if why := next((w for p, g in pairs if (w := _beyond(local(p), g))), None):
            asked = {name: value for name in OPTIONS if (value := getattr(self, name)) not in (None, False)}
            raise ValueError(
                f"{type(self).__name__} with {asked or 'these states'}: {why}; torch.optim's classes may take it"
            )
        self._reference_step(pairs)

    def _plain(self, pairs: list) -> bool:
        """Whether torch's class can do this step: no options and no states that it does not support."""
        if not hasattr(super(), "_init_group") or any(getattr(self, name) not in (None, False) for name in OPTIONS):
            return False
        for p, _ in pairs:
            for name, value in self.state.get(p, {}).items():
                if (
                    name in self.signs and value is not None and value.dtype is not p.dtype
                ) or name not in self._torch_names:
                    return False
        return True

    @property
    def _torch_names(self) -> set[str]:
        return {*self.signs, "step"}

    def _torch_step(self, pairs: list, wanted: list[Tensor] | None) -> None:
        """The step of torch's class without its hooks; with a GradScaler, as the scaler itself would do it."""
        scale, found = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if found is not None and found.item():
            return
        if scale is not None:
            for _, g in pairs:
                g.div_(scale.to(g.device))
        step = super().step.__func__
        step = step.__wrapped__ if getattr(step, "hooked", False) else step
        # torch's step would refuse to run, or divide again.
        groups, mine = (
            self.param_groups,
            {n: self.__dict__.pop(n) for n in ("grad_scale", "found_inf") if n in self.__dict__},
        )
        try:
            if wanted is not None:
                ids = {id(p) for p in wanted}
                self.param_groups = [{**g, "params": [p for p in g["params"] if id(p) in ids]} for g in groups]
            step(self)
        finally:
            self.param_groups = groups
            self.__dict__.update(mine)

    def _rule(self, p: Tensor) -> Callable:
        """The rule for p in plain torch: see `Fused`. Rules that need more of p than this process has override this."""
        return self._update

    def _reference_step(self, pairs: list) -> None:
        scale, found = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        scale, factor = 1.0 if scale is None else scale.item(), 1.0
        numbers = {id(p): i for i, group in enumerate(self.param_groups) for p in group["params"]}
        grads = [fit(g, p) for p, g in pairs]
        if self.max_grad_norm is not None and pairs:
            squares = [(sharding(p), reference.square_sum([g], scale)) for (p, _), g in zip(pairs, grads, strict=True)]
            self._norm = total_squares(squares).sqrt().float().squeeze()
            factor = min(1.0, self.max_grad_norm / (self._norm.item() + 1e-6))
        if found is not None and found.item():
            return
        if self.counts:
            self._count([p for p, _ in pairs])
        for (p, _), g in zip(pairs, grads, strict=True):
            group = self.param_groups[numbers[id(p)]]
            values = [x.item() if isinstance(x, Tensor) else x for x in self._numbers(group)]
            sign = -1.0 if group.get("maximize") else 1.0
            entry = self._entry(p, numbers[id(p)])
            reference.step(entry, g, self._rule(p), values, [self.signs[n] for n in self._names(group)],
                           sign * factor / scale, self.stochastic_rounding, self.ema_decay)  # fmt: skip


def _beyond(x: Tensor, g: Tensor) -> str | None:
    """Why even the definition does not support an input, or None."""
    if not x.is_floating_point():
        return f"takes real parameters, got {x.dtype}"
    return None if g.layout is torch.strided else f"takes dense gradients, got {g.layout}"
