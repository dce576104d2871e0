"""Splits a model into stages."""

import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from haiscale import checks
from haiscale.pipeline import decoder, sequential
from haiscale.pipeline.actions import check_counts, in_turn, v_shape
from haiscale.pipeline.stage import Cut, mark
from haiscale.pipeline.timeline import measure

log = logging.getLogger("haiscale.pipeline")
PLACEMENTS = {"loop": "chunk r + v * stages is the v-th of rank r", "v": "rank r has r and 2 * stages - 1 - r"}


def partition(
    module: nn.Module,
    pp_rank: int | None = None,
    pp_size: int | None = None,
    balance: Sequence[int] | None = None,
    num_model_chunks: int = 1,
    *,
    stages: int | None = None,
    placement: str = "loop",
    sample: tuple[Any, ...] | None = None,
) -> nn.Module | list[nn.Module]:
    """The stage of one rank, `partition(model, pp_rank, pp_size)`, or all of them, `partition(model, stages)`.

    Stages share the modules of the model, and parameters keep their names.

    Args:
        module: A `torch.nn.Sequential`, a `SequentialModel`, or a decoder of transformers, converted by hfnn or not, on
            any device, the meta device included.
        pp_rank: The rank whose stage is wanted; or the number of stages, if it is the only number.
        pp_size: The number of ranks.
        balance: The number of layers of each chunk, in the order of the model. In a decoder, the embeddings, each
            block, and the norm with the head count as one layer each. None: measured. If torch.distributed is
            initialised, rank 0 measures for all, so all ranks of all pipelines must call this. If nothing can be
            measured, layers are weighted by their parameters.
        num_model_chunks: Chunks on each rank; the result for a rank is then a list.
        stages: The number of ranks, for the stages of all.
        placement: Which chunks a rank has: "loop" for Interleaved1F1B, "v" for ZeroBubble and DualPipeV.
        sample: The inputs of one microbatch, to measure; None: for decoders one sequence.

    Raises:
        ValueError: The model cannot be split like this, or arguments do not fit together.

    >>> model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(4)))
    >>> [len(stage) for stage in haiscale.pipeline.partition(model, 2, balance=[1, 3])]
    [1, 3]
    """
    if stages is None and pp_size is None:
        stages, pp_rank = pp_rank, None
    pp_size = stages if pp_size is None else pp_size
    check_counts(stages=pp_size, num_model_chunks=num_model_chunks)
    chunks = pp_size * num_model_chunks
    place = _placement(placement, pp_size, num_model_chunks)
    units, cut = _cutter(module)
    if chunks > units:
        raise ValueError(f"{units} layers cannot be cut into {chunks} stages: each must have at least one")
    counts = _measured(module, units, cut, chunks, sample) if balance is None else list(balance)
    if len(counts) != chunks or sum(counts) != units or min(counts) < 1:
        raise ValueError(
            f"balance={counts} is not accepted for a model of {units} layers and {chunks} stages: give {chunks} "
            f"numbers of at least 1 that add up to {units}"
        )
    ends = [sum(counts[:i]) for i in range(chunks + 1)]
    parts = [cut(start, stop) for start, stop in itertools.pairwise(ends)]
    _mark(module, parts)
    if pp_rank is None:
        return parts
    if not isinstance(pp_rank, int) or not 0 <= pp_rank < pp_size:
        raise ValueError(f"pp_rank={pp_rank!r} is not accepted: give an integer from 0 to {pp_size - 1}")
    mine = [part for part, rank in zip(parts, place, strict=True) if rank == pp_rank]
    return mine if num_model_chunks > 1 else mine[0]


def layer_costs(
    module: nn.Module,
    sample: tuple[Any, ...] | None = None,
    repeats: int = 3,
    criterion: Callable[[Any], Tensor] | None = None,
) -> list[measure.LayerCost]:
    """The measured cost of each layer of `partition`; `stage_costs` converts it for `predict`.

    Args:
        module: As for `partition`.
        sample: The inputs of one microbatch; None: for decoders one sequence.
        repeats: Runs whose median counts.
        criterion: criterion(output) is the loss of the sample; its cost is part of the last layer.

    Raises:
        ValueError: A Sequential has no sample, or parameters are on the meta device.
    """
    units, cut = _cutter(module)
    if any(p.is_meta for p in module.parameters()):
        raise ValueError("parameters on the meta device cannot be measured: measure where they have values")
    if sample is None:
        if isinstance(module, nn.Sequential):
            raise ValueError("give sample=, the inputs of one microbatch, to measure a Sequential")
        sample = decoder.sample(module)
    return measure.measure([cut(i, i + 1) for i in range(units)], tuple(sample), repeats, criterion)


def _placement(name, stages, chunks):
    if name == "v" and chunks == 2:
        return v_shape(stages)
    if name == "loop":
        return in_turn(stages, chunks)
    known = "; ".join(f"{key!r}: {text}" for key, text in PLACEMENTS.items())
    raise ValueError(f"placement={name!r} with {chunks} chunks on a rank is not accepted; {known}, of two chunks")


def _cutter(module) -> tuple[int, Callable[[int, int], nn.Module]]:
    """(number of layers, a function that makes a stage from the layers start to stop)."""
    if isinstance(module, nn.Sequential):
        return len(module), lambda start, stop: sequential.cut(module, start, stop)
    if isinstance(module, nn.Module) and decoder.find_blocks(module) is not None:
        decoder.check(module)
        return decoder.units(module), lambda start, stop: decoder.cut(module, start, stop)
    raise ValueError(
        f"a {type(module).__name__} cannot be cut: give a torch.nn.Sequential, a haiscale.pipeline.SequentialModel, or "
        "a decoder of transformers; or make the stages yourself and give them to the pipeline"
    )


def _measured(module, units, cut, chunks, sample):
    counts = torch.zeros(chunks, dtype=torch.int64)
    together = dist.is_available() and dist.is_initialized()
    if not together or dist.get_rank() == 0:
        measurable = not any(p.is_meta for p in module.parameters())
        if measurable and (sample is not None or not isinstance(module, nn.Sequential)):
            found = measure.balance(layer_costs(module, sample), chunks)
            log.info("stages of %s layers, by measured time and memory", found)
        else:
            parts = [cut(i, i + 1) for i in range(units)]
            found = measure.balance_by_numbers([sum(p.numel() for p in part.parameters()) for part in parts], chunks)
            log.info("stages of %s layers, by their parameters: give sample= to have layers measured", found)
        counts = torch.tensor(found)
    if together:
        counts = counts.to(checks.host_device(dist.group.WORLD))
        dist.broadcast(counts, 0)
    return counts.tolist()


def _mark(module, parts):
    """Tells each part the names of tied parameters in the whole model, and which other parts have them."""
    first, holders, found = {}, {}, []
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        first[id(tensor)] = name
    for chunk, part in enumerate(parts):
        own = [*part.named_parameters(remove_duplicate=False), *part.named_buffers(remove_duplicate=False)]
        found.append({name: first[id(tensor)] for name, tensor in own if id(tensor) in first})
        for tensor in part.parameters():
            holders.setdefault(first[id(tensor)], []).append(chunk)
    shared = {name: tuple(chunks) for name, chunks in holders.items() if len(chunks) > 1}
    for chunk, (part, names) in enumerate(zip(parts, found, strict=True)):
        renamed = {name: whole for name, whole in names.items() if name != whole}
        mark(part, Cut(chunk, len(parts), renamed, {n: c for n, c in shared.items() if chunk in c}))
