"""The states of optimizers by the names of their parameters, which `haiscale.checkpoint` writes and reads."""

import inspect
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import BytesStorageMetadata


def as_list(optimizer) -> list[torch.optim.Optimizer]:
    """None, one optimizer or several, as a list."""
    if optimizer is None:
        return []
    return [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)


def owned_names(optimizer: torch.optim.Optimizer, names: dict[int, str]) -> list[list[str]]:
    """The names of the parameters of each group; names: by the identity of the parameter. ValueError: one has none."""
    found = []
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            if id(parameter) not in names:
                raise ValueError(
                    f"parameter {place} of group {number} of {type(optimizer).__name__}, of shape "
                    f"{tuple(parameter.shape)}, is none of the model's: make the optimizer from the parameters of the "
                    "wrapped model, and save both together"
                )
        found.append([names[id(parameter)] for parameter in group["params"]])
    return found


def owned_by_each(optimizers: list[torch.optim.Optimizer], names: dict[int, str]) -> list[list[list[str]]]:
    """`owned_names` of each. ValueError: two have the same parameter, so their states would have the same names."""
    found, owner = [], {}
    for optimizer in optimizers:
        found.append(owned_names(optimizer, names))
        for name in (name for group in found[-1] for name in group):
            other = owner.setdefault(name, optimizer)
            if other is not optimizer:
                raise ValueError(
                    f"{name} is in two optimizers, {type(other).__name__} and {type(optimizer).__name__}: save and "
                    "load one of them, and keep the other's state_dict() as an extra"
                )
    return found


def optimizer_entries(optimizer: torch.optim.Optimizer, of_groups: list[list[str]]) -> Iterator[tuple[str, object]]:
    """(key, value) of everything that an optimizer keeps: states, and the options of its groups with their names.

    of_groups: the names of the parameters of each group."""
    packed = optimizer.state_dict()
    for owned, group in zip(of_groups, packed["param_groups"], strict=True):
        if not owned:
            continue
        options = {key: value for key, value in group.items() if key != "params"}
        # Ranks that have the same group have the same key, and one of them writes it.
        entry = {"params": owned, "options": options, "class": _class_of(optimizer)}
        yield f"param_group.{zlib.crc32(' '.join(owned).encode()):08x}", entry
        for number, name in zip(group["params"], owned, strict=True):
            for key, value in packed["state"].get(number, {}).items():
                yield f"optimizer.{name}.{key}", value


def saved_states(owned: Iterable[str], saved: dict) -> dict[str, dict[str, object]]:
    """For each named parameter, what was saved of its states, by key. saved: the description of every entry."""
    found = {name: {} for name in owned}
    for full, entry in saved.items():
        kind, _, rest = full.partition(".")
        if kind == "optimizer":
            # Names and keys may both have dots; no name is another's beginning, because a module is no parameter.
            dots = (at for at, character in enumerate(rest) if character == ".")
            at = next((at for at in dots if rest[:at] in found), None)
            if at is not None:
                found[rest[:at]][rest[at + 1 :]] = entry
    return found


def to_read_into(states: dict, parameters: dict[str, Tensor]) -> dict[str, dict[str, object]]:
    """The `saved_states` of these parameters: an empty tensor to read into, or None for what is not a tensor."""
    return {
        name: {key: _to_read_into(entry, parameter) for key, entry in states[name].items()}
        for name, parameter in parameters.items()
    }


def _to_read_into(entry, parameter: Tensor) -> Tensor | None:
    if isinstance(entry, BytesStorageMetadata):
        return None
    if entry.size == parameter.shape:  # in its parameter's layout, on any number of ranks
        return torch.zeros_like(parameter.detach(), dtype=entry.properties.dtype)
    return torch.zeros(entry.size, dtype=entry.properties.dtype)


def load_optimizer(optimizer, owned: list[list[str]], states: dict, groups: list[dict]) -> None:
    """Loads the read states into an optimizer that fits them. groups: all saved groups."""
    of = {name: group["options"] for group in groups for name in group["params"]}
    packed, number = {"state": {}, "param_groups": []}, 0
    for names, group in zip(owned, optimizer.param_groups, strict=True):
        options = {key: value for key, value in group.items() if key != "params"}
        options |= of[names[0]] if names else {}
        numbers = list(range(number, number + len(names)))
        packed["state"] |= {i: states[name] for i, name in zip(numbers, names, strict=True) if states[name]}
        packed["param_groups"].append({**options, "params": numbers})
        number += len(names)
    optimizer.load_state_dict(packed)


def _class_of(optimizer: torch.optim.Optimizer) -> str:
    kind = type(_inside(optimizer))
    return f"{kind.__module__}.{kind.__qualname__}"


def _inside(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer within a wrapper, such as accelerate's."""
    while isinstance(getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = optimizer.optimizer
    return optimizer


# Whether they fit


def optimizer_misfits(optimizer, owned: list[list[str]], states: dict, groups: list[dict]) -> list[str]:
    """Sentences about an optimizer whose groups or states are others than the saved ones. states: all `saved_states`.

    States of another class fit if one step of this class, with the saved options, makes states of the same names.
    """
    of, said, mine = {name: group for group in groups for name in group["params"]}, [], _class_of(optimizer)
    keeping = {None, *(of[name].get("class") for name, found in states.items() if found)}
    for names, group in zip(owned, optimizer.param_groups, strict=True):
        known = [(name, p) for name, p in zip(names, group["params"], strict=True) if name in of]
        first = known[0][0] if known else None
        others = (name for name, _ in known if _differ(of[name]["options"], of[first]["options"]))
        if (other := next(others, None)) is not None:
            said.append(
                f"{first} and {other} are in one group of {type(optimizer).__name__}, but were saved with other "
                f"options: {of[first]['options']} and {of[other]['options']}; group the parameters as they were"
            )
        made: dict[int, str] = {}  # by the number of dimensions
        found: dict[tuple, list[str]] = {}
        for name, p in known:
            kind = of[name].get("class")  # None in old checkpoints
            # A class without any states keeps none; otherwise a parameter without states has had no gradient.
            if kind == mine or not (states[name] or kind not in keeping):
                continue
            if p.dim() not in made:
                made[p.dim()] = _states_after_a_step(_inside(optimizer), group, of[first]["options"], p)
            there = ", ".join(sorted(states[name])) or "none"
            if made[p.dim()] != there:
                found.setdefault(((kind or "another class").rpartition(".")[2], there, made[p.dim()]), []).append(name)
        for (of_class, there, here), which in found.items():
            more = f" and {len(which) - 1} more" if len(which) > 1 else ""
            said.append(
                f"the optimizer's states of {which[0]}{more} are {there} there ({of_class}) and {here} here "
                f"({mine.rpartition('.')[2]})"
            )
    return said


def _states_after_a_step(optimizer, group: dict, options: dict, parameter: Tensor) -> str:
    """The names of the states that a step makes for a parameter, tried on a small copy; or why it cannot be tried."""
    small = torch.zeros([min(n, 2) for n in parameter.shape], dtype=parameter.dtype, device=parameter.device)
    small.grad = torch.zeros_like(small)
    tried = type(optimizer).__new__(type(optimizer))
    groups = [{**group, **options, "params": [small]}]
    try:
        tried.__setstate__({"defaults": optimizer.defaults, "state": defaultdict(dict), "param_groups": groups})
        with torch.no_grad():
            inspect.unwrap(type(optimizer).step)(tried)  # without hooks
        return ", ".join(sorted(key for state in tried.state_dict()["state"].values() for key in state)) or "none"
    except Exception as error:
        return f"unknown, as a step on a copy raises {type(error).__name__}: {error}"


def _differ(a: dict, b: dict) -> bool:
    return a is not b and (a.keys() != b.keys() or any(bool(a[key] != b[key]) for key in a))
