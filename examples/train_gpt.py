"""Train a byte-level GPT twice, with plain torch and with hfnn, and compare the two.

The model is an unmodified `GPT2LMHeadModel` of transformers (`--arch llama`: `LlamaForCausalLM`). It reads real text:
the sources of Python's standard library, or any `--data` file or folder. Both runs start from the same weights and use
the same batches. They take turns, so other load on the machine affects both. A third run, plain torch with another
attention kernel and other dropout masks, shows how far two correct runs drift apart: the band.

    python examples/train_gpt.py                            # a table, out/train_gpt.json and out/train_gpt.png
    python examples/train_gpt.py --arch llama --steps 100
    python examples/train_gpt.py --steps 2000 --tune        # with the fastest way to run the model here
    python examples/train_gpt.py --save ckpt.pt             # and later, bit for bit from where it stopped:
    python examples/train_gpt.py --resume ckpt.pt --steps 200
    python examples/train_gpt.py --data records:train       # hfrecord files with input_ids; resumes within an epoch
    python examples/train_gpt.py --dist fsdp --nproc 2 --save runs      # on two ranks, or ddp, or pipeline; to go on
    python examples/train_gpt.py --dist pipeline --nproc 4 --stages 2 --schedule zbv --resume runs --steps 200

Needs `pip install hfnn[examples]`. All of hfnn in here is `hfnn.convert(model, optimizer)`, or `hfnn.tune`, and
`hfnn.memory` to count bytes.
"""

import argparse
import json
import os
import zlib
from pathlib import Path

import comparison
import torch
import transformers
from gpt import Run, batch, kept_per_layer, read_text
from runs import HFNN, Parser, names_of_runs, train

ON_CPU = {"layers": 4, "width": 256, "heads": 4, "seq": 256, "batch": 8, "steps": 43, "dtype": "float32"}
ON_CUDA = {"layers": 12, "width": 1024, "heads": 16, "seq": 1024, "batch": 16, "steps": 103, "dtype": "autocast"}
# All other settings must not change when a run is resumed; ranks and layout may.
FREE = {"steps", "save", "resume", "out", "text", "order", "tune", "nproc", "stages", "schedule", "microbatches"}
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zbv", "dualpipev")  # of distributed.py


NOTES = f"""{comparison.FINAL_LOSS}; u: bytes per batch x sequence x width, a float32 counted as 2 bytes
plain again: another attention kernel, other dropout masks; {comparison.OF_BAND}"""
LINES = (
    *comparison.LOSSES,
    ("tokens per second", "tokens_per_s", "{:,.0f}", 1, True),
    *comparison.KEPT,
    ("    each layer, u", "layer_u", "{:.2f}", 1, True),
    *comparison.PEAK,
)
WHY = {
    "linear": "hfnn: what a product's input is rebuilt from, the inputs of the norm and of the activation",
    "norm": "the norm's own input, unless a product keeps it already",
    "scaleddotproduct": "torch's attention: q, k, v, and one number per row of the softmax",
    "mm": "torch's product: its input, such as that of attention's projection, which attention keeps as well",
}


def parse(argv=None) -> tuple[argparse.Namespace, dict | None]:
    """The settings, and the checkpoint to resume from, or None."""
    parser = arguments()
    args = parser.parse_args(argv)
    checkpoint = load(args.resume, parser) if args.resume else None
    if checkpoint:
        parser.set_defaults(**checkpoint["settings"])
        args = parser.parse_args(argv)
        for name, saved in checkpoint["settings"].items():
            if getattr(args, name) != saved and name != "dist":
                parser.error(f"{args.resume} was made with {name} {saved}, asked for {getattr(args, name)}")
        if bool(args.dist) != os.path.isdir(args.resume):
            parser.error(f"{args.resume} is of a run {'without' if args.dist else 'with'} --dist")
    for name, value in (ON_CPU if args.device == "cpu" else ON_CUDA).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    check(args, checkpoint, parser)
    return args, checkpoint


def arguments() -> Parser:
    parser = Parser(__doc__, "train_gpt.py")
    add = parser.add_argument
    add("--arch", choices=("gpt2", "llama"), default="gpt2")
    add("--data", help="a text file, a folder of them (default: the standard library's sources), or records:FOLDER")
    for name in ("layers", "width", "heads", "seq", "batch", "steps"):
        add(f"--{name}", type=int, help=f"default: {ON_CPU[name]} on the CPU, {ON_CUDA[name]} on a GPU")
    add("--dropout", type=float, default=0.1, help="for embeddings and residuals, gpt2 only (default: 0.1)")
    add("--save", metavar="PATH", help="write a checkpoint after the last step")
    add("--resume", metavar="PATH", help="continue from a checkpoint, up to --steps in total")
    add("--tune", action="store_true", help="run the model in the way that hfnn.tune measures as the fastest")
    add("--dist", choices=("ddp", "fsdp", "pipeline"), help="train on --nproc ranks, wrapped by haiscale")
    add("--nproc", type=int, default=torch.cuda.device_count() or 2, help="ranks of --dist (default: the GPUs, or 2)")
    add("--stages", type=int, help="stages of the pipeline; several pipelines are replicas (default: --nproc)")
    add("--schedule", choices=SCHEDULES, default="1f1b", help="schedule of the pipeline (default: 1f1b)")
    add("--microbatches", type=int, default=4, help="microbatches per batch of a pipeline (default: 4)")
    return parser


def check(args, checkpoint, parser) -> None:
    parser.check_numbers(args, ON_CPU.keys() - {"dtype"})
    if args.tune and (args.dist or args.compile or not args.convert):
        parser.error("--tune goes without --dist, --compile and --no-convert")
    if args.dist:
        check_ranks(args, parser)
    if not 0 <= args.dropout < 1:
        parser.error(f"--dropout takes a number from 0 up to 1, got {args.dropout}")
    if args.width % args.heads or (args.arch == "llama" and args.width // args.heads % 2):
        even = "even " if args.arch == "llama" else ""
        parser.error(f"--width {args.width} does not split into {even}parts for --heads {args.heads}")
    if checkpoint and args.steps <= checkpoint["step"]:
        parser.error(f"--steps {args.steps}: {args.resume} has {checkpoint['step']} of them already")
    args.order = None
    args.text = read_text(args, parser)
    if checkpoint and checkpoint["text"] != zlib.crc32(args.text):
        parser.error(f"--resume {args.resume}: the text is not what it was; give the same with --data")
    target = Path(args.save or ".")
    parser.check_place(args, (("--out", args.out), ("--save", target if args.dist else target.parent)))


def check_ranks(args, parser) -> None:
    args.stages = args.stages or args.nproc
    parser.check_numbers(args, ("nproc", "stages", "microbatches"))
    replicas = args.nproc
    if args.dist == "pipeline":
        if args.nproc % args.stages:
            parser.error(f"--nproc {args.nproc} does not split into pipelines of --stages {args.stages}")
        replicas = args.nproc // args.stages
    if args.batch % replicas:
        parser.error(f"--batch {args.batch} does not split into parts for {replicas} replicas")
    if args.compile and args.dist != "ddp":
        parser.error(f"--compile goes with --dist ddp, not with {args.dist}")


def save(path: str, runs: list[Run]) -> None:
    """Writes a checkpoint atomically: `path` has the new one or its previous content."""
    states = {run.name: run.state() for run in runs}
    write(path, lambda file: torch.save({**description(runs[0].args), "runs": states}, file))


def description(args) -> dict:
    """The state for a resumed run."""
    settings = {name: value for name, value in vars(args).items() if name not in FREE}
    return {"settings": settings, "step": args.steps, "text": zlib.crc32(args.text)}


def write(path: str, into) -> None:
    """Writes a file completely or not at all."""
    with open(f"{path}.tmp", "wb") as file:
        into(file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(f"{path}.tmp", path)


def load(path: str, parser) -> dict:
    """Reads a checkpoint; from a folder saved by ranks, only its description."""
    try:
        if os.path.isdir(path):
            return json.loads(Path(path, "settings.json").read_text())
        checkpoint = dict(torch.load(path, map_location="cpu", weights_only=True))
        return {key: checkpoint[key] for key in ("settings", "step", "text", "runs")}
    except OSError as error:
        parser.error(f"--resume {error.filename or path}: {error.strerror}")
    except Exception:  # torch, pickle and zip raise many kinds for other files
        parser.error(f"--resume {path}: not a checkpoint of this script")


def main(argv=None) -> None:
    args, checkpoint = parse(argv)
    transformers.logging.set_verbosity_error()
    if args.dist:
        return on_ranks(args, checkpoint)
    runs = [Run(name, args) for name in names_of_runs(args)]
    for run in runs if checkpoint else ():
        run.load_state(checkpoint["runs"][run.name])
    first = checkpoint["step"] if checkpoint else 0
    if args.tune:
        runs[-1].tune(first)
    train(runs, first, batch)
    if args.save:
        save(args.save, runs)
    report(args, runs)


def report(args, runs: list[Run]) -> None:
    ids = batch(args, args.steps)
    rows = {r.name: comparison.measure(r, runs[0], ids, ids.numel()) | kept_per_layer(r, ids) for r in runs}
    kept = None
    if HFNN in rows:
        kept = "what a layer of hfnn keeps", comparison.keepers(rows[HFNN]["layer_u_by_op"], "u", WHY)
    size = f"{args.layers} layers of width {args.width}, {args.batch} x {args.seq} tokens a step"
    comparison.report(args, "train_gpt", size, rows, LINES, NOTES, "loss (nats per byte)", kept)


def on_ranks(args, checkpoint) -> None:
    import distributed

    distributed.main(args, checkpoint is not None)
    if args.save:
        content = json.dumps(description(args)).encode()
        write(f"{args.save}/settings.json", lambda file: file.write(content))


if __name__ == "__main__":
    main()
