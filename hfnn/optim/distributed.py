"""The norm of DTensor gradients, where each process has its shards."""

import torch
from torch import Tensor

from hfnn.optim.table import local


def check_one_mesh(params: list[Tensor]) -> None:
    """Raises ValueError if a norm over all these parameters would not be the same on all ranks.

    It is the same if all parameters are sharded or replicated over one mesh, or if none is a DTensor.
    """
    meshes = {None if local(p) is p else p.device_mesh for p in params}
    if len(meshes) > 1:
        found = ", ".join(sorted("no mesh (plain tensors)" if mesh is None else str(mesh) for mesh in meshes))
        raise ValueError(
            f"max_grad_norm: the parameters lie on {found}, and a norm takes one mesh for all; distribute the others "
            "over it with Replicate(), or clip by yourself and leave max_grad_norm=None"
        )


def total_squares(parts: list[tuple[tuple | None, Tensor]]) -> Tensor:
    """The sum of the squares of all gradients, (1,) float64 on the device of the first part.

    parts: (result of `sharding`, a sum over local parts, 0-dim), in the same order on all ranks. Shards over a
    dimension of the mesh are added up over it; replicas over it count once.
    """
    device, sums = parts[0][1].device, {}
    for shards, local_sum in parts:
        sums[shards] = sums.get(shards, 0.0) + local_sum.to(device)
    for shards, local_sum in sums.items():
        mesh, dims = shards or (None, ())
        for dim in dims:
            torch.distributed.all_reduce(local_sum, group=mesh.get_group(dim))
    return torch.stack(list(sums.values())).sum().view(1)
