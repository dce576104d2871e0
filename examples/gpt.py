"""What train_gpt.py trains: the model, its text, and one run with its optimizer, random numbers, losses and times."""

import argparse
import contextlib
import random
import sysconfig
import time
from pathlib import Path

import numpy as np
import torch
import transformers
from torch.nn.attention import SDPBackend, sdpa_kernel

import hfnn
import hfrecord

RECORDS = "records:"  # --data records:FOLDER
PLAIN, OTHER, HFNN = "plain", "plain again", "hfnn"
MAX_TEXT = 4 << 20  # bytes
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "autocast": torch.float32}  # of the weights


def read_records(args, parser) -> np.ndarray:
    """`--data records:FOLDER`: args.order is the sampler of its records, the bytes tell if they are the same again."""
    folder = args.data.removeprefix(RECORDS)
    try:
        reader = hfrecord.FileReader(folder)
        rows = reader.schema.fields.get("input_ids") if reader.schema else None
        if not len(reader) or not rows or len(reader[0]["input_ids"]) < args.seq:
            parser.error(f"--data {args.data}: takes records with input_ids, --seq {args.seq} of them or more")
        first, last = reader.read([0, -1])
    except (OSError, ValueError) as error:
        parser.error(f"--data {args.data}: {error}")
    args.order = hfrecord.ElasticSampler(reader, args.batch, seed=args.seed % 2**32)
    return np.frombuffer(first + last + str(len(reader)).encode(), np.uint8)


def read_text(args, parser) -> np.ndarray:
    """The bytes to learn, MAX_TEXT at most: uint8 (n,). Files in the order of their names, binary ones left out."""
    if (args.data or "").startswith(RECORDS):
        return read_records(args, parser)
    root, text = Path(args.data or sysconfig.get_path("stdlib")), b""
    try:
        inside = sorted(root.rglob("*" if args.data else "*.py")) if root.is_dir() else None
        for path in [root] if inside is None else (p for p in inside if p.is_file() and "site-packages" not in p.parts):
            with path.open("rb") as file:
                content = file.read(MAX_TEXT - len(text))
            text += b"" if b"\0" in content else content
    except OSError as error:
        parser.error(f"--data {error.filename}: {error.strerror}")
    if len(text) <= args.seq:
        parser.error(f"--data {root}: {len(text)} bytes of text there, takes more than --seq {args.seq}")
    return np.frombuffer(text, np.uint8)


def batch(args, step: int) -> torch.Tensor:
    """Tokens of a step, int64 (batch, seq): a function of seed and step, so the step is all a resumed run must know."""
    if args.order is not None:
        args.order.data.advise(records_of(args, step + 1))
        rows = args.order.data[records_of(args, step)]
        return torch.from_numpy(np.stack([row["input_ids"][: args.seq] for row in rows])).long().to(args.device)
    begin = np.random.default_rng((args.seed % 2**32, step)).integers(len(args.text) - args.seq, size=(args.batch, 1))
    return torch.from_numpy(args.text[begin + np.arange(args.seq)]).long().to(args.device)


def records_of(args, step: int) -> np.ndarray:
    """The records of a step, which goes on in the next epoch where one ends: int64 (batch,)."""
    places = np.arange(step * args.batch, (step + 1) * args.batch)
    epochs = places // args.order.records
    return np.concatenate([args.order.indices(int(e), places[epochs == e]) for e in np.unique(epochs)])


def build(args, layers: int) -> torch.nn.Module:
    """An unmodified model of transformers; its random weights depend on the seed alone."""
    torch.manual_seed(args.seed % 2**32)
    common = {"vocab_size": 256, "bos_token_id": None, "eos_token_id": None, "attn_implementation": "sdpa"}
    if args.arch == "gpt2":
        shape = {"n_layer": layers, "n_embd": args.width, "n_head": args.heads, "n_positions": args.seq}
        drop = {"resid_pdrop": args.dropout, "embd_pdrop": args.dropout, "attn_pdrop": 0.0}
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**common, **shape, **drop))
    else:
        shape = {"num_hidden_layers": layers, "hidden_size": args.width, "num_attention_heads": args.heads}
        mlp = {"intermediate_size": (args.width * 8 // 3 + 63) // 64 * 64, "max_position_embeddings": args.seq}
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**common, **shape, **mlp))
    return model.to(args.device, DTYPES[args.dtype]).train()


class Run:
    """One model in training, with its optimizer, its random numbers, its losses and its times."""

    def __init__(self, name: str, args: argparse.Namespace, layers: int | None = None):
        self.name, self.args, self.cuda = name, args, args.device != "cpu"
        model = build(args, layers or args.layers)
        if name == HFNN:
            hfnn.convert(model, prefer="memory")
        self.model = self.wrapped(model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4, fused=True)
        if name == HFNN:
            hfnn.convert(self.optimizer)
        self.forward = torch.compile(self.model) if args.compile else self.model
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed((args.seed + (name == OTHER)) % 2**32)
        self.random = random_state()
        self.losses, self.ms = [], []

    def wrapped(self, model: torch.nn.Module) -> torch.nn.Module:
        """What holds the model in training; another run may share it with other ranks (distributed.py)."""
        return model

    def loss(self, ids: torch.Tensor) -> torch.Tensor:
        other = SDPBackend.EFFICIENT_ATTENTION if self.cuda else SDPBackend.MATH
        attention = sdpa_kernel(other) if self.name == OTHER else contextlib.nullcontext()
        low = torch.autocast(ids.device.type, torch.bfloat16, enabled=self.args.dtype == "autocast")
        with low, attention:
            return self.forward(input_ids=ids, labels=ids, use_cache=False).loss

    def step(self, ids: torch.Tensor) -> None:
        set_random_state(self.random)
        begin = time.perf_counter()
        loss = self.backward(ids)
        self.clip(1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())  # waits for the GPU
        self.ms.append((time.perf_counter() - begin) * 1000)
        self.random = random_state()

    def backward(self, ids: torch.Tensor) -> torch.Tensor:
        """Gradients of all parameters; returns the loss."""
        loss = self.loss(ids)
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
    """Of every generator, in types that torch.load takes without trusting the file."""
    kind, keys, *rest = np.random.get_state()
    states = {"python": random.getstate(), "numpy": (kind, keys.tolist(), *rest)}
    return states | {"torch": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state_all()}


def set_random_state(state: dict) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    torch.cuda.set_rng_state_all(state["cuda"])
