"""Padded batches of Hugging Face models with queries that see no key: losses and gradients are stock's.

sdpa gives such a query 0, eager attention the mean of all values (its mask is finite). The last padding token before a
sentence predicts the sentence's first token, so the difference reaches the loss.
"""

import copy

import pytest
import torch

import hfnn

transformers = pytest.importorskip("transformers")

TOKENS, KINDS = 9, ("left", "right", "sample", "holes")
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}
SIZES |= {"max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GROUPED = SIZES | {"num_key_value_heads": 2, "head_dim": 8}
WINDOW = GROUPED | {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
ENCODER = SIZES | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 64, "dropout_rate": 0.0}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "vocab_size": 64, "resid_pdrop": 0.0}
OPT = SIZES | {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0}
MODERN = SIZES | {"local_attention": 4, "global_attn_every_n_layers": 2, "cls_token_id": 1, "sep_token_id": 2}

# The name of the classes -> (kind of model, arguments of its config)
MODELS = {
    "Gemma": ("ForCausalLM", GROUPED),
    "Gemma2": ("ForCausalLM", WINDOW | {"attn_logit_softcapping": 1.0}),
    "Gemma3": ("ForCausalLM", WINDOW),
    "Olmo2": ("ForCausalLM", GROUPED),
    "Llama": ("ForCausalLM", GROUPED),
    "Mistral": ("ForCausalLM", GROUPED | {"sliding_window": 4}),
    "Qwen2": ("ForCausalLM", SIZES | {"num_key_value_heads": 2}),
    "Phi": ("ForCausalLM", SIZES),
    "OPT": ("ForCausalLM", OPT),
    "GPT2": ("LMHeadModel", GPT2 | {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2}),
    "Bert": ("ForMaskedLM", ENCODER),
    "Roberta": ("ForMaskedLM", ENCODER),
    "ModernBert": ("ForMaskedLM", MODERN),
    "T5": ("ForConditionalGeneration", T5 | {"decoder_start_token_id": 0}),
}


def build(name, implementation):
    torch.manual_seed(0)
    kind, arguments = MODELS[name]
    config = {"T5": "T5Config"}.get(name) or ("Gemma3TextConfig" if name == "Gemma3" else name + "Config")
    config = getattr(transformers, config)(**arguments, attn_implementation=implementation)
    return getattr(transformers, name + kind)(config).train()


def mask_of(kind):
    """(3, TOKENS): which tokens count; the last sample counts whole."""
    mask = torch.ones(3, TOKENS, dtype=torch.int64)
    if kind == "left":
        mask[0, :5], mask[1, :2] = 0, 0
    elif kind == "right":
        mask[0, 3:], mask[1, 7:] = 0, 0
    elif kind == "sample":
        mask[0] = 0
    else:  # holes, also at the start and longer than a window
        mask[0, 0], mask[0, 2:8], mask[1, 4] = 0, 0, 0
    return mask


def step(model, name, mask):
    """(loss, gradients) with all tokens that count as labels."""
    model.zero_grad()
    ids = torch.randint(3, 64, mask.shape, generator=torch.Generator().manual_seed(1))
    given = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    if name == "T5":
        given["decoder_attention_mask"] = mask
    loss = model(**given).loss
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def compare(name, implementation, kinds, dtype=torch.float32, at_most=2e-5):
    stock = build(name, implementation).to(dtype)
    ours = hfnn.convert(copy.deepcopy(stock), prefer="memory")
    for kind in kinds:
        (loss, want), (found, got) = (step(model, name, mask_of(kind)) for model in (stock, ours))
        torch.testing.assert_close(found, loss, rtol=at_most, atol=0, equal_nan=True)
        assert got.keys() == want.keys()
        norm = torch.stack([g.double().norm() for g in want.values()]).norm()
        for n, g in want.items():
            off = (got[n].double() - g.double()).norm()
            assert off <= at_most * norm or norm.isnan(), f"{kind}: {n} off by {off:.3g}, all are {norm:.3g}"


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("name", MODELS)
def test_losses_and_gradients_are_stocks(name, implementation):
    if (name, implementation) != ("Gemma2", "sdpa"):  # which transformers refuses
        compare(name, implementation, KINDS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["Gemma2", "Bert", "T5"])
def test_other_dtypes(name, dtype):
    """float16's smallest number does not absorb the scores; float64's is -inf in Gemma's softmax, and gives NaN."""
    at_most = {torch.bfloat16: 4e-2, torch.float16: 5e-3, torch.float64: 1e-6}[dtype]
    compare(name, "eager", ("sample" if name == "Bert" else "left",), dtype, at_most)


@pytest.mark.parametrize("name", ["Gemma2", "Llama"])
def test_inference_mode(name):
    """The same bits as without gradients. In float16 the mask is made as a tensor, whose version is asked for."""
    model = hfnn.convert(build(name, "eager").eval().half(), prefer="memory")
    given = {"input_ids": torch.randint(3, 64, (3, TOKENS)), "attention_mask": mask_of("left")}
    found = []
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            found.append(model(**given).logits)
    assert torch.equal(*found)
