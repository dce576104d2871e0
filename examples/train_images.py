"""Train an image classifier twice, with plain torch and with hfnn, and compare the two.

The model is a ResNet or a ViT in plain torch (images.py). Its images are generated stripes in ten directions, or come
from a folder or from record files. As in train_gpt.py, both runs start from the same weights and use the same batches,
in turns. A third run shows how far two correct runs drift apart: plain torch with channels last, or with another
attention kernel and other dropout masks.

    python examples/train_images.py                       # a table, out/train_images.json and out/train_images.png
    python examples/train_images.py --arch vit --steps 200
    python examples/train_images.py --data folder:images  # one folder per class, as in torchvision's ImageFolder
    python -m hfrecord convert images out --format images
    python examples/train_images.py --data records:out

Needs `pip install hfnn[examples]`, and Pillow for images from files.
"""

import argparse

import comparison
import torch
from images import Run, batch, read_data
from runs import HFNN, Parser, names_of_runs, train

import hfnn

# By architecture: on the CPU, and on a GPU.
SIZES = {
    "resnet": (
        {"layers": 1, "width": 32, "size": 32, "batch": 32, "steps": 43, "dtype": "float32"},
        {"layers": 2, "width": 64, "size": 128, "batch": 128, "steps": 103, "dtype": "autocast"},
    ),
    "vit": (
        {"layers": 4, "width": 128, "size": 32, "batch": 32, "steps": 43, "dtype": "float32"},
        {"layers": 12, "width": 384, "size": 64, "batch": 128, "steps": 103, "dtype": "autocast"},
    ),
}
NUMBERS = ("layers", "width", "size", "batch", "steps")
NOTES = f"""{comparison.FINAL_LOSS}
plain again: channels last (resnet), another attention kernel and other dropout masks (vit); {comparison.OF_BAND}"""
LINES = (
    *comparison.LOSSES,
    ("images per second", "images_per_s", "{:,.0f}", 1, True),
    *comparison.KEPT,
    *comparison.PEAK,
)
WHY = {
    "convolution": "torch's convolution: its input",
    "norm": "the norm's own input, unless another op keeps it already",
    "gelu": "the activation's input, from which the next product rebuilds its own",
    "mm": "torch's product: its input",
    "scaleddotproduct": "torch's attention: q, k, v, and one number per row of the softmax",
    "maxpool": "a few bits per output element: the position of the maximum in its window",
}


def parse(argv=None) -> argparse.Namespace:
    parser = Parser(__doc__, "train_images.py")
    add = parser.add_argument
    add("--arch", choices=SIZES, default="resnet")
    add("--data", help="folder:PATH, with one folder per class, or records:PATH (default: generated images)")
    add("--layers", type=int, help="per stage of the resnet, which has four, or of the vit")
    add("--width", type=int, help="channels of the first stage, or of a token")
    for name in ("size", "batch", "steps"):
        add(f"--{name}", type=int)
    add("--heads", type=int, default=4, help="heads of the vit's attention (default: 4)")
    add("--dropout", type=float, default=0.1, help="dropout of the vit (default: 0.1)")
    args = parser.parse_args(argv)
    for name, value in SIZES[args.arch][args.device != "cpu"].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    parser.check_numbers(args, (*NUMBERS, "heads"))
    if not 0 <= args.dropout < 1:
        parser.error(f"--dropout takes a number from 0 up to 1, got {args.dropout}")
    if args.arch == "vit" and args.width % args.heads:
        parser.error(f"--width {args.width} does not split into parts for --heads {args.heads}")
    if args.size % 4:
        parser.error(f"--size takes a multiple of 4, got {args.size}")
    parser.check_place(args, (("--out", args.out),))
    read_data(args, parser)
    return args


def kept_by_op(run: Run, images) -> dict[str, float]:
    """MB by op, the largest first."""
    kept = hfnn.memory.saved_bytes(lambda: run.loss(images)).by_op
    return {op: size / 1e6 for op, size in sorted(kept.items(), key=lambda item: -item[1]) if size >= 5000}


def main(argv=None) -> None:
    args = parse(argv)
    torch.backends.cudnn.benchmark = True
    runs = [Run(name, args) for name in names_of_runs(args)]
    train(runs, 0, batch)
    images = batch(args, args.steps)
    rows = {r.name: comparison.measure(r, runs[0], images, args.batch) | {"kept": kept_by_op(r, images)} for r in runs}
    kept = None
    if HFNN in rows:
        kept = "what hfnn keeps for backward", comparison.keepers(rows[HFNN]["kept"], "MB", WHY)
    size = f"{args.layers} layers of width {args.width}, {args.batch} images of {args.size} x {args.size} a step"
    comparison.report(args, "train_images", size, rows, LINES, NOTES, "loss (nats per image)", kept)


if __name__ == "__main__":
    main()
