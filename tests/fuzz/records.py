"""The fuzzer of `hfrecord`: user actions and accidents on record files, against lists in memory.

A program is a dict: the kind of file, and the steps (`records_session.py`: a name and its arguments): writes, commits,
appends, writers that die, reads with all kinds of indices, threads, processes, damage, and orders of epochs. Compared
are records, lengths, errors, and states of samplers. "Stock" is the definition on a list.
"""

from engine import Fuzzer, Log
from records_faults import FAULTS
from records_session import DAMAGE, KINDS, SCHEMAS, Session

DEATHS = ("unflushed", "flushed", "before the commit", "before the manifest")
READERS = ("same", "new", "pickled", "list of paths")


def draw(rng) -> dict:
    kind = rng.choices(KINDS, (4, 4, 2))[0]
    program = {
        "seed": rng.randrange(1 << 30),
        "kind": kind,
        "schema": None if kind == "ffr" else rng.choice((None, None, *SCHEMAS)),
        "compression": None if kind == "ffr" else rng.choices((None, "zstd", "dictionary"), (3, 1, 1))[0],
        "part_bytes": rng.choice((4200, 5000, 8000)),
        "steps": [],
    }
    for _ in range(rng.choice((1, 2, 3, 5))):
        program["steps"] += draw_round(rng, kind)
    program["steps"] += [draw_read(rng) for _ in range(rng.choice((1, 2, 3)))]
    if rng.random() < 0.4:
        program["steps"].append(("damage", rng.choice(DAMAGE), rng.random(), rng.randrange(1, 256)))
    if rng.random() < 0.4:
        program["steps"].append(draw_epoch(rng))
    return program


def draw_round(rng, kind) -> list[tuple]:
    """Some records, and how the writer ends."""
    steps = [("write", draw_sizes(rng))]
    if kind != "ffr":
        for _ in range(rng.choice((0, 0, 1, 2))):
            steps += [("commit",), ("write", draw_sizes(rng))]
    if rng.random() < 0.3:
        steps.append(("bad write",))
    end = rng.choices(("close", "die"), (3, 1))[0]
    steps.append((end,) if end == "close" else (end, rng.choice(DEATHS)))
    return [*steps, *([draw_read(rng)] if rng.random() < 0.5 else [])]


def draw_sizes(rng) -> list[int]:
    sizes = rng.choice(((0, 1, 7), (0, 1, 30, 300), (100, 5000), (3000,)))
    return [rng.choice(sizes) for _ in range(rng.choice((0, 1, 2, 5, 12, 40)))]


def draw_read(rng) -> tuple:
    reader = rng.choices(READERS, (4, 2, 1, 1))[0]
    how = rng.choices(("one", "batch", "slice", "read", "threads", "all"), (3, 5, 3, 3, 1, 1))[0]
    if how == "one":
        return "read", reader, how, draw_index(rng)
    if how == "slice":
        ends = (None, 0, 1, 3, -1, -2, 10, 100, -100)
        return "read", reader, how, (rng.choice(ends), rng.choice(ends), rng.choice((None, 1, 2, -1, -3)))
    return "read", reader, how, [draw_index(rng) for _ in range(rng.choice((0, 1, 2, 3, 8, 64)))]


def draw_index(rng):
    """A position as a share of the length, so that shortened programs stay valid, or an invalid index."""
    return rng.choices(("share", "negative", "beyond", "none"), (20, 6, 0.4, 0.2))[0], rng.random()


def draw_epoch(rng) -> tuple:
    """Ranks and batches of the parts of an epoch."""
    parts = [(rng.choice((1, 2, 3, 4)), rng.choice((1, 2, 5)), rng.randrange(4)) for _ in range(rng.choice((1, 2, 3)))]
    window = rng.choice((None, None, 1, 3, 8))
    return "epoch", rng.randrange(100), window, rng.choice(("keep", "repeat", "drop")), parts


def features(program) -> set[str]:
    found = {f"kind {program['kind']}", f"compression {program['compression']}", f"schema {program['schema']}"}
    for name, *rest in program["steps"]:
        found |= {f"step {name}"}
        found |= {f"{name} {rest[0]}"} if name in ("die", "damage") else set()
        if name == "read":
            found |= {f"reader {rest[0]}", f"read {rest[1]}"}
            given = rest[2] if isinstance(rest[2], list) else []
            found |= {f"index {kind}" for kind, _ in given}
        if name == "epoch":
            found |= {f"tail {rest[2]}", "window" if rest[1] else "no window", f"parts {len(rest[3])}"}
    return found


EXPECTED = (
    *(f"kind {kind}" for kind in KINDS), *(f"die {how}" for how in DEATHS), *(f"reader {how}" for how in READERS),
    *(f"damage {how}" for how in DAMAGE), *(f"schema {name}" for name in (None, *SCHEMAS)),
    *(f"compression {name}" for name in (None, "zstd", "dictionary")),
    *(f"step {name}" for name in ("write", "commit", "bad write", "close", "die", "read", "damage", "epoch")),
    *(f"read {how}" for how in ("one", "batch", "slice", "read", "threads", "all")),
    *(f"index {kind}" for kind in ("share", "negative", "beyond", "none")),
    "tail keep", "tail repeat", "tail drop", "window", "no window", "parts 3",
)  # fmt: skip


def run(program, ours, noise=0) -> Log:
    log = Log()
    with Session(program, ours, log) as session:
        for number, step in enumerate(program["steps"]):
            session.do(number, step)
    return log


FUZZER = Fuzzer("records", draw, features, run, EXPECTED, faults=FAULTS)
