"""Attention of Hugging Face transformers, through its own interface.

transformers looks up attention by a name, `config._attn_implementation`, and also the function that makes masks.
`register` registers both under the name "hfnn", which changes no model. `recognise` finds the modules that look up
attention. Once converted, they and the models around them see their config through `hfnn.adapters.views`, which says
"hfnn". The config itself does not change, because other models may share it. `hfnn.revert` removes the views.

transformers' sdpa expresses many cases by a dense mask. `hfnn.functional.scaled_dot_product_attention` gets them
directly: a window, the first and the last key of each sequence, the starts of packed sequences, a soft cap, sinks, a
bias that requires a gradient (hfnn/adapters/masks.py). In compiled code, for a single query, and if attention weights
are requested, the model's previous implementation runs with its usual mask.
"""

import inspect
import sys
from dataclasses import dataclass

import torch
from torch import nn

from hfnn.adapters import masks, rotary, usual, views
from hfnn.core import flops
from hfnn.core.classes import ByClass, cache_by_class
from hfnn.core.context import is_plain, transformed
from hfnn.core.holder import stock_of, target_of
from hfnn.core.kernel import forced
from hfnn.ops import attention as room
from hfnn.ops.attention import products
from hfnn.patterns import routed
from hfnn.patterns.probe import Refusal
from hfnn.patterns.proof import Match, seclusion

NAME = views.NAME
BASES = usual.BASES


def register() -> None:
    """Register the name "hfnn" with transformers. This alone makes no model use it."""
    modeling, masking = views.modeling(), masks.masking()
    if modeling is not None:
        modeling.AttentionInterface.register(NAME, attention)
    if masking is not None:  # files of models that make their own masks do not import it
        masking.AttentionMaskInterface.register(NAME, masks.mask)


class Attention:
    """Mixin for such a module: its own forward, which finds `attention`."""

    prefer = "auto"
    _hfnn_small = routed.Routed._hfnn_small

    @property
    def _hfnn_when(self) -> str:
        found = rotary.calls(stock_of(self))
        names = () if found is None else dict.fromkeys(place.name for place in found.places)
        return f"{', '.join(names)} inside, too" if names else ""

    @staticmethod
    def forward_for(cls: type):
        register()  # when such a module is unpickled, `convert` may not have run in this process
        found, forward = rotary.calls(cls), cls.forward
        if found is not None:
            return routed._within(forward, found)
        return lambda self, like, *args, **kwargs: forward(self, *args, **kwargs)


@dataclass(frozen=True)
class AttentionLike(Match):
    """A module that looks up attention by the name in its config."""

    mixin, op = Attention, room.OP

    def __str__(self) -> str:
        return f"hfnn {self.op.name}"


def recognise(module: nn.Module) -> Match | Refusal | None:
    """How to treat the module, or why it is left alone; None if it looks up no attention."""
    config = vars(module).get("config")
    forward = routed._unwrapped(type(module).forward)
    if config is None or forward is None or not _looks_up(forward) or not views.is_config(config):
        return None
    base = views.implementation(config)
    why = _unfit(type(module), forward, base)
    if why is None and base == "eager":
        why = _differs(module)
    return AttentionLike() if why is None else Refusal(why)


def _looks_up(forward) -> bool:
    """Whether a function looks up attention by name."""
    interface = getattr(views.modeling(), "AttentionInterface", None)
    names = forward.__code__.co_names
    return (
        interface is not None
        and "_attn_implementation" in names
        and any(isinstance(forward.__globals__.get(name), interface) for name in names)
    )


def _unfit(cls: type, forward, base: str | None) -> str | None:
    """Why the attention of a class, or of the requested implementation, cannot be hfnn's, or None."""
    if base not in BASES:
        return f"its attention implementation is {base!r}, chosen by the user: only {' and '.join(BASES)} are replaced"
    models = _models(cls)
    if models and not any(m._supports_attention_backend or m._supports_sdpa for m in models):
        return f"{models[0].__name__} supports no attention implementation but its own"
    interface = views.modeling().AttentionInterface
    for name in forward.__code__.co_names:
        value = forward.__globals__.get(name)
        if isinstance(value, interface) and value._local_mapping:
            return f"its file has {', '.join(value._local_mapping)} attention of its own"
    if base in views.constants(forward.__code__):
        return f"its forward does something else where the implementation is {base!r}"
    return None


def _models(cls: type) -> list[type]:
    """The models in the file that defines a class, or one that it inherits from."""
    base = views.modeling().PreTrainedModel
    found = []
    for origin in cls.__mro__:
        file = sys.modules.get(origin.__module__)
        for value in vars(file).values() if file is not None and origin is not nn.Module else ():
            is_model = isinstance(value, type) and issubclass(value, base) and value is not base
            if is_model and value.__module__ == origin.__module__:
                found.append(value)
    return found


@cache_by_class
def eager_of(cls: type):
    """The function in a class's file that computes attention where its config says "eager", or None."""
    forward = routed._unwrapped(cls.forward)
    names = [name for name in forward.__code__.co_names if name.endswith("eager_attention_forward")]
    found = [forward.__globals__.get(name) for name in names]
    return found[0] if len(found) == 1 and callable(found[0]) else None


_proofs = ByClass()  # (class, numbers and shapes): the difference


def _differs(module) -> str | None:
    """The difference between eager attention, as the module's file defines it, and our definition, or None."""
    cls, config = type(module), vars(module)["config"]
    eager, heads = eager_of(cls), getattr(config, "num_attention_heads", 4)
    groups = getattr(module, "num_key_value_groups", 1)
    if eager is None:
        return "its eager attention is not to be found in its file"
    if not isinstance(heads, int) or not isinstance(groups, int) or heads % groups:
        return "its config does not tell its number of heads"
    key = cls, heads, groups, tuple((name, tuple(p.shape)) for name, p in module._parameters.items() if p is not None)
    if key not in _proofs:
        try:
            with seclusion():
                same = _same(module, eager, heads, groups)
            _proofs[key] = None if same else "its eager attention computes something else"
        except Exception as error:  # this runs the author's code: whatever it raises is a reason
            _proofs[key] = f"its eager attention raises on the probe: {error}"
    return _proofs[key]


def _same(module, eager, heads: int, groups: int) -> bool:
    """Whether eager attention of random tensors, some of whose queries see no key, is `room.reference` of them, and so
    are its gradients."""
    clone = object.__new__(type(module))
    generator = torch.Generator("cpu").manual_seed(0)
    vars(clone).update({**vars(module), "training": False})
    vars(clone)["_parameters"] = {
        name: None if p is None else nn.Parameter(torch.randn(p.shape, generator=generator))
        for name, p in module._parameters.items()
    }
    width = getattr(module, "head_dim", 8)
    width = width if isinstance(width, int) else 8

    def draw(*shape):
        return torch.randn(shape, generator=generator, requires_grad=True)

    query, key, value = draw(2, heads, 5, width), *(draw(2, heads // groups, 7, width) for _ in "kv")
    seen = draw(2, 1, 5, 7) > -0.5
    seen[..., 0] = True
    seen[0, :, 1] = seen[1, :, 3] = False
    added = torch.where(seen, 0.0, torch.finfo(torch.float32).min)
    constants = views.constants(routed._unwrapped(type(module).forward).__code__)
    takes = inspect.signature(eager).parameters
    options, ours = {"dropout": 0.0}, {"enable_gqa": groups > 1}
    if "scaling" in constants:
        options["scaling"] = ours["scale"] = 0.3
    if "softcap" in takes:
        options["softcap"] = ours["softcap"] = 2.0
    if "s_aux" in constants:
        options["s_aux"] = ours["sinks"] = next(p for p in clone._parameters.values() if p is not None)
    if "position_bias" in takes:
        options["position_bias"] = draw(1, heads, 5, 7)
        seen = options["position_bias"] + added
    else:
        ours["uniform"] = True
    wanted = eager(clone, query, key, value, added, **options)[0]
    found = room.OP.reference(query, key, value, seen, **ours).transpose(1, 2)
    dy = draw(*found.shape).detach()
    pairs = zip(*((y, *torch.autograd.grad(y, (query, key, value), dy)) for y in (wanted, found)), strict=True)
    return all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in pairs)


def attention(module, query, key, value, attention_mask=None, **options):
    """Attention for transformers; returns (result (B, T, H, E), weights or None).

    query (B, H, T, D), key (B, G, S, D), value (B, G, S, E); attention_mask: None, the result of `masks.mask`, or a
    four-dimensional mask, boolean or additive. Options are those that transformers' modules pass: scaling, dropout,
    is_causal, softcap, s_aux (sinks), position_bias, cu_seq_lens_q, cu_seq_lens_k. Other options are ignored, as in
    sdpa.
    """
    base = usual.of_small(module, query, key, options)
    if base is not None:
        options = options if base == "eager" else usual.as_sdpa(options)
        return _usual(module, base, query, key, value, attention_mask, options)
    out = usual.plain(module, query, key, value, attention_mask, options)
    if out is not None:
        return out.transpose(1, 2).contiguous(), None
    config = getattr(module, "config", None)
    base = views.base(config)
    if base == "sdpa" and not views.by_name(config):
        options = usual.as_sdpa(options)
    given = None
    if not _is_usual(module, base, query, attention_mask, options):
        given = _arguments(module, base, query, key, attention_mask, options)
    if given is None:
        return _usual(module, base, query, key, value, attention_mask, options)
    rows, given = given
    shapes, dense = (query.shape, key.shape, value.shape), attention_mask is not None
    given["stock"] = products.Stock(base == "eager", dense, shapes=shapes, dropout_p=options.get("dropout", 0.0))
    given["dropout_p"] = options.get("dropout", 0.0) if base != "eager" or module.training else 0.0
    given.update(scale=options.get("scaling"), softcap=options.get("softcap"), sinks=options.get("s_aux"))
    if key.shape[2] > rows:
        key, value = key[:, :, :rows], value[:, :, :rows]
    batch = query.shape[0]
    if "cu_seqlens" in given and batch > 1:
        query, key, value = (masks.flattened(x) for x in (query, key, value))
    out = room.in_rows(
        query, key, value, enable_gqa=query.shape[1] != key.shape[1], prefer=getattr(module, "prefer", "auto"), **given
    )
    out = out.transpose(1, 2)
    return (out if out.shape[0] == batch else out.reshape(batch, -1, *out.shape[2:])).contiguous(), None


def _is_usual(module, base, query, attention_mask, options) -> bool:
    """Whether the model's previous implementation runs without further checks."""
    if transformed() or forced() == "torch" or not is_plain(query) or options.get("cache") is not None:
        return True
    if torch.jit.is_tracing() or options.get("output_attentions") or (base == "eager" and _weights_wanted()):
        return True
    if base == "sdpa" and usual.is_replaced() and not views.by_name(getattr(module, "config", None)):
        return True
    special = options.get("softcap") is not None or options.get("s_aux") is not None
    if base == "sdpa" and special:  # requested by name; otherwise sdpa raises or warns
        return not views.by_name(getattr(module, "config", None))
    if query.shape[2] == 1 or flops.watched():  # a step of generation, or a mode that may read values
        return True
    return not (attention_mask is None or isinstance(attention_mask, torch.Tensor))


def _weights_wanted() -> bool:
    """Whether the attention weights of this forward are collected."""
    collector = getattr(sys.modules.get("transformers.utils.output_capturing"), "_active_collector", None)
    wanted = None if collector is None else collector.get()
    return bool(wanted) and any("attentions" in name for name in wanted)


def _arguments(module, base, query, key, attention_mask, options) -> tuple[int, dict] | None:
    """(number of keys that count, keyword arguments for the mask), or None for the usual implementation."""
    queries, keys, bias = query.shape[2], key.shape[2], options.get("position_bias")
    if attention_mask is None:
        rows, given = _without_mask(module, base, queries, keys, options)
        if bias is not None:
            bias = bias[..., :rows]
    elif isinstance(attention_mask, masks.Mask):
        if tuple(attention_mask.shape[-2:]) != (queries, keys) or attention_mask.shape[0] != query.shape[0]:
            return None
        hidden = attention_mask.dtype if base == "eager" else None if bias is None else key.dtype
        rows, given = keys, attention_mask.arguments(hidden)
        # sdpa's number takes the place of the bias, and the eager one is added to it.
        if given is None or ("uniform" in given and bias is not None and (base == "eager" or "attn_mask" in given)):
            return None
        if given == {"window": (None, 0)} and queries == keys and base != "eager":
            given = {"is_causal": True}  # what no mask means; a recorded forward makes a mask of it
    else:
        if attention_mask.dim() != 4 or attention_mask.shape[-1] != keys:
            return None
        if base == "eager" and not masks.absorbs(attention_mask.dtype):  # nor does it select by a boolean mask
            return None
        rows, given = keys, {"attn_mask": attention_mask}
    if bias is not None:
        if "cu_seqlens" in given:
            return None
        seen = given.get("attn_mask")
        if seen is not None:
            hidden = torch.finfo(query.dtype).min
            bias = torch.where(seen, bias, hidden) if seen.dtype is torch.bool else bias + seen
        if given.pop("is_causal", False):
            given["window"] = (None, 0)
        given["attn_mask"] = bias
    return rows, given


def _without_mask(module, base, queries: int, keys: int, options) -> tuple[int, dict]:
    """What no mask means: for sdpa, whether the module is causal; for eager attention, that all keys are visible."""
    causal = options.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    causal = bool(causal) and queries > 1 and base != "eager"
    starts = options.get("cu_seq_lens_q"), options.get("cu_seq_lens_k")
    if all(isinstance(x, torch.Tensor) for x in starts) and options.get("position_bias") is None:
        window = options.get("sliding_window")
        limits = {} if window is None or not causal else {"window": (window - 1, 0)}
        return keys, {"cu_seqlens": starts, "is_causal": causal and not limits, **limits}
    # The cache after the last key is still empty.
    return (queries if causal and keys > queries else keys), {"is_causal": causal}


def _usual(module, base, query, key, value, attention_mask, options):
    """The model's previous implementation."""
    if isinstance(attention_mask, masks.Mask):
        attention_mask = attention_mask.dense()
    if base == "eager":
        eager = eager_of(stock_of(module))
        return eager(module, query, key, value, attention_mask, **options)
    return usual.sdpa()(module, query, key, value, attention_mask, **options)


def settle(model: nn.Module) -> None:
    """Give the view of its config to every converted attention module, and to everything that shares this config."""
    configs = {id(views.plain(m.config)) for m in model.modules() if issubclass(target_of(m), Attention)}
    for module in model.modules() if configs else ():
        config = vars(module).get("config")
        if config is None or id(views.plain(config)) not in configs:
            continue
        if issubclass(target_of(module), Attention) or not _asks(stock_of(module)):
            vars(module)["config"] = views.view(config)
        else:
            vars(module)["config"] = views.plain(config)


def release(model: nn.Module) -> None:
    """Give every module its original config."""
    for module in model.modules():
        config = vars(module).get("config")
        if config is not None and views.is_view(config):
            vars(module)["config"] = views.plain(config)


@cache_by_class
def _asks(cls: type) -> bool:
    """Whether a class's own code looks up attention, or distinguishes implementations by name."""
    forward = routed._unwrapped(cls.forward)
    if forward is not None and _looks_up(forward):
        return True
    base = views.modeling().PreTrainedModel
    own = [c for c in cls.__mro__ if c not in base.__mro__]
    functions = (getattr(value, "__func__", value) for c in own for value in vars(c).values())
    codes = [inspect.unwrap(f).__code__ for f in functions if hasattr(inspect.unwrap(f), "__code__")]
    return any("_attn_implementation" in c.co_names and set(BASES) & views.constants(c) for c in codes)
