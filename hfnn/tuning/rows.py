"""The result of `tune`, and the file in which it is kept."""

import hashlib
import io
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from hfnn.core.kernel import log
from hfnn.memory.peak import tensors


@dataclass(frozen=True)
class TuneRow:
    """A candidate. ms: of a step, forward and backward, the median; setup: seconds until the first steps were done;
    peak: peak bytes of a step above what was allocated before, None if unknown; why: the reason why it was dropped or
    not tried, or "".
    """

    name: str
    ms: float | None = None
    setup: float | None = None
    peak: int | None = None
    why: str = ""


@dataclass(frozen=True)
class Tuning:
    """The result of `tune`; print it, or read its `rows`. choice: the name of the candidate that the model now runs as;
    kept: whether the choice is from an earlier run.
    """

    rows: list[TuneRow]
    choice: str
    steps: int
    kept: bool = False

    @property
    def line(self) -> str:
        said = f"tuned: {self.choice}" + (", as an earlier run chose" if self.kept else f", for {self.steps:,} steps")
        return "; ".join([said, *(f"{row.name}: {row.why}" for row in self.rows if row.why)])

    def __rich__(self) -> Table:
        caption = f"{self.choice}, for {self.steps:,} steps" + (", as an earlier run chose" if self.kept else "")
        table = Table("candidate", "ms a step", "of stock", "set up, s", "peak, MiB", "", caption=caption)
        stock = self.rows[0].ms
        for row in self.rows:
            share = f"{row.ms / stock:.2f}" if row.ms and stock else "-"
            ms, setup = (("-" if x is None else f"{x:.2f}") for x in (row.ms, row.setup))
            peak = "-" if row.peak is None else f"{row.peak / 2**20:,.1f}"
            table.add_row(row.name, ms, share, setup, peak, row.why or ("chosen" if row.name == self.choice else ""))
        return table

    def __str__(self) -> str:
        file = io.StringIO()
        Console(file=file, width=160).print(self)
        return file.getvalue()


def cache_file() -> Path:
    """$XDG_CACHE_HOME/hfnn/tune.json, or ~/.cache/hfnn/tune.json."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hfnn" / "tune.json"


def key(model, batches: list, steps: int, budget, memory, chosen: list, ranks: int) -> str:
    """A digest of everything that a choice depends on; only the magnitude of steps counts, and GiB of free GPU
    memory."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    here = torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu, {torch.get_num_threads()} threads"
    parts = [
        *((name, type(m).__module__, type(m).__qualname__, m.training) for name, m in model.named_modules()),
        *((name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in model.named_parameters()),
        *(tuple((tuple(t.shape), t.dtype) for t in _tensors(batch)) for batch in batches),
        *(torch.__version__, torch.version.cuda, sys.modules["hfnn"].__version__, here, ranks, budget),
        *(steps.bit_length(), memory and memory >> 30 if device.type == "cuda" else memory, *(c.name for c in chosen)),
        *(torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)),
        *(torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()),
    ]
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _tensors(batch) -> list[torch.Tensor]:
    return list(tensors(dict(batch) if isinstance(batch, Mapping) else batch))


def read() -> dict[str, Tuning]:
    """The content of the file; empty if it cannot be read or has another content."""
    try:
        found = json.loads(cache_file().read_text())
        return {k: Tuning([TuneRow(**row) for row in v.pop("rows")], **v) for k, v in found.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RuntimeError, TypeError, KeyError, AttributeError) as why:
        log.info("the choices of tune cannot be read: %s", why)
        return {}


def write(key: str, found: Tuning) -> None:
    try:
        path = cache_file()
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps({k: asdict(v) for k, v in {**read(), key: found}.items()}))
        os.replace(temporary, path)
    except (OSError, RuntimeError) as why:
        log.info("the choice of tune is not kept: %s", why)
