"""Training on many devices: data parallel, fully sharded and as a pipeline, on any backend of torch.distributed."""
