"""Models for pipelines, and their results without one: for tests/workers/pipeline.py.

All of it is on DEVICE, the CPU unless the environment says otherwise.
"""

import copy
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import hfnn
from haiscale.pipeline import (
    DualPipeV,
    GPipe,
    Interleaved1F1B,
    PipeDream,
    SequentialModel,
    ZeroBubble,
    partition,
)

DEVICE = torch.device(os.environ.get("PIPELINE_DEVICE", "cpu"))
# On the CPU results are bitwise equal. A GPU library may choose other kernels: relative to the largest value, in
# float32.
ROUNDING = 0.0 if DEVICE.type == "cpu" else 1e-5
WIDTH, ROWS = 16, 16
# Class, chunks on each rank, placement.
SCHEDULES = {
    "GPipe": (GPipe, 1, "loop"),
    "PipeDream": (PipeDream, 1, "loop"),
    "Interleaved1F1B": (Interleaved1F1B, 2, "loop"),
    "ZeroBubble-H1": (ZeroBubble, 1, "loop"),
    "ZeroBubble-V": (ZeroBubble, 2, "v"),
    "DualPipeV": (DualPipeV, 2, "v"),
}


@dataclass
class Place:
    group: object
    rank: int
    size: int

    def pipeline(self, model, schedule, chunks, balance=None, wrap=lambda stage: stage, **options):
        """This rank's part of a copy of the model, in a pipeline."""
        kind, each, placement = SCHEDULES[schedule]
        model = copy.deepcopy(model)
        count = self.size * each
        layers = len(model) if isinstance(model, nn.Sequential) else model.config.num_hidden_layers + 2
        balance = balance or [layers // count + (i < layers % count) for i in range(count)]
        stages = partition(model, self.rank, self.size, balance, each, placement=placement)
        stages = [wrap(stage) for stage in stages] if each > 1 else wrap(stages)
        return kind(stages, chunks, process_group=self.group, **options)


def layers(count=8):
    torch.manual_seed(0)
    found = [layer for _ in range(count // 2) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return SequentialModel(*found).to(DEVICE)


def batch(seed=0, rows=ROWS):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(rows, WIDTH, generator=generator).to(DEVICE) for _ in range(2))


def decoder(kind, converted=False, tied=True):
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    if kind == "gpt2":
        config = transformers.GPT2Config(
            n_layer=6, n_embd=32, n_head=2, vocab_size=61, n_positions=16, tie_word_embeddings=tied, bos_token_id=0,
            eos_token_id=0,
        )  # fmt: skip
        model = transformers.GPT2LMHeadModel(config)
    else:
        config = transformers.LlamaConfig(
            num_hidden_layers=6, hidden_size=32, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2,
            vocab_size=61, max_position_embeddings=32,
        )  # fmt: skip
        model = transformers.LlamaForCausalLM(config)
    model.eval().to(DEVICE)  # without dropout, whose draws depend on the order
    return hfnn.convert(model) if converted else model


def tokens(seed=0, rows=4, length=8):
    return torch.randint(3, 61, (rows, length), generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def next_token(logits, labels):
    return cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def sequential(model, chunks, steps, criterion):
    """(loss of the last step, gradients by name, outputs of the last step) of the model alone, by microbatches."""
    for inputs, labels in steps:
        pieces = zip(*(x.tensor_split(chunks) for x in inputs), strict=True)
        loss, outputs = 0.0, []
        for piece, label in zip(pieces, labels.tensor_split(chunks), strict=True):
            y = model(*piece)
            y = y if isinstance(y, torch.Tensor) else y.logits
            part = criterion(y, label)
            part.backward(torch.full_like(part, len(label) / len(labels)))
            loss, outputs = loss + part.detach() * (len(label) / len(labels)), [*outputs, y.detach()]
    return loss, {name: p.grad for name, p in model.named_parameters()}, torch.cat(outputs)


def differs(x, y, tolerance=ROUNDING):
    """How x and y differ, or None. tolerance: relative to the largest value; 0: bitwise."""
    if x is None or y is None:
        return None if x is y else f"{'none' if x is None else 'one'} where there is {'none' if y is None else 'one'}"
    if torch.equal(x, y):
        return None
    distance, largest = float((x - y).abs().max()), float(y.abs().max())
    return None if distance <= tolerance * largest else f"by {distance} of {largest}"


def compare(place, pp, model, chunks, steps, criterion, close=(), rounding=ROUNDING):
    """Runs `steps` with accumulated gradients, in the pipeline and without; names in `close` may differ by rounding."""
    loss, expected, outputs = sequential(copy.deepcopy(model), chunks, steps, criterion)
    for inputs, labels in steps:
        inputs = inputs if pp.is_first else (None,) * len(inputs)
        found = pp.forward_backward(*inputs, criterion=criterion, labels=labels if pp.is_last else ())
    if pp.is_last:
        if differs(found[0], loss, rounding):
            return f"loss {found[0]} instead of {loss}"
        if differs(found[1], outputs, rounding):
            return f"other outputs, {differs(found[1], outputs)}"
    elif found != (None, None):
        return "a result on a rank without the last chunk"
    parameters = {name: p for name, p in pp.named_shards() if isinstance(p, nn.Parameter)}
    if not parameters or not set(parameters) <= set(expected):
        return f"names {sorted(parameters)} are not the model's"
    for name, p in parameters.items():
        wrong = differs(p.grad, expected[name], max(rounding, 1e-5) if name in close else rounding)
        if wrong:
            return f"another gradient of {name}, {wrong}"
    names = [None] * place.size
    dist.all_gather_object(names, sorted(parameters), group=place.group)
    if set().union(*names) != set(expected):
        return f"no rank has {set(expected) - set().union(*names)}"
