"""Feed-forward networks inside models: recognised by their parts, then proved numerically.

    y = down(f(gate(x)) * up(x))       Llama, Qwen2, Mistral, Gemma, T5 1.1; packed, (gate, up) = the halves of one
                                       product, in Phi3; without down, as GEGLU of diffusers
    y = fc2(f(fc1(x)))                 GPT-2, ViT, CLIP, Phi, timm

The parts are linear maps of any class (also LoRA's, quantised or sharded ones: they are called, not read), an
activation, and other one-input parts, mostly dropouts. Running the module's own `forward` on a small instance shows how
it combines them (traced.py). The result is then compared with the definition: output and gradients, to the last digits
in float64 and within rounding in float32 and bfloat16, in training and in eval mode.

A gated product gets a new forward: the parts are called as before, and hfnn's `gated` runs between them. The other form
needs no new forward, except for relu followed by a dropout. `settings` are the attributes that `convert` sets on the
parts.
"""

import itertools
from dataclasses import dataclass, replace

import torch
from torch import nn

from hfnn.core.context import is_bare, is_plain, transformed
from hfnn.core.kernel import forced
from hfnn.ops import OPS, relu_dropout
from hfnn.ops.gated import GATES, OP, gated
from hfnn.ops.mlp import MLP, GatedMLP
from hfnn.patterns import lookalike, traced
from hfnn.patterns.probe import Refusal
from hfnn.patterns.proof import EXACT, Differs, Match, Proofs, arguments, reason
from hfnn.patterns.subclass import FORWARDS, ROOMS, original
from hfnn.patterns.traced import Activation, Map, Other

# f -> the op named in the report.
PRODUCTS = {
    "silu": OPS["swiglu"],
    "gelu": OPS["geglu"],
    "gelu_tanh": OPS["geglu"],
    "relu": OPS["reglu"],
    "sigmoid": OPS["glu"],
    "quick_gelu": OP,
}
# Activations that lookalike.py has proved: (op, form) -> f.
FORMS = {("silu", ""): "silu", ("gelu", "erf form"): "gelu", ("gelu", "tanh form"): "gelu_tanh"}
TORCH = {nn.SiLU: "silu", nn.GELU: "gelu", nn.ReLU: "relu", nn.Sigmoid: "sigmoid"}
_EXACT = {ROOMS[torch_class]: torch_class for torch_class in TORCH}


@dataclass(frozen=True)
class FeedForward(Match):
    """How a module computes. f: of GATES; gated: f(gate) * up, else only f; first: the maps of x, (gate, up),
    (gate_up,) if packed, or (fc1,); down: the last map, or None; act: the activation's module, or None if the module's
    own code computes it; middle, last: modules called on the input and on the output of the last map; names: of all
    parts, in their order.
    """

    f: str
    gated: bool
    first: tuple[str, ...]
    down: str | None
    act: str | None
    middle: tuple[str, ...] = ()
    last: tuple[str, ...] = ()
    gate_first: bool = True
    names: tuple[str, ...] = ()

    @property
    def mixin(self):
        return Gated if self.gated else ReluDropout

    @property
    def op(self):
        return PRODUCTS[self.f] if self.gated else relu_dropout.OP

    def __str__(self) -> str:
        return f"hfnn {self.op.name}" + (f" ({self.f})" if self.op is OP else "") + f" of {', '.join(self.first)}"

    def compute(self, parts, x, product):
        """The definition, with `product(gate, up)` between the maps; up is None if there is one first map."""
        y = product(parts[self.first[0]](x), parts[self.first[1]](x) if len(self.first) == 2 else None)
        for name in self.middle:
            y = parts[name](y)
        if self.down is not None:
            y = parts[self.down](y)
        for name in self.last:
            y = parts[name](y)
        return y

    def exact(self, gate, up):
        """The ops between the maps, in plain torch."""
        if not self.gated:
            return GATES[self.f].reference(gate)
        if up is None:
            gate, up = gate.chunk(2, -1) if self.gate_first else reversed(gate.chunk(2, -1))
        return GATES[self.f].reference(gate) * up


class Gated:
    """Mixin for a gated network: its parts unchanged, with hfnn's product between them."""

    prefer = "auto"
    _hfnn_when = "while its activation carries no hooks, which would not be called"

    def _hfnn_small(self, args: tuple, kwargs: dict) -> bool:
        """Whether torch's own ops would compute the product between the maps, because it is small."""
        if len(args) != 1 or kwargs or type(args[0]) is not torch.Tensor or not args[0].dim() or forced() is not None:
            return False
        like, x = self._hfnn_like, args[0]
        width, size = getattr(self._modules.get(like.first[0]), "out_features", None), x.numel()
        if not size or width is None:
            return False
        return size // x.shape[-1] * width < like.op.floors[self.prefer][x.is_cuda]

    def forward(self, *args, **kwargs):
        like = self._hfnn_like
        if len(args) != 1 or kwargs or not is_plain(args[0]) or not _open(self, like):
            return super().forward(*args, **kwargs)
        f, gate_first, prefer = like.f, like.gate_first, self.prefer
        product = lambda gate, up: gated(gate, up, f, gate_first=gate_first, prefer=prefer)  # noqa: E731
        return like.compute(self._modules, args[0], product)


class ReluDropout:
    """Mixin for a network with relu followed by dropout: one op for both, which keeps what fc2 keeps."""

    prefer = "auto"
    _hfnn_when = "while its relu and its dropout carry no hooks, which would not be called"

    def forward(self, *args, **kwargs):
        like, parts = self._hfnn_like, self._modules
        if len(args) != 1 or kwargs or not is_plain(args[0]) or not _open(self, like):
            return super().forward(*args, **kwargs)
        drop = parts[like.middle[0]]
        if not is_bare(drop):
            return super().forward(*args, **kwargs)
        y = relu_dropout.relu_dropout(parts[like.first[0]](args[0]), drop.p, drop.training, prefer=self.prefer)
        y = parts[like.down](y)
        for name in like.last:
            y = parts[name](y)
        return y


def _open(module, like) -> bool:
    """Whether the parts are those of the proof, the activation may be computed without its module, and the class's own
    code need not change dtypes."""
    parts = module._modules
    if transformed() or tuple(parts) != like.names or None in parts.values():
        return False
    if like.act is not None and (not is_bare(parts[like.act]) or function_of(parts[like.act]) != like.f):
        return False
    if like.down is None:
        return True
    # T5 casts to the dtype of its last map if it differs. A map made of parts, as in LoRA, has no weight of its own.
    first, last = _dtype(parts[like.first[0]]), _dtype(parts[like.down])
    return first is last or first is None or last is None


def _dtype(part):
    weight = part._parameters.get("weight")
    return None if weight is None else weight.dtype


def recognise(module: nn.Module) -> Match | Refusal | None:
    """How to treat the module, or why it is left alone; None if it needs no new forward."""
    like = read(module)
    return like if not isinstance(like, Match) or like.gated or _drops_after_relu(module, like) else None


def _drops_after_relu(module, like) -> bool:
    if like.f != "relu" or like.act is None or like.down is None or len(like.middle) != 1:
        return False
    drop = module._modules[like.middle[0]]
    return isinstance(drop, nn.Dropout) and not drop.inplace and not module._modules[like.act].inplace


def is_own(module: nn.Module) -> bool:
    """Whether the module is one of hfnn's networks, for which torch has no class."""
    return isinstance(module, (MLP, GatedMLP))


def settings(module: nn.Module, recompute: str | None) -> dict[nn.Module, dict[str, object]]:
    """The attributes that `convert` sets on parts of the module, by part; empty if it is no such network.

    recompute="gemm": the results of the first maps are recomputed in backward. A relu whose result the next map keeps
    needs neither bits nor a recomputation, because that result is kept.
    """
    if is_own(module):
        if module.activation == "relu" and isinstance(module, MLP):
            return {}
        return {module._modules[name]: {"recompute": recompute == "gemm"} for name in module._hfnn_first}
    like = getattr(type(module), "_hfnn_like", None)
    like = like if isinstance(like, FeedForward) else read(module)
    parts = module._modules
    if isinstance(like, FeedForward) and tuple(parts) != like.names:  # changed after it was converted
        return {}
    if not isinstance(like, FeedForward):
        keeping = parts.values() if _has_pair(parts) else _before_products(module)
        return {part: {"keep": "output"} for part in keeping if isinstance(part, nn.ReLU)}
    if like.gated or (like.f != "relu" and like.act is not None):
        return {parts[name]: {"recompute": recompute == "gemm"} for name in like.first}
    return {parts[like.act]: {"keep": "output"}} if like.act is not None and not like.middle else {}


def _before_products(module) -> list[nn.Module]:
    """The parts of a sequence whose results a linear map or a convolution keeps."""
    parts = list(module._modules.values()) if type(module) is nn.Sequential else []
    keep = (nn.Linear, nn.modules.conv._ConvNd)
    pairs = itertools.pairwise(parts)
    return [part for part, after in pairs if isinstance(after, keep) and after.weight.requires_grad]


def _has_pair(parts) -> bool:
    """Whether the parts include a map and the map back, as in OPT's layers, which contain a network and more.

    A relu in the same module is probably between them. A guess is enough here, because it only affects memory.
    """
    shapes = [(part.in_features, part.out_features) for part in parts.values() if isinstance(part, nn.Linear)]
    return any(shape[::-1] in shapes and shape[0] < shape[1] for shape in shapes)


def read(module: nn.Module) -> FeedForward | Refusal | None:
    """How the module computes, or why it is no such network; None if it has other parts."""
    kinds = _kinds(module)
    if kinds is None:
        return None
    return _proofs.of(module, tuple(kinds.items()), lambda notes: _prove(module, notes, kinds))


_proofs = Proofs()


def _kinds(module) -> dict[str, Map | Activation | Other] | None:
    """The kind of each part, or None if the parts are not those of a feed-forward network."""
    parts = module._modules
    if type(module).__module__.startswith(("torch.", "hfnn.")) or not 1 <= len(parts) <= 8 or None in parts.values():
        return None
    if module._buffers or any(p is not None for p in module._parameters.values()):
        return None
    if arguments(type(module)) not in (0, 1):
        return None
    kinds = {name: _map(part) or _kind(part) for name, part in parts.items()}
    return None if None in kinds.values() or traced.widths(kinds) is None else kinds


def _map(part) -> Map | None:
    """A linear map by its widths: nn.Linear and classes with the same attributes, Conv1D of transformers."""
    shape = getattr(part, "in_features", None), getattr(part, "out_features", None)
    if type(part).__name__ == "Conv1D":
        shape = getattr(part, "nx", None), getattr(part, "nf", None)
    return Map(*shape, getattr(part, "bias", None) is not None) if all(type(n) is int for n in shape) else None


def _kind(part) -> Activation | Other | None:
    f = None if part._modules or part._parameters or part._buffers else function_of(part) or likeness(part)
    if f is not None:
        return Activation(f)
    return None if part._modules else Other()


def function_of(part) -> str | None:
    """Which of GATES a module is, by its class: torch's, one that inherits from it how it is called, or one proved by
    lookalike.py and swapped by `convert`."""
    cls = type(part)
    base = _EXACT.get(cls) or _base(part, cls)
    if base is None or isinstance(base, str):
        return base
    return {"none": "gelu", "tanh": "gelu_tanh"}.get(part.approximate) if base is nn.GELU else TORCH[base]


def _base(part, cls) -> type | str | None:
    """The class of TORCH that another class is called like, or the activation that was proved."""
    if cls.__call__ is not nn.Module.__call__:
        return None
    like = getattr(cls, "_hfnn_like", None)
    if like is not None:
        return _form(like) if part._hfnn_holds() else None
    cls = original(cls) or cls
    base = next((base for base in cls.__mro__ if base in TORCH), None)
    return base if base is not None and cls.forward in (FORWARDS[base][0], ROOMS[base].forward) else None


def likeness(part) -> str | None:
    """Which of GATES a module implements itself, before `convert` swaps it."""
    return _form(lookalike.recognise(part)) if type(part).__call__ is nn.Module.__call__ else None


def _form(like) -> str | None:
    if not isinstance(like, lookalike.ActivationLike):
        return None
    return "quick_gelu" if like.room == "quick_gelu" else FORMS.get((like.room, like.form))


def _prove(module, notes, kinds) -> FeedForward | None:
    """The candidate that passes every case."""
    why = Refusal("it puts its parts together in another way")
    try:
        for like in _readings(module, notes, kinds):
            try:
                traced.check_all(module, notes, kinds, lambda parts, x, like=like: like.compute(parts, x, like.exact))
                return replace(like, names=tuple(kinds))
            except Differs as difference:
                why = difference
    except Exception as error:
        why = error
    counts = {kind: sum(isinstance(k, kind) for k in kinds.values()) for kind in (Map, Activation)}
    if counts[Map] == 1 or counts[Activation] == 0:
        return None  # many other modules have the same parts
    raise Refusal(f"it has the parts of a feed-forward network, but {reason(why)}")


def _readings(module, notes, kinds):
    """The candidates that agree with the module's own forward in float64."""
    clone, log = traced.small(module, notes, kinds, torch.float64, False, 7)
    x = traced.drawn(clone, kinds, torch.float64, 3, 7)
    y = type(clone).forward(clone, x)
    calls = {call.name: call for call in log}
    maps = [call for call in calls.values() if isinstance(kinds[call.name], Map)]
    first = tuple(call.name for call in maps if _same(call.x, x))
    rest = [call.name for call in maps if call.name not in first]
    act = next((name for name, kind in kinds.items() if isinstance(kind, Activation)), None)
    if len(calls) != len(log) or len(rest) > 1 or not 1 <= len(first) <= 2 or (act is not None and act not in calls):
        return
    down, order = rest[0] if rest else None, list(calls)
    packed = down is None or calls[first[0]].y.shape[-1] == 2 * calls[down].x.shape[-1]
    others = [name for name in order if isinstance(kinds[name], Other)]
    middle = tuple(name for name in others if down is None or order.index(name) < order.index(down))
    last = tuple(name for name in others if name not in middle)
    for f in GATES if act is None else (kinds[act].f,):
        for like in _forms(f, first, packed, down, act, middle, last):
            if _same(like.compute(clone._modules, x, like.exact), y):
                yield like


def _forms(f, first, packed, down, act, middle, last):
    """The candidates that agree with the order of a module's calls."""
    how = down, act, middle, last
    if len(first) == 2:
        return [FeedForward(f, True, names, *how) for names in (first, first[::-1])]
    if packed:
        return [FeedForward(f, True, first, *how, gate_first) for gate_first in (True, False)]
    return [FeedForward(f, False, first, *how)]


def _same(a, b) -> bool:
    return a is b or (a.shape == b.shape and bool((a - b).abs().max() <= EXACT * b.abs().max()))
