"""Recurrent layers that keep only the states between segments of time steps.

    y_t, s_t = cell(x_t, s_(t-1), weights),    t = 1 ... T

torch's own kernels run, cuDNN's on a GPU, one layer and direction after another, in segments of about sqrt(T) steps.
The state before each segment is kept. Backward runs the segments again, from the last to the first, each with autograd.
So the layer's input and sqrt(T) states are kept. oneDNN keeps 17 tensors of y's size for an LSTM; torch's own steps
keep 8 for an LSTM or a GRU and 2 for an RNN. Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016; for
recurrent networks Gruslys et al., "Memory-Efficient Backpropagation Through Time", NIPS 2016.

Forward runs twice, so torch's own call is faster, and segments are only used with prefer="memory"
(docs/notes/models.md). Dropout between layers draws the same numbers as torch's and keeps one bit per element. cuDNN
draws its own numbers, so there such layers are left to torch.

Names end in their shape: T steps, B sequences, I inputs, H size of a state.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from hfnn.core import bits, flops
from hfnn.core.context import autocasting, compiling, context, on_gpu
from hfnn.core.kernel import Op, forced, log_once
from hfnn.core.node import Function, double_backward, take, wanted

CALLS = {"LSTM": torch.lstm, "GRU": torch.gru, "RNN_TANH": torch.rnn_tanh, "RNN_RELU": torch.rnn_relu}
_CUDNN_MODES = {"RNN_RELU": 0, "RNN_TANH": 1, "LSTM": 2, "GRU": 3}


@dataclass(frozen=True)
class Layer:
    """How a layer runs in one direction."""

    mode: str
    bias: bool
    training: bool
    hidden: int
    projected: int
    reverse: bool
    autocast: tuple  # arguments that restore the state of forward

    def run(self, x_TBI, states, weights):
        """(y, *final states), with time in the layer's own order. States are (1, B, H)."""
        given = list(states) if self.mode == "LSTM" else states[0]
        return CALLS[self.mode](x_TBI, given, weights, self.bias, 1, 0.0, self.training, False, False)

    def segments(self, steps: int) -> list[slice]:
        """Segments of about sqrt(steps), in the layer's own order."""
        length = math.isqrt(steps - 1) + 1
        found = [slice(first, min(first + length, steps)) for first in range(0, steps, length)]
        return found[::-1] if self.reverse else found

    def as_forward(self):
        """Autocast as in forward; gradients are computed in the autocast state of backward."""
        return torch.autocast(*self.autocast, cache_enabled=False)

    def seen(self, t):
        """Steps in the layer's own order, and back."""
        return t.flip(0) if self.reverse else t

    def leaves(self, weights, x, needs) -> list:
        """The weights as leaves of a graph, of which autocast caches no cast. needs: which need a gradient.

        cuDNN needs them contiguous in one buffer. A module's weights are, but those of one layer do not begin at its
        start.
        """
        if not x.is_cuda or not torch.backends.cudnn.is_acceptable(x):
            return [w.detach().requires_grad_(need) for w, need in zip(weights, needs, strict=True)]
        copies = [w.detach().clone() for w in weights]
        each = (4 if self.bias else 2) + (self.projected > 0)
        with torch.no_grad(), torch.cuda.device_of(x):
            torch._cudnn_rnn_flatten_weight(
                copies, each, x.shape[-1], _CUDNN_MODES[self.mode], self.hidden, self.projected, 1, False, False
            )
        return [w.requires_grad_(need) for w, need in zip(copies, needs, strict=True)]


class _RNN(Function):
    """(y, *final states) of one layer in one direction; states (1, B, H)."""

    @staticmethod
    def forward(ctx, x, layer, count, *states_and_weights):
        states, weights = states_and_weights[:count], states_and_weights[count:]
        leaves, now, between, y = layer.leaves(weights, x, (False,) * len(weights)), states, [], None
        segments = layer.segments(x.shape[0])
        for part in segments:
            y_part, *now = layer.run(layer.seen(x[part]), now, leaves)
            if len(segments) == 1:
                y = layer.seen(y_part)
                break
            if y is None:
                y = y_part.new_empty(x.shape[0], *y_part.shape[1:])
            y[part] = layer.seen(y_part)
            between.append(now)
        bounds = [torch.cat(each) for each in zip(*between[:-1], strict=True)]
        ctx.recipe = take(x)
        ctx.save_for_backward(x if ctx.recipe is None else None, *weights, *states, *bounds)
        ctx.set_materialize_grads(False)
        ctx.layer, ctx.counts = layer, (len(weights), count)
        return (y, *now)

    @staticmethod
    def backward(ctx, *grads):
        layer, (weights, count) = ctx.layer, ctx.counts
        try:
            x, *rest = ctx.saved_tensors
            x = x if ctx.recipe is None else ctx.recipe.tensor()
        except RuntimeError as error:
            raise _explained(error) from None
        weights, states, bounds = rest[:weights], rest[weights : weights + count], rest[weights + count :]
        needs = ctx.needs_input_grad[0], *ctx.needs_input_grad[3:]
        # Of a backward for some tensors only, as in torch.
        needs = [need and wanted(node) for need, (node, _) in zip(needs, ctx.next_functions, strict=True)]
        if all(dy is None for dy in grads):
            return (None,) * len(ctx.needs_input_grad)
        again = _differentiable if torch.is_grad_enabled() else _by_segments
        dx, *others = again(layer, x, states, bounds, weights, needs, grads)
        return dx, None, None, *others


def _explained(error):
    """torch's error for a tensor that was written to, with the reason why torch's own layer may not have raised it."""
    if "modified by an inplace operation" not in str(error):
        return error
    return RuntimeError(
        f"{error}\nhfnn's recurrent layers run again in backward, of all their weights: call backward before they are "
        "written to (an optimizer's step, load_state_dict), or leave this module to torch with "
        "hfnn.convert(model, skip=...)."
    )


def _by_segments(layer, x, states, bounds, weights, needs, grads):
    """Gradients of x, states and weights."""
    dy, *dstates = grads
    dx = x.new_empty(x.shape) if needs[0] else None  # contiguous, as in torch
    weighs = needs[1 + len(states) :]
    leaves, dweights = layer.leaves(weights, x, weighs), [None] * len(weights)
    segments = layer.segments(x.shape[0])
    before = [states, *zip(*(each.split(1) for each in bounds), strict=True)]
    for part, begin in zip(segments[::-1], before[::-1], strict=True):
        x_part = layer.seen(x[part]).detach().requires_grad_(needs[0])
        wants = needs[1 : 1 + len(begin)] if begin is states else (True,) * len(begin)
        begin = [t.detach().requires_grad_(want) for t, want in zip(begin, wants, strict=True)]
        with torch.enable_grad(), layer.as_forward(), flops.uncounted(profiled=True):
            results = layer.run(x_part, begin, leaves)
        given = [None if dy is None else layer.seen(dy[part]), *dstates]
        outputs, given = zip(*((y, d) for y, d in zip(results, given, strict=True) if d is not None), strict=True)
        inputs = [t for t in (x_part, *begin, *leaves) if t.requires_grad]
        found = iter(torch.autograd.grad(outputs, inputs, given, allow_unused=True) if inputs else ())
        if needs[0]:
            dx[part] = layer.seen(next(found))
        dstates = [next(found) if want else None for want in wants]
        dweights = [_sum(total, next(found)) if need else None for total, need in zip(dweights, weighs, strict=True)]
        del results, outputs
    return dx, *(d if need else None for d, need in zip((*dstates, *dweights), needs[1:], strict=True))


def _sum(total, part):
    if total is None or part is None:
        return part if total is None else total
    return total.add_(part)


def _differentiable(layer, x, states, bounds, weights, needs, grads):
    """The same gradients, with a graph: torch's own call for all steps, differentiated."""

    def formula(x, *rest):
        with layer.as_forward():
            results = layer.run(layer.seen(x), rest[: len(states)], list(rest[len(states) :]))
        results = layer.seen(results[0]), *results[1:]
        return [y for y, dy in zip(results, grads, strict=True) if dy is not None]

    given = [dy for dy in grads if dy is not None]
    return double_backward(formula, (x, *states, *weights), needs, given)


class _Dropout(Function):
    """torch's dropout with the same numbers; one bit per element is kept."""

    @staticmethod
    def forward(ctx, x, p):
        ctx.set_materialize_grads(False)
        noise = torch.empty_like(x).bernoulli_(1 - p)
        ctx.save_for_backward(bits.pack(noise != 0))
        ctx.p = p
        return x * noise.div_(1 - p)

    @staticmethod
    def backward(ctx, dy):
        (packed,) = ctx.saved_tensors
        return dy * bits.unpack(packed, dy.shape, dtype=torch.bool).to(dy.dtype).div_(1 - ctx.p), None


def _refusal(module, x, hx) -> str | None:
    """Why torch's own call must run, or None."""
    tensors = (x, *hx, *module._flat_weights)
    why = context(*tensors)
    if why is not None or flops.watched():
        return why or "a dispatch mode sees every op"
    if any(t is None or t.device != x.device or t.dtype not in (x.dtype, torch.float32) for t in tensors):
        return "takes states and weights on the input's device and of its dtype"
    if any(t.dtype is not x.dtype for t in tensors) and not autocasting(x):
        return "takes states and weights of the input's dtype"
    if not all(w.requires_grad for w in module._flat_weights):
        return "takes weights that all want gradients"
    if on_gpu(x) and module.dropout and module.training and module.num_layers > 1:
        return "cuDNN draws numbers of its own for dropout between layers"
    dtype = torch.get_autocast_dtype("cpu") if autocasting(x) else x.dtype
    if module.mode == "LSTM" and x.is_cpu and torch._C._get_mkldnn_enabled() and not _onednn_has(dtype):
        return "one direction of an LSTM raises in oneDNN, on this processor and in this dtype"
    if module.mode == "LSTM" and x.is_cpu and torch._C._get_mkldnn_enabled() and x.dtype not in (dtype, torch.float32):
        return "in oneDNN, one layer in two 16-bit dtypes gives another dtype than several"
    if module.mode.startswith("RNN") and x.shape[int(module.batch_first)] == 1:
        return "of one step, torch keeps as little"
    if not x.numel() or not (x.is_cpu or x.is_cuda) or x.stride(-1) != 1:  # torch's gradient is in columns, as x is
        return "takes inputs with elements, on the CPU or on a GPU, whose last dimension is dense"
    return None


@functools.cache
def _onednn_has(dtype: torch.dtype) -> bool:
    """Whether oneDNN has an LSTM of this dtype here. torch uses it for a one-direction LSTM without checking."""
    x, h, c, w, v = (torch.zeros(1, n, 1, device="cpu") for n in (1, 1, 1, 4, 4))
    with torch.autocast("cpu", dtype, dtype.itemsize == 2):
        try:  # oneDNN's flags say yes on more processors
            return bool(torch.lstm(x, (h, c), [w[0], v[0]], False, 1, 0.0, True, False, False))
        except RuntimeError:
            return False


def _layers(module, x_TBI, hx) -> tuple:
    """(y, *states) of all layers of a module that `_refusal` accepted."""
    device = x_TBI.device.type
    autocast = device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
    directions, x, ends = 1 + module.bidirectional, x_TBI, []
    weights = iter(module._flat_weights)
    each = len(module._flat_weights) // (directions * module.num_layers)
    for number in range(module.num_layers):
        if number and module.dropout and module.training:
            x = _Dropout.apply(x, module.dropout) if module.dropout < 1 else nn.functional.dropout(x, module.dropout)
        results = []
        for reverse in (False, True)[:directions]:
            layer = Layer(
                module.mode, module.bias, module.training, module.hidden_size, module.proj_size, reverse, autocast
            )
            states = [t[len(ends) : len(ends) + 1] for t in hx]
            y, *end = _RNN.apply(x, layer, len(states), *states, *(next(weights) for _ in range(each)))
            results.append(y)
            ends.append(end)
        x = results[0] if directions == 1 else torch.cat(results, -1)
    return x, *(torch.cat(each) for each in zip(*ends, strict=True))


def _states(module, x, hx, dims: int) -> tuple | None:
    """The initial states, (layers x directions, B, H) each; None if hx has no such tensors."""
    directions, kinds = (1 + module.bidirectional) * module.num_layers, 1 + (module.mode == "LSTM")
    if hx is None:
        widths = (module.proj_size or module.hidden_size, module.hidden_size)[:kinds]
        return tuple(x.new_zeros(directions, x.shape[0 if module.batch_first else 1], n) for n in widths)
    given = hx if kinds == 2 else (hx,)
    if type(given) not in (tuple, list) or len(given) != kinds:
        return None
    if any(not isinstance(t, torch.Tensor) or t.dim() != dims for t in given):
        return None
    return tuple(t.unsqueeze(1) if dims == 2 else t for t in given)


class _Module:
    """Common base of the three modules. `prefer` is set by `hfnn.convert`."""

    prefer = "auto"

    def forward(
        self, input: Tensor | PackedSequence, hx: Tensor | tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Any]:
        # torch handles everything that is not requested, not supported or wrong, and raises the errors.
        stock = {"LSTM": nn.LSTM, "GRU": nn.GRU}.get(self.mode, nn.RNN).forward
        if self.prefer != "memory" or compiling() or not torch.is_grad_enabled() or forced() == "torch":
            return stock(self, input, hx)
        if isinstance(input, PackedSequence) or not isinstance(input, torch.Tensor) or input.dim() not in (2, 3):
            log_once(OPS[self.mode], "takes tensors of 2 or 3 dimensions, no packed sequences", torch.float32)
            return stock(self, input, hx)
        self._update_flat_weights()
        at = 0 if self.batch_first else 1  # dimension of the batch
        x = input.unsqueeze(at) if input.dim() == 2 else input
        states = _states(self, x, hx, input.dim())
        if states is None:
            return stock(self, input, hx)
        self.check_forward_args(x, states if self.mode == "LSTM" else states[0], None)
        why = _refusal(self, x, states)
        if why is not None:
            log_once(OPS[self.mode], why, x.dtype)
            return stock(self, input, hx)
        # Contiguous, as torch keeps it. A batch-first input is copied, so later writes to it have no effect.
        y, *states = _layers(self, (x.transpose(0, 1) if self.batch_first else x).contiguous(), states)
        if self.batch_first:  # as in torch, where only an LSTM's result is a view
            y = y.transpose(0, 1) if self.mode == "LSTM" else y.transpose_(0, 1)
        if input.dim() == 2:
            y, states = y.squeeze(at), [t.squeeze(1) for t in states]
        return y, self.permute_hidden(tuple(states) if self.mode == "LSTM" else states[0], None)


class LSTM(_Module, nn.LSTM):
    """`torch.nn.LSTM`: the same arguments, defaults and state dict.

    With prefer="memory" it keeps its input and about sqrt(T) states for backward. Packed sequences, and dropout between
    layers on a GPU, are left to torch. Raises what torch raises.

    >>> y, (h, c) = hfnn.LSTM(4, 8, batch_first=True)(torch.zeros(2, 5, 4))
    >>> y.shape, h.shape
    (torch.Size([2, 5, 8]), torch.Size([1, 2, 8]))
    """


class GRU(_Module, nn.GRU):
    """`torch.nn.GRU`; otherwise as `LSTM`."""


class RNN(_Module, nn.RNN):
    """`torch.nn.RNN`; otherwise as `LSTM`."""


def _op(name, call, module, room) -> Op:
    """No own kernels: torch's run. `convert` finds the module here; the function is torch's."""
    op = Op(name, call, call, (), lambda *_: None, ((7, 3, 5),), recipe=False, like_input=False)
    op.modules[module] = room
    return op


ALL = (
    _op("lstm", torch.lstm, nn.LSTM, LSTM), _op("gru", torch.gru, nn.GRU, GRU), _op("rnn", torch.rnn_tanh, nn.RNN, RNN)
)  # fmt: skip
OPS = dict(zip(("LSTM", "GRU", "RNN_TANH", "RNN_RELU"), (*ALL, ALL[-1]), strict=True))
