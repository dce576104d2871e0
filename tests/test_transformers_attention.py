"""Attention of Hugging Face models, tiny and with random weights: runs through hfnn's, with no other change."""

import pytest
import torch
from torch import nn

import hfnn
from hfnn.ops import attention as room

transformers = pytest.importorskip("transformers")

from hfnn.adapters import attention, masks, usual  # noqa: E402
from hfnn.core.holder import target_of  # noqa: E402
from hfnn.ops.attention import mask as room_mask  # noqa: E402
from hfnn.patterns import routed  # noqa: E402

WIDTHS = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = WIDTHS | {"num_key_value_heads": 2, "head_dim": 8}
ENCODER = WIDTHS | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
ALTERNATING = GROUPED | {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
EAGER = {"attn_implementation": "eager"}  # the default of newer versions for it
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 64, "dropout_rate": 0.0}
WHISPER = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "num_mel_bins": 8, "max_source_positions": 16}
WHISPER |= {"encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 64, "bos_token_id": 1}
GPT2 |= {"eos_token_id": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}

# name -> (model, config, arguments)
MODELS = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", GPT2),
    "bert": ("BertForMaskedLM", "BertConfig", ENCODER),
    "t5": ("T5ForConditionalGeneration", "T5Config", T5 | {"decoder_start_token_id": 0}),
    "llama": ("LlamaForCausalLM", "LlamaConfig", GROUPED),
    "mistral": ("MistralForCausalLM", "MistralConfig", GROUPED | {"sliding_window": 5}),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", ALTERNATING | {"attn_logit_softcapping": 0.1} | EAGER),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", ALTERNATING | {"use_sliding_window": True}),
    "gpt_oss": (
        "GptOssForCausalLM",
        "GptOssConfig",
        ALTERNATING | {"num_local_experts": 2, "num_experts_per_tok": 1, "experts_implementation": "eager"},
    ),
    "whisper": (
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        WIDTHS | WHISPER | {"decoder_start_token_id": 1, "max_target_positions": 64},
    ),
    "vit": ("ViTForImageClassification", "ViTConfig", ENCODER | {"image_size": 16, "patch_size": 4}),
}
DECODERS = ("gpt2", "llama", "mistral", "gemma2", "qwen3", "gpt_oss")
TOKENS = 14


def build(name, **changes):
    torch.manual_seed(0)
    model, config, arguments = MODELS[name]
    return getattr(transformers, model)(getattr(transformers, config)(**(arguments | changes))).eval()


def padding(kind):
    """(2, TOKENS): which tokens count."""
    mask = torch.ones(2, TOKENS, dtype=torch.int64)
    if kind == "right":
        mask[0, 9:] = 0
    elif kind == "left":
        mask[0, :5] = 0
    elif kind == "holes":
        mask[0, 3:6] = mask[1, 8] = 0
    return mask


def inputs(name, kind="none"):
    generator = torch.Generator().manual_seed(1)
    if name == "vit":
        return {"pixel_values": torch.randn(2, 3, 16, 16, generator=generator)}
    ids = torch.randint(3, 64, (2, TOKENS), generator=generator)
    if name == "whisper":
        return {"input_features": torch.randn(2, 8, 32, generator=generator), "decoder_input_ids": ids}
    mask = padding(kind)
    batch = {"input_ids": ids, "attention_mask": mask}
    if name == "t5":
        batch |= {"decoder_input_ids": ids.flip(0), "decoder_attention_mask": mask.flip(0)}
    return batch


class Seen(nn.Module):
    """The logits that count."""

    def __init__(self, model, mask=None):
        super().__init__()
        self.model, self.mask = model, mask

    def forward(self, **batch):
        logits = self.model(**batch).logits
        return logits if self.mask is None else logits[self.mask.bool()]


@pytest.fixture(autouse=True)
def at_any_size(monkeypatch):
    """hfnn's attention runs in small calls, too."""
    monkeypatch.setattr(usual, "SMALL", 0)
    monkeypatch.setattr(routed, "SMALL", 0)


@pytest.fixture
def ran(monkeypatch):
    """How often the C++ kernel ran forward and backward. No other kernel may run."""
    kernel, count = next(k for k in room.OP.kernels if k.name == "cpp"), {"forward": 0, "backward": 0, "calls": []}
    for name in ("forward", "backward"):
        function = getattr(kernel, name)

        def counted(*args, function=function, name=name):
            count[name] += 1
            return function(*args)

        monkeypatch.setitem(vars(kernel), name, counted)
    function = room.in_rows

    def watched(*args, **given):
        count["calls"].append({k for k, v in given.items() if v is not None})
        return function(*args, **given)

    monkeypatch.setattr(room, "in_rows", watched)
    with hfnn.use("cpp"):
        yield count


CASES = [(name, kind) for name in MODELS for kind in ("none", "right", "left", "holes")]
CASES = [(name, kind) for name, kind in CASES if kind == "none" or name not in ("vit", "whisper")]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_accuracy(name, kind, ran):
    """float32: logits that count and all gradients are within the accuracy rule, each attention by the kernel."""
    model, batch = build(name), inputs(name, kind)
    mask = batch.get("decoder_attention_mask", batch.get("attention_mask"))
    model = Seen(hfnn.convert(model, only=lambda _, m: hasattr(m, "config")), mask)
    found = hfnn.verify(model, **batch)
    assert found.ok, str(found)
    layers = sum(target_of(m) is attention.Attention for m in model.modules())
    assert layers == {"t5": 6, "whisper": 6}.get(name, 2)
    assert ran["forward"] == ran["backward"] == layers


def test_nothing_dense(ran):
    """Arguments describe the mask; no dense mask is passed."""
    for name, kind, wanted in (
        ("llama", "none", {"is_causal"}),
        ("llama", "right", {"window", "lengths"}),
        ("llama", "left", {"window", "lengths"}),
        ("mistral", "left", {"window", "lengths"}),
        ("bert", "right", {"lengths"}),
        ("gemma2", "right", {"window", "lengths", "softcap"}),
        ("gemma2", "left", {"window", "lengths", "softcap"}),
        ("gpt_oss", "none", {"window", "sinks"}),
    ):
        ran["calls"].clear()
        hfnn.convert(build(name))(**inputs(name, kind))
        for given in ran["calls"]:
            # uniform: of the layers in which a query may see no key
            assert given - {"enable_gqa", "prefer", "dropout_p", "scale", "stock", "uniform"} == wanted, (name, kind)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "qwen3"])  # GPT-OSS ignores positions
@pytest.mark.parametrize("rows", [1, 2])
def test_packed(name, rows, ran):
    """Packed sequences, known by their positions: none sees another, and there is no mask."""
    model, ids = build(name), inputs(name)["input_ids"][:rows]
    positions = torch.stack([torch.cat([torch.arange(n) for n in s]) for s in ((3, 9, 2), (8, 6))])[:rows]
    model = hfnn.convert(model, only=lambda _, m: hasattr(m, "config"))
    found = hfnn.verify(Seen(model), input_ids=ids, position_ids=positions, use_cache=False)
    assert found.ok, str(found)
    assert ran["forward"] == ran["backward"] == 2
    assert all("cu_seqlens" in given and "attn_mask" not in given for given in ran["calls"]), ran["calls"]


def test_packed_by_starts(ran):
    """Given only the collator's cu_seq_lens, sequences do not see each other, as in flash attention."""
    model, ids = hfnn.convert(build("mistral")), inputs("mistral")["input_ids"][:1]
    starts = torch.tensor([0, 8, TOKENS], dtype=torch.int32)
    how = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": 8, "max_length_k": 8}
    positions = torch.cat([torch.arange(8), torch.arange(TOKENS - 8)])[None]
    packed = model(ids, position_ids=positions, use_cache=False, **how).logits
    alone = torch.cat([model(part, use_cache=False).logits for part in (ids[:, :8], ids[:, 8:])], 1)
    torch.testing.assert_close(packed, alone)


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generate(name, cache):
    """The same tokens, from a padded batch, in eval and in training mode."""
    model, batch = build(name), inputs(name, "left")
    how = {"max_new_tokens": 6, "do_sample": False, "cache_implementation": cache, "pad_token_id": 0}
    how["disable_compile"] = True
    wanted = model.generate(**batch, **how)
    hfnn.convert(model, prefer="memory")
    assert torch.equal(model.generate(**batch, **how), wanted)
    with hfnn.use("torch"):
        assert torch.equal(model.generate(**batch, **how), wanted)


def test_generate_encoder_decoder():
    for name in ("t5", "whisper"):
        model, batch = build(name), inputs(name, "right")
        batch = {k: v for k, v in batch.items() if not k.startswith("decoder")}
        how = {"max_new_tokens": 5, "do_sample": False}
        wanted = model.generate(**batch, **how)
        assert torch.equal(hfnn.convert(model, prefer="memory").generate(**batch, **how), wanted)


def test_dropout(ran):
    """Draws differ, their mean is the result without dropout, a seed repeats a draw, and eval has none."""
    model, batch = build("llama", attention_dropout=0.3), inputs("llama", "right")
    module, hidden = model.model.layers[0].self_attn, torch.randn(2, TOKENS, 32)
    angles = model.model.rotary_emb(hidden, torch.arange(TOKENS)[None])

    def attend():
        return module(hidden_states=hidden, position_embeddings=angles, attention_mask=None)[0].detach()

    wanted = attend()
    hfnn.convert(model, only=lambda _, m: hasattr(m, "config"))
    torch.testing.assert_close(attend(), wanted)
    module.train()
    assert not torch.equal(attend(), attend())
    torch.manual_seed(3)
    first = attend()
    torch.manual_seed(3)
    assert torch.equal(attend(), first)
    torch.testing.assert_close(sum(attend() for _ in range(3000)) / 3000, wanted, rtol=0, atol=0.03)
    model.train()
    model(**batch, labels=batch["input_ids"]).loss.backward()


def test_four_dimensional_masks(ran):
    """A mask of the user's own, boolean or floating-point."""
    model, ids = build("llama"), inputs("llama")["input_ids"]
    seen = torch.rand(2, 1, TOKENS, TOKENS) > 0.4
    seen |= torch.eye(TOKENS, dtype=torch.bool)
    added = torch.where(seen, 0.0, torch.finfo(torch.float32).min)
    hfnn.convert(model, only=lambda _, m: hasattr(m, "config"))
    for mask in (seen, added):
        found = hfnn.verify(Seen(model), input_ids=ids, attention_mask=mask)
        assert found.ok, str(found)
    assert ran["forward"] == 4


@pytest.mark.parametrize("kinds", [("holes", "left"), ("right", "holes"), ("left", "right")])
def test_a_users_mask_may_be_filled_anew(kinds, ran):
    """Writes that change no version: each forward uses the current contents."""
    mine, other = hfnn.convert(build("llama"), only=lambda _, m: hasattr(m, "config")), build("llama")
    batch = inputs("llama") | {"attention_mask": torch.ones(2, TOKENS, dtype=torch.bool)}
    for kind in kinds:
        counts = padding(kind).bool()
        batch["attention_mask"].data.copy_(counts)
        torch.testing.assert_close(Seen(mine, counts)(**batch), Seen(other, counts)(**batch), rtol=1e-4, atol=1e-5)
    assert ran["forward"] == 4


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["none", "left", "holes"])
def test_a_hook_writes_to_the_mask(kind, implementation, ran):
    """Attention knock-out: from the second layer on, a token does not see another."""

    def knock_out(module, args, kwargs):
        mask = kwargs["attention_mask"]
        if mask is not None:  # transformers makes none for sdpa without padding
            mask[:, :, 8, 7] = False if mask.dtype is torch.bool else torch.finfo(mask.dtype).min

    stock = build("llama", attn_implementation=implementation)
    ours = hfnn.convert(build("llama", attn_implementation=implementation))
    given, found = inputs("llama", kind), []
    for model in (stock, ours):
        before = model(**given).logits[given["attention_mask"].bool()]
        handle = model.model.layers[1].self_attn.register_forward_pre_hook(knock_out, with_kwargs=True)
        found.append(model(**given).logits[given["attention_mask"].bool()])
        handle.remove()
        assert (found[-1] - before).abs().max() > 1e-4 or (kind, implementation) == ("none", "sdpa")
    assert ran
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("kind", "what"), [("holes", "_pack"), ("right", "_bound"), ("own", "_pack")])
def test_all_layers_share_what_is_made_of_a_mask(kind, what, ran, monkeypatch):
    made, make = [], getattr(room_mask, what)
    monkeypatch.setattr(room_mask, what, lambda *args: made.append(args) or make(*args))
    model = hfnn.convert(build("llama"))
    if kind == "own":  # a rule that hfnn cannot parse
        monkeypatch.setattr(masks, "read", lambda function: None)
    model(**inputs("llama", "right" if kind == "own" else kind))
    assert len(made) == 1 and ran["forward"] == 2


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant, ran):
    model, batch = hfnn.convert(build("mistral")).train(), inputs("mistral", "left")

    def grads():
        model.zero_grad()
        model(**batch, labels=batch["input_ids"], use_cache=False).loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    wanted = grads()
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": reentrant})
    ran["forward"] = 0
    assert all(torch.equal(a, b) for a, b in zip(grads(), wanted, strict=True))
    assert ran["forward"] == 4
