"""Train a byte-level GPT twice, as plain torch and through hfnn, and put the two side by side.

The model is an unmodified `GPT2LMHeadModel` of transformers (`--arch llama`: `LlamaForCausalLM`) and reads real text:
the sources of Python's standard library, or any `--data` file or folder. Both runs start from the same weights and
take the same batches, in turns, so that whatever slows the machine down slows both. A third run, plain torch with
another attention kernel and other dropout masks, shows how far two correct runs drift apart: the band.

    python examples/train_gpt.py                            # a table, out/train_gpt.json and out/train_gpt.png
    python examples/train_gpt.py --arch llama --steps 100
    python examples/train_gpt.py --save ckpt.pt             # and later, bit for bit from where it stopped:
    python examples/train_gpt.py --resume ckpt.pt --steps 200

Needs `pip install hfnn[examples]`. All of hfnn in here is `hfnn.convert(model, optimizer)`, and `hfnn.memory` to count
bytes.
"""

import argparse
import contextlib
import functools
import json
import os
import random
import statistics
import sysconfig
import time
import zlib
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
import transformers
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch.nn.attention import SDPBackend, sdpa_kernel

import hfnn

PLAIN, OTHER, HFNN = "plain", "plain again", "hfnn"
WARM_UP = 3  # steps left out of the times: allocators fill up, torch.compile and Triton compile
LAST = 10  # losses of single batches scatter: the final loss is the mean of this many steps
MAX_TEXT = 4 << 20  # bytes
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "autocast": torch.float32}  # of the weights
ON_CPU = {"layers": 4, "width": 256, "heads": 4, "seq": 256, "batch": 8, "steps": 43, "dtype": "float32"}
ON_CUDA = {"layers": 12, "width": 1024, "heads": 16, "seq": 1024, "batch": 16, "steps": 103, "dtype": "autocast"}
FREE = {"steps", "save", "resume", "out", "text"}  # all the rest stays as it is when a run is resumed


class Parser(argparse.ArgumentParser):
    def error(self, message):
        self.exit(2, f"{self.prog}: error: {message}\n")  # one line, without the usage


def parse(argv=None) -> tuple[argparse.Namespace, dict | None]:
    """The settings, and the checkpoint to go on from, or None."""
    parser = arguments()
    args = parser.parse_args(argv)
    checkpoint = load(args.resume, parser) if args.resume else None
    if checkpoint:
        parser.set_defaults(**checkpoint["settings"])
        args = parser.parse_args(argv)
        for name, saved in checkpoint["settings"].items():
            if getattr(args, name) != saved:
                parser.error(f"{args.resume} was made with {name} {saved}, asked for {getattr(args, name)}")
    for name, value in (ON_CPU if args.device == "cpu" else ON_CUDA).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    check(args, checkpoint, parser)
    return args, checkpoint


def arguments() -> Parser:
    parser = Parser(description=__doc__.split("\n")[0], prog="train_gpt.py")
    add = parser.add_argument
    add("--arch", choices=("gpt2", "llama"), default="gpt2")
    add("--data", help="a text file or a folder of them (default: the standard library's sources)")
    for name in ("layers", "width", "heads", "seq", "batch", "steps"):
        add(f"--{name}", type=int, help=f"default: {ON_CPU[name]} on the CPU, {ON_CUDA[name]} on a GPU")
    add("--dropout", type=float, default=0.1, help="of embeddings and residuals, gpt2 only (default: 0.1)")
    add("--seed", type=int, default=0, help="of weights, batches and dropout masks")
    add("--dtype", choices=DTYPES, help="default: float32 on the CPU, autocast (to bfloat16) on a GPU")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--compile", action="store_true", help="torch.compile every model")
    add("--no-convert", dest="convert", action="store_false", help="plain torch only")
    add("--no-band", dest="band", action="store_false", help="without the third run")
    add("--save", metavar="PATH", help="write a checkpoint after the last step")
    add("--resume", metavar="PATH", help="go on from a checkpoint, to --steps in all")
    add("--out", default="out", help="folder for train_gpt.json and train_gpt.png (default: out)")
    return parser


def check(args, checkpoint, parser) -> None:
    for name in ON_CPU.keys() - {"dtype"}:
        if getattr(args, name) < 1:
            parser.error(f"--{name} takes a whole number from 1, got {getattr(args, name)}")
    if not 0 <= args.dropout < 1:
        parser.error(f"--dropout takes a number from 0 up to 1, got {args.dropout}")
    if args.width % args.heads or (args.arch == "llama" and args.width // args.heads % 2):
        even = "even " if args.arch == "llama" else ""
        parser.error(f"--width {args.width} does not split into {even}parts for --heads {args.heads}")
    if checkpoint and args.steps <= checkpoint["step"]:
        parser.error(f"--steps {args.steps}: {args.resume} has {checkpoint['step']} of them already")
    args.text = read_text(args, parser)
    if checkpoint and checkpoint["text"] != zlib.crc32(args.text):
        parser.error(f"--resume {args.resume}: the text is not what it was; give the same with --data")
    try:
        assert torch.empty(0, device=args.device).device.type in ("cpu", "cuda"), "takes cpu or cuda"
    except (RuntimeError, AssertionError) as error:
        parser.error(f"--device {args.device}: {str(error).splitlines()[0]}")
    for option, folder in (("--out", Path(args.out)), ("--save", Path(args.save or ".").parent)):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            parser.error(f"{option} {folder}: {error.strerror}")


def read_text(args, parser) -> np.ndarray:
    """The bytes to learn, MAX_TEXT at most: uint8 (n,). Files in the order of their names, binary ones left out."""
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
    begin = np.random.default_rng((args.seed % 2**32, step)).integers(len(args.text) - args.seq, size=(args.batch, 1))
    return torch.from_numpy(args.text[begin + np.arange(args.seq)]).long().to(args.device)


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
        self.model = build(args, layers or args.layers)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4, fused=True)
        if name == HFNN:
            hfnn.convert(self.model, self.optimizer, prefer="memory")
        self.forward = torch.compile(self.model) if args.compile else self.model
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed((args.seed + (name == OTHER)) % 2**32)
        self.random = random_state()
        self.losses, self.ms = [], []

    def loss(self, ids: torch.Tensor) -> torch.Tensor:
        other = SDPBackend.EFFICIENT_ATTENTION if self.cuda else SDPBackend.MATH
        attention = sdpa_kernel(other) if self.name == OTHER else contextlib.nullcontext()
        low = torch.autocast(ids.device.type, torch.bfloat16, enabled=self.args.dtype == "autocast")
        with low, attention:
            return self.forward(input_ids=ids, labels=ids, use_cache=False).loss

    def step(self, ids: torch.Tensor) -> None:
        set_random_state(self.random)
        begin = time.perf_counter()
        loss = self.loss(ids)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())  # waits for the GPU
        self.ms.append((time.perf_counter() - begin) * 1000)
        self.random = random_state()

    def state(self) -> dict:
        states = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        return states | {"random": self.random, "losses": self.losses, "ms": self.ms}

    def load_state(self, state: dict) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.random, self.losses, self.ms = state["random"], state["losses"], state["ms"]


def train(runs: list[Run], first: int) -> None:
    """Step i of every run, then step i + 1 of every run, in alternating order."""
    args = runs[0].args
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns) as progress:
        task = progress.add_task("training", total=args.steps, completed=first)
        for step in range(first, args.steps):
            ids = batch(args, step)
            for run in runs if step % 2 == 0 else runs[::-1]:
                run.step(ids)
            losses = " ".join(f"{run.losses[-1]:.3f}" for run in runs)
            progress.update(task, advance=1, description=f"loss {losses}")


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


def save(path: str, runs: list[Run]) -> None:
    """A whole checkpoint, or whatever was at `path` before."""
    args = runs[0].args
    settings = {name: value for name, value in vars(args).items() if name not in FREE}
    states = {run.name: run.state() for run in runs}
    with open(f"{path}.tmp", "wb") as file:
        torch.save({"settings": settings, "step": args.steps, "text": zlib.crc32(args.text), "runs": states}, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(f"{path}.tmp", path)


def load(path: str, parser) -> dict:
    try:
        checkpoint = dict(torch.load(path, map_location="cpu", weights_only=True))
        return {key: checkpoint[key] for key in ("settings", "step", "text", "runs")}
    except OSError as error:
        parser.error(f"--resume {path}: {error.strerror}")
    except Exception:  # torch, pickle and zip have many for a file that is something else
        parser.error(f"--resume {path}: not a checkpoint of this script")


def measure(run: Run, plain: Run, ids: torch.Tensor) -> dict:
    """What the table says of a run."""
    gaps = [abs(a - b) for a, b in zip(run.losses, plain.losses, strict=True)]
    ms, layer = statistics.median(run.ms[WARM_UP:] or run.ms), kept_per_layer(run, ids)
    return {
        "final_loss": statistics.fmean(run.losses[-LAST:]),
        "mean_gap": statistics.fmean(gaps),
        "largest_gap": max(gaps),
        "median_ms": ms,
        "tokens_per_s": ids.numel() / ms * 1000,
        "activation_bytes": hfnn.memory.saved_bytes(lambda: run.loss(ids)).total,
        "layer_u": sum(layer.values()),
        "peak_bytes": peak_bytes(run, ids),
        "layer_u_by_op": layer,
        "losses": run.losses,
        "ms": run.ms,
    }


def kept_per_layer(run: Run, ids: torch.Tensor) -> dict[str, float]:
    """What a layer keeps for backward, by op: what a model of two layers keeps less what a model of one keeps.

    In u, which is batch * seq * width bytes, or twice that where numbers are float32: a tensor is 2 u in any dtype.
    """
    runs = (Run(run.name, run.args, layers) for layers in (1, 2))
    one, two = (hfnn.memory.saved_bytes(lambda r=r: r.loss(ids)).by_op for r in runs)
    u = ids.numel() * run.args.width * (2 if run.args.dtype == "float32" else 1)
    kept = ((op, (two[op] - one.get(op, 0)) / u) for op in two)
    return {op: size for op, size in sorted(kept, key=lambda item: -item[1]) if abs(size) >= 0.005}


def peak_bytes(run: Run, ids: torch.Tensor) -> int:
    """The most that forward and backward hold at one time, in torch's allocations, above weights and optimizer."""
    if run.cuda:
        torch.cuda.reset_peak_memory_stats(run.args.device)
        before = torch.cuda.memory_allocated(run.args.device)
        run.loss(ids).backward()
        peak = torch.cuda.max_memory_allocated(run.args.device) - before
    else:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's own words
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            run.loss(ids).backward()
        events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
        peak = np.cumsum([e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]).max()
    run.optimizer.zero_grad()
    return int(peak)


ROWS = (  # label, field, format, unit, whether hfnn / plain says something
    ("final loss", "final_loss", "{:.4f}", 1, False),
    ("mean gap to plain", "mean_gap", "{:.1e}", 1, False),
    ("largest gap to plain", "largest_gap", "{:.1e}", 1, False),
    ("ms per step, median", "median_ms", "{:.1f}", 1, True),
    ("tokens per second", "tokens_per_s", "{:,.0f}", 1, True),
    ("kept for backward, MB", "activation_bytes", "{:.1f}", 1e6, True),
    ("    each layer, u", "layer_u", "{:.2f}", 1, True),
    ("peak above weights, MB", "peak_bytes", "{:.1f}", 1e6, True),
)
NOTES = f"""final loss: mean of {LAST} steps; u: bytes per batch x sequence x width, a float32 counted as 2 bytes
plain again: another attention kernel, other dropout masks; its largest gap to plain is the band"""
COLORS = {PLAIN: "#b0b7c3", OTHER: "#f2a154", HFNN: "#1f6feb"}
BARS = {"median_ms": ("ms per step", 1), "activation_bytes": ("MB kept", 1e6), "peak_bytes": ("MB at the peak", 1e6)}
# By the name of the autograd node; where several keep one tensor, the one that used it last is named.
WHY = {
    "linear": "hfnn: what a product's input is rebuilt from, the inputs of the norm and of the activation",
    "norm": "the norm's own input, where no product keeps it already",
    "scaleddotproduct": "torch's attention: q, k, v, and a number for each row of the softmax",
    "mm": "torch's product: its input, as that of attention's projection, which attention keeps as well",
}


def verdict(rows: dict) -> dict:
    """Whether hfnn's losses lie in the band around plain's, which is never narrower than a loss's own rounding."""
    band = max(rows[OTHER]["largest_gap"], 4 * torch.finfo(torch.float32).eps * max(rows[PLAIN]["losses"]))
    steps = sum(abs(a - b) <= band for a, b in zip(rows[HFNN]["losses"], rows[PLAIN]["losses"], strict=True))
    return {"half_width": band, "inside": rows[HFNN]["mean_gap"] <= band, "steps_inside": steps}


def comparison(rows: dict) -> Table:
    ratio = [f"{HFNN} / {PLAIN}"] if HFNN in rows else []
    table = Table("")
    for name in [*rows, *ratio]:
        table.add_column(name, justify="right")
    for label, field, form, unit, compare in ROWS:
        last = [f"{rows[HFNN][field] / rows[PLAIN][field]:.2f}x" if compare else ""] if ratio else []
        table.add_row(label, *(form.format(row[field] / unit) for row in rows.values()), *last)
    return table


def keepers(kept: dict[str, float]) -> Table:
    table = Table.grid(padding=(0, 2))
    for op, size in kept.items():
        why = next((why for key, why in WHY.items() if key in op.lower()), "torch's own op: its input or output")
        table.add_row(f"{size:6.2f} u", f"{op}: {why}")
    return table


def picture(rows: dict, title: str, path: Path) -> None:
    """Losses over each other, and bars of time and memory."""
    panels, widths = [["loss", *BARS]], [3, 1, 1, 1]
    figure, axes = plt.subplot_mosaic(panels, figsize=(12, 4), width_ratios=widths, layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", weight="bold")
    axes["loss"].set(title="loss (nats per byte) by step")
    for name, row in rows.items():
        axes["loss"].plot(row["losses"], label=name, color=COLORS[name], linewidth=3 if name == PLAIN else 1.5)
    axes["loss"].legend(frameon=False)
    shown = [name for name in (PLAIN, HFNN) if name in rows]
    for field, (label, unit) in BARS.items():
        values = [rows[name][field] / unit for name in shown]
        bars = axes[field].bar(shown, values, color=[COLORS[name] for name in shown], width=0.6)
        axes[field].bar_label(bars, fmt="%.0f")
        axes[field].set(title=label, yticks=[], ymargin=0.1)
    for axis in axes.values():
        axis.spines[["top", "right", *(["left"] if axis is not axes["loss"] else [])]].set_visible(False)
    figure.savefig(path, dpi=150)


def report(args, rows: dict) -> None:
    """Prints the tables and writes the JSON and the picture."""
    size = f"{args.layers} layers of width {args.width}, {args.batch} x {args.seq} tokens a step"
    title = f"{args.arch}, {size}, {args.dtype} on {args.device}" + (", compiled" if args.compile else "")
    band = verdict(rows) if {OTHER, HFNN} <= set(rows) else None
    say, out = functools.partial(Console().print, highlight=False), Path(args.out)
    say(f"\n{title}", comparison(rows), NOTES, sep="\n")
    if band:
        where = "inside" if band["inside"] else "OUTSIDE"
        say(f"hfnn's mean gap is {where} the band, and so are {band['steps_inside']} of its {args.steps} single gaps")
    if HFNN in rows:
        say("\nwhat a layer of hfnn keeps", keepers(rows[HFNN]["layer_u_by_op"]), sep="\n")
    machine = {"torch": torch.__version__, "hfnn": hfnn.__version__, "threads": torch.get_num_threads()}
    settings = {name: value for name, value in vars(args).items() if name != "text"}
    result = {"title": title, "settings": settings, "machine": machine, "runs": rows, "band": band}
    (out / "train_gpt.json").write_text(json.dumps(result, indent=1))
    picture(rows, title, out / "train_gpt.png")
    say(f"wrote {out / 'train_gpt.json'} and {out / 'train_gpt.png'}")


def main(argv=None) -> None:
    args, checkpoint = parse(argv)
    transformers.logging.set_verbosity_error()
    wanted = {PLAIN: True, OTHER: args.convert and args.band, HFNN: args.convert}
    runs = [Run(name, args) for name in wanted if wanted[name]]
    for run in runs if checkpoint else ():
        run.load_state(checkpoint["runs"][run.name])
    train(runs, checkpoint["step"] if checkpoint else 0)
    if args.save:
        save(args.save, runs)
    ids = batch(args, args.steps)
    report(args, {run.name: measure(run, runs[0], ids) for run in runs})


if __name__ == "__main__":
    main()
