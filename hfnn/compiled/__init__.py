"""`torch.compile(model, backend="hfnn")`: Inductor that keeps only what recipes keep, and makes no logits for a
loss."""
