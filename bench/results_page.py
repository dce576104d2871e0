"""docs/benchmarks.md, docs/modes.md and the table of models in README.md, from the newest rows of bench/results.

bench/results_page.py            # writes them
bench/results_page.py --check    # exit status 1 if they do not match the rows
"""

import argparse
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import report

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "bench/results"
BEGIN, END = "<!-- models: written by bench/results_page.py -->\n", "<!-- end of models -->\n"
GIB, MIB = 2**30, 2**20


@dataclass
class Table:
    """A table in Markdown. rows, columns: by heading, the values that rows of the CSV file must have. A cell shows the
    rows that match both with `show`, which gets them in order, or None if there are none."""

    title: str
    text: str
    file: str
    rows: dict[str, dict]
    columns: dict[str, dict]
    show: Callable[..., str | None]
    every: dict = field(default_factory=dict)
    passes: tuple[str, ...] = ("forward", "backward")
    corner: str = ""
    beside: str | None = None  # a provider: only rows of runs with this provider count

    def __str__(self) -> str:
        known = report.newest(RESULTS / f"{self.file}.csv", self.beside)
        lines = [f"| {self.corner} | {' | '.join(self.columns)} |", "| --- " * (1 + len(self.columns)) + "|"]
        for heading, row in self.rows.items():
            cells = [self._cell(known, {**self.every, **row, **column}) for column in self.columns.values()]
            if any(cell != "-" for cell in cells):
                lines.append(f"| {heading} | {' | '.join(cells)} |")
        return "\n".join(lines) + "\n"

    def section(self) -> str:
        return f"## {self.title}\n\n{textwrap.fill(self.text, 120)}\n\n{self}"

    def _cell(self, known: list[dict], wanted: dict) -> str:
        found = []
        for name in self.passes:
            of = {**wanted, "pass": name}
            rows = [r for r in known if all(r[k] in (v if isinstance(v, tuple) else (v,)) for k, v in of.items())]
            if not rows:
                return "-"
            found.append(max(rows, key=lambda r: r["date"]))
        return self.show(*found) or "-"


def _number(text: str, digits: int = 3) -> str:
    """Formatted with this many digits, and spaces between thousands."""
    value = float(f"{float(text):.{digits}g}")
    return f"{value:,.0f}".replace(",", " ") if abs(value) >= 10 ** (digits - 1) else f"{value:.{digits}g}"


def _percent(*rows) -> str:
    return ", ".join(f"{float(r['pct_of_copy']):.0f}" for r in rows)


def _tflops(*rows) -> str | None:
    if any(not r["tflops"] for r in rows):
        return None
    kernel = rows[0]["kernel"].removeprefix("torch ")
    return ", ".join(_number(r["tflops"]) for r in rows) + (f" ({kernel})" if "torch" in rows[0]["kernel"] else "")


def _milliseconds(row) -> str | None:
    return f"{float(row['device_us']) / 1e3:.1f}" if row["device_us"] else None


def _model(row) -> str | None:
    return f"{_milliseconds(row)}; {float(row['peak_gib']):.1f}" if row["device_us"] else None


def _of_stock(row) -> str:
    return f"{float(row['device_us']) / 1e3:.1f} ({float(row['ratio']):.2f})"


def _head(row) -> str:
    return f"{_number(float(row['device_us']) / 1e3)}; {_number(row['peak_mib'], 4)}"


def _optimizer(row) -> str:
    share = f"{float(row['pct_of_copy']):.0f} %" if float(row["parameters"] or 0) > 1e8 else "-"
    return f"{_number(row['device_us'], 4)}; {share}; {_number(row['host_us'])}"


def _tokens(row) -> str:
    return f"{float(row['tokens_per_s']) / 1e3:.0f}; {float(row['peak_gib']):.1f}"


def _microseconds(row) -> str:
    return _number(row["device_us"])


MODELS = {
    "GPT-2 124M, 16 x 1024 tokens": {"op": "gpt2", "case": "16x1024"},
    "BERT-base, 32 x 512": {"op": "bert", "case": "32x512"},
    "Llama 1.1B, 8 x 2048": {"op": "llama", "case": "8x2048"},
    "ViT-B/16, 128 images": {"op": "vit", "case": "128x224"},
    "GPT-2 written by hand (bench/own.py), 16 x 1024": {"op": "own-gpt", "case": "16x1024"},
    "ViT-B/16 written by hand, 128 images": {"op": "own-vit", "case": "128x224"},
}
KERNELS = {
    "torch": {"provider": "torch"},
    "torch.compile": {"provider": "compile"},
    "Liger": {"provider": "liger"},
    "quack": {"provider": "quack"},
    "hfnn CUDA": {"provider": "hfnn", "kernel": "cuda"},
    # "torch" in rows of gated ops is from before their nodes named the kernel; nothing else here was left to torch.
    "hfnn Triton": {"provider": "hfnn", "kernel": ("triton", "torch")},
}
PAIRS = {
    "GPT-2 4 x 1024": ("gpt2", "4x1024"),
    "GPT-2 16 x 1024": ("gpt2", "16x1024"),
    "BERT 8 x 512": ("bert", "8x512"),
    "BERT 32 x 512": ("bert", "32x512"),
    "Llama 1 x 2048": ("llama", "1x2048"),
    "Llama 8 x 2048": ("llama", "8x2048"),
    "ViT, 128 images": ("vit", "128x224"),
    "Swin-T, 128": ("swin", "128x224"),
    "ConvNeXt-T, 128": ("convnext", "128x224"),
    "UNet of Stable Diffusion 2.1, 5 of 512 x 512": ("unet", "5x512"),
}
SIZES = {"4 KiB": 4096, "64 KiB": 65536, "256 KiB": 262144, "1 MiB": 1 << 20, "8 MiB": 8 << 20, "16 MiB": 16 << 20,
         "128 MiB": 128 << 20, "256 MiB": 256 << 20, "1 GiB": 1 << 30}  # fmt: skip
OPTIMIZERS = {
    "GPT-2's 124 M parameters, float32": {"case": "gpt2-124m", "dtype": "float32"},
    "Llama's 1.1 B, float32": {"case": "llama-1.1b", "dtype": "float32"},
    "Llama's 1.1 B, bfloat16": {"case": "llama-1.1b", "dtype": "bfloat16"},
    "1000 small tensors, float32": {"case": "1000-tensors", "dtype": "float32"},
}
ATTENTION = {
    "causal, 2 x 16 x 8192 x 128": "2x16x16x8192x128xcausal",
    "causal, 16 x 12 x 1024 x 64": "16x12x12x1024x64xgpt2",
    "32 heads, 8 of keys, 4 x 4096 x 128": "4x32x8x4096x128xgqa",
    "window of 1024, 2 x 16 x 8192 x 128": "2x16x16x8192x128xwindow",
    "softcap, 2 x 16 (8 of keys) x 4096 x 128": "2x16x8x4096x128xsoftcap",
    "ALiBi, 4 x 16 x 2048 x 128": "4x16x16x2048x128xalibi",
    "sinks, 2 x 64 (8 of keys) x 4096 x 64": "2x64x8x4096x64xsinks",
    "dropout 0.1, 16 x 12 x 1024 x 64": "16x12x12x1024x64xdropout",
    "boolean mask of padding, 32 x 12 x 512 x 64": "32x12x12x512x64xpadding",
    "bias with a gradient, 8 x 12 x 1024 x 64": "8x12x12x1024x64xbias",
    "65536 tokens of ragged sequences, 16 x 128": "1x16x16x65536x128xvarlen",
}


def _ops() -> dict[str, dict]:
    names = {"layer_norm": "LayerNorm", "rms_norm": "RMSNorm", "gelu": "GELU", "silu": "SiLU", "swiglu": "SwiGLU",
             "geglu": "GEGLU", "dropout": "dropout", "softmax": "softmax", "log_softmax": "log-softmax"}  # fmt: skip
    found = {}
    for row in report.newest(RESULTS / "NVIDIA_H200.csv"):
        if row["op"] in names:
            case = row["case"].replace("xnone", " (erf)").replace("xtanh", " (tanh)").replace("x0.1", ", p 0.1")
            found[f"{names[row['op']]} {case.replace('x', ' x ')}"] = {"op": row["op"], "case": row["case"]}
    order = [*names]
    return dict(sorted(found.items(), key=lambda item: order.index(item[1]["op"])))


def _wrappers(title, file, ranks) -> Table:
    return Table(
        title,
        "Milliseconds per step; the cells of a row may come from several runs, and hosts differ (`bench/parallel.py`; "
        "[notes](notes/parallel.md)).",
        file,
        {
            "GPT-2 124M, 4 x 1024 tokens a rank": {"op": "gpt2"},
            "GPT-2 124M, 16 x 1024 tokens a rank": {"op": "gpt2-16"},
            "GPT-2 medium, 4 x 1024 tokens a rank": {"op": "gpt2-medium"},
            "VGG16, 32 images a rank, no peer access": {"op": "vgg16"},
        },
        {
            "DDP: torch, NCCL": {"provider": "torch-ddp", "kernel": "nccl"},
            "haiscale, hfreduce": {"provider": "haiscale-ddp", "kernel": "hfreduce"},
            "converted": {"provider": "haiscale-ddp+hfnn", "kernel": "hfreduce"},
            "captured": {"provider": "haiscale-ddp+captured", "kernel": "hfreduce"},
            "FSDP2: torch, NCCL": {"provider": "torch-fsdp2", "kernel": "nccl"},
            "haiscale's FSDP, hfreduce": {"provider": "haiscale-fsdp", "kernel": "hfreduce"},
            "FSDP converted": {"provider": "haiscale-fsdp+hfnn", "kernel": "hfreduce"},
        },
        _milliseconds,
        {"ranks": ranks},
        ("step",),
    )


def _collectives(file, title, text, providers, sizes, ranks=(2, 4), **every) -> Table:
    kinds = ("all_reduce", "reduce_scatter", "all_gather") if "NVIDIA" in file else ("all_reduce",)
    columns = {
        f"{kind}, {count} ranks: {name}": {"op": kind, "ranks": str(count), "provider": name}
        for kind in kinds
        for count in ranks
        for name in providers
    }
    rows = {heading: {"bytes": str(SIZES[heading])} for heading in sizes}
    return Table(title, text, file, rows, columns, _microseconds, every, (every.pop("pass"),), "bytes")


TABLES = (
    Table(
        "Whole models",
        "Milliseconds per training step, and peak GiB above weights and optimizer states. One H200, bf16 autocast, "
        "fused AdamW, unmodified models of transformers and timm (`bench/models.py`). Each cell was measured in its "
        "own process, and not all on the same machine; hosts differ. The next table compares within one process.",
        "NVIDIA_H200-models",
        MODELS,
        {
            "torch": {"provider": "eager"},
            "torch.compile": {"provider": "compile"},
            "compile, memory budget 0.75": {"provider": "compile-0.75"},
            "Liger": {"provider": "liger"},
            "`hfnn.convert(model)`": {"provider": "hfnn"},
            "`hfnn.convert(model, capture=True)`": {"provider": "hfnn-captured"},
        },
        _model,
        passes=("step",),
    ),
    Table(
        "Whole models, step by step beside stock",
        "Milliseconds per step, and in brackets the ratio to stock torch. The variants take turns in one process "
        "(`bench/models.py --pairs`).",
        "NVIDIA_H200-pairs",
        {name: {"op": op, "case": case} for name, (op, case) in PAIRS.items()},
        {
            "torch": {"provider": "eager"},
            "converted": {"provider": "hfnn"},
            "converted, `capture=True`": {"provider": "hfnn-captured"},
        },
        _of_stock,
        passes=("step",),
        beside="eager",
    ),
    Table(
        "Norms, activations, dropout, softmax",
        "Per cent of the bandwidth of a copy in the same process: forward, then backward. One H200, bf16 "
        "(`bench/run.py`).",
        "NVIDIA_H200",
        _ops(),
        {k: v for k, v in KERNELS.items() if k != "quack"},
        _percent,
        {"dtype": "bfloat16"},
    ),
    Table(
        "Cross-entropy",
        "The logits are read and never overwritten. Per cent of the bandwidth of a copy, forward and backward "
        "together. The bytes counted are three times those of the logits: two reads and a write.",
        "NVIDIA_H200",
        {f"{c.replace('x', ' x ')}": {"op": "cross_entropy", "case": c} for c in ("8192x32000", "8192x128256")},
        KERNELS,
        _percent,
        {"dtype": "bfloat16"},
        ("both",),
    ),
    Table(
        "A linear map and its cross-entropy",
        "`hfnn.functional.linear_cross_entropy` keeps no logits. Hidden size 4096, vocabulary 128256, forward and "
        "backward: milliseconds, and peak MiB above the inputs. The peak includes the gradients, which take 1002 MiB "
        "and more (`bench/run.py --head`; [measurements](notes/linear_cross_entropy.md)). The error of the weight's "
        "gradient is at most twice that of torch's single product; Liger's is up to four times.",
        "NVIDIA_H200-heads",
        {
            f"{tokens} tokens, {dtype}": {"case": f"{tokens}x4096x128256", "dtype": dtype}
            for dtype in ("bfloat16", "autocast")
            for tokens in (256, 1024, 4096, 8192, 16384, 65536)
        },
        {k: KERNELS[k] for k in ("torch", "torch.compile", "Liger")} | {"hfnn": {"provider": "hfnn"}},
        _head,
        passes=("both",),
    ),
    Table(
        "Attention",
        "TFLOP/s, counting only the pairs that attend: forward, then backward (`bench/attention.py`). In brackets: "
        "the torch kernel that runs where hfnn leaves the call to torch.",
        "NVIDIA_H200-attention",
        {heading: {"case": case} for heading, case in ATTENTION.items()},
        {
            "flash": {"provider": "flash"},
            "efficient": {"provider": "efficient"},
            "cuDNN": {"provider": "cudnn"},
            "flex_attention, compiled": {"provider": "flex"},
            "varlen_attn": {"provider": "varlen_attn"},
            "hfnn": {"provider": "hfnn"},
            "hfnn, Triton": {"provider": "hfnn triton"},
        },
        _tflops,
    ),
    Table(
        "Ragged sequences",
        "A training step of a Llama of 8 layers on 16384 tokens in sequences of different lengths: thousand tokens "
        "per second, and peak GiB. Packed by `hfnn.data.PackedCollator` (`bench/attention.py --packing`).",
        "NVIDIA_H200-packing",
        {name: {"provider": name} for name in ("padded torch", "padded hfnn", "packed torch", "packed hfnn")},
        {"thousand tokens a second; GiB": {}},
        _tokens,
        passes=("step",),
    ),
    Table(
        "AdamW",
        "One step: microseconds; per cent of the bandwidth of a copy; microseconds on the host (`bench/optim.py`). "
        '8-bit and 4-bit states: `hfnn.convert(optimizer, state_dtype="8bit")`. Remainder: 16-bit parameters with '
        "16 further bits kept by the optimizer.",
        "NVIDIA_H200-optim",
        OPTIMIZERS,
        {
            "torch fused": {"provider": "torch-fused"},
            "hfnn": {"provider": "hfnn"},
            "float32 states": {"provider": "hfnn-float32"},
            "remainder": {"provider": "hfnn-remainder"},
            "8 bits": {"provider": "hfnn-8bit"},
            "4 bits": {"provider": "hfnn-4bit"},
        },
        _optimizer,
        passes=("step",),
    ),
    _wrappers("Wrappers on two H200", "NVIDIA_H200-parallel", "2"),
    _wrappers("Wrappers on two H100", "NVIDIA_H100_80GB_HBM3-parallel", "2"),
    _wrappers("Wrappers on four H100", "NVIDIA_H100_80GB_HBM3-parallel", "4"),
    _collectives(
        "NVIDIA_H200-hfreduce",
        "Collectives on GPUs",
        "Microseconds per call, bfloat16, with peer access; NCCL in the same run (`bench/hfreduce.py --device cuda`).",
        ("nccl", "hfreduce"),
        ("4 KiB", "256 KiB", "8 MiB", "128 MiB", "1 GiB"),
        dtype="bfloat16",
        **{"pass": "p2p on"},
    ),
    _collectives(
        "NVIDIA_H100_80GB_HBM3-hfreduce",
        "Collectives on four GPUs without peer access",
        "Microseconds per call, bfloat16, four H100 of one host, through the host's memory; NCCL in the same run.",
        ("nccl", "hfreduce"),
        ("4 KiB", "256 KiB", "8 MiB", "128 MiB"),
        ranks=(4,),
        dtype="bfloat16",
        **{"pass": "p2p off"},
    ),
    _collectives(
        "Intel_R_Xeon_R_Processor-hfreduce",
        "Collectives on a CPU",
        "Microseconds per call, float32, in place, on two cores; gloo in the same run (`bench/hfreduce.py`). "
        "`direct` is `hfreduce.all_reduce_`, without torch.distributed.",
        ("gloo", "hfreduce", "direct"),
        ("4 KiB", "64 KiB", "1 MiB", "16 MiB", "256 MiB"),
        dtype="float32",
        **{"pass": "in place"},
    ),
)
HEAD = """# Benchmarks

`python bench/results_page.py` writes this page from the newest row of each case in [bench/results](../bench/results).
Change the rows, not this page. [bench/README.md](../bench/README.md) explains how the numbers are measured. The
[notes](notes/activation_memory.md) describe what was tried, and what keeps a number below its limit. "-": not measured.
"""
MODES = """# Which mode to use

A model can run in one of these modes: as it is; converted (`hfnn.convert(model)`); captured
(`hfnn.convert(model, capture=True)`, on a GPU); or compiled (`torch.compile`), converted or not. Which mode is the
fastest depends on the model, the batch and the machine:

* **Converted**: begin with this mode. It keeps the least for backward, works with any model, and needs no set-up time.
* **Captured** helps where the GPU waits for Python: small batches, many small operators. Shapes must repeat. It needs
  as much memory as the converted model.
* **Compiled**, not converted, suits a model that torch.compile compiles as one graph, with memory to spare. Under
  torch.compile, converted modules run torch's own operators; `backend="hfnn"` ([torch.compile](compile.md)) keeps less
  for backward.
* **As it is**: where none of the above is measurably faster.

`hfnn.tune` measures the modes on your batches. It leaves the model in the fastest mode whose results match stock torch:

```python
hfnn.tune(model, batches, optimizer=optimizer, steps=steps_to_come)  # prints a table
print(hfnn.report(model))  # which mode was chosen, and why the others were not
```

It compares the loss, all gradients, the buffers, and gradients accumulated over two batches. It skips modes that do not
fit its budget: 300 seconds, or 2 % of the remaining training steps if that is less. The choice is stored in
`~/.cache/hfnn/tune.json` for the next run, which compares it with stock again. For transformers' Trainer:

```python
from hfnn.adapters.trainer import TuneCallback

trainer = Trainer(..., callbacks=[TuneCallback()])
```

Call `hfnn.tune` before the model is wrapped (DDP, FSDP), on all ranks; all ranks make the same choice. If the shapes of
a compiled model change so often that more than six calls recompile, it runs uncompiled from then on, and a line is
logged. A run that becomes slower for another reason keeps its mode. Layouts have not been measured on a GPU yet.

The tables are written by `python bench/results_page.py` from the newest rows of [bench/results](../bench/results).
"""


def pages() -> dict[Path, str]:
    """The expected content of the files, by path."""
    readme = ROOT / "README.md"
    before, _, rest = readme.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    sections = "\n".join(table.section() for table in TABLES)
    return {
        ROOT / "docs/benchmarks.md": f"{HEAD}\n{sections}",
        ROOT / "docs/modes.md": f"{MODES}\n" + "\n".join(table.section() for table in TABLES[:2]),
        readme: f"{before}{BEGIN}{TABLES[0]}{END}{after}",
    }


def main(arguments=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only check, write nothing")
    options = parser.parse_args(arguments)
    stale = [path for path, text in pages().items() if not path.exists() or path.read_text() != text]
    for path in stale:
        print(f"{path.relative_to(ROOT)} is not what bench/results says: python bench/results_page.py")
        if not options.check:
            path.write_text(pages()[path])
    return int(options.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
