"""Tensors without values: conversion, and the bytes of a step, under FakeTensorMode and on "meta"."""

import contextlib
import types

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

import hfnn
from hfnn import memory


def own_classes():
    """A model of classes that no proof has seen yet."""

    class Norm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(64))

        def forward(self, x):
            return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6))

    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.up, self.down = nn.Linear(64, 128), nn.Linear(64, 128), nn.Linear(128, 64)

        def forward(self, x):
            return self.down(nn.functional.silu(self.gate(x)) * self.up(x))

    return nn.Sequential(Norm(), Gated())


class Norms(nn.Sequential):
    """Modules with parameters and buffers, of each kind that is swapped."""

    def __init__(self):
        norms = nn.LayerNorm(8), nn.RMSNorm(8), nn.BatchNorm1d(8), nn.GroupNorm(2, 8), nn.PReLU(8)
        super().__init__(nn.Embedding(4, 8), nn.Linear(8, 8), *norms, nn.Conv1d(8, 8, 1), nn.LSTM(8, 8), own_classes())


# ---- conversion


def test_swaps_are_those_of_a_real_model():
    def swaps(model):
        return {row.name: row.to for row in hfnn.report(hfnn.convert(model, recompute="gemm")).rows}

    with FakeTensorMode():
        found = swaps(own_classes())
    assert found == swaps(own_classes()) and sum(to is not None for to in found.values()) >= 5


# ---- other dtypes


def outcome(call):
    """The type of the error that a call raises, or what it returns."""
    try:
        return call()
    except Exception as error:
        return type(error)


@pytest.mark.parametrize("place", ["fake", "fake parameters", "meta"])
@pytest.mark.parametrize("swap", [False, True], ids=["in place", "swapped"])
def test_a_converted_model_goes_to_another_dtype_as_a_stock_one(place, swap):
    """`.to` of fakes and of "meta" gives torch's result, or raises the type of its error, in the mode and outside."""

    def moved(convert, how, inside):
        with FakeTensorMode() if place.startswith("fake") else contextlib.nullcontext() as mode:
            with torch.device("meta") if place == "meta" else contextlib.nullcontext():
                model = Norms()
            model = faked(model, mode) if place == "fake parameters" else model
            model = hfnn.convert(model, prefer="memory") if convert else model
            if inside:
                error = outcome(lambda: how(model) and None)
        if not inside:
            error = outcome(lambda: how(model) and None)
        tensors = [*model.named_parameters(), *model.named_buffers()]
        # After an error, how many tensors were converted depends on what torch's fakes refer to.
        return error or [(name, t.dtype, t.device, type(t), t.requires_grad, t.stride()) for name, t in tensors]

    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(swap)
    try:
        for inside in (True, False):
            for how in (
                lambda m: m.to(torch.bfloat16),
                lambda m: m.to("cpu", torch.float16),
                lambda m: m.to(torch.int32),
                lambda m: m.to_empty(device="cpu"),
                lambda m: m.to("meta"),
            ):
                assert moved(True, how, inside) == moved(False, how, inside)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


# ---- bytes of a step

transformers = pytest.importorskip("transformers")

TOKENS, VOCABULARY = 32, 512
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
IMAGE = {"image_size": 32, "patch_size": 8}
VISION = {**SMALL, **IMAGE}


def ids():
    return torch.zeros(2, TOKENS, dtype=torch.int64)


def images():
    return torch.zeros(2, 3, 32, 32)


def text():
    return {"input_ids": ids(), "labels": ids()}


def pictures():
    return {"pixel_values": images(), "labels": torch.zeros(2, dtype=torch.int64)}


class UNet(nn.Module):
    def __init__(self, config=None):
        super().__init__()

        def block(inputs, outputs):
            first = nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(4, outputs), nn.SiLU()
            return nn.Sequential(*first, nn.Conv2d(outputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU())

        self.down, self.low, self.up = block(3, 16), block(16, 32), block(48, 16)
        self.pool, self.larger, self.out = nn.MaxPool2d(2), nn.Upsample(scale_factor=2), nn.Conv2d(16, 4, 1)

    def forward(self, pixel_values, labels):
        wide = self.down(pixel_values)
        loss = self.out(self.up(torch.cat([wide, self.larger(self.low(self.pool(wide)))], 1))).square().mean()
        return types.SimpleNamespace(loss=loss)


class Recurrent(nn.Module):
    def __init__(self, config=None):
        super().__init__()
        self.embedding, self.drop, self.head = nn.Embedding(VOCABULARY, 32), nn.Dropout(0.1), nn.Linear(48, VOCABULARY)
        self.rnn = nn.LSTM(32, 48, 2, batch_first=True, dropout=0.1)

    def forward(self, input_ids, labels):
        logits = self.head(self.drop(self.rnn(self.embedding(input_ids))[0]))
        return types.SimpleNamespace(loss=nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()))


# By name: the class, its config's class and options, the arguments of a call.
MODELS = {
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {"vocab_size": VOCABULARY, "n_embd": 64, "n_head": 4, "n_layer": 2, "bos_token_id": 1, "eos_token_id": 2},
        text,
    ),
    "bert": ("BertForMaskedLM", "BertConfig", SMALL, text),
    "llama": ("LlamaForCausalLM", "LlamaConfig", {**SMALL, "num_key_value_heads": 2}, text),
    "eager": (
        "LlamaForCausalLM",
        "LlamaConfig",
        {**SMALL, "num_key_value_heads": 2, "attn_implementation": "eager"},
        text,
    ),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", SMALL, text),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {"vocab_size": VOCABULARY, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
        | {"decoder_start_token_id": 0},
        text,
    ),
    "clip": (
        "CLIPModel",
        "CLIPConfig",
        {"text_config": SMALL, "vision_config": VISION, "projection_dim": 32},
        lambda: {"input_ids": ids(), "pixel_values": images(), "return_loss": True},
    ),
    "whisper": (
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {"vocab_size": VOCABULARY, "d_model": 64, "max_source_positions": 32, "num_mel_bins": 16}
        | {f"{part}_{what}": size for part in ("encoder", "decoder") for what, size in (
            ("layers", 2), ("attention_heads", 4), ("ffn_dim", 128))}
        | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
        lambda: {"input_features": torch.zeros(2, 16, 64), "labels": ids()},
    ),
    "vit": ("ViTForImageClassification", "ViTConfig", VISION, pictures),
    "swin": (
        "SwinForImageClassification",
        "SwinConfig",
        {"image_size": 32, "patch_size": 2, "embed_dim": 32, "depths": [1, 1], "num_heads": [2, 4], "window_size": 4},
        pictures,
    ),
    "convnext": (
        "ConvNextForImageClassification",
        "ConvNextConfig",
        {"hidden_sizes": [16, 32], "depths": [1, 1], "num_stages": 2, "image_size": 32},
        pictures,
    ),
    "resnet": (
        "ResNetForImageClassification",
        "ResNetConfig",
        {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1], "layer_type": "basic"},
        pictures,
    ),
    "mobilenet": (
        "MobileNetV2ForImageClassification",
        "MobileNetV2Config",
        {"image_size": 32, "depth_multiplier": 0.25},
        pictures,
    ),
    "unet": (UNet, None, {}, pictures),
    "lstm": (Recurrent, None, {}, text),
}  # fmt: skip
WAYS = {
    "auto": {},
    "memory": {"prefer": "memory"},
    "gemm": {"recompute": "gemm"},
    "autocast": {"prefer": "memory"},
    "checkpoint": {"prefer": "memory"},
}
# torch's own op keeps less of a fake: an LSTM, and under autocast a layer norm.
TORCHS = {("lstm", "auto"), ("lstm", "gemm"), ("convnext", "autocast")}
SHORT = {("gpt2", "checkpoint"), ("bert", "memory"), ("eager", "gemm"), ("lstm", "memory")}  # others are slow
TABLE = [
    pytest.param(name, way, marks=() if (name, way) in SHORT else pytest.mark.slow) for name in MODELS for way in WAYS
]


def built(name):
    cls, config, options, _ = MODELS[name]
    if config is None:
        return cls()
    return getattr(transformers, cls)(getattr(transformers, config)(**options))


def faked(model, mode):
    """The model with fake tensors in place of its own: some models read values while they are built."""
    for module in model.modules():
        for part in (module._parameters, module._buffers):
            part.update({name: mode.from_tensor(t) for name, t in part.items() if t is not None})
    return model


def step(name, way, place, converted=True):
    """The bytes that a step of a model keeps."""
    model = built(name)
    with FakeTensorMode() if place == "fake" else contextlib.nullcontext() as mode:
        model = (model if mode is None else faked(model, mode)).train()
        model = hfnn.convert(model, **WAYS[way]) if converted else model
        if way == "checkpoint" and getattr(model, "supports_gradient_checkpointing", False):
            getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
        loss = None

        def forward():
            nonlocal loss
            loss = model(**MODELS[name][-1]()).loss
            return loss

        with torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"):
            try:
                saved = memory.saved_bytes(forward)
            except RuntimeError as error:
                if "primitive" not in str(error):
                    raise
                with pytest.raises(RuntimeError, match="primitive"):  # torch's own, too
                    nn.LSTM(8, 8)(torch.randn(2, 2, 8, requires_grad=True))
                pytest.skip("oneDNN has no LSTM in bfloat16 on this processor")
        loss.backward()
        assert all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters() if p.requires_grad)
    return saved


@pytest.mark.parametrize("name, way", TABLE)
def test_a_fake_step_keeps_the_bytes_of_a_real_one(name, way):
    real, fake = (step(name, way, place) for place in ("real", "fake"))
    if (name, way) in TORCHS:
        stock = [step(name, way, place, False).by_op for place in ("real", "fake")]
        torchs = {op for op in {*stock[0], *stock[1]} if stock[0].get(op) != stock[1].get(op)}
        apart = [{op: size for op, size in kept.by_op.items() if op not in torchs} for kept in (real, fake)]
        assert torchs and apart[0] == apart[1] and fake.aside == real.aside
    else:
        assert (fake.by_op, fake.total, fake.aside) == (real.by_op, real.total, real.aside)
