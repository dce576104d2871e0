"""An accelerate script unaware of haiscale: torchrun --nproc-per-node 2 accelerated.py [cuda]."""

import json
import sys

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    accelerator = Accelerator(cpu=sys.argv[1:] != ["cuda"], gradient_accumulation_steps=2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    data = TensorDataset(torch.randn(64, 16), torch.randint(4, (64,)))
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=4))
    losses = []
    for _ in range(2):
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach()).mean().item())
    assert isinstance(accelerator.unwrap_model(model), nn.Sequential)
    assert accelerator.gather_for_metrics(["a"], use_gather_object=True) == ["a"] * accelerator.num_processes
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        print(json.dumps(losses))
    accelerator.end_training()


if __name__ == "__main__":
    main()
