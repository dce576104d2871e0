"""Rows: an op of a family is one `Op` with what its family asks besides; its function and its module are made here."""

import inspect
import linecache
import sys

from torch import nn

SHAPES = ((1,), (3, 769), (64, 1024), (0, 4))  # for the contract tests, of every elementwise op
BENCH = (16384, 8192)


def numbers(op, *arguments):
    """`op.numbers(*arguments)`; None where it cannot tell: torch's own op then says what is wrong with them."""
    try:
        return op.numbers(*arguments)
    except (TypeError, ValueError, ArithmeticError, RuntimeError):
        return None


def real(value) -> float:
    """A number as a kernel takes it; TypeError for text, and for what holds numbers, of which `float` makes one."""
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
    """torch's function of the op's name with `prefer`, and where `keeps` are its choices `keep`, besides.

    parameters: inspect's, of torch's function, but for the input; named: they go by name alone. op.run(input, prefer,
    arguments[, keep]) is the result by a kernel, or None where torch's own op is to run, or to raise.

    Written out and compiled, as dataclasses do: a general wrapper costs a small call a microsecond.
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
    if named:  # torch takes a while to read names
        usual = " and ".join(f"{p.name} is _{p.name}" for p in parameters)
        lines.insert(-1, f" if y is None and {usual}: return torchs(input)")

    def refuse(keep):
        raise ValueError(f"keep={keep!r}: choose one of {', '.join(map(repr, keeps))}")

    cells = {"passes": op.passes, "run": op.run, "torchs": op.torch, "keeps": keeps, "refuse": refuse, **defaults}
    made = _written(op, lines, cells)
    made.__doc__, made.__qualname__ = text, op.name  # by which it is pickled
    return made


def module(op, base: type, name: str, function, keep=None, inputs=("input",), attributes=None) -> type:
    """`base`, whose forward is `function` of its inputs and its attributes; entered as the op's.

    attributes: of which names, each of which is an argument's too; None: of all arguments.
    """
    parameters = [p for p in inspect.signature(function).parameters.values() if p.name not in inputs]
    if attributes is not None:
        wanted = (*attributes, "prefer")
        parameters = [p.replace(kind=p.KEYWORD_ONLY) for p in parameters if p.name in wanted]
    given = ", ".join(inputs)
    lines = [f"def forward(self, {given}):", f" return function({given}, {_passed(parameters, 'self.')})"]
    also = "" if keep is None else f"; `keep` as in `{op.name}`"
    text = f"`torch.nn.{name}`: the same arguments and defaults. `prefer` is set by `hfnn.convert`{also}."
    own = {"__module__": type(op).__module__, "__doc__": text, "prefer": "auto"}
    own["forward"] = _written(op, lines, {"function": function})
    made = type(name, (base,), own if keep is None else {**own, "keep": keep})
    if base is not nn.Module:
        op.modules[base] = made
    return made


def _passed(parameters, owner="") -> str:
    """The parameters as arguments, each by its name where it goes by that alone."""
    return ", ".join(f"{f'{p.name}=' if p.kind is p.KEYWORD_ONLY else ''}{owner}{p.name}" for p in parameters)


def _written(op, lines, cells):
    """The function of these lines, which close over the cells."""
    name = lines[0][len("def ") :].partition("(")[0]
    lines = [f"def make({', '.join(cells)}):", *(f"    {line}" for line in lines), f"    return {name}"]
    scope, file, text = {}, f"<hfnn {op.name}: {name}>", "\n".join(lines)
    linecache.cache[file] = len(text), None, text.splitlines(True), file  # for tracebacks and inspect.getsource
    exec(compile(text, file, "exec"), vars(sys.modules[type(op).__module__]), scope)
    return scope["make"](**cells)
