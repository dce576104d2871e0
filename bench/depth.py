"""The memory that a layer keeps for backward, in u: bytes per token and feature. `models.py --depth`.

It is half the difference between a model with four layers and one with two, so heads, embeddings and other one-time
parts cancel. It is counted twice, by `hfnn.memory.saved_bytes` and by the requests to torch's CUDA allocator. Casts of
weights by autocast, 2 bytes per weight for any batch, are counted separately. Eager first, then the same model
converted with prefer="memory".
"""

import contextlib
import functools

import report
import timing
import torch

import hfnn

LAYERS = 2, 4
# (batch, tokens, width); a head has 128 features, or on a CPU 16
SHAPES = {"cuda": (4, 1024, 1024), "cpu": (2, 64, 64)}
HEADS = {"cuda": 8, "cpu": 4}
PATCH = 16


def _options(device: str, layers: int, ffn: float) -> dict:
    width = SHAPES[device][2]
    return {
        "num_hidden_layers": layers,
        "hidden_size": width,
        "num_attention_heads": HEADS[device],
        "intermediate_size": int(ffn * width),
    }


def _gpt2(device, layers):
    import transformers as t

    _, tokens, width = SHAPES[device]
    heads = HEADS[device]
    config = t.GPT2Config(
        n_layer=layers, n_embd=width, n_head=heads, n_positions=tokens, vocab_size=512, use_cache=False
    )
    return t.GPT2Model(config)


def _bert(device, layers):
    import transformers as t

    options = _options(device, layers, 4)
    return t.BertModel(t.BertConfig(**options, vocab_size=512, max_position_embeddings=SHAPES[device][1]))


def _vit(device, layers):
    import transformers as t

    side = int(SHAPES[device][1] ** 0.5) * PATCH
    return t.ViTModel(t.ViTConfig(**_options(device, layers, 4), image_size=side, patch_size=PATCH))


def _llama(ffn, share, device, layers):
    import transformers as t

    heads = max(int(HEADS[device] * share), 1)
    options = _options(device, layers, ffn)
    return t.LlamaModel(t.LlamaConfig(**options, num_key_value_heads=heads, vocab_size=512, use_cache=False))


# For Llama, the ratios of the 7B and 8B models: features of the MLP to the width, key-value heads to heads.
MODELS = {
    "gpt2": _gpt2,
    "bert": _bert,
    "vit": _vit,
    "llama2": functools.partial(_llama, 11008 / 4096, 1),
    "llama3": functools.partial(_llama, 14336 / 4096, 1 / 4),
}
DTYPES = ("autocast", "bfloat16")
MODES = ("eager", "hfnn-memory")


def inputs(name: str, device: str, dtype) -> torch.Tensor:
    batch, tokens, _ = SHAPES[device]
    if name == "vit":
        side = int(tokens**0.5) * PATCH
        return torch.randn(batch, 3, side, side, device=device, dtype=dtype)
    return torch.randint(512, (batch, tokens), device=device)


def kept(name: str, dtype: str, layers: int, device: str) -> list[tuple[str, dict, int]]:
    """(mode, bytes by counting method, bytes of 1 u) of eager and of hfnn."""
    import models

    torch.manual_seed(0)
    with torch.device(device):
        model = MODELS[name](device, layers).train()
    if dtype == "bfloat16":
        model.bfloat16()
    x = inputs(name, device, next(model.parameters()).dtype)

    def forward():
        low = torch.autocast(device, torch.bfloat16) if dtype == "autocast" else contextlib.nullcontext()
        with low:
            return model(x).last_hidden_state

    found = []
    for mode in MODES:
        if mode != "eager":
            hfnn.convert(model, prefer="memory")
        for _ in range(2):  # workspaces of libraries are permanent
            y = forward()
            y.sum().backward()
        u = y.numel()
        del y
        model.zero_grad(set_to_none=True)
        by_hooks = hfnn.memory.saved_bytes(forward)
        sizes = {"hooks": by_hooks.total + by_hooks.aside, "casts": by_hooks.casts}
        if device == "cuda":
            sizes["requested"] = models.requested_growth(lambda: forward().sum())
        found.append((mode, sizes, u))
    return found


def compare(options) -> int:
    """A row for each model, dtype and mode; exit status."""
    path = report.path(options.results, options.device, "-depth")
    batch, tokens, width = SHAPES[options.device]
    with report.shown(table, f"{path.stem}: bytes that a layer keeps for each token and feature") as rows:
        for name in MODELS:
            for dtype in DTYPES:
                few, many = (kept(name, dtype, layers, options.device) for layers in LAYERS)
                found = []
                for (mode, less, _), (_, more, u) in zip(few, many, strict=True):
                    layer = {way: (more[way] - less[way]) / (LAYERS[1] - LAYERS[0]) / u for way in more}
                    columns = {f"{way}_u": layer.get(way) for way in ("requested", "hooks", "casts")}
                    columns["saved_bytes"] = layer.get("requested", layer["hooks"]) * u
                    none = timing.Timing(None, None, None)
                    case = (batch, tokens, width)
                    found.append(report.row(name, case, dtype, mode, "layer", none, None, columns))
                rows += report.append(path, found)
    return 0


def table(rows: list[dict], title: str) -> None:
    """A line per model and dtype: both modes with both counting methods, the share of casts, and the ratio."""
    counts = [f"{mode} {heading}" for mode in MODES for heading in ("requested", "by hooks", "weight casts")]
    found = report.grid(title, ("model", "dtype"), [*counts, "eager / hfnn", "without casts"])
    for eager, ours in zip(rows[::2], rows[1::2], strict=True):
        cells = [_u(r[f"{way}_u"]) for r in (eager, ours) for way in ("requested", "hooks", "casts")]
        whole, bare = (_total(eager, c) / _total(ours, c) for c in (True, False))
        found.add_row(eager["op"], eager["dtype"], *cells, f"{whole:.2f}", f"{bare:.2f}")
    report.put(found)


def _total(r: dict, casts: bool) -> float:
    total = float(r["requested_u"] if r["requested_u"] != "" else r["hooks_u"])
    return total if casts else total - float(r["casts_u"])


def _u(value) -> str:
    return "" if value == "" else f"{float(value):.2f}"
