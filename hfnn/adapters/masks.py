"""Masks of Hugging Face transformers without a mask tensor.

transformers describes a mask by a function of indices, and makes a (B, 1, T, S) tensor from it. `mask` reads the
description: causal or not, a window, packed sequences, and which keys are padding. A `Mask` stands for the tensor.
Attention uses its description (hfnn/adapters/attention.py). Any other use (an index, a sum, another attention) makes
the tensor that transformers would have made, once, and continues with it.
"""

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch.utils._pytree import tree_map_only

from hfnn.adapters import views
from hfnn.core.ask import ask, may_ask
from hfnn.core.context import capturing, compiling, context, has_values, uncompiled
from hfnn.deferred.recorded import METADATA, name_of
from hfnn.ops.attention.mask import own


def masking():
    """transformers.masking_utils if it was imported, else None."""
    return sys.modules.get("transformers.masking_utils")


@dataclass(frozen=True)
class Rule:
    """Query i sees the keys from i - left to i + right (None: no limit) of its own sequence only.

    sequences (B, T): the number of the sequence that each token belongs to; positions: the position of each token in
    it.
    """

    left: int | None = None
    right: int | None = None
    sequences: torch.Tensor | None = None
    positions: torch.Tensor | None = None

    def also(self, other: "Rule") -> "Rule | None":
        """The conjunction of two rules."""
        if self.sequences is not None and other.sequences is not None:
            return None
        return Rule(
            _lower(self.left, other.left),
            _lower(self.right, other.right),
            other.sequences if self.sequences is None else self.sequences,
            other.positions if self.positions is None else self.positions,
        )


def _lower(a, b):
    return min(a, b) if a is not None and b is not None else b if a is None else a


def read(function) -> Rule | None:
    """The rule of a transformers mask function, or None. Identified by its code, not by its name."""
    m = masking()
    if function is m.causal_mask_function:
        return Rule(right=0)
    if function is m.bidirectional_mask_function:
        return Rule()
    kind = _kinds().get(getattr(function, "__code__", None))
    if kind is None:
        return None
    held = dict(zip(function.__code__.co_freevars, (c.cell_contents for c in function.__closure__), strict=True))
    return kind(held)


@functools.cache
def _kinds() -> dict:
    """The code of a function that transformers makes -> how to read the values that it holds."""
    m, some = masking(), torch.zeros(1, 1, dtype=torch.int64)
    made = {
        "and_masks": ((m.causal_mask_function,), _all_of),
        "sliding_window_overlay": ((1,), lambda held: _window(held, lambda w: Rule(left=w - 1))),
        "sliding_window_bidirectional_overlay": ((1,), lambda held: _window(held, lambda w: Rule(w, w))),
        "packed_sequence_mask_function": ((some,), lambda held: Rule(sequences=held["packed_sequence_mask"])),
        "remap_positions_for_packed_sequence": ((m.causal_mask_function, some), _remapped),
    }
    return {getattr(m, name)(*given).__code__: kind for name, (given, kind) in made.items() if hasattr(m, name)}


def _all_of(held) -> Rule | None:
    rules = [read(function) for function in held["mask_functions"]]
    return functools.reduce(lambda a, b: None if a is None or b is None else a.also(b), rules)


def _window(held, rule: Callable) -> Rule | None:
    width = held["sliding_window"]
    return rule(width) if type(width) is int and width > 0 else None


def _remapped(held) -> Rule | None:
    """A rule on positions; the same on indices if the positions of a sequence are consecutive."""
    rule = read(held["mask_function"])
    return None if rule is None or rule.sequences is not None else rule.also(Rule(positions=held["position_ids"]))


def absorbs(dtype) -> bool:
    """Whether scores vanish in the sum with the smallest number of a dtype, as eager attention adds it.

    Not in float16, where it is -65504; float64's becomes -inf if the softmax is in float32.
    """
    return dtype in (torch.float32, torch.bfloat16)


class Mask(torch.Tensor):
    """A (B, 1, T, S) mask that is made when it is read. Boolean, or additive if `make` makes such a mask."""

    @staticmethod
    def of(shape, dtype, device, given: dict, blind: bool, make: Callable) -> "Mask":
        """given: the mask as arguments of `hfnn.functional.scaled_dot_product_attention`; blind: whether there may be
        queries that see no key."""
        mask = torch.Tensor._make_wrapper_subclass(Mask, shape, dtype=dtype, device=device)
        mask._given, mask._blind, mask._make, mask._dense, mask._made = given, blind, make, None, 0
        return mask

    def arguments(self, hidden: torch.dtype | None = None) -> dict | None:
        """The mask as arguments of `hfnn.functional.scaled_dot_product_attention`: a user may have written to it.

        hidden: the dtype whose smallest number hidden pairs get, None for -inf. With a number, a query that sees no key
        weighs all keys alike if the number absorbs the scores; returns None if it does not.
        """
        if self._dense is not None and self._dense._version != self._made:
            return {"attn_mask": self._dense}
        if hidden is None or not self._blind:
            return dict(self._given)
        return {**self._given, "uniform": True} if absorbs(hidden) else None

    def dense(self) -> torch.Tensor:
        """The tensor, as transformers makes it."""
        if self._dense is None:
            with torch.inference_mode(False), torch.no_grad():  # a tensor of inference mode counts no writes
                made = self._make()
                made = made.clone() if made.is_inference() else made
            self._dense, self._make = made.expand(*self._shape()), None
            self._made = self._dense._version
        return self._dense

    def _shape(self):
        with torch._C.DisableTorchFunctionSubclass():
            return tuple(self.shape)

    @classmethod
    @uncompiled
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if len(args) == 1 and type(args[0]) is Mask and not kwargs:
            name = name_of(func)
            if name == "detach":  # called by a checkpoint, which calls again with the result
                return args[0]
            if name in METADATA:
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args)
        args, kwargs = tree_map_only(Mask, Mask.dense, (args, kwargs or {}))
        return func(*args, **kwargs)

    @classmethod
    @uncompiled
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args, kwargs = tree_map_only(Mask, Mask.dense, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __repr__(self, *, tensor_contents=None):
        return f"Mask(shape={self._shape()}, {', '.join(self._given)})"


def mask(batch_size, q_length, kv_length, q_offset=0, kv_offset=0, mask_function=None, attention_mask=None, **others):
    """The function that transformers calls for a mask, with the arguments of its `sdpa_mask` and `eager_mask`.

    Returns None if only the causality of the module matters, a `Mask` if the rule can be read, and otherwise the dense
    mask for the model's own implementation.
    """
    m, eager = masking(), views.base(others.get("config")) == "eager"
    sizes = batch_size, q_length, kv_length, q_offset, kv_offset
    function = m.causal_mask_function if mask_function is None else mask_function
    traced = compiling() or torch.compiler.is_compiling() or torch.jit.is_tracing()
    # Dynamo cannot trace `capturing`.
    makes = m.sdpa_mask if not eager else m.eager_mask if traced or not capturing() else _added
    make = functools.partial(makes, *sizes, mask_function=function, attention_mask=attention_mask, **others)
    if traced or others.get("use_vmap") or q_length == 1:
        return make()
    if type(q_offset) is not int or type(kv_offset) is not int or not _readable(attention_mask, batch_size):
        return make()
    rule = read(function)
    if rule is not None and not (rule.sequences is None or has_values(rule.sequences) or context(rule.sequences)):
        # What transformers makes of a real batch, unless that is packed.
        rule, others = replace(rule, sequences=None, positions=None), {**others, "allow_is_causal_skip": True}
    if rule is not None and not all(map(_has_numbers, (rule.sequences, rule.positions))):
        return make()
    found = None if rule is None else _describe(rule, *sizes, attention_mask)
    if found is None:
        return _dense(make(), attention_mask)
    given, blind = found
    if not given and others.get("allow_is_bidirectional_skip", False):
        return None
    causal = given == {"window": (None, 0)} and q_length == kv_length and q_offset == kv_offset
    if causal and others.get("allow_is_causal_skip", True) and not eager:
        return None
    dtype = others.get("dtype", torch.float32) if eager else torch.bool
    whole = functools.partial(make, allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
    return Mask.of((batch_size, 1, q_length, kv_length), dtype, others.get("device", "cpu"), given, blind, whole)


def _added(*sizes, dtype=torch.float32, allow_is_causal_skip=False, **others):
    """transformers' `eager_mask`. Some versions of it copy a 0 from the host, which recording does not allow."""
    visible = masking().sdpa_mask(*sizes, allow_is_causal_skip=False, **others)
    if visible is None:
        return None
    return torch.where(visible, visible.new_zeros((), dtype=dtype), torch.finfo(dtype).min)


def _dense(made, given):
    """A mask that transformers made for the layers of this forward, unless it is a view of a user's tensor."""
    if made is not None and (given is None or made.untyped_storage()._cdata != given.untyped_storage()._cdata):
        own(made if made._base is None else made._base)
    return made


def _readable(attention_mask, batch: int) -> bool:
    """Whether the values of a padding mask can be read here."""
    if attention_mask is None:
        return True
    return (
        _has_numbers(attention_mask)
        and attention_mask.dtype is torch.bool
        and attention_mask.dim() == 2
        and attention_mask.shape[0] == batch
    )


def _has_numbers(x) -> bool:
    """Whether x is absent, or a tensor with values: neither on "meta" nor a tracer's."""
    return x is None or (type(x) is torch.Tensor and not x.is_meta)


def _describe(rule: Rule, batch, queries, keys, q_offset, kv_offset, padding) -> tuple[dict, bool] | None:
    """(arguments of `hfnn.functional.scaled_dot_product_attention` that express the rule and the padding, whether there
    may be queries that see no key)."""
    shift = q_offset - kv_offset
    if rule.sequences is not None and capturing():
        # Otherwise transformers checks whether there are several.
        if not may_ask(rule.sequences):
            return None
        (single,) = ask((rule.sequences[:, -1] == 0).all(), (1,))
        if not single:
            raise RuntimeError("its batches are packed: each is of other sequences")
        rule = replace(rule, sequences=None)
    if rule.sequences is not None:
        # A padded batch is not packed, and a packed batch has no cache.
        if padding is not None or shift or queries != keys or tuple(rule.sequences.shape) != (batch, keys):
            return None
        starts = _starts(rule)
        return None if starts is None else ({"cu_seqlens": starts, "window": (rule.left, rule.right)}, False)
    if rule.positions is not None:
        return None
    # A limit that no pair exceeds is no limit: the farthest key before a query, and after one.
    left = None if rule.left is None or rule.left >= queries - 1 + shift else rule.left
    right = None if rule.right is None or rule.right >= keys - 1 - shift else rule.right
    given = {} if left is None and right is None else {"window": (left, right)}
    if shift:
        given["offset"] = shift
    # The first query sees the keys before `end`, the last one those from `begin` on.
    begin = 0 if left is None else queries - 1 + shift - left
    end = keys if right is None else shift + right + 1
    blind = end <= 0 or begin >= keys
    if padding is not None:
        visible, hides = _visible(padding, keys, kv_offset, begin, end)
        given, blind = given | visible, blind or hides
    if "window" not in given:
        given.pop("offset", None)
    return given, blind


def _visible(padding: torch.Tensor, keys: int, offset: int, begin: int, end: int) -> tuple[dict, bool]:
    """({} if no key is padding; bounds if the other keys of each sequence are consecutive; else a mask, whether there
    may be queries that see no key). begin, end: of the keys that the last and the first query may see."""
    padding = padding[:, offset : offset + keys]
    if padding.shape[1] < keys:
        padding = torch.nn.functional.pad(padding, (0, keys - padding.shape[1]))
    if not may_ask(padding):
        return {"attn_mask": own(padding.clone())[:, None, None, :]}, True
    numbers = padding.int()
    count, first = numbers.sum(1), numbers.argmax(1)
    last = torch.where(count > 0, keys - numbers.flip(1).argmax(1), first)
    # transformers also waits for the GPU to know whether there is padding at all. This gets both answers at once.
    consecutive = last - first == count
    blind = (count == 0) | (first >= end) | (last <= begin)
    if begin > 0 and end < keys:  # a window may be in a hole
        blind |= ~consecutive
    full, dense, blind = ask(torch.stack(((count == keys).all(), consecutive.all(), blind.any())), (1, 1, 0))
    if full:
        return {}, False
    if dense:
        return {"lengths": own(torch.stack((first, last), 1).int())}, bool(blind)
    return {"attn_mask": own(padding.clone())[:, None, None, :]}, bool(blind)


def _starts(rule: Rule) -> torch.Tensor | None:
    """Where each sequence begins, (n + 1,) int32, with the rows of a batch concatenated; None for other positions."""
    sequences = rule.sequences
    begins = torch.ones_like(sequences, dtype=torch.bool)
    begins[:, 1:] = sequences[:, 1:] != sequences[:, :-1]
    if rule.positions is not None:
        positions = rule.positions.expand_as(sequences)
        steady = (positions[:, 1:] - positions[:, :-1] == 1) | begins[:, 1:]
        if not steady.all():
            return None
    starts = begins.flatten().nonzero().flatten().int()
    return torch.nn.functional.pad(starts, (0, 1), value=sequences.numel())


def flattened(x: torch.Tensor) -> torch.Tensor:
    """(B, H, T, D) as (1, H, B T, D), with the rows of a batch concatenated."""
    return x.transpose(1, 2).reshape(1, -1, x.shape[1], x.shape[3]).transpose(1, 2)
