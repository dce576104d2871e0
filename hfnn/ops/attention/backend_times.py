"""The time of each of torch's attention backends for a kind of call: measured, and kept in a file.

`row(kind, ...)` returns the row of the file, or measures one now, on tensors of its own. See backends.py.
"""

import contextlib
import functools
import json
import logging
import os
import statistics
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch._C import _SDPBackend

from hfnn.core.context import capturing

log = logging.getLogger("hfnn")

_sdpa = torch.nn.functional.scaled_dot_product_attention
get_order, set_order = torch._C._get_sdp_priority_order, torch._C._set_sdp_priority_order

NUMBERS = {
    "cudnn": int(_SDPBackend.CUDNN_ATTENTION),
    "flash": int(_SDPBackend.FLASH_ATTENTION),
    "efficient": int(_SDPBackend.EFFICIENT_ATTENTION),
}
BUCKETS = (512, 2048)  # upper limits of the length buckets; longer calls form one more kind
MEASURED = (512, 2048, 4096)  # the length that is measured for each bucket
BYTES = 8 << 20  # size of the timed query; all tensors and gradients take about eight times as much
ROUNDS, CALLS = 5, 3

# torch's order is process-wide. The lock is held while a call uses its own order; the thread may re-enter.
lock = threading.RLock()


class Kind(NamedTuple):
    """The properties that decide the fastest backend. width, value_width: of a head; bucket: an index into MEASURED."""

    gpu: str
    software: str
    dtype: torch.dtype
    width: int
    value_width: int
    causal: bool
    dropout: bool
    grad: bool
    gqa: bool
    bucket: int

    def __str__(self) -> str:
        """GPU | software | call, the key in the file."""
        words = [name for name in ("causal", "dropout", "grad", "gqa") if getattr(self, name)]
        length = f"up to {BUCKETS[self.bucket]}" if self.bucket < len(BUCKETS) else f"over {BUCKETS[-1]}"
        dtype = str(self.dtype).removeprefix("torch.")
        call = f"{dtype} {self.width}x{self.value_width} {' '.join([*words, length])}"
        return f"{self.gpu} | {self.software} | {call}"


@contextlib.contextmanager
def in_order(order: list[int]) -> Iterator[None]:
    """torch tries its backends in this order inside the `with` block."""
    with lock:
        before = get_order()
        set_order(order)
        try:
            yield
        finally:
            set_order(before)


def row(kind: Kind, names: list[str], place: int) -> dict[str, float | None] | None:
    """Microseconds of each backend (None: it does not support such calls), or None if they cannot be measured now."""
    found = rows().get(str(kind), {})
    missing = [name for name in names if name not in found]
    if missing:
        if not _may_measure():
            return None
        try:
            new = measure(kind, missing, torch.device("cuda", place), _device_us)
        except torch.OutOfMemoryError:
            log.info("no memory to measure the backends of attention: torch's own order, for now")
            return None
        found = rows()[str(kind)] = {**found, **new}
        log.info("backends of attention, %s, microseconds: %s", kind, found)
        _store({str(kind): found})
    return found


def _may_measure() -> bool:
    """Not while a CUDA graph is captured, and not if a mode would see the ops that run here."""
    return not capturing() and torch._C._len_torch_dispatch_stack() == 0


def measure(kind: Kind, names: list[str], device: torch.device, clock: Callable) -> dict[str, float | None]:
    """Times of the backends `names` on tensors like those of a call of this kind, forward with backward if `kind.grad`.

    clock(call) -> the microseconds of call(). A backend that does not support the tensors has None. Raises
    torch.OutOfMemoryError.
    """
    with _apart(kind, device):
        query, key, value, dout = _tensors(kind, device)
        options = {"dropout_p": 0.1 if kind.dropout else 0.0, "is_causal": kind.causal, "enable_gqa": kind.gqa}

        def step(order):
            with in_order(order):
                y = _sdpa(query, key, value, **options)
            if kind.grad:  # uses the backend of forward, whatever the order is
                torch.autograd.grad(y, (query, key, value), dout)

        calls = {}
        for name in names:
            order = [NUMBERS[name], *(number for number in get_order() if number != NUMBERS[name])]
            with in_order(order):
                takes = torch._fused_sdp_choice(query, key, value, **options) == NUMBERS[name]
            if takes:
                calls[name] = functools.partial(step, order)
        return {**dict.fromkeys(names), **medians(calls, clock)}


def medians(calls: dict[str, Callable], clock: Callable, rounds: int = ROUNDS) -> dict[str, float | None]:
    """The median of clock(call) for each call, in rounds of alternating order; None if a call raises RuntimeError."""
    times = {}
    for name, call in calls.items():
        try:
            call()  # makes plans, loads kernels
            clock(call)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as why:
            log.info("%s attention cannot run: %s", name, why)
        else:
            times[name] = []
    for i in range(rounds):
        for name in list(times)[:: -1 if i % 2 else 1]:
            times[name].append(clock(calls[name]))
    return {name: statistics.median(times[name]) if name in times else None for name in calls}


def _device_us(call: Callable) -> float:
    """Time between two events on the current stream; a spin kernel before them lets the host run ahead."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(1_000_000)
    start.record()
    for _ in range(CALLS):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3 / CALLS


@contextlib.contextmanager
def _apart(kind: Kind, device: torch.device) -> Iterator[None]:
    """Isolates the caller's state: random numbers, grad mode, autocast, hooks of saved tensors."""
    places = [device.index] if device.type == "cuda" else []
    with contextlib.ExitStack() as stack:
        if places:
            stack.enter_context(torch.cuda.device(device))
        stack.enter_context(torch.random.fork_rng(devices=places))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.set_grad_enabled(kind.grad))
        stack.enter_context(torch.autocast(device.type, enabled=False))
        # If there are several pairs of hooks, the innermost is called.
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(_itself, _itself))
        yield


def _itself(x):
    return x


def _tensors(kind: Kind, device: torch.device) -> list[torch.Tensor]:
    """Query, key, value and the result's gradient, in the memory layout (B, length, heads, width) of models."""
    length = MEASURED[kind.bucket]
    size = length * max(kind.width, kind.value_width) * kind.dtype.itemsize
    sequences = max(BYTES // size, 1)
    heads = min(sequences, 8)
    batch, keys = sequences // heads, max(heads // 4, 1) if kind.gqa else heads

    def draw(of: int, width: int):
        return torch.randn(batch, length, of, width, dtype=kind.dtype, device=device).transpose(1, 2)

    inputs = draw(heads, kind.width), draw(keys, kind.width), draw(keys, kind.value_width)
    return [*(x.requires_grad_(kind.grad) for x in inputs), draw(heads, kind.value_width)]


# The file


def cache_file() -> Path:
    """$XDG_CACHE_HOME/hfnn/attention.json, or ~/.cache/hfnn/attention.json."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hfnn" / "attention.json"


@functools.cache
def rows() -> dict[str, dict]:
    """All rows, str(kind) -> {backend: microseconds or None}: those of the file and those measured by this process."""
    return _read()


def _read() -> dict[str, dict]:
    """The content of the file; empty if it cannot be read or has another content."""
    try:
        found = json.loads(cache_file().read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RuntimeError) as why:  # RuntimeError: no home directory, or too deeply nested
        log.info("the times of attention's backends cannot be read: %s", why)
        return {}
    return {key: row for key, row in found.items() if _is_row(row)} if isinstance(found, dict) else {}


def _is_row(row) -> bool:
    return isinstance(row, dict) and all(
        name in NUMBERS and (us is None or (type(us) in (int, float) and us > 0)) for name, us in row.items()
    )


def _store(new: dict[str, dict]) -> None:
    """Add rows by replacing the file: a reader sees the old or the new file, never a part."""
    try:
        path = cache_file()
        path.parent.mkdir(parents=True, exist_ok=True)
        own = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}")
        try:
            own.write_text(json.dumps({**_read(), **new}, indent=1, sort_keys=True))
            own.replace(path)
        finally:
            own.unlink(missing_ok=True)
    except (OSError, RuntimeError) as why:
        log.info("the times of attention's backends are kept for this process alone: %s", why)
