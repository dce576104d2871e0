"""The fuzzer of haiscale's wrappers: a random tree of modules and random user actions, on two to four ranks.

FSDP (zero 1, 2, 3) runs against fully_shard, and DDP against torch's, on the same backend, gloo or hfreduce. If they
differ, the unwrapped model decides, whose gradients are averaged by hand: torch's wrappers refuse some programs, and
are wrong in others (reentrant checkpoints around units that run twice). Ours may wrap a converted model. Compared are
losses, gradients and parameters after each step, on each rank its own part, and whether steps raise. Of parameters that
a wrapped model is given, ours must raise an error that names them, where the others train apart.
"""

import contextlib

import wrappers_faults as faults
import wrappers_models as models
import wrappers_pool as pool
import wrappers_steps as steps
from engine import NOISES, Fuzzer, Known, Log, Raised, first_difference, relative_error

DDP_STEPS = {"plain_backward": 0.7, "late_hooks": 0.8, "write_buffers": 0.7}
STEPS = {
    "train": 10, "two_forwards": 1, "two_losses": 0.7, "evaluate": 1.2, "forward_only": 0.7, "gradient_of_input": 0.7,
    "caught": 0.6, "raises": 0.8, "save_and_load": 0.8, "freeze": 0.5, "regularised": 0.8, "write": 0.8, "add": 0.7,
    "replace": 0.8, **DDP_STEPS,
}  # fmt: skip
_fault, _last = None, (None, None, {})


def draw(rng) -> dict:
    wrapper = models.choose(rng, {"zero3": 5, "zero2": 1.5, "zero1": 1.5, "ddp": 4})
    tree = models.draw(rng, 3, root=True)
    program = {
        "seed": rng.randrange(1 << 30),
        "ranks": models.choose(rng, {2: 16, 3: 1.5, 4: 1.5}),
        "backend": rng.choice(("gloo", "hfreduce")),
        "wrapper": wrapper,
        "D": rng.choice((4, 5, 8)),
        "tokens": rng.random() < 0.2,
        "input_grad": rng.random() < 0.5,
        "buffers": rng.choice((1, 2, 2, 3)),
        "mixed": False,
        "optimizer": rng.choice(("sgd", "adamw")),
        "set_to_none": rng.random() < 0.8,
        "main": rng.random() < 0.85,
        "asides": [rng.random() < 0.6 for _ in range(3)],
        "checkpoint": models.choose(rng, {"": 9, "plain": 1, "reentrant": 0.8}),
        "model": tree,
        "ddp": {},
        "steps": [],
    }
    kinds = _kinds(program)
    if wrapper != "ddp" and {"tied", "again", "relu_"}.isdisjoint(kinds) and not _reentrant(program):
        program["mixed"] = rng.random() < 0.4  # where torch's own supports it, with right results
    if "relu_" in kinds and rng.random() < 0.9:
        program["input_grad"] = False  # otherwise it writes to a leaf
    if wrapper == "ddp":
        unused = not program["main"] or _reentrant(program) or not {"spare", "sometimes"}.isdisjoint(kinds)
        program["ddp"] = {
            "find_unused_parameters": unused or rng.random() < 0.2,
            "bucket_cap_mb": rng.choice((25, 0.0001, 0.0005)),
            "gradient_as_bucket_view": rng.random() < 0.7,
            "broadcast_buffers": rng.random() < 0.8,
        }
    for _ in range(rng.choice((2, 2, 3, 3, 4))):
        program["steps"].append(draw_step(rng, program))
    program["converted"] = rng.random() < 0.4 and not program["mixed"]  # hfnn's norms round elsewhere
    for node in models.walk(tree) if program["converted"] else ():
        if node["kind"] in ("mlp", "scale"):  # more of what keeps recipes
            node["kind"] = rng.choice(("norm", "linear"))
    return program


def _kinds(program) -> set[str]:
    return {node["kind"] for node in models.walk(program["model"])}


def _reentrant(program) -> bool:
    nodes = models.walk(program["model"])
    return program["checkpoint"] == "reentrant" or any("reentrant" in node.get("checkpoint", "") for node in nodes)


def draw_step(rng, program) -> tuple:
    name = models.choose(rng, STEPS)
    of_shards = name in ("freeze", "regularised", "write") and program["wrapper"] == "ddp"
    if of_shards or (name == "gradient_of_input" and _reentrant(program)):
        name = "train"  # torch refuses the others
    if name in DDP_STEPS and program["wrapper"] != "ddp":
        name = "train"
    if name in ("add", "replace") and program["checkpoint"] == "reentrant" and "batch" in _kinds(program):
        name = "train"  # the refused model has run once, and changed its buffers
    if name == "raises" and program["mixed"]:
        name = "train"  # fully_shard does not recover, and there is no mixed precision by hand
    if name == "train":
        micro = rng.choice((1, 1, 2, 3))
        return "train", micro, micro > 1 and rng.random() < 0.6, rng.choice((None, None, 0.1))
    if name == "evaluate":
        return "evaluate", rng.choice(("no_grad", "eval") if program["mixed"] else ("no_grad", "inference", "eval"))
    if name == "save_and_load":
        return "save_and_load", rng.choice((None, 0.5))
    if name == "late_hooks":
        return "late_hooks", rng.choice((0.5, 2))
    if name in ("freeze", "raises"):
        return name, rng.randrange(20)
    if name == "regularised":
        return "regularised", rng.choice(("before", "after"))
    if name == "add":
        how = rng.choice(steps.ADDED)
        if how == "adapted" and program["checkpoint"] == "reentrant":
            how = "another"  # a layer after a block's tuple cannot run, and it does so without gradients
        return "add", how, rng.randrange(20)
    if name == "replace":
        how = rng.choice(steps.REPLACED)
        if how.startswith("of another") and program["checkpoint"] == "reentrant":
            how = "value"  # the others cannot run, and it does so without gradients
        return "replace", how, rng.randrange(20), rng.choice((0.5, 2))
    if name == "write":
        return "write", rng.choice(("data", "local", "numpy"))
    return (name,)


def features(program) -> set[str]:
    found = {f"{program['wrapper']}", f"on {program['backend']}", f"{program['ranks']} ranks"}
    found.update(f"step {step[0]}" for step in program["steps"])
    trains = [step for step in program["steps"] if step[0] == "train"]
    nodes = list(models.walk(program["model"]))
    blocks = [node for node in nodes if node["kind"] == "block"]
    for name, held in {
        "accumulation": any(step[1] > 1 for step in trains),
        "no_sync": any(step[2] for step in trains),
        "clipped": any(step[3] for step in trains),
        "loss ignores the output": not program["main"],
        "loss ignores asides": not all(program["asides"]),
        "checkpoint around the model": program["checkpoint"] == "plain",
        "reentrant checkpoint around the model": program["checkpoint"] == "reentrant",
        "checkpoints around parts": any(b["checkpoint"] in ("each", "all") for b in blocks),
        "reentrant checkpoints around parts": any("reentrant" in b["checkpoint"] for b in blocks),
        "runs twice in turn": any(b["twice"] for b in blocks),
        "runs twice elsewhere": any(node["kind"] == "again" for node in nodes),
        "nested units": _nested(program["model"], 0) > 1,
        "tied": sum(node["kind"] in ("linear", "tied") for node in nodes) > 1
        and any(n["kind"] == "tied" for n in nodes),
        "frozen": any(node.get("frozen") for node in nodes),
        "in place": any(node["kind"] == "relu_" for node in nodes),
        "unused parameters": any(node["kind"] in ("spare", "sometimes") for node in nodes),
        "buffers": any(node["kind"] == "batch" for node in nodes),
        "mixed precision": program["mixed"],
        "embedding": program["tokens"],
        "converted": program["converted"],
    }.items():
        if held:
            found.add(name)
    found.update(f"output {block['output']}" for block in blocks)
    return found


def _nested(tree, depth) -> int:
    depth += bool(tree.get("unit"))
    return max([depth, *(_nested(part, depth) for part in tree.get("parts", ()))])


def run(program, ours, noise=0) -> Log:
    global _last
    if ours:
        return _of(program, "Ours", noise)
    if not noise:
        _last = None, None, {}
    return _of(program, _right(program), noise)


def _right(program) -> str:
    """The kind of session that decides."""
    ours, stock = _of(program, "Ours", 0), _of(program, "Stock", 0)

    def as_ours(kind) -> bool:
        def moved(label, values):
            return max(relative_error(_of(program, kind, k).seen.get(label), values) for k in range(1, NOISES + 1))

        return first_difference(ours, _of(program, kind, 0), moved) is None

    if as_ours("Stock"):
        return "Stock"
    if as_ours("Alone"):
        ours.features.add("torch's wrapper raises" if raised(stock) else "torch's wrapper differs")
        return "Alone"
    return "Alone" if raised(stock) and not program["mixed"] else "Stock"


def _of(program, kind, noise) -> Log:
    """What a kind of session logs; cached while one program is examined."""
    global _last
    if _last[:2] != (program, _fault):
        _last = program, _fault, {}
    if (kind, noise) not in _last[2]:
        _last[2][kind, noise] = merged(pool.run(program, kind, noise, _fault))
    return _last[2][kind, noise]


def raised(log: Log) -> str | None:
    """Where the first exception was raised."""
    return next((label for label, seen in log.seen.items() if isinstance(seen, Raised)), None)


def merged(found: list | str) -> Log:
    """The logs of all ranks, merged."""
    log = Log()
    if isinstance(found, str):
        log.note("error run", Raised(found, found))
        return log
    for rank, (seen, features) in enumerate(found):
        log.features.update(features)
        for label, value in seen.items():
            first, _, rest = label.partition(" ")
            log.note(f"{first} rank {rank} {rest}", value)
    return log


def planted(name: str):
    @contextlib.contextmanager
    def context():
        global _fault
        _fault = name
        try:
            yield
        finally:
            _fault = None

    return context


def _more_gradients(program, difference) -> bool:
    """DDP learns in its first step how many gradients a parameter gets; reentrant checkpoints may add more later."""
    text = getattr(difference.ours, "text", "")
    return difference.kind == "error: raises" and program["wrapper"] == "ddp" and "there were fewer" in text


EXPECTED = (
    *("zero1", "zero2", "zero3", "ddp", "on gloo", "on hfreduce", "2 ranks", "3 ranks", "4 ranks"),
    *("accumulation", "no_sync", "clipped", "loss ignores the output", "loss ignores asides", "nested units", "tied"),
    *("checkpoint around the model", "reentrant checkpoint around the model", "checkpoints around parts"),
    *("reentrant checkpoints around parts", "runs twice in turn", "runs twice elsewhere", "frozen", "in place"),
    *("unused parameters", "buffers", "mixed precision", "embedding", "converted"),
    *(f"output {how}" for how in models.OUTPUTS),
    *(f"step {name}" for name in STEPS),
)
FUZZER = Fuzzer(
    name="wrappers",
    draw=draw,
    features=features,
    run=run,
    expected=EXPECTED,
    known=(Known("ddp: more gradients than in the first step", "documented", _more_gradients),),
    faults={name: planted(name) for name in faults.FAULTS},
)
