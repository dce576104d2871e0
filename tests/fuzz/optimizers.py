"""The fuzzer of `hfnn.optim`: parameter groups and random user actions on an optimizer, against `torch.optim`.

A program is a dict: the optimizer's class and options, its parameters and groups, and the steps
(`optimizers_session.py`: a name and its arguments). Compared are parameters, gradients, states, options, state dicts,
versions, calls of hooks and errors.

Values may differ by rounding. In 32 bits, torch's three implementations round after each of about ten operations,
hfnn's kernel at other places: some ulps per step, over at most a few dozen steps. In 16 bits, torch rounds after each
operation, hfnn only the result: one or two ulps of that dtype per step.
"""

import warnings

import torch
from engine import Fuzzer, Log
from optimizers_faults import FAULTS
from optimizers_session import GRADS, LAYOUTS, SCHEDULERS, Session

CLASSES = ("AdamW", "Adam", "SGD", "Adafactor")
SHAPES = ((), (1,), (5,), (0,), (3, 4), (1, 6), (2, 3, 2, 2), (70, 65), (0, 4), (300,))
BAD = ("lr", "weight_decay", "eps", "betas", "momentum", "nesterov", "tensor", "empty", "both", "unknown")


def draw_tensor(rng, name) -> dict:
    shape = rng.choice(SHAPES)
    dtype = rng.choices(("float32", "bfloat16", "float16", "float64", "complex64"), (14, 3, 2, 2, 0.4))[0]
    if name == "Adafactor":  # torch's divides by the number of elements, and sums squares in the parameter's dtype
        shape, dtype = (4, 2) if 0 in shape else shape, "bfloat16" if dtype == "float16" else dtype
    return {
        "shape": shape,
        "dtype": dtype,
        "layout": rng.choices(LAYOUTS, (10, 1.5, 0.7, 1.5, 1))[0],
        "frozen": rng.random() < 0.08,
    }


def draw_options(rng, name, all_of_them=True) -> dict:
    """Options of a constructor, or of a group."""
    options = {"lr": rng.choice((0.1, 0.01, 1e-3, 0.03, 0.0)), "weight_decay": rng.choice((0.0, 0.0, 0.01, 0.3))}
    if rng.random() < 0.15:
        options["maximize"] = True
    if name in ("Adam", "AdamW"):
        options |= {"betas": rng.choice(((0.9, 0.999), (0.5, 0.9), (0.0, 0.99))), "eps": rng.choice((1e-8, 1e-3))}
        options["amsgrad"] = rng.random() < 0.25
        if name == "Adam" and rng.random() < 0.3:
            options["decoupled_weight_decay"] = True
    elif name == "SGD" and rng.random() < 0.7:
        options["momentum"] = rng.choice((0.9, 0.5))
        if rng.random() < 0.3:
            options["nesterov"] = True
        elif rng.random() < 0.4:
            options["dampening"] = 0.5
    elif name == "Adafactor" and rng.random() < 0.5:
        options |= {"beta2_decay": rng.choice((-0.8, -0.5)), "d": rng.choice((1.0, 2.0)), "eps": (None, 1e-2)}
    if all_of_them:
        how = rng.choices((None, "foreach", "for", "fused"), (5, 1.5, 1, 1.5))[0]
        if how == "fused" and name != "Adafactor":
            options["fused"] = True
        elif how in ("foreach", "for"):
            options["foreach"] = how == "foreach"
        return options
    return {key: options[key] for key in rng.sample(list(options), rng.randrange(len(options) + 1))}


def spoil(rng, program, name) -> None:
    """Adds an argument that torch refuses."""
    bad, options = program["bad"], program["options"]
    wrong = {
        "lr": {"lr": -0.1}, "weight_decay": {"weight_decay": -1.0}, "eps": {"eps": -1.0}, "betas": {"betas": (0, 1.0)},
        "momentum": {"momentum": -0.5}, "nesterov": {"nesterov": True, "momentum": 0.0},
        "both": {"foreach": True, "fused": True}, "unknown": {"no_such_option": 1},
    }  # fmt: skip
    options.update(wrong.get(bad, {}))
    if bad == "empty":
        program["groups"] = []


def draw(rng) -> dict:
    name = rng.choices(CLASSES, (5, 3, 4, 2))[0]
    tensors = [draw_tensor(rng, name) for _ in range(rng.choice((1, 2, 2, 3, 4, 6)))]
    numbers = list(range(len(tensors)))
    cut = rng.randrange(1, len(numbers)) if len(numbers) > 1 and rng.random() < 0.5 else len(numbers)
    program = {
        "seed": rng.randrange(1 << 30),
        "class": name,
        "build": rng.choice(("class", "convert")),
        "options": draw_options(rng, name),
        "tensor_lr": rng.random() < 0.06,
        "bad": rng.choice(BAD) if rng.random() < 0.05 else None,
        "tensors": tensors,
        "groups": [
            {"params": part, "options": draw_options(rng, name, False) if k else {}}
            for k, part in enumerate((numbers[:cut], numbers[cut:]))
            if part
        ],
        "steps": [],
    }
    spoil(rng, program, name)
    program["steps"].append(("hook", rng.choice(("step_pre", "step_post")))) if rng.random() < 0.1 else None
    for _ in range(rng.choice((2, 3, 4, 6, 8))):
        program["steps"] += draw_round(rng, name)
    if name == "SGD" and program["bad"] != "both":
        pass_by_torchs_faults(program)
    return program


def pass_by_torchs_faults(program) -> None:
    """Avoids defects of torch's SGD with momentum: its foreach step writes to the gradients, and its fused step fails
    if momentum is set later. On the CPU its fused step leaves whole vectors of 16 bits unchanged (2.13)."""
    added = [step[1:] for step in program["steps"] if step[0] == "add_group"]
    every = [program["options"], *(group["options"] for group in program["groups"]), *(options for _, options in added)]
    momentum = any("momentum" in options or "nesterov" in options for options in every)
    halves = any(t["dtype"] in ("bfloat16", "float16") for t in (*program["tensors"], *(t for t, _ in added)))
    if momentum:
        program["options"].pop("foreach", None)
    if momentum or halves:
        program["options"].pop("fused", None)


def draw_round(rng, name) -> list[tuple]:
    """Gradients, a step, and some other action."""
    steps = []
    kinds = [rng.choices((*GRADS, "none", "zero", "sparse"), (8, 2, 1, 1, 1, 0.7, 1.5, 0.7, 0.15))[0] for _ in range(6)]
    way = rng.choices(
        ("grads", "backward", "closure", "raises", "scaled", "stale", "forced"), (9, 5, 2, 0.3, 2, 1.5, 0.7)
    )[0]
    if way == "grads":
        steps += [("grads", kinds)]
        if rng.random() < 0.15:
            steps += [("clip", rng.choice((0.1, 1.0, 100.0)), rng.choice(("norm", "value")))]
        steps += [("step", "none")]
    elif way == "backward":
        steps += [("backward", rng.choice((1, 1, 2))), ("step", "none")]
    elif way in ("closure", "raises"):
        steps += [("step", way)]
    elif way == "scaled":
        unscale = rng.random() < 0.5
        kind = "inf" if rng.random() < 0.25 else "plain"
        steps += [("scaled_step", unscale, rng.choice((None, 1.0)), kind)]
    elif way == "stale":
        steps += [("stale",), ("backward", 1), ("step", "none"), ("zero_grad", True), ("late_backward",)]
    else:
        steps += [("grads", kinds), ("forced",)]
    if rng.random() < 0.4:
        steps += [("zero_grad", rng.random() < 0.7)]
    if rng.random() < 0.65:
        steps.append(draw_action(rng, name))
    return steps


def draw_action(rng, name) -> tuple:
    i = rng.randrange(8)
    actions = {
        "option": 4, "add_group": 1, "add_again": 0.3, "schedule": 1.2, "schedule_step": 1.5, "freeze": 1, "write": 1.5,
        "edit_state": 1.5, "hook": 0.6, "save": 2.5, "load_wrong": 0.3, "copy": 1.5, "swap": 2,
        "regroup": 2,
    }  # fmt: skip
    action = rng.choices(list(actions), list(actions.values()))[0]
    if action == "option":
        options = draw_options(rng, name, False) or {"lr": 0.05}
        option = rng.choice(sorted(options.keys() - {"amsgrad", "nesterov", "dampening"}) or ["lr"])
        return action, i, option, options.get(option, 0.05)
    arguments = {
        "add_group": lambda: (draw_tensor(rng, name), draw_options(rng, name, False)),
        "add_again": lambda: (i,),
        "regroup": lambda: (rng.randrange(2),),
        "schedule": lambda: (rng.choice(list(SCHEDULERS)),),
        "freeze": lambda: (i,),
        "write": lambda: (i, rng.choice(("in place", "data", "grad in place"))),
        "edit_state": lambda: (i, rng.choice(("clear", "drop", "scale", "zero", "move", "replace"))),
        "hook": lambda: (rng.choice(("step_pre", "step_post")),),
        "save": lambda: (rng.choice(("directly", "file", "torch")),),
        "copy": lambda: (rng.choice(("deepcopy", "pickle")),),
        "swap": lambda: (rng.choice(("revert", "convert")),),
    }
    return action, *arguments.get(action, tuple)()


def features(program) -> set[str]:
    found = {f"class {program['class']}", f"built by {program['build']}"}
    found |= {f"step {name}" for name, *_ in program["steps"]}
    found |= {f"closure {step[1]}" for step in program["steps"] if step[0] == "step"}
    found |= {f"dtype {t['dtype']}" for t in program["tensors"]} | {f"layout {t['layout']}" for t in program["tensors"]}
    found |= {f"gradient {k}" for step in program["steps"] if step[0] == "grads" for k in step[1]}
    found |= {f"option {name}" for name, value in program["options"].items() if value}
    found |= {"frozen"} if any(t["frozen"] for t in program["tensors"]) else set()
    found |= {"groups"} if len(program["groups"]) > 1 else set()
    found |= {"tensor lr"} if program["tensor_lr"] else set()
    found |= {"refused"} if program["bad"] else set()
    return found


EXPECTED = (
    *(f"class {name}" for name in CLASSES), "built by class", "built by convert", "frozen", "groups", "refused",
    *(f"dtype {name}" for name in ("float32", "bfloat16", "float16", "float64", "complex64")),
    *(f"layout {name}" for name in LAYOUTS), *(f"gradient {name}" for name in (*GRADS, "none", "zero", "sparse")),
    *(f"step {name}" for name in (
        "grads", "backward", "step", "scaled_step", "stale", "forced", "clip", "zero_grad", "option", "add_group",
        "schedule", "schedule_step", "freeze", "write", "edit_state", "hook", "save", "copy", "swap", "add_again",
        "load_wrong", "regroup",
    )),
    "closure closure", "closure raises", "option fused", "option foreach", "option maximize", "option amsgrad",
    "option momentum", "option nesterov", "option dampening", "option decoupled_weight_decay", "tensor lr",
)  # fmt: skip


def run(program, ours, noise=0) -> Log:
    log = Log()
    torch.manual_seed(program["seed"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        session = Session(program, ours, noise, log)
        for step in program["steps"]:
            session.do(step)
    if getattr(session.optimizer, "_ran", ()) == ("cpp",):
        log.features.add("a kernel ran")
    return log


FUZZER = Fuzzer("optimizers", draw, features, run, EXPECTED, faults=FAULTS)
