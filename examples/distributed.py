"""train_gpt.py on several ranks: the same model, text and batches, with haiscale's wrappers around the model.

The batch is the same as for one process: ddp and fsdp give each rank some rows, a pipeline splits it into microbatches.
So without dropout the losses are those of one process, up to rounding.
"""

import json
import statistics
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from gpt import Run, batch
from rich.console import Console
from rich.table import Table
from runs import HFNN, PLAIN, random_state, set_random_state

import haiscale
from haiscale import checkpoint
from haiscale.ddp import DDP
from haiscale.fsdp import FSDP
from haiscale.pipeline import DualPipeV, GPipe, Interleaved1F1B, PipeDream, ZeroBubble, partition

WARM_UP, LAST = 3, 10  # steps left out of the times, and in the mean of the final loss
# The wrapper of each schedule, chunks of the model on each rank, and their placement.
SCHEDULES = {
    "gpipe": (GPipe, 1, "loop"),
    "1f1b": (PipeDream, 1, "loop"),
    "interleaved": (Interleaved1F1B, 2, "loop"),
    "zb-h1": (ZeroBubble, 1, "loop"),
    "zbv": (ZeroBubble, 2, "v"),
    "dualpipev": (DualPipeV, 2, "v"),
}


class Replicated(Run):
    """Each rank has the model, and some rows of a batch; gradients are averaged."""

    def __init__(self, name, args, groups):
        self.groups, self.replicas = groups, dist.get_world_size() // groups.mesh["pp"].size()
        super().__init__(name, args)
        # Weights are the same on all ranks; dropout masks are not.
        torch.manual_seed((args.seed + dist.get_rank()) % 2**32)
        self.random["torch"] = torch.get_rng_state()

    def wrapped(self, model):
        return DDP(model)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """This replica's part of a batch."""
        return ids.tensor_split(self.replicas)[dist.get_rank() % self.replicas]

    def backward(self, ids):
        return self.mean(super().backward(self.rows(ids)))

    def mean(self, loss: torch.Tensor) -> torch.Tensor:
        """The mean over all replicas, from the ranks that have a value; the others contribute 0."""
        dist.all_reduce(loss)
        return loss / self.replicas


class Sharded(Replicated):
    """In addition, each rank only has a part of each parameter."""

    def wrapped(self, model):
        return FSDP(model)

    def clip(self, norm):
        self.model.clip_grad_norm_(norm)


class Pipelined(Replicated):
    """Each rank has some layers; several pipelines are replicas."""

    def wrapped(self, model):
        wrapper, chunks, placement = SCHEDULES[self.args.schedule]
        parts = partition(
            model, dist.get_rank(self.groups.pp_group), self.args.stages, num_model_chunks=chunks, placement=placement
        )
        parts = parts if isinstance(parts, list) else [parts]
        if self.replicas > 1:
            parts = [DDP(part, process_group=self.groups.dp_group) for part in parts]
        return wrapper(parts, self.args.microbatches, process_group=self.groups.pp_group)

    def backward(self, ids):
        low = torch.autocast(ids.device.type, torch.bfloat16, enabled=self.args.dtype == "autocast")
        mine = self.rows(ids)
        with low:
            loss, _ = self.model.forward_backward(mine, criterion=next_token, labels=(mine,), keep_outputs=False)
        return self.mean(torch.zeros((), device=ids.device) if loss is None else loss.float())

    def clip(self, norm):
        self.model.clip_grad_norm_(norm)


RUNS = {"ddp": Replicated, "fsdp": Sharded, "pipeline": Pipelined}


def next_token(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The loss that transformers models compute from labels: logits (batch, seq, 256), ids (batch, seq)."""
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def train(local: int, args, resumed: bool, path: str) -> None:
    """What every rank does."""
    transformers.logging.set_verbosity_error()
    args.device = str(haiscale.init(device="cpu" if args.device == "cpu" else None))
    steps(args, resumed, path)
    dist.barrier()  # rank 0 has the store that the other ranks need to shut down
    dist.destroy_process_group()


def steps(args, resumed: bool, path: str) -> None:
    """All steps of all runs; rank 0 writes the measurements to `path`."""
    groups = haiscale.make_subgroups(pp_size=args.stages if args.dist == "pipeline" else 1)
    runs = [RUNS[args.dist](name, args, groups) for name in (PLAIN, HFNN) if name == PLAIN or args.convert]
    first, leads = 0, dist.get_rank() == 0
    for run in runs if resumed else ():
        first = load(run, f"{args.resume}/{run.name}")
    for step in range(first, args.steps):
        ids = batch(args, step)
        for run in runs if step % 2 == 0 else runs[::-1]:
            run.step(ids)
        if leads and (step + 1) % 10 == 0:
            print(f"step {step + 1}: loss", *(f"{run.losses[-1]:.3f}" for run in runs), flush=True)
    for run in runs if args.save else ():
        set_random_state(run.random)
        extra = {"losses": run.losses, "ms": run.ms}
        checkpoint.save(f"{args.save}/{run.name}", run.model, run.optimizer, step=args.steps, keep=2, **extra)
    if leads:
        Path(path).write_text(json.dumps({run.name: {"losses": run.losses, "ms": run.ms} for run in runs}))


def load(run: Run, folder: str) -> int:
    """Loads its state from a checkpoint, written by any number of ranks; returns the number of steps."""
    set_random_state(run.random)  # unchanged if the number of ranks differs
    extra = checkpoint.load(folder, run.model, run.optimizer)
    run.losses, run.ms, run.random = extra["losses"], extra["ms"], random_state()
    return extra["step"]


def main(args, resumed: bool) -> None:
    """Starts the ranks, and prints their results."""
    out = Path(args.out, "train_gpt.json")
    haiscale.spawn(train, args.nproc, args=(args, resumed, str(out)))
    rows = json.loads(out.read_text())
    how = f"{args.dist}, {args.nproc} ranks" + (
        f", {args.schedule}, {args.stages} stages, {args.microbatches} microbatches" if args.dist == "pipeline" else ""
    )
    table = Table(
        "", *rows, title=f"{args.arch}, {args.layers} layers of width {args.width}, {how}", title_justify="left"
    )
    for column in table.columns[1:]:
        column.justify = "right"
    ms = {name: statistics.median(row["ms"][WARM_UP:] or row["ms"]) for name, row in rows.items()}
    table.add_row("final loss", *(f"{statistics.fmean(row['losses'][-LAST:]):.4f}" for row in rows.values()))
    table.add_row("ms per step, median", *(f"{ms[name]:.1f}" for name in rows))
    table.add_row("tokens per second", *(f"{args.batch * args.seq / ms[name] * 1000:,.0f}" for name in rows))
    Console().print(table, f"wrote {out}", highlight=False, sep="\n")
