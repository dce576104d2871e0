"""The providers of wrappers for training on several ranks, and the work of each rank of parallel.py."""

import contextlib
import itertools
import json
import logging
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import zoo
from pipelines import PIPELINES, cut, next_token, predicted
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import hfnn

WARM_UP = 3
GIB = 2**30


# Cases


@dataclass(frozen=True)
class Case:
    """A model and a rank's batch (for a pipeline: the whole batch). kinds: the kinds of parallelism."""

    model: zoo.Model
    kinds: tuple[str, ...]
    microbatches: int = 1


def _gpt2(layers, size):
    def build(tiny):
        import transformers as t

        small = {"n_embd": 64, "n_head": 2, "vocab_size": 512, "n_positions": 64}
        config = t.GPT2Config(n_layer=4 if tiny else layers, use_cache=False, **(small if tiny else size))
        return t.GPT2LMHeadModel(config)

    return build


def _llama(tiny):
    return zoo.MODELS["llama"].build(8 if tiny else 22, tiny)


def _vgg16(tiny):
    """Simonyan and Zisserman, arXiv 1409.1556, table 1, column D: 138 M parameters, of which 124 M in three layers."""
    parts, channels = [], 3
    for width, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        width = width // 16 if tiny else width
        for _ in range(count):
            parts += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(inplace=True)]
            channels = width
        parts.append(nn.MaxPool2d(2))
    inner, pixels = (64, 1) if tiny else (4096, 7)
    sizes = [channels * pixels * pixels, inner, inner, 1000]
    head = [nn.AdaptiveAvgPool2d(pixels), nn.Flatten()]
    for a, b in itertools.pairwise(sizes[:3]):
        head += [nn.Linear(a, b), nn.ReLU(inplace=True), nn.Dropout()]
    return nn.Sequential(*parts, *head, nn.Linear(*sizes[2:]))


_BOTH = ("alone", "ddp", "fsdp")
CASES = {
    "gpt2": Case(zoo.Model(_gpt2(12, {}), (4, 1024)), _BOTH),
    "gpt2-16": Case(zoo.Model(_gpt2(12, {}), (16, 1024)), _BOTH),
    "gpt2-medium": Case(zoo.Model(_gpt2(24, {"n_embd": 1024, "n_head": 16}), (4, 1024)), _BOTH),
    "vgg16": Case(zoo.Model(_vgg16, (32, 224), (2, 32), zoo._images, zoo._classes_loss), ("alone", "ddp")),
    "llama-1.1b": Case(zoo.Model(_llama, (16, 2048), (16, 32)), ("pipeline",), 16),
}


# Providers


@dataclass(frozen=True)
class On:
    """The place of a rank: its device, and the ranks of a provider's backend."""

    device: torch.device
    group: dist.ProcessGroup
    tiny: bool

    @property
    def mesh(self) -> DeviceMesh:
        return DeviceMesh.from_group(self.group, self.device.type)


def _alone(model, on):
    return model


def _torch_ddp(model, on):
    ids = [on.device.index] if on.device.type == "cuda" else None
    return nn.parallel.DistributedDataParallel(model, ids, process_group=on.group, gradient_as_bucket_view=True)


def _ddp(model, on):
    from haiscale.ddp import DDP

    return DDP(model, process_group=on.group)


def _blocks(model) -> list[nn.Module]:
    """The layers, each a unit of sharding: the elements of the longest ModuleList."""
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList)]
    return list(max(lists, key=len)) if lists else []


def _fsdp2(model, on):
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    options = {"mesh": on.mesh}
    if on.device.type == "cuda":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in _blocks(model):
        fully_shard(block, **options)
    return fully_shard(model, **options)


def _fsdp(model, on):
    from haiscale.fsdp import FSDP, MixedPrecision

    precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return FSDP(model, process_group=on.group, mixed_precision=precision if on.device.type == "cuda" else None)


@dataclass(frozen=True)
class Provider:
    """kind: one of a case's. wrap: for data parallelism, (model, On) -> module; for a pipeline, a name of PIPELINES.
    hfnn, capture: whether the model is converted, and replayed from CUDA graphs."""

    kind: str
    wrap: Callable | str
    hfnn: bool = False
    capture: bool = False

    @property
    def ours(self) -> bool:
        return self.wrap in (_ddp, _fsdp) or (self.kind == "pipeline" and self.wrap.startswith("haiscale"))


PROVIDERS = {
    "alone": Provider("alone", _alone),
    "alone+hfnn": Provider("alone", _alone, hfnn=True),
    "alone+captured": Provider("alone", _alone, hfnn=True, capture=True),
    "torch-ddp": Provider("ddp", _torch_ddp),
    "haiscale-ddp": Provider("ddp", _ddp),
    "haiscale-ddp+hfnn": Provider("ddp", _ddp, hfnn=True),
    "haiscale-ddp+captured": Provider("ddp", _ddp, hfnn=True, capture=True),
    "torch-fsdp2": Provider("fsdp", _fsdp2),
    "haiscale-fsdp": Provider("fsdp", _fsdp),
    "haiscale-fsdp+hfnn": Provider("fsdp", _fsdp, hfnn=True),
    **{f"torch-{name}": Provider("pipeline", f"torch-{name}") for name, made in PIPELINES.items() if made[0]},
    **{f"haiscale-{name}": Provider("pipeline", f"haiscale-{name}") for name in PIPELINES},
    "haiscale-1f1b+hfnn": Provider("pipeline", "haiscale-1f1b", hfnn=True),
    "haiscale-zbv+hfnn": Provider("pipeline", "haiscale-zbv", hfnn=True),
}


class Training:
    """A model wrapped by one provider: calling it makes one step and returns its loss."""

    def __init__(self, provider: Provider, case: Case, on: On):
        self.provider, self.case, self.on = provider, case, on
        torch.manual_seed(0)
        with on.device:
            model = case.model.build(on.tiny).train()
        if provider.hfnn:
            hfnn.convert(model, capture=provider.capture)
        torch.manual_seed(dist.get_rank() if provider.kind != "pipeline" else 0)
        with on.device:
            self.batch = case.model.batch(model, *(case.model.tiny if on.tiny else case.model.shape))
        self.module = self.wrapped(model)
        if provider.hfnn:
            self.optimizer = hfnn.optim.AdamW(self.parameters(), lr=1e-4)
        else:
            self.optimizer = torch.optim.AdamW(self.parameters(), lr=1e-4, fused=True)

    def wrapped(self, model):
        return self.provider.wrap(model, self.on)

    def parameters(self) -> list[nn.Parameter]:
        return list(self.module.parameters())

    def autocast(self):
        """Autocast, but not on the CPU, where it is slow; FSDP casts itself."""
        low = self.on.device.type == "cuda" and self.provider.kind != "fsdp"
        return torch.autocast("cuda", torch.bfloat16) if low else contextlib.nullcontext()

    def gradients(self) -> torch.Tensor:
        with self.autocast():
            loss = self.case.model.loss(self.module, **self.batch)
        loss.backward()
        return loss.detach()

    def __call__(self) -> torch.Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.gradients()
        self.optimizer.step()
        return loss

    def is_being_tuned(self) -> bool:
        """Whether steps still try bucket sizes; the same on all ranks."""
        return self.provider.wrap is _ddp and bool(self.module.reducer.sizes.candidates)

    def without_sync(self) -> torch.Tensor:
        """A step without reductions."""
        with self.module.no_sync():
            return self()


class Pipeline(Training):
    """All providers use the same split into stages: haiscale's."""

    def wrapped(self, model):
        from haiscale import pipeline

        self.library, _, name = self.provider.wrap.partition("-")
        theirs, ours, chunks, placement = PIPELINES[name]
        rank, size = dist.get_rank(self.on.group), dist.get_world_size(self.on.group)
        numbers = [rank, 2 * size - 1 - rank] if placement == "v" else [rank + i * size for i in range(chunks)]
        ids = self.batch["input_ids"].tensor_split(self.case.microbatches)[0]
        with self.autocast():
            every = cut(model, ids, size, chunks, placement, self.provider.hfnn)
            with torch.no_grad():
                self.hidden = every[0](ids)
        self.parts = nn.ModuleList(every[number] for number in numbers)
        if self.library == "haiscale":
            return getattr(pipeline, ours)(list(self.parts), self.case.microbatches, process_group=self.on.group)
        return self._torch(theirs, numbers, size * chunks)

    def _torch(self, schedule, numbers, count):
        from torch.distributed.pipelining import PipelineStage, schedules

        stages = [
            PipelineStage(part, number, count, self.on.device, group=self.on.group)
            for part, number in zip(self.parts, numbers, strict=True)
        ]
        self.first, self.last = 0 in numbers, count - 1 in numbers
        made = getattr(schedules, schedule)
        return made(stages if len(stages) > 1 else stages[0], self.case.microbatches, loss_fn=next_token)

    def predicted(self, steps: int) -> float | None:
        """Microseconds of a step in a block of this many; called when there are gradients."""
        if self.library != "haiscale":
            return None
        return predicted(self.module, self.hidden, self.provider.hfnn, self.optimizer.step, steps)

    def parameters(self):
        return list(self.parts.parameters())

    def gradients(self):
        ids, zero = self.batch["input_ids"], torch.zeros((), device=self.on.device)
        with self.autocast():
            if self.library == "haiscale":
                loss, _ = self.module.forward_backward(ids, criterion=next_token, labels=(ids,), keep_outputs=False)
                return zero if loss is None else loss
            losses = []
            last = {"target": ids, "losses": losses} if self.last else {}
            self.module.step(*([ids] if self.first else []), **last)
            return torch.stack(losses).mean().detach() if losses else zero


# A rank


def measure(local: int, name: str, entries: list[tuple[str, str]], options, folder: str) -> None:
    """All providers of one case, in turns: this rank's results are written to `folder`, and before them the running
    provider.

    entries: names of provider and backend.
    """
    device = torch.device(options.device, local) if options.device == "cuda" else torch.device("cpu")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if "hfreduce" in (backends := list(dict.fromkeys(backend for _, backend in entries))):
        import hfreduce  # noqa: F401
    dist.init_process_group(backends[0])
    groups = {backend: dist.new_group(backend=backend) for backend in backends}
    found, made = {}, {}
    for entry in entries:
        _say(folder, entry)
        before, provider = _allocated(device), PROVIDERS[entry[0]]
        training = (Pipeline if provider.kind == "pipeline" else Training)(
            provider, CASES[name], On(device, groups[entry[1]], options.tiny)
        )
        losses = [training() for _ in range(WARM_UP)]
        while training.is_being_tuned():
            training()
        guess = training.predicted(options.steps) if provider.kind == "pipeline" else None
        training.optimizer.zero_grad(set_to_none=True)
        made[entry] = training
        # Of the step at which all have made the same number of steps.
        found[entry] = {
            "loss": losses[-1].item(),
            "us": [],
            "alone_us": [],
            "predicted_us": guess,
            "static_gib": (_allocated(device) - before) / GIB,
        }
    for i in range(options.rounds):
        for entry in entries[:: -1 if i % 2 else 1]:
            _say(folder, entry)
            training = made[entry]
            found[entry]["us"].append(_block(training, options.steps, device))
            if training.provider.kind == "ddp":
                found[entry]["alone_us"].append(_block(training.without_sync, options.steps, device))
    for entry, training in made.items():
        _say(folder, entry)
        found[entry]["peak_gib"] = _peak(training, device)
    rows = [{"entry": entry, **row} for entry, row in found.items()]
    Path(folder, f"found.{dist.get_rank()}").write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def _say(folder, entry) -> None:
    if dist.get_rank() == 0:
        Path(folder, "doing").write_text(json.dumps(entry))


def _block(step: Callable, steps: int, device) -> float:
    """Microseconds of a step, after all ranks have begun."""
    dist.barrier()
    _synchronise(device)
    begin = time.perf_counter()
    for _ in range(steps):
        step()
    _synchronise(device)
    return (time.perf_counter() - begin) / steps * 1e6


def _synchronise(device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _allocated(device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def _peak(training: Training, device) -> float | None:
    """Peak memory of a step above weights and states, GiB; not available on a CPU."""
    if device.type != "cuda":
        training()
        return None
    training.optimizer.zero_grad(set_to_none=True)
    _synchronise(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = _allocated(device)
    training()
    _synchronise(device)
    return (torch.cuda.max_memory_allocated(device) - before) / GIB


def merged(ranks: list[list[dict]]) -> dict[tuple[str, str], dict]:
    """By entry: times of the slowest rank, memory of the fullest, the mean loss; a pipeline's loss is that of one
    rank."""
    found = {}
    for rows in zip(*ranks, strict=True):
        entry = tuple(rows[0]["entry"])
        middle = [statistics.median(row["us"]) for row in rows]
        slow = rows[middle.index(max(middle))]
        of = {"us": max(middle), "spread": 100 * (max(slow["us"]) - min(slow["us"])) / max(middle)}
        of["alone_us"] = max((statistics.median(row["alone_us"]) for row in rows if row["alone_us"]), default=None)
        for key in ("peak_gib", "static_gib", "predicted_us"):
            of[key] = max((row[key] for row in rows if row[key] is not None), default=None)
        total = sum(row["loss"] for row in rows)
        of["loss"] = total if PROVIDERS[entry[0]].kind == "pipeline" else total / len(rows)
        found[entry] = of
    return found
