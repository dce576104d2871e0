"""Rows: an op of a family is one `Op` with the fields of its family. Its function and its module are made here."""

import inspect
import linecache
import sys

from torch import Tensor, nn

SHAPES = ((1,), (3, 769), (64, 1024), (0, 4))  # for the contract tests, of every elementwise op
BENCH = (16384, 8192)
# Types of arguments by name; of others, the type of the default.
_TYPES = {
    **dict.fromkeys(("input", "target", "other"), Tensor),
    **dict.fromkeys(("weight", "pos_weight"), Tensor | None),
    **dict.fromkeys(("min", "max"), Tensor | float | None),
    **dict.fromkeys(("size_average", "reduce"), bool | None),
    **dict.fromkeys(("threshold", "value", "beta"), float),
}
# What arguments mean, by name, or by op and name.
_ARGUMENTS = {
    "input": "Of any shape.",
    "prefer": '"auto", "memory" or "speed", as in `hfnn.convert`.',
    "inplace": "Whether torch's own op runs, and writes the result to input.",
    "keep": '"bits", or "output", which is better where a linear map or a convolution keeps it anyway.',
    "alpha": "The limit towards minus infinity is -alpha.",
    "approximate": '"none" or "tanh".',
    "softplus.beta": "Larger values are nearer to relu.",
    "softplus.threshold": "Where beta x is larger, y = x.",
    "threshold.threshold": "The bound.",
    "value": "The result up to the bound.",
    "lambd": "The bound, at least 0.",
    "negative_slope": "The slope for x < 0.",
    "min_val": "The lower bound.",
    "max_val": "The upper bound.",
    "min_value": "Deprecated name of min_val.",
    "max_value": "Deprecated name of max_val.",
    "min": "The lower bound; None: none.",
    "max": "The upper bound; None: none.",
    "other": "Of the shape and dtype of input.",
    "dim": "Which dimension is halved.",
    "target": "Of the shape and dtype of input.",
    "weight": "Factors of the losses of elements. With them torch's own op runs.",
    "pos_weight": "Factors for positive targets. With them torch's own op runs.",
    "size_average": "Deprecated, as in torch.",
    "reduce": "Deprecated, as in torch.",
    "reduction": '"mean", "sum", or "none", for which torch\'s own op runs.',
    "delta": "From this difference on the loss is linear.",
    "smooth_l1_loss.beta": "From this difference on the loss is linear.",
}


def described(op, text: str, names) -> str:
    """A docstring: the text, a line for each argument, and last the examples among the text's paragraphs."""
    paragraphs = inspect.cleandoc(text).split("\n\n")
    examples = [paragraph for paragraph in paragraphs if paragraph.startswith(">>>")]
    lines = [f"    {name}: {_ARGUMENTS.get(f'{op.name}.{name}') or _ARGUMENTS[name]}" for name in names]
    kept = [paragraph for paragraph in paragraphs if paragraph not in examples]
    return "\n\n".join([*kept, *(["\n".join(["Args:", *lines])] if lines else []), *examples])


def numbers(op, *arguments):
    """`op.numbers(*arguments)`; None if it fails: torch's own op then raises the error."""
    try:
        return op.numbers(*arguments)
    except (TypeError, ValueError, ArithmeticError, RuntimeError):
        return None


def real(value) -> float:
    """A number for a kernel; TypeError for strings and containers, which `float` might accept."""
    return float(1.0 * value)


def cases(values) -> tuple:
    """A case for each shape and each tuple of options."""
    return tuple((*shape, *options) for shape in SHAPES for options in values)


def sampler(draw, names):
    """`Op.sample` for cases (*shape, *options), the options of these names; draw(shape, generator, *options): x."""

    def sample(case, dtype, device, generator=None):
        at = len(case) - len(names)
        shape, options = case[:at], case[at:]
        return (draw(shape, generator, *options).to(dtype).to(device),), dict(zip(names, options, strict=True))

    return sample


def function(op, parameters, text: str, keeps: tuple = (), named: bool = False):
    """torch's function of the op's name with the extra argument `prefer`, and `keep` if `keeps` has its choices.

    parameters: inspect's, of torch's function, without the input; named: they are keyword-only. op.run(input, prefer,
    arguments[, keep]) is the result by a kernel, or None if torch's own op must run, or raise.

    Generated as source and compiled, as in dataclasses, because a general wrapper costs a small call one microsecond.
    """
    parameters = [p.replace(kind=p.KEYWORD_ONLY) if named else p for p in parameters]
    defaults = {f"_{p.name}": p.default for p in parameters if p.default is not p.empty}
    given = [p.name if p.default is p.empty else f"{p.name}=_{p.name}" for p in parameters]
    given.insert(0 if named else len(given), "*")
    arguments = "".join(f"{p.name}, " for p in parameters)
    keep = ", keep" if keeps else ""
    lines = [
        f"def {op.name}(input, {', '.join(given)}, prefer='auto'{keep and f', keep={keeps[0]!r}'}):",
        *([f" if keep != {keeps[0]!r} and keep not in keeps: refuse(keep)"] if keeps else []),
        f" y = None if passes(input, prefer) else run(input, prefer, ({arguments}){keep})",
        f" return torchs(input, {_passed(parameters)}) if y is None else y",
    ]
    if named:  # torch is slow at parsing keywords
        usual = " and ".join(f"{p.name} is _{p.name}" for p in parameters)
        lines.insert(-1, f" if y is None and {usual}: return torchs(input)")

    def refuse(keep):
        raise ValueError(f"keep={keep!r}: choose one of {', '.join(map(repr, keeps))}")

    cells = {"passes": op.passes, "run": op.run, "torchs": op.torch, "keeps": keeps, "refuse": refuse, **defaults}
    made = _written(op, lines, cells)
    made.__qualname__ = op.name  # used by pickle
    made.__doc__ = described(op, text, inspect.signature(made).parameters)
    made.__annotations__ = {p.name: _type(p) for p in inspect.signature(made).parameters.values()} | {"return": Tensor}
    return made


def _type(parameter):
    return _TYPES.get(parameter.name) or type(parameter.default)


def module(op, base: type, name: str, function, keep=None, inputs=("input",), attributes=None) -> type:
    """`base`, whose forward is `function` of its inputs and its attributes; registered as the op's module.

    attributes: the names, which are also argument names; None: all arguments.
    """
    parameters = [p for p in inspect.signature(function).parameters.values() if p.name not in inputs]
    if attributes is not None:
        wanted = (*attributes, "prefer")
        parameters = [p.replace(kind=p.KEYWORD_ONLY) for p in parameters if p.name in wanted]
    given = ", ".join(inputs)
    lines = [f"def forward(self, {given}):", f" return function({given}, {_passed(parameters, 'self.')})"]
    also = "" if keep is None else f"; `keep` as in `{op.name}`"
    like = "" if base is nn.Module else f", with the arguments and defaults of `torch.nn.{name}`"
    text = f"`hfnn.functional.{op.name}` as a module{like}.\n\n`prefer` is set by `hfnn.convert`{also}."
    text = described(op, text, _given(base))
    own = {"__module__": type(op).__module__, "__doc__": text, "prefer": "auto"}
    own["forward"] = forward = _written(op, lines, {"function": function})
    forward.__qualname__ = f"{name}.forward"  # in the messages of Python's own errors
    forward.__annotations__ = dict.fromkeys((*inputs, "return"), Tensor)
    made = type(name, (base,), own if keep is None else {**own, "keep": keep})
    if base is not nn.Module:
        op.modules[base] = made
    return made


def _given(base: type) -> list[str]:
    """The arguments of a module's constructor."""
    if base is nn.Module or base.__init__ is nn.Module.__init__:
        return []
    return [p.name for p in list(inspect.signature(base).parameters.values()) if p.kind is p.POSITIONAL_OR_KEYWORD]


def _passed(parameters, owner="") -> str:
    """The parameters as arguments, by name if they are keyword-only."""
    return ", ".join(f"{f'{p.name}=' if p.kind is p.KEYWORD_ONLY else ''}{owner}{p.name}" for p in parameters)


def _written(op, lines, cells):
    """The function with these lines, which close over the cells."""
    name = lines[0][len("def ") :].partition("(")[0]
    lines = [f"def make({', '.join(cells)}):", *(f"    {line}" for line in lines), f"    return {name}"]
    scope, file, text = {}, f"<hfnn {op.name}: {name}>", "\n".join(lines)
    linecache.cache[file] = len(text), None, text.splitlines(True), file  # for tracebacks and inspect.getsource
    exec(compile(text, file, "exec"), vars(sys.modules[type(op).__module__]), scope)
    return scope["make"](**cells)
