"""Peak memory of a training step on any number of ranks, without these ranks and without GPUs."""

import contextlib
import gc
from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import hfnn
from haiscale.fsdp.wrapper import FSDP
from hfnn.memory import peak


class Live(peak.Live):
    """Counts the storages that ops return, also those behind DTensors."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # its ops on local tensors arrive here separately
        return super().__torch_dispatch__(func, types, args, kwargs)


@dataclass(frozen=True)
class Prediction:
    """Bytes on one rank. peak: the maximum during a step; parameters, states, communication and rest add up to it.

    parameters, states: shards, and the optimizer's states of them. gradients: of the shards, after backward.
    communication: slots and buffers. rest: activations, gradients at the time of the peak, buffers of modules,
    temporaries.
    """

    ranks: int
    parameters: int
    gradients: int
    states: int
    communication: int
    rest: int
    peak: int

    def __str__(self) -> str:
        rows = [(f.name, getattr(self, f.name)) for f in fields(self)[1:]]
        lines = [f"{name:14} {number / 2**20:12.2f} MiB" for name, number in rows]
        return "\n".join([f"a step on {self.ranks} ranks, per rank", *lines])


def predict(
    build: Callable[[], nn.Module],
    loss: Callable[[nn.Module], Tensor],
    ranks: int,
    optimizer: Callable = torch.optim.AdamW,
    device: torch.device | str = "cpu",
    replicas: int = 1,
    like_gpu: bool = True,
    **options,
) -> Prediction:
    """The peak memory of a rank's second training step, when the model of `build()` is sharded over `ranks`.

    build: called under `torch.device("meta")`. loss: a function of the wrapped model that creates inputs on `device`
    and returns the scalar loss. optimizer: a function of the parameters. replicas: the number of replicas of shards;
    there are ranks / replicas shards. options: FSDP's. The step is run on tensors without memory (FakeTensor) and in a
    process group without other ranks. device: "cuda" needs a torch built for it. like_gpu: on "cpu", what is chosen and
    kept for backward is that of a GPU (`hfnn.as_if`). The memory of a real group's backend, of a GPU's allocator and of
    its libraries is not included. Raises ValueError if torch.distributed is initialised, and for a device this torch
    was not built for.
    """
    if torch.device(device).type == "cuda" and not torch.backends.cuda.is_built():
        raise ValueError("device='cuda' takes a torch that was built for CUDA; device='cpu' predicts GPUs as well")
    if dist.is_initialized():
        raise ValueError("predict makes a process group of its own: call it where torch.distributed is not initialised")
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    resharded = hfnn.recipe.parameters_are_resharded()  # as for the parameters of a real rank
    try:
        shape = (ranks,) if replicas == 1 else (replicas, ranks // replicas)
        options["device_mesh"] = init_device_mesh(torch.device(device).type, shape)
        with torch.device("meta"):
            built = build()
        options = {"device_id": torch.device(torch.device(device).type, 0), "param_init_fn": lambda _: None, **options}
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        with Live() as live, fake, torch.device(device), hfnn.as_if() if like_gpu else contextlib.nullcontext():
            model = FSDP(built, **options)
            return measure(model, live, loss, optimizer(model.parameters()))
    finally:
        hfnn.recipe.parameters_are_resharded(resharded)
        dist.destroy_process_group()


def measure(model: FSDP, live: Live, loss: Callable, stepper: torch.optim.Optimizer) -> Prediction:
    """The second of two steps of a model that was created, like its optimizer, under `live`."""
    gc.collect()
    for _ in range(2):
        live.peak = live.now
        loss(model).backward()
        stepper.step()
        stepper.zero_grad()
    held = model.memory()
    states = sum(_nbytes(value) for state in stepper.state.values() for value in state.values())
    communication = held.slots + held.reductions
    rest = live.peak - held.parameters - states - communication
    return Prediction(model.mesh.size(), held.parameters, held.gradients, states, communication, rest, live.peak)


def _nbytes(value) -> int:
    if not isinstance(value, Tensor):
        return 0
    return (value._local_tensor if isinstance(value, DTensor) else value).nbytes
