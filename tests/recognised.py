"""What `convert` makes of models and of the tests' own classes, and the bytes that they keep: recognised.txt.

    python tests/recognised.py > tests/recognised.txt

Each line: what stands there, what it becomes, and the bytes kept for backward of one call, with prefer="memory": stock,
then converted. A change of the patterns must leave every line equal or better.
"""

import collections
import contextlib
import copy
import importlib
import re
import sys
import warnings
from pathlib import Path

import torch
from torch import nn

import hfnn

sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent)]
WRITTEN = Path(__file__).with_suffix(".txt")
WIDTH = 64

SMALL = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 64,
    "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "num_key_value_heads": 1,
}  # fmt: skip
# model -> (config, further arguments)
MODELS = {
    "MistralModel": ("MistralConfig", {"head_dim": 16}),
    "GemmaModel": ("GemmaConfig", {"head_dim": 16}),
    "Gemma2Model": ("Gemma2Config", {"head_dim": 16}),
    "Qwen3Model": ("Qwen3Config", {"head_dim": 16}),
    "Phi3Model": ("Phi3Config", {}),
    "GPTNeoXModel": ("GPTNeoXConfig", {}),
    "OlmoModel": ("OlmoConfig", {}),
    "StableLmModel": ("StableLmConfig", {}),
    "Starcoder2Model": ("Starcoder2Config", {}),
    "CohereModel": ("CohereConfig", {}),
    "RobertaModel": ("RobertaConfig", {}),
    "ElectraModel": ("ElectraConfig", {"embedding_size": 32}),
    "AlbertModel": ("AlbertConfig", {"embedding_size": 32}),
    "DistilBertModel": ("DistilBertConfig", {"dim": 32, "hidden_dim": 64, "n_layers": 1, "n_heads": 2}),
    "XLMRobertaModel": ("XLMRobertaConfig", {}),
    "ErnieModel": ("ErnieConfig", {}),
    "MPNetModel": ("MPNetConfig", {}),
    "GPTNeoModel": ("GPTNeoConfig", {"num_layers": 1, "num_heads": 2, "attention_types": [[["global"], 1]]}),
    "GPTJModel": ("GPTJConfig", {"n_embd": 32, "n_layer": 1, "n_head": 2, "rotary_dim": 8}),
    "T5EncoderModel": ("T5Config", {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 2}),
    "MT5EncoderModel": ("MT5Config", {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 2}),
}
IMAGES = {
    "ViTModel": ("ViTConfig", {"image_size": 16, "patch_size": 8}),
    "DeiTModel": ("DeiTConfig", {"image_size": 16, "patch_size": 8}),
    "Dinov2Model": ("Dinov2Config", {"image_size": 16, "patch_size": 8, "use_swiglu_ffn": True}),
    "ResNetModel": ("ResNetConfig", {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]}),
    "MobileNetV2Model": ("MobileNetV2Config", {"image_size": 32}),
}
# file -> classes, with their arguments and the shapes of their inputs
ROWS, IMAGE = ((3, 5, WIDTH),), ((2, 8, 6, 6),)
CLASSES = {
    "test_feedforward": {
        **dict.fromkeys(("Llama", "Swapped", "Functional", "Packed", "Diffusers", "Timm", "Plain"), ((), ROWS)),
        "Timm of GELU": ((nn.GELU,), ROWS),
    },
    "test_residual_sites": dict.fromkeys(
        ("PostNorm", "Plain", "Functional", "DropsTheSum", "DropsTheResult", "PreNorm", "NoResidual", "Halved",
         "Detached", "Wide", "EvalOnly", "Counting"),
        ((), ((5, 7, 64), (5, 7, 32))),
    ),
    "test_norm_act": {
        "BasicBlock": ((8, 8), IMAGE), "Bottleneck": ((8,), IMAGE), "Functional": ((8, "leaky"), IMAGE),
        "Functional in place": ((8, "inplace"), IMAGE), "Functional with cat": ((8, "cat"), IMAGE),
        "Net": ((), ((2, 3, 32, 32),)),
    },
    "test_norm_act_left_alone": dict.fromkeys(
        ("Reused", "Written", "Identity2", "ByMode", "Scaled", "Keeps"), ((8, 8), IMAGE)
    ),
    "test_lookalike": dict.fromkeys(("SlowGELU", "OwnSiLU", "QuickGELU", "HardSiLU", "ClippedGELU"), ((), ROWS)),
    "fuzz.convert_modules": {
        **{f"Functional {name}": ((name,), ROWS) for name in ("gelu", "silu", "relu", "softmax", "layer_norm", "tanh")},
        "MLP": ((WIDTH, nn.ReLU(), 0.1), ROWS), "MLP of GELU": ((WIDTH, nn.GELU(), 0.1), ROWS),
        "GatedMLP": ((WIDTH, nn.SiLU()), ROWS), "LimitedMLP": ((WIDTH, nn.SiLU()), ROWS),
        "BlockEnd": ((WIDTH,), (ROWS[0], ROWS[0])), "Attention": ((WIDTH, "hand"), ROWS),
        **{
            f"ConvBlock {how}": ((8, 2, nn.BatchNorm2d(8), nn.ReLU(), how), IMAGE)
            for how in ("plain", "sum", "inplace")
        },
    },
}  # fmt: skip


def kept(model, call) -> int:
    torch.manual_seed(1)
    with contextlib.suppress(RuntimeError):  # some forwards write to what backward needs
        call(model).sum().backward()  # before this, a module that writes out attention is only watched
    return hfnn.memory.saved_bytes(lambda: call(model)).total


def lines(name, model, call):
    model = model.train()
    stock = kept(copy.deepcopy(model), call)
    rows = hfnn.report(hfnn.convert(model, prefer="memory")).swapped
    folded = collections.Counter((re.sub(r"\b\d+\b", "*", row.name) or "(itself)", row.to) for row in rows)
    yield f"[{name}]  {stock} -> {kept(model, call)}"
    yield from (f"  {where}  x{count}  ->  {to}" for (where, to), count in folded.items())


def listing():
    transformers = importlib.import_module("transformers")
    ids, pixels = torch.randint(3, 64, (2, 8), generator=torch.Generator().manual_seed(1)), torch.randn(2, 3, 32, 32)
    for name, (config, more) in {**MODELS, **IMAGES}.items():
        torch.manual_seed(0)
        given = {**SMALL, **more, "attn_implementation": "eager"}
        model = getattr(transformers, name)(getattr(transformers, config)(**given))
        size = more.get("image_size", 32)
        given = {"pixel_values": pixels[..., :size, :size]} if name in IMAGES else {"input_ids": ids}
        yield from lines(name, model, lambda m, given=given: m(**given)[0])
    for file, classes in CLASSES.items():
        module = importlib.import_module(f"tests.{file}" if "." not in file else file.partition(".")[2])
        for name, (arguments, shapes) in classes.items():
            torch.manual_seed(0)
            made = getattr(module, name.split()[0])(*arguments)
            given = [torch.randn(shape, requires_grad=True) for shape in shapes]
            yield from lines(f"{file}: {name}", made, lambda m, given=given: m(*given))


if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parent / "fuzz"))
    warnings.simplefilter("ignore")
    for line in listing():
        print(line)
