"""Compile the GPU kernels before training does: `hfnn warmup [--widths 768 3072] [--dtypes bfloat16]`.

Triton compiles a kernel at its first use, once for each dtype and block of columns, and keeps the result on disk
(TRITON_CACHE_DIR, otherwise ~/.triton). This runs every op's forward, rebuild and backward at common widths, so the
first training step finds its kernels there. It also measures which of torch's backends is the fastest for attention.
"""

import argparse
import sys
import time
from collections.abc import Iterator

import torch

from haiprof import command
from hfnn import functional, ops
from hfnn.core.kernel import Kernel, NoKernel, Op, use
from hfnn.ops.attention import backends

WIDTHS = (768, 1024, 1280, 1600, 2048, 4096, 8192)
DTYPES = ("float32", "bfloat16")
ROWS = 4096  # enough that the kernels divide the work as they do in training


def cases(op: Op, rows: int, width: int) -> Iterator[tuple]:
    """A case of (rows, width) for each set of options in the op's own cases."""
    ways = dict.fromkeys(tuple(entry for entry in case if not isinstance(entry, int)) for case in op.cases)
    return ((rows, width, *way) for way in ways)


def step(op: Op, case: tuple, dtype: torch.dtype, params: torch.dtype, device: str) -> None:
    """The op with a consumer that rebuilds its output, forward and backward; parameters in the dtype `params`."""
    (x, *others), options = op.sample(case, dtype, device)
    # A matrix has the dtype of x, as torch requires.
    others = [t.to(params if t.dim() == 1 else dtype).requires_grad_() if is_float(t) else t for t in others]
    y = getattr(functional, op.name)(x.requires_grad_(), *others, **options)
    if not op.recipe:
        y.sum().backward()
        return
    weight = torch.ones(1, y.shape[-1], dtype=y.dtype, device=device, requires_grad=True)
    functional.linear(y, weight).sum().backward()


def is_float(t) -> bool:
    return isinstance(t, torch.Tensor) and t.is_floating_point()


def warm(op: Op, kernel: Kernel, widths, dtypes, device: str = "cuda", rows: int = ROWS) -> int:
    """Run the kernel at each width and dtype that it supports, with parameters of that dtype and of float32; returns
    the number of runs."""
    runs = 0
    for width in widths:
        for dtype, params in dict.fromkeys((d, p) for d in dtypes for p in (d, torch.float32)):
            for case in cases(op, rows, width):
                try:
                    # Without autocast torch refuses parameters of another dtype in some ops.
                    with use(kernel.name), torch.autocast(device, dtype, params is not dtype):
                        step(op, case, dtype, params, device)
                    runs += 1
                except NoKernel:  # outside its limits: it will not run in training either
                    continue
    return runs


def options(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `run`."""
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS, help="row lengths")
    parser.add_argument("--dtypes", nargs="+", default=DTYPES, choices=("float32", "bfloat16", "float16"))


def run(args: argparse.Namespace) -> None:
    if not torch.cuda.is_available():
        print("torch sees no CUDA device: nothing to compile. The C++ kernels of the CPU need no warming up.")
        return
    dtypes = [getattr(torch, name) for name in args.dtypes]
    for op in ops.CONTRACT:
        for kernel in (k for k in op.kernels if k.device == "cuda"):
            if kernel.missing:
                print(f"{op.name:<12}{kernel.name:<8}{kernel.missing}")
                continue
            start = time.perf_counter()
            runs = warm(op, kernel, args.widths, dtypes)
            torch.cuda.synchronize()
            print(f"{op.name:<12}{kernel.name:<8}{runs:4} steps in {time.perf_counter() - start:.1f} s")
            sys.stdout.flush()
    print(f"plain attention: the times of torch's backends are known for {backends.warm(dtypes)} kinds of call")


def main(argv: list[str] | None = None) -> int:
    parser = command.Parser(prog="python -m hfnn.warmup", description=__doc__.splitlines()[0])
    options(parser)
    args = parser.parse_args(argv)
    return command.run("hfnn", lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
