"""The share of a ResNet-50's training step that the GPU waits for data: ImageFolder's files against hfrecord's records.

    bench/loading.py                                     # rows in bench/results/<device>-loading.csv, and a table
    bench/loading.py --loaders imagefolder hfrecord --mode eager --workers 8
    bench/loading.py --device cpu --tiny                 # a smoke test

Each loader feeds the same steps: forward, backward and AdamW under autocast to bfloat16, on uint8 images that the GPU
normalises. `memory` repeats one batch: its median step is the time that the GPU needs. `waits` is the share by which a
loader's mean step is longer. The mean is used because workers deliver batches in bursts.

imagefolder         JPEG files in one folder per class, torchvision's ImageFolder and torch's DataLoader
hfrecord            the same JPEGs in records, the same transform, hfrecord's Dataset and DataLoader
hfrecord-pixels     records of raw 256 x 256 pixels, which are cropped and flipped without decoding

Images are 500 x 375 with 70 KB; a crop of each is scaled to 224 x 224, and half of them are flipped. Files are removed
from the page cache before the first epoch, if the file system allows it ("first", else "first, cached"); "second" is
the next epoch. The first batches of an epoch do not count, because workers start, or have them ready.
"""

import functools
import itertools
import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import cli
import models
import numpy as np
import report
import torch
from records import dropped

import hfrecord

LOADERS = ("imagefolder", "hfrecord", "hfrecord-pixels")
CLASSES, SIZE, PIXELS = 10, (375, 500), 256


# Files


def make(folder: Path, count: int, number: int) -> None:
    """JPEGs of every `CLASSES`th number: smooth pictures with noise, which take as many bytes as photographs."""
    from PIL import Image

    rng = np.random.default_rng(number)
    place = folder / f"class{number}"
    place.mkdir(parents=True)
    for k in range(number, count, CLASSES):
        small = Image.fromarray(rng.integers(0, 256, (12, 16, 3), dtype=np.uint8))
        smooth = np.asarray(small.resize(SIZE[::-1], Image.Resampling.BICUBIC), dtype=np.int16)
        noise = rng.integers(-14, 15, smooth.shape, dtype=np.int16)
        image = Image.fromarray(np.clip(smooth + noise, 0, 255).astype(np.uint8))
        image.save(place / f"{k:06}.jpg", quality=92)


def pack(source: Path, out: Path, pixels: bool, pool) -> None:
    fields = {"image": f"uint8[{PIXELS},{PIXELS},3]" if pixels else "bytes", "label": "int64"}
    files = sorted(source.rglob("*.jpg"))
    with hfrecord.DatasetWriter(out, fields) as writer:
        for file, image in zip(files, pool.imap(scaled if pixels else Path.read_bytes, files, 32), strict=True):
            writer.write({"image": image, "label": int(file.parent.name.removeprefix("class"))})


def scaled(file: Path) -> np.ndarray:
    from PIL import Image

    return np.asarray(Image.open(file).resize((PIXELS, PIXELS), Image.Resampling.BILINEAR))


def forget(folder: Path) -> bool:
    """Removes the files of a folder from the page cache; returns whether this worked."""
    os.sync()
    for file in filter(Path.is_file, folder.rglob("*")):
        fd = os.open(file, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
    return dropped(folder)


# Samples


@functools.cache
def transform(size: int):
    from torchvision.transforms import Compose, PILToTensor, RandomHorizontalFlip, RandomResizedCrop

    return Compose([RandomResizedCrop(size), RandomHorizontalFlip(), PILToTensor()])


def decoded(size: int, record: dict) -> tuple[torch.Tensor, int]:
    import io

    from PIL import Image

    return transform(size)(Image.open(io.BytesIO(record["image"])).convert("RGB")), int(record["label"])


def cropped(size: int, record: dict) -> tuple[torch.Tensor, int]:
    top, left, turned = torch.randint(0, PIXELS - size + 1, (3,)).tolist()
    image = torch.from_numpy(record["image"][top : top + size, left : left + size].transpose(2, 0, 1).copy())
    return image.flip(-1) if turned % 2 else image, int(record["label"])


def loader(name: str, path: Path, options):
    batch, size = options.shape
    more = {"num_workers": options.workers, "pin_memory": options.device == "cuda", "drop_last": True}
    if name == "imagefolder":
        from torchvision.datasets import ImageFolder

        return torch.utils.data.DataLoader(ImageFolder(path, transform(size)), batch, shuffle=True, **more)
    sample = functools.partial(cropped if name.endswith("pixels") else decoded, size)
    del more["drop_last"]
    return hfrecord.DataLoader(hfrecord.Dataset(path, sample), batch, seed=0, tail="drop", **more)


# Steps


class Training(models.Training):
    """ResNet-50 on the batches of a loader."""

    def take(self, shape: tuple) -> None:
        super().take(shape)
        self.kept = torch.randint(256, self._batch["images"].shape, dtype=torch.uint8), self._batch["labels"].cpu()
        self._mean = torch.tensor([123.7, 116.3, 103.5], device=self.device).view(3, 1, 1)

    def step_of(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        images = images.to(self.device, non_blocking=True)
        self._batch["images"] = (images - self._mean) / 58.0
        self._batch["labels"] = labels.to(self.device, non_blocking=True)
        return self.step()


def times(training: Training, batches, skip: int) -> list[float]:
    """Seconds of each step after the first `skip`; a step waits for the previous one, as in a loop that prints its
    loss."""
    found, begin = [], time.perf_counter()
    for images, labels in batches:
        training.step_of(images, labels).item()
        now = time.perf_counter()
        found.append(now - begin)
        begin = now
    return found[skip:]


def measure(folder: Path, training: Training, options) -> list[dict]:
    batch, _ = options.shape
    jpegs = folder / "imagefolder"
    with multiprocessing.get_context("spawn").Pool(len(os.sched_getaffinity(0))) as pool:
        pool.starmap(make, [(jpegs, options.images, number) for number in range(CLASSES)])
        for name in options.loaders:
            if name != "imagefolder":
                pack(jpegs, folder / name, name.endswith("pixels"), pool)
    steps = options.images // batch
    skip = min(steps // 2, 2 * options.workers)  # the workers' queues may hold this many
    for _ in range(models.WARM_UP):
        training.step_of(*training.kept)
    alone = times(training, itertools.repeat(training.kept, steps), 2)
    found = [("memory", "", alone)]
    for name in options.loaders:
        cold = forget(folder / name)
        given = loader(name, folder / name, options)
        for epoch in ("first" if cold else "first, cached", "second"):
            found.append((name, epoch, times(training, given, skip)))
    middle = statistics.median(alone)
    return [row(name, epoch, seconds, middle, options) for name, epoch, seconds in found]


def row(name: str, epoch: str, seconds: list[float], alone: float, options) -> dict:
    mean, middle = statistics.mean(seconds), statistics.median(seconds)
    taken = middle if name == "memory" else mean
    spread = 100 * (max(seconds) - min(seconds)) / middle
    clock = SimpleNamespace(device_us=1e6 * taken, host_us=None, spread_pct=spread)
    more = {"images_per_s": options.shape[0] / taken, "waits": max(0.0, 1 - alone / taken)}
    more |= {"mode": options.mode, "workers": options.workers, "images": options.images, "steps": len(seconds)}
    return report.row("resnet50", options.shape, "autocast", name, epoch, clock, None, more)


def table(rows: list[dict], title: str) -> None:
    found = report.grid(title, ("data", "epoch"), ("ms a step", "images a second", "waits"))
    for r in rows:
        ms, rate = float(r["device_us"]) / 1e3, float(r["images_per_s"])
        found.add_row(r["provider"], r["pass"], f"{ms:.1f}", f"{rate:,.0f}", f"{100 * float(r['waits']):.0f}%")
    report.put(found)


def main(argv=None) -> int:
    parser = cli.parser(__doc__, seconds="not used", tiny="little data, a small model")
    parser.add_argument("--loaders", nargs="*", default=list(LOADERS), choices=LOADERS)
    parser.add_argument("--mode", default="hfnn-captured", choices=models.MODES)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--images", type=int, default=12800)
    parser.add_argument("--folder", help="for the files, on the disk to measure")
    options = parser.parse_args(argv)
    options.layers, options.batches = None, None
    options.shape = (4, 32) if options.tiny else (128, 224)
    if options.tiny:
        options.images, options.workers = 12, 1
    path = report.path(options.results, options.device, "-loading")
    training = Training("resnet", options.mode, options)
    training.take(options.shape)
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        with report.shown(table, f"{path.stem}: ResNet-50, {options.mode}, {options.workers} workers") as rows:
            rows += report.append(path, measure(folder, training, options))
    finally:
        shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    cli.run(main)
