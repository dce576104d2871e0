"""Differences that are understood: each is predicted by what the program does and by what was seen to differ.

`WAITING` are limits of today's design. `OPEN` are defects that are being mended: a line goes when its fix is there.
"""

import convert_models as models
from convert_session import coarsest
from engine import Known, Raised

UNSEEN = ("data", "numpy", "set")  # writes that move no version


def _layers(program, *kinds):
    return [layer for layer, _ in models.walk(program["model"]) if layer[0] in kinds]


def _calls(program):
    return [step[2] for step in program["steps"] if step[0] == "forward"]


def _at(difference) -> int:
    """The number of the step that differs; beyond all for the end."""
    number = difference.label.split()[1]
    return int(number) if number.isdigit() else 1 << 30


def _says(difference, *texts) -> bool:
    """Whether ours raised, where stock did not or raised another error, with one of these texts."""
    return isinstance(difference.ours, Raised) and any(text in difference.ours.text for text in texts)


def _refused(difference, *texts) -> bool:
    """Whether stock raised, where ours did not or raised another error, with one of these texts."""
    return isinstance(difference.stock, Raised) and any(text in difference.stock.text for text in texts)


def _values(difference) -> bool:
    return difference.how == "values" and difference.label.split()[0] in ("grad", "value", "hook")


def _autocast(program, dtypes=("bfloat16", "float16")) -> bool:
    inside = any(layer[2] in dtypes for layer in _layers(program, "autocast"))
    return inside or any(call["autocast"] in dtypes for call in _calls(program))


def _batched(program, difference):
    """`is_grads_batched` hands kernels tensors that only vmap knows."""
    step = program["steps"][_at(difference)] if _at(difference) < len(program["steps"]) else ("",)
    return step[0] == "batched" and _says(difference, "kernels take dense, real tensors", "Batching rule", "vmap:")


def _between(program, steps, until) -> bool:
    """Whether one of these steps stands between a forward and a backward that comes at `until` or before."""
    names = [step[0] for step in program["steps"][: until + 1]]
    return any(at in steps and "forward" in names[:at] for at in range(len(names)))


def _unseen_write(program, difference):
    """A write between forward and backward that moves no version, or one that saved-tensor hooks keep from being seen:
    what is rebuilt from the source then differs from what stock kept."""
    hooked = any(call["hooks"] for call in _calls(program)) or _layers(program, "packed", "checkpoint")
    hooked = hooked or any(call["call"] in ("checkpoint", "reentrant") for call in _calls(program))
    writes = [n for n, step in enumerate(program["steps"]) if step[0] == "write" and (hooked or step[2] in UNSEEN)]
    if hooked:
        writes += [n for n, step in enumerate(program["steps"]) if step[0] in ("step", "load")]
    inside = bool(hooked) and bool(_layers(program, "between", "written"))
    return _values(difference) and (inside or _between(program, writes, _at(difference)))


def _proved_before(program, difference):
    """What was proved at `convert` is believed although an attribute has changed since."""
    changed = [n for n, step in enumerate(program["steps"]) if step[0] == "attribute" and step[2] in ("act", "act_fn")]
    return any(n < _at(difference) for n in changed) and difference.how in ("values", "raises", "raises not")


def _more_than_torch(program, difference):
    """hfnn computes what torch has no kernel or no derivative for."""
    return _refused(difference, "not implemented for 'Half'", "_backward is not implemented")


def _torchs_sixth(program, difference):
    """torch's hardsigmoid multiplies by a sixth that is rounded to float32, in float64 too."""
    names = {layer[1] for layer in _layers(program, "activation", "mlp")}
    return _values(difference) and coarsest(program) == "float64" and bool(names & {"Hardsigmoid", "Hardswish"})


def _class_changed(program, difference):
    """convert or revert between a checkpoint and its backward, which then saves what the other class saves."""
    names = [step[0] for step in program["steps"]]
    changes = [n for n, name in enumerate(names) if name in ("revert", "convert")]
    return _says(difference, "torch.utils.checkpoint") and _between(program, changes, _at(difference))


def _writes_refused(program, difference):
    """Ours keeps less, so that stock alone refuses a write; and hooks or threads of the program's own keep a run that
    saves copies from telling what is right."""
    own = any(call["hooks"] or call["call"] in ("checkpoint", "reentrant", "threads") for call in _calls(program))
    own = own or bool(_layers(program, "packed", "checkpoint"))
    return difference.how == "raises not" and own and _refused(difference, "modified by an inplace operation")


def _written_source(program, difference):
    """A write to a source of what is rebuilt, whose own gradient a partial backward does not ask for."""
    steps = program["steps"][: _at(difference) + 1]
    partial = any(step[0] == "backward" and step[1]["inputs"] for step in steps) or any(s[0] == "split" for s in steps)
    written = any(step[0] == "write" for step in steps)
    return partial and written and _says(difference, "modified by an inplace operation")


def _weight_written(program, difference):
    """A weight that is written to before backward: under autocast torch has kept a 16-bit copy of it."""
    steps = [n for n, step in enumerate(program["steps"]) if step[0] in ("write", "step", "load")]
    says = _says(difference, "Under autocast hfnn.Linear keeps its weight")
    return says and _autocast(program) and _between(program, steps, _at(difference))


WAITING = (
    Known("weights written before backward, under autocast", "the redesign", _weight_written),
    Known("written sources, partial backward", "the redesign", _written_source),
    Known("writes to what ours does not keep", "nothing", _writes_refused),
    Known("what torch has no kernel for", "nothing", _more_than_torch),
    Known("converted between a checkpoint and its backward", "nothing", _class_changed),
    Known("torch's sixth in float64", "nothing", _torchs_sixth),
    Known("batched gradients", "the redesign", _batched),
    Known("unseen writes", "nothing: a documented limit", _unseen_write),
    Known("proofs believed after a change", "an issue of its own", _proved_before),
)


def _strides(program, difference):
    view = "view size is not compatible"
    seen = difference.how == "strides" or _says(difference, view) or _refused(difference, view)
    # A view that is a copy for one side's strides alone is not written through; torch draws masks along memory.
    later = ("written", "view") in _layers(program, "written") or any(p for _, p, _ in _layers(program, "dropout"))
    return seen or (difference.how == "values" and later)


KEEP_OUTPUT = ("ELU", "CELU", "SELU", "Softplus", "LogSigmoid", "Softsign", "Sigmoid", "Tanh")


def _kept_under_hooks(program, difference):
    """Ops that keep their output: a cycle under saved-tensor hooks, and what is written to the output is not seen."""
    names = {name for layer in _layers(program, "activation", "mlp", "functional") for name in layer[1:2]}
    hooks = any(call["hooks"] for call in _calls(program)) or bool(_layers(program, "packed", "checkpoint"))
    return hooks and (
        difference.label.startswith("alive end") or (_values(difference) and bool(names & set(KEEP_OUTPUT)))
    )


def _no_second_derivative(program, difference):
    penalty = any(step[0] == "penalty" for step in program["steps"])
    nothing = difference.ours is None or difference.how == "requires_grad"
    gone = penalty and difference.label.startswith("grad") and nothing
    return gone or (penalty and _says(difference, "does not require grad"))


def _input_refilled(program, difference):
    """Ours keeps an input, or a view of it, where stock keeps a copy; what is written to it then raises."""
    written = any(step[0] == "write" and step[1] == "x" for step in program["steps"])
    written = written or bool(_layers(program, "written", "dropout", "activation", "functional"))
    return _says(difference, "modified by an inplace operation") and written and not program["input_grad"]


OPEN = (
    Known("views kept of inputs", "a fix", _input_refilled),
    Known("strides of outputs", "a fix", _strides),
    Known("outputs kept under hooks", "a fix", _kept_under_hooks),
    Known("no second derivative", "a fix", _no_second_derivative),
)
KNOWN = WAITING + OPEN
