"""The wrappers: `torch.nn.Module`s around the stage of a rank, one for each schedule.

stage = partition(model, pp_rank, pp_size)
pp = PipeDream(stage, chunks=8, process_group=pp_group)
loss, logits = pp.forward_backward(tokens, criterion=criterion, labels=(tokens,))
optimizer.step()
"""

import contextlib
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from haiscale import checks
from haiscale import state as states
from haiscale.pipeline import (
    batch,
    dual_pipe_v,
    gpipe,
    interleaved,
    one_f_one_b,
    ties,
    zero_bubble,
)
from haiscale.pipeline.actions import FORWARD, Schedule
from haiscale.pipeline.engine import CHECKPOINTS, Engine, Work
from haiscale.pipeline.stage import cut_of
from haiscale.pipeline.timeline import measured, picture, simulate


class Pipeline(nn.Module):
    """A model split over the ranks of `process_group`; the subclasses choose the schedule.

    Created by all ranks of the group together.

    Args:
        module: This rank's stage, from `partition` or any module, on its device; a list of them if the schedule has
            several chunks on a rank. It may be wrapped in haiscale's DDP or FSDP over the ranks with the same stage.
            The first chunk is called with the inputs, each other one with the previous chunk's result: a tensor, or a
            tuple of tensors and None, with any shapes, dtypes and number, which may change in every step.
        chunks: The number of microbatches.
        process_group: The ranks, in the order of the stages; None: all.
        checkpoint: The microbatches whose forward runs a second time instead of being kept: "never", "except_last" (of
            the step) or "always".

    Raises:
        ValueError: An argument is not accepted, or ranks differ in them.
    """

    group: dist.ProcessGroup
    module: nn.Module
    rank: int
    schedule: Schedule

    def __init__(
        self,
        module: nn.Module | Sequence[nn.Module],
        chunks: int,
        process_group: dist.ProcessGroup | None = None,
        checkpoint: str = "never",
    ):
        super().__init__()
        self.group = checks.group_of(process_group)
        modules = [module] if isinstance(module, nn.Module) and not isinstance(module, nn.ModuleList) else list(module)
        self.module = modules[0] if len(modules) == 1 else nn.ModuleList(modules)
        try:
            self._set_up(modules, chunks, checkpoint)
        except ValueError as error:
            self._agree(checkpoint, error)
        self._agree(checkpoint, None)
        parameter = next((p for one in modules for p in one.parameters()), torch.empty(0))
        self._engine = Engine(self._chunks, self.schedule, self.group, parameter.device, checkpoint)
        self._average, self._fault, self._last_run = True, None, None

    def _set_up(self, modules, chunks, checkpoint):
        """The checks that this rank can do alone."""
        self.rank = dist.get_rank(self.group)
        self.schedule = self._schedule(dist.get_world_size(self.group), chunks, len(modules))
        simulate.check(self.schedule)
        if checkpoint not in CHECKPOINTS:
            raise ValueError(f"checkpoint={checkpoint!r} is not accepted: give one of {', '.join(CHECKPOINTS)}")
        mine = self.schedule.chunks(self.rank)
        self._chunks = dict(zip(mine, modules, strict=True))
        self.is_first, self.is_last = 0 in mine, len(self.schedule.placement) - 1 in mine
        self._check_stages()
        self._ties = ties.Ties(self._chunks, self.schedule.placement, self.group)

    @staticmethod
    def _schedule(stages: int, microbatches: int, chunks: int) -> Schedule:
        raise NotImplementedError("a Pipeline has no schedule: use GPipe, PipeDream or another of its subclasses")

    def _check_stages(self):
        for chunk, module in self._chunks.items():
            cut = cut_of(module)
            count = len(self.schedule.placement)
            if cut is not None and (cut.chunk, cut.chunks) != (chunk, count):
                stages = self.schedule.stages
                shape = ', placement="v"' if self.schedule.placement[-1] == 0 and stages > 1 else ""
                raise ValueError(
                    f"{checks.me()} was given chunk {cut.chunk} of {cut.chunks} where {self.schedule.name} has chunk "
                    f"{chunk} of {count}: call partition(model, {self.rank}, {stages}, "
                    f"num_model_chunks={count // stages}{shape})"
                )
            if isinstance(module, nn.parallel.DistributedDataParallel):
                raise ValueError(
                    "torch's DistributedDataParallel averages in the backward of each microbatch: wrap the stage in "
                    "haiscale.ddp.DDP"
                )

    def _agree(self, checkpoint, error):
        """Raises this rank's error; also raises if ranks differ, because they would wait for each other for ever."""
        made = None if error else f"{self.schedule.name} {self.schedule.placement} {checkpoint}"
        mine = [0, 0] if error else [zlib.crc32(made.encode()) + 1, self.schedule.microbatches]
        values = torch.tensor(mine, device=checks.host_device(self.group))
        every = [torch.empty_like(values) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(every, values, group=self.group)
        if error:
            raise error
        every = [row.tolist() for row in every]
        ranks = dist.get_process_group_ranks(self.group)
        for rank, row in zip(ranks, every, strict=True):
            if row == [0, 0]:
                raise ValueError(f"rank {rank} cannot make its part of this pipeline: its own error says why")
            if row != every[0]:
                raise ValueError(
                    f"ranks {ranks[0]} and {rank} do not make the same pipeline ({every[0][1]} and {row[1]} "
                    "microbatches): give all ranks the same class, chunks and checkpoint"
                )

    # Steps

    def forward_backward(
        self,
        *inputs: Any,
        criterion: Callable[..., Tensor] | None = None,
        labels: Tensor | Sequence[Any] = (),
        keep_outputs: bool = True,
    ) -> tuple[Tensor | None, object]:
        """One step: `.grad` of all parameters is added to, as if `criterion(model(*inputs), *labels)` ran backward.

        Args:
            inputs: Of the model, on the rank with the first chunk. Tensors are split along their first dimension into
                microbatches.
            criterion: On the rank with the last chunk: criterion(output, *labels) is the mean loss of a microbatch, one
                element. Microbatches count in proportion to their rows, equal ones 1 / chunks each.
            labels: On the rank with the last chunk, split like inputs.
            keep_outputs: Whether outputs are returned; otherwise they take no memory.

        Returns:
            (loss, outputs) on the rank with the last chunk: the loss of the batch and the concatenated outputs of the
            model, both without a graph. On other ranks (None, None).

        Raises:
            ValueError: Inputs or labels cannot be split. Errors of the model and the backend are raised unchanged.
                After an error the pipeline is unusable, and raises the same error again.
        """
        labels = (labels,) if isinstance(labels, Tensor) else tuple(labels)
        if self.is_last and criterion is None:
            raise ValueError(f"{checks.me()} has the last chunk: give it criterion=, a function of output and labels")
        with torch.enable_grad():
            work = self._run(self.schedule, inputs, labels, criterion, keep_outputs)
        if not self.is_last:
            return None, None
        loss = sum(loss * share for loss, share in zip(work.losses, work.shares, strict=True))
        return loss, batch.join(work.outputs) if keep_outputs else None

    def forward(self, *inputs: Any) -> Any:
        """Pipelined inference without a graph: the outputs on the rank with the last chunk, None on others."""
        orders = tuple(tuple(a for a in order if a.kind == FORWARD) for order in self.schedule.orders)
        schedule = Schedule(self.schedule.name, self.schedule.microbatches, self.schedule.placement, orders)
        with torch.no_grad():
            work = self._run(schedule, inputs, (), None, True)
        return batch.join(work.outputs) if self.is_last else None

    def _run(self, schedule, inputs, labels, criterion, keep_outputs):
        if self._fault is not None:
            raise self._fault
        count = schedule.microbatches
        try:
            work = Work(
                batch.split(inputs, count, "inputs") if self.is_first else None,
                batch.split(labels, count, "labels") if self.is_last else None,
                criterion if self.is_last else None,
                keep_outputs and self.is_last,
                self._average,
            )
            training = torch.is_grad_enabled()
            if training:
                self._ties.begin()
            self._engine.run(schedule, work)
            if training:
                self._ties.exchange()
            self._last_run = schedule
            return work
        except BaseException as error:
            self._fault = error
            raise

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Steps inside do not average gradients over replicas: a DDP or FSDP inside averages in the next step."""
        before, self._average = self._average, False
        try:
            yield
        finally:
            self._average = before

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scales the gradients of all stages so that their norm is at most `max_norm`; returns the norm before.

        As torch.nn.utils.clip_grad_norm_ on the whole model: a tied parameter counts once. Called by all ranks of the
        group. The host does not wait for the device.

        Args:
            max_norm: A positive number.
            norm_type: 2, any other positive number, or inf.
        """
        parameters = [p for p in self.parameters() if p.grad is not None]
        counted = [p.grad for p in parameters if not self._ties.counted_elsewhere(p)]
        norm = torch.nn.utils.get_total_norm(counted, norm_type)
        norm = (norm.full_tensor() if isinstance(norm, DTensor) else norm).to(self._engine.device, torch.float32)
        largest = norm_type == float("inf")
        power = norm if largest else norm**norm_type
        dist.all_reduce(power, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=self.group)
        norm = power if largest else power ** (1 / norm_type)
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        return norm

    # Pictures

    def timeline(self) -> simulate.Timeline:
        """The last step as it ran on all ranks, in ms, with the peak MiB of activations of each rank.

        All ranks of the group call it.

        Raises:
            ValueError: There was no step yet.
        """
        return self._measured()[0]

    def costs(self) -> simulate.Costs:
        """The costs of the last step, in ms and MiB, for simulating this and other schedules. Called by all ranks."""
        return measured.costs(*self._measured())

    def report(self, width: int | None = None) -> str:
        """A picture of the last step, and of the step predicted from its costs. Called by all ranks.

        Args:
            width: Columns; None: those of the terminal.
        """
        timeline, activations = self._measured()
        predicted = simulate.predict(timeline.schedule, measured.costs(timeline, activations))
        real, expected = timeline.makespan, predicted.makespan
        return "\n".join(
            [
                f"measured: {real:.2f} ms; predicted from its costs: {expected:.2f} ms ({expected / real - 1:+.1%})",
                *("milliseconds, MiB of activations", picture.draw(timeline, width)),
                *("predicted", picture.draw(predicted, width)),
            ]
        )

    def _measured(self):
        if self._last_run is None:
            raise ValueError("there is nothing to show before the first step: call forward_backward first")
        engine = self._engine
        return measured.gather(self._last_run, engine.clock.spans(), engine.activations, self.group)

    # Checkpoints

    def named_shards(self) -> Iterator[tuple[str, Tensor]]:
        """This rank's parameters and persistent buffers (live) by their names in the whole model, each name once."""
        seen = set()
        for module in self._chunks.values():
            cut = cut_of(module)
            for name, tensor in states.named_shards(module):
                name = cut.names.get(name, name) if cut is not None else name
                if name not in seen:
                    seen.add(name)
                    yield name, tensor

    def shards_loaded(self) -> None:
        """Call after values were written to `named_shards`."""
        for module in self._chunks.values():
            states.shards_loaded(module)


class GPipe(Pipeline):
    """All forwards, then all backwards (gpipe.py)."""

    @staticmethod
    def _schedule(stages, microbatches, chunks):
        _check_chunks("GPipe", chunks, 1)
        return gpipe.schedule(stages, microbatches)


class PipeDream(Pipeline):
    """1F1B: after a warm-up one forward and one backward in turn (one_f_one_b.py)."""

    @staticmethod
    def _schedule(stages, microbatches, chunks):
        _check_chunks("PipeDream", chunks, 1)
        return one_f_one_b.schedule(stages, microbatches)


class Interleaved1F1B(Pipeline):
    """1F1B with several chunks on a rank, rank r has chunks r, r + stages, ..., in this order (interleaved.py)."""

    @staticmethod
    def _schedule(stages, microbatches, chunks):
        return interleaved.schedule(stages, microbatches, chunks)


class ZeroBubble(Pipeline):
    """Backward in two parts (zero_bubble.py): with one module ZB-H1, in the memory of 1F1B; with two ZB-V, where rank r
    has the chunks r and 2 * stages - 1 - r, in this order (`partition(..., num_model_chunks=2, placement="v")`).
    """

    @staticmethod
    def _schedule(stages, microbatches, chunks):
        _check_chunks("ZeroBubble", chunks, 1, 2)
        return (zero_bubble.h1 if chunks == 1 else zero_bubble.zbv)(stages, microbatches)


class DualPipeV(Pipeline):
    """Two chunks on each rank, there and back, whose forwards and backwards run in pairs (dual_pipe_v.py)."""

    @staticmethod
    def _schedule(stages, microbatches, chunks):
        _check_chunks("DualPipeV", chunks, 2)
        return dual_pipe_v.schedule(stages, microbatches)


def _check_chunks(name, chunks, *accepted):
    if chunks not in accepted:
        raise ValueError(f"{name} was given {chunks} modules: give {' or '.join(map(str, accepted))}")
