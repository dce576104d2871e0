"""Models, batches and losses for models.py. A library is imported when one of its models is built."""

from collections.abc import Callable
from dataclasses import dataclass

import own
import rivals
import torch
from torch import nn

# Models: each function takes (layers or None, tiny) and returns a model on the current device.


def _gpt2(layers, tiny):
    import transformers as t

    small = {"n_embd": 64, "n_head": 2, "vocab_size": 512, "n_positions": 64} if tiny else {}
    config = t.GPT2Config(n_layer=layers or (2 if tiny else 12), use_cache=False, **small)
    return t.GPT2LMHeadModel(config)


def _llama(layers, tiny):
    import transformers as t

    large = {"hidden_size": 2048, "num_attention_heads": 32, "intermediate_size": 5632, "vocab_size": 32000}
    small = {"hidden_size": 64, "num_attention_heads": 8, "intermediate_size": 176, "vocab_size": 512}
    config = t.LlamaConfig(
        **(small if tiny else large), num_hidden_layers=layers or (2 if tiny else 22), num_key_value_heads=4,
        max_position_embeddings=2048, use_cache=False,
    )  # fmt: skip
    return t.LlamaForCausalLM(config)


def _bert(layers, tiny):
    import transformers as t

    small = {"hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 256, "vocab_size": 512} if tiny else {}
    return t.BertForMaskedLM(t.BertConfig(num_hidden_layers=layers or (2 if tiny else 12), **small))


def _t5(layers, tiny):
    import transformers as t

    small = {"d_model": 64, "d_kv": 32, "num_heads": 2, "d_ff": 176, "vocab_size": 512} if tiny else {}
    base = {"d_model": 768, "num_heads": 12, "d_ff": 2048, "feed_forward_proj": "gated-gelu"}  # t5-v1_1-base
    config = t.T5Config(
        **{**base, **small}, num_layers=layers or (2 if tiny else 12), decoder_start_token_id=0, use_cache=False
    )
    return t.T5ForConditionalGeneration(config)


def _vit(layers, tiny):
    small = {"embed_dim": 64, "num_heads": 2, "img_size": 32} if tiny else {}
    return _timm("vit_base_patch16_224", depth=layers or (2 if tiny else 12), **small)


def _timm(name, **options):
    try:
        import timm
    except ImportError as error:
        raise rivals.Skip(f"cannot be imported: {error}") from error
    return timm.create_model(name, num_classes=1000, **options)


def _swin(layers, tiny):
    small = {"embed_dim": 16, "depths": (1, 1), "num_heads": (1, 2), "img_size": 32, "window_size": 4} if tiny else {}
    return _timm("swin_tiny_patch4_window7_224", **small)


def _convnext(layers, tiny):
    return _timm("convnext_tiny", **({"depths": (1, 1), "dims": (16, 32)} if tiny else {}))


def _resnet(layers, tiny):
    return _timm("resnet50", **({"layers": (1, 1, 1, 1)} if tiny else {}))


def _unet(layers, tiny):
    """The UNet of Stable Diffusion 2.1."""
    try:
        from diffusers import UNet2DConditionModel
    except ImportError as error:
        raise rivals.Skip(f"cannot be imported: {error}") from error
    wide = {"block_out_channels": (320, 640, 1280, 1280), "attention_head_dim": (5, 10, 20, 20)}
    small = {"block_out_channels": (32, 64, 64, 64), "attention_head_dim": (1, 2, 2, 2)}
    return UNet2DConditionModel(
        sample_size=64, cross_attention_dim=1024, use_linear_projection=True, **(small if tiny else wide)
    )


def _own_gpt(layers, tiny):
    small = {"width": 64, "heads": 2, "vocabulary": 512, "tokens": 64} if tiny else {}
    return own.GPT(layers or (2 if tiny else 12), **small)


def _own_vit(layers, tiny):
    return own.ViT(layers or (2 if tiny else 12), **({"width": 64, "heads": 2, "size": 32} if tiny else {}))


class _LoRA(nn.Module):
    """A frozen product plus one of rank 8, as in peft."""

    def __init__(self, base, rank=8):
        super().__init__()
        wide, out = base.weight.shape if type(base).__name__ == "Conv1D" else base.weight.shape[::-1]
        self.base, self.dropout = base, nn.Dropout(0.05)
        self.down, self.up = nn.Linear(wide, rank, bias=False), nn.Linear(rank, out, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.base(x) + self.up(self.down(self.dropout(x))) * 2


def _lora(build):
    """The frozen model, with such products added to those of its layers."""

    def lora(layers, tiny):
        model = build(layers, tiny).requires_grad_(False)
        for parent in [m for name, m in model.named_modules() if "." in name]:
            for name, child in list(parent.named_children()):
                if isinstance(child, nn.Linear) or type(child).__name__ == "Conv1D":
                    setattr(parent, name, _LoRA(child))
        return model

    return lora


# Batches: each function takes (model, *shape) and returns the arguments of `loss`.


def _text(model, batch, tokens):
    ids = torch.randint(model.config.vocab_size, (batch, tokens))
    return {"input_ids": ids, "labels": ids}


def _own_text(model, batch, tokens):
    ids = torch.randint(model.wte.num_embeddings, (batch, tokens))
    return {"ids": ids, "targets": ids.roll(-1, 1)}


def _masked(model, batch, tokens):
    """15 of 100 tokens are masked."""
    ids = torch.randint(model.config.vocab_size, (batch, tokens))
    return {"input_ids": ids, "labels": ids.where(torch.rand(ids.shape) < 0.15, -100)}


def _images(model, batch, size):
    return {"images": torch.randn(batch, 3, size, size), "labels": torch.randint(1000, (batch,))}


def _noisy(model, batch, size):
    """Latents, times and texts, for the prediction of noise."""
    latents = torch.randn(batch, 4, size // 8, size // 8)
    times, texts = torch.randint(1000, (batch,)), torch.randn(batch, 77, 1024)
    return {"sample": latents, "timestep": times, "encoder_hidden_states": texts, "noise": torch.randn_like(latents)}


def _own_loss(model, **batch):
    return model(**batch).loss


def _noise_loss(model, noise, **batch):
    return torch.nn.functional.mse_loss(model(**batch).sample, noise)


def _second(model, **batch):
    return model(**batch)[1]


def _classes_loss(model, images, labels):
    return torch.nn.functional.cross_entropy(model(images), labels)


@dataclass(frozen=True)
class Model:
    """shape: (batch, tokens), or (batch, size of an image). liger: what Liger calls it."""

    build: Callable
    shape: tuple[int, int]
    tiny: tuple[int, int] = (2, 32)
    batch: Callable = _text
    loss: Callable = _own_loss
    liger: str | None = None


MODELS = {
    "gpt2": Model(_gpt2, (16, 1024)),
    "llama": Model(_llama, (8, 2048), liger="llama"),
    "bert": Model(_bert, (32, 512), batch=_masked),
    "vit": Model(_vit, (128, 224), batch=_images, loss=_classes_loss),
    "t5": Model(_t5, (16, 512)),
    "swin": Model(_swin, (128, 224), batch=_images, loss=_classes_loss),
    "convnext": Model(_convnext, (128, 224), batch=_images, loss=_classes_loss),
    "resnet": Model(_resnet, (128, 224), batch=_images, loss=_classes_loss),
    "unet": Model(_unet, (5, 512), (1, 64), batch=_noisy, loss=_noise_loss),
    "own-gpt": Model(_own_gpt, (16, 1024), batch=_own_text, loss=_second),
    "own-vit": Model(_own_vit, (128, 224), batch=_images, loss=_classes_loss),
    "gpt2-lora": Model(_lora(_gpt2), (16, 1024)),
    "llama-lora": Model(_lora(_llama), (8, 2048)),
}
