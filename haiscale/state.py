"""The states of models and optimizers by name, which `haiscale.checkpoint` writes and reads.

Names are those of parameters in the user's whole model, regardless of wrappers. A wrapper with other names, or with
parts of parameters, implements `named_shards()`: (name, live tensor or DTensor) for each of its parameters and
persistent buffers, tied ones once under their first name. If it keeps copies of them, it also implements
`shards_loaded()`, which is called after the tensors have been written to.
"""

import dataclasses
import inspect
import io
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

_INSIDE = ("_orig_mod.", "_checkpoint_wrapped_module.")  # prefixes that torch's wrappers of single modules add to names
_SHOWN = 6  # names in an error


class Piece:
    """A part of a whole tensor that a rank writes. tensor: plain; offsets and size: within the whole.

    It implements torch.distributed.checkpoint's protocol for objects that plan their own writes.
    """

    def __init__(self, value: Tensor, is_buffer: bool = False):
        self.is_buffer = is_buffer
        tensor, self.offsets, self.size = value.detach(), (0,) * value.dim(), value.shape
        self.here = True
        if isinstance(value, DTensor):
            _, self.offsets = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
            self.here = value.device_mesh.get_coordinate() is not None
            tensor = tensor.to_local()
        self.tensor = tensor

    def copy(self) -> None:
        """Copies to the host; on CUDA, the copy is asynchronous on the current stream."""
        source = self.tensor
        if source.is_cuda:
            pinned = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
            self.tensor = pinned.copy_(source, non_blocking=True)
        else:
            self.tensor = source.clone()

    def __create_write_items__(self, key: str, _) -> list[WriteItem]:
        # Some ranks have no rows of a small DTensor; a whole tensor without elements is still written.
        if not self.here or (self.tensor.numel() == 0 and self.size.numel() > 0):
            return []
        offsets = torch.Size(self.offsets) if self.size.numel() else torch.Size([0] * len(self.size))
        data = TensorWriteData(
            chunk=ChunkStorageMetadata(offsets, self.tensor.shape),
            properties=TensorProperties.create_from_tensor(self.tensor),
            size=self.size,
        )
        return [WriteItem(index=MetadataIndex(key, offsets), type=WriteItemType.SHARD, tensor_data=data)]


class Pickled:
    """An object as it is now, pickled as torch.save does, or the error of that, which the write raises."""

    def __init__(self, value):
        self._data, self._error = io.BytesIO(), None
        try:
            torch.save(value, self._data)
        except Exception as error:
            self._error = error

    def data(self) -> io.BytesIO:
        if self._error is not None:
            raise self._error
        return self._data


class WritePlanner(DefaultSavePlanner):
    """torch's planner, for Pieces. Each replica writes a part of the common data. Buffers, which may differ if every
    rank has its own batches, are those of the first rank, as in DDP."""

    def __init__(self):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self):
        buffers = {key for key, value in self.state_dict.items() if isinstance(value, Piece) and value.is_buffer}
        return dataclasses.replace(super().create_local_plan(), planner_data=buffers)

    def create_global_plan(self, all_plans):
        seen, plans = set(), []
        for plan in all_plans:
            items = [item for item in plan.items if item.index not in seen]
            seen |= {item.index for item in items if item.index.fqn in plan.planner_data}
            plans.append(dataclasses.replace(plan, items=items))
        return super().create_global_plan(plans)

    def lookup_object(self, index):
        value = self.state_dict[index.fqn]
        return value.tensor if isinstance(value, Piece) else value

    def transform_object(self, write_item, object):
        return object.data() if isinstance(object, Pickled) else super().transform_object(write_item, object)


class ReadPlanner(DefaultLoadPlanner):
    """torch's planner, with unchanged keys."""

    def __init__(self):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)


# Models


def inner(model: nn.Module) -> nn.Module:
    """The user's module, or the object with `named_shards`: without torch's DDP and torch.compile around it."""
    while not hasattr(type(model), "named_shards"):
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        elif isinstance(model, torch._dynamo.OptimizedModule):
            model = model._orig_mod
        else:
            break
    return model


def named_shards(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and persistent buffers of this rank by their names in the whole model: live tensors or DTensors."""
    model = inner(model)
    if hasattr(model, "named_shards"):
        yield from model.named_shards()
        return
    seen = set()
    for path, module in model.named_modules():
        kept = [
            (name, buffer) for name, buffer in module._buffers.items() if name not in module._non_persistent_buffers_set
        ]
        for name, tensor in [*module._parameters.items(), *kept]:
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                yield plain_name(f"{path}.{name}" if path else name), tensor


def plain_name(name: str) -> str:
    for part in _INSIDE:
        name = name.replace(part, "")
    return name


# Optimizers


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


def misfits(wanted: dict[str, Tensor], saved: dict) -> tuple[list[str], list[str]]:
    """(keys that were not saved, sentences about keys saved with another shape)."""
    missing = [key for key in wanted if key not in saved]
    shapes = [
        f"{key.partition('.')[2]} is {tuple(saved[key].size)} there and {tuple(tensor.shape)} here"
        for key, tensor in wanted.items()
        if key in saved and saved[key].size != tensor.shape
    ]
    return missing, shapes


def misfit_message(path, missing: list[str], surplus: list[str], shapes: list[str]) -> str | None:
    """One sentence that lists them, or None."""
    said = []
    if missing:
        said.append(f"{_some(missing)} {'is' if len(missing) == 1 else 'are'} not in it")
    if surplus:
        said.append(f"{_some(surplus)} of it {'is' if len(surplus) == 1 else 'are'} not here")
    said += [_some(shapes)] if shapes else []
    if not said:
        return None
    advice = "Build the model and the optimizer as they were when it was saved, or load the model alone"
    return f"checkpoint {path} does not fit: {'; '.join(said)}. {advice}"


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
