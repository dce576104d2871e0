"""Fused operators for PyTorch training: what runs on this machine, and what hfnn does with a model.

hfnn info                   # each kernel with the reason why it cannot run here
hfnn report gpt2            # what hfnn.convert would swap in a model; nothing is downloaded for a model type
hfnn plan train:example     # the memory of a training step in each mode, without a GPU
hfnn warmup                 # compile the GPU kernels before training does
hfnn bench gelu             # time an operator against torch's; in a clone of the repository
"""

import importlib
import logging
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import torch

import hfnn
from haiprof.command import Parser, run
from hfnn import info, warmup

BENCH = Path(hfnn.__file__).parents[1] / "bench" / "run.py"


def report(args) -> int:
    from hfnn.named import named

    logging.getLogger("transformers").setLevel(logging.ERROR)
    model = named(args.model)
    parameters = sum(p.numel() for p in model.parameters())
    hfnn.convert(model, prefer=args.prefer)
    found = hfnn.report(model)
    # No kernel accepts tensors on "meta". Which kernel runs depends on the device that the model will be on.
    bare = [replace(row, kernel=None, why=re.sub("^no kernel here for .* on meta$", "", row.why)) for row in found.rows]
    print(f"{args.model}: {type(model).__name__}, {parameters:,} parameters, on no device")
    print(replace(found, rows=bare), end="")
    return 0


def plan(args) -> int:
    sys.path.insert(0, "")  # modules in this folder
    module, _, function = args.function.partition(":")
    model, *inputs = getattr(importlib.import_module(module), function or "plan")()
    dtype = getattr(torch, args.autocast) if args.autocast else None
    found = hfnn.plan(model, *inputs, device=args.device, autocast=dtype)
    print(found, end="")
    for row in found.rows if args.memory else ():
        if not row.why and found.batch is not None:
            print(f"{row.mode}: {args.memory} is enough for a batch of {found.largest(args.memory, row.mode)}")
    return 0


def bench(args) -> int:
    if not BENCH.exists():
        raise ValueError("bench needs a clone of the repository: `make setup` there, then `make bench`")
    process = subprocess.Popen([sys.executable, BENCH, *args.arguments])
    try:
        return process.wait()
    except KeyboardInterrupt:  # the terminal has interrupted the benchmark, too
        process.wait()
        raise


def parser() -> Parser:
    found = Parser(prog="hfnn", description=__doc__)
    found.add_argument("--version", action="version", version=f"hfnn {hfnn.__version__}")
    commands = found.add_subparsers(metavar="COMMAND", required=True)
    sub = commands.add_parser("info", help="what hfnn can do on this machine, and what is missing")
    info.options(sub)
    sub.set_defaults(call=info.run)
    sub = commands.add_parser(
        "report", help="what hfnn.convert would swap in a model, what it would leave alone, and why"
    )
    sub.add_argument(
        "model",
        metavar="MODEL",
        help="a model type of transformers (gpt2), a model of timm (resnet50), a folder with a config.json, or a name "
        "on the Hugging Face hub, of which only the config is downloaded",
    )
    sub.add_argument("--prefer", choices=("auto", "speed", "memory"), default="auto", help="as in hfnn.convert")
    sub.set_defaults(call=report)
    sub = commands.add_parser("plan", help="the memory of a training step in each mode, without a GPU")
    sub.add_argument(
        "function", metavar="MODULE:FUNCTION", help="returns (a model whose result is a loss, *its inputs)"
    )
    sub.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="as in hfnn.plan")
    sub.add_argument("--autocast", choices=("bfloat16", "float16"), help="the dtype of torch.autocast; default: none")
    sub.add_argument(
        "--memory", metavar="SIZE", help='such as "80GiB": also says the largest batch that it is enough for'
    )
    sub.set_defaults(call=plan)
    sub = commands.add_parser("bench", help="compare the time of operators with torch's", add_help=False)
    sub.set_defaults(call=bench)
    sub = commands.add_parser("warmup", help="compile the GPU kernels before training does")
    warmup.options(sub)
    sub.set_defaults(call=warmup.run)
    return found


def main(argv: list[str] | None = None) -> int:
    args, rest = parser().parse_known_args(argv)
    if args.call is bench:
        args.arguments = rest
    elif rest:
        parser().error(f"unrecognized arguments: {' '.join(rest)}")
    return run("hfnn", lambda: args.call(args))


if __name__ == "__main__":
    sys.exit(main())
