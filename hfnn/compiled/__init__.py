"""`torch.compile(model, backend="hfnn")`: Inductor, which keeps what recipes keep, and makes no logits for a loss."""
