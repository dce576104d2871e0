"""What `hfnn.plan` computes from: a step without values, and a replay of it in torch's caching allocator."""
