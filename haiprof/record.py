"""What a process writes down: a file of JSON lines a rank, `<rank>.<host>.<pid>.jsonl`, and what is kept out of it."""

import json
import os
import re
import socket
import sys
import time
from pathlib import Path

from haiprof import clock

PHASES = ("data", "forward", "backward", "optimizer")  # of a step, in lines and traces; the rest of it is "other"
HOURLY = 4_000_000  # bytes that a file grows by in an hour, and what it may have at once
AT_ONCE = 600_000
SECRET = re.compile(r"token|secret|key|passw|pwd|credential|auth|cookie|session|private|signature", re.IGNORECASE)
# Without a telling name: user and password in an address, keys of well-known services, 32 letters and digits in a row.
LOOKS_SECRET = re.compile(
    r"://[^/\s]*@|\b(hf|sk|pk|ghp|gho|ghs|glpat|xox[abp]|AKIA|AIza|eyJ)[-_A-Za-z0-9]{12,}"
    r"|\b(?=[A-Za-z]*\d)(?=\d*[A-Za-z])[A-Za-z0-9]{32,}\b"
)
HIDDEN = "***"
TOLD = re.compile(  # the variables that explain a run; of the others not even the names are written
    r"^(HAIPROF|HFNN|HFREDUCE|TORCH|PYTORCH|NCCL|GLOO|CUDA|OMP|MKL|KMP|MASTER_|RANK$|WORLD_SIZE|LOCAL_|GROUP_|TRITON)"
)


def hidden(name: str, value: str) -> str:
    """The value, or asterisks where its name or its looks say that it may be a secret."""
    return HIDDEN if SECRET.search(name) or LOOKS_SECRET.search(value) else value


def environment() -> dict[str, str]:
    """The variables that explain a run, without secrets."""
    return {name: hidden(name, value) for name, value in sorted(os.environ.items()) if TOLD.match(name)}


def command(arguments) -> list[str]:
    """A command line without secrets: in `--token X`, `--token=X`, `TOKEN=X`, X is hidden, and what looks like one."""
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
    """(rank, world size) of this process, as torch.distributed or the launcher's environment has it; or (0, 1)."""
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
    """The first line of a file: who runs what, where."""
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
    """Appends lines, and says how many seconds to wait between them so that the file stays bounded."""

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
        """Whether more has been written than the time that has gone by allows."""
        return self.bytes > AT_ONCE + HOURLY * (time.monotonic() - self._begun) / 3600

    def close(self):
        self._file.close()


def _short(value):
    """Floats with microseconds, which is what clocks here are good for."""
    if isinstance(value, float):
        return round(value, 6)
    if isinstance(value, dict):
        return {key: _short(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_short(each) for each in value]
    return value


def load(folder) -> list[dict]:
    """The newest file of each rank in the folder, by rank: {"run": its first line, "path", and its lines by kind}.

    FileNotFoundError where there is none. A last line that was cut off is left out.
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
    """Moves its times to rank 0's clock, where that of its host is another one (clock.py)."""
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
