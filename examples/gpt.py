"""The model and the text of train_gpt.py, and one run with both."""

import sysconfig
from pathlib import Path

import numpy as np
import runs
import torch
import transformers
from runs import RECORDS

import hfnn

MAX_TEXT = 4 << 20  # bytes


def read_records(args, parser) -> np.ndarray:
    """`--data records:FOLDER`: args.order is the sampler of its records; the returned bytes identify the data."""
    needs = f"input_ids, --seq {args.seq} of them or more"
    reader = runs.records(args, parser, "input_ids", needs, lambda row: len(row["input_ids"]) >= args.seq)
    first, last = reader.read([0, -1])
    return np.frombuffer(first + last + str(len(reader)).encode(), np.uint8)


def read_text(args, parser) -> np.ndarray:
    """The training bytes, at most MAX_TEXT: uint8 (n,). Files in the order of their names, without binary ones."""
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
    """Tokens of a step, int64 (batch, seq): a function of seed and step, so a resumed run only needs the step."""
    if args.order is not None:
        rows = runs.rows_of(args, step)
        return torch.from_numpy(np.stack([row["input_ids"][: args.seq] for row in rows])).long().to(args.device)
    begin = np.random.default_rng((args.seed % 2**32, step)).integers(len(args.text) - args.seq, size=(args.batch, 1))
    return torch.from_numpy(args.text[begin + np.arange(args.seq)]).long().to(args.device)


def build(args, layers: int) -> torch.nn.Module:
    """An unmodified transformers model."""
    common = {"vocab_size": 256, "bos_token_id": None, "eos_token_id": None, "attn_implementation": "sdpa"}
    if args.arch == "gpt2":
        shape = {"n_layer": layers, "n_embd": args.width, "n_head": args.heads, "n_positions": args.seq}
        drop = {"resid_pdrop": args.dropout, "embd_pdrop": args.dropout, "attn_pdrop": 0.0}
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**common, **shape, **drop))
    shape = {"num_hidden_layers": layers, "hidden_size": args.width, "num_attention_heads": args.heads}
    mlp = {"intermediate_size": (args.width * 8 // 3 + 63) // 64 * 64, "max_position_embeddings": args.seq}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**common, **shape, **mlp))


class Run(runs.Run):
    """A language model in training. layers: replaces args.layers, for measuring what a layer keeps."""

    items = "tokens"

    def __init__(self, name: str, args, layers: int | None = None):
        self.layers = layers or args.layers
        super().__init__(name, args)

    def build(self) -> torch.nn.Module:
        return build(self.args, self.layers)

    def loss_of(self, ids: torch.Tensor) -> torch.Tensor:
        return self.forward(input_ids=ids, labels=ids, use_cache=False).loss

    def tune(self, first: int) -> None:
        """Lets `hfnn.tune` choose how the model runs, from the step `first` on."""
        hfnn.revert(self.model, self.optimizer)
        given = (batch(self.args, first + i) for i in range(5))
        how = {"optimizer": self.optimizer, "loss": lambda model, ids: self.loss(ids)}
        hfnn.tune(self.model, given, steps=self.args.steps - first, **how)


def kept_per_layer(run: Run, ids: torch.Tensor) -> dict:
    """The memory that a layer keeps for backward, in total and by op: that of two layers minus that of one.

    In u, which is batch * seq * width bytes, or twice that for float32: a tensor is 2 u in any dtype.
    """
    some = (Run(run.name, run.args, layers) for layers in (1, 2))
    one, two = (hfnn.memory.saved_bytes(lambda r=r: r.loss(ids)).by_op for r in some)
    u = ids.numel() * run.args.width * (2 if run.args.dtype == "float32" else 1)
    kept = ((op, (two[op] - one.get(op, 0)) / u) for op in two)
    by_op = {op: size for op, size in sorted(kept, key=lambda item: -item[1]) if abs(size) >= 0.005}
    return {"layer_u": sum(by_op.values()), "layer_u_by_op": by_op}
