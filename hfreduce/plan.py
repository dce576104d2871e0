"""Which algorithm runs for which size, and why (`explain`), and the rows measured by `python -m hfreduce.tune`.

The rows of this machine are in one JSON file, `path()`, by the shape of the group: ranks and hosts. All ranks of a
group use the same rows. The choice itself is made by csrc/hfreduce/plan.cpp, which has defaults.
"""

import datetime
import functools
import json
import logging
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from hfreduce import _C, cost

# In the order of Kind, Inside and Between in csrc/hfreduce/.
KINDS = (
    "barrier", "all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "all_to_all", "gather", "scatter",
    "send", "recv",
)  # fmt: skip
INSIDE = ("one_shot", "two_shot")
BETWEEN = ("direct", "ring", "tree")
# In the order of gpu::Path in csrc/hfreduce/cuda/paths.h.
PATHS = (
    "packets", "packets_two_shot", "one_shot", "two_shot", "mapped", "mapped_two_shot", "assisted", "copies", "host",
    "automatic",
)  # fmt: skip
BACKENDS = ("hfreduce", "nccl")
BUCKET = 25 << 20  # bytes of a DDP bucket
VERSION = 1
SLOT = 256 << 10  # Config::slot_bytes, in communicator.h
ANY = 2**63 - 1
MAX_STREAMS = 64

_log = logging.getLogger("hfreduce")


class PlanError(ValueError):
    """An unusable plan file. The message says which file, why, and what to do."""


@dataclass(frozen=True)
class Row:
    """How messages of `kind` up to `max_bytes` run."""

    kind: str
    max_bytes: int
    inside: str
    between: str
    chunk: int
    streams: int

    def tuple(self) -> tuple[int, int, int, int, int, int]:
        """The form that hfreduce._C accepts."""
        inside, between = INSIDE.index(self.inside), BETWEEN.index(self.between)
        return (KINDS.index(self.kind), self.max_bytes, inside, between, self.chunk, self.streams)

    @classmethod
    def of(cls, numbers: tuple) -> "Row":
        kind, max_bytes, inside, between, chunk, streams = numbers
        return cls(KINDS[kind], max_bytes, INSIDE[inside], BETWEEN[between], chunk, streams)


@dataclass(frozen=True)
class DeviceRow:
    """How messages of `kind` up to `max_bytes` on CUDA tensors run. blocks, threads, slot: of a launch; 0: the default.

    If a path is not available (no peer access, another dtype), the next matching row applies, or the default.
    """

    kind: str
    max_bytes: int
    path: str
    blocks: int = 0
    threads: int = 0
    slot: int = 0

    def tuple(self) -> tuple[int, int, int, int, int, int]:
        """The form that hfreduce.Options().device_plan accepts."""
        return (KINDS.index(self.kind), self.max_bytes, PATHS.index(self.path), self.blocks, self.threads, self.slot)


@dataclass(frozen=True)
class BackendRow:
    """Which backend is faster for messages of `kind` up to `max_bytes` between GPUs of several hosts."""

    kind: str
    max_bytes: int
    backend: str


@dataclass(frozen=True)
class Shape:
    """The shape of a group: the key of its rows."""

    ranks: int
    hosts: int = 1

    @property
    def local_size(self) -> int:
        return -(-self.ranks // self.hosts)

    def __str__(self) -> str:
        return f"{self.ranks} ranks on {self.hosts} host{'s' if self.hosts > 1 else ''}"


def shape(size: int) -> Shape:
    """The likely shape of a group of this size, from the launcher's environment."""
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    local_size = int(local) if local.isdecimal() and int(local) > 0 else size
    return Shape(size, max(1, size // local_size) if size % local_size == 0 else 1)


def job_size() -> int:
    """The number of ranks of the job, from the launcher's environment; otherwise one per core."""
    return int(os.environ.get("WORLD_SIZE") or os.cpu_count() or 1)


# The file


def path() -> Path | None:
    """HFREDUCE_PLAN, or hfreduce/plan.json in XDG's cache folder. None (no file) if HFREDUCE_PLAN is set but empty."""
    given = os.environ.get("HFREDUCE_PLAN")
    if given is not None:
        return Path(given) if given else None
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "hfreduce" / "plan.json"


def load(file: Path | None = None, part: str = "shapes") -> dict[str, dict]:
    """{shape: {"measured": date, "rows": [Row]}} from a file; empty if there is no file. Raises PlanError.

    part: "shapes"; "devices", whose rows are DeviceRows; or "backends", whose rows are BackendRows.
    """
    file = file or path()
    if file is None:
        return {}
    try:
        found = json.loads(file.read_text())
        if found["version"] != VERSION:
            raise PlanError(f"it is of version {found['version']!r}, and this hfreduce reads {VERSION}")
        return {
            name: {"measured": str(entry["measured"]), "rows": [_PARTS[part](fields) for fields in entry["rows"]]}
            for name, entry in (found["shapes"] if part == "shapes" else found.get(part, {})).items()
        }
    except FileNotFoundError:
        return {}
    except PlanError as why:
        reason = str(why)
    except (OSError, ValueError) as why:
        reason = f"it cannot be read as JSON: {why}"
    except (KeyError, TypeError, AttributeError) as why:
        reason = f"it is not laid out as a plan: {type(why).__name__}: {why}"
    raise PlanError(
        f"hfreduce: the plan {file} is not used: {reason}. Measure again with `python -m hfreduce.tune`, remove the "
        "file, or set HFREDUCE_PLAN to another one (or to nothing, for the defaults)"
    )


def _row(fields: dict) -> Row:
    numbers = {"max_bytes": (1, ANY), "chunk": (1, SLOT), "streams": (1, MAX_STREAMS)}
    return _checked(Row(**fields), numbers, {"kind": KINDS, "inside": INSIDE, "between": BETWEEN})


def _device_row(fields: dict) -> DeviceRow:
    numbers = {"max_bytes": (0, ANY)} | dict.fromkeys(("blocks", "threads", "slot"), (0, 1 << 20))
    return _checked(DeviceRow(**fields), numbers, {"kind": KINDS, "path": PATHS})


def _backend_row(fields: dict) -> BackendRow:
    return _checked(BackendRow(**fields), {"max_bytes": (0, ANY)}, {"kind": KINDS, "backend": BACKENDS})


def _checked(row, numbers: dict, names: dict):
    """Returns the row. Raises PlanError if a number is out of its limits or a name is unknown."""
    for name, (least, most) in numbers.items():
        value = getattr(row, name)
        if type(value) is not int or not least <= value <= most:
            raise PlanError(f"{name} must be a whole number from {least} to {most}, got {value!r} in {asdict(row)}")
    for name, known in names.items():
        if (value := getattr(row, name)) not in known:
            raise PlanError(f"{name} must be one of {', '.join(known)}, got {value!r} in {asdict(row)}")
    return row


_PARTS = {"shapes": _row, "devices": _device_row, "backends": _backend_row}


def usable(file: Path | None = None, part: str = "shapes") -> dict[str, dict]:
    """Like `load`, but logs an unusable file once and treats it as missing."""
    try:
        return load(file, part)
    except PlanError as why:
        _tell(str(why))
        return {}


_tell = functools.cache(_log.warning)  # once per text


def save(of: Shape, rows: list[Row | DeviceRow | BackendRow], file: Path | None = None, part: str = "shapes") -> Path:
    """Replaces the rows of one shape. The new file is renamed into place, so concurrent readers see the old one.

    Nothing of an unusable file is kept. Raises PlanError if HFREDUCE_PLAN is empty, OSError if writing fails.
    """
    file = file or path()
    if file is None:
        raise PlanError("hfreduce: HFREDUCE_PLAN is empty, so there is no file to write the plan to: set or unset it")
    parts = {name: usable(file, name) for name in _PARTS}
    parts[part][str(of)] = {"measured": datetime.date.today().isoformat(), "rows": rows}
    laid_out = {
        name: {key: entry | {"rows": [asdict(row) for row in entry["rows"]]} for key, entry in shapes.items()}
        for name, shapes in parts.items()
        if shapes or name == "shapes"
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, beside = tempfile.mkstemp(dir=file.parent, prefix=file.name)
    try:
        with os.fdopen(handle, "w") as out:
            json.dump({"version": VERSION, **laid_out}, out, indent=1)
        os.replace(beside, file)
    except BaseException:
        os.unlink(beside)
        raise
    return file


def rows(size: int | None = None) -> list[tuple]:
    """The measured rows of a group of this size, for hfreduce._C.Communicator(plan=...); empty: the defaults."""
    entry = usable().get(str(shape(size or job_size())))
    return [row.tuple() for row in entry["rows"]] if entry else []


def device_rows(size: int | None = None) -> list[tuple]:
    """The same for CUDA tensors, for hfreduce.Options().device_plan."""
    entry = usable(part="devices").get(str(shape(size or job_size())))
    return [row.tuple() for row in entry["rows"]] if entry else []


def backend(size: int | None = None) -> tuple[str, str] | None:
    """The backend that was faster for DDP buckets between GPUs of several hosts, and the date of the measurement.

    None if nothing was measured for this number of ranks and hosts.
    """
    entry = usable(part="backends").get(str(shape(size or job_size())))
    rows = entry["rows"] if entry else ()
    fits = (row.backend for row in rows if row.kind == "all_reduce" and row.max_bytes >= BUCKET)
    return next(((name, entry["measured"]) for name in fits), None)


# What runs, and why


def choose(kind: str, nbytes: int, of: Shape, measured: list[tuple]) -> Row:
    """The row that a group of this shape uses. Its `max_bytes` is that of the message."""
    cores = os.cpu_count() or 1
    return Row.of(_C.choose(of.local_size, of.hosts, cores, SLOT, measured, KINDS.index(kind), nbytes))


def explain(
    op: str, nbytes: int, *, ranks: int | None = None, hosts: int | None = None, device: str = "cpu", peers: bool = True
) -> str:
    """A text: which algorithm a collective of `nbytes` would run, and why.

    `nbytes` is the size of the whole message (of all ranks' blocks, if it consists of blocks). The default of `ranks`
    and `hosts` is the launcher's environment (WORLD_SIZE, LOCAL_WORLD_SIZE), otherwise one rank per core. `device`: of
    the tensors, "cpu" or "cuda". `peers`: whether the GPUs of a host reach each other's memory, with one GPU per rank.
    Raises ValueError for other operations and devices, PlanError for an unusable file.
    """
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device must be 'cpu' or 'cuda', got {device!r}")
    if op not in KINDS[:-2]:
        raise ValueError(f"op must be one of {', '.join(KINDS[:-2])}, got {op!r}")
    if nbytes < 0:
        raise ValueError(f"nbytes must not be negative, got {nbytes}")
    size = ranks or job_size()
    of = Shape(size, hosts) if hosts else shape(size)
    if device == "cuda":
        return _on_gpus(op, nbytes, of, peers)
    entry = load().get(str(of))
    row = choose(op, nbytes, of, [row.tuple() for row in entry["rows"]] if entry else [])
    reached = entry and any(r.kind == op and nbytes <= r.max_bytes for r in entry["rows"])
    why = f"measured on {entry['measured']}, {path()}" if reached else f"a default: {_unmeasured(of)}"
    lines = [
        f"{op} of {_size(nbytes)}, {of}",
        *_inside(op, nbytes, of, row),
        *_between(op, nbytes, of, row),
        f"  {why}",
    ]
    return "\n".join(lines)


_PATHS_ARE = {
    "packets": "packets through peer memory, sent to all ranks at once",
    "packets_two_shot": "packets through peer memory: slices, then their sums",
    "one_shot": "slots in peer memory, everything sent to all ranks",
    "two_shot": "slots in peer memory",
    "mapped": "packets through pinned host memory",
    "mapped_two_shot": "slots in pinned host memory",
    "assisted": "CPU-assisted: copy engines, sums by host cores, no multiprocessor",
    "copies": "copy engines that write to peer memory",
    "host": "by way of the host: copy there, run the CPU collective, copy back",
}


def _on_gpus(op: str, nbytes: int, of: Shape, peers: bool) -> str:
    if of.ranks == 1:
        return f"{op} of {_size(nbytes)}, {of}, on a GPU\n  nothing to do, its rank is alone"
    entry = load(part="devices").get(str(of))
    rows = [row.tuple() for row in entry["rows"]] if entry else []
    peers = peers and of.hosts == 1
    chosen, blocks, threads, slot, measured = _C.choose_device(of.ranks, of.hosts, peers, rows, KINDS.index(op), nbytes)
    way = PATHS[chosen]
    launch = f", {blocks} block{'s' * (blocks != 1)} of {threads} threads" if chosen < PATHS.index("assisted") else ""
    launch += f", slots of {_size(slot)}" if way in ("one_shot", "two_shot", "mapped_two_shot") else ""
    sent = f"; each GPU sends {_size(cost.on_gpus(op, way, nbytes, of.ranks))}" if way != "host" else ""
    why = (
        f"measured on {entry['measured']}, {path()}"
        if measured
        else "a default (python -m hfreduce.tune --device cuda)"
    )
    reach = "that reach each other's memory" if peers else "without peer access"
    return f"{op} of {_size(nbytes)}, {of}, GPUs {reach}\n  {way}: {_PATHS_ARE[way]}{launch}{sent}\n  {why}"


def _unmeasured(of: Shape) -> str:
    if of.hosts > 1:
        return "nothing is measured for this shape (torchrun ... -m hfreduce.tune)"
    return f"nothing is measured for this shape (python -m hfreduce.tune --ranks {of.ranks})"


def _inside(op: str, nbytes: int, of: Shape, row: Row) -> list[str]:
    if of.local_size == 1:
        return ["  inside a host: nothing to do, its rank is alone"]
    several = of.hosts > 1
    spent = cost.inside(op, row.inside, nbytes, of.local_size, row.chunk, SLOT)
    how = "shared memory"
    if op == "all_reduce":
        how = "reduce-scatter and all-gather" if several else row.inside
        if several:
            parts = [cost.inside(k, "", nbytes, of.local_size, 0, SLOT) for k in ("reduce_scatter", "all_gather")]
            spent = cost.Inside(*(sum(each) for each in zip(*map(_fields, parts), strict=True)))
        else:
            how += f", chunks of {_size(row.chunk)}"
    return [
        f"  inside a host: {how}: {spent.steps} step{'s' * (spent.steps != 1)}; each rank writes "
        f"{_size(spent.written)} and reads {_size(spent.read)} of shared memory"
    ]


def _fields(spent: cost.Inside) -> tuple:
    return (spent.steps, spent.written, spent.read)


def _between(op: str, nbytes: int, of: Shape, row: Row) -> list[str]:
    if of.hosts == 1:
        return []
    spent = cost.between(op, row.between, nbytes, of.hosts)
    count = cost.chunks(nbytes, of.local_size) if op in ("all_reduce", "reduce") else 1
    cut = f", in {count} chunks" if count > 1 else ""
    return [
        f"  between hosts: {row.between}{cut}: {spent.hops} hop{'s' * (spent.hops != 1)}; each host sends "
        f"{_size(spent.sent)}, over {of.local_size} rail{'s' * (of.local_size != 1)} of {row.streams} "
        f"connection{'s' * (row.streams != 1)}",
        f"  neighbours: {_neighbours()}",
    ]


def _neighbours() -> str:
    file, address = (os.environ.get(name, "") for name in ("HFREDUCE_TOPO", "SLURM_TOPOLOGY_ADDR"))
    if file or "." in address:
        return f"hosts in the order of {file or 'SLURM_TOPOLOGY_ADDR'}"
    return "hosts in the order of ranks (their switches are not known: python -m hfreduce.topo)"


def _size(nbytes: float) -> str:
    for unit, of in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= of:
            return f"{nbytes / of:.4g} {unit}"
    return f"{nbytes:.4g} bytes"
