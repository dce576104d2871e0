"""How transformers reaches hfnn's attention: configs, masks and names; what is refused; and revert."""

import contextlib
import copy
import io
import re
import subprocess
import sys
import weakref

import pytest
import torch
from torch import nn

import hfnn
from hfnn.adapters import attention, masks, rotary, views
from hfnn.core.holder import target_of
from hfnn.ops import rope
from hfnn.ops.attention import mask as room_mask
from hfnn.patterns import subclass
from hfnn.patterns.probe import Refusal

from .test_transformers_attention import GROUPED, TOKENS, WIDTHS, at_any_size, build, inputs, padding  # noqa: F401

transformers = pytest.importorskip("transformers")


def test_soft_cap_on_sdpa():
    """hfnn does with a soft cap what transformers' sdpa does: refuses or ignores it."""
    model, batch = build("gemma2"), inputs("gemma2", "right")
    model.config._attn_implementation_internal = "sdpa"
    try:
        wanted = model(**batch).logits
    except ValueError as error:
        with pytest.raises(ValueError, match=re.escape(str(error))):
            hfnn.convert(model)(**batch)
    else:
        with hfnn.use("cpp"):
            torch.testing.assert_close(hfnn.convert(model)(**batch).logits, wanted)


def test_only_this_model():
    """Two models share a config. Only the converted one reads "hfnn" from it."""
    config = transformers.LlamaConfig(**GROUPED)
    mine, other = transformers.LlamaForCausalLM(config).eval(), transformers.LlamaForCausalLM(config).eval()
    attention.register()
    assert config._attn_implementation == "sdpa"
    hfnn.convert(mine)
    assert mine.config._attn_implementation == mine.model.layers[0].self_attn.config._attn_implementation == "hfnn"
    assert config._attn_implementation == other.config._attn_implementation == "sdpa"
    assert other.model.layers[0].self_attn.config is config
    config.use_cache = False
    assert mine.config.use_cache is False and isinstance(mine.config, transformers.LlamaConfig)
    assert mine.config == config and mine.config.to_dict() == config.to_dict()
    mine.config.use_cache = True
    assert config.use_cache is True
    hfnn.revert(mine)
    assert all(m.config is config for m in mine.modules() if hasattr(m, "config"))
    assert config._attn_implementation == "sdpa"


def test_another_choice():
    """Naming another implementation selects it."""
    model, batch = hfnn.convert(build("llama")), inputs("llama", "left")
    wanted = model(**batch).logits
    model.set_attn_implementation("eager")  # the config says so; hfnn takes eager attention's place, too
    torch.testing.assert_close(model(**batch).logits[padding("left").bool()], wanted[padding("left").bool()])
    hfnn.revert(model)
    assert model.config._attn_implementation == "eager"
    left = build("llama", attn_implementation="flex_attention")
    hfnn.convert(left)
    assert left.config._attn_implementation == "flex_attention"
    row = next(row for row in hfnn.report(left).rows if row.name == "model.layers.0.self_attn")
    assert row.to is None or "attention" not in row.to


def test_weights():
    """output_attentions works as before: eager attention returns the weights, sdpa warns."""
    for name, how in (("gemma2", {}), ("gpt_oss", {}), ("llama", {"attn_implementation": "eager"})):
        model, batch = build(name, **how), inputs(name, "right")
        wanted = model(**batch, output_attentions=True)
        found = hfnn.convert(model)(**batch, output_attentions=True)
        assert len(found.attentions) == 2
        for a, b in zip(found.attentions, wanted.attentions, strict=True):
            torch.testing.assert_close(a, b)
    model = build("llama")
    wanted = model(**batch, output_attentions=True)
    found = hfnn.convert(model)(**batch, output_attentions=True)
    assert found.attentions == wanted.attentions


def test_skipped_modules_get_the_mask_they_know():
    """A skipped module in a converted model: eager attention adds a float mask, sdpa takes booleans."""
    for name in ("gemma2", "gpt_oss", "mistral", "bert"):
        model, batch = build(name), inputs(name, "right")
        wanted = model(**batch).logits
        part = next(n for n, m in model.named_modules() if type(m).__name__.endswith("Attention") and ".0." in n)
        hfnn.convert(model, skip=part)
        assert sum(target_of(m) is attention.Attention for m in model.modules()) == 1
        torch.testing.assert_close(model(**batch).logits, wanted, rtol=1e-4, atol=1e-5)


def test_masks_are_made_where_they_are_looked_at():
    attention.register()
    from transformers import masking_utils as m

    config = views.view(build("mistral").config)
    seen = padding("left").bool()
    how = {"batch_size": 2, "q_length": TOKENS, "kv_length": TOKENS, "attention_mask": seen}
    how["mask_function"] = m.sliding_window_causal_mask_function(5)
    mask, wanted = masks.mask(**how, config=config), m.sdpa_mask(**how, local_size=5)
    assert type(mask) is masks.Mask and mask.shape == wanted.shape and mask.dtype is torch.bool
    assert mask.arguments()["lengths"].tolist() == [[5, TOKENS], [0, TOKENS]]
    assert mask._dense is None and mask.detach() is mask
    part = mask[:, :, :, :-1]
    assert type(part) is torch.Tensor and torch.equal(part, wanted[:, :, :, :-1])
    assert torch.equal(copy.deepcopy(mask), wanted) and torch.equal(mask & mask, wanted)
    query = torch.randn(2, 2, TOKENS, 4)
    attend = nn.functional.scaled_dot_product_attention
    assert torch.equal(attend(query, query, query, mask), attend(query, query, query, wanted))
    file = io.BytesIO()
    torch.save(mask, file)
    file.seek(0)
    assert torch.equal(torch.load(file), wanted)


def test_unknown_masks_are_dense():
    """A mask function of the user's own, and chunked attention."""
    from transformers import masking_utils as m

    config = views.view(build("llama").config)
    how = {"batch_size": 1, "q_length": 6, "kv_length": 6, "config": config}
    for function in (lambda b, h, q, k: k <= q, m.chunked_causal_mask_function(3, torch.zeros(1, dtype=torch.int64))):
        mask = masks.mask(**how, mask_function=function)
        wanted = m.sdpa_mask(batch_size=1, q_length=6, kv_length=6, mask_function=function, allow_is_causal_skip=False)
        assert mask is None or torch.equal(mask, wanted)
        mask = masks.mask(**how, mask_function=function, allow_is_causal_skip=False)
        assert type(mask) is torch.Tensor and torch.equal(mask, wanted)


def test_a_view_of_the_users_mask_is_the_users():
    """Its contents may change without a new version, so it is packed at each call."""
    given = torch.ones(2, 8, dtype=torch.bool)
    view, packed = masks._dense(given[:, None, None], given), []
    for value in (True, False):
        given.data.fill_(value)
        packed.append(room_mask.packed(view, (2, 1, 8, 8))[0])
    assert packed[0].any() and not packed[1].any()


def test_copies_and_files():
    """deepcopy, torch.save and save_pretrained include the config but not the view."""
    model, batch = hfnn.convert(build("gemma2")), inputs("gemma2", "right")
    wanted = model(**batch).logits
    for again in (copy.deepcopy(model), _through_file(model)):
        assert again.config is not model.config and again.config._attn_implementation == "hfnn"
        assert again.config is again.model.layers[0].self_attn.config
        assert torch.equal(again(**batch).logits, wanted)
        hfnn.revert(again)
        assert again.config._attn_implementation == "eager" and not views.is_view(again.config)
    assert model.config._attn_implementation == "hfnn"
    assert "hfnn" not in model.config.to_json_string()


def _through_file(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def test_refusals():
    """Other attention is left alone, with a reason in the report."""
    model = build("gpt2", attn_implementation="eager")
    why = attention.recognise(model.transformer.h[0].attn)
    assert isinstance(why, Refusal) and "something else where the implementation is 'eager'" in str(why)
    hfnn.convert(model)
    assert model.config._attn_implementation == "eager"

    bloom = transformers.BloomForCausalLM(transformers.BloomConfig(hidden_size=32, n_layer=1, n_head=4, vocab_size=64))
    hfnn.convert(bloom)
    assert bloom.config._attn_implementation != "hfnn"
    assert not any(target_of(m) is attention.Attention for m in bloom.modules())


def test_eager_attention_is_proved(monkeypatch):
    """If a file's eager attention computes something else, it is kept."""
    model = build("gemma2")
    file = transformers.models.gemma2.modeling_gemma2
    own = file.eager_attention_forward

    def eager_attention_forward(module, query, *args, **options):
        return own(module, query + 0.1, *args, **options)

    monkeypatch.setattr(file, "eager_attention_forward", eager_attention_forward)
    monkeypatch.setattr(attention, "_proofs", {})
    monkeypatch.setattr(attention, "eager_of", attention.eager_of.__wrapped__)  # without the cached result
    why = attention.recognise(model.model.layers[0].self_attn)
    assert isinstance(why, Refusal) and "computes something else" in str(why)


def test_report():
    row = next(r for r in hfnn.report(hfnn.convert(build("gemma2"))).rows if r.name == "model.layers.0.self_attn")
    assert row.to == "hfnn scaled_dot_product_attention" and row.kernel == "cpp"


def test_rotary_that_casts_back():
    """OLMo's angles are float32 and its queries are not; the result has the queries' dtype."""
    config = transformers.OlmoConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, vocab_size=99, eos_token_id=1
    )
    model = transformers.OlmoForCausalLM(config).bfloat16()
    ids = torch.arange(16).view(2, 8)
    wanted = model(ids).logits
    hfnn.convert(model, prefer="memory")
    found = rotary.calls(transformers.models.olmo.modeling_olmo.OlmoAttention)
    assert any(place.name == rotary.NAME for place in found.places)
    torch.testing.assert_close(model(ids).logits, wanted, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("converted_under", [None, "cpp", "torch"])
def test_rotary(converted_under, monkeypatch):
    """The converted model's own code rotates with hfnn's kernel; other models, and other rotations, are left alone."""
    kernel, turned = next(k for k in rope.OP.kernels if k.name == "cpp"), []
    function = kernel.forward
    monkeypatch.setitem(vars(kernel), "forward", lambda *args: turned.append(args) or function(*args))
    file = transformers.models.llama.modeling_llama
    own = file.apply_rotary_pos_emb
    monkeypatch.setattr(subclass, "_made", weakref.WeakValueDictionary())  # no cached proofs of the class
    for known in (rotary._place, rotary.calls):
        monkeypatch.setattr(rotary, known.__name__, known.__wrapped__)
    mine, other, batch = build("llama"), build("llama"), inputs("llama")
    with hfnn.use(converted_under) if converted_under else contextlib.nullcontext():
        hfnn.convert(mine, prefer="memory")
    with hfnn.use("cpp"):
        found = mine(**batch).logits
        assert len(turned) == 2 and file.apply_rotary_pos_emb is own
        wanted = other(**batch).logits
        assert len(turned) == 2
        mine(**batch).logits.sum().backward()
        assert len(turned) == 8  # one a layer in forward, for queries and keys; one for each in backward
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    cohere = transformers.CohereConfig(**(WIDTHS | {"num_key_value_heads": 2}))
    assert rotary.calls(type(transformers.CohereModel(cohere).layers[0].self_attn)) is None


@pytest.mark.parametrize("padded", [False, True])
def test_another_sdpa(padded, monkeypatch):
    """A function that the user registers as "sdpa" runs, before and after conversion."""
    functions = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS
    own, called = functions["sdpa"], []

    def mine(module, query, *args, **options):
        called.append(type(module).__name__)
        return own(module, query * 2, *args, **options)

    stock, given = build("llama"), inputs("llama", "left" if padded else "none")
    model = hfnn.convert(copy.deepcopy(stock))
    # As `functions["sdpa"] = mine`; but undone, that would leave an entry, and so another function than transformers'.
    monkeypatch.setitem(functions._local_mapping, "sdpa", mine)
    wanted = stock(**given).logits
    assert len(called) == 2
    torch.testing.assert_close(model(**given).logits, wanted, rtol=1e-4, atol=1e-5)
    assert len(called) == 4


def test_by_name():
    """Registered under transformers' own interface: a model can be built with this name."""
    for name in ("llama", "gemma2"):
        model, batch = build(name), inputs(name, "left")
        attention.register()  # has an effect once transformers' models are imported
        wanted = model(**batch).logits
        named = build(name, attn_implementation="hfnn")
        assert named.config._attn_implementation == "hfnn"
        seen = batch["attention_mask"].bool()
        torch.testing.assert_close(named(**batch).logits[seen], wanted[seen], rtol=1e-4, atol=1e-5)
        how = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
        assert torch.equal(named.generate(**batch, **how), model.generate(**batch, **how))


def test_compiled():
    """Under torch.compile the model's former implementation runs, in one graph."""
    for name in ("llama", "gemma2"):
        model, batch = hfnn.convert(build(name)), {"input_ids": inputs(name)["input_ids"], "use_cache": False}
        wanted = model(**batch).logits
        found = torch.compile(model, backend="eager", fullgraph=True)(**batch).logits
        torch.testing.assert_close(found, wanted)


WITHOUT_MASKS = """
import torch, transformers, hfnn
config = transformers.TimesFmConfig(
    hidden_size=64, num_hidden_layers=1, intermediate_size=64, num_attention_heads=4, head_dim=16, patch_length=32,
    context_length=512, horizon_length=128,
)
model, x = transformers.TimesFmModelForPrediction(config), [torch.randn(512), torch.randn(400)]
want = model(past_values=x, freq=[0, 0]).mean_predictions
got = hfnn.convert(model)(past_values=x, freq=[0, 0]).mean_predictions
torch.testing.assert_close(got, want)
"""


def test_a_model_with_masks_of_its_own():
    """Its file does not import transformers' masks; the attention's name is known nevertheless."""
    subprocess.run([sys.executable, "-c", WITHOUT_MASKS], check=True, timeout=120)
