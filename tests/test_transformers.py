"""Hugging Face models, tiny and with random weights: converted, trained and saved with no other change."""

import io
import re

import pytest
import torch

import hfnn
from hfnn.testing import GRADIENTS, OUTPUTS, assert_close

transformers = pytest.importorskip("transformers")

DECODER = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ENCODER = {key: value for key, value in DECODER.items() if key not in ("num_key_value_heads", "head_dim")}

# model -> (config, arguments)
MODELS = {
    "GPT2LMHeadModel": (
        "GPT2Config",
        {
            "n_embd": 64,
            "n_layer": 2,
            "n_head": 4,
            "vocab_size": 128,
            "n_positions": 64,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "LlamaForCausalLM": ("LlamaConfig", DECODER),
    "BertForMaskedLM": ("BertConfig", ENCODER),
    "GemmaForCausalLM": ("GemmaConfig", DECODER),
    "Gemma2ForCausalLM": ("Gemma2Config", DECODER),
    "Qwen2ForCausalLM": ("Qwen2Config", {k: v for k, v in DECODER.items() if k != "head_dim"}),
    "Qwen3ForCausalLM": ("Qwen3Config", DECODER),
    "MistralForCausalLM": ("MistralConfig", DECODER),
    "T5ForConditionalGeneration": (
        "T5Config",
        {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "vocab_size": 128}
        | {"feed_forward_proj": "gated-gelu", "decoder_start_token_id": 0},
    ),
    "OPTForCausalLM": ("OPTConfig", ENCODER | {"ffn_dim": 128, "word_embed_proj_dim": 64}),
    "BloomForCausalLM": (
        "BloomConfig",
        {"hidden_size": 64, "n_layer": 2, "n_head": 4, "vocab_size": 128, "hidden_dropout": 0.1, "pad_token_id": 0},
    ),
    "ViTForImageClassification": ("ViTConfig", ENCODER | {"image_size": 32, "patch_size": 8}),
}

# These run all tests. families.txt lists what each becomes.
THOROUGH = ("GPT2LMHeadModel", "LlamaForCausalLM", "BertForMaskedLM")
# Classes that are left alone in any of the models. Any other must be examined.
LEFT = r"Embedding|ReLU|Tanh|Identity"


def build(name):
    config, arguments = MODELS[name]
    return getattr(transformers, name)(getattr(transformers, config)(**arguments)).eval()


def inputs(name):
    if name.startswith("ViT"):
        return {"pixel_values": torch.randn(2, 3, 32, 32)}
    ids = torch.randint(3, 128, (2, 16))
    return {"input_ids": ids, "labels": ids}


def run(model, batch):
    """Logits and gradients by name."""
    out = model(**batch)
    loss = out.logits.square().mean() if out.loss is None else out.loss
    named = dict(model.named_parameters())
    grads = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    # A copy: logits are computed when read, which must happen before the weights change.
    return {"logits": out.logits.detach().clone(), **{n: g for n, g in zip(named, grads, strict=True) if g is not None}}


@pytest.mark.parametrize("name", MODELS)
def test_accuracy_and_revert(name):
    """float32: within the accuracy rule, through the kernels. After revert: the same bits, classes and state dict."""
    model, batch = build(name), inputs(name)
    classes, keys, wanted = [type(m) for m in model.modules()], list(model.state_dict()), run(model, batch)
    hfnn.convert(model, prefer="memory")
    report = hfnn.report(model)
    assert all(re.search(LEFT, row.original) for row in report.left), str(report)
    hfnn.recipe.counter.reset()
    found = hfnn.verify(model, **batch)
    assert found.ok, str(found)
    assert hfnn.recipe.counter.taken >= 4 and hfnn.recipe.counter.rebuilt >= 4
    assert list(model.state_dict()) == keys
    again = run(hfnn.revert(model), batch)
    assert [type(m) for m in model.modules()] == classes
    assert again.keys() == wanted.keys() and all(torch.equal(again[n], wanted[n]) for n in wanted)


@pytest.mark.parametrize("name", THOROUGH)
def test_bfloat16(name):
    model = hfnn.convert(build(name), prefer="memory").bfloat16()
    found = hfnn.verify(model, **inputs(name))
    assert found.ok, str(found)
    assert {row.dtype for row in found.rows if row.name.startswith("grad")} == {torch.bfloat16}


@pytest.mark.parametrize("name", THOROUGH)
def test_recipes_change_no_bit(name):
    model, batch = hfnn.convert(build(name), prefer="memory"), inputs(name)
    on = run(model, batch)
    with hfnn.recipe.disabled():
        off = run(model, batch)
    assert all(torch.equal(on[n], off[n]) for n in on)


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "LlamaForCausalLM"])
def test_autocast(name):
    """bfloat16 autocast: the same dtypes, and errors against float64 as large as torch's."""
    model, batch = build(name), inputs(name)

    def under_autocast():
        with torch.autocast("cpu", torch.bfloat16):
            return run(model, batch)

    theirs = under_autocast()
    hfnn.convert(model, prefer="memory")
    hfnn.recipe.counter.reset()
    ours = under_autocast()
    assert hfnn.recipe.counter.taken >= 4
    exact = run(hfnn.revert(model).double(), batch)
    for n in theirs:
        at_most = OUTPUTS if n == "logits" else GRADIENTS
        assert_close(ours[n], exact[n], theirs[n], at_most=at_most, name=n)


@pytest.mark.parametrize("name", THOROUGH)
def test_saves_memory(name):
    """A converted model keeps less, on a batch whose activations matter."""
    model, batch = build(name), inputs(name)

    def kept():
        return hfnn.memory.saved_bytes(lambda: model(**batch)).total

    before = kept()
    hfnn.convert(model, prefer="memory")
    assert kept() < before


def test_training_with_dropout():
    """One seed gives one result, and an optimizer step works."""
    model, batch = hfnn.convert(build("GPT2LMHeadModel"), prefer="memory").train(), inputs("GPT2LMHeadModel")
    results = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        results.append(run(model, batch)["logits"])
    assert torch.equal(results[0], results[1]) and not torch.equal(results[1], results[2])
    model(**batch).loss.backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    assert model.transformer.wte.weight is model.lm_head.weight  # tied


def test_gradient_checkpointing():
    plain, batch = build("LlamaForCausalLM"), inputs("LlamaForCausalLM")
    model = hfnn.convert(build("LlamaForCausalLM"), prefer="memory")
    model.load_state_dict(plain.state_dict())
    wanted = run(model, batch)
    # The older name warns where the newer one exists.
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    model.train()
    model(**batch).loss.backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, wanted[name])


@pytest.mark.parametrize("name", ["OPTForCausalLM", "BloomForCausalLM"])
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradient_checkpointing_with_dropout(name, use_reentrant):
    """Their layers call torch.nn.functional.dropout; recomputation draws the same masks."""
    model, batch = hfnn.convert(build(name), prefer="memory").train(), inputs(name)
    assert any(re.fullmatch(r"hfnn .*dropout.* inside", row.to) for row in hfnn.report(model).swapped)

    def gradients(seed=1):
        torch.manual_seed(seed)
        model.zero_grad()
        model(**batch).loss.backward()
        return [p.grad for p in model.parameters()]

    wanted = gradients()
    assert not any(torch.equal(a, b) for a, b in zip(gradients(2), wanted, strict=True))
    # The older name warns where the newer one exists.
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": use_reentrant})
    if use_reentrant:
        model.enable_input_require_grads()
    calls, first = [], next(m for n, m in model.named_modules() if n.endswith((".fc1", ".dense_h_to_4h")))
    first.register_forward_hook(lambda *_: calls.append(1))
    found = gradients()
    assert len(calls) == 2
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_save_and_load(tmp_path):
    """save_pretrained writes the usual files. The loaded model is transformers' own, and converts again."""
    model, batch = hfnn.convert(build("LlamaForCausalLM"), prefer="memory"), inputs("LlamaForCausalLM")
    wanted = run(model, batch)
    model.save_pretrained(tmp_path)
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path).eval()
    assert not hfnn.report(loaded).swapped
    assert torch.equal(loaded(**batch).logits, hfnn.revert(model)(**batch).logits)
    found = run(hfnn.convert(loaded, prefer="memory"), batch)
    assert all(torch.equal(found[n], wanted[n]) for n in wanted)
    file = io.BytesIO()
    torch.save(loaded, file)
    file.seek(0)
    found = run(torch.load(file, weights_only=False), batch)
    assert all(torch.equal(found[n], wanted[n]) for n in wanted)


def test_generate():
    model, ids = build("LlamaForCausalLM"), torch.randint(3, 128, (1, 4))
    arguments = {"max_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    wanted = model.generate(ids, **arguments)
    assert torch.equal(hfnn.convert(model, prefer="memory").generate(ids, **arguments), wanted)


def test_hidden_states():
    """transformers collects these with hooks of its own."""
    model, batch = build("LlamaForCausalLM"), inputs("LlamaForCausalLM")
    wanted = model(**batch, output_hidden_states=True).hidden_states
    found = hfnn.convert(model, prefer="memory")(**batch, output_hidden_states=True).hidden_states
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b)
    assert hfnn.verify(model, **batch, output_hidden_states=True).ok
