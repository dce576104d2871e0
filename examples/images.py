"""The models of train_images.py, a ResNet and a ViT in plain torch, its images, and one run with both."""

from pathlib import Path

import numpy as np
import runs
import torch
from runs import OTHER, RECORDS
from torch import nn
from torch.nn import functional as F

FOLDER = "folder:"  # --data folder:PATH
CLASSES = 10  # of the generated images
MEAN, STD = 0.5, 0.25  # for normalising pixels from 0 to 1


class Residual(nn.Module):
    """Two convolutions with a skip connection.

    He et al., "Deep Residual Learning for Image Recognition", CVPR 2016.
    """

    def __init__(self, inputs: int, width: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.act = nn.ReLU(inplace=True)
        self.around = nn.Identity()
        if stride > 1 or inputs != width:
            self.around = nn.Sequential(nn.Conv2d(inputs, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x):
        y = self.act(self.norm1(self.conv1(x)))
        return self.act(self.norm2(self.conv2(y)) + self.around(x))


class ResNet(nn.Module):
    """Four stages of `layers` blocks each, with `width` channels, doubled in each further stage."""

    def __init__(self, layers: int, width: int, classes: int):
        super().__init__()
        self.conv = nn.Conv2d(3, width, 3, 1, 1, bias=False)
        self.norm, self.act, self.pool = nn.BatchNorm2d(width), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        widths = [width, *(width << stage for stage in range(4))]
        self.stages = nn.Sequential(
            *(
                Residual(widths[stage + (layer > 0)], widths[stage + 1], 2 if stage and not layer else 1)
                for stage in range(4)
                for layer in range(layers)
            )
        )
        self.mean, self.head = nn.AdaptiveAvgPool2d(1), nn.Linear(widths[-1], classes)

    def forward(self, x):
        x = self.pool(self.act(self.norm(self.conv(x))))
        return self.head(self.mean(self.stages(x)).flatten(1))


class Attention(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float):
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class ViT(nn.Module):
    """Patches of 4 x 4 pixels as tokens; their mean is classified.

    Dosovitskiy et al., "An Image is Worth 16x16 Words", ICLR 2021.
    """

    def __init__(self, layers: int, width: int, heads: int, size: int, dropout: float, classes: int):
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.places = nn.Parameter(0.02 * torch.randn((size // 4) ** 2, width))
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2) + self.places
        return self.head(self.norm(self.blocks(x)).mean(1))


class Run(runs.Run):
    items = "images"
    rate = 1e-3

    def build(self) -> nn.Module:
        args = self.args
        if args.arch == "vit":
            return ViT(args.layers, args.width, args.heads, args.size, args.dropout, args.classes)
        model = ResNet(args.layers, args.width, args.classes)
        # With channels last, convolutions add in another order.
        return model.to(memory_format=torch.channels_last) if self.name == OTHER else model

    def loss_of(self, batch) -> torch.Tensor:
        pixels, labels = batch
        return F.cross_entropy(self.forward(pixels.to(next(self.model.parameters()).dtype)).float(), labels)


def read_data(args, parser) -> None:
    """Sets args.classes, and args.images (files or None), args.order (a sampler of records or None)."""
    args.images, args.order, args.classes = None, None, CLASSES
    if args.data is None:
        return
    if args.data.startswith(RECORDS):
        runs.records(args, parser, "image", "image and label, as of `hfrecord convert`", lambda row: "label" in row)
        args.classes = 1 + max(int(args.order.data[at]["label"]) for at in range(len(args.order.data)))
    elif args.data.startswith(FOLDER):
        root = Path(args.data.removeprefix(FOLDER))
        try:
            classes = sorted(path for path in root.iterdir() if path.is_dir())
        except OSError as error:
            parser.error(f"--data {args.data}: {error.strerror}")
        args.images = [(p, n) for n, path in enumerate(classes) for p in sorted(path.rglob("*")) if p.is_file()]
        args.classes = len(classes)
        if not args.images:
            parser.error(f"--data {args.data}: takes a folder with a folder of images for each class")
    else:
        parser.error(f"--data {args.data}: takes {FOLDER}PATH or {RECORDS}PATH")


def batch(args, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pixels float32 (batch, 3, size, size) and labels int64 (batch,) of a step: a function of seed and step."""
    if args.order is not None:
        rows = runs.rows_of(args, step)
        pixels, labels = [scaled(row["image"], args.size) for row in rows], [row["label"] for row in rows]
        return tensors(args, np.stack(pixels), np.array(labels))
    random = np.random.default_rng((args.seed % 2**32, step))
    if args.images is None:
        return tensors(args, *gratings(random, args.batch, args.size))
    chosen = [args.images[at] for at in random.integers(len(args.images), size=args.batch)]
    return tensors(args, np.stack([opened(path, args.size) for path, _ in chosen]), np.array([n for _, n in chosen]))


def tensors(args, pixels_BHWC: np.ndarray, labels: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    pixels = torch.from_numpy((pixels_BHWC - MEAN) / STD).float().movedim(-1, 1).contiguous()
    return pixels.to(args.device), torch.from_numpy(labels).long().to(args.device)


def gratings(random: np.random.Generator, count: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Stripes with random wavelength, phase and colours, plus noise; the class is their direction.

    Returns pixels from 0 to 1 (count, size, size, 3), and labels (count,).
    """
    labels = random.integers(CLASSES, size=count)
    angle = (np.pi / CLASSES * labels)[:, None, None]
    y, x = np.mgrid[:size, :size]
    wave = 2 * np.pi / random.uniform(4, 10, (count, 1, 1)) * (x * np.cos(angle) + y * np.sin(angle))
    light = np.sin(wave + random.uniform(0, 2 * np.pi, (count, 1, 1)))[..., None]
    pixels = 0.5 + light * random.uniform(-0.25, 0.25, (count, 1, 1, 3))
    return np.clip(pixels + random.normal(0, 0.1, (count, size, size, 3)), 0, 1), labels


def scaled(image, size: int) -> np.ndarray:
    """A Pillow image as (size, size, 3) from 0 to 1."""
    return np.asarray(image.convert("RGB").resize((size, size))) / 255


def opened(path: Path, size: int) -> np.ndarray:
    from PIL import Image

    with Image.open(path) as image:
        return scaled(image, size)
