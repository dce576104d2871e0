"""Clocks: the time of a call on the device and on the host, and the reliability of the numbers.

All providers of one comparison are timed in the same rounds, one after another, so that changing clocks and other load
affect them equally. A round gives one median for each. The result is the median over rounds; its spread is the distance
between the best and the worst round.
"""

import contextlib
import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

COPY_BYTES = {"cuda": 2 << 30, "cpu": 256 << 20}  # size of the tensor copied to measure the bandwidth
FEWEST, MOST = 3, 50  # samples in a round, unless said otherwise


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call; None if there is no such number: a CPU only has device_us."""

    device_us: float | None
    host_us: float | None
    spread_pct: float | None


@dataclass(frozen=True)
class Call:
    """The timed calls. `runs` do the same on different inputs, in turns; `around` is entered outside the timed part."""

    runs: tuple[Callable[[], object], ...]
    around: Callable = contextlib.nullcontext


def interleaved(calls: dict, device: str, rounds: int = 5, seconds: float = 0.3, fewest: int = FEWEST) -> dict:
    """A Timing for each of `calls`, by the same keys; spends about `seconds` on each, or `fewest` calls per round."""
    sampler = _Cuda() if device == "cuda" else _Cpu()
    runs = {key: itertools.cycle(call.runs) for key, call in calls.items()}
    plans = {}
    for key, call in calls.items():
        with call.around():
            plans[key] = _plan(sampler, runs[key], len(call.runs), seconds / rounds, fewest)
    medians = {key: [] for key in calls}
    with _no_collection():
        for i in range(rounds):
            for key in list(calls)[:: -1 if i % 2 else 1]:  # alternating order: no provider always follows the same one
                with calls[key].around():
                    medians[key].append(sampler.sample(runs[key], *plans[key]))
    return {key: _timing(of_rounds) for key, of_rounds in medians.items()}


def _plan(sampler, runs: Iterator, sets: int, seconds: float, fewest: int) -> tuple[int, float]:
    """(samples per round, host microseconds per call), after every input set was used once."""
    for _ in range(max(fewest, sets)):
        next(runs)()
    device_us, host_us = sampler.sample(runs, fewest, 1000.0)
    count = int(seconds * 1e6 / max(device_us, host_us or 0.0, 1.0))
    return min(max(count, fewest), MOST), host_us or 0.0


def _timing(rounds: list[tuple[float, float | None]]) -> Timing:
    device = [device_us for device_us, _ in rounds]
    host = [host_us for _, host_us in rounds if host_us is not None]
    middle = statistics.median(device)
    spread = 100 * (max(device) - min(device)) / middle
    return Timing(middle, statistics.median(host) if host else None, spread)


class _Cpu:
    """Wall time. For cold caches the caller provides enough input sets to exceed them (`input_sets`)."""

    def sample(self, runs: Iterator, count: int, host_us: float) -> tuple[float, None]:
        """Median over `count` calls."""
        times = []
        for run in itertools.islice(runs, count):
            begin = time.perf_counter()
            run()
            times.append(time.perf_counter() - begin)
        return statistics.median(times) * 1e6, None


class _Cuda:
    """Device time between two events, host time until the call returns; both of the same call, with a cold L2.

    A short spin kernel runs first: while the device is busy with it, the host runs ahead, so no launch gaps are counted
    as device time. The L2 is then overwritten instead of read. This fills it with dirty lines, as the op itself does at
    its end. With clean lines an op could leave the last 50 MB of its output in the cache for free.
    """

    def __init__(self):
        device = torch.cuda.get_device_properties(torch.cuda.current_device())
        self.scratch = torch.empty(2 * device.L2_cache_size, dtype=torch.int8, device="cuda")
        self.cycles_per_us = (getattr(device, "clock_rate", 0) or 2_000_000) / 1000

    def sample(self, runs: Iterator, count: int, host_us: float) -> tuple[float, float]:
        """Medians over `count` calls."""
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
        spin, host = int(self.cycles_per_us * (1.5 * host_us + 20)), []
        torch.cuda.synchronize()
        for (start, end), run in zip(events, runs, strict=False):
            torch.cuda._sleep(spin)
            self.scratch.zero_()
            start.record()
            begin = time.perf_counter()
            run()
            host.append(time.perf_counter() - begin)
            end.record()
        torch.cuda.synchronize()
        device_us = statistics.median(start.elapsed_time(end) for start, end in events) * 1e3
        return device_us, statistics.median(host) * 1e6


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """No garbage collection inside a timed call."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def per_call(call: Callable, calls: int, device: str) -> float:
    """Microseconds per call of a whole block, including launches and synchronisation: the larger of host and device."""
    synchronise = torch.cuda.synchronize if device == "cuda" else _nothing
    synchronise()
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    synchronise()
    return (time.perf_counter() - begin) / calls * 1e6


def _nothing() -> None:
    pass


def side_by_side(ours: Call, theirs: Call, device: str, rounds: int = 41, block_us: float = 500.0):
    """(our, their) microseconds per call, as medians over many short interleaved blocks."""
    blocks = []
    for call in (ours, theirs):
        with call.around():
            per_call(call.runs[0], 10, device)
            once = per_call(call.runs[0], 5, device)
        blocks.append((call, min(max(int(block_us / once), 1), 500), []))
    with _no_collection():
        for i in range(rounds):
            for call, count, times in blocks[:: -1 if i % 2 else 1]:
                with call.around():
                    times.append(per_call(call.runs[0], count, device))
    return tuple(statistics.median(times) for *_, times in blocks)


def copy_call(device: str) -> Call:
    """torch's copy of one large tensor with random data: the limit for ops that only move bytes."""
    source = torch.empty(COPY_BYTES[device], dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    return Call((lambda: target.copy_(source),))


def input_sets(nbytes: int, device: str) -> int:
    """The number of input sets of `nbytes` to rotate, so that none is in a cache at its turn."""
    if device == "cuda":
        return 1  # the L2 is flushed instead
    return min(max(-(-2 * _last_level_cache() // max(nbytes, 1)), 1), 64)


def _last_level_cache() -> int:
    """Cache size in bytes; 32 MiB if Linux does not report it."""
    sizes = [path.read_text().strip() for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    return max((int(size[:-1]) << {"K": 10, "M": 20}[size[-1]] for size in sizes), default=32 << 20)
