"""The backend: Dynamo's graph -> without logits -> AOTAutograd with our partitioner -> Inductor."""

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import boxed_nop_preserve_node_meta

from hfnn.compiled import head
from hfnn.compiled.partition import Partitioner, partition


def hfnn(graph: torch.fx.GraphModule, inputs, mode: str | None = None, options: dict | None = None):
    """For `torch.compile(model, backend="hfnn")`. mode and options: as for the backend "inductor"."""
    from torch._inductor.compile_fx import compile_fx

    checked = torch._TorchCompileInductorWrapper(mode, options, dynamic=None).config  # RuntimeError for unknown ones
    patches = {**checked, "custom_partitioner_fn": Partitioner()}
    return _around(graph, inputs, lambda g, given: compile_fx(g, given, config_patches=patches))


def hfnn_eager(graph: torch.fx.GraphModule, inputs, **_):
    """As "hfnn", but runs torch's operators one by one: for debugging."""
    compiler = boxed_nop_preserve_node_meta
    return _around(graph, inputs, aot_autograd(fw_compiler=compiler, bw_compiler=compiler, partition_fn=partition))


def _around(graph, inputs, compile):
    graph, finish = head.without_logits(graph)
    run = compile(graph, inputs)

    def call(*args):
        args = head.computed(args)
        return finish(args, run(*args))

    return call
