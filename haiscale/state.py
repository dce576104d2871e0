"""The tensors of models by name, which `haiscale.checkpoint` writes and reads.

Names are those of parameters in the user's plain, whole model: wrappers leave no trace in them, at any depth and in any
order. A wrapper with other names, or with parts of parameters, implements `named_shards()`: (name, live tensor or
DTensor) for each of its parameters and persistent buffers, tied ones once under their first name. If it keeps copies of
them, it also implements `shards_loaded()`, which is called after the tensors have been written to.
"""

import dataclasses
import io
import random
import sys
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

_INSIDE = ("_orig_mod", "_checkpoint_wrapped_module")  # what torch.compile and checkpoint_wrapper call their modules
_WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel)  # these, and ours, call it "module"
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


class Reader(FileSystemReader):
    """torch's reader of a folder, under the names that a checkpoint of this model has now.

    Older files have the names of wrappers within it.
    """

    def __init__(self, path, model: nn.Module):
        super().__init__(path)
        self._within = [
            (f"{name}module.", name)
            for name, module in _modules(model)
            if name and _is_wrapper(module) and "module" not in module.module._modules
        ]

    def plain_name(self, name: str) -> str:
        for part in _INSIDE:
            name = name.replace(f"{part}.", "")
        for long, short in self._within:
            name = short + name[len(long) :] if name.startswith(long) else name
        return name

    def _plain_key(self, key: str) -> str:
        kind, dot, name = key.partition(".")
        return f"{kind}{dot}{self.plain_name(name)}"

    def read_metadata(self, *args, **kwargs):
        found = super().read_metadata(*args, **kwargs)
        found.state_dict_metadata = {self._plain_key(key): value for key, value in found.state_dict_metadata.items()}
        found.storage_data = {
            dataclasses.replace(index, fqn=self._plain_key(index.fqn)): value
            for index, value in found.storage_data.items()
        }
        return found


# Models


def _is_wrapper(module: nn.Module) -> bool:
    """Whether it wraps its attribute `module`, which has its name in the plain model."""
    return isinstance(module, _WRAPPERS) or (hasattr(type(module), "shards_loaded") and "module" in module._modules)


def _modules(model: nn.Module, opaque: bool = False, name: str = "", seen=None) -> Iterator[tuple[str, nn.Module]]:
    """All modules, with what begins the names of their parameters in the plain model. opaque: not those inside of one
    with `named_shards`."""
    seen = set() if seen is None else seen
    if model in seen:
        return
    seen.add(model)
    yield name, model
    if opaque and hasattr(type(model), "named_shards"):
        return
    for key, child in model._modules.items():
        if child is not None:
            inside = key in _INSIDE or (key == "module" and _is_wrapper(model))
            yield from _modules(child, opaque, name if inside else f"{name}{key}.", seen)


def named_shards(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and persistent buffers of this rank by their names in the whole model: live tensors or DTensors."""
    seen = set()
    for prefix, module in _modules(model, opaque=True):
        if isinstance(module, FullyShardedDataParallel):
            raise ValueError(
                f"{prefix or 'the model'} is in torch's FullyShardedDataParallel, whose parameters are parts of flat "
                "tensors: use haiscale.fsdp.FSDP or torch's fully_shard"
            )
        if isinstance(module, FSDPModule):
            module.reshard()  # after a forward without a backward its parameters are copies of the shards
        if hasattr(type(module), "named_shards"):
            pairs = module.named_shards()
        else:
            hidden = module._non_persistent_buffers_set
            kept = [(name, buffer) for name, buffer in module._buffers.items() if name not in hidden]
            pairs = [*module._parameters.items(), *kept]
        for name, tensor in pairs:
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                yield prefix + name, tensor


def shards_loaded(model: nn.Module) -> None:
    """Call after values were written to `named_shards`."""
    for _, module in _modules(model, opaque=True):
        if hasattr(type(module), "shards_loaded"):
            module.shards_loaded()


# Whether they fit


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


def random_state() -> dict:
    """The states of all generators that this rank uses."""
    found = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        found["numpy"] = sys.modules["numpy"].random.get_state()
    if torch.cuda.is_initialized():
        found["cuda"] = torch.cuda.get_rng_state()
    return found


def set_random_state(found: dict) -> None:
    """Sets the generators to the states that `random_state` returned."""
    random.setstate(found["python"])
    torch.set_rng_state(found["torch"])
    if "numpy" in found:
        import numpy

        numpy.random.set_state(found["numpy"])
    if "cuda" in found and torch.cuda.is_available():
        torch.cuda.set_rng_state(found["cuda"])
