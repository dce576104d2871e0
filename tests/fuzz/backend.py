"""The backend fuzzer: programs of collectives and messages on two to four ranks, on gloo and on hfreduce.

A program is drawn once and run by all ranks (backend_steps.py). Its steps run in the whole world or in subgroups,
synchronously or not, on tensors of every dtype and layout; between them are calls that are refused on one rank or on
all. What ranks see is compared: values, which are integers where the order of additions would matter, or else within
the engine's bound; whether a call raises, on which ranks; and that the program ends.

Where gloo lacks an operation or dtype, or takes only contiguous tensors of one size, the definition (backend_data.py)
replaces it: AVG, PREMUL_SUM, bool, complex, float8 and unsigned numbers, lists of unequal sizes, all_to_all of lists,
lazily negated and conjugated views, mismatched calls.

A receive that nobody answers may be posted anywhere; the rest goes on, and the groups end in time.
"""

import atexit
import contextlib
import functools
import itertools
import random

import backend_data as data
import backend_faults
import backend_ranks
import torch
from backend_users import INVALID
from engine import Fuzzer, Log, Raised

COLLECTIVES = (
    "all_reduce", "reduce", "broadcast", "all_gather", "all_gather_single", "reduce_scatter", "reduce_scatter_single",
    "gather", "scatter", "all_to_all", "all_to_all_single", "all_reduce_coalesced", "all_gather_coalesced", "managed",
)  # fmt: skip
REDUCING = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_single", "all_reduce_coalesced")
ROOTED = ("reduce", "broadcast", "gather", "scatter")
OBJECTS = (
    "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "send_object_list",
)  # fmt: skip
STYLES = ("later_ones", "batch", "blocking", "any_source")
KINDS = {"collective": 12, "messages": 5, "wait": 2, "objects": 1, "barrier": 1, "invalid": 2, "sparse": 1}
LARGE = 300_000  # elements: more than an unrequested message may have


def draw(rng: random.Random):
    size = rng.choice([2, 2, 3, 4])
    subsets = [ranks for n in range(1, size + 1) for ranks in itertools.combinations(range(size), n)]
    groups = [tuple(range(size)), *rng.sample(subsets, rng.choice([0, 0, 1, 2]))]
    program = {"seed": rng.randrange(2**31), "size": size, "groups": groups, "steps": []}
    for _ in range(rng.randrange(2, 9)):
        kind = rng.choices(list(KINDS), KINDS.values())[0]
        group = rng.randrange(len(groups)) if rng.random() < 0.6 else 0
        program["steps"].append({"group": group, **STEP[kind](rng, len(groups[group]), program)})
        if kind == "invalid" and rng.random() < 0.6:  # shows the state that the refusal left
            program["steps"].append({"group": group, **STEP["collective"](rng, len(groups[group]), program)})
    if rng.random() < 0.05:
        program["steps"].append({"do": "ddp", "group": 0, **_ddp(rng)})
    if rng.random() < 0.04:
        what = rng.choice(["count", "dtype", "op", "kind"])
        program["steps"].append({"do": "mismatch", "group": 0, "what": what, "odd": rng.randrange(size)})
    if rng.random() < 0.07:
        at = rng.randrange(len(program["steps"]))  # before other steps, which it does not hold up
        who = list(range(size)) if rng.random() < 0.5 else [rng.randrange(size)]
        program["steps"].insert(at, {"do": "unanswered", "group": 0, "who": who})
    return program


def _shape(rng):
    if rng.random() < 0.03:
        return (LARGE,)
    return rng.choice([(), (1,), (5,), (3, 4), (0,), (2, 0), (2, 3, 4), (1000,), (70, 90)])


def _collective(rng, n, program):
    name = rng.choice(COLLECTIVES)
    what = rng.choice(["all_reduce", "all_gather_single", "reduce_scatter_single"])
    reduces = name in REDUCING or (name == "managed" and what != "all_gather_single")
    dtype = rng.choice(data.GLOO) if rng.random() < 0.5 else rng.choice(data.DTYPES if reduces else data.MOVED)
    if rng.random() < 0.05:
        name, dtype = rng.choice(data.CONJUGATED), rng.choice(data.COMPLEX)
        reduces = name in REDUCING
    shape = _shape(rng)
    if name not in ("all_reduce", "reduce", "broadcast", "gather", "scatter") and not shape:
        shape = (4,)
    step = {"do": name, "dtype": dtype, "shape": shape, "async": rng.random() < 0.4, "exact": rng.random() < 0.7}
    step |= {"layout": data.layout_of(rng, name, dtype) if rng.random() < 0.4 else "plain", "root": rng.randrange(n)}
    step |= {"op": rng.choice(data.ops_of(dtype)) if reduces else "SUM", "what": what}
    step["uneven"] = int(rng.random() < 0.4) if name in ("all_gather", "reduce_scatter") else 0
    if name.startswith("all_to_all"):
        even = rng.random() < 0.3
        step["splits"] = [[2 if even else rng.randrange(4) for _ in range(n)] for _ in range(n)]
        step["shape"] = shape[:3] if len(shape) < 2 or max(shape) < 50 else (3, 4)
    if name in ("all_reduce_coalesced", "all_gather_coalesced", "managed"):
        step["shapes"] = [shape if shape else (4,), *rng.choice([[], [(3,)], [(2, 2), (7,)]])]
        step["layout"] = "plain"
    return step | {"gloo": _gloo_does(step, name, reduces)}


def _gloo_does(step, name, reduces):
    """Whether gloo supports it, with right results."""
    if step["layout"] not in ("plain", "offset") or step["uneven"] or step["dtype"] not in data.GLOO:
        return False
    return name != "all_to_all" and (not reduces or data.gloo_reduces(step["dtype"], step["op"]))


def _messages(rng, n, program):
    style = rng.choice(STYLES)
    count, dtype = rng.randrange(1, 9), rng.choice(data.GLOO)
    messages, to, shape = [], rng.randrange(n), rng.choice([(1,), (4,), (3, 3)])
    for _ in range(count if n > 1 else 0):
        src, dst = rng.sample(range(n), 2)
        if style == "any_source":
            src, dst = rng.choice([r for r in range(n) if r != to]), to
        else:
            shape, dtype = _shape(rng), rng.choice(data.GLOO)
        # A unique tag; otherwise a rank that receives from any source could get a message of a later step.
        tag = 100 + len(program["steps"]) if style == "any_source" else rng.choice([0, 0, 0, 1, 2, 3, 1000])
        messages.append({"src": src, "dst": dst, "tag": tag, "shape": shape, "dtype": dtype})
    return {
        "do": "messages" if messages else "barrier", "monitored": False, "style": style, "messages": messages,
        "seed": rng.randrange(10**6), "layout": rng.choice(["offset", "negated", "plain", "plain", "plain", "plain"]),
    }  # fmt: skip


def _ddp(rng):
    options = {"bucket_cap_mb": rng.choice([25, 0.0001]), "gradient_as_bucket_view": rng.random() < 0.3}
    options |= {"find_unused_parameters": rng.random() < 0.3, "broadcast_buffers": rng.random() < 0.7}
    sparse = rng.random() < 0.4
    options["static_graph"] = not sparse and not options["find_unused_parameters"] and rng.random() < 0.3
    options["gradient_as_bucket_view"] &= not sparse
    no_sync = not options["static_graph"] and rng.random() < 0.3
    return {
        "options": options,
        "sparse": sparse,
        "norm": rng.random() < 0.3,
        "hook": rng.random() < 0.2,
        "no_sync": no_sync,
    }


def _invalid(rng, n, program):
    what = rng.choice(INVALID)
    who = list(range(n)) if rng.random() < 0.5 else [rng.randrange(n)]
    if n == 1 and what in ("sparse in a batch", "list at another rank"):
        what = "to itself"
    if what == "list at another rank":
        who = [r for r in who if r] or [1]
    return {"do": "invalid", "what": what, "who": who}


STEP = {
    "collective": _collective,
    "messages": _messages,
    "wait": lambda rng, n, program: {
        "do": "wait", "seed": rng.randrange(10**6),
        "steps": [i for i in range(len(program["steps"])) if rng.random() < 0.7],
    },
    "objects": lambda rng, n, program: {"do": "objects", "what": rng.choice(OBJECTS), "root": rng.randrange(n)},
    "barrier": lambda rng, n, program: {"do": "barrier", "monitored": rng.random() < 0.5, "async": rng.random() < 0.3},
    "invalid": _invalid,
    "sparse": lambda rng, n, program: {
        "do": "sparse", "shape": rng.choice([(6,), (9, 2), (5, 2, 3)]), "dtype": rng.choice(["float32", "float64"]),
        "counts": [rng.randrange(6) for _ in range(n)], "async": rng.random() < 0.3,
    },
}  # fmt: skip


def features(program):
    yield f"{program['size']} ranks"
    for step in program["steps"]:
        if step["group"]:
            yield "a subgroup"
        if step["do"] == "messages":
            yield f"messages: {step['style']}"
            if len({m["tag"] for m in step["messages"]}) > 1:
                yield "several tags"
        elif step["do"] in ("invalid", "unanswered"):
            where = "all ranks" if len(step["who"]) == len(program["groups"][step["group"]]) else "one rank"
            yield f"{'refused' if step['do'] == 'invalid' else 'unanswered'} on {where}"
            if step["do"] == "invalid":
                yield f"refused: {step['what']}"
        else:
            yield step["do"]
        if step["do"] in COLLECTIVES:
            yield f"dtype: {step['dtype']}"
            yield from (name for name in ("async", "uneven") if step[name])
            yield f"layout: {step['layout']}"
            if 0 in step["shape"]:
                yield "empty"
            if step["do"] in REDUCING:
                yield f"op: {step['op']}"


_pools: list[backend_ranks.Pool] = []  # none or one


@atexit.register
def end():
    """Ends the rank processes, if there are any."""
    if _pools:
        _pools.pop().end()


_planted: list[str] = []  # none or one


def run(program, ours, noise=0):
    log = Log()
    if not _pools:
        _pools.append(backend_ranks.Pool())
    fault = _planted[0] if _planted else None
    seen = _pools[0].run(program, "hfreduce" if ours else "gloo", fault)
    if seen is None:
        end()
        log.note("hang", "some rank did not answer" if ours else "on gloo")
        return log
    for label, rank, value in seen:
        kind, *value = value
        log.coarse = torch.float16 if "compressed" in label else None
        if kind == "tensor":
            log.tensor(f"{label} rank {rank}", backend_ranks.tensor(*value))
        elif isinstance(value[0], str) and label.startswith("error"):
            log.note(f"{label} rank {rank}", Raised("an exception", value[0]))
        else:
            log.note(f"{label} rank {rank}", value[0])
    return log


@contextlib.contextmanager
def _plant(name):
    _planted.append(name)
    try:
        yield
    finally:
        _planted.pop()


EXPECTED = (
    "2 ranks", "3 ranks", "4 ranks", "a subgroup", "async", "uneven", "empty", "several tags", "refused on all ranks",
    "refused on one rank", "objects", "barrier", "wait", "sparse", "ddp", "mismatch",
    "unanswered on all ranks", "unanswered on one rank",
    *COLLECTIVES, *(f"messages: {style}" for style in STYLES), *(f"dtype: {dtype}" for dtype in data.DTYPES),
    *(f"layout: {layout}" for layout in data.LAYOUTS), *(f"op: {op}" for op in data.ops_of("int64")), "op: PREMUL",
)  # fmt: skip

FUZZER = Fuzzer(
    name="backend",
    draw=draw,
    features=features,
    run=run,
    expected=EXPECTED,
    faults={name: functools.partial(_plant, name) for name in backend_faults.FAULTS},
)
