"""The minimum that a forward must keep for an exact backward in which no product runs twice.

The forward is recorded op by op. Everything that backward needs is either kept, or rebuilt from kept tensors by ops
that are not products. The cheapest choice is a minimum cut of that graph, as in the partitioner of torch.compile.
"""

import itertools
from dataclasses import dataclass

import networkx
import torch
from torch import nn
from torch._functorch.partitioners import get_default_op_list
from torch.utils._python_dispatch import TorchDispatchMode

from hfnn.memory.keepers import Spy
from hfnn.memory.peak import tensors
from hfnn.memory.saved import nodes, packed, unpack

# Ops that the partitioner recomputes, and ops that it sees decomposed into such ops.
AGAIN = {packet.__name__ for packet in get_default_op_list().recomputable_ops} | {
    "native_layer_norm", "native_group_norm", "native_batch_norm", "_native_batch_norm_legit", "_fused_rms_norm",
    "_native_batch_norm_legit_no_training", "_softmax", "_log_softmax", "_safe_softmax", "log_sigmoid_forward",
    "hardswish", "hardswish_", "_weight_norm_interface", "linalg_vector_norm", "cat", "stack", "repeat", "unfold",
    "constant_pad_nd", "roll", "flip", "copy_", "detach", "split_with_sizes", "tril", "masked_fill_", "fill_", "zero_",
    "unbind", "transpose", "index_select", "cumsum", "logsumexp", "prod", "glu", "norm", "diagonal", "ones_like",
    "max_pool2d_with_indices", "max_pool3d_with_indices", "avg_pool1d", "avg_pool2d", "_adaptive_avg_pool2d",
    "adaptive_max_pool2d",
}  # fmt: skip
# A loss is one number: forward can continue to the gradient of the last product's input.
LOSSES = {"NllLoss", "NllLoss2D", "LogSoftmax"}


class Written(TorchDispatchMode):
    """The origin of each tensor: (whether it may be recomputed, its sources, its module). A tensor is (its storage, the
    number of writes to it).
    """

    def __init__(self, spy, free):
        super().__init__()
        self.spy, self.free = spy, {t.untyped_storage()._cdata for t in free}
        self.held, self.writes, self.made, self.ops = {}, {}, {}, {}

    def place(self, tensor):
        storage = tensor.untyped_storage()
        key = storage._cdata
        self.held.setdefault(key, storage)  # while it is held, its address is not reused
        return key, self.writes.get(key, 0)

    def size(self, place):
        return 0 if place[0] in self.free else self.held[place[0]].nbytes()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        inputs = {self.place(t) for t in tensors((args, kwargs))}
        result = func(*args, **kwargs)
        for argument, value in itertools.zip_longest(func._schema.arguments, args):
            if argument is not None and argument.alias_info is not None and argument.alias_info.is_write:
                for t in tensors(kwargs.get(argument.name, value)):
                    key, count = self.place(t)
                    self.writes[key] = count + 1
        name = func.overloadpacket.__name__
        for t in tensors(result):
            place = self.place(t)
            if place not in inputs:
                self.made[place] = name in AGAIN, inputs, self.spy.running[-1]
                self.ops[place] = name
        return result


@dataclass
class Floor:
    """total: bytes; by_module: the module that saves them, or makes them if others are saved today; savable: tensors
    that are saved but could be rebuilt, by (module that saves it, op that made it, op that saves it).
    """

    total: int
    by_module: dict[str, int]
    savable: dict[tuple[str, str, str], int]


def floor(model: nn.Module, forward) -> Floor:
    """forward returns the loss."""
    spy = Spy(model)
    written = Written(spy, model.parameters())

    order = itertools.count()

    def pack(tensor):
        kept = spy.pack(tensor)
        kept.place, kept.order = written.place(tensor), next(order)
        return kept

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack), spy.watching(), written:
        loss = forward()
    found = [(kept.order, kept, op) for op, node in nodes(loss) for kept in packed(node)]
    of_loss = {kept.place for _, kept, op in found if op in LOSSES}
    needed, by = {}, {}
    for _, kept, op in sorted(found, key=lambda one: one[0]):
        if op not in LOSSES:
            needed.setdefault(kept.place, kept.module)
            by.setdefault(kept.place, set()).add(op)
    least = cut(written, needed)
    by_module = {}
    for place in least:
        module = needed.get(place) or written.made.get(place, (0, 0, ""))[2]
        by_module[module] = by_module.get(module, 0) + written.size(place)
    head = before_loss(written, of_loss)
    by_module[""] = by_module.get("", 0) + head
    savable = {}
    for place in needed.keys() - least:
        key = needed[place], written.ops.get(place, "leaf"), "+".join(sorted(by[place]))
        savable[key] = savable.get(key, 0) + written.size(place)
    return Floor(sum(by_module.values()), by_module, savable)


def before_loss(written, of_loss) -> int:
    """Bytes of the gradient that a loss can compute in forward: of the last product's input, or of its output."""
    found = 0
    for place in of_loss:
        while written.made.get(place, (False, ()))[0] and written.made[place][1]:
            place = max(written.made[place][1], key=written.size)
        _, inputs, _ = written.made.get(place, (False, (), ""))
        sizes = [size for size in map(written.size, inputs) if size]
        found = max(found, min([written.size(place), max(sizes, default=written.size(place))]))
    return found


def cut(written, needed) -> set:
    """The tensors that are kept in the cheapest choice."""
    graph, queue, seen = networkx.DiGraph(), [p for p in needed if written.size(p)], set()
    graph.add_nodes_from(("source", "sink"))
    graph.add_edges_from(((place, "out"), "sink") for place in queue)
    while queue:
        place = queue.pop()
        if place in seen:
            continue
        seen.add(place)
        again, inputs, _ = written.made.get(place, (False, (), ""))
        # Among cuts of equal cost, the one through tensors that are saved today.
        graph.add_edge((place, "in"), (place, "out"), capacity=4096 * written.size(place) + (place not in needed))
        if not again:
            graph.add_edge("source", (place, "in"))
            continue
        for one in inputs:
            if written.size(one) and one != place:
                graph.add_edge((one, "out"), (place, "in"))
                queue.append(one)
    method = networkx.algorithms.flow.boykov_kolmogorov
    _, (upper, _) = networkx.minimum_cut(graph, "source", "sink", flow_func=method)
    return {place for place in seen if (place, "in") in upper and (place, "out") not in upper}
