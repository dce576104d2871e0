"""The states of an hfnn optimizer: how they are created, taken over from torch, and written to a state dict.

`optimizer.state[p]` has torch's names. A state in a low-bit format is one-dimensional uint8 codes, with a float32
`<name>_scale`. All others have the parameter's shape and memory layout; for a DTensor they are DTensors. `step` is
float32 on the parameter's device. `state_dict()` returns only torch's formats, see `States`.
"""

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from hfnn.optim import formats
from hfnn.optim.table import Entry, flat, like, local, order

OPTIONS = ("state_dtype", "master", "stochastic_rounding", "max_grad_norm", "ema_decay")
_FIRST = "hfnn"  # our hooks among torch's, whose keys are numbers
# A step count of a state dict is the optimizer's own tensor, as in torch, so later steps count in the dict, too. If the
# kernels cannot count in it (another device or dtype), this has the tensor in which they count instead.
_COUNTED_IN = WeakTensorKeyDictionary()


class _Kept:
    """A tensor that torch's `load_state_dict` must not cast to the parameter's dtype."""

    def __init__(self, value: Tensor):
        self.value = value


class States:
    """The part of `Fused` for states.

    `state_dict()` returns the same as torch's class: low-bit states as the float32 tensors that they represent, which
    `load_state_dict` turns into the same codes again, and `step` where torch keeps it. In addition it has `remainder`
    (int16) and `ema` (float32). A float32 state of a bfloat16 parameter stays float32 in both directions.
    """

    signs: dict[str, bool] = {}
    counts = True
    state_dtype: torch.dtype | str | None = None
    master: str | None = None
    stochastic_rounding = False
    max_grad_norm: float | None = None
    ema_decay: float | None = None

    def _fills(self, group: dict) -> bool:
        """Whether the first step fills the states; later steps average into them."""
        return False

    # Creating states, and taking them over.

    def _entry(self, p: Tensor, number: int) -> Entry:
        """The row of p in group `number`, with all required states."""
        names = self._names(self.param_groups[number])
        x = local(p)
        if not names and not self.counts and self.ema_decay is None and self.master is None:
            return Entry(x, number, x.dtype, (), ())
        state = self.state[p]
        first = self._fills(self.param_groups[number]) and any(state.get(name) is None for name in names)
        format = self._format(p, [state[name] for name in names if state.get(name) is not None])
        for name in names:
            self._keep(p, state, name, format)
        if self.master is None:
            state.pop("remainder", None)
        elif x.dtype is torch.bfloat16:
            if "remainder" not in state:
                state["remainder"] = torch.zeros_like(p, dtype=torch.int16)
            state["remainder"] = _like(p, "remainder", state["remainder"])
        if self.ema_decay is not None:
            if "ema" not in state:
                whole = x if "remainder" not in state else _master(x, local(state["remainder"]))
                state["ema"] = _wrap(p, torch.empty_like(x, dtype=torch.float32).copy_(whole))
            state["ema"] = _like(p, "ema", state["ema"])
        low = format in formats.LOW
        return Entry(
            x, number, format,
            tuple(local(state[name]) for name in names),
            tuple(state[name + "_scale"] for name in names) if low else (),
            state.get("step") if self.counts else None,
            *(None if state.get(name) is None else local(state[name]) for name in ("remainder", "ema")),
            first,
        )  # fmt: skip

    def _format(self, p: Tensor, present: list[Tensor]):
        """The format for the states of p: the requested one, or torch's; the same for all shards of p."""
        x = local(p)
        if self.state_dtype in formats.LOW:
            return self.state_dtype if p.numel() >= formats.SMALL else torch.float32
        if self.state_dtype is not None:
            return self.state_dtype
        # Loaded states may be wider than torch's: no bits are lost.
        wide = any(s.dtype is torch.float32 for s in present)
        return torch.float32 if wide and x.element_size() < 4 else x.dtype

    def _keep(self, p: Tensor, state: dict, name: str, format) -> None:
        """Convert state[name] of p to this format, or create it."""
        x, value, signed = local(p), state.get(name), self.signs[name]
        low = format in formats.LOW
        if value is None:
            if not low:
                state[name] = torch.zeros_like(p, dtype=format)
                return
            value = torch.zeros_like(x, dtype=torch.float32)
        elif value.dtype is torch.uint8:
            if low and value.numel() == _codes(x.numel(), format):
                return
            if value.numel() not in {_codes(x.numel(), each) for each in formats.LOW}:
                raise RuntimeError(f"{name} has {value.numel()} codes, which does not fit {x.numel()} elements")
            value = self._decoded(x, state, name)
        else:
            _check_shape(name, value, x)
            if not low and value.dtype is format and order(local(value)) == order(x):
                return
        value = like(local(value), x)
        if low:
            state[name], state[name + "_scale"] = formats.encode(flat(value.float()), format, signed)
        else:
            state.pop(name + "_scale", None)
            state[name] = _wrap(p, value.to(format))

    def _decoded(self, x: Tensor, state: dict, name: str) -> Tensor:
        """A low-bit state of x as float32 in x's shape."""
        codes, numel = state[name], x.numel()
        format = "8bit" if codes.numel() == numel else "4bit"
        value = torch.empty_like(x, dtype=torch.float32)
        flat(value).copy_(formats.decode(codes, state[name + "_scale"], numel, format, self.signs[name]))
        return value

    def _count(self, params: list[Tensor]) -> None:
        """Give each parameter a `step` for the kernels; on a GPU, those made here share one allocation."""
        new: dict[torch.device, list] = defaultdict(list)
        for p in params:
            device, step = local(p).device, self.state[p].get("step")
            if not (
                isinstance(step, Tensor) and step.dtype is torch.float32 and step.device == device and not step.dim()
            ):
                new[device].append((self.state[p], 0.0 if step is None else float(step)))
        for device, found in new.items():
            steps = torch.tensor([step for _, step in found], dtype=torch.float32, device="cpu").to(device).unbind()
            for (state, _), step in zip(found, steps, strict=True):
                before, state["step"] = state.get("step"), step.clone() if device.type == "cpu" else step
                if isinstance(before, Tensor):
                    _COUNTED_IN[before] = state["step"]

    # State dicts, pickles and copies.

    def state_dict(self) -> dict[str, Any]:
        """The state dict that torch's class would return: see `States`."""
        return _with_hook(self._optimizer_state_dict_post_hooks, _export, False, super().state_dict)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of torch's class or of this one; formats are those of this optimizer."""
        _with_hook(self._optimizer_load_state_dict_pre_hooks, _protect, True, super().load_state_dict, state_dict)

    def __getstate__(self) -> dict[str, Any]:
        # Each step separately: a view of shared memory would be pickled with all of it.
        state = defaultdict(dict)
        for p, values in self.state.items():
            state[p] = _apart(values) if isinstance(values, dict) else values
        mine = {name: self.__dict__[name] for name in OPTIONS if name in self.__dict__}
        return {**super().__getstate__(), "state": state, **mine}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "state" in state:
            loaded = defaultdict(dict)
            for p, values in state["state"].items():
                if isinstance(values, dict):
                    values = self._loaded(p, values) if isinstance(p, Tensor) else _unwrapped(values)
                loaded[p] = values
            state = {**state, "state": loaded}
        super().__setstate__(state)
        self.__dict__.pop("_plans", None)
        self.__dict__.pop("_settings", None)

    def _loaded(self, p: Tensor, values: dict) -> dict:
        """The state of p with its tensors unwrapped, on its device and in the format wanted."""
        state = {}
        for name, value in values.items():
            if isinstance(value, _Kept):
                value = value.value.to(p.device)
                if value.is_floating_point() and name in self.signs and self.state_dtype is None:
                    wide = value.dtype is torch.float32 and p.element_size() < 4
                    value = value if wide or not p.is_floating_point() else value.to(p.dtype)
            state[name] = value.to(torch.int16) if name == "remainder" else value
        if self.state_dtype is not None:
            x = local(p)
            for name in self.signs.keys() & state.keys():
                if state[name] is not None and x.is_floating_point():
                    self._keep(p, state, name, self._format(p, []))
        return state

    def _exported(self, p: Tensor, values: dict) -> dict:
        """The state of p in torch's format."""
        state = {name: value for name, value in values.items() if name.removesuffix("_scale") not in self.signs}
        for name in self.signs.keys() & values.keys():
            value = values[name]
            low = isinstance(value, Tensor) and value.dtype is torch.uint8
            state[name] = _wrap(p, self._decoded(local(p), values, name)) if low else value
        if "remainder" in state and local(p) is not p:
            state["remainder"] = state["remainder"].to(torch.int32)  # no backend can gather int16
        return {name: state[name] for name in values if name in state}


def _with_hook(hooks, hook, last: bool, function, *args):
    """function(*args), with `hook` temporarily among the optimizer's hooks: before all others, or after them."""
    hooks[_FIRST] = hook
    hooks.move_to_end(_FIRST, last=last)
    try:
        return function(*args)
    finally:
        del hooks[_FIRST]


def _export(optimizer, state_dict: dict) -> dict:
    """A hook of `state_dict`: the states in torch's format."""
    owners, number = {}, 0
    for group, packed in zip(optimizer.param_groups, state_dict["param_groups"], strict=True):
        owners.update((i, (p, group)) for i, p in zip(packed["params"], group["params"], strict=True))
    exported = {
        key: optimizer._exported(owners[key][0], values) if key in owners else values
        for key, values in state_dict["state"].items()
    }
    others: dict = {}
    for number, (_, group) in owners.items():
        step = exported.get(number, {}).get("step")
        if isinstance(step, Tensor):
            at = step.device if group.get("capturable") or group.get("fused") else torch.device("cpu")
            wide = torch.get_default_dtype() is torch.float64 and not group.get("fused")
            dtype = torch.float64 if wide else torch.float32
            if (step.device, step.dtype) != (at, dtype):
                others.setdefault((step.device, at, dtype), []).append((number, step))
    # All steps of a device in one transfer, then each in its own memory.
    for (_, at, dtype), found in others.items():
        together = torch.stack([step for _, step in found]).to(at, dtype)
        for (number, step), copy in zip(found, together.unbind(), strict=True):
            exported[number]["step"] = copy = copy.clone()
            _COUNTED_IN[copy] = step
    return {**state_dict, "state": exported}


def _protect(optimizer, state_dict: dict) -> dict:
    """A hook of `load_state_dict`: torch must not cast any state but `step`."""

    def kept(name, value):
        if not isinstance(value, Tensor):
            return value
        return _COUNTED_IN.get(value, value) if name == "step" else _Kept(value)

    state = {
        key: {name: kept(name, value) for name, value in values.items()} if isinstance(values, dict) else values
        for key, values in state_dict["state"].items()
    }
    return {**state_dict, "state": state}


def _unwrapped(values: dict) -> dict:
    return {name: value.value if isinstance(value, _Kept) else value for name, value in values.items()}


def _apart(values: dict) -> dict:
    step = values.get("step")
    return {**values, "step": step.clone()} if isinstance(step, Tensor) else values


def _codes(numel: int, format: str) -> int:
    return numel if format == "8bit" else (numel + 1) // 2


def _wrap(p: Tensor, x: Tensor) -> Tensor:
    """x, a local tensor, as a DTensor if p is one."""
    if local(p) is p:
        return x
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(x, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride())


def _check_shape(name: str, value: Tensor, x: Tensor) -> None:
    """Raises RuntimeError, as torch's step does, if a state has not the shape of its parameter."""
    if local(value).shape != x.shape:
        raise RuntimeError(
            f"The size of {name} {tuple(local(value).shape)} must match the size of its parameter {tuple(x.shape)}"
        )


def _like(p: Tensor, name: str, value: Tensor) -> Tensor:
    """value, the state `name` of p, copied if its memory layout differs from p's."""
    _check_shape(name, value, local(p))
    return value if order(local(value)) == order(local(p)) else _wrap(p, like(local(value), local(p)))


def _master(x: Tensor, remainder: Tensor) -> Tensor:
    """The float32 master of x, in its shape and order."""
    whole = torch.empty_like(x, dtype=torch.float32)
    flat(whole).copy_(formats.join(flat(x), flat(remainder)))
    return whole
