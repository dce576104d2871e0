"""Lightning's Trainer, unaware of haiscale: torchrun --nproc-per-node 2 lightning_trainer.py. One fit as usual, and one
in which training_step makes the backwards and steps of two optimizers."""

import json
import os
import tempfile
import warnings

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(lightning.LightningModule):
    def __init__(self, manual):
        super().__init__()
        self.automatic_optimization, self.losses = not manual, []
        self.halves = nn.ModuleList([nn.Sequential(nn.Linear(6, 12), nn.Tanh()), nn.Linear(12, 1)])

    def training_step(self, batch, index):
        x, y = batch
        loss = nn.functional.mse_loss(self.halves[1](self.halves[0](x)), y)
        self.losses.append(self.all_gather(loss.detach()).mean().item())
        if not self.automatic_optimization:
            optimizer = self.optimizers()[index % 2]
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def configure_optimizers(self):
        if self.automatic_optimization:
            return torch.optim.Adam(self.parameters(), lr=0.01)
        return [torch.optim.Adam(half.parameters(), lr=0.01) for half in self.halves]


def fit(manual):
    torch.manual_seed(0)
    model, data = Net(manual), TensorDataset(torch.randn(96, 6), torch.randn(96, 1))
    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, strategy=DDPStrategy(find_unused_parameters=manual), max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=tempfile.gettempdir(),
    )  # fmt: skip
    trainer.fit(model, DataLoader(data, 8))
    return model.losses


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    losses = fit(False) + fit(True)
    if os.environ["RANK"] == "0":
        print(json.dumps(losses))
