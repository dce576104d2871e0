"""The norm of sharded gradients."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor


@torch.no_grad()
def clip_grad_norm_(model, max_norm: float, norm_type: float) -> Tensor:
    """The norm as in torch.nn.utils.clip_grad_norm_: 0-dim float32 (float64 for float64), the same on all ranks.

    Each rank's part of the sum of powers is added over the ranks that hold shards. Unsharded gradients and replicas of
    shards count once.
    """
    if not norm_type > 0:
        raise ValueError(f"norm_type={norm_type} is not accepted: give a positive number or inf")
    with_gradient = [p for p in model.module.parameters() if p.grad is not None]
    for p in with_gradient:
        if isinstance(p, DTensor) and p.grad.placements != p.placements:  # autograd's, of a parameter used directly
            p.grad = p.grad.redistribute(placements=p.placements)
    gradients = [p.grad for p in with_gradient]
    local = {sharded: [] for sharded in (True, False)}
    for gradient in gradients:
        is_sharded = isinstance(gradient, DTensor)
        local[is_sharded].append(gradient._local_tensor if is_sharded else gradient)
    infinite, group = norm_type == float("inf"), model.mesh.get_group(model.mesh.ndim - 1)
    parts = {kind: _power(tensors, norm_type, model.device) for kind, tensors in local.items()}
    if group.size() > 1:
        dist.all_reduce(parts[True], dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM, group=group)
    both = torch.stack(list(parts.values()))
    norm = both.max() if infinite else both.sum() ** (1 / norm_type)
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for tensors in local.values():
        for device in dict.fromkeys(t.device for t in tensors):
            here = [t for t in tensors if t.device == device]
            torch._foreach_mul_(here, scale.to(device))
    return norm


def _power(tensors: list[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """The largest magnitude, or the sum of magnitudes to the power of norm_type."""
    wide = torch.float64 if any(t.dtype is torch.float64 for t in tensors) else torch.float32
    tensors = [t for t in tensors if t.numel()]  # a rank may have no rows of some
    if not tensors:
        return torch.zeros((), dtype=wide, device=device)
    norms = torch._foreach_norm(tensors, norm_type, dtype=wide)
    norms = torch.stack([norm.to(device) for norm in norms])
    return norms.max() if norm_type == float("inf") else (norms**norm_type).sum()
