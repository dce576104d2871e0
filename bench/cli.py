"""Common code of the benchmarks' command lines."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch

RESULTS = Path(__file__).resolve().parent / "results"
UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def parser(doc: str, seconds: str | None = None, tiny: str | None = None) -> argparse.ArgumentParser:
    """A parser with --device and --results. `seconds` is the help of --seconds (added with --rounds), `tiny` of
    --tiny."""
    found = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = found.add_argument
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    add("--results", type=Path, default=RESULTS, help="folder of the CSV files")
    if seconds:
        add("--rounds", type=int, default=5)
        add("--seconds", type=float, default=0.3, help=seconds)
    if tiny:
        add("--tiny", action="store_true", help=tiny)
    return found


def size(text: str) -> int:
    """Bytes: 4096, 4K, 1M."""
    unit = UNITS.get(text[-1:].upper(), 1)
    digits = text[:-1] if unit > 1 else text
    if not digits.isdecimal():
        raise argparse.ArgumentTypeError(f"a size is a number of bytes, or of K, M or G of them, got {text!r}")
    return int(digits) * unit


def run(main: Callable[[], int]) -> None:
    """The process ends with main's exit status."""
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted")
