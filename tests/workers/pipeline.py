"""Pipelines on all ranks of a group, and on smaller groups: rank programs of test_pipeline.

Cases of one group run one after the other; ranks outside it go on to the next group.
"""

import itertools
import json
import os
import time
import traceback
import warnings
from datetime import timedelta
from pathlib import Path

import pipeline_cases as of
import torch
import torch.distributed as dist
from pipeline_models import DEVICE, SCHEDULES, Place
from pipeline_times import predicted

import hfreduce  # noqa: F401  the backend
from haiscale.ddp import DDP
from haiscale.fsdp import FSDP

warnings.filterwarnings("ignore")


MICROBATCHES = {2: (1, 3, 16), 3: (1, 2, 7), 4: (2, 5, 16)}
# Decoder, converted or not, microbatches.
DECODERS = {
    2: (("gpt2", False, 3), ("llama", True, 4)),
    3: (("llama", False, 4), ("gpt2", True, 2)),
    4: (("gpt2", True, 4), ("llama", False, 2)),
}


def cases(size):
    """{name: case} for a group of `size` ranks."""
    each = [(schedule, chunks) for schedule in SCHEDULES for chunks in MICROBATCHES[size]]
    found = {f"{schedule}, {chunks} microbatches": of.layered(schedule, chunks) for schedule, chunks in each}
    for schedule, (kind, converted, chunks) in itertools.product(SCHEDULES, DECODERS[size]):
        name = f"{kind}{', converted' if converted else ''}, {schedule}, {chunks} microbatches"
        found[name] = of.decoded(kind, converted, schedule, chunks)
    return found | {2: of_two, 3: of_three, 4: of_four}[size]()


def of_two():
    found = {
        "inference": of.inference,
        "masks": of.masks,
        "errors": of.errors,
        "one way each": of.directions("hfreduce"),
    }
    for converted, kind in itertools.product((False, True), ("gpt2", "llama")):
        name = f"{kind}{', converted' if converted else ''}"
        found[f"{name}, products"] = of.products(converted, kind)
    for mode in ("except_last", "always"):
        found[f"checkpoint {mode}"] = of.layered("ZeroBubble-V", 3, checkpoint=mode)
        found[f"dropout, checkpoint {mode}"] = of.dropout(mode)
    for mode in ("never", "except_last", "always"):
        found[f"autocast, checkpoint {mode}"] = of.autocast(mode)
    found["autocast, ZeroBubble-V"] = of.autocast("never", "ZeroBubble-V")
    for schedule in ("GPipe", "ZeroBubble-V"):
        found[f"tied copies, {schedule}"] = of.tied_copies(schedule)
    return found | {"too few rows": of.too_few_rows}


def of_three():
    found = {"several inputs": of.several_inputs, "other shapes": of.other_shapes, "frozen": of.frozen}
    found |= {"pictures": of.pictures, "clipping": of.clipping, "directions": of.directions("nccl")}
    for schedule in ("PipeDream", "ZeroBubble-V"):
        found[f"skip tensors, {schedule}"] = of.skips(schedule)
    return found


def of_four():
    found = {
        f"predicted, {schedule}": predicted(schedule) for schedule in ("PipeDream", "Interleaved1F1B", "DualPipeV")
    }
    for wrapper, schedule in itertools.product((DDP, FSDP), ("PipeDream", "ZeroBubble-H1", "ZeroBubble-V")):
        found[f"{wrapper.__name__} inside, {schedule}"] = of.replicas(schedule, wrapper)
    return found


def run(rank, world, store):
    """{case: (what is wrong, seconds)} of this rank's groups, all of which end at the last rank."""
    torch.set_num_threads(1)
    dist.init_process_group("hfreduce", store=dist.FileStore(store, world), rank=rank, world_size=world)
    return all_cases(rank, world, {size: cases(size) for size in (4, 3, 2)})


def all_cases(rank, world, by_size):
    found = {}
    for size, of_size in by_size.items():
        members = list(range(world - size, world))
        group = dist.new_group(members)
        if rank not in members:
            continue
        place = Place(group, dist.get_rank(group), size)
        for name, case in of_size.items():
            started = time.monotonic()
            try:
                wrong = case(place)
            except Exception:
                wrong = traceback.format_exc()[-3000:]
            found[f"{size} ranks, {name}"] = wrong, time.monotonic() - started
    return found


def device_cases(few):
    """{name: case}: all schedules on a decoder; one of them on a converted one; and what differs on a GPU."""
    microbatches = (4,) if few else (1, 4, 8)
    found = {}
    for schedule, chunks in itertools.product(SCHEDULES, microbatches):
        found[f"llama, {schedule}, {chunks} microbatches"] = of.decoded("llama", False, schedule, chunks, rows=8)
    for kind, chunks in itertools.product(("gpt2", "llama"), microbatches):
        name = f"{kind}, converted, ZeroBubble-V, {chunks} microbatches"
        found[name] = of.decoded(kind, True, "ZeroBubble-V", chunks, rows=8)
    found |= {f"tied, {schedule}": of.decoded("gpt2", False, schedule, 4, rows=8) for schedule in SCHEDULES}
    if few:
        return found
    found |= {f"dropout, checkpoint {mode}": of.dropout(mode) for mode in ("except_last", "always")}
    found |= {f"autocast, checkpoint {mode}": of.autocast(mode) for mode in ("never", "always")}
    found["autocast, ZeroBubble-H1"] = of.autocast("never", "ZeroBubble-H1")
    found |= {"several inputs": of.several_inputs, "other shapes": of.other_shapes, "pictures": of.pictures}
    return found | {"inference": of.inference, "masks": of.masks, "clipping": of.clipping}


def on_devices(rank, world, store, backend, few=False):
    """As `run`, on PIPELINE_DEVICE: in a group of all ranks, and in one of two. few: for CPUs, in seconds."""
    torch.set_num_threads(1)
    if DEVICE.type == "cuda":
        torch.cuda.set_device(DEVICE)
    notes = dist.FileStore(store, world)
    # Kernels may have to be compiled first.
    options = {"rank": rank, "world_size": world, "timeout": timedelta(seconds=60)}
    dist.init_process_group(backend, store=notes, **options)
    found = all_cases(rank, world, {size: device_cases(few) for size in dict.fromkeys((world, 2))})
    Path(f"{store}.result.{rank}").write_text(json.dumps(found))
    # As in tests/workers/ranks.py: gloo, by which NCCL's pipelines send their headers, is not taken down.
    notes.set(f"ended/{rank}", "")
    notes.wait([f"ended/{other}" for other in range(world)])
    os._exit(0)
