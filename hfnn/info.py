"""What hfnn can do on this machine, and what is missing: `python -m hfnn.info`, for bug reports. `--build` builds
hfnn._autograd, also if a build failed.

Every item is looked up separately. A missing item prints "not found" and the reason; the others still print.
"""

import argparse
import importlib
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch

from hfnn import ops, optim
from hfnn.core import build, native
from hfnn.ops.attention import backends

# The features that the kernels are compiled for and that decide the speed. Names as in the Linux kernel, x86 then Arm.
CPU_FEATURES = (
    *("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16"),
    *("asimd", "fphp", "sve", "bf16"),
)
_BACKENDS = ("GPU", "software", "call", "fastest", "cudnn, us", "flash, us", "efficient, us")
VARIABLES = ("HFNN_", "TRITON_", "TORCH", "PYTORCH_", "CUDA_", "OMP_", "MKL_", "KMP_")


@dataclass(frozen=True)
class Section:
    """One part of the report: `rows` have as many cells as `header`, and the last cell may be long."""

    title: str
    header: tuple[str, ...]
    rows: list[tuple[str, ...]]


def found(look: Callable[[], object]) -> str:
    """The result of `look` as text, or the reason why it fails."""
    try:
        return str(look())
    except Exception as error:
        return f"not found: {str(error) or type(error).__name__}"


def tables() -> list[Section]:
    """The whole report, as data."""
    return [
        Section("kernels", ("op", "kernel", "on", "from elements", "dtypes", "here"), list(_kernels())),
        Section("plain attention", _BACKENDS, backends.table() or [("nothing measured", *[""] * 6)]),
        Section("software", ("what", "found"), [(name, found(look)) for name, look in _software()]),
        Section("hardware", ("what", "found"), [(name, found(look)) for name, look in _hardware()]),
        Section("environment", ("variable", "value"), _environment()),
    ]


def _kernels() -> Iterator[tuple[str, ...]]:
    rooms = [(op.name, op.kernels) for op in ops.ALL]
    rooms += [(name, cls.kernels) for name in optim.__all__ if hasattr(cls := getattr(optim, name), "kernels")]
    for room, kernels in rooms:
        for kernel in kernels:
            dtypes = " ".join(_short(dtype) for dtype in kernel.dtypes)
            here = found(lambda kernel=kernel: "yes" if kernel.missing is None else f"no: {kernel.missing}")
            yield room, kernel.name, kernel.device, f"{kernel.min_elements:,}", dtypes, here
        if not kernels:
            yield room, "torch", "any", "0", "all", "yes"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.").replace("bfloat", "bf").replace("float", "f")


def _software() -> Iterator[tuple[str, Callable]]:
    yield "hfnn", lambda: f"{version('hfnn')}, {Path(__file__).parent}"
    yield "hfnn._C, C++", lambda: importlib.import_module("hfnn._build").cxx
    yield "hfnn._C, CUDA", lambda: importlib.import_module("hfnn._build").cuda
    yield "hfnn._autograd", lambda: native.why or f"for torch {torch.__version__}, {native.extension.__file__}"
    yield "torch", lambda: f"{torch.__version__}, {_cuda_of_torch()}"
    yield "triton", lambda: importlib.import_module("triton").__version__
    yield "transformers", lambda: version("transformers")
    yield "Python", lambda: f"{platform.python_implementation()} {platform.python_version()}, {sys.executable}"
    yield "system", lambda: f"{platform.platform()}, {_distribution()}"
    yield "NVIDIA driver", _driver


def _cuda_of_torch() -> str:
    return f"CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"


def _distribution() -> str:
    return platform.freedesktop_os_release()["PRETTY_NAME"] if sys.platform == "linux" else platform.machine()


def _driver() -> str:
    ask = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    versions = subprocess.run(ask, check=True, capture_output=True, text=True, timeout=20).stdout.split()
    return ", ".join(sorted(set(versions)))


def _hardware() -> Iterator[tuple[str, Callable]]:
    yield "CPU", lambda: _cpuinfo("model name")
    yield "CPU features", _features
    yield "threads", lambda: f"torch uses {torch.get_num_threads()} of {os.cpu_count()} cores"
    if not torch.cuda.is_available():
        yield "GPU", lambda: f"not found: torch sees no CUDA device ({_cuda_of_torch()})"
        return
    for i in range(torch.cuda.device_count()):
        yield f"GPU {i}", lambda i=i: _gpu(torch.cuda.get_device_properties(i))


def _cpuinfo(*keys: str) -> str:
    """The first CPU's value for one of the keys, if the system has /proc; otherwise a general name."""
    path = Path("/proc/cpuinfo")
    if path.exists():
        for line in path.read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() in keys:
                return value.strip()
    return platform.processor() or platform.machine()


def _features() -> str:
    flags = set(_cpuinfo("flags", "Features").split())
    capability = torch.backends.cpu.get_cpu_capability()
    return f"{' '.join(f for f in CPU_FEATURES if f in flags) or 'none of interest'}; torch uses {capability}"


def _gpu(gpu) -> str:
    memory = f"{gpu.total_memory / 2**30:.0f} GiB"
    return f"{gpu.name}, capability {gpu.major}.{gpu.minor}, {gpu.multi_processor_count} multiprocessors, {memory}"


def _environment() -> list[tuple[str, str]]:
    return sorted(item for item in os.environ.items() if item[0].startswith(VARIABLES)) or [("none set", "")]


def text(parts: list[Section]) -> str:
    """The report in columns of fixed width."""
    lines = []
    for part in parts:
        cells = [part.header, *part.rows]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines += ["", part.title]
        lines += [
            "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in cells
        ]
    return "\n".join(lines[1:])


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--build", action="store_true", help="build hfnn._autograd for this torch, if there is none")


def run(args: argparse.Namespace) -> None:
    if not args.build:
        return print(text(tables()))
    try:
        extension = native.extension or build.load(again=True)
    except Exception as error:
        raise SystemExit(f"hfnn._autograd is missing: {error}") from None
    print(f"hfnn._autograd: {extension.__file__}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m hfnn.info", description="what hfnn can do here, and what is missing"
    )
    options(parser)
    run(parser.parse_args())
