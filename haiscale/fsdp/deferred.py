"""Prepares parameters and buffers before sharding: moves them to the device, creates those on meta, broadcasts rank
0's."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh


class Initialiser:
    """Gives each unit's parameters their values, one unit at a time, so that only one unit is whole at a time."""

    def __init__(self, model: nn.Module, device: torch.device, init_fn, send: bool, mesh: DeviceMesh):
        self.model, self.device, self.init_fn, self.send, self.mesh = model, device, init_fn, send, mesh
        self._initialised: set[nn.Module] = set()

    def parameters(self, owned: list[tuple[str, nn.Parameter, list]]) -> list[tuple[str, nn.Parameter, list]]:
        """The same rows, with parameters that are on the device and have values."""
        rows, modules = [], {}
        for name, p, places in owned:
            if p.is_meta:
                p = nn.Parameter(torch.empty_like(p, device=self.device), p.requires_grad)
                for module, attribute in places:
                    module._parameters[attribute] = p
                modules.update((module, name) for module, _ in places)
            rows.append((name, p, places))
        # Of tied parameters the values of the first module stay, as when the model is built.
        for module in reversed(modules):
            self._initialise(module, modules[module])
        # Initialisation may have replaced parameters.
        rows = [(name, places[0][0]._parameters[places[0][1]], places) for name, _, places in rows]
        rows = [(name, _moved(p, self.device), places) for name, p, places in rows]
        if self.send:
            self._broadcast([p.detach() for _, p, _ in rows])
        return rows

    def buffers(self, dtype: torch.dtype | None) -> None:
        """Buffers of the whole model; those on meta that do not exist yet are created now."""
        for prefix, module in self.model.named_modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.is_meta:
                    self._initialise(module, f"{prefix}.{name}")
        for module in self.model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    cast = dtype if dtype is not None and buffer.is_floating_point() else buffer.dtype
                    module._buffers[name] = buffer.to(self.device, cast)
        if self.send:
            self._broadcast(list(self.model.buffers()))

    @torch.no_grad()
    def _initialise(self, module: nn.Module, name: str) -> None:
        if module in self._initialised:
            return
        self._initialised.add(module)
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[key] = torch.empty_like(buffer, device=self.device)
        if self.init_fn is not None:
            self.init_fn(module)
        elif hasattr(module, "reset_parameters"):
            module.reset_parameters()
        else:
            raise ValueError(
                f"{name} is on the meta device, and {type(module).__name__} has no reset_parameters() to give it "
                "values: give FSDP param_init_fn, a function that initialises the parameters and buffers that a module "
                "itself has, or build the model on another device"
            )

    def _broadcast(self, tensors: list[Tensor]) -> None:
        """Broadcasts from the first rank of the mesh: to the first rank of each replica, and from there to its
        shards."""
        for dim in range(self.mesh.ndim):
            group = self.mesh.get_group(dim)
            for tensor in tensors:
                dist.broadcast(tensor, dist.get_global_rank(group, 0), group=group)


def _moved(p: nn.Parameter, device: torch.device) -> nn.Parameter:
    return p if p.device == device else nn.Parameter(p.detach().to(device), p.requires_grad)
