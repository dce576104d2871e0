"""What a compiled forward keeps for backward: the same as hfnn's recipes, the results of products and attention.

torch's partitioner finds the cut between forward and backward with the fewest bytes, where some operators may be
recomputed. Here it may recompute everything except products, attention, random numbers, reductions to much smaller
tensors, and operators that are not torch's own. By default it keeps much more, to save time.
"""

import torch
from torch._functorch import config
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.custom_graph_pass import CustomPartitionerFn, get_hash_for_files
from torch.utils.checkpoint import CheckpointPolicy

aten = torch.ops.aten
# In addition to those that torch's partitioner treats as expensive.
PRODUCTS = frozenset(
    getattr(aten, name)
    for name in (
        "mm",
        "addmm",
        "bmm",
        "baddbmm",
        "addbmm",
        "addmv",
        "mv",
        "dot",
        "_grouped_mm",
        "_scaled_grouped_mm",
        "convolution",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable",
        "_flash_attention_forward",
        "_efficient_attention_forward",
        "_cudnn_attention_forward",
        "native_batch_norm",
        "_native_batch_norm_legit",
        "_native_batch_norm_legit_functional",
        "_batch_norm_with_update",
        "cudnn_batch_norm",
        "_embedding_bag",
        "sort",
        "topk",
        "cumsum",
    )
    if hasattr(aten, name)
)

# Two of torch's reasons against recomputation stay: `ban_recompute_reductions` and `ban_recompute_used_far_apart`. The
# latter keeps the residual stream. If it were recomputed, backward would begin with the sums of all layers at once.
AGAIN = {
    "ban_recompute_long_fusible_chains": False,
    "ban_recompute_materialized_backward": False,
    "ban_recompute_not_in_allowlist": False,
}


def partition(joint: torch.fx.GraphModule, inputs, **options) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
    """Forward and backward of a joint graph, for AOTAutograd's `partition_fn`. Requests of checkpoints are kept."""
    for node in joint.graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload) and _is_kept(node.target):
            node.meta.setdefault("recompute", CheckpointPolicy.MUST_SAVE)
    with config.patch(AGAIN):
        return min_cut_rematerialization_partition(joint, inputs, **options)


def _is_kept(op: torch._ops.OpOverload) -> bool:
    draws = torch.Tag.nondeterministic_seeded in op.tags  # a second run would give other numbers
    return op.overloadpacket in PRODUCTS or draws or op.namespace not in ("aten", "prims")


class Partitioner(CustomPartitionerFn):
    """`partition` for Inductor, whose cache asks for `uuid`."""

    def __call__(self, gm, joint_inputs, **kwargs):
        return partition(gm, joint_inputs, **kwargs)

    def uuid(self):
        return get_hash_for_files((__file__,))
