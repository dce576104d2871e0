"""Models and batches for host.py: tiny widths, few tokens, six layers. A library is imported with its first model."""

import functools
import importlib.metadata

import torch
from torch import nn

LAYERS, WIDTH, TOKENS, VOCABULARY, IMAGE = 6, 32, 16, 100, 32

# transformers: name -> (class, fields of its config beside those of the same meaning in all of them).
_USUAL = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": 2,
    "intermediate_size": 2 * WIDTH, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "use_cache": False,
}  # fmt: skip
_GROUPED = {**_USUAL, "num_key_value_heads": 1, "head_dim": 16}
_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_PIXELS = {**_USUAL, "image_size": IMAGE, "patch_size": 8}
_BART = {
    "vocab_size": VOCABULARY, "d_model": WIDTH, "encoder_layers": LAYERS, "decoder_layers": LAYERS,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 2 * WIDTH,
    "decoder_ffn_dim": 2 * WIDTH, "max_position_embeddings": 64, "use_cache": False, **_IDS,
    "decoder_start_token_id": 2,
}  # fmt: skip
_T5 = {
    "vocab_size": VOCABULARY, "d_model": WIDTH, "d_kv": 16, "d_ff": 2 * WIDTH, "num_layers": LAYERS, "num_heads": 2,
    "decoder_start_token_id": 0, "use_cache": False,
}  # fmt: skip
_AUDIO = {
    **_USUAL, "conv_dim": (WIDTH,) * 3, "conv_kernel": (10, 3, 3), "conv_stride": (5, 2, 2),
    "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2, "mask_time_prob": 0.0, "layerdrop": 0.0,
}  # fmt: skip
TRANSFORMERS = {
    "albert": ("AlbertForMaskedLM", {**_USUAL, "embedding_size": WIDTH}),
    "bart": ("BartForConditionalGeneration", _BART),
    "bert": ("BertForMaskedLM", _USUAL),
    "bloom": ("BloomForCausalLM", {**_IDS, "vocab_size": VOCABULARY, "hidden_size": WIDTH, "n_layer": LAYERS,
                                   "n_head": 2, "use_cache": False}),
    "deberta-v2": ("DebertaV2ForMaskedLM", _USUAL),
    "dinov2": ("Dinov2ForImageClassification", _PIXELS),
    "distilbert": ("DistilBertForMaskedLM", {"vocab_size": VOCABULARY, "dim": WIDTH, "n_layers": LAYERS, "n_heads": 2,
                                             "hidden_dim": 2 * WIDTH, "max_position_embeddings": 64}),
    "electra": ("ElectraForMaskedLM", {**_USUAL, "embedding_size": WIDTH}),
    "falcon": ("FalconForCausalLM", _USUAL),
    "gemma": ("GemmaForCausalLM", _GROUPED),
    "gemma2": ("Gemma2ForCausalLM", _GROUPED),
    "gpt2": ("GPT2LMHeadModel", {**_IDS, "vocab_size": VOCABULARY, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": 2,
                                 "n_positions": 64, "use_cache": False}),
    "gpt-neox": ("GPTNeoXForCausalLM", _USUAL),
    "llama": ("LlamaForCausalLM", _GROUPED),
    "mistral": ("MistralForCausalLM", _GROUPED),
    "olmo2": ("Olmo2ForCausalLM", _GROUPED),
    "opt": ("OPTForCausalLM", {**_USUAL, "ffn_dim": 2 * WIDTH, "word_embed_proj_dim": WIDTH}),
    "phi": ("PhiForCausalLM", _USUAL),
    "phi3": ("Phi3ForCausalLM", _GROUPED),
    "qwen2": ("Qwen2ForCausalLM", _GROUPED),
    "roberta": ("RobertaForMaskedLM", _USUAL),
    "t5": ("T5ForConditionalGeneration", {**_T5, "feed_forward_proj": "gated-gelu"}),
    "vit": ("ViTForImageClassification", _PIXELS),
    "wav2vec2": ("Wav2Vec2ForCTC", _AUDIO),
    "whisper": ("WhisperForConditionalGeneration", {**_BART, "num_mel_bins": 8, "max_source_positions": TOKENS,
                                                    "max_target_positions": 64}),
}  # fmt: skip
# timm: name -> (its name there, options).
TIMM = {
    "timm convnext": ("convnext_tiny", {"depths": (2, 2, 2, 2), "dims": (16, 16, 32, 32)}),
    "timm deit3": ("deit3_small_patch16_224", {"img_size": IMAGE, "patch_size": 8, "embed_dim": WIDTH, "num_heads": 2,
                                               "depth": LAYERS}),
    "timm efficientnet": ("efficientnet_b0", {}),
    "timm mobilenetv3": ("mobilenetv3_small_050", {}),
    "timm regnet": ("regnetx_002", {}),
    "timm resnet": ("resnet50", {"layers": (1, 1, 1, 1)}),
    "timm swin": ("swin_tiny_patch4_window7_224", {"img_size": IMAGE, "embed_dim": 16, "depths": (2, 2),
                                                   "num_heads": (1, 2), "window_size": 4}),
    "timm vit": ("vit_base_patch16_224", {"img_size": IMAGE, "patch_size": 8, "embed_dim": WIDTH, "num_heads": 2,
                                          "depth": LAYERS}),
}  # fmt: skip


class Skip(Exception):
    """A library is missing."""


def _transformers(name: str):
    import transformers

    kind, fields = TRANSFORMERS[name]
    cls = getattr(transformers, kind)
    model = cls(cls.config_class(**fields)).train()
    ids = torch.randint(4, VOCABULARY, (1, TOKENS))
    if "pixel_values" in model.main_input_name:
        return model, {"pixel_values": torch.randn(1, 3, IMAGE, IMAGE), "labels": torch.tensor([1])}
    if name == "wav2vec2":
        return model, {"input_values": torch.randn(1, 1600), "labels": ids[:, :4]}
    if name == "whisper":
        return model, {"input_features": torch.randn(1, 8, 2 * TOKENS), "labels": ids}
    return model, {"input_ids": ids, "labels": ids}


def _timm(name: str):
    try:
        import timm
    except ImportError as error:
        raise Skip(f"timm cannot be imported: {error}") from error
    kind, options = TIMM[name]
    model = timm.create_model(kind, num_classes=10, **options).train()
    return model, {"images": torch.randn(2, 3, IMAGE, IMAGE), "target": torch.tensor([1, 2])}


class _Block(nn.Module):
    """A residual block of a convolutional codec."""

    def __init__(self, width: int, act: nn.Module):
        super().__init__()
        norm = nn.utils.parametrizations.weight_norm
        self.body = nn.Sequential(act, norm(nn.Conv1d(width, width // 2, 3, padding=1)), act,
                                  norm(nn.Conv1d(width // 2, width, 1)))  # fmt: skip

    def forward(self, x):
        return x + self.body(x)


class _Codec(nn.Module):
    """As Encodec: weight-normed convolutions, ELU, an LSTM."""

    def __init__(self, width: int = 8):
        super().__init__()
        norm = nn.utils.parametrizations.weight_norm
        down, up = [norm(nn.Conv1d(1, width, 7, padding=3))], []
        for wide in (width, 2 * width):
            down += [_Block(wide, nn.ELU()), nn.ELU(), norm(nn.Conv1d(wide, 2 * wide, 4, 2, 1))]
            up = [nn.ELU(), norm(nn.ConvTranspose1d(2 * wide, wide, 4, 2, 1)), _Block(wide, nn.ELU()), *up]
        self.down, self.up = nn.Sequential(*down), nn.Sequential(*up, nn.ELU(), norm(nn.Conv1d(width, 1, 7, padding=3)))
        self.lstm = nn.LSTM(4 * width, 4 * width, 2, batch_first=True)

    def forward(self, x):
        y = self.down(x)
        return self.up(y + self.lstm(y.transpose(1, 2))[0].transpose(1, 2))


class _Demucs(nn.Module):
    """As Demucs: convolutions, ReLU, GLU, an LSTM, and sums with the encoder's results."""

    def __init__(self, width: int = 8):
        super().__init__()
        self.down, self.up, inputs = nn.ModuleList(), nn.ModuleList(), 1
        for wide in (width, 2 * width, 4 * width):
            self.down.append(nn.Sequential(nn.Conv1d(inputs, wide, 8, 4, 2), nn.ReLU(), nn.Conv1d(wide, 2 * wide, 1),
                                           nn.GLU(1)))  # fmt: skip
            self.up.insert(0, nn.Sequential(nn.Conv1d(wide, 2 * wide, 3, padding=1), nn.GLU(1),
                                            nn.ConvTranspose1d(wide, inputs, 8, 4, 2), nn.ReLU()))  # fmt: skip
            inputs = wide
        self.lstm = nn.LSTM(inputs, inputs, 2, batch_first=True)

    def forward(self, x):
        kept = []
        for layer in self.down:
            x = layer(x)
            kept.append(x)
        x = self.lstm(x.transpose(1, 2))[0].transpose(1, 2)
        for layer in self.up:
            x = layer(x + kept.pop())
        return x


def _audio(cls: type, length: int):
    return cls().train(), {"images": torch.randn(2, 1, length), "target": torch.randn(2, 1, length)}


MODELS = {name: functools.partial(_transformers, name) for name in TRANSFORMERS}
MODELS |= {name: functools.partial(_timm, name) for name in TIMM}
AUDIO = {"codec": functools.partial(_audio, _Codec, 1024), "demucs": functools.partial(_audio, _Demucs, 1024)}
MODELS |= AUDIO


def loss(model: nn.Module, batch: dict) -> torch.Tensor:
    if "target" not in batch:
        return model(**batch).loss
    y, target = model(batch["images"]), batch["target"]
    return nn.functional.mse_loss(y, target) if target.is_floating_point() else nn.functional.cross_entropy(y, target)


def versions() -> dict:
    """Versions of the libraries of the models."""
    found = {}
    for package in ("transformers", "timm"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = ""
    return found
