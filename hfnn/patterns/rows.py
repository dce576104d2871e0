"""Patterns that `convert` finds in the graph of a module's forward, and the ops that compute them.

graph.py brings the forward to one spelling first, so that a row (row.py) is written once.

    down(act(gate(x)) * up(x)), packed or not       Llama, Gemma, T5 1.1, Phi3, GEGLU of diffusers
    fc2(dropout(relu(fc1(x))))                      T5, OPT
    norm(dropout(dense(x)) + residual)              BERT and its copies; without norm in ViT
    act(batch_norm(x)), act(batch_norm(x) + y)      ResNets, and most convolutional models

rewrite.py searches the graphs of modules for rows, and proves what it finds. The first row that fits takes its nodes.
"""

from hfnn.patterns import activation, feedforward, norm, norm_act, residual

ROWS = {
    row.pattern.__name__: row
    for row in (*feedforward.ROWS, *residual.ROWS, *norm_act.ROWS, *norm.ROWS, *activation.ROWS)
}
