"""One rank of haiscale.fsdp: cases are functions of (rank, size), run one after the other in one process group.

fsdp_versus.py has the cases compared with torch's fully_shard on the same backend: reductions have a fixed order, so
results are bitwise equal. fsdp_own.py, fsdp_outputs.py, fsdp_methods.py and fsdp_values.py have the rest,
fsdp_models.py the models.
"""

import dataclasses
import traceback
from functools import partial

import fsdp_methods
import fsdp_outputs as outputs
import fsdp_own as own
import fsdp_values as values
import fsdp_versus as versus
import torch
import torch.distributed as dist
from fsdp_models import BF16, DEVICE, FP32, Net, loss_of

import hfreduce
from haiscale.fsdp import FSDP
from haiscale.fsdp.predict import predict

MIXED = BF16, FP32
TWO = {
    **{f"zero{zero}": partial(versus.plain, zero=zero) for zero in (1, 2, 3)},
    **{f"zero{zero}_mixed": partial(versus.plain, zero=zero, precision=MIXED) for zero in (1, 2, 3)},
    "low_reduction": partial(versus.plain, precision=(BF16, BF16)),
    "untied": partial(versus.plain, tied=False),
    "gpt2": partial(versus.language, kind="gpt2", steps=50),
    "gpt2_converted": partial(versus.language, kind="gpt2", steps=6, convert=True),
    "llama": partial(versus.language, kind="llama", steps=50, precision=MIXED, clip=0.5),
    "llama_converted": partial(versus.language, kind="llama", steps=6, convert=True, precision=MIXED),
    **{f"accumulate_zero{zero}": partial(versus.accumulate, zero=zero) for zero in (1, 2, 3)},
    "accumulate_mixed": partial(versus.accumulate, precision=MIXED),
    **{
        name: getattr(versus, name)
        for name in ("buffers", "frozen", "unused", "aside", "clipped", "output", "checkpoints", "compiled")
    },
    **{name: getattr(own, name) for name in ("dtypes", "twice", "in_backward", "hooks_of_parameters", "uneven")},
    **{name: getattr(own, name) for name in ("errors", "policies", "optimizer_made_before", "sparse", "another_order")},
    "norms_alone": own.norms_alone,
    **{
        name: getattr(outputs, name)
        for name in (
            *("outputs", "handed_on", "written_to", "around"),
            *("shared_inside_and_outside", "read_too_late", "missed"),
        )
    },
    **{name: getattr(fsdp_methods, name) for name in ("methods", "generates", "own_hands")},
    **{name: getattr(values, name) for name in ("states", "meta", "sent", "evaluated", "again", "assigned", "offload")},
    **{name: getattr(values, name) for name in ("used_directly", "one_at_a_time", "written", "migrated")},
    **{name: getattr(values, name) for name in ("containers", "copied")},
}  # fmt: skip
FOUR = {
    "zero3_of_four": versus.plain,
    "hybrid": versus.hybrid,
    "hybrid_mixed": partial(versus.hybrid, precision=MIXED, zero=2),
    "hybrid_uneven": own.hybrid_uneven,
    "clipped_without_rows": own.clipped_without_rows,
    "reduce_unused": own.reduce_unused,
    "measured": own.measured,
}


def cases(rank, size, store, names=None, backend="hfreduce"):
    """The result of each case by name, or the traceback of its error."""
    torch.set_num_threads(1)
    if DEVICE == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=size)
    found = {}
    for name, case in {2: TWO, 4: FOUR}[size].items():
        if names is None or name in names:
            try:
                found[name] = case(rank, size)
            except BaseException:
                found[name] = traceback.format_exc()[-3000:]
                print(f"{name}: {found[name]}", flush=True)  # in case another rank waits for this one
    assert backend != "hfreduce" or hfreduce.operations() > 10  # all of this ran on hfreduce
    dist.destroy_process_group()
    if "measured" in found and rank == 0:
        found["predicted"] = predictions()
    return found


def predictions():
    """For as many ranks as `own.measured` ran on, and for more; computed without ranks."""

    def guess(ranks, **options):
        def loss(model):
            return loss_of(model, torch.zeros(2, 12, dtype=torch.long))

        return dataclasses.asdict(predict(lambda: Net(depth=4), loss, ranks, mixed_precision=MIXED, **options))

    return {"4": guess(4), "64": guess(64), "16 times 4": guess(64, replicas=16)}


def peak_of_converted(rank, size, store):
    """Peak bytes of a step of a converted GPT-2, counted on this rank; and predicted."""
    import transformers

    import hfnn

    small = {"vocab_size": 512, "n_embd": 64, "n_head": 4, "n_layer": 2, "bos_token_id": 1, "eos_token_id": 2}

    def build():
        return hfnn.convert(transformers.GPT2LMHeadModel(transformers.GPT2Config(**small)), prefer="memory")

    def loss(model):
        ids = torch.zeros(4, 64, dtype=torch.long)
        return model(ids, labels=ids).loss

    dist.init_process_group("hfreduce", init_method=f"file://{store}", rank=rank, world_size=size)
    with own.Live() as live:
        model = FSDP(build())
        found = own.measure(model, live, loss, torch.optim.AdamW(model.parameters())).peak
    dist.destroy_process_group()
    return found, predict(build, loss, size, like_gpu=False).peak


def peak_on_gpus(rank, size, store):
    """Peak bytes that a training step of GPT-2 124M allocates on this rank's GPU, and the prediction of them."""
    import transformers

    config = transformers.GPT2Config(use_cache=False)

    def loss(model, device="cpu"):
        ids = torch.zeros(4, 1024, dtype=torch.long, device=device)
        return model(ids, labels=ids).loss

    def build():
        return transformers.GPT2LMHeadModel(config).train()

    torch.cuda.set_device(rank)
    dist.init_process_group("hfreduce", init_method=f"file://{store}", rank=rank, world_size=size)
    with torch.device("cuda", rank):
        model = FSDP(build(), mixed_precision=MIXED)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        loss(model, "cuda").backward()
        optimizer.step()
        optimizer.zero_grad()
    measured = torch.cuda.max_memory_allocated()
    dist.destroy_process_group()
    return measured, predict(build, loss, size, mixed_precision=MIXED).peak
