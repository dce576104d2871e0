"""What a converted transformer keeps for backward, layer by layer, on unmodified models with random weights.

The unit u is one byte per token and per feature (of h): a bfloat16 tensor (batch, tokens, h) is 2 u. A layer's share is
the difference between models of three layers and of two. The exact floor is one tensor for each matrix product or
attention that needs one, and nothing for the norms, activations, dropouts and sums between them:

    the input of each norm 2 (4 where autocast keeps the residual in float32), the result of each attention 2,
    q, k, v 2 each (k and v times the share of key-value heads), the input of the activation 2 ffn / h (twice if gated;
    a ReLU's output instead)
"""

import dataclasses
import gc

import pytest
import torch

import hfnn

transformers = pytest.importorskip("transformers")

BATCH, TOKENS, WIDTH, HEADS, VOCABULARY = 2, 256, 256, 4, 128
KIND = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": False,
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A model whose layers all keep the same. floor: u in pure bfloat16. norms: per layer, each with its input.

    dropout: the config's name of the residual dropout; attention: of the attention dropout.
    """

    model: str
    config: str
    layers: tuple[str, ...]
    floor: float
    norms: int
    options: dict
    dropout: tuple[str, ...] = ()
    attention: tuple[str, ...] = ()
    copies: float = 0  # u that the CPU's and cuDNN's attention keep besides: their layout is not the next product's


ENCODER = {**KIND, "intermediate_size": 4 * WIDTH}
CASES = {
    "gpt2": Case(
        "GPT2LMHeadModel", "GPT2Config", ("n_layer",), 2 + 6 + 2 + 2 + 8, 2,
        {"n_embd": WIDTH, "n_head": HEADS, "n_positions": 512, "vocab_size": VOCABULARY, "use_cache": False}
        | {"bos_token_id": 1, "eos_token_id": 2},
        ("resid_pdrop",), ("attn_pdrop",),
    ),
    "bert": Case(
        "BertForMaskedLM", "BertConfig", ("num_hidden_layers",), 2 + 6 + 2 + 2 + 8, 2, ENCODER,
        ("hidden_dropout_prob",), ("attention_probs_dropout_prob",),
    ),
    "vit": Case(
        "ViTForImageClassification", "ViTConfig", ("num_hidden_layers",), 2 + 6 + 2 + 2 + 8, 2,
        {"hidden_size": WIDTH, "num_attention_heads": HEADS, "intermediate_size": 4 * WIDTH}
        | {"image_size": 120, "patch_size": 8},
        ("hidden_dropout_prob",), ("attention_probs_dropout_prob",),
    ),
    "llama-2": Case(
        "LlamaForCausalLM", "LlamaConfig", ("num_hidden_layers",), 2 + 6 + 2 + 2 + 4 * 688 / WIDTH, 2,
        {**KIND, "intermediate_size": 688, "num_key_value_heads": 4},
    ),
    "llama-3": Case(
        "LlamaForCausalLM", "LlamaConfig", ("num_hidden_layers",), 2 + (2 + 4 / 4) + 2 + 2 + 4 * 3.5, 2,
        {**KIND, "intermediate_size": 896, "num_key_value_heads": 1},
    ),
    "qwen2": Case(
        "Qwen2ForCausalLM", "Qwen2Config", ("num_hidden_layers",), 2 + (2 + 4 / 2) + 2 + 2 + 4 * 3.5, 2,
        {**KIND, "intermediate_size": 896, "num_key_value_heads": 2},
    ),
    "opt": Case(
        "OPTForCausalLM", "OPTConfig", ("num_hidden_layers",), 2 + 6 + 2 + 2 + 8, 2,
        {**KIND, "ffn_dim": 4 * WIDTH, "word_embed_proj_dim": WIDTH},
        ("dropout",), ("attention_dropout",),
    ),
    # One encoder and one decoder layer each: three attentions, five norms and two inputs of GELU. The queries are made
    # contiguous, so attention's results are copied where they have the queries' layout.
    "whisper": Case(
        "WhisperForConditionalGeneration", "WhisperConfig", ("encoder_layers", "decoder_layers"),
        3 * (6 + 2) + 5 * 2 + 2 * 8, 5,
        {"d_model": WIDTH, "encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS, "num_mel_bins": 16}
        | {"encoder_ffn_dim": 4 * WIDTH, "decoder_ffn_dim": 4 * WIDTH, "vocab_size": VOCABULARY, "use_cache": False}
        | {"max_source_positions": TOKENS, "max_target_positions": TOKENS, "decoder_start_token_id": 1}
        | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
        ("dropout", "activation_dropout"), ("attention_dropout",), copies=3 * 2,
    ),
    # Its attention has a trainable bias, with which torch's own op would keep the probabilities. Three attentions, five
    # norms and two products of ReLU and dropout.
    "t5": Case(
        "T5ForConditionalGeneration", "T5Config", ("num_layers", "num_decoder_layers"), 3 * (6 + 2) + 5 * 2 + 2 * 8, 5,
        {"d_model": WIDTH, "d_kv": WIDTH // HEADS, "d_ff": 4 * WIDTH, "num_heads": HEADS, "vocab_size": VOCABULARY}
        | {"decoder_start_token_id": 0, "use_cache": False},
        ("dropout_rate",),
    ),
}  # fmt: skip


def build(case, layers, dropout, dtype, device):
    options = case.options | dict.fromkeys(case.layers, layers)
    options |= dict.fromkeys(case.dropout, dropout) | dict.fromkeys(case.attention, 0.0)
    torch.manual_seed(0)
    model = getattr(transformers, case.model)(getattr(transformers, case.config)(**options))
    for module in model.modules():  # T5 has one rate for all
        if type(module).__name__ == "T5Attention":
            module.dropout = 0.0
    return hfnn.convert(model.to(device, dtype).train(), prefer="memory")


def batch(name, dtype, device):
    """(arguments, number of tokens)"""
    ids = torch.randint(3, VOCABULARY, (BATCH, TOKENS), device=device)
    if name == "vit":
        pixels = torch.randn(BATCH, 3, 120, 120, device=device, dtype=dtype)
        return {"pixel_values": pixels, "labels": ids[:, 0] % 2}, BATCH * (15 * 15 + 1)
    if name == "whisper":
        sound = torch.randn(BATCH, 16, 2 * TOKENS, device=device, dtype=dtype)
        return {"input_features": sound, "decoder_input_ids": ids, "labels": ids}, BATCH * TOKENS
    return {"input_ids": ids, "labels": ids}, BATCH * TOKENS


def growth(fn) -> int:
    """Bytes requested from CUDA's allocator during forward that are still held with the loss."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    loss = fn()
    torch.cuda.synchronize()
    after = torch.cuda.memory_stats()["requested_bytes.all.current"]
    del loss
    return after - before


def measure(case, name, layers, dropout, autocast, device):
    """(counted bytes, the allocator's bytes or None)"""
    dtype = torch.float32 if autocast else torch.bfloat16
    model = build(case, layers, dropout, dtype, device)
    arguments, _ = batch(name, dtype, device)

    def forward():
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            return model(**arguments).loss

    grown = None
    if device == "cuda":
        forward().backward()  # allocated once: workspaces, and the gradients, which stay
        gc.collect()
        grown = growth(forward)
    return hfnn.memory.saved_bytes(forward), grown


def deeper(measured, tokens) -> float:
    """u of the third layer, from the bytes that models of two and of three layers keep."""
    two, three = measured
    return (three - two) / (tokens * WIDTH)


WITH_AND_WITHOUT = [(name, rate) for name, case in CASES.items() for rate in ((0.0, 0.1) if case.dropout else (0.0,))]


# cuDNN's attention, which torch chooses on some GPUs, warns about deterministic algorithms.
@pytest.mark.filterwarnings("ignore:cuDNN Attention defaults to a non-deterministic algorithm")
@pytest.mark.parametrize("autocast", [False, True], ids=["bfloat16", "autocast"])
@pytest.mark.parametrize("name, dropout", WITH_AND_WITHOUT)
def test_bytes_of_a_layer(name, dropout, autocast, device):
    case, (_, tokens) = CASES[name], batch(name, torch.float32, "cpu")
    found = [measure(case, name, layers, dropout, autocast, device) for layers in (2, 3)]
    floor = case.floor + (2 * case.norms if autocast else 0)
    statistics = (8 * case.norms + 4 * HEADS * (case.norms - len(case.layers))) / WIDTH  # means and scales, log-sum-exp
    if device == "cpu" or "Cudnn" in str(found[1][0]):
        floor += case.copies
    counted = deeper([kept.total for kept, _ in found], tokens)
    assert counted == pytest.approx(floor + statistics, rel=0.02), f"{found[1][0]}"
    if device == "cuda":
        assert deeper([grown for _, grown in found], tokens) == pytest.approx(counted, rel=0.02)
