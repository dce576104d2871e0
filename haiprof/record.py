"""The output of a process: one file of JSON lines per rank, `<rank>.<host>.<pid>.jsonl`, without secrets."""

import json
import os
import re
import socket
import sys
import time
from pathlib import Path

from haiprof import clock

PHASES = ("data", "forward", "backward", "optimizer")  # of a step, in lines and traces; the rest of it is "other"
HOURLY = 4_000_000  # bytes by which a file may grow per hour, and its initial allowance
AT_ONCE = 600_000
SECRET = re.compile(r"token|secret|key|passw|pwd|credential|auth|cookie|session|private|signature", re.IGNORECASE)
# Secrets by their form: user and password in an address, keys of well-known services, 32 consecutive letters and
# digits.
LOOKS_SECRET = re.compile(
    r"://[^/\s]*@|\b(hf|sk|pk|ghp|gho|ghs|glpat|xox[abp]|AKIA|AIza|eyJ)[-_A-Za-z0-9]{12,}"
    r"|\b(?=[A-Za-z]*\d)(?=\d*[A-Za-z])[A-Za-z0-9]{32,}\b"
)
HIDDEN = "***"
TOLD = re.compile(  # the variables that explain a run; for others not even the names are written
    r"^(HAIPROF|HFNN|HFREDUCE|TORCH|PYTORCH|NCCL|GLOO|CUDA|OMP|MKL|KMP|MASTER_|RANK$|WORLD_SIZE|LOCAL_|GROUP_|TRITON)"
)


def hidden(name: str, value: str) -> str:
    """The value, or asterisks if its name or form suggests a secret."""
    return HIDDEN if SECRET.search(name) or LOOKS_SECRET.search(value) else value


def environment() -> dict[str, str]:
    """The variables that explain a run, without secrets."""
    return {name: hidden(name, value) for name, value in sorted(os.environ.items()) if TOLD.match(name)}


def command(arguments) -> list[str]:
    """A command line without secrets: X is hidden in `--token X`, `--token=X`, `TOKEN=X`, and values that look
    secret."""
    shown, secret_follows = [], False
    for argument in map(str, arguments):
        name, equals, value = argument.partition("=")
        if secret_follows and not argument.startswith("-"):
            shown.append(HIDDEN)
        elif equals:
            shown.append(f"{name}={hidden(name, value)}")
        else:
            shown.append(hidden("", argument))
        secret_follows = argument.startswith("-") and not equals and bool(SECRET.search(name))
    return shown


def rank_of() -> tuple[int, int]:
    """(rank, world size) of this process, from torch.distributed or the launcher's environment; or (0, 1)."""
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    for rank, size in (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS")):
        if os.environ.get(rank, "").isdigit() and os.environ.get(size, "").isdigit():
            return int(os.environ[rank]), int(os.environ[size])
    return 0, 1


def now() -> dict[str, float]:
    """This moment on both clocks: `wall`, seconds since 1970, and `perf`, seconds of perf_counter."""
    return {"wall": time.time_ns() / 1e9, "perf": time.perf_counter()}


def header(**more) -> dict:
    """The first line of a file: process, command, host."""
    import torch

    rank, size = rank_of()
    return {
        "kind": "run",
        "rank": rank,
        "size": size,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "command": command(sys.argv),
        "environment": environment(),
        **now(),
        **more,
    }


class Writer:
    """Appends lines, and tells how many seconds to wait between them so that the file stays bounded."""

    def __init__(self, folder, head: dict):
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.stem = folder / f"{head['rank']}.{head['host']}.{head['pid']}"
        self.path = Path(f"{self.stem}.jsonl")
        self._file = open(self.path, "w", encoding="ascii")  # noqa: SIM115
        self._begun, self.bytes = time.monotonic(), 0
        try:
            self.write(head)
        except BaseException:
            self.close()
            raise

    def write(self, line: dict):
        text = json.dumps(_short(line), separators=(",", ":")) + "\n"
        self.bytes += len(text)
        self._file.write(text)
        self._file.flush()

    def full(self) -> bool:
        """Whether more has been written than the elapsed time allows."""
        return self.bytes > AT_ONCE + HOURLY * (time.monotonic() - self._begun) / 3600

    def close(self):
        self._file.close()


def _short(value):
    """Floats rounded to microseconds, the precision of the clocks used here."""
    if isinstance(value, float):
        return round(value, 6)
    if isinstance(value, dict):
        return {key: _short(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_short(each) for each in value]
    return value


def load(folder) -> list[dict]:
    """The newest file of each rank in the folder, by rank: {"run": its first line, "path", and its lines by kind}.

    Raises FileNotFoundError if there is none. A truncated last line is left out.
    """
    newest = {}
    for path in Path(folder).glob("*.jsonl"):
        lines = list(_lines(path))
        if lines and lines[0].get("kind") == "run":
            run = {"run": lines[0], "path": path, "stem": Path(str(path).removesuffix(".jsonl"))}
            for line in lines[1:]:
                run.setdefault(line["kind"], []).append(line)
            before = newest.get(lines[0]["rank"])
            if before is None or before["run"]["wall"] < lines[0]["wall"]:
                newest[lines[0]["rank"]] = run
    if not newest:
        raise FileNotFoundError(f"{folder}: no <rank>.<host>.<pid>.jsonl of a profiled process in it")
    for run in newest.values():
        _on_one_clock(run)
    size = max(newest.values(), key=lambda run: run["run"]["wall"])["run"]["size"]
    return [newest[rank] for rank in sorted(newest) if rank < size]


def _on_one_clock(run):
    """Converts its times to rank 0's clock if its host has another clock (clock.py)."""
    offsets = [(line["wall"], clock.shift(line)) for line in run.get("clock", ())]
    lists = [lines for lines in run.values() if isinstance(lines, list)]
    for line in (run["run"], *(line for lines in lists for line in lines)):
        for name in ("wall", "until"):
            if name in line:
                line[name] += clock.at(offsets, line[name])


def missing(run) -> dict[str, str]:
    """What was not measured, and why."""
    why = {name: reason for line in run.get("missing", ()) for name, reason in line["why"].items()}
    return {name: reason for name, reason in why.items() if reason}


def _lines(path):
    with open(path, encoding="ascii") as file:
        for text in file:
            try:
                yield json.loads(text)
            except ValueError:
                return
