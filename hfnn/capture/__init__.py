"""Captured models: where the GPU waits for the host, a model's forward and backward are replayed as CUDA graphs.

    hfnn.convert(model, capture=True)

captured.py puts `Capture` in front of a model's forward and decides, call by call, whether a graph is replayed;
pair.py has the graphs of one kind of call, forward and backward; watch.py knows what they depend on; graph.py records.
"""
