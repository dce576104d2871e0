"""Linear maps that keep a recipe of their input instead of the input.

    y = x W^T + b    (`Linear`)          y = x W + b    (`Conv1D` of transformers)

The products are torch's own, on the operands and in the layouts that torch uses. Only what is kept for backward
differs: if the input has a recipe (hfnn/core/node.py), its sources are kept instead. Under autocast the input is cast
once for all consumers, and the weight's cast is made again instead of kept. With recompute=True the output has a
recipe, too: its consumers keep nothing, and the product runs again in backward.

Gradients are bitwise equal to torch's, except those of float32 tensors under autocast on a GPU, for inputs from
`FLOORS` on. There torch rounds each product to 16 bits, casts it to float32, and adds it to the products of the same
input. Here a product has float32 results and is added to the sum directly, and the sum for a bias' gradient is a
product with a row of ones. This gives fewer roundings, and 5 to 10% less time for a captured step
(docs/notes/models.md). exact=True keeps torch's order.
"""

import torch
from torch import Tensor, nn

from hfnn.core import native
from hfnn.core.context import compiling
from hfnn.core.kernel import WORTH_ELEMENTS, Op

_linear_of_torch = nn.functional.linear


def reference(x, weight, bias=None):
    """The definition, in the dtype of x."""
    y = x @ weight.t()
    return y if bias is None else y + bias


def sample(case, dtype, device, generator=None):
    """Arguments of `linear` for x of shape `case[:-1]`; the last entry of a case is the number of outputs."""
    *shape, outputs = case
    x, weight, bias = (torch.randn(s, generator=generator) for s in (shape, (outputs, shape[-1]), (outputs,)))
    return tuple(t.to(dtype).to(device) for t in (x, weight, bias)), {}


# No own kernels: the products are torch's. `convert` and the tests still find the room here.
OP = Op("linear", reference, _linear_of_torch, kernels=(), sample=sample, cases=((3, 5, 64, 32), (7, 16, 1)))


# Under autocast, by preference: the smallest input for which dropping the casts of input and weight is worth host time.
FLOORS = {"auto": WORTH_ELEMENTS, "memory": 0, "speed": float("inf")}


def linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    recompute: bool = False,
    prefer: str = "auto",
    exact: bool = False,
) -> Tensor:
    """`torch.nn.functional.linear`, which keeps a recipe of its input if there is one. Raises what torch raises.

    Args:
        input: (*, in).
        weight: (out, in).
        bias: (out,) or None.
        recompute: Whether consumers keep nothing of the result, which backward then computes again.
        prefer: "auto", "memory" or "speed", as in `hfnn.convert`: from which size casts are not kept under autocast.
        exact: Whether gradients are bitwise equal to torch's also on a GPU under autocast.

    >>> hfnn.functional.linear(torch.tensor([1.0, 2.0]), torch.tensor([[3.0, 4.0]]))
    tensor([11.])
    """
    # If there is nothing to gain, torch's op runs in this line.
    y = None if compiling() else _native(input, weight, bias, recompute, prefer, False, exact, True, False)
    return _linear_of_torch(input, weight, bias) if y is None or y is NotImplemented else y


_native = native.call("linear", FLOORS)


def is_torchs(input, recompute: bool, prefer: str, casts: bool) -> bool:
    """Whether torch's own op keeps as little of this input, by the fastest check; False if it does not tell."""
    return _native(input, None, None, recompute, prefer, False, False, False, casts) is None


def keeping_less(input, weight, bias, recompute=False, prefer="auto", columns=False, exact=False, casts=False):
    """`linear`, or None if the module's own forward must run. columns: False, or, for a weight stored as (in, out), its
    `out`; then the ops of transformers' Conv1D run here, too. casts: whether the module casts weight and bias to the
    input's dtype, as autocast does."""
    whole = columns is not False
    y = None if compiling() else _native(input, weight, bias, recompute, prefer, columns, exact, whole, casts)
    return None if y is NotImplemented else y


class Linear(nn.Linear):
    """`torch.nn.Linear`: the same arguments, defaults and state dict. `convert` sets `prefer`, `recompute`, `exact`.

    Args:
        in_features: Size of the last dimension of the input.
        out_features: Size of the last dimension of the result.
        bias: Whether there is a bias.
        device: Of the parameters.
        dtype: Of the parameters.
    """

    prefer, recompute, exact = "auto", False, False

    def forward(self, input: Tensor) -> Tensor:
        recompute, prefer, exact = self.recompute, self.prefer, self.exact
        if not compiling():
            own, parameters = self.__dict__, self._parameters
            if "weight" in parameters and "bias" in parameters and "weight" not in own and "bias" not in own:
                weight, bias = parameters["weight"], parameters["bias"]  # without Module.__getattr__
            else:  # parametrised or pruned, say
                weight, bias = self.weight, self.bias
            # As in `linear`, without the call.
            y = _native(input, weight, bias, recompute, prefer, False, exact, True, False)
            if y is not None and y is not NotImplemented:
                return y
        return linear(input, self.weight, self.bias, recompute=recompute, prefer=prefer, exact=exact)


OP.modules[nn.Linear] = Linear
