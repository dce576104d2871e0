"""No op's gradient stands in two languages: an op has a node in C++ (csrc/autograd) or a Function in Python."""

import contextlib
import inspect
import re
from pathlib import Path

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import hfnn
from hfnn import functional
from hfnn.core import native
from hfnn.core.node import Function
from hfnn.ops import OPS

pytestmark = pytest.mark.skipif(native.extension is None, reason="hfnn._autograd is not built")
SOURCES = Path(__file__).parents[1] / "csrc/autograd"
# Python Functions with the name of a C++ node, and why.
ALLOWED = {"hfnn.ops.rnn._Dropout": "dropout between the layers of an LSTM, of which torch draws the mask"}


class Calls(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class Ops(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


CONTEXTS = {
    "plain": contextlib.nullcontext,
    "fake": FakeTensorMode,
    "dispatch mode": Ops,
    "function mode": Calls,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}
LAYOUTS = {"dense": lambda x: x, "strided": lambda x: torch.stack([x, x], -1)[..., 0]}


def language(y) -> str | None:
    """The language of hfnn's node that made y."""
    y = y[0] if isinstance(y, tuple) else y
    node = y.grad_fn if isinstance(y, torch.Tensor) else None
    if getattr(type(node), "_forward_cls", type).__module__.startswith("hfnn."):
        return "Python"
    return "C++" if node is not None and native.extension.module(node) is not None else None


def given(args, mode):
    """The arguments of a sample, with gradients; fake ones in a FakeTensorMode."""
    for x in args:
        if isinstance(x, torch.Tensor):
            x = mode.from_tensor(x) if isinstance(mode, FakeTensorMode) else x
            yield x.detach().requires_grad_() if x.is_floating_point() else x
        else:
            yield x


def takes_preference(name) -> bool:
    return "prefer" in inspect.signature(getattr(functional, name, len)).parameters


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [name for name, op in OPS.items() if op.cases and takes_preference(name)])
def test_an_op_has_nodes_in_one_language(name):
    op, found = OPS[name], {}
    case = next(case for case in reversed(op.cases) if 0 not in case)
    for layout, place in LAYOUTS.items():
        for dtype in (torch.float32, torch.bfloat16):
            args, kwargs = op.sample(case, dtype, "cpu")
            args = [place(x) if isinstance(x, torch.Tensor) else x for x in args]
            for context, make in CONTEXTS.items():
                with make() as mode, contextlib.suppress(RuntimeError, NotImplementedError):
                    y = getattr(functional, name)(*given(args, mode), **kwargs, prefer="memory")
                    found[layout, dtype, context] = language(y)
                if found.get(("dense", torch.float32, "plain")) != "C++":
                    return  # in Python: `test_no_function_has_the_name_of_a_node`
    assert len(set(found.values()) - {None}) <= 1, found


def test_no_function_has_the_name_of_a_node():
    assert hfnn.ops
    nodes = set(re.findall(r'"(_\w+)Backward"', "".join(p.read_text() for p in SOURCES.glob("*.cpp"))))
    assert {"_LayerNorm", "_RMSNorm", "_Linear", "_BatchNorm", "_Dropout", "_DropoutAdd", "_Gated"} <= nodes
    functions = {f"{cls.__module__}.{cls.__name__}" for cls in Function.__subclasses__()}
    twice = {name for name in functions if name.rsplit(".", 1)[1] in nodes - {"_Piecewise"}}
    assert twice == set(ALLOWED)
