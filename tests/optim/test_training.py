"""A small GPT on real text learns with states of 8 and 4 bits as with float32, within the variation of seeds."""

import pydoc_data.topics

import pytest
import torch
from torch import nn

import hfnn

STEPS, WIDTH, LENGTH, BATCH, SEEDS = 150, 96, 48, 16, 3
TEXT = torch.frombuffer(bytearray("".join(pydoc_data.topics.topics.values()).encode()), dtype=torch.uint8)


class Gpt(nn.Module):
    """Two causal blocks over bytes."""

    def __init__(self):
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(2)
        )
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)

    def forward(self, x, target):
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        y = self.bytes(x) + self.places.weight
        for block in self.blocks:
            y = block(y, mask, is_causal=True)
        return nn.functional.cross_entropy(self.head(self.norm(y)).flatten(0, 1), target.flatten())


def learnt(seed, **options) -> float:
    """The mean loss of the last steps."""
    torch.manual_seed(seed)
    model, losses = Gpt(), []
    optimizer = hfnn.optim.AdamW(model.parameters(), lr=3e-3, **options)
    for _ in range(STEPS):
        starts = torch.randint(len(TEXT) - LENGTH - 1, (BATCH, 1))
        batch = TEXT[starts + torch.arange(LENGTH + 1)].long()
        loss = model(batch[:, :-1], batch[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert optimizer._ran == ("cpp",)
    assert losses[0] > 5
    return sum(losses[-20:]) / 20


@pytest.mark.rest
def test_within_the_band_of_seeds():
    found = {form: [learnt(seed, state_dtype=form) for seed in range(SEEDS)] for form in (None, "8bit", "4bit")}
    low, high = min(found[None]), max(found[None])
    for losses in found.values():
        assert low - (high - low) / 2 <= sum(losses) / SEEDS <= high + (high - low) / 2, found
