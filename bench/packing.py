"""Training steps of a small Llama on a ragged batch: padded to the longest sequence, or packed.

The same sequences and the same weights in every mode; tokens per second count only the tokens of the sequences. A step
is zero_grad, forward with labels, backward and AdamW, in bfloat16 (float32 on a CPU).
"""

import copy
import functools

import attention_calls
import report
import timing
import torch

import hfnn

# Layers, hidden, heads, heads of keys, feed-forward, vocabulary; tokens of the batch, mean and longest of a sequence.
SIZES = {False: (8, 1024, 16, 8, 2816, 32000), True: (2, 32, 4, 2, 64, 128)}
BATCH = {False: (16384, 600, 4096), True: (96, 12, 40)}
MODES = ("padded torch", "padded hfnn", "packed torch", "packed hfnn")
LOSS_NOISE = 0.02


def model(tiny: bool, dtype: torch.dtype, device: str):
    """A Llama with random weights."""
    import transformers

    layers, hidden, heads, groups, inner, vocabulary = SIZES[tiny]
    config = transformers.LlamaConfig(
        num_hidden_layers=layers, hidden_size=hidden, num_attention_heads=heads, num_key_value_heads=groups,
        intermediate_size=inner, vocab_size=vocabulary, max_position_embeddings=4096, use_cache=False,
        attn_implementation="sdpa",
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).to(device, dtype).train()


def batches(tiny: bool, device: str) -> dict[str, dict]:
    """The sequences, padded on the right and packed, as arguments of the model."""
    from hfnn.data import PackedCollator

    tokens, mean, most = BATCH[tiny]
    starts = attention_calls.ragged(tokens, mean, most)
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor(starts).diff().tolist()
    rows = [torch.randint(SIZES[tiny][-1], (length,), generator=generator) for length in lengths]
    pad = functools.partial(torch.nn.utils.rnn.pad_sequence, rows, batch_first=True)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    padded = {"input_ids": pad(), "labels": pad(padding_value=-100), "attention_mask": mask.long()}
    packed = PackedCollator()([{"input_ids": row} for row in rows])
    return {
        name: {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in batch.items()}
        for name, batch in (("padded", padded), ("packed", packed))
    }


class Training:
    """A copy of a model, its batch and its optimizer."""

    def __init__(self, mode: str, first, batch: dict):
        self.model, self.batch = copy.deepcopy(first), batch
        if mode.endswith("hfnn"):
            self.model = hfnn.convert(self.model)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)

    def step(self) -> torch.Tensor:
        self._optimizer.zero_grad(set_to_none=True)
        loss = self.model(**self.batch).loss
        loss.backward()
        self._optimizer.step()
        return loss.detach()


def compare(options) -> int:
    """Time the modes; exit status 1 if our loss differs from padded torch's."""
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    given, first = batches(options.tiny, options.device), model(options.tiny, dtype, options.device)
    trainings, found = {}, {}
    for mode in MODES:
        try:
            training = Training(mode, first, given[mode.split()[0]])
            loss = training.step().item()
            peak = hfnn.memory.peak_bytes(training.step, options.device) / 2**30
        except Exception as why:  # a row with its reason
            found[mode] = {"error": f"{type(why).__name__}: {' '.join(str(why).split())[:200]}"}
            continue
        trainings[mode], found[mode] = training, {"error": "", "loss": loss, "peak_gib": peak}
    calls = {mode: timing.Call((training.step,)) for mode, training in trainings.items()}
    clocks = timing.interleaved(calls, options.device, options.rounds, options.seconds, fewest=1)
    tokens, size = BATCH[options.tiny][0], SIZES[options.tiny]
    rows = []
    for mode, columns in found.items():
        clock = clocks.get(mode, timing.Timing(None, None, None))
        more = {"kernel": "", "tokens_per_s": tokens / clock.device_us * 1e6 if mode in clocks else ""}
        more |= {column: columns.get(column, "") for column in ("loss", "peak_gib", "error")}
        rows.append(report.row("packing", (tokens, *size), dtype, mode, "step", clock, None, more))
    path = report.path(options.results, options.device, "-packing")
    table(report.append(path, rows), f"{path.stem}: a training step of {tokens} tokens")
    red = list(faults(found))
    for line in red:
        print(f"RED: {line}")
    return int(bool(red))


def faults(found: dict[str, dict]):
    """Sentences about our modes; torch's results on packed sequences are not checked."""
    exact = found["padded torch"].get("loss")
    for mode, columns in found.items():
        if not mode.endswith("hfnn"):
            continue
        if columns["error"]:
            yield f"{mode}: {columns['error']}"
        elif exact is not None and not abs(columns["loss"] - exact) <= LOSS_NOISE * exact:
            yield f"{mode}: a loss of {columns['loss']:.5g} where padded torch has {exact:.5g}"


def table(rows: list[dict], title: str) -> None:
    found = report.grid(title, ("mode",), ("time", "tokens/s", "peak", "loss"))
    for r in rows:
        if r["error"]:
            found.add_row(r["provider"], r["error"][:80])
            continue
        clock = f"{float(r['device_us']) / 1e3:.1f} ms", f"{float(r['tokens_per_s']):,.0f}"
        found.add_row(r["provider"], *clock, f"{float(r['peak_gib']):.2f} GiB", f"{float(r['loss']):.4f}")
    report.put(found)
