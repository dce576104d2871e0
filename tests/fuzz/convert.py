"""The fuzzer of `hfnn.convert`: a random tree of modules and random user actions, converted against stock torch.

A program is a dict: the tree (`convert_models.py`), the steps (`convert_session.py`: a name and its arguments), and how
model and inputs are made.
"""

import contextlib
import random
import warnings

import convert_around
import convert_attention
import convert_models as models
import convert_modules as own
import torch
from convert_attention_faults import FAULTS
from convert_buffers import TOOLS
from convert_known import KNOWN
from convert_session import CRITERIA, LOSSES, Session, coarsest
from engine import Fuzzer, Log

import hfnn
from hfnn.core import node as recipe

AUTOCAST = (None, None, None, None, "bfloat16", "bfloat16", "float16")
CALLS = {
    "plain": 20,
    "twice": 1.5,
    "checkpoint": 2,
    "reentrant": 1.5,
    "functional": 1.2,
    "vmap": 1.2,
    "func_grad": 0.7,
    "thread": 1,
    "threads": 1,
}
HOOKS = ("forward", "replace", "pre", "backward", "backward_pre", "tensor", "retain_grad", "post")
WRITES_BY_HAND = ("sgd", "clip", "data", "set", "row")
WRITES = ("copy_", "add_", "zero_", "data", "numpy", "set")


def draw(rng) -> dict:
    layout = rng.choices(("rows", "sequence", "channels", "image"), (3, 8, 1, 2))[0]
    tokens = layout == "sequence" and rng.random() < 0.15
    program = {
        "seed": rng.randrange(1 << 30),
        "prefer": "memory" if rng.random() < 0.95 else "auto",
        "layout": layout,
        "N": 0 if rng.random() < 0.04 else rng.choice((1, 2, 2, 3, 3)),
        "D": rng.choice((8, 16)),
        "tokens": tokens,
        "dtype": rng.choices(("float32", "float64", "bfloat16", "float16"), (18, 1.5, 2.5, 0.7))[0],
        "mixed": rng.random() < 0.05,
        "memory_format": layout == "image" and rng.random() < 0.5,
        "input_grad": not tokens and rng.random() < 0.7,
        "inputs": rng.choices(
            ("plain", "transposed", "channels_last", "slice", "reversed", "numpy", "cut"),
            (8, 1, 2, 1, 1, 1.5, 1),
            k=rng.choice((1, 2)),
        ),
        "optimizer": rng.random() < 0.5,
        "loss": rng.choice(LOSSES) if rng.random() < 0.7 else rng.choice(CRITERIA),
        "probabilities": rng.random() < 0.3,  # as the target of a cross entropy
        "model": models.draw(rng, layout, 2, rng.choice((1, 2, 3, 4, 5))),
        "steps": [],
    }
    for _ in range(rng.choice((1, 1, 2, 2, 3))):
        program["steps"] += draw_round(rng)
    if rng.random() < 0.15:  # ends with a layer that gives a recipe: an output that is kept
        ends = [
            ("layer_norm", 1e-5, True),
            ("rms_norm", None),
            ("activation", rng.choice(("GELU", "SiLU", "ELU")), False),
        ]
        program["model"] += [("probe", "pass"), rng.choice(ends[2 * (layout in models.FIRST) :])]
    first = program["model"][0]
    if first[0] == "written" or (first[0] in ("activation", "dropout") and first[-1]):
        program["input_grad"] = False  # torch refuses to write to leaves
    program["loss_in_autocast"] = rng.random() < 0.5
    program["default_device"] = rng.random() < 0.06  # a mode, which rooms must not mind
    program["flops"] = rng.random() < 0.08  # counted around every forward and backward
    program["sharded"] = rng.random() < 0.1  # as beside a sharded model: rooms keep copies of small parameters
    if rng.random() < 0.05 or (
        rng.random() < 0.3 and any(layer[0] == "buffered" for layer, _ in models.walk(program["model"]))
    ):
        program["steps"].append(("tools", rng.choice(list(TOOLS))))
    draw_head(random.Random(program["seed"]), program)
    return in_float64(program) if rng.random() < 0.03 else program


def in_float64(part):
    """The program, or a part of it, in float64 throughout: no casts and no autocast."""
    if isinstance(part, dict):
        fixed = {"dtype": "float64", "mixed": False, "autocast": None}
        fixed |= {"view": "none"} if part.get("view") == "float" else {}
        fixed |= {"loss": "sum"} if part.get("loss") == "part" else {}
        fixed |= {"call": "thread"} if part.get("call") == "threads" else {}
        return {name: fixed.get(name, in_float64(value)) for name, value in part.items()}
    if isinstance(part, list):
        return [in_float64(each) for each in part]
    if isinstance(part, tuple):
        if part[:1] in (("autocast",), ("cast",)):
            return (*map(in_float64, part[:-1]), None if part[0] == "autocast" else "float64")
        return tuple(map(in_float64, part))
    return part


def draw_head(rng, program) -> None:
    """The head of a language model behind the model; its logits are read late, mostly after a write to its weights."""
    program["head"] = program["layout"] in models.LAST and rng.random() < 0.12
    program["flops"] = program["flops"] and not program["head"]  # logits that are read cost a product more
    steps = []
    for step in program["steps"]:
        steps.append(step)
        if program["head"] and step[0] == "backward" and rng.random() < 0.7:
            steps += [("write_head", rng.choice(WRITES_BY_HAND))] if rng.random() < 0.8 else []
            steps.append(("read_logits",))
    program["steps"] = steps


def draw_round(rng) -> list:
    steps = []
    if rng.random() < 0.4:
        steps.append(draw_change(rng))
        if steps[0][0] in ("hook", "mode") and rng.random() < 0.3:  # does it survive them?
            steps.append((rng.choice(("deepcopy", "pickle", "revert", "revert")),))
    if rng.random() < 0.15:
        steps.append(("write", "x", rng.choice(WRITES)))
    for _ in range(rng.choice((1, 1, 1, 2))):
        steps.append(("forward", rng.randrange(2), draw_call(rng)))
        if rng.random() < 0.12:
            steps.append(("write", rng.choice(("x", "y", rng.randrange(8))), rng.choice(WRITES)))
        if rng.random() < 0.05:
            steps.append(draw_change(rng))
    steps += draw_backward(rng)
    if rng.random() < 0.25:
        steps.append(("step", rng.choice(("SGD", "AdamW"))))
        if rng.random() < 0.3:
            steps += draw_backward(rng)
    if rng.random() < 0.3:
        steps.append(("zero_grad", rng.random() < 0.5))
    if rng.random() < 0.15:
        steps.append(("drop", rng.choice(("y", "all"))))
    return steps


def draw_call(rng) -> dict:
    return {
        "autocast": rng.choice(AUTOCAST),
        "grad": rng.choices(("on", "no", "inference"), (16, 1, 0.5))[0],
        "hooks": rng.choice((None,) * 9 + ("identity", "save_on_cpu", "clone")),
        "call": rng.choices(list(CALLS), list(CALLS.values()))[0],
        "view": rng.choice(("none",) * 16 + ("permuted", "flat") + ("item", "relu_", "add_", "float") * 2),
    }


def draw_backward(rng) -> list:
    kind = rng.random()
    if kind < 0.08:
        return [("penalty", rng.choice(("x", "weights")))]
    if kind < 0.12:
        return [("batched", rng.choice(("x", "weights")))]
    if kind < 0.17:
        return [("split",)]
    how = {
        "which": rng.choice(("last", "sum", "each")),
        "retain": rng.random() < 0.2,
        "inputs": rng.choice((None,) * 8 + ("x", "weights", "first", "last")),
        "thread": rng.random() < 0.05,
    }
    again = [("backward", {**how, "retain": False, "inputs": None})] if how["retain"] and rng.random() < 0.7 else []
    return [("backward", how), *again]


def draw_change(rng) -> tuple:
    return rng.choice(
        (
            *[("hook", rng.randrange(20), rng.choice(HOOKS))] * 7,
            *[("freeze", rng.randrange(8), False)] * 3,
            *[("freeze_all", rng.random() < 0.5)] * 2,
            *[("mode", rng.random() < 0.3)] * 2,
            *[("deepcopy",)] * 2,
            *[("pickle",)] * 2,
            *[("revert",)] * 2,
            *[("convert",)] * 2,
            *[("load", rng.random() < 0.3)] * 2,
            *[("cast", rng.choice(("float32", "float64", "bfloat16")))] * 2,
            *[("attribute", rng.randrange(4), "factor", 0.5)] * 3,
            *[("config", rng.randrange(4))] * 2,
            *[("patch", rng.randrange(4))] * 3,
            ("attribute", rng.randrange(4), "scale", 0.5),
            ("attribute", rng.randrange(4), "eps", 0.1),
            ("attribute", rng.randrange(4), "p", 0.0),
            ("attribute", rng.randrange(4), "act", "Tanh"),
            ("attribute", rng.randrange(4), "negative_slope", 0.3),
            ("attribute", rng.randrange(4), "variance_epsilon", 0.1),
            ("unhook",),
        )
    )


# Features that must occur in at least 2% of programs.
EXPECTED = """
    tokens, mixed, memory_format, input_grad, default_device, sharded, flops, zero rows, loss criterion, loss formula,
    loss in autocast,
    prefer memory, prefer auto,
    input transposed, input channels_last, input slice, input numpy, dtype float64, dtype bfloat16, dtype float16,
    float64 throughout, unusual buffers, step tools,
    layer tied, layer twice, layer branches, layer experts, layer attention, layer padded, padding left, padding right,
    padding sample, padding holes, mask boolean, mask finite, mask infinite, blind boolean, blind finite,
    layer multihead, layer encoder_layer,
    layer decoder_layer, layer conv, layer pool, layer dropout, layer glu, layer mlp, layer gated_mlp, layer ended,
    layer limited_mlp, layer chain,
    layer functional, layer formula, layer where, layer viewed, layer moved, layer written, layer probe, layer cast,
    layer parametrised,
    layer softmax, layer rms_norm, layer layer_norm, layer rms_norm_like, layer activation, inplace activation,
    changing attributes, checkpoint, checkpoint reentrant, checkpoint nested, checkpoint under hooks, saved save_on_cpu,
    saved identity, saved clone, autocast, autocast nested, grad no, grad inference, call functional, call vmap,
    call func_grad, call thread, call threads, backward in a thread, step write, write x, write y, write weight,
    write by copy_, write by numpy, write by data, output permuted, output relu_, output add_, hooks, retain_grad,
    retain_graph, several losses, partial backward, step penalty, step batched, step split, accumulation, step step,
    step freeze, step freeze_all, step mode, step deepcopy, step pickle, step revert, step convert, step load,
    step cast, step drop, step config, step patch, head, step write_head, step read_logits
"""


FLAGS = ("tokens", "mixed", "memory_format", "input_grad", "default_device", "sharded", "flops", "head")


def features(program) -> set[str]:
    found = {f"layout {program['layout']}", f"dtype {program['dtype']}", f"prefer {program['prefer']}"}
    found |= {name for name in FLAGS if program[name]}
    found |= {f"input {layout}" for layout in program["inputs"]}
    found.add(f"loss {'criterion' if program['loss'] in CRITERIA else 'formula'}")
    found |= {"zero rows"} if program["N"] == 0 else set()
    found |= {"float64 throughout"} if coarsest(program) == "float64" else set()
    calls = [step[2] for step in program["steps"] if step[0] == "forward"]
    found |= {"loss in autocast"} if program["loss_in_autocast"] and any(call["autocast"] for call in calls) else set()
    for layer, around in models.walk(program["model"]):
        found |= features_of_layer(layer, around, calls)
    for step in program["steps"]:
        found |= features_of_step(*step)
    backwards = 0
    for step in program["steps"]:
        backwards = 0 if step[0] == "zero_grad" else backwards + (step[0] == "backward")
        found |= {"accumulation"} if backwards > 1 else set()
    return found


def features_of_layer(layer, around, calls) -> set[str]:
    found = {f"layer {layer[0]}"}
    if layer[0] == "activation" and layer[2]:
        found.add("inplace activation")
    if layer[0] == "padded":
        found |= convert_attention.features(*layer[1:])
    if layer[0] == "conv":
        found.add(f"conv {layer[5]}")
    if layer[0] == "buffered":
        found |= {"unusual buffers", f"buffer {layer[1]}"}
    if layer[0] == "changing":
        found.add("changing attributes")
    if layer == ("probe", "retain_grad"):
        found.add("retain_grad")
    if layer[0] == "checkpoint":
        found.add("checkpoint reentrant" if layer[-1] else "checkpoint")
        if "checkpoint" in around or any(call["call"] in ("checkpoint", "reentrant") for call in calls):
            found.add("checkpoint nested")
        if "packed" in around or any(call["hooks"] for call in calls):
            found.add("checkpoint under hooks")
    if layer[0] == "autocast" and ("autocast" in around or any(call["autocast"] for call in calls)):
        found.add("autocast nested")
    return found


def features_of_step(name, *arguments) -> set[str]:
    found = {f"step {name}"}
    if name == "forward":
        how = arguments[1]
        found |= {f"call {how['call']}", f"grad {how['grad']}", f"saved {how['hooks']}", f"output {how['view']}"}
        found |= {"autocast"} if how["autocast"] else set()
        if how["call"] in ("checkpoint", "reentrant"):
            found |= {"checkpoint" if how["call"] == "checkpoint" else "checkpoint reentrant"}
            found |= {"checkpoint under hooks"} if how["hooks"] else set()
    if name == "backward":
        found |= {"retain_graph"} if arguments[0]["retain"] else set()
        found |= {"partial backward"} if arguments[0]["inputs"] else set()
        found |= {"several losses"} if arguments[0]["which"] != "last" else set()
        found |= {"backward in a thread"} if arguments[0]["thread"] else set()
    if name == "write":
        found |= {f"write {arguments[0] if isinstance(arguments[0], str) else 'weight'}", f"write by {arguments[1]}"}
    if name == "hook":
        found |= {"hooks", f"hook {arguments[1]}"} | ({"retain_grad"} if arguments[1] == "retain_grad" else set())
    if name == "attribute":
        found.add("changing attributes")
    return found


def run(program, ours, noise=0) -> Log:
    """The log of one side. noise: for stock, moves inputs and weights by about an ulp."""
    log = Log()
    torch.manual_seed(program["seed"])
    taken = hfnn.recipe.counter.taken
    with warnings.catch_warnings(), contextlib.ExitStack() as stack:
        warnings.simplefilter("ignore")
        if program["default_device"]:
            stack.enter_context(torch.device("cpu"))
        if program["sharded"] and ours:
            recipe.parameters_are_resharded()
            stack.callback(recipe.parameters_are_resharded, False)
        with log.attempt("build"):
            session = Session(program, ours, noise, log)
            for at, (name, *arguments) in enumerate(program["steps"]):
                with log.attempt(f"{at} {name}"):
                    session.run(at, name, arguments)
                session.log_versions()
            session.close()
    own.unpatch()
    if hfnn.recipe.counter.taken > taken:
        log.features.add("recipes taken")
    return log


def keeping_copies(program) -> Log:
    """Stock, keeping a copy of everything it saves, so that no write is refused."""
    convert_around.copying = True
    try:
        with convert_around.saved_tensor_hooks(None):
            return run(program, False)
    finally:
        convert_around.copying = False


NAMES = tuple(name.strip() for name in EXPECTED.split(","))
FUZZER = Fuzzer("convert", draw, features, run, NAMES, KNOWN, FAULTS, keeping_copies)
