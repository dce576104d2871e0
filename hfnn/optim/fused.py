"""`Fused`: turns an optimizer of `torch.optim` into one whose step is one launch over all its parameters.

A class names its rule and its states (see `Fused`). The rest is here and in `state.py`. States are created, or taken
over from torch, at the first step. Tables are kept while addresses do not change (`table.py`). If no kernel accepts a
parameter, torch's own step runs, with the reason in `report()`. Nothing relies on `__init__`: a torch optimizer becomes
one of hfnn by `optimizer.__class__ = hfnn.optim.AdamW`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hfnn.core import kernel as kernels
from hfnn.core.context import capturing
from hfnn.core.kernel import FLOATS, Kernel, NoKernel
from hfnn.core.options import one_of
from hfnn.deferred import product
from hfnn.ops.dropout import philox_seed
from hfnn.optim import formats
from hfnn.optim.distributed import check_one_mesh, total_squares
from hfnn.optim.fallback import ASKED, Fallback
from hfnn.optim.memory import Memory, memory
from hfnn.optim.state import OPTIONS
from hfnn.optim.table import NORM, TILE, Settings, StepPlan, Table, clashing, dense, fit, local, sharding

KERNELS = (
    Kernel("triton", "hfnn.kernels.optim", "cuda"),
    Kernel("cpp", "hfnn._C:cpu.optim", "cpu", (*FLOATS, torch.float64)),
)
COUNTERS = TILE // 8  # of Philox, which a tile uses for stochastic rounding


class Fused(Fallback):
    """Mixed in before an optimizer class: `class AdamW(Fused, torch.optim.AdamW)`.

    state_dtype: None (the parameter's dtype, as torch), torch.float32, torch.bfloat16, "8bit" or "4bit";
    master: None, or "remainder": 16 further bits make bfloat16 parameters float32 in all but name;
    stochastic_rounding: of 16-bit parameters. It draws from torch's generator, so a run that must resume exactly also
    saves and restores that generator's state;
    max_grad_norm: gradients are clipped as in `torch.nn.utils.clip_grad_norm_`, but within the step, so `.grad` does
    not change; `grad_norm` is their norm before clipping;
    ema_decay: keeps a float32 average of each parameter, ema += (1 - ema_decay) (p - ema), in `state[p]["ema"]`.

    A class that mixes it in defines:
        rule: the number of its rule in `csrc/optim.h`;
        signs: of each state by name, whether it may be negative;
        counts: whether it keeps `step`;
        kernels: a tuple of Kernel, in order of preference;
        _names(group): the names of the states that a group's parameters have, in the header's order;
        _numbers(group): the group's row of `hyper`, of HYPER floats or tensors of one element;
        _update(p, g, states, numbers, step, first): the rule in plain torch, in place on p and states; or
            _rule(p), which returns that for a parameter;
    and may override the launch for a table (`_launch`) and the making of a row (`_entry`).
    """

    kernels = KERNELS
    rule: int
    _step_supports_amp_scaling = True
    _norm: Tensor | None = None
    _ran: tuple[str, ...] = ()

    def __init__(
        self, *args: Any, state_dtype: torch.dtype | str | None = None, master: str | None = None,
        stochastic_rounding: bool = False, max_grad_norm: float | None = None, ema_decay: float | None = None,
        **kwargs: Any,
    ):  # fmt: skip
        self.configure(
            state_dtype=state_dtype, master=master, stochastic_rounding=stochastic_rounding,
            max_grad_norm=max_grad_norm, ema_decay=ema_decay,
        )  # fmt: skip
        super().__init__(*args, **kwargs)
        self._step_supports_amp_scaling = True

    def configure(self, **options: Any) -> None:
        """Sets some of the options. States are converted at the next step.

        Args:
            options: state_dtype, master, stochastic_rounding, max_grad_norm or ema_decay.

        Raises:
            ValueError: There is no such option or value.
        """
        if unknown := options.keys() - set(OPTIONS):
            raise ValueError(f"got {', '.join(sorted(unknown))}; the options are {', '.join(OPTIONS)}")
        value = {name: options.get(name, getattr(self, name)) for name in OPTIONS}
        one_of("state_dtype", value["state_dtype"], (None, torch.float32, torch.bfloat16, *formats.LOW))
        one_of("master", value["master"], (None, "remainder"))
        one_of("stochastic_rounding", value["stochastic_rounding"], (False, True))
        if value["master"] and value["stochastic_rounding"]:
            raise ValueError("master='remainder' keeps all bits: leave stochastic_rounding=False")
        norm, decay = value["max_grad_norm"], value["ema_decay"]
        if norm is not None and not norm > 0:
            raise ValueError(f"max_grad_norm={norm}: give a positive number, or None for no clipping")
        if decay is not None and not 0 <= decay < 1:
            raise ValueError(f"ema_decay={decay}: give a number in [0, 1), or None for no average")
        self.__dict__.update(value)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch.optim. Raises ValueError for differentiable=True."""
        super().add_param_group(param_group)
        if self.param_groups[-1].get("differentiable"):
            self.param_groups.pop()
            raise ValueError("differentiable=True: a kernel's step has no graph; use torch.optim's class for that")

    @property
    def grad_norm(self) -> Tensor | None:
        """The norm of all gradients before they were clipped at the last step; None without max_grad_norm."""
        return None if self._norm is None else self._norm.clone()

    # One step.

    @torch.optim.Optimizer.profile_hook_step
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of all parameters with gradients. Returns the closure's result.

        Args:
            closure: Evaluates the model again and returns the loss.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            self._step(None)
        return loss

    step.hooked = True  # torch checks this before it wraps a class's step

    @torch.no_grad()
    def step_parameters(self, params: list[Tensor]) -> None:
        """A step of only these parameters, which must belong to this optimizer; hooks of `step` do not run."""
        product.keep(params)
        self._step(list(params))

    @torch._disable_dynamo
    def _step(self, wanted: list[Tensor] | None) -> None:
        params = [p for group in self.param_groups for p in group["params"]] if wanted is None else wanted
        options = self._options()
        if capturing():
            self._check_capturable()
            # A graph works on its own memory, which its replays fill. Steps outside of it cannot use that memory.
            plan = self._plan(params, options, wanted, {})
            self.__dict__.setdefault("_captured", []).append(plan)
        else:
            plans = self.__dict__.setdefault("_plans", {})
            key = None if wanted is None else tuple(map(id, wanted))
            plan = plans.get(key)
            if plan is None or not plan.holds(params, options, self._states_of(wanted)):
                plan = self._plan(params, options, wanted, self.__dict__.setdefault("_settings", {}))
                plans[key] = plan
        if plan.refusal is not None:
            self._fall_back(plan, params, wanted)
        elif plan.tables:
            self._run(plan, params)
            plan.copied, plan.written = [], []

    def _check_capturable(self) -> None:
        if not all(group.get("capturable", True) for group in self.param_groups):
            raise RuntimeError(
                f"{type(self).__name__}.step() is being captured in a CUDA graph: construct it with capturable=True"
            )

    def _states_of(self, wanted: list[Tensor] | None) -> list:
        return list(self.state.values()) if wanted is None else [self.state.get(p) for p in wanted]

    def _options(self) -> tuple:
        """The dependencies of tables besides tensors."""
        names = tuple([self._names(group) for group in self.param_groups])
        return (
            kernels.forced(),
            self.state_dtype,
            self.master,
            self.max_grad_norm is None,
            self.ema_decay is None,
            names,
            tuple([len(group["params"]) for group in self.param_groups]),
        )

    def _plan(self, params: list[Tensor], options: tuple, wanted, settings: dict) -> StepPlan:
        """The tables for the parameters with gradients, or why there are none."""
        numbers = {id(p): i for i, group in enumerate(self.param_groups) for p in group["params"]}
        if foreign := [p for p in params if id(p) not in numbers]:
            raise ValueError(f"a parameter of shape {tuple(foreign[0].shape)} is in no group of this optimizer")
        which = [i for i, p in enumerate(params) if p.grad is not None]
        params_with, grads = [params[i] for i in which], [params[i].grad for i in which]
        if self.max_grad_norm is not None:
            check_one_mesh(params_with)
        refusal = self._refusal(list(zip(params_with, grads, strict=True)))
        plan = StepPlan(options, which, refusal)
        if refusal is None:
            fitted = list(map(fit, grads, params_with))
            if self.counts:
                self._count(params_with)
            places: dict[tuple, list[int]] = {}
            for place, p in enumerate(params_with):
                places.setdefault((local(p).device, sharding(p)), []).append(place)
            for (device, shards), found in places.items():
                entries = [self._entry(params_with[i], numbers[id(params_with[i])]) for i in found]
                kernel = self._kernel(device, {entry.param.dtype for entry in entries})
                mine = settings.get(device)
                if mine is None or len(mine.hyper) != len(self.param_groups):
                    mine = settings[device] = Settings(device, len(self.param_groups))
                clips = self.max_grad_norm is not None
                plan.add(Table(entries, [fitted[i] for i in found], kernel, mine, clips, shards), found)
            written = [self.state[p] for p in params_with if p in self.state]
            plan.remember(params, grads, fitted, self._states_of(wanted), written)
        return plan

    # Choice of the kernel, or the reason for none.

    def _kernel(self, device: torch.device, dtypes: set) -> Kernel | None:
        forced = kernels.forced()
        for kernel in self.kernels:
            if forced in (None, kernel.name) and not any(kernel.refusals(device.type, d, 0, d) for d in dtypes):
                return kernel
        return None

    def _refusal(self, pairs: list[tuple[Tensor, Tensor]]) -> str | None:
        """Why kernels cannot process all of these parameters and gradients, or None."""
        if any(group.get("differentiable") for group in self.param_groups):
            raise ValueError("differentiable=True: a kernel's step has no graph; use torch.optim's class for that")
        kinds: dict[torch.device, set] = {}
        for p, g in pairs:
            x = local(p)
            if why := _strange(x, [g, *self.state.get(p, {}).values()]):
                return f"a parameter of shape {tuple(p.shape)}: {why}"
            kinds.setdefault(x.device, set()).add(x.dtype)
        if clashing([local(p).data_ptr() for p, _ in pairs]):
            return "two parameters are in the same memory"
        forced = kernels.forced()
        if forced == "torch":
            return ASKED
        for device, dtypes in kinds.items():
            if self._kernel(device, dtypes) is None:
                refusals = {
                    f"{k.name}: {r}" for k in self.kernels for d in dtypes for r in k.refusals(device.type, d, 0, d)
                }
                why = f"{type(self).__name__} on {device}: {'; '.join(sorted(refusals))}"
                if forced is not None:
                    raise NoKernel(f"`{forced}` was asked for; {why}")
                return why
        return None

    # The step.

    def _run(self, plan: StepPlan, params: list[Tensor]) -> None:
        tables = plan.tables
        numbers = [self._numbers(group) for group in self.param_groups]
        scale, found = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        for settings in {id(table.settings): table.settings for table in tables}.values():
            settings.set(numbers, self.max_grad_norm, scale, found)
        for table in tables:
            if self.counts or table.squares is not None:
                table.prepare()
        squares = self._total(tables) if self.max_grad_norm is not None else None
        for table in tables:
            self._launch(table, table.squares if squares is None else squares.to(table.rows.device))
        # Version counters of tensors that kernels have written to are increased, as torch does. They are not increased
        # for a step that a GradScaler skips, if this is known without waiting for the device.
        if found is None or not (found.is_cpu and found.item()):
            written = params if len(plan.which) == len(params) else [params[i] for i in plan.which]
            torch.autograd.graph.increment_version(written + plan.written)
        self._ran = tuple(sorted({table.kernel.name for table in tables}))
        self._norm = None if self.max_grad_norm is None else tables[0].settings.entries[NORM]
        # Waits for the device at most once, at the first step of rows, which may have been skipped.
        if any(table.first for table in tables):
            if found is not None and found.item():
                self._forget_unwritten(plan, params)
            else:
                for table in tables:
                    table.written()
        if not capturing():  # a graph works on the memory of its entries
            for table in tables:
                table.entries = []

    def _forget_unwritten(self, plan: StepPlan, params: list[Tensor]) -> None:
        """Drop the states that the skipped first step would have filled, so that later code finds none, as in torch."""
        for table, places in zip(plan.tables, plan.places, strict=True):
            for entry, i in zip(table.entries, places.tolist(), strict=True):
                if entry.first:
                    state = self.state[params[i]]
                    for name in self._names(self.param_groups[entry.group]):
                        state.pop(name, None), state.pop(name + "_scale", None)

    def _launch(self, table: Table, squares: Tensor | None) -> None:
        """One step of all rows of a table; `squares` add up to the squared gradient norm if gradients are clipped."""
        kernel, rows, settings = table.kernel, table.rows, table.settings
        kernel.update(
            rows, table.owner, settings.hyper, settings.control, squares, self.rule,
            *self._keeping(rows, COUNTERS * table.tiles), kernel.queue(rows), **table.features,
        )  # fmt: skip

    def _keeping(self, rows: Tensor, counters: int) -> tuple[float, int, int]:
        """(ema_decay, seed, offset) for kernels, for this many Philox counters."""
        decay = -1.0 if self.ema_decay is None else self.ema_decay
        if not self.stochastic_rounding:
            return decay, -1, 0
        seed, offset, pair = philox_seed(rows, counters)
        if pair is not None:
            raise RuntimeError("stochastic_rounding=True cannot be captured in a CUDA graph: its seed would be frozen")
        return decay, seed, offset

    def _total(self, tables: list[Table]) -> Tensor | None:
        """The sum of squares over all tables and processes; None if the partial sums of a single table are enough."""
        if len(tables) == 1 and tables[0].shards is None:
            return None
        return total_squares([(table.shards, table.squares.sum()) for table in tables])

    def memory(self) -> Memory:
        """Bytes by kind (parameter, gradient, each state, scales, remainder, ema) and in total; prints as a table."""
        return memory(self)

    def report(self) -> str:
        """A text: what ran at the last step and how states are kept, or why no kernel ran."""
        plan = self.__dict__.get("_plans", {}).get(None)
        name = type(self).__name__
        if plan is None:
            return f"{name}: no step yet"
        if plan.refusal is not None:
            return f"{name}: torch's own step, for {plan.refusal}"
        lines = [f"{name}:"]
        for table in plan.tables:
            for (dtype, format), n in table.kinds.items():
                states = f", states in {format}" if self.signs else ""
                lines.append(f"  {n} parameters in {dtype}{states} on {table.settings.device}: {table.kernel.name}")
        return "\n".join(lines)


def check_numbers(lr, betas, eps: float, weight_decay: float) -> None:
    """Raises ValueError as torch's constructors do, for optimizers without a torch class."""
    if not lr >= 0.0:
        raise ValueError(f"Invalid learning rate: {lr}")
    if not eps >= 0.0:
        raise ValueError(f"Invalid epsilon value: {eps}")
    for i, beta in enumerate(betas):
        if not 0.0 <= beta < 1.0:
            raise ValueError(f"Invalid beta parameter at index {i}: {beta}")
    if not weight_decay >= 0.0:
        raise ValueError(f"Invalid weight_decay value: {weight_decay}")


def _strange(x: Tensor, others: list) -> str | None:
    """Why no kernel accepts a parameter, its gradient or its states, or None."""
    if type(x).__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl and type(x) is not Tensor:
        return f"kernels take torch.Tensor and torch.nn.Parameter, got {type(x).__name__}"
    for other in (x, *others):
        if isinstance(other, Tensor) and other.layout is not torch.strided:
            return f"kernels take dense gradients, got {other.layout}"
    if not x.is_floating_point():
        return f"kernels take real numbers, got {x.dtype}"
    if x.is_neg():
        return "kernels take no lazily negated tensors"
    return None if dense(x) else f"kernels take memory without gaps, got strides {x.stride()}"
