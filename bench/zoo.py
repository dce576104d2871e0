"""Models, batches and losses for models.py. Libraries are imported when a model of theirs is built."""

from collections.abc import Callable
from dataclasses import dataclass

import rivals
import torch

# Models: each function takes (layers or None, tiny) and returns what is built on the current device.


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


def _vit(layers, tiny):
    try:
        import timm
    except ImportError as error:
        raise rivals.Skip(f"cannot be imported: {error}") from error
    small = {"embed_dim": 64, "num_heads": 2, "img_size": 32} if tiny else {}
    return timm.create_model("vit_base_patch16_224", depth=layers or (2 if tiny else 12), num_classes=1000, **small)


# Batches: each function takes (model, *shape) and returns the arguments of `loss`.


def _text(model, batch, tokens):
    ids = torch.randint(model.config.vocab_size, (batch, tokens))
    return {"input_ids": ids, "labels": ids}


def _masked(model, batch, tokens):
    """15 of 100 tokens are to be guessed."""
    ids = torch.randint(model.config.vocab_size, (batch, tokens))
    return {"input_ids": ids, "labels": ids.where(torch.rand(ids.shape) < 0.15, -100)}


def _images(model, batch, size):
    return {"images": torch.randn(batch, 3, size, size), "labels": torch.randint(1000, (batch,))}


def _own_loss(model, **batch):
    return model(**batch).loss


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
}
