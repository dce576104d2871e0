"""Any configuration of transformers made tiny, and a batch for any of its models.

Sizes are told by the names of a configuration's fields, in nested ones, too; what that gets wrong stands in OVERRIDES.
"""

import dataclasses
import re

import torch
from torch import nn
from transformers import PreTrainedConfig

BATCH, TOKENS, VOCABULARY, IMAGE, WIDTH = 2, 32, 128, 64, 64


def _zero(n):
    return [0.0 for _ in n] if isinstance(n, (list, tuple)) else 0.0


def _image(n):
    return [IMAGE for _ in n] if isinstance(n, (list, tuple)) else IMAGE


def _ones(n):
    return [1 for _ in n] if isinstance(n, (list, tuple)) else min(n, 2)


def _at_most(most):
    def size(n):
        """Of a list, each as large beside the largest as before."""
        if isinstance(n, (list, tuple)):
            large = max([m for m in n if isinstance(m, int)], default=0)
            return [max(m * most // large, 8) if isinstance(m, int) else m for m in n] if large > most else list(n)
        return min(n, most)

    return size


# Of each field, the first pattern that its whole name matches says what becomes of its number.
KEEP = lambda n: n  # noqa: E731
SIZES = [(re.compile(pattern), size) for pattern, size in (
    (r"(?!.*(act|activation)).*(dropout|layerdrop|pdrop|droppath|drop_path|drop_rate|dropout_prob).*|dropout|.*_drop", _zero),
    (r"mask_(time|feature)_prob|.*jitter_noise|.*label_smoothing.*|random_mask_ratio", _zero),
    (r"apply_spec_augment|use_cache", lambda n: False),
    (r".*vocab_size.*|num_embeddings", _at_most(VOCABULARY)),
    (r".*experts_per_tok.*|moe_top_?k|moe_k|top_k_experts", _at_most(2)),
    (r"n_groups?|topk_group|n_shared_experts|.*num_shared_experts|first_k_dense_replace|num_dense_layers", _at_most(1)),
    (r".*num.*experts|.*n_routed_experts", _at_most(4)),
    (r".*key_value_heads|.*num_kv_heads|.*_kv_heads|n_head_kv", _at_most(2)),
    (r".*heads?", lambda n: [max(min(m, 4), 1) for m in n] if isinstance(n, (list, tuple)) else min(n, 4)),
    (r"depths|stage_num_blocks|num_block_repeats|layers_?per_stage|(.*_)?num_layers|.*layers|n_layers?|.*_?depth|num_.*blocks", _ones),
    (r".*head_dim|d_kv|dim_head|d_head|attention_head_size|.*dim_head|rotary_dim", _at_most(16)),
    (r".*(intermediate|ffn|feedforward|feed_forward|inner).*(size|dim)?|d_ff|.*mlp_dim|d_inner|n_inner|dim_feedforward",
     _at_most(2 * WIDTH)),
    (r".*lora_rank|index_topk", _at_most(32)),
    (r"n_positions|max_.*positions?(_embeddings)?|max_seq_len.*|n_ctx", _at_most(256)),
    (r"sliding_window.*|attention_window|local_attention|attention_chunk_size", _at_most(16)),
    (r".*chunk_size", _at_most(16)),
    (r"(image|img|pretrain_image|crop|pretrained_img)_(size|resolution)", _image),
    (r"patch_size", lambda n: min(n, 8) if isinstance(n, int) else n),
    (r"num_(queries|denoising|query_tokens|latents|object_queries)|.*n_latents", _at_most(16)),
    (r".*(kernel|patch|window|block|stride|bucket|num_channels|type_vocab|merge|pool|group|codebook|scale|step|mask_in|grid|seq"
     r"|input_channels|sample|init|state_size|tubelet|audio_channels|max_img|factor|in_chans|mel_bins|feature_size|ratio"
     r"|input_dim|mel_dim|query_dim|input_size|num_|frames).*|in_channels", KEEP),
    (r".*(sizes?|dims?|d_model|n_embd|channels|channel_list|width|filters|units|features|embed)(_size)?", _at_most(WIDTH)),
)]  # fmt: skip
TOKEN = re.compile(r".*(token_id|token_index|_token|_idx|_index)$")
SPECIAL = {"pad": 0, "bos": 1, "eos": 2, "decoder_start": 1, "sep": 2, "cls": 1, "mask": 3}

# model type -> what its fields are to be; in nested configurations "vision_config.depth".
OVERRIDES: dict[str, dict] = {}


def tiny_config(cls, values=None, prefix="", overrides=None) -> PreTrainedConfig:
    """A configuration of that class; values: those of an instance that is nested in another's defaults."""
    overrides = OVERRIDES.get(cls.model_type, {}) | (overrides or {})
    default = values if values is not None else cls()
    taken = [0]
    fields = {f.name: f for f in dataclasses.fields(cls)}
    given = {}
    for name, field in fields.items():
        value, of_class = getattr(default, name, None), field.default
        if isinstance(value, PreTrainedConfig):
            inner = {k.removeprefix(name + "."): v for k, v in overrides.items() if k.startswith(name + ".")}
            given[name] = tiny_config(type(value), value, overrides=inner)
            continue
        if of_class is None and not TOKEN.fullmatch(name):
            continue  # computed of others
        found = _sized(name, value, taken)
        if found is not None:
            given[name] = found
        elif values is not None and isinstance(value, (int, float, str)) and value != of_class:
            given[name] = value
    given |= {name: value for name, value in overrides.items() if "." not in name}
    return cls(**given)


def _sized(name, value, taken):
    """What a field's number becomes, or None where it is nothing that has a size."""
    if TOKEN.fullmatch(name):
        if not isinstance(value, int) or value < 0:
            return None
        special = name.replace("_token_id", "").replace("_token_index", "")
        if special in SPECIAL:
            return SPECIAL[special]
        if value >= VOCABULARY - 28:
            taken[0] += 1
            return VOCABULARY - taken[0]
        return None
    plain = value[0] if isinstance(value, (list, tuple)) and value else value
    if not isinstance(plain, (int, float)):
        return None
    size = next((size for pattern, size in SIZES if pattern.fullmatch(name)), KEEP)
    if isinstance(plain, bool) and size is not _zero:
        return False if name in ("use_cache", "apply_spec_augment") else None
    if isinstance(plain, float) and size is not _zero:
        return None
    if size is _zero and not isinstance(plain, (int, float)):
        return None
    found = size(value)
    return None if found == value else type(value)(found) if isinstance(value, tuple) else found
