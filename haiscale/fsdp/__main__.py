"""python -m haiscale.fsdp config.json --ranks 4 64: the memory of a training step of a language model, without GPUs.

config.json belongs to a transformers model (it is saved with the weights). The model is built without memory.
"""

import argparse
import json
from pathlib import Path

import torch

from haiscale.fsdp.predict import predict


def main() -> None:
    parser = argparse.ArgumentParser("python -m haiscale.fsdp", description=__doc__)
    parser.add_argument("config", type=Path, help="config.json of a causal language model of transformers")
    parser.add_argument("--ranks", type=int, nargs="+", default=[64])
    parser.add_argument("--batch", type=int, default=1, help="sequences per rank")
    parser.add_argument("--sequence", type=int, default=1024, help="tokens per sequence")
    parser.add_argument("--zero", type=int, default=3, choices=(1, 2, 3))
    parser.add_argument("--dtype", default="bfloat16", help="of gathered parameters; gradients are reduced in float32")
    parser.add_argument("--device", default="cpu", help="cuda (if torch is built for it) counts the GPU's attention")
    given = parser.parse_args()
    dtype = getattr(torch, given.dtype)
    for ranks in given.ranks:
        found = predict(
            lambda: _model(given.config),
            lambda model: _loss(model, given.batch, given.sequence, given.device),
            ranks,
            device=given.device,
            zero=given.zero,
            mixed_precision=(dtype, torch.float32),
        )
        print(found, end="\n\n")


def _model(path: Path) -> torch.nn.Module:
    import transformers

    fields = json.loads(path.read_text())
    config = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
    return transformers.AutoModelForCausalLM.from_config(config)


def _loss(model, batch: int, sequence: int, device: str) -> torch.Tensor:
    ids = torch.zeros(batch, sequence, dtype=torch.long, device=device)
    return model(ids, labels=ids, use_cache=False).loss


if __name__ == "__main__":
    main()
