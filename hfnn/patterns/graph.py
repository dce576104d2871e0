"""What a module's forward computes, as a graph of torch calls: traced once, in one spelling.

`Trace` runs a clone's own forward on tensors without values (`Value`); the clone's parts are leaves (`stand_in`).
Methods, operators and functions with the same meaning become the same node of a torch.fx graph, arguments stand by
position, and what changes nothing is left out. Whatever is not in the table CALLS, or would need a value, raises
Refusal. rows.py lists the patterns, rewrite.py finds them.
"""

import functools
import inspect
import math
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import fx, nn
from torch.nn import functional as F

from hfnn.patterns import probe
from hfnn.patterns.probe import Refusal
from hfnn.patterns.shapes import Size, shape_of, sized
from hfnn.patterns.subclass import original

# name(arguments): functions that depend only on the values of their arguments.
CALLS = """
add(a, b) sub(a, b) mul(a, b) div(a, b) neg(a) pow(a, b) square(a) sqrt(a) rsqrt(a) exp(a) erf(a) abs(a) matmul(a, b)
sigmoid(a) tanh(a) gelu(a, approximate="none") relu(a, inplace=False) relu6(a, inplace=False) silu(a, inplace=False)
leaky_relu(a, negative_slope=0.01, inplace=False) hardswish(a, inplace=False) softmax(a, dim, dtype=None)
dropout(a, p=0.5, training=True, inplace=False) linear(a, weight, bias=None)
layer_norm(a, normalized_shape, weight=None, bias=None, eps=1e-5) normalize(a, p=2.0, dim=1, eps=1e-12, out=None)
group_norm(a, num_groups, weight=None, bias=None, eps=1e-5) chunk(a, chunks, dim=0) split(a, size, dim=0)
unbind(a, dim=0) getitem(a, index) cat(tensors, dim=0) flatten(a, start_dim=0, end_dim=-1) transpose(a, dim0, dim1)
permute(a, *dims) mean(a, dim, keepdim=False) unsqueeze(a, dim) squeeze(a, dim) to(a, dtype) as_type(a, x) contiguous(a)
"""
# Other names of the same functions; those of casts ask for a dtype in their own way (`_cast`).
ALIASES = {
    "truediv": "div", "divide": "div", "multiply": "mul", "subtract": "sub", "negative": "neg", "concat": "cat",
    "concatenate": "cat", "swapaxes": "transpose", "type_as": "to", "type": "to", "float": "to",
}  # fmt: skip
VIEWS = (
    "chunk",
    "split",
    "unbind",
    "getitem",
    "flatten",
    "transpose",
    "permute",
    "unsqueeze",
    "squeeze",
    "contiguous",
    "to",
)
ANSWERS = "shape", "size", "dtype", "ndim", "dim", "numel", "layout"
_OPERATORS = ("add", "sub", "mul", "neg", "pow", "matmul", "getitem")
_CONSTANTS = (int, float, bool, str, type(None), torch.dtype, slice, type(Ellipsis))


def gelu(a, approximate):
    return F.gelu(a, approximate=approximate)  # which torch takes by name only


def quick_gelu(a):
    return a * torch.sigmoid(1.702 * a)


def relu_squared(a):
    return torch.square(F.relu(a))


def to(a, dtype):
    return a.to(dtype)


def as_type(a, x):
    return a.to(x.dtype)


def contiguous(a):
    return a.contiguous()


OWN = gelu, quick_gelu, relu_squared, to, as_type, contiguous
for _own in OWN:
    _own.__module__ = "hfnn"  # in the source of a graph they are hfnn_gelu, ...
SIGNATURES = {
    name: inspect.signature(eval(f"lambda {arguments}: None"))  # of the table above
    for name, arguments in re.findall(r"(\w+)\((.*?)\)", CALLS, re.DOTALL)
}
# name -> the function that stands for all of this name
TARGETS: dict[str, Callable] = {own.__name__: own for own in OWN} | {"div": operator.truediv}
TARGETS |= {name: getattr(operator, name) for name in _OPERATORS}
for _name, _how in SIGNATURES.items():
    _owner = F if {"inplace", "weight", "p"} & {*_how.parameters} else torch
    TARGETS.setdefault(_name, getattr(_owner, _name, None) or getattr(torch.Tensor, _name, None))
_NAMES = {target: name for name, target in TARGETS.items()} | {operator.iadd: "add_"}
# torch's functions -> (name in CALLS, whether the operands are swapped, whether the first is written to)
_SPELLINGS = {
    getattr(owner, spelled): (ALIASES.get(name, name), swapped, inplace)
    for name in (*SIGNATURES, *ALIASES)
    for spelled, swapped, inplace in (
        (name, False, False), (f"__{name}__", False, False), (f"__r{name}__", True, False),
        (f"__i{name}__", False, True), (f"{name}_", False, True),
    )
    for owner in (F, torch, torch.Tensor)
    if hasattr(owner, spelled)
}  # fmt: skip


def name_of(node: fx.Node) -> str | None:
    """The name in CALLS of the function that a node calls; "add_" if it adds in place."""
    return _NAMES.get(node.target) if node.op == "call_function" else None


class Value(torch.Tensor):
    """A tensor of a trace: it has a shape and a dtype, and no numbers. `node`: what computes it."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():  # what the trace asks is not what the forward asks
            return next(_values((args, kwargs))).trace.call(func, args, kwargs)


def _values(nest):
    """The values in lists, tuples and dicts."""
    if isinstance(nest, Value):
        yield nest
    elif isinstance(nest, (list, tuple, dict)):
        for each in nest.values() if isinstance(nest, dict) else nest:
            yield from _values(each)


class Trace:
    """A graph that is being recorded. views: nodes of which others share the memory; dtype: of inputs and parameters,
    with 16 bits, in which `.float()` and `.to(x.dtype)` are two things; casts: whether one was asked for or used;
    compared: what else than sizes was computed of sizes."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16):
        self.graph, self.views, self.dtype, self.casts, self.compared = fx.Graph(), set(), dtype, False, []

    def value(self, shape: tuple[int, ...], dtype: torch.dtype, node: fx.Node) -> Value:
        found = torch.Tensor._make_subclass(Value, torch.empty(shape, dtype=dtype, device="meta"))
        found.trace, found.node, node.meta["shape"] = self, node, tuple(shape)
        return found

    def input(self, name: str, shape: tuple[int, ...]) -> Value:
        return self.value(shape, self.dtype, self.graph.placeholder(name))

    def parameter(self, path: str, shape: tuple[int, ...]) -> Value:
        found = self.value(shape, self.dtype, self.graph.get_attr(path))
        found._is_param = True  # isinstance(found, nn.Parameter)
        return found

    def part(self, name: str, x: Value, shape_of: Callable = lambda shape: shape) -> Value:
        """The result of a part. shape_of: its shape, by that of x."""
        with torch._C.DisableTorchFunctionSubclass():  # asked by the trace, not by the forward
            shape, dtype = shape_of(tuple(x.shape)), x.dtype
        return self.value(shape, dtype, self.graph.call_module(name, (x.node,)))

    def call(self, func, args, kwargs):
        """torch's function on values of the trace."""
        name = getattr(getattr(func, "__self__", None), "__name__", None) or func.__name__
        self.casts |= name == "dtype" or ALIASES.get(name, name) == "to"
        if name in ANSWERS:
            answer = func(*args, **kwargs)
            return answer if name in ("dtype", "layout") else sized(answer, self.compared)
        if func not in _SPELLINGS:
            raise Refusal(f"its forward calls {name.strip('_')}")
        called, swapped, inplace = _SPELLINGS[func]
        if called == "to":
            func, args, kwargs = torch.Tensor.to, (args[0], _cast(name, *args[1:], *kwargs.values())), {}
        try:
            given = SIGNATURES[called].bind(*(args[::-1] if swapped else args), **kwargs)
        except TypeError:
            raise Refusal(f"its forward calls {called} with arguments that are not followed") from None
        given.apply_defaults()
        inplace = given.arguments.pop("inplace", False) or inplace
        if given.arguments.pop("out", None) is not None:
            raise Refusal(f"its forward calls {called} with out")
        if called == "permute" and isinstance(given.arguments["dims"][0], (list, tuple)):
            (given.arguments["dims"],) = given.arguments["dims"]
        arguments, x = tuple(map(_argument, given.arguments.values())), next(_values((args, kwargs)))
        if _same(called, x, arguments):
            self.views.add(x.node)  # torch may make another tensor
            return x
        shape, y = x.shape, func(*args, **kwargs)
        if inplace:
            return self._write(called, arguments, x, y.shape == shape)
        node = self.graph.call_function(TARGETS[called], arguments)
        if called in VIEWS:
            self.views |= {x.node, node}
        if isinstance(y, torch.Tensor):
            return self.value(y.shape, y.dtype, node)
        items = [self.graph.call_function(operator.getitem, (node, i)) for i in range(len(y))]
        self.views |= set(items)
        return type(y)(self.value(each.shape, each.dtype, item) for each, item in zip(y, items, strict=True))

    def _write(self, name, arguments, x, fits):
        """Records a call that writes its result to its first argument, which no view shares."""
        by_flag = "inplace" in SIGNATURES[name].parameters
        fresh = arguments[0] is x.node and x.node.op in ("call_module", "call_function") and x.node not in self.views
        if not (fresh and fits and (by_flag or name == "add")):
            raise Refusal(f"its forward writes to a tensor ({name})")
        node = self.graph.call_function(TARGETS[name] if by_flag else operator.iadd, (*arguments, *[True] * by_flag))
        x.node, node.meta = node, {**x.node.meta, "writes": True}
        return x  # whoever has the tensor sees what was written


def _cast(name, *asked) -> torch.dtype:
    """The dtype that `to`, `type`, `type_as` and `float` ask for."""
    dtypes = [each.dtype if isinstance(each, torch.Tensor) else each for each in asked] or [torch.float32]
    if len(dtypes) > 1 or not isinstance(dtypes[0], torch.dtype):
        raise Refusal(f"its forward calls {name} with arguments that are not followed")
    return dtypes[0]


def _argument(value):
    """An argument of a node."""
    if isinstance(value, Value):
        return value.node
    if isinstance(value, (list, tuple)):
        return tuple(map(_argument, value))
    if not isinstance(value, _CONSTANTS):
        raise Refusal(f"its forward uses a {type(value).__name__} that is neither its input nor made of it")
    return int(value) if isinstance(value, Size) else value


def _same(name: str, x: Value, arguments: tuple) -> bool:
    """Whether the result has the values of x."""
    if name in ("mul", "div"):
        return any(type(c) in (int, float) and c == 1 for c in arguments[name == "div" :])
    return name == "to" and arguments[1] is x.dtype


# Functions of each element, of which formulas consist, and the activations that formulas may be.
# No exp: where it overflows, a formula is NaN, or its gradient is, which those of the activation are not.
_POINTWISE = ("add", "sub", "mul", "div", "neg", "pow", "square", "sqrt", "erf", "sigmoid", "tanh", "relu")
_FORMULAS = {
    "silu": ("silu",), "gelu": ("gelu", "none"), "gelu_tanh": ("gelu", "tanh"), "sigmoid": ("sigmoid",),
    "quick_gelu": ("quick_gelu",), "relu_squared": ("relu_squared",),
}  # fmt: skip


def name_formulas(of: fx.Graph) -> bool:
    """Replaces formulas of one value, such as `x * sigmoid(x)`, by the activation that they compute; whether there are
    any. Their factors may stand anywhere in a product. They are known by their numbers, so in any spelling."""
    at = torch.linspace(-9.0, 9.0, 181, dtype=torch.float64)
    wanted = {f: TARGETS[call](at, *more) for f, (call, *more) in _FORMULAS.items()}
    count = 0
    for node in reversed(list(of.nodes)):
        if name_of(node) not in _POINTWISE or not node.users:
            continue
        constant, factors = _factors(node)
        for x in dict.fromkeys(each for factor, _ in factors for each in _above(factor)):
            values = {factor: _evaluated(factor, x, at) for factor, _ in factors}
            own = [pair for pair in factors if values[pair[0]] is not None]
            rest = [pair for pair in factors if values[pair[0]] is None]
            product = functools.reduce(
                operator.mul, (values[x] ** power for x, power in own), torch.full_like(at, constant)
            )
            f = next((f for f, y in wanted.items() if torch.allclose(product, y, rtol=1e-9, atol=1e-11)), None)
            named = len(own) == 1 and name_of(own[0][0]) == (f and _FORMULAS[f][0])
            if f is None or named or any(power < 0 for _, power in rest):
                continue
            with of.inserting_before(node):
                y = of.call_function(TARGETS[_FORMULAS[f][0]], (x, *_FORMULAS[f][1:]))
                y.meta |= {"formula": f, "shape": x.meta["shape"]}
                for factor, _ in rest:
                    y = of.call_function(operator.mul, (y, factor))
            y.meta, count = {**node.meta, **y.meta}, count + 1
            node.replace_all_uses_with(y)
            break
    for node in reversed(list(of.nodes)):
        if node.op == "call_function" and not node.users:
            of.erase_node(node)
    return count > 0


def _factors(node, power=1):
    """(constant, [(factor, 1 or -1)]) of a product."""
    constant, found = 1.0, []
    if not isinstance(node, fx.Node):
        return float(node) ** power, found
    inner = name_of(node) in ("mul", "div") and (power == 1 or len(node.users) == 1)
    if not inner:
        return constant, [(node, power)]
    for number, each in enumerate(node.args):
        sign = -power if number and name_of(node) == "div" else power
        alone = not isinstance(each, fx.Node) or len(each.users) == 1
        c, more = _factors(each, sign) if alone else (1.0, [(each, sign)])
        constant, found = constant * c, found + more
    return constant, found


def _above(node, depth=8):
    """The nodes that a formula may be of: those from which a node is computed element by element, and itself."""
    yield node
    if depth and name_of(node) in _POINTWISE:
        for each in node.all_input_nodes:
            yield from _above(each, depth - 1)


def _evaluated(node, x, at):
    """A node's numbers where x has the numbers `at`, or None if it needs more than x."""
    if node is x or not isinstance(node, fx.Node):
        return at if node is x else node
    if name_of(node) not in _POINTWISE:
        return None
    given = [_evaluated(each, x, at) for each in node.args]
    return None if any(each is None for each in given) else torch.as_tensor(TARGETS[name_of(node)](*given))


def follow(first: fx.Graph, second: fx.Graph) -> None:
    """Writes `as_type(a, x0)` for casts to the input's dtype, which are those that differ between traces of one forward
    in two dtypes. Raises Refusal if more differs."""
    for a, b in zip(first.nodes, second.nodes, strict=False):
        if name_of(a) == name_of(b) == "to" and a.args[1] is not b.args[1]:
            for node in (a, b):
                node.target, node.args = (
                    as_type,
                    (node.args[0], next(n for n in node.graph.nodes if n.op == "placeholder")),
                )
    if str(first) != str(second):
        raise Refusal("its forward depends on the dtype of its input")


@dataclass(frozen=True)
class Leaf:
    """The forward of a part's stand-in. In a trace it is a node; on numbers it mixes a row in a way of its own, so that
    its position matters. shape: of the result, by that of its input."""

    name: str
    number: int
    identity: bool
    shape: Callable

    def __call__(self, *args, **kwargs):
        if len(args) != 1 or kwargs or not isinstance(args[0], torch.Tensor):
            raise Refusal(f"its forward calls {self.name} with more than a tensor")
        (x,) = args
        if self.identity:
            return x
        if isinstance(x, Value):
            return x.trace.part(self.name, x, self.shape)
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():  # only the forward is watched
            return self._mixed(x, self.shape(tuple(x.shape)))

    def _mixed(self, x, shape):
        if not x.numel():
            return x.new_zeros(shape)
        y = x * _numbers(x.shape[-1], self.number, 0, x.dtype) + x.roll(self.number, -1)
        y = y if len(shape) == y.dim() else y.reshape(-1)
        for dim, size in enumerate(shape if len(shape) == y.dim() else (math.prod(shape),)):
            if size != y.shape[dim]:
                factors = _numbers(size, self.number, y.shape[dim], x.dtype)
                places = torch.arange(size) * (2 * self.number + 5) + self.number
                y = y.index_select(dim, places % y.shape[dim]) * factors.view(-1, *(1,) * (y.dim() - dim - 1))
        return y.view(shape)


@functools.lru_cache(maxsize=256)
def _numbers(size: int, number: int, among: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.arange(size, dtype=torch.float64) * (2 * number + 5) + 3 * number + among).cos().to(dtype)


def stand_in(part, name, number, kind, training, notes, dtype, trace=None, strict=True):
    """A clone of a part whose forward is a `Leaf`. dtype: of its parameters, which have no numbers in a trace."""
    leaf = Leaf(name, number, kind == "identity", functools.partial(shape_of, part, kind, strict=strict))
    cls = original(type(part)) or type(part)
    parameters = stand_ins(part, f"{name}.", dtype, trace)
    return probe.clone(part, notes.of_part(name, part), training, parameters, changed={"forward": leaf}, cls=cls)


def stand_ins(module, prefix, dtype, trace=None) -> dict:
    """Parameters like those of a module, with small random numbers, or none in a trace."""
    parameters = dict(module._parameters)
    for own, p in parameters.items():
        if p is not None and trace is not None:
            parameters[own] = trace.parameter(prefix + own, tuple(p.shape))
        elif p is not None:
            # A part's matrix is not read, so one number will do.
            drawn = torch.randn(p.shape if p.dim() < 2 or not prefix else ()).to(dtype)
            parameters[own] = nn.Parameter(drawn.expand(p.shape))
    return parameters
