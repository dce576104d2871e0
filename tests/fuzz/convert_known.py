"""Known differences, each predicted from what the program does and from what differed.

They are the limits in section 8 of docs/design.md, by their names there. A limit has several predictions, one for each
way in which programs meet it.
"""

import convert_models as models
from convert_bytes import BLOCK
from convert_session import coarsest
from engine import Known, Raised, Tensor, first_difference, relative_error

import hfnn
from hfnn.core import native

UNSEEN = ("data", "numpy", "set")  # writes that change no version
ATTENTION = ("multihead", "encoder_layer", "decoder_layer")
INPLACE_VIEWS = ("relu_", "add_", "float")


def _layers(program, *kinds):
    return [layer for layer, _ in models.walk(program["model"]) if layer[0] in kinds]


def _attention(program):
    """Layers with torch's own module of attention, which keeps a copy of its input in another order."""
    return _layers(program, *ATTENTION) or [layer for layer in _layers(program, "padded") if layer[1] == "multihead"]


def _calls(program):
    return [step[2] for step in program["steps"] if step[0] == "forward"]


def _at(difference) -> int:
    """The number of the step that differs; larger than all for the end."""
    number = difference.label.split()[1]
    return int(number) if number.isdigit() else 1 << 30


def _step(program, difference) -> str:
    """The name of the step that differs; "end" at the end."""
    return program["steps"][_at(difference)][0] if _at(difference) < len(program["steps"]) else "end"


def _says(difference, *texts) -> bool:
    """Whether ours raised one of these texts where stock did not raise it."""
    return isinstance(difference.ours, Raised) and any(text in difference.ours.text for text in texts)


def _refused(difference, *texts) -> bool:
    """Whether stock raised one of these texts where ours did not raise it."""
    return isinstance(difference.stock, Raised) and any(text in difference.stock.text for text in texts)


def _values(difference) -> bool:
    return difference.how == "values" and difference.label.split()[0] in ("grad", "value", "hook")


def _autocast(program, dtypes=("bfloat16", "float16")) -> bool:
    inside = any(layer[2] in dtypes for layer in _layers(program, "autocast"))
    return inside or any(call["autocast"] in dtypes for call in _calls(program))


def _batched(program, difference):
    """Strides of torch's batched gradients depend on each op's batching rule."""
    return _step(program, difference) == "batched" and difference.how == "strides"


def _batched_refused(program, difference):
    """Some of torch's ops have no batching rule, or draw numbers."""
    refused = difference.how == "raises not" and _refused(difference, "vmap:", "Batching rule", "inside of vmap")
    return refused and _step(program, difference) == "batched"


def _between(program, steps, until) -> bool:
    """Whether one of these steps comes between a forward and a backward at or before `until`."""
    names = [step[0] for step in program["steps"][: until + 1]]
    return any(at in steps and "forward" in names[:at] for at in range(len(names)))


def _unseen_write(program, difference):
    """A write between forward and backward that changes no version, or that saved-tensor hooks hide. Kept tensors, and
    those rebuilt from them, then give another gradient than the tensors that stock kept."""
    hooked = any(call["hooks"] for call in _calls(program)) or _layers(program, "packed", "checkpoint")
    hooked = hooked or any(call["call"] in ("checkpoint", "reentrant") for call in _calls(program))
    writes = [n for n, step in enumerate(program["steps"]) if step[0] == "write" and (hooked or step[2] in UNSEEN)]
    if hooked:
        writes += [n for n, step in enumerate(program["steps"]) if step[0] in ("step", "load")]
    inside = (bool(hooked) and _writes_in_place(program)) or any(
        layer[3] == "data" for layer in _layers(program, "between")
    )
    return _values(difference) and (inside or _between(program, writes, _at(difference)))


def _stock_suffers(program, difference):
    """Such a write that changes stock's own gradients: with kept copies they differ."""
    if not _unseen_write(program, difference):
        return False
    import convert

    copies, stock = convert.keeping_copies(program), convert.run(program, False)
    for log in (copies, stock):  # copies have bytes
        log.seen = {label: seen for label, seen in log.seen.items() if not label.startswith("bytes")}
    suffers = first_difference(copies, stock, lambda label, values: 0.0)
    return suffers is not None and suffers.how == "values"


def _recipe_suffers(program, difference):
    """Such a write to a source of a recipe: without recipes there is no difference."""
    if not _unseen_write(program, difference):
        return False
    import convert

    with hfnn.recipe.disabled():
        return convert.FUZZER.difference(program)[0] is None


def _kept_suffers(program, difference):
    """Such a write to what RMSNorm, cross_entropy, attention, or Linear under autocast keeps, where torch keeps a
    result computed from it."""
    keeps = _layers(program, "rms_norm", "rms_norm_like", "quick_gelu") or _attention(program) or _autocast(program)
    keeps = keeps or program["loss"] == "CrossEntropyLoss"
    return bool(keeps) and _unseen_write(program, difference)


def _run_again(program, difference):
    """Such a write to weights of a recurrent layer, which runs again in backward; torch's reads some of them there."""
    return bool(_layers(program, "recurrent")) and _unseen_write(program, difference)


def _weight_of_run_again(program, difference):
    """Such a layer's weight, written to visibly."""
    return bool(_layers(program, "recurrent")) and _says(difference, "recurrent layers run again")


def _more_than_torch(program, difference):
    """hfnn supports cases where torch has no kernel or no derivative."""
    if program["optimizer"] and _refused(difference, "for `end` but got dtype"):  # states of another dtype, in AdamW
        return True
    return _refused(difference, "not implemented for 'Half'", "_backward is not implemented")


def _fused_for_eager(program, difference):
    """Eager attention, or one that is written out, runs as torch's fused op, which has no second derivative."""
    kinds = {layer[1] for layer in _layers(program, "padded", "scored")} - {"sdpa", *models.convert_attention.OWN}
    return bool(kinds) and _says(difference, "_scaled_dot_product")


def _torchs_sixth(program, difference):
    """torch's hardsigmoid multiplies by a sixth rounded to float32, in float64, too."""
    names = {layer[1] for layer in _layers(program, "activation", "mlp")}
    if not (_values(difference) and coarsest(program) == "float64" and "Hardsigmoid" in names):
        return False
    return relative_error(difference.ours, difference.stock) < 1e-5


def _float32_softmax(program, difference):
    """Eager attention of transformers rounds to float32 in its softmax, in a float64 model, too."""
    if not (_values(difference) and any(layer[1] in ("eager", "capped") for layer in _layers(program, "padded"))):
        return False
    wide = difference.ours.values.element_size() == 8
    return wide and relative_error(difference.ours, difference.stock) < 1e-5


def _changed_in_checkpoint(program, difference):
    """A module changed between a checkpoint and its backward, so that recomputation saves other tensors. A side that
    saves more may notice it while the other does not."""
    names = [step[0] for step in program["steps"]]
    changing = ("revert", "convert", "attribute", "mode", "cast", "freeze", "freeze_all",
                "hook", "unhook", "patch", "config")  # fmt: skip
    changes = [n for n, name in enumerate(names) if name in changing]
    noticed = any(told(difference, "torch.utils.checkpoint") for told in (_says, _refused))
    return noticed and _between(program, changes, _at(difference))


def _counted_in_checkpoint(program, difference):
    """A FLOP counter around a checkpoint's first forward alone: under it, fused parts run one by one."""
    return bool(program["flops"]) and _in_checkpoint(program) and _says(difference, "torch.utils.checkpoint")


def _not_the_same_again(program, difference):
    """A forward that adds the number of its calls, under a checkpoint, although torch requires recomputation to give
    the same. Its second gradients use tensors of both calls, and the sides keep different ones."""
    penalty = any(step[0] == "penalty" for step in program["steps"])
    counts = bool(_layers(program, "changing")) and _in_checkpoint(program)
    return counts and penalty and difference.label.startswith("grad") and _values(difference)


def _not_computed_again(program, difference):
    """Stock reads all that a linear map saved, even for a bias's gradient, so only it recomputes, and calls hooks."""
    partial = any(step[0] == "backward" and step[1]["inputs"] for step in program["steps"])
    what = difference.label.split()[0]
    fewer = difference.how == "missing" if what == "hook" else what == "flops" and not difference.ours
    return partial and fewer and _in_checkpoint(program)


def _in_checkpoint(program) -> bool:
    return any(call["call"] == "checkpoint" for call in _calls(program)) or bool(_layers(program, "checkpoint"))


def _acts_twice(program, difference):
    """Stock's checkpoint repeats forward's side effects: it sets a hook on its input again, and writes to saved tensors
    without a version check, so torch's gradients are wrong. Ours then agrees, within rounding, with stock without the
    checkpoint and with kept copies."""
    if not (_values(difference) and any(call["call"] == "checkpoint" for call in _calls(program))):
        return False
    import convert

    steps = []
    for name, *rest in program["steps"]:
        if name == "forward" and rest[1]["call"] == "checkpoint":
            rest = [rest[0], {**rest[1], "call": "plain"}]
        steps.append((name, *rest))
    plain = convert.keeping_copies({**program, "steps": steps}).seen.get(difference.label)
    return isinstance(plain, Tensor) and relative_error(difference.ours, plain) < 1e-4


def _writes_refused(program, difference):
    """Ours keeps less, so only stock refuses a write. The program's own hooks or threads prevent a run that keeps
    copies from deciding which side is right."""
    own = any(call["hooks"] or call["call"] in ("checkpoint", "reentrant", "threads") for call in _calls(program))
    own = own or bool(_layers(program, "packed", "checkpoint"))
    return difference.how == "raises not" and own and _refused(difference, "modified by an inplace operation")


def _cached_cast(program, difference):
    """torch's autocast caches one cast of a leaf, and uses it in a nested region of another dtype, too."""
    dtypes = {layer[2] for layer in _layers(program, "autocast")} | {call["autocast"] for call in _calls(program)}
    mixed = "BFloat16" in (text := getattr(difference.stock, "text", "")) and "Half" in text
    mixed = mixed and _refused(difference, "have the same dtype", "expected scalar type")
    return mixed and {"bfloat16", "float16"} <= dtypes


def _writes_in_place(program) -> bool:
    if _layers(program, "written", "between") or any(call["view"] in INPLACE_VIEWS for call in _calls(program)):
        return True
    if any(layer[-1] == "inplace" for layer in _layers(program, "residual", "functional")):
        return True
    if any("written" in layer[2] for layer in _layers(program, "dense")):
        return True
    return any(layer[2] is True for layer in _layers(program, "activation", "dropout", "mlp"))


def _forgotten(program, difference):
    """A hook, or retain_grad, on a Linear's result with more than two dimensions. torch's result is a view: after a
    write to it, or to another view of it, torch no longer calls its hooks. Ours is not a view."""
    if not _writes_in_place(program) or program["layout"] == "rows":
        return False
    if difference.label.startswith("grad") and " kept " in difference.label:
        return difference.stock is None or difference.how == "values"
    hooks = ("probe", "hook") in _layers(program, "probe")
    hooks = hooks or any(step[0] == "hook" and step[2] == "tensor" for step in program["steps"])
    if not (hooks and _values(difference)):
        return False
    import convert

    return convert.FUZZER.difference(_unhooked(program))[0] is None


def _unhooked(part):
    """The same program without hooks on tensors."""
    if isinstance(part, list):
        return [_unhooked(each) for each in part if each[:1] != ("hook",)]
    if isinstance(part, dict):
        return {name: _unhooked(value) if name in ("model", "steps") else value for name, value in part.items()}
    if part == ("probe", "hook"):
        return ("probe", "pass")
    return tuple(_unhooked(each) if isinstance(each, list) else each for each in part)


def _own_input(program, difference):
    """Ours keeps the input itself, which is then written to; torch keeps a tensor computed from it: RMSNorm's product
    or cast, rows of a strided input of Linear or GroupNorm, attention's copy in another order, cross_entropy's
    log-probabilities."""
    ours = native.extension is not None or _says(difference, "hfnn/ops/")  # C++ nodes leave no traceback
    strided = bool(_layers(program, "moved")) or {*program["inputs"]} != {"plain"}
    rows = strided and _layers(program, "linear", "mlp", "group_norm")
    own = ours and (_layers(program, "rms_norm", "rms_norm_like") or rows)
    own = own or _says(difference, "hfnn/ops/cross_entropy.py")
    texts = "modified by an inplace operation", "another view of its base has been modified inplace"
    written = _writes_in_place(program) or any(step[0] == "write" for step in program["steps"])
    return difference.how == "raises" and _says(difference, *texts) and written and (own or _attention(program))


def _attention_strides(program, difference):
    """torch transposes attention's inputs, and its gradient is returned transposed."""
    return difference.how == "strides" and difference.label.startswith(("grad", "hook")) and _attention(program)


def _depthwise_weights(program, difference):
    """Under autocast, in second derivatives, torch adds gradients of a depthwise weight before the cast, and hfnn after
    it. The strides of dimensions of size 1 are then the usual ones, or a convolution's."""
    autocast = any(call["autocast"] for call in _calls(program)) or bool(_layers(program, "autocast"))
    twice = autocast and any(step[0] == "penalty" for step in program["steps"])
    of_weight = twice and difference.label.startswith("grad") and difference.label.endswith("weight")
    return of_weight and difference.alike_but_for_ones() and difference.ours.values.shape[1] == 1


PIECEWISE = ("ReLU", "LeakyReLU", "ReLU6", "Hardtanh", "PReLU", "RReLU", "Threshold")


def _zero_second(program, difference):
    """The second derivative of a piecewise linear function is zero; ours is contiguous, torch's has its gradient's
    strides."""
    names = {name for layer in _layers(program, "activation", "mlp", "functional") for name in layer[1:2]}
    penalty = any(step[0] == "penalty" for step in program["steps"][: _at(difference) + 1])
    return penalty and difference.how == "strides" and bool(names & set(PIECEWISE))


def _written_source(program, difference):
    """A write to a source of a rebuilt tensor, which its own backward does not read, or a partial backward does not
    request."""
    steps = program["steps"][: _at(difference) + 1]
    partial = any(step[0] == "backward" and step[1]["inputs"] for step in steps)
    partial = partial or any(step[0] == "split" or step == ("batched", "weights") for step in steps)
    written = _writes_in_place(program) or any(step[0] == "write" for step in steps)
    if not (written and _says(difference, "modified by an inplace operation")):
        return False
    import convert

    with hfnn.recipe.disabled():
        return partial or convert.FUZZER.difference(program)[0] is None


def _weight_written(program, difference):
    """A weight written to before backward; under autocast torch has kept a 16-bit copy of it."""
    steps = [n for n, step in enumerate(program["steps"]) if step[0] in ("write", "step", "load")]
    says = _says(difference, "keeps its weight, where torch keeps a 16-bit copy")
    return says and _autocast(program) and _between(program, steps, _at(difference))


def _none_of_nothing(program, difference):
    """A second derivative for zero rows: zeros, where torch gives None, or zeros without a graph."""
    penalty = any(step[0] == "penalty" for step in program["steps"][: _at(difference) + 1])
    if program["N"] != 0 or not penalty:
        return False
    if _refused(difference, "NoneType"):  # a hook that receives None
        return True
    seen = difference.label.startswith("grad") and difference.how in ("differs", "requires_grad")
    return seen and isinstance(difference.ours, Tensor) and not difference.ours.values.any()


KEEP_OUTPUT = ("ELU", "CELU", "SELU", "Softplus", "LogSigmoid", "Softsign", "Sigmoid", "Tanh")


def _kept_under_hooks(program, difference):
    """Ops that keep their output: with saved-tensor hooks there is a reference cycle, and writes to the output are not
    detected."""
    names = {name for layer in _layers(program, "activation", "mlp", "functional") for name in layer[1:2]}
    hooks = any(call["hooks"] for call in _calls(program)) or bool(_layers(program, "packed", "checkpoint"))
    alive = difference.label.startswith("alive")
    return hooks and (alive or (_values(difference) and bool(names & set(KEEP_OUTPUT))))


def _bits_under_hooks(program, difference):
    """Bits beside a result that its consumer keeps: hooks of saved tensors have seen them by then. A bit is 1/16 of a
    16-bit number; the model is called twice at most."""
    hooked = any(call["hooks"] for call in _calls(program)) or bool(_layers(program, "packed"))
    activations = len(_layers(program, "activation", "mlp", "functional", "conv_block", "residual"))
    activations += sum(layer[-1] for layer in _layers(program, "chain"))  # calls
    return hooked and _more_bytes(difference, 2 * activations, 1 / 16)


def _numbers_of_rows(program, difference):
    """Two numbers per row of cross_entropy; 32 bits per id of an embedding, whose ids the caller keeps, too."""
    return _more_bytes(difference, 2 * (program["loss"] == "CrossEntropyLoss") + bool(program["tokens"]))


def _numbers_of_channels(program, difference):
    """Two numbers per channel of a batch norm in eval mode, where torch keeps the module's own, and the bits of a relu
    after its sum. The model is called twice at most."""
    evaluates = any(step[0] == "mode" and not step[1] for step in program["steps"])
    return evaluates and _more_bytes(difference, 6 * len(_layers(program, "batch_norm", "conv_block")))


def _more_bytes(difference, blocks, share=0.0) -> bool:
    """Whether ours keeps more, but at most so many small tensors, and this share of stock's bytes."""
    most = blocks * BLOCK + share * difference.stock if difference.label.startswith("bytes") else 0
    return most > 0 and difference.ours - difference.stock <= most


def _limit(name, *predictions) -> Known:
    return Known(name, "docs/design.md", lambda program, difference: any(p(program, difference) for p in predictions))


CHECKPOINTS = _changed_in_checkpoint, _counted_in_checkpoint, _not_the_same_again, _not_computed_again, _acts_twice
KNOWN = (
    _limit("strides of some gradients", _batched, _attention_strides, _depthwise_weights, _zero_second),
    _limit("what torch refuses", _batched_refused, _more_than_torch, _fused_for_eager, _writes_refused, _cached_cast),
    _limit("writes to what hfnn keeps", _weight_written, _written_source, _own_input, _weight_of_run_again),
    _limit("writes that nobody sees", _stock_suffers, _recipe_suffers, _kept_suffers, _run_again),
    _limit("a checkpoint's second forward", *CHECKPOINTS),
    _limit("hooks that torch forgets", _forgotten),
    _limit("no rows", _none_of_nothing),
    _limit("float32 within float64", _torchs_sixth, _float32_softmax),
    _limit("outputs kept under hooks", _kept_under_hooks),
    _limit("small data beside what is kept", _bits_under_hooks, _numbers_of_rows, _numbers_of_channels),
)
