"""Common code of the examples: a model in training, its settings, and records as training data."""

import argparse
import contextlib
import random
import time
from pathlib import Path

import numpy as np
import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch.nn.attention import SDPBackend, sdpa_kernel

import hfnn
import hfrecord

RECORDS = "records:"  # --data records:FOLDER
PLAIN, OTHER, HFNN = "plain", "plain again", "hfnn"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "autocast": torch.float32}  # of the weights


class Run:
    """One model in training, with its optimizer, its random numbers, its losses and its times.

    A subclass has `build()`, the model in plain torch, and `loss_of(batch)`.
    """

    items = "samples"  # the name of a batch's items
    rate = 3e-4

    def __init__(self, name: str, args: argparse.Namespace):
        self.name, self.args, self.cuda = name, args, args.device != "cpu"
        torch.manual_seed(args.seed % 2**32)  # weights only depend on the seed
        model = self.build().to(args.device, DTYPES[args.dtype]).train()
        if name == HFNN:
            hfnn.convert(model, prefer="memory")
        self.model = self.wrapped(model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.rate, fused=True)
        if name == HFNN:
            hfnn.convert(self.optimizer)
        self.forward = torch.compile(self.model) if args.compile else self.model
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed((args.seed + (name == OTHER)) % 2**32)
        self.random = random_state()
        self.losses, self.ms = [], []

    def wrapped(self, model: torch.nn.Module) -> torch.nn.Module:
        """Wraps the model for training; a subclass may spread it over ranks (distributed.py)."""
        return model

    def loss(self, batch) -> torch.Tensor:
        other = SDPBackend.EFFICIENT_ATTENTION if self.cuda else SDPBackend.MATH
        attention = sdpa_kernel(other) if self.name == OTHER else contextlib.nullcontext()
        low = torch.autocast(torch.device(self.args.device).type, torch.bfloat16, enabled=self.args.dtype == "autocast")
        with low, attention:
            return self.loss_of(batch)

    def step(self, batch) -> None:
        set_random_state(self.random)
        begin = time.perf_counter()
        loss = self.backward(batch)
        self.clip(1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())  # waits for the GPU
        self.ms.append((time.perf_counter() - begin) * 1000)
        self.random = random_state()

    def backward(self, batch) -> torch.Tensor:
        """Gradients of all parameters; returns the loss."""
        loss = self.loss(batch)
        loss.backward()
        return loss.detach()

    def clip(self, norm: float) -> None:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), norm)

    def state(self) -> dict:
        states = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        return states | {"random": self.random, "losses": self.losses, "ms": self.ms}

    def load_state(self, state: dict) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.random, self.losses, self.ms = state["random"], state["losses"], state["ms"]


def random_state() -> dict:
    """The states of all generators, in types that torch.load accepts without trusting the file."""
    kind, keys, *rest = np.random.get_state()
    states = {"python": random.getstate(), "numpy": (kind, keys.tolist(), *rest)}
    return states | {"torch": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state_all()}


def set_random_state(state: dict) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    torch.cuda.set_rng_state_all(state["cuda"])


def train(runs: list[Run], first: int, batch) -> None:
    """Step i of every run, then step i + 1 of every run, in alternating order. `batch(args, step)`: the batch of a
    step."""
    args = runs[0].args
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns) as progress:
        task = progress.add_task("training", total=args.steps, completed=first)
        for step in range(first, args.steps):
            given = batch(args, step)
            for run in runs if step % 2 == 0 else runs[::-1]:
                run.step(given)
            losses = " ".join(f"{run.losses[-1]:.3f}" for run in runs)
            progress.update(task, advance=1, description=f"loss {losses}")


class Parser(argparse.ArgumentParser):
    """The settings that all examples have."""

    def __init__(self, doc: str, prog: str):
        super().__init__(description=doc.split("\n")[0], prog=prog)
        add = self.add_argument
        add("--seed", type=int, default=0, help="for weights, batches and dropout masks")
        add("--dtype", choices=DTYPES, help="default: float32 on the CPU, autocast (to bfloat16) on a GPU")
        add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
        add("--compile", action="store_true", help="torch.compile every model")
        add("--no-convert", dest="convert", action="store_false", help="plain torch only")
        add("--no-band", dest="band", action="store_false", help="skip the third run")
        name = prog.removesuffix(".py")
        add("--out", default="out", help=f"folder for {name}.json and {name}.png (default: out)")

    def error(self, message):
        self.exit(2, f"{self.prog}: error: {message}\n")  # one line, without the usage

    def check_numbers(self, args, names) -> None:
        for name in names:
            if getattr(args, name) < 1:
                self.error(f"--{name} takes a whole number from 1, got {getattr(args, name)}")

    def check_place(self, args, folders) -> None:
        """Checks the device, and the writable (option, folder) pairs."""
        try:
            assert torch.empty(0, device=args.device).device.type in ("cpu", "cuda"), "takes cpu or cuda"
        except (RuntimeError, AssertionError) as error:
            self.error(f"--device {args.device}: {str(error).splitlines()[0]}")
        for option, folder in folders:
            try:
                Path(folder).mkdir(parents=True, exist_ok=True)
            except OSError as error:
                self.error(f"{option} {folder}: {error.strerror}")


def names_of_runs(args) -> list[str]:
    wanted = {PLAIN: True, OTHER: args.convert and args.band, HFNN: args.convert}
    return [name for name in wanted if wanted[name]]


def records(args, parser, field: str, needs: str, fits) -> hfrecord.FileReader:
    """`--data records:FOLDER`, whose first record has a `field` that `fits`; args.order is then their sampler."""
    try:
        reader = hfrecord.FileReader(args.data.removeprefix(RECORDS))
        known = reader.schema is not None and field in reader.schema.fields
        if not len(reader) or not known or not fits(reader[0]):
            parser.error(f"--data {args.data}: takes records with {needs}")
    except (OSError, ValueError) as error:
        parser.error(f"--data {args.data}: {error}")
    args.order = hfrecord.ElasticSampler(reader, args.batch, seed=args.seed % 2**32)
    return reader


def records_of(args, step: int) -> np.ndarray:
    """The records of a step, which may continue in the next epoch: int64 (batch,)."""
    places = np.arange(step * args.batch, (step + 1) * args.batch)
    epochs = places // args.order.records
    return np.concatenate([args.order.indices(int(e), places[epochs == e]) for e in np.unique(epochs)])


def rows_of(args, step: int) -> list[dict]:
    """The records themselves; those of the next step are prefetched."""
    args.order.data.advise(records_of(args, step + 1))
    return args.order.data[records_of(args, step)]
