"""Which batch fits a GPU? Three models of transformers and one of this file's own, planned without a GPU.

python examples/will_it_fit.py            # a GPU of 24 GiB
python examples/will_it_fit.py 80GiB 2    # a GPU of 80 GiB, models of two layers
"""

import itertools
import sys

import torch
import transformers
from torch import nn
from torch.nn import functional as F

import hfnn


class Recogniser(nn.Module):
    """Speech as 80 bands in time; convolutions; letters."""

    def __init__(self, layers: int):
        super().__init__()
        sizes = [80] + [512] * layers
        self.convolutions = nn.ModuleList(nn.Conv1d(i, o, 5, padding=2) for i, o in itertools.pairwise(sizes))
        self.norms = nn.ModuleList(nn.BatchNorm1d(512) for _ in range(layers))
        self.head = nn.Linear(512, 32)

    def forward(self, sound, letters):
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            sound = F.gelu(norm(convolution(sound)))
        return F.cross_entropy(self.head(sound.transpose(1, 2)).flatten(0, 1), letters.flatten())


def text(length):
    ids = torch.zeros(8, length, dtype=torch.long)
    return {"input_ids": ids, "labels": ids}


def main(memory: str = "24GiB", layers: str = "12") -> None:
    n = int(layers)
    with torch.device("meta"):  # no memory is taken, by models of any size
        models = {
            "GPT-2": (transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=n)), text(1024)),
            "BERT": (transformers.BertForMaskedLM(transformers.BertConfig(num_hidden_layers=n)), text(512)),
            "ViT-B/16": (
                transformers.ViTForImageClassification(transformers.ViTConfig(num_hidden_layers=n)),
                {"pixel_values": torch.zeros(8, 3, 224, 224), "labels": torch.zeros(8, dtype=torch.long)},
            ),
            "own": (Recogniser(n), {"sound": torch.zeros(8, 80, 1600), "letters": torch.zeros(8, 1600).long()}),
        }
    print(f"largest batch in {memory}, autocast to bfloat16, AdamW")
    for name, (model, inputs) in models.items():
        plan = hfnn.plan(model, modes=("stock", "converted"), autocast=torch.bfloat16, **inputs)
        batches = {row.mode: plan.largest(memory, row.mode) for row in plan.rows}
        print(f"{name:10}", "   ".join(f"{mode} {batch:5}" for mode, batch in batches.items()), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
