"""Captured models: a model's forward and backward are replayed as CUDA graphs, for models whose GPU waits for the host.

    hfnn.convert(model, capture=True)

captured.py puts `Capture` in front of a model's forward and decides for each call whether a graph is replayed. pair.py
has the graphs of one kind of call, forward and backward. watch.py tracks their dependencies. graph.py records.
"""
