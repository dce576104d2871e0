"""Twelve families of transformers, tiny and with random weights: the recorded list of what each becomes, and the gain.

The lists are in families.txt. If a new room changes them, run `python tests/test_families.py > tests/families.txt` and
review the diff.
"""

import collections
import copy
import difflib
import io
import re
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import hfnn
from hfnn import adapters, testing

transformers = pytest.importorskip("transformers")

WRITTEN = Path(__file__).with_name("families.txt")
TOKENS = 16  # upper bound on the tokens that a loss sums over
SHARE = 0.95  # of the modules of kinds that hfnn has ops for

ENCODER = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DECODER = ENCODER | {"num_key_value_heads": 1}
IMAGE = {"image_size": 16, "patch_size": 8}
DROPS = {"attention_dropout": 0.1}
# T5's heads are d_kv wide, independent of d_model.
T5 = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2, "vocab_size": 64}
WHISPER = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "num_mel_bins": 8, "max_source_positions": 16}
WHISPER |= {"encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "encoder_attention_heads": 2, "decoder_attention_heads": 2}

# family -> (model, its config, arguments)
FAMILIES = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 32}),
    "llama": ("LlamaForCausalLM", "LlamaConfig", DECODER | DROPS),
    "bert": ("BertForMaskedLM", "BertConfig", ENCODER),
    "t5": ("T5ForConditionalGeneration", "T5Config", T5 | {"decoder_start_token_id": 0}),
    "vit": ("ViTForImageClassification", "ViTConfig", ENCODER | IMAGE | {"hidden_dropout_prob": 0.1}),
    "whisper": (
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        ENCODER | WHISPER | {"decoder_start_token_id": 1, "dropout": 0.1, "activation_dropout": 0.1} | DROPS,
    ),
    "mixtral": (
        "MixtralForCausalLM",
        "MixtralConfig",
        DECODER | DROPS | {"num_local_experts": 2, "experts_implementation": "eager"},
    ),
    "clip": ("CLIPModel", "CLIPConfig", {"text_config": ENCODER | DROPS, "vision_config": ENCODER | IMAGE | DROPS}),
    "opt": ("OPTForCausalLM", "OPTConfig", ENCODER | {"ffn_dim": 64, "word_embed_proj_dim": 32} | DROPS),
    "bloom": ("BloomForCausalLM", "BloomConfig", {"hidden_size": 32, "n_layer": 2, "n_head": 2, "vocab_size": 64}),
    "phi": ("PhiForCausalLM", "PhiConfig", ENCODER | {"resid_pdrop": 0.1, "embd_pdrop": 0.1} | DROPS),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", DECODER | DROPS),
}
FAMILIES["gpt2"][2].update(vocab_size=64, bos_token_id=1, eos_token_id=2)
FAMILIES["bloom"][2].update(hidden_dropout=0.1, attention_dropout=0.1, bos_token_id=1, eos_token_id=2)

LONG = {"mixtral", "t5", "whisper"}  # long to compile

# The kind of a module, by torch's class or by name.
KINDS = {
    "norm": ((nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase), r"Norm"),
    "activation": ((), r"GELU|SiLU|Swish|ReLU|Tanh|Sigmoid|Softmax|Activation"),
    "dropout": ((nn.modules.dropout._DropoutNd,), r"Dropout"),
    "linear": ((nn.Linear,), r"^Conv1D$"),
    "embedding": ((nn.Embedding,), r"$^"),
    "pool": ((nn.modules.pooling._MaxPoolNd, nn.modules.pooling._AvgPoolNd, nn.AdaptiveAvgPool2d), r"$^"),
    "loss": ((nn.modules.loss._Loss,), r"Loss"),
}


def build(family):
    """The model with "eager" attention: transformers' own code of torch.nn.functional."""
    name, config, arguments = FAMILIES[family]
    torch.manual_seed(0)
    return getattr(transformers, name)(getattr(transformers, config)(**arguments, attn_implementation="eager"))


def inputs(family):
    ids = torch.randint(3, 64, (2, 8), generator=torch.Generator().manual_seed(1))
    pixels = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(2))
    if family == "vit":
        return {"pixel_values": pixels, "labels": torch.tensor([0, 1])}
    if family == "clip":
        return {"input_ids": ids, "pixel_values": pixels, "return_loss": True}
    if family == "whisper":
        return {"input_features": torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(3)), "labels": ids}
    return {"input_ids": ids, "labels": ids}


def run(model, batch):
    """Loss and gradients by name, from one seed."""
    torch.manual_seed(1)
    loss = model(**batch).loss
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    grads = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return {"loss": loss.detach(), **{n: g for n, g in zip(named, grads, strict=True) if g is not None}}


def unequal(a, b):
    """Names of the tensors that differ in any bit."""
    return sorted(a.keys() ^ b.keys()) + [n for n in a if n in b and not torch.equal(a[n], b[n])]


def listing(family):
    """What each module becomes, layers merged: lines of (name, count, what)."""
    folded = collections.Counter()
    for row in hfnn.report(hfnn.convert(build(family))).swapped:
        folded[re.sub(r"\b\d+\b", "*", row.name) or "(model)", row.to] += 1
    return [f"{name}  x{count}  ->  {to}" for (name, to), count in folded.items()]


def write(file):
    for family in FAMILIES:
        print(f"[{family}]", *listing(family), "", sep="\n", file=file)


def written():
    parts = re.split(r"^\[(\w+)\]\n", WRITTEN.read_text(), flags=re.MULTILINE)[1:]
    return {family: lines.strip().splitlines() for family, lines in zip(parts[::2], parts[1::2], strict=True)}


def kind_of(module):
    """The kind of op, for modules that hfnn may have a room for, or None."""
    if module._modules:
        return None
    for kind, (classes, pattern) in KINDS.items():
        if isinstance(module, classes) or re.search(pattern, type(module).__name__):
            return kind
    return None


@pytest.mark.parametrize("family", FAMILIES)
def test_list(family):
    found, wanted = listing(family), written()[family]
    changes = "\n".join(difflib.unified_diff(wanted, found, WRITTEN.name, "now", lineterm="", n=0))
    assert not changes, f"{family} becomes something else than is written:\n{changes}"


@pytest.mark.parametrize("family", FAMILIES)
def test_share(family):
    """Nearly all modules that could be swapped are, and the rest have a reason."""
    model = build(family)
    kinds = {name: kind_of(module) for name, module in model.named_modules()}
    report = hfnn.report(hfnn.convert(model))
    swapped = {row.name for row in report.swapped}
    counts = collections.Counter((kind, name in swapped) for name, kind in kinds.items() if kind)
    eligible = sum(counts.values())
    left = "\n".join(f"  {row.name} ({row.original}): {row.why}" for row in report.left if kinds[row.name])
    each = ", ".join(f"{counts[k, True]} of {counts[k, True] + counts[k, False]} {k}s" for k in KINDS)
    assert eligible >= 10, f"{family}: only {eligible} modules were counted"
    share = sum(n for (_, ours), n in counts.items() if ours) / eligible
    assert share >= SHARE, f"{family}: {share:.1%} swapped ({each}); left alone:\n{left}"
    silent = [row.name for row in report.left if not row.why]
    assert not silent, f"{family}: no reason is given for {silent}"


@pytest.mark.parametrize("family", FAMILIES)
def test_accuracy(family):
    found = hfnn.verify(hfnn.convert(build(family).eval(), prefer="memory"), **inputs(family))
    assert found.ok, f"{family}:\n{found}"
    assert any(row.difference > 0 for row in found.rows), f"{family}: no op of hfnn ran"


@pytest.mark.parametrize("family", FAMILIES)
def test_revert(family):
    """In training, with dropout: revert gives back bits, classes and names."""
    model, batch = build(family).train(), inputs(family)
    before, classes, names = run(model, batch), [type(m) for m in model.modules()], list(model.state_dict())
    hfnn.convert(model, prefer="memory")
    run(model, batch)
    hfnn.revert(model)
    assert [type(m) for m in model.modules()] == classes and list(model.state_dict()) == names
    wrong = unequal(run(model, batch), before)
    assert not wrong, f"{family}: {len(wrong)} tensors differ after revert: {wrong[:5]}"


@pytest.mark.parametrize("family", FAMILIES)
def test_recipes_change_no_bit(family):
    """In training, with dropout."""
    model, batch = hfnn.convert(build(family).train(), prefer="memory"), inputs(family)
    hfnn.recipe.counter.reset()
    on = run(model, batch)
    taken = hfnn.recipe.counter.taken
    with hfnn.recipe.disabled():
        off = run(model, batch)
    wrong = unequal(on, off)
    assert not wrong, f"{family}: {len(wrong)} of {len(on)} tensors differ without recipes: {wrong[:5]}"
    assert taken > 0 and hfnn.recipe.counter.rebuilt > 0, f"{family}: no recipe was used"


def exact(model, batch):
    """`run` in float64."""
    model = adapters.widened(copy.deepcopy(model), torch.float64)
    return run(model, {n: x.double() if torch.is_tensor(x) and x.is_floating_point() else x for n, x in batch.items()})


def traced(model, batch):
    """The number of Dynamo's graphs of a model, and the places of its graph breaks."""
    torch._dynamo.reset()
    found = torch._dynamo.explain(model)(**batch)
    places = [reason.user_stack[-1] for reason in found.break_reasons if reason.user_stack]
    return found.graph_count, {(place.filename, place.lineno) for place in places}


@pytest.mark.filterwarnings("ignore")  # Dynamo's own
@pytest.mark.parametrize(
    "family, backend",
    [(family, "hfnn_eager") for family in ("llama", "bert")]
    + [pytest.param(f, "hfnn_eager", marks=pytest.mark.slow) for f in FAMILIES if f not in LONG | {"llama", "bert"}]
    + [pytest.param(f, "hfnn_eager", marks=pytest.mark.rest) for f in sorted(LONG)]
    + [pytest.param(family, "aot_eager", marks=pytest.mark.rest) for family in FAMILIES if family != "bert"]
    + [("bert", "aot_eager")],
)
def test_compiled(family, backend, monkeypatch):
    """As accurate as torch. One graph where stock has one, otherwise only stock's graph breaks."""
    stock, batch = build(family).eval(), inputs(family)
    monkeypatch.setattr("hfnn.compiled.head.WORTH_LOGITS", 0)
    wanted, torchs = exact(stock, batch), run(stock, batch)
    graphs, places = traced(stock, batch)
    model = hfnn.convert(copy.deepcopy(stock), prefer="memory")
    if graphs > 1:
        assert traced(model, batch)[1] <= places
    torch._dynamo.reset()
    model.compile(backend=backend, fullgraph=graphs == 1 or family == "gpt2")  # GPT-2's stock forward logs its loss
    found = run(model, batch)
    assert found.keys() == wanted.keys()
    for name, result in found.items():
        at_most = testing.OUTPUTS if name == "loss" else testing.GRADIENTS
        testing.assert_close(
            result, wanted[name], torchs[name], at_most, f"{family} {name}", TOKENS if name == "loss" else 1
        )


if __name__ == "__main__":
    lists = io.StringIO()
    write(lists)
    sys.stdout.write(lists.getvalue())
