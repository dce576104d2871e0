"""Makes any configuration of transformers tiny, and batches for any of its models.

Sizes are recognised by the names of a configuration's fields, also in nested ones; tiny.json has the exceptions.
"""

import dataclasses
import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import PreTrainedConfig

BATCH, TOKENS, VOCABULARY, IMAGE, WIDTH = 2, 32, 128, 64, 64


# Sizes: each function takes a number or a list of them.


def _keep(n):
    return n


def _zero(n):
    return [0.0 for _ in n] if isinstance(n, (list, tuple)) else type(n)(0)


def _false(n):
    return False


def _image(n):
    return [IMAGE for _ in n] if isinstance(n, (list, tuple)) else IMAGE


def _few(n):
    return [1 for _ in n] if isinstance(n, (list, tuple)) else min(n, 2)


def _heads(n):
    return [min(2**i, 4) for i in range(len(n))] if isinstance(n, (list, tuple)) else min(n, 4)


def _at_most(most):
    """An eighth of each entry of a list, which may be channels that must fit those of another list."""

    def size(n):
        if isinstance(n, (list, tuple)):
            return [max(m // 8, 8) if isinstance(m, int) and m >= 16 else m for m in n]
        return min(n, most)

    return size


# The first pattern that matches a field's whole name decides how its number changes.
SIZES = [
    (re.compile(pattern), size)
    for pattern, size in (
        (r"(?!.*act).*(dropout|layerdrop|pdrop|droppath|drop_path|drop_rate).*|.*_drop", _zero),
        (r"mask_(time|feature)_prob|.*jitter_noise|.*label_smoothing.*|random_mask_ratio", _zero),
        (r"apply_spec_augment|use_cache", _false),
        (r"encode_proj_layers", _keep),
        (r".*vocab_size.*|num_embeddings", _at_most(VOCABULARY)),
        (r".*experts_per_tok.*|moe_top_?k|moe_k|top_k_experts", _at_most(2)),
        (r"n_groups?|topk_group|.*n(um)?_shared_experts|first_k_dense_replace|num_dense_layers", _at_most(1)),
        (r".*num.*experts|.*n_routed_experts", _at_most(4)),
        (r".*(key_value|kv)_heads|n_head_kv", _at_most(2)),
        (r".*heads?", _heads),
        (r"depths|.*num_blocks|num_block_repeats|.*layers?_?per_stage|.*layers?|.*_?depth|num_.*blocks", _few),
        (r".*head_dim|d_kv|dim_head|d_head|attention_head_size|.*dim_head|rotary_dim", _at_most(16)),
        (r".*(intermediate|ffn|feed_?forward|inner).*|d_ff|.*mlp_dim", _at_most(2 * WIDTH)),
        (r".*lora_rank|index_topk", _at_most(32)),
        (r"n_positions|max_.*positions?(_embeddings)?|max_seq_len.*|n_ctx", _at_most(256)),
        (r"sliding_window.*|attention_window|local_attention|.*chunk_size", _at_most(16)),
        (r"(image|img|pretrain_image|crop)_(size|resolution)", _image),
        (r"num_(queries|denoising|query_tokens|latents|object_queries)|.*n_latents", _at_most(16)),
        (r"patch_size", _at_most(8)),
        (
            r".*(kernel|patch|window|block|stride|bucket|type_vocab|merge|pool|group|codebook|scale|step|grid|seq|sample"
            r"|ratio|init|state_size|tubelet|max_img|factor|in_chans|mel_bins|feature_size|input_|mel_dim|query_dim|num_"
            r"|frames).*|mask_in.*|in_channels|audio_channels",
            _keep,
        ),
        (r".*(sizes?|dims?|d_model|n_embd|channels|channel_list|width|filters|units|features|embed)", _at_most(WIDTH)),
    )
]
TOKEN = re.compile(r".*(token_id|token_index|_token|_idx|_index)")
SPECIAL = {"pad": 0, "bos": 1, "eos": 2, "decoder_start": 1, "sep": 2, "cls": 1, "mask": 3}
LAYER_KINDS = ("layer_types", "layers_block_type", "mlp_layer_types", "indexer_types")
# model type -> its fields' values, with dots for nested configurations; "raw": only image sizes change.
EXCEPTIONS = json.loads(Path(__file__).with_suffix(".json").read_text())


def config_of(model_class, config_class) -> PreTrainedConfig:
    """A tiny configuration for a class of models; config_class: if the class does not name one."""
    own = model_class.config_class
    return _tiny(own if isinstance(own, type) and own is not PreTrainedConfig else config_class)


def _tiny(cls, default=None, exceptions=()) -> PreTrainedConfig:
    """default: an instance that is nested in another's defaults."""
    exceptions = EXCEPTIONS.get(cls.model_type, {}) | dict(exceptions)
    nested, default = default is not None, default or cls()
    fields, given, specials = dataclasses.fields(cls), {}, iter(range(VOCABULARY - 1, 0, -1))
    for field in fields:
        name, value = field.name, _held(default, field.name)
        if isinstance(value, PreTrainedConfig):
            inside = {k.removeprefix(f"{name}."): v for k, v in exceptions.items() if k.startswith(f"{name}.")}
            given[name] = _tiny(type(value), value, inside)
            continue
        if isinstance(value, dict) and "mrope_section" in value:
            given[name] = value | {"mrope_section": [part // 8 for part in value["mrope_section"]]}
        if TOKEN.fullmatch(name):
            found = _token(name, value, specials)
        elif field.default is None or (exceptions.get("raw") and not re.search("drop|image_size|use_cache", name)):
            found = None  # computed from others, or unchanged
        else:
            found = _sized(name, value)
            if name.endswith("key_value_heads") and value == _held(default, "num_attention_heads"):
                found = min(value, 4)
        if found is not None:
            given[name] = found
        elif nested and field.default is not None and isinstance(value, (int, float, str)) and value != field.default:
            given[name] = value
    given |= _one_layer_of_each({field.name for field in fields}, default)
    return cls(**given | {name: value for name, value in exceptions.items() if "." not in name and name != "raw"})


def _held(config, name):
    try:
        return getattr(config, name, None)
    except Exception:  # a configuration may report that it differs between layers
        return None


def _token(name, value, specials) -> int | None:
    """A special token within the vocabulary."""
    special = re.sub("_token_(id|index)$", "", name)
    if special in SPECIAL and (isinstance(value, int) or special == "pad"):
        return SPECIAL[special]
    return next(specials) if type(value) is int and value >= VOCABULARY - 28 else None


def _sized(name, value):
    plain = value[0] if isinstance(value, (list, tuple)) and value else value
    size = next((size for pattern, size in SIZES if pattern.fullmatch(name)), _keep)
    if isinstance(plain, bool):
        return size(value) if size is _false else None
    if size is _keep or not isinstance(plain, (int, float) if size is _zero else int):
        return list(value) if isinstance(value, tuple) else None  # some models add lists to them
    return size(value)


def _one_layer_of_each(names, default) -> dict:
    lists = {name: _held(default, name) for name in LAYER_KINDS if name in names}
    kinds = {name: list(dict.fromkeys(value)) for name, value in lists.items() if value and isinstance(value, list)}
    if not kinds:
        return {}
    many = max(2, *map(len, kinds.values()))
    found = {name: (kind * many)[:many] for name, kind in kinds.items()} | {"num_hidden_layers": many}
    return found | ({"max_window_layers": 1} if "max_window_layers" in names else {})


# Batches: the signature of a model's forward shows its inputs. There are several guesses, the most complete first.


def batches(model) -> Iterator[dict]:
    taken = inspect.signature(model.forward).parameters
    draw = _Draw(model, list(taken))
    for given in draw.inputs():
        for labels in (*draw.labels(), {}):
            yield given | labels


def redrawn(batch, draw: int) -> dict:
    """The same batch, or one with other floating-point inputs and reordered tokens."""
    generator, found = torch.Generator().manual_seed(100 + draw), dict(batch)
    for name, value in batch.items() if draw else ():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            found[name] = torch.randn(value.shape, generator=generator)
        elif name in ("labels", "input_ids") and value.dim() == 2 and "pixel_values" not in batch:
            found[name] = value[:, torch.randperm(value.shape[1], generator=generator)]
    return found


class _Draw:
    """One model's batches."""

    def __init__(self, model, taken):
        self.model, self.config, self.taken = model, model.config, taken
        self.generator = torch.Generator().manual_seed(3)
        vision = (getattr(self.config, name, None) for name in ("vision_config", "backbone_config", "encoder"))
        self.vision = next((config for config in vision if config is not None), self.config)
        text = self.config.get_text_config() if hasattr(self.config, "get_text_config") else self.config
        sizes = [n for n in (getattr(text, "vocab_size", None), getattr(self.config, "vocab_size", None)) if n]
        highest = min(n if isinstance(n, int) else 5 for n in [*sizes, 99])
        self.ids = self.whole(BATCH, TOKENS, low=4, high=max(highest, 5))
        names = ("image_token_id", "image_token_index", "media_placeholder_token_id", "img_context_token_id")
        self.image_token = next((t for t in (getattr(self.config, n, None) for n in names) if isinstance(t, int)), None)

    def noise(self, *shape):
        return torch.randn(*shape, generator=self.generator)

    def whole(self, *shape, high, low=0):
        return torch.randint(low, high, shape, generator=self.generator)

    def inputs(self) -> Iterator[dict]:
        main = self.model.main_input_name
        main = main if isinstance(main, str) else main[0]
        if main not in self.taken and "input_ids" in self.taken:
            main = "input_ids"
        own = getattr(self, f"_{main}", None)
        yield from own() if own else ({main: guess} for guess in (self.noise(BATCH, 4096), self.ids))

    def _images(self, times=1):
        size = getattr(self.vision, "image_size", None) or IMAGE
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        return {"pixel_values": self.noise(BATCH, self._channels(), height * times, width * times)}

    def _channels(self):
        return getattr(self.vision, "num_channels", None) or 3

    def _input_ids(self):
        text, images = {"input_ids": self.ids}, "pixel_values" in self.taken
        if "image_grid_thw" in self.taken and images:
            yield self._patches()
        elif images and self.image_token is None:
            yield self._images() | text | ({"return_loss": True} if "return_loss" in self.taken else {})
        elif images:
            for each in (4, 16, 64, 65, 1, 8, 256):
                marked = self._marked(each)
                yield {"input_ids": marked, **self._images()}
                if "token_type_ids" in self.taken:
                    yield {"input_ids": marked, **self._images(), "token_type_ids": (marked == self.image_token).long()}
        if "bbox" in self.taken:
            corners = self.whole(*self.ids.shape, 2, high=100)
            yield text | {"bbox": torch.cat((corners, corners + 5), -1)}
        decoder = {"decoder_input_ids": self.ids}
        yield text | (decoder if "decoder_input_ids" in self.taken and "labels" not in self.taken else {})
        yield text | decoder

    def _marked(self, each):
        """Text with placeholders of an image."""
        places = self.ids.new_full((BATCH, each), self.image_token or 0)
        return torch.cat((self.ids[:, :4], places, self.ids[:, 4:]), 1)

    def _patches(self):
        """Images of any size: a list of patches, and a grid for each image."""
        merge, patch = getattr(self.vision, "spatial_merge_size", 2), getattr(self.vision, "patch_size", 8)
        marked = self._marked(64 // merge**2)
        found = {"input_ids": marked, "image_grid_thw": torch.tensor([[1, 8, 8]] * BATCH)}
        found["pixel_values"] = self.noise(BATCH * 64, 3 * getattr(self.vision, "temporal_patch_size", 1) * patch**2)
        if "mm_token_type_ids" in self.taken:
            found["mm_token_type_ids"] = (marked == self.image_token).int()
        return found

    def _pixel_values(self):
        text = {"input_ids": self.ids} if "input_ids" in self.taken else {}
        decoder = {"decoder_input_ids": self.ids} if "decoder_input_ids" in self.taken else {}
        yield self._images() | text | decoder
        yield self._images()
        yield {"pixel_values": self.noise(BATCH, getattr(self.config, "num_frames", 8), self._channels(), IMAGE, IMAGE)}
        yield self._images(times=4)

    def _pixel_values_videos(self):
        text = {"input_ids": self.ids} if "input_ids" in self.taken else {}
        frames = getattr(self.config, "num_frames", 4)
        yield {"pixel_values_videos": self.noise(BATCH, frames, self._channels(), IMAGE, IMAGE)} | text

    def _bins(self):
        places = [getattr(self.config, name, None) for name in ("audio_config", "encoder_config")]
        names = ("num_mel_bins", "feature_size", "feature_projection_input_dim", "input_dim", "input_feat_per_channel")
        found = (getattr(place, name, None) for place in (*places, self.config) for name in names)
        return next((bins for bins in found if isinstance(bins, int)), 80)

    def _input_features(self):
        frames, decoder = 2 * getattr(self.config, "max_source_positions", WIDTH), {}
        if "decoder_input_ids" in self.taken:
            decoder = {"decoder_input_ids": self.ids}
        for shape in ((self._bins(), frames), (frames, self._bins()), (1, 1024, self._bins())):
            yield {"input_features": self.noise(BATCH, *shape)} | decoder

    def _input_values(self):
        decoder = {"decoder_input_ids": self.ids} if "decoder_input_ids" in self.taken else {}
        frames = getattr(self.config, "max_length", 64)
        for shape in ((frames, self._bins()), (4096,), (1, 4096), (16384,), (1, 16384)):
            yield {"input_values": self.noise(BATCH, *shape)} | decoder

    def _past_values(self):
        length, inputs = getattr(self.config, "context_length", TOKENS), getattr(self.config, "num_input_channels", 1)
        yield {"past_values": self.noise(BATCH, length, inputs)}
        yield {"past_values": self.noise(BATCH, length)}

    def labels(self) -> Iterator[dict]:
        if "labels" in self.taken:
            short = {"labels": self.ids[:, :4] % 20 + 1}  # a CTC needs more frames than labels
            yield from [short] if "CTC" in type(self.model).__name__ else []
            yield {"labels": self.ids}
            yield {"labels": torch.tensor([0, 1])}
            yield short
            yield {"labels": self.whole(BATCH, IMAGE, IMAGE, high=2)}
        if "start_positions" in self.taken:
            yield {"start_positions": torch.tensor([1, 2]), "end_positions": torch.tensor([3, 4])}
        if "bool_masked_pos" in self.taken and "Masked" in type(self.model).__name__:
            patches = (IMAGE // getattr(self.config, "patch_size", 8)) ** 2
            yield {"bool_masked_pos": self.whole(BATCH, patches, high=2).bool()}
