"""Defects planted in hfnn, which the fuzzer of `hfnn.convert` must find: context managers by name."""

import contextlib
import functools
import importlib

import torch
from torch import nn

import hfnn
from hfnn.core import kernel, native, parts
from hfnn.core.holder import Holder
from hfnn.deferred import product
from hfnn.ops import batch_norm, embedding, group_norm, layer_norm, rnn, table
from hfnn.ops.attention import products

convert = importlib.import_module("hfnn.convert")  # the attribute of hfnn is the function
FAULTS = {}


def _fault(name):
    def add(function):
        FAULTS[name] = contextlib.contextmanager(function)
        return function

    return add


@contextlib.contextmanager
def _replaced(owner, name, make):
    """Within the block, `owner.name` is `make(original)`."""
    before = vars(owner)[name]
    called = before.__func__ if isinstance(before, staticmethod) else before
    setattr(owner, name, type(before)(make(called)) if isinstance(before, staticmethod) else make(called))
    try:
        yield
    finally:
        setattr(owner, name, before)


def _plant(name, owner, attribute, make):
    FAULTS[name] = lambda: _replaced(owner, attribute, make)


# Of nodes, by their numbers in csrc/autograd/room.h. Builds for users have none.
IN_NODES = {
    "sources not compared": 1,
    "recipes without a bound": 2,
    "hooks of saved tensors not compared": 3,
    "results keep their recipe after backward": 4,
    "a chain's first source for its tensor": 5,
    "a rebuilt tensor not widened": 6,
    "a cast kept a call too long": 7,
    "the gradient of the wrong input": 8,
    "the incoming gradient written to": 9,
    "a tensor without memory kept by a node": 10,
    "state of a retained graph cleared": 11,
    "the flags of a sum turned round": 12,
    "results kept beside their recipes": 13,
    "sources saved past autograd": 14,
    "what nodes save kept for ever": 15,
    "copies of parameters a little wrong": 16,
    "a described node without the gradient of its last input": 17,
}


@contextlib.contextmanager
def _in_nodes(number):
    native.extension.plant(number)
    try:
        yield
    finally:
        native.extension.plant(0)


if hasattr(native.extension, "plant"):
    FAULTS |= {name: functools.partial(_in_nodes, number) for name, number in IN_NODES.items()}

FAULTS["attention's products not counted in backward"] = lambda: _replaced(
    products.Stock, "backward", lambda backward: lambda *given: None
)


@_fault("rebuilt a little wrong")
def _rebuilt_wrong():
    if native.extension is not None:
        native.extension.watch(lambda y: y.mul_(1.03125))
    try:
        yield
    finally:
        if native.extension is not None:
            native.extension.watch(None)


@_fault("a converted module kept by its last call")
def _module_kept():
    last = []

    def make(forward):
        def run(self, input):
            last.append(self)
            return forward(self, input)

        return run

    with _replaced(hfnn.LayerNorm, "forward", make):
        yield


# Autograd.
_plant(
    "second derivatives cut off",
    layer_norm,
    "double_backward",
    lambda double: lambda *args: tuple(None if g is None else g.detach() for g in double(*args)),
)


def _counted_twice(arguments):
    def run(module):
        arguments(module)
        return arguments(module)

    return run


_plant("a batch counted twice", batch_norm, "arguments", _counted_twice)


def _of_other_samples(compute):
    def run(*args):
        y, mean, rstd = compute(*args)
        return y, mean.roll(1, 0), rstd.roll(1, 0)

    return run


_plant("a group norm keeps statistics of other samples", group_norm, "_compute", _of_other_samples)
_plant(
    "segments of time begin at zero in backward",
    rnn,
    "_by_segments",
    lambda run: lambda layer, x, states, bounds, *rest: run(layer, x, states, [b * 0 for b in bounds], *rest),
)


def _forward_as(cls, change):
    return lambda: _replaced(cls, "forward", lambda forward: lambda self, *args: change(forward, self, *args))


@contextlib.contextmanager
def _convolutions(change):
    with contextlib.ExitStack() as stack:
        for cls in (hfnn.Conv1d, hfnn.Conv2d, hfnn.Conv3d):
            stack.enter_context(_forward_as(cls, change)())
        yield


FAULTS |= {
    "strides lost": _forward_as(hfnn.GELU, lambda forward, self, x: forward(self, x).contiguous()),
    "a reserved attribute read at convert": _forward_as(
        hfnn.LayerNorm,
        lambda forward, self, x: hfnn.functional.layer_norm(
            x, self.normalized_shape, self.weight, self.bias, 1e-5, prefer=self.prefer
        ),
    ),
    "a group norm's eps forgotten": _forward_as(
        hfnn.GroupNorm,
        lambda forward, self, x: hfnn.functional.group_norm(
            x, self.num_groups, self.weight, self.bias, prefer=self.prefer
        ),
    ),
    "autocast ignored": _forward_as(
        hfnn.Linear, lambda forward, self, x: _without_autocast(forward, self, x.to(self.weight.dtype))
    ),
    "in place forgotten": _forward_as(hfnn.ReLU, lambda forward, self, x: nn.functional.relu(x)),
    "an input written to": _forward_as(hfnn.GELU, lambda forward, self, x: (forward(self, x), x.detach().add_(1))[0]),
    "padding_idx forgotten": _forward_as(hfnn.Embedding, lambda forward, self, x: embedding.embedding(x, self.weight)),
    "eval forgotten": _forward_as(
        hfnn.Dropout, lambda forward, self, x: nn.functional.dropout(x, self.p, True, self.inplace)
    ),
    "a bias forgotten where the weight is frozen": _forward_as(
        hfnn.Linear,
        lambda forward, self, x: (
            forward(self, x) if self.weight.requires_grad else nn.functional.linear(x, self.weight)
        ),
    ),
    "no gradient of a convolution's bias": lambda: _convolutions(lambda forward, self, x: _bias_detached(self, x)),
    "a convolution's layout lost": lambda: _convolutions(
        lambda forward, self, x: forward(self, x).contiguous() if x.dim() == 4 else forward(self, x)
    ),
    "a convolution's groups of another size": lambda: _convolutions(lambda forward, self, x: _ungrouped(self, x)),
    "a convolution's padding of zeros alone": lambda: _convolutions(
        lambda forward, self, x: getattr(hfnn.functional, f"conv{self.weight.dim() - 2}d")(
            x, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups, prefer=self.prefer
        ),
    ),
    "a loss's mean over rows alone": _forward_as(
        hfnn.MSELoss, lambda forward, self, x, target: forward(self, x, target) * max(1, x.shape[-1])
    ),
}


def _bias_detached(self, x):
    bias = None if self.bias is None else self.bias.detach()
    return self._conv_forward(x, self.weight, bias)


def _ungrouped(self, x):
    """Each group sees the channels of the previous one."""
    return self._conv_forward(x.roll(x.shape[1] // self.groups, 1) if self.groups > 1 else x, self.weight, self.bias)


def _without_autocast(forward, self, x):
    with torch.autocast("cpu", enabled=False):
        return forward(self, x)


_plant("functorch not asked for", kernel, "context", lambda context: lambda *tensors: None)
_plant("the dtype of autocast's results ignored", kernel.Op, "out_dtype", lambda _: lambda self, x: x.dtype)


_plant("unread logits keep nothing", product.Product, "keep_after_backward", lambda keep: lambda self: None)
_plant(
    "what flags depend on forgotten in second derivatives",
    batch_norm,
    "flat",
    lambda flat: lambda dx, link: dx,
)


# Constants, and tensors that are not plain.
def _in_float32(numbers):
    def run(op, *arguments):
        found = numbers(op, *arguments)
        return found if found is None else tuple(torch.tensor(n).item() if type(n) is float else n for n in found)

    return run


_plant("constants rounded to float32", table, "numbers", _in_float32)
_plant("a tool compares buffers as torch does", parts, "equal", lambda _: torch.equal)


# Convert.
@_fault("convert draws")
def _draws():
    with _replaced(convert, "_convert", lambda run: lambda *args: (torch.rand(1), run(*args))[1]):
        yield


def _unhooked(revert):
    def run(model):
        revert(model)
        for module in model.modules():
            module._forward_hooks.clear()

    return run


_plant("revert drops hooks", convert, "_revert", _unhooked)


_plant("what was proved is believed for ever", Holder, "still", lambda still: lambda self, module: True)
_plant("copies are in training", Holder, "__getstate__", lambda state: lambda self: {**state(self), "training": True})
_plant("copies compute with the original's parameters", Holder, "__deepcopy__", lambda copy: lambda self, memo: self)
