"""Calls of attention for which a model's previous implementation, or torch's own op alone, is enough."""

import functools
import sys
from collections.abc import Callable

import torch
from torch import nn

from hfnn.adapters import views
from hfnn.core.context import PLAIN, compiling, on_gpu
from hfnn.core.kernel import forced
from hfnn.ops.attention.sdpa import of_torch

BASES = ("sdpa", "eager")  # the implementations that are replaced; the user chose any other on purpose

# The number of scores from which hfnn's attention may pay for its host time on a CPU.
SMALL = 1 << 16


def of_small(module: nn.Module, query: torch.Tensor, key: torch.Tensor, options: dict) -> str | None:
    """The model's previous implementation if it runs because the call is small, else None."""
    if compiling() or type(query) not in PLAIN or not query.is_cpu or forced() is not None:
        return None
    if query.dim() != 4 or query.numel() * key.shape[2] >= SMALL * query.shape[3]:
        return None
    config = module.__dict__.get("config")
    base = None if config is None else views.attributes(config).get(views.INTERNAL)
    if base not in BASES or options.get("cu_seq_lens_q") is not None or getattr(module, "prefer", "auto") == "memory":
        return None
    return None if type(query) is not torch.Tensor and on_gpu(query) else base


# Options that torch's own op does not have. Models pass others, which no attention reads: position_ids, use_cache.
_SPECIAL = frozenset(
    ("softcap", "s_aux", "position_bias", "cu_seq_lens_q", "cu_seq_lens_k", "output_attentions", "cache")
)


def plain(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask, options: dict
) -> torch.Tensor | None:
    """The result of torch's own op, with the fewest checks: most calls are of this kind, many are small. Else None."""
    if attention_mask is not None or compiling() or type(query) not in PLAIN or forced() is not None:
        return None
    config = module.__dict__.get("config")
    if config is None or views.attributes(config).get(views.INTERNAL) != "sdpa" or is_replaced():
        return None
    for name in _SPECIAL & options.keys():
        if options[name] is not None and options[name] is not False:
            return None
    causal, queries = options.get("is_causal"), query.shape[2]
    causal, dropout = getattr(module, "is_causal", True) if causal is None else causal, options.get("dropout", 0.0)
    if queries == 1 or (causal and key.shape[2] > queries) or torch._C._get_tracing_state() is not None:
        return None
    groups, prefer = query.shape[1] != key.shape[1], getattr(module, "prefer", "auto")
    return of_torch(query, key, value, dropout, bool(causal), options.get("scaling"), groups, prefer)


def as_sdpa(options: dict) -> dict:
    """The options that count if a model used transformers' sdpa. It has no sinks. Old versions ignore a soft cap; newer
    versions refuse it, so they get it and refuse.
    """
    if options.get("softcap") is None and options.get("s_aux") is None:
        return options
    refused = "softcap" in views.constants(sdpa().__code__)
    return {name: value for name, value in options.items() if name != "s_aux" and (refused or name != "softcap")}


def sdpa() -> Callable:
    """The function that is registered as "sdpa"."""
    return views.modeling().ALL_ATTENTION_FUNCTIONS["sdpa"]


@functools.cache
def _registered():
    """The tables in which transformers looks up attention, and its own "sdpa"."""
    found, own = views.modeling().ALL_ATTENTION_FUNCTIONS, sys.modules["transformers.integrations.sdpa_attention"]
    return found._local_mapping, found._global_mapping, own.sdpa_attention_forward


def is_replaced() -> bool:
    """Whether the user registered another function as "sdpa". Every layer asks, so without transformers' own code."""
    local, everywhere, own = _registered()
    return (local.get("sdpa") or everywhere["sdpa"]) is not own
