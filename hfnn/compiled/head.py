"""Losses of linear maps in a Dynamo graph: `linear_cross_entropy` instead of logits and their cross-entropy.

A linear map is left out if its result reaches one cross-entropy only through casts and flattening views, and nothing
else but the graph's outputs. If the logits are an output, the graph returns the hidden states, and
`hfnn.deferred.defer` makes the logits outside of the graph: they are computed only if they are read.
"""

import operator as python
from collections.abc import Callable

import torch
from torch import fx, nn

from hfnn.core.context import is_plain
from hfnn.deferred import Deferred, defer
from hfnn.ops.head import WORTH_LOGITS
from hfnn.ops.linear_cross_entropy_op import multiplying
from hfnn.ops.linear_cross_entropy_op import operator as linear_cross_entropy

LINEAR = (nn.functional.linear, torch._C._nn.linear)
FLAT = frozenset(("float", "to", "view", "reshape", "flatten", "contiguous"))
DEFAULTS = {"weight": None, "size_average": None, "ignore_index": -100, "reduce": None, "reduction": "mean"}
DEFAULTS |= {"label_smoothing": 0.0}


def without_logits(graph: fx.GraphModule) -> tuple[fx.GraphModule, Callable]:
    """The graph without logits that only a loss reads, and a function of (inputs, outputs) to run after each call."""
    places = {}
    for node in list(graph.graph.nodes):
        if node.op == "call_function" and node.target is nn.functional.cross_entropy:
            places |= _replace(graph.graph, node) or {}
    graph.recompile()
    numbers = {node: i for i, node in enumerate(graph.graph.find_nodes(op="placeholder"))}
    makers = [(at, *(numbers.get(n) for n in (weight, bias)), *how) for at, (weight, bias, *how) in places.items()]

    def finish(inputs, outputs):
        if not makers:
            return outputs
        outputs = list(outputs)
        for at, weight, bias, *how in makers:
            outputs[at] = _logits(outputs[at], inputs[weight], None if bias is None else inputs[bias], *how)
        return tuple(outputs)

    return graph, finish


def _logits(hidden, weight, bias, dtype, grad):
    with multiplying(hidden, dtype, (weight, bias)), torch.set_grad_enabled(grad):
        logits = defer(hidden, weight, bias, prefer="memory")
        return nn.functional.linear(hidden, weight, bias) if logits is None else logits


def computed(inputs) -> list:
    """Inputs of a graph, with unread logits computed."""
    return [x.computed() if type(x) is Deferred else x for x in inputs]


def _replace(graph: fx.Graph, loss: fx.Node) -> dict | None:
    """Replaces a loss by the operator: {output: (weight, bias, dtype, grad)} of logits to defer, or None if it
    stays."""
    options = {**DEFAULTS, **dict(zip(DEFAULTS, loss.args[2:], strict=False))}
    options |= {k: v for k, v in loss.kwargs.items() if k in DEFAULTS}
    logits, target = (loss.args[i] if i < len(loss.args) else loss.kwargs[n] for i, n in enumerate(("input", "target")))
    chain = _chain(logits)
    if chain is None or options["reduction"] not in ("mean", "sum") or options["size_average"] is not None:
        return None
    product, output = chain[-1], next(iter(graph.find_nodes(op="output")))
    hidden, weight, bias = _given(product)
    values = [_value(n) for n in (hidden, weight, bias, target, options["weight"])]
    if not _fits([_value(n) for n in chain], values) or options["reduce"] is not None:
        return None
    places = {i for i, n in enumerate(output.args[0]) if n is product}
    others = {user for node in chain for user in node.users} - {*chain, loss, output}
    returned = any(n in output.args[0] for n in chain[:-1])
    inputs = all(n is None or n.op == "placeholder" for n in (weight, bias))
    if others or returned or (places and not inputs):
        return None
    grad, product_grad = _value(loss).requires_grad, _value(product).requires_grad
    needs = [grad and v is not None and v.requires_grad for v in values[:3]]
    with graph.inserting_before(loss):
        rows = graph.call_method("reshape", (hidden, -1, values[1].shape[1]))
        rows.meta["example_value"] = values[0].reshape(-1, values[1].shape[1])
        numbers = options["reduction"], options["ignore_index"], float(options["label_smoothing"]), False
        dtypes = _value(product).dtype, _value(loss).dtype
        given = (rows, weight, bias, target, options["weight"], needs, *numbers, *dtypes)
        made = graph.call_function(linear_cross_entropy._opoverload, given)
        first = graph.call_function(python.getitem, (made, 0))
        first.meta["example_value"] = _value(loss)
    loss.replace_all_uses_with(first)
    graph.erase_node(loss)
    output.args = (tuple(hidden if i in places else n for i, n in enumerate(output.args[0])),)
    for node in chain:  # the last first; nothing reads them any more
        graph.erase_node(node)
    return dict.fromkeys(places, (weight, bias, dtypes[0], product_grad))


def _chain(node) -> list[fx.Node] | None:
    """The nodes from a linear map to the input of a loss, the last first; None if there is anything else in between."""
    found = []
    while isinstance(node, fx.Node):
        found.append(node)
        if node.op == "call_function" and node.target in LINEAR:
            return found
        if node.op != "call_method" or node.target not in FLAT:
            return None
        node = node.args[0]
    return None


def _given(product: fx.Node) -> tuple:
    names = ("input", "weight", "bias")
    given = dict(zip(names, product.args, strict=False)) | dict(product.kwargs)
    return tuple(given.get(name) for name in names)


def _value(node):
    return node.meta.get("example_value") if isinstance(node, fx.Node) else None


def _fits(chain, values) -> bool:
    """Whether the operator computes what the graph does. chain: the values of `_chain`."""
    hidden, weight, _, target, class_weight = values
    if any(v is None for v in (*chain, hidden, weight, target)):
        return False
    logits, product = chain[0], chain[-1]
    if any(v.dtype not in (product.dtype, logits.dtype) for v in chain):  # a cast in between may round
        return False
    if class_weight is not None and class_weight.dtype is not logits.dtype:  # torch's op raises, or autocast casts both
        return False
    if any(v is not None and v._version for v in values[:3]):  # written to: the operator runs later in the graph
        return False
    if not all(v is None or is_plain(v) for v in values) or target.dtype is not torch.int64:
        return False
    rows = logits.dim() == 2 and target.dim() == 1 and logits.shape[-1] == weight.shape[0]
    # In float16 small gradients of a mean would vanish, before a scaler's factor is known.
    sound = product.dtype is not torch.float16 and (class_weight is None or not class_weight.requires_grad)
    wide = logits.dtype in (product.dtype, torch.float32)
    if not (rows and sound and wide) or hidden.dim() < 2:
        return False
    logits = target.numel() * weight.shape[0]
    return not isinstance(logits, int) or logits >= WORTH_LOGITS  # no guard is added for a dynamic size
