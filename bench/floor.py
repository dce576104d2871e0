"""The least bytes that a forward must keep for an exact backward in which no product runs twice.

The forward is written down op by op. What backward needs is either kept or made again of what is kept, by ops that are
no products; the cheapest choice is a minimum cut, as in the partitioner of torch.compile.
"""

import itertools
import re

import networkx
import torch
from torch._functorch.partitioners import get_default_op_list
from torch.utils._python_dispatch import TorchDispatchMode

from hfnn.memory.peak import tensors
from hfnn.memory.saved import Record, nodes, packed, unpack

PRODUCTS = {packet.__name__ for packet in get_default_op_list().compute_intensive_ops} | {
    "baddbmm", "addbmm", "addmv", "mv", "dot", "_grouped_mm", "_scaled_grouped_mm", "_ctc_loss", "_cdist_forward",
    "sort", "topk", "_unique2", "grid_sampler_2d", "mkldnn_rnn_layer", "_embedding_bag", "deform_conv2d",
}  # fmt: skip
PRODUCT = re.compile(r"_scaled_dot_product_.*|upsample_.*|_thnn_fused_.*|_fft_.*|linalg_.*|.*convolution.*|.*quantize.*")
# A loss is one number: forward can make its gradient instead, so what it is made of is not kept.
LOSSES = {"NllLoss", "NllLoss2D", "LogSoftmax"}


class Written(TorchDispatchMode):
    """What made each tensor: of what, and whether that may be repeated. A tensor is (its storage, writes to it)."""

    def __init__(self, free):
        super().__init__()
        self.free = {t.untyped_storage()._cdata for t in free}
        self.held, self.writes, self.made = {}, {}, {}

    def place(self, tensor):
        storage = tensor.untyped_storage()
        key = storage._cdata
        self.held.setdefault(key, storage)  # while it is held, no other gets its address
        return key, self.writes.get(key, 0)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        inputs = {self.place(t) for t in tensors((args, kwargs))}
        result = func(*args, **kwargs)
        for argument, value in itertools.zip_longest(func._schema.arguments, args):
            if argument is None or argument.alias_info is None or not argument.alias_info.is_write:
                continue
            for t in tensors(kwargs.get(argument.name, value)):
                key, count = self.place(t)
                self.writes[key] = count + 1
        again = not self._is_product(func)
        for t in tensors(result):
            place = self.place(t)
            if place not in inputs:
                self.made[place] = (again, inputs)
        return result

    def _is_product(self, func):
        name = func.overloadpacket.__name__
        tags = {torch.Tag.nondeterministic_seeded, torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
        return name in PRODUCTS or bool(PRODUCT.fullmatch(name)) or not tags.isdisjoint(func.tags)


class _Noted(Record):
    def __init__(self, written):
        super().__init__()
        self.written = written

    def pack(self, tensor):
        kept = super().pack(tensor)
        kept.place = self.written.place(tensor)
        return kept


def floor(forward, parameters) -> int:
    """Bytes; forward returns the loss."""
    written = Written(parameters)
    record = _Noted(written)
    with torch.autograd.graph.saved_tensors_hooks(record.pack, unpack), written:
        loss = forward()
    of_loss, others = set(), set()
    for op, node in nodes(loss):
        for kept in packed(node):
            (of_loss if op in LOSSES else others).add(kept.place)
    return cut(written, others)


def cut(written, needed) -> int:
    graph, queue, seen = networkx.DiGraph(), [p for p in needed if p[0] not in written.free], set()
    graph.add_nodes_from(("source", "sink"))
    for place in queue:
        graph.add_edge((place, "out"), "sink")
    while queue:
        place = queue.pop()
        if place in seen:
            continue
        seen.add(place)
        again, inputs = written.made.get(place, (False, ()))
        graph.add_edge((place, "in"), (place, "out"), capacity=written.held[place[0]].nbytes())
        if not again:
            graph.add_edge("source", (place, "in"))
            continue
        for one in inputs:
            if one[0] not in written.free and one != place:
                graph.add_edge((one, "out"), (place, "in"))
                queue.append(one)
    value, _ = networkx.minimum_cut(
        graph, "source", "sink", flow_func=networkx.algorithms.flow.boykov_kolmogorov
    )
    return value
