"""One rank's part of a program: a wrapped model, trained step by step, and what is logged after each step.

`Stock` is torch's fully_shard or DistributedDataParallel, `Ours` is haiscale's FSDP or DDP. `Alone` is the model
without a wrapper, whose gradients are averaged by hand.
"""

import contextlib

import torch
import torch.distributed as dist
import wrappers_models as models
from engine import Log
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import hfnn
from haiscale.ddp import DDP
from haiscale.fsdp import FSDP

BF16, FP32 = torch.bfloat16, torch.float32
_meshes: dict = {}


def mesh_of(group) -> DeviceMesh:
    if group not in _meshes:
        _meshes[group] = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("fsdp",))
    return _meshes[group]


def in_another_order(program) -> bool:
    """Whether a parameter has several gradients, which may be summed before they are averaged or after; or a result has
    several, whose order depends on the wrapper's own nodes around units."""
    nodes = list(models.walk(program["model"]))
    several = any(
        step[0] in ("two_forwards", "two_losses") or (step[0] == "train" and step[1] > 1) for step in program["steps"]
    )
    several = several or any(node.get("twice") or "reentrant" in node.get("checkpoint", "") for node in nodes)
    return several or any(node.get("residual") or node.get("output") == "input" for node in nodes)


class Stopped(Exception):
    """A forward that began, and did nothing."""


def _stop(*_):
    raise Stopped


class Session:
    """A program's model, on the ranks of a group."""

    def __init__(self, program, group, log: Log, noise: int):
        self.program, self.group, self.log = program, group, log
        torch.manual_seed(program["seed"])
        self.model = models.Model(program["model"], program["D"], program["tokens"]).train()
        if noise:
            torch.manual_seed(noise)
            with torch.no_grad():
                for p in self.model.parameters():
                    p *= 1 + torch.randn_like(p) * torch.finfo(p.dtype).eps
        if program["converted"] and isinstance(self, Ours):
            hfnn.convert(self.model, prefer="memory")
        if program["mixed"] and in_another_order(program):
            log.coarse = BF16
        self.fsdp = program["wrapper"].startswith("zero")
        self.units = models.units_of(self.model)
        self.names = [name for name, _ in self.model.named_parameters()]
        alias = list(self.model.named_parameters(remove_duplicate=False))
        self.aliases = [[name for name, held in alias if held is p] for p in self.model.parameters()]
        self.spare = nn.Linear(program["D"], program["D"])  # made before wrapping, to be added after
        self.wrapped = self.wrap()
        make = {"sgd": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9), "adamw": lambda p: torch.optim.AdamW(p, 0.01)}
        self.trained = [p for p in self.wrapped.parameters() if p.requires_grad]
        self.optimizer = make[program["optimizer"]](self.trained or [nn.Parameter(torch.zeros(1))])

    def parameters(self):
        return dict(zip(self.names, self.wrapped.parameters(), strict=True))

    def rows(self, tensor):
        """This rank's part of a parameter or a gradient."""
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    def load(self, values: dict) -> None:
        """Loads whole values, by name, as from a file."""
        self.wrapped.load_state_dict(values)

    def finish_backward(self, sync: bool) -> None:
        """What a wrapper does within backward."""

    def visible(self, p):
        return p.grad

    def recover(self) -> None:
        """What a user does after a backward that raised."""

    def refuses(self, train, names: list[str]) -> bool:
        """Whether the next training names parameters that the model was given."""
        return True

    def places(self, which: int) -> list[tuple[nn.Module, str]]:
        """The modules that have a parameter, and its name there."""
        split = [name.rpartition(".") for name in self.aliases[which]]
        return list(dict.fromkeys((self.model.get_submodule(path), name) for path, _, name in split))

    def replace(self, which: int, value, trained: bool) -> None:
        """What a parameter that replaces another is taken for: its value, in place."""
        self.load({**self.state(), **dict.fromkeys(self.aliases[which], value)})
        self.parameters()[self.names[which]].requires_grad_(trained)

    def reshard(self) -> None:
        """Whole parameters are gathered anew, where a wrapper leaves this to the user after an evaluation."""


class Ours(Session):
    def wrap(self):
        if not self.fsdp:
            return DDP(self.model, process_group=self.group, **self.program["ddp"])
        precision = (BF16, FP32) if self.program["mixed"] else None
        zero, buffers = int(self.program["wrapper"][-1]), self.program["buffers"]
        return FSDP(
            self.model, self.group, units=self.units, zero=zero, buffers=buffers, mixed_precision=precision,
        )  # fmt: skip

    def syncing(self, sync):
        return contextlib.nullcontext() if sync else self.wrapped.no_sync()

    def clip(self, norm):
        if self.fsdp:
            return self.wrapped.clip_grad_norm_(norm)
        return nn.utils.clip_grad_norm_(self.wrapped.parameters(), norm)

    def recover(self):
        """The next forward of DDP names that backward, if it has changed gradients, before the model runs."""
        if not self.fsdp:
            handle = self.model.register_forward_pre_hook(_stop)
            with contextlib.suppress(Stopped):
                try:
                    self.wrapped(None)
                except ValueError as error:
                    if "ended in an exception" not in str(error):
                        raise
            handle.remove()

    def refuses(self, train, names):
        try:
            train()
        except ValueError as error:
            return all(name in str(error) for name in (*names, "rap after"))
        return False

    def replace(self, which, value, trained):
        new = nn.Parameter(value, trained)
        for module, name in self.places(which):
            setattr(module, name, new)

    def state(self):
        if self.fsdp:
            return self.wrapped.full_state_dict(rank0_only=False)
        return self.wrapped.state_dict()


class Stock(Session):
    def parameters(self):
        """The sharded ones: without synchronisation fully_shard may leave whole ones in the module."""
        return dict(zip(self.names, self.held, strict=True))

    def wrap(self):
        wrapped = self._wrap()
        self.held = list(wrapped.parameters())
        return wrapped

    def _wrap(self):
        if not self.fsdp:
            return DistributedDataParallel(self.model, process_group=self.group, **self.program["ddp"])
        mesh = mesh_of(self.group)
        precision = MixedPrecisionPolicy(BF16, FP32) if self.program["mixed"] else MixedPrecisionPolicy()
        for unit in reversed(self.units):
            fully_shard(unit, mesh=mesh, mp_policy=precision)
        return fully_shard(self.model, mesh=mesh, mp_policy=precision)

    @contextlib.contextmanager
    def syncing(self, sync):
        if self.fsdp:
            self.wrapped.set_requires_gradient_sync(sync)
            yield
        else:
            with contextlib.nullcontext() if sync else self.wrapped.no_sync():
                yield

    def reshard(self):
        for module in self.wrapped.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def clip(self, norm):
        total = nn.utils.clip_grad_norm_(self.held, norm)
        return total.full_tensor() if isinstance(total, DTensor) else total

    def state(self):
        state = self.wrapped.state_dict()
        return {name: v.full_tensor() if isinstance(v, DTensor) else v for name, v in state.items()}

    def load(self, values):
        if not self.fsdp:
            return self.wrapped.load_state_dict(values)
        with torch.no_grad():
            for name, tensor in self.wrapped.state_dict(keep_vars=True).items():
                value = values[name]
                if isinstance(tensor, DTensor):
                    parts = value.chunk(self.group.size())
                    if self.group.rank() < len(parts):
                        tensor.to_local().copy_(parts[self.group.rank()])
                else:
                    tensor.copy_(value)


class Alone(Session):
    """Averages by hand; under FSDP's `no_sync`, gradients are hidden until they are averaged."""

    def wrap(self):
        self.kept, self.buffers_due = {}, True
        if self.program["mixed"]:
            raise ValueError("parameters are not cast by hand")
        if self.program["ddp"].get("broadcast_buffers"):
            self.model.register_forward_pre_hook(self.send_buffers)
            self.model.register_forward_hook(self.after_forward)
        return self.model

    def send_buffers(self, *_):
        for buffer in self.model.buffers() if self.buffers_due else ():
            dist.broadcast(buffer, 0, group=self.group)

    def after_forward(self, *_):
        self.buffers_due = self.sync and torch.is_grad_enabled()

    @contextlib.contextmanager
    def syncing(self, sync):
        if not sync and self.fsdp:
            for p in self.model.parameters():
                self.kept.setdefault(p, None if p.grad is None else p.grad.clone())
        self.sync = sync
        yield

    def finish_backward(self, sync):
        if not sync:
            return
        for p in self.model.parameters():
            has = torch.tensor([float(p.requires_grad and p.grad is not None)])
            dist.all_reduce(has, group=self.group)
            if has.item():
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                dist.all_reduce(p.grad, group=self.group)
                p.grad /= self.group.size()
        self.kept.clear()

    def rows(self, tensor):
        if not self.fsdp:
            return tensor
        parts = tensor.chunk(self.group.size())
        rank = self.group.rank()
        return parts[rank] if rank < len(parts) else tensor[:0]

    def clip(self, norm):
        return nn.utils.clip_grad_norm_(self.model.parameters(), norm)

    def state(self):
        return self.model.state_dict()

    def visible(self, p):
        return self.kept.get(p, p.grad)
