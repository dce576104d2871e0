"""What the rows ask of a module's parts: which are linear maps, activations, norms, dropouts."""

from dataclasses import dataclass

from torch import nn

from hfnn.core.holder import like_of
from hfnn.patterns import lookalike
from hfnn.patterns.subclass import FORWARDS, ROOMS, holds, original


@dataclass(frozen=True)
class Map:
    """A linear part: its widths, and whether it has a bias."""

    inputs: int
    outputs: int
    bias: bool


@dataclass(frozen=True)
class Act:
    """f: which of GATES a part is, or None; own: which of the activations behind a batch norm, by its exact class."""

    f: str | None
    own: str | None


# torch's classes; below, the rooms' too.
BATCH_NORMS = {nn.BatchNorm1d: 3, nn.BatchNorm2d: 4, nn.BatchNorm3d: 5}  # dimensions of the input
ACTIVATIONS_OF = {
    nn.ReLU: "relu", nn.LeakyReLU: "leaky_relu", nn.ReLU6: "relu6", nn.SiLU: "silu", nn.Hardswish: "hardswish",
}  # fmt: skip
_KINDS = {nn.Dropout: "dropout", **dict.fromkeys(BATCH_NORMS, "batch_norm")}
_KINDS |= {nn.LayerNorm: "layer_norm", nn.GroupNorm: "group_norm"}
for _table in (BATCH_NORMS, ACTIVATIONS_OF, _KINDS):
    _table |= {ROOMS[torch_class]: value for torch_class, value in _table.items()}
_KINDS[nn.Identity] = "identity"
# Activations that lookalike.py has proved: (op, form) -> f.
_FORMS = {
    ("silu", ""): "silu", ("gelu", "erf form"): "gelu", ("gelu", "tanh form"): "gelu_tanh",
    ("quick_gelu", ""): "quick_gelu",
}  # fmt: skip
_TORCH = {nn.SiLU: "silu", nn.GELU: "gelu", nn.ReLU: "relu", nn.Sigmoid: "sigmoid"}


def kind_of(part) -> Map | Act | str | None:
    """What the rows ask of a part; "norm" for one of that name, "other" for one with parts, else None."""
    named = "norm" if "norm" in type(part).__name__.lower() else None
    kind = _KINDS.get(type(part)) or _map(part) or named or ("other" if part._modules else None)
    if kind is None and not (part._parameters or part._buffers):
        f, own = function_of(part) or likeness(part), ACTIVATIONS_OF.get(type(part))
        return Act(f, own) if f or own else None
    return kind


def _map(part) -> Map | None:
    """A linear map by its widths: nn.Linear and classes with the same attributes, Conv1D of transformers."""
    names = ("nx", "nf") if type(part).__name__ == "Conv1D" else ("in_features", "out_features")
    first, last = map(vars(part).get, names)
    return Map(first, last, getattr(part, "bias", None) is not None) if type(first) is type(last) is int else None


def function_of(part) -> str | None:
    """The name in GATES of an activation module, or None. Accepted are torch's classes, subclasses that override
    neither `__call__` nor `forward`, and classes that lookalike.py has proved."""
    cls = type(part)
    if cls.__call__ is not nn.Module.__call__:
        return None
    like = like_of(part)
    if like is not None:
        return _form(like) if holds(part) else None
    cls = original(cls) or cls
    base = next((base for base in cls.__mro__ if base in _TORCH), None)
    if base is None or cls.forward not in (FORWARDS[base][0], ROOMS[base].forward):
        return None
    return {"none": "gelu", "tanh": "gelu_tanh"}.get(part.approximate) if base is nn.GELU else _TORCH[base]


def likeness(part) -> str | None:
    """The name in GATES of an activation that a module implements itself, before `convert` swaps it."""
    return _form(lookalike.recognise(part)) if type(part).__call__ is nn.Module.__call__ else None


def _form(like) -> str | None:
    return _FORMS.get((like.room, like.form)) if isinstance(like, lookalike.ActivationLike) else None
